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
    dg = to_chunks(dgc, chunk_size).flip(-1).cumsum(-1).flip(-1)  # blank: sum over later tokens
    dg = from_chunks(dg, a.shape[1])
    # eq:delta-dgate
    da = -rate * torch.sigmoid(x) * dg  # blank: [B, T, HV]
    # eq:delta-dgate-sums
    dA_log = (dg * -rate * F.softplus(x)).sum((0, 1))  # blank: [HV]
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
        b_dg = tl.cumsum(b_dgc, axis=0, reverse=True)  # blank: [BT]
        # eq:delta-dgate
        b_da = -b_rate * tl.sigmoid(b_x) * b_dg  # blank: [BT]
        tl.store(da_ptr + i + o_t * HV, b_da, mask=o_t < n_t)
        # eq:delta-dgate-sums
        b_dA -= b_dg * b_rate * softplus(b_x)  # blank: [BT], summed over tokens after the loop
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


# hint 1
# The log decay of a token is a term of every accumulated log from that token to the end of its
# chunk, and of none in other chunks. So its gradient is a sum over the later tokens of the chunk,
# the token included: a running sum from the end. The rest is the chain rule for g = -e^A_log
# softplus(a + dt_bias).
#
# hint 2
# dg_i is the sum of dgc_j over j >= i. The derivative of softplus is the sigmoid, so da = -e^A_log
# sigmoid(a + dt_bias) dg. The derivative of g by A_log is g itself, since e^A_log is its own
# derivative: dA_log is the sum of dg times g over all tokens. dt_bias is added to a, so its
# gradient is the sum of da. PyTorch has no running sum from the end; turn the axis around, sum,
# turn it back.
#
# hint 3
# PyTorch:
#     dg = to_chunks(dgc, chunk_size).flip(-1)...
#     da = -rate * torch.sigmoid(...) * ...
#     dA_log = (dg * ...).sum((0, 1))
# Kernel:
#     b_dg = tl.cumsum(b_dgc, axis=0, ...)
#     b_da = -b_rate * tl.sigmoid(...) * ...
#     b_dA -= b_dg * ...
