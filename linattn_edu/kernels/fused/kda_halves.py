"""Kimi Delta Attention in halves where the numbers that 16 bit round cancel, and nowhere else."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate_bwd import launch_gate_bwd
from linattn_edu.kernels.delta.kda_intra import kda_intra
from linattn_edu.kernels.delta.l2norm import EPS, unit_of
from linattn_edu.kernels.fused.cancel import those
from linattn_edu.kernels.fused.kda_bwd import gradients, launch_left, near_of, of_chunks
from linattn_edu.kernels.fused.kda_fwd import kda_gate_prepare, launch_scan
from linattn_edu.kernels.fused.kda_fwd import scanned as scanned_forth
from linattn_edu.kernels.fused.kda_scans import kda_gates, launch_scans, scanned
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import block, chunk_of, listed, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def unit_rows_kernel(
    x_ptr,  # [B, T, H, K]
    y_ptr,  # [B, T, H, K] fp32 out
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    eps, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * H).

    Reference: linattn_edu.reference.fused.kda_halves.unit_rows.
    """
    pid = listed(tl.program_id(0), items_ptr, 1)
    if pid < 0:
        return
    i_h, _, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, H, BT)
    i, o_t, o_k = (first * H + i_h) * K, tl.arange(0, BT), tl.arange(0, BK)
    b_x = load_tile(x_ptr + i, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
    # eq:delta-l2norm   y = x / sqrt(sum x^2 + eps)
    store_tile(y_ptr + i, unit_of(b_x, eps)[0], o_t, o_k, H * K, n_t, K)


def unit_rows(
    x: Tensor, items: Tensor | None = None, *, chunk_size: int, packing: Packing | None = None
) -> Tensor:
    """Launch unit_rows_kernel; arguments and result as in the reference."""
    y, (T, H, K) = torch.empty_like(x, dtype=torch.float32), x.shape[1:]
    NT, *chunks = chunk_args(x, chunk_size, packing)
    unit_rows_kernel[(NT * H,)](x, y, items, *chunks, T, EPS, H, K, chunk_size, block(K))
    return y


def _fine(
    rows: tuple[Tensor, Tensor], raw: tuple[Tensor, Tensor] | None, lists: tuple[Tensor, Tensor],
    packed: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k as heads read them that cancel.  lists: what `cancels` found, and the items."""
    if raw is None:
        return rows
    found, items = lists
    if raw[0].shape[2] < found.shape[1]:
        items = those(found, raw[0], **packed)[1]
    return tuple(unit_rows(x, items, **packed) for x in raw)


def kda_halves(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, write: Tensor | None = None,
    initial_state: Tensor | None = None, raw: tuple[Tensor, Tensor] | None = None, *, scale: float,
    output_final_state: bool = False, lower_bound: float | None = None,
    safe_bound: float | None = None, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch the kernels of the forward pass on all heads, but the scan on those that do not
    cancel; then those of halves on the others; arguments and result as in the reference.
    """
    erase, strength = (None, beta) if write is None else (beta, write)
    packed = {"chunk_size": chunk_size, "packing": packing}
    gate, bounds = (g, A_log, dt_bias), {"lower_bound": lower_bound}
    gc, P, A, kd, kg, qg, found = kda_gate_prepare(
        q, k, beta, *gate, safe_bound=safe_bound, cancelling=True, **bounds, **packed
    )
    ways, items, _ = those(found, v, **packed)
    pieces, o, last = scanned_forth(qg, v, chunk_size, output_final_state, packing)
    given, places = (v, strength, gc), ((o, last), scale)
    launch_scan((qg, kg, kd, *given, P, A, initial_state), *places, False, found, pieces, packing)
    q, k = _fine((q, k), raw, (found, items), packed)
    _, kd, kg, _ = kda_gates(
        q, k, *gate, erase, fine=True, items=items, into=(gc, qg), **bounds, **packed
    )
    options = {"lower_bound": safe_bound, "precision": "halves", "items": items}
    fine = kda_intra(q, k, beta, gc, **options, **packed)
    launch_scan((qg, kg, kd, *given, *fine, initial_state), *places, True, ways, pieces, packing)
    return o, pieces.last(last), P, A, *fine, found


def kda_halves_bwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, inner: tuple[Tensor, Tensor],
    fine: tuple[Tensor, Tensor], cancels: Tensor, do: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, write: Tensor | None = None,
    initial_state: Tensor | None = None, dht: Tensor | None = None,
    raw: tuple[Tensor, Tensor] | None = None, *, scale: float, lower_bound: float | None = None,
    chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch the kernels of the backward pass on the heads that do not cancel, those of halves on
    the others, and gate_bwd_kernel on all; arguments and result as in the reference.
    """
    erase, strength = (None, beta) if write is None else (beta, write)
    packed = {"chunk_size": chunk_size, "packing": packing}
    ways, items, others = those(cancels, v, **packed)
    gc, qg = (torch.empty_like(g, dtype=x) for x in (torch.float32, k.dtype))
    pieces, dv, dh0 = scanned(v, strength, gc, chunk_size, packing)
    out, near, summed = None, None, False
    rows = (q, k), _fine((q, k), raw, (cancels, items), packed)
    for halves, (P, A), skipped, some in (  # first what takes more memory, beside no gradients
        (True, fine, ways, items), (False, inner, cancels, others)
    ):  # fmt: skip
        (own_q, own_k), into = rows[halves], (gc, qg)
        options = {"fine": halves, "items": some, "into": into, "lower_bound": lower_bound}
        _, kd, kg, _ = kda_gates(own_q, own_k, g, A_log, dt_bias, erase, **options, **packed)
        given = qg, kg, kd, v, strength, gc, P, A, do, initial_state, dht
        h, v_new, dh, Z = launch_scans(given, (dv, dh0), scale, halves, skipped, pieces, packing)
        del given, kd, kg
        if out is None:
            out, near = gradients(q, v, beta, gc, write), near_of(k, h).zero_()
        given = own_q, own_k, v, beta, gc, h, v_new, do, dh, Z, write
        summed |= launch_left(given, out, near, scale, chunk_size, packing, halves, some)
        del given, h, v_new, dh, Z
    dq, dk, dbeta, dgc, *of_values = of_chunks(out, q)
    near = near if summed else None
    dgates = launch_gate_bwd(dgc, g, A_log, dt_bias, near, lower_bound, chunk_size, packing)
    return dq, dk, dbeta, *dgates, *(of_values or (dv,)), pieces.first(dh0)
