"""Chapter 12, stage gate_bwd: the adjoint of the accumulated decay, and of a layer's gate.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 12

The layer computes the log decay g = -e^A_log softplus(a + dt_bias) of each token, and stage
gate_cumsum accumulates it in each chunk. dgc [B, T, HV], the gradient of the accumulated log in
natural units; the raw gate a [B, T, HV]; A_log, dt_bias [HV]. Out: da [B, T, HV]; dA_log and
ddt_bias [HV].
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from linattn_edu.kernels.delta.gate import softplus
from linattn_edu.kernels.tiles import cdiv, chunk_of, load_row
from linattn_edu.reference.tiles import from_chunks, to_chunks


def gate_bwd_torch(dgc, a, A_log, dt_bias, *, chunk_size):
    x, rate = a + dt_bias, A_log.exp()
    # eq:delta-dg
    dg = ...  # blank: sum over later tokens
    dg = from_chunks(dg, a.shape[1])
    # eq:delta-dgate
    da = ...  # blank: [B, T, HV]
    # eq:delta-dgate-sums
    dA_log = ...  # blank: [HV]
    return da, dA_log, da.sum((0, 1))


@triton.jit
def gate_bwd_kernel(dgc_ptr, a_ptr, A_log_ptr, bias_ptr, da_ptr, dA_log_ptr, dbias_ptr,
                    chunks, T, HV: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """One program: all chunks of a head, one after the other.  Grid (HV)."""
    i_h, o_t = tl.program_id(0), tl.arange(0, BT)
    b_rate, b_bias = tl.exp(tl.load(A_log_ptr + i_h)), tl.load(bias_ptr + i_h)
    b_dA, b_db = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    for i_c in range(chunks):
        _, _, first, n_t = chunk_of(i_c * HV + i_h, None, None, T, HV, BT)
        i = first * HV + i_h
        b_dgc = load_row(dgc_ptr + i, o_t, HV, n_t)  # [BT]; missing tokens are 0
        b_x = load_row(a_ptr + i, o_t, HV, n_t) + b_bias  # [BT]
        # eq:delta-dg
        b_dg = ...  # blank: [BT]
        # eq:delta-dgate
        b_da = ...  # blank: [BT]
        tl.store(da_ptr + i + o_t * HV, b_da, mask=o_t < n_t)
        # eq:delta-dgate-sums
        b_dA -= ...  # blank: [BT], summed over tokens after the loop
        b_db += b_da
    tl.store(dA_log_ptr + i_h, tl.sum(b_dA, 0))
    tl.store(dbias_ptr + i_h, tl.sum(b_db, 0))


def gate_bwd_triton(dgc, a, A_log, dt_bias, *, chunk_size):
    B, T, HV = a.shape
    da, dA_log, ddt_bias = (torch.empty_like(x) for x in (a, A_log, dt_bias))
    gate_bwd_kernel[(HV,)](
        dgc, a, A_log, dt_bias, da, dA_log, ddt_bias, B * cdiv(T, chunk_size), T, HV, BT=chunk_size
    )
    return da, dA_log, ddt_bias
