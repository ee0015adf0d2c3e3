"""Stage kda_scans: the states again, and their gradients, which read nothing of each other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, piece_map
from linattn_edu.kernels.delta.cp_merge_bwd import cp_merge_bwd, piece_map_bwd
from linattn_edu.kernels.delta.state import state_kernel
from linattn_edu.kernels.delta.state_bwd import kda_state_bwd_kernel
from linattn_edu.kernels.pieces import by_maps
from linattn_edu.kernels.routes import scan_launch
from linattn_edu.kernels.rows import CHANNEL_CONFIGS as CONFIGS
from linattn_edu.kernels.rows import states
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_scans_kernel(
    qg_ptr, kg_ptr, w_ptr,  # [B, T, HV, K]
    u_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    h0_ptr,  # [N, HV, K, V] or None
    dht_ptr,  # [N, HV, K, V] or None
    h_ptr,  # [B, NT, HV, K, V] out
    v_new_ptr,  # [B, T, HV, V] out
    dh_ptr,  # [B, NT, HV, K, V] out
    dv_ptr,  # [B, T, HV, V] out
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    stride_t,  # of gc, between tokens
    stride_h,  # and between heads
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The programs of state_bwd, which take longer, and those of state.

    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.delta.kda_scans.
    """
    half = tl.num_programs(0) // 2
    if tl.program_id(0) < half:
        # eq:kda-dv-out   dv_new = scale P^T dO
        # eq:delta-dv-new   dv_new += diag(2^(gc_last - gc)) K dS
        # eq:delta-ds   dS <- 2^gc_last dS + scale (diag(2^gc) Q)^T dO - w^T dv_new
        kda_state_bwd_kernel(
            qg_ptr, kg_ptr, w_ptr, gc_ptr, do_ptr, P_ptr, dht_ptr, dh_ptr, dv_ptr, dh0_ptr, scale,
            cu_ptr, offsets_ptr, T, stride_t, stride_h, HV, K, V, BT, BK, BV,
        )  # fmt: skip
    else:
        # eq:delta-v-new   v_new = u - w S
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        state_kernel(
            kg_ptr, w_ptr, u_ptr, gc_ptr, h0_ptr, None, None, h_ptr, v_new_ptr, None, cu_ptr,
            offsets_ptr, T, stride_t, stride_h, half,
            HV, HV, K, V, BT, BK, BV, CHANNEL=True, WHOLE=False,
        )  # fmt: skip


def kda_scans(
    qg: Tensor, kg: Tensor, w: Tensor, u: Tensor, gc: Tensor, P: Tensor, do: Tensor,
    initial_state: Tensor | None = None, dht: Tensor | None = None, *, scale: float,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch kda_scans_kernel; arguments and result as in the reference."""
    HV, K = kg.shape[2:]
    V, chunk_size = u.shape[3], P.shape[3]
    pieces = by_maps(kg, HV, V, chunk_size, packing)
    given, options = (kg, w, u, gc), {"chunk_size": chunk_size}
    initial_state = pieces.entering(cp_merge, piece_map, given, initial_state, **options)
    given = qg, kg, w, gc, do, None, None, P
    dht = pieces.entering(cp_merge_bwd, piece_map_bwd, given, dht, scale=scale, **options)
    h, dh = (kg.new_empty(*states(kg, chunk_size, packing), HV, K, V) for _ in range(2))
    v_new, dv_new = torch.empty_like(u), torch.empty_like(u)
    dh0 = kg.new_empty(pieces.N, HV, K, V, dtype=torch.float32)
    grid, config = scan_launch(CONFIGS, kg, 2 * pieces.N * HV, V)
    kda_scans_kernel[grid](
        qg, kg, w, u, gc, P, do, initial_state, dht, h, v_new, dh, dv_new, dh0, scale,
        *pieces.places, *gc.stride()[1:3], HV, K, V, BT=chunk_size, **config,
    )  # fmt: skip
    return h, v_new, dh, dv_new, pieces.first(dh0)
