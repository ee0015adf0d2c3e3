"""Kimi Delta Attention in halves where the numbers that 16 bit round cancel, and nowhere else."""

from torch import Tensor

from linattn_edu.reference.delta.gate_bwd import gate_bwd
from linattn_edu.reference.delta.l2norm import l2norm
from linattn_edu.reference.fused.kda_bwd import kda_fused_intra_bwd
from linattn_edu.reference.fused.kda_fwd import kda_fused_scan, kda_gate_prepare
from linattn_edu.reference.fused.kda_scans import kda_fused_scans, kda_gates
from linattn_edu.reference.tiles import chosen, compute_dtype


def unit_rows(x: Tensor, items: Tensor | None = None, *, chunk_size: int) -> Tensor:
    """l2norm of rows that 16 bit would round: a rounded key has another length.

    Args:
        x: [B, T, H, K], q or k. items: of `those`, the chunks of heads that are wanted.
    Returns:
        [B, T, H, K] in fp32 (fp64 for fp64 input).
    Source: chapter 11b.
    """
    # eq:delta-l2norm   y = x / sqrt(sum x^2 + eps)
    return l2norm(x.to(compute_dtype(x)))[0]


def kda_halves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Tensor | None = None,
    initial_state: Tensor | None = None,
    raw: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    safe_bound: float | None = None,
    chunk_size: int,
) -> tuple[Tensor | None, ...]:
    """The forward pass in fused stages, where beta may be beyond 1: kda_gate_prepare and
    kda_fused_scan. Of heads that cancel nothing in between is rounded to 16 bit.

    Args:
        q, k, beta, g, A_log, dt_bias, lower_bound, safe_bound: as in kda_gate_prepare.
        v, initial_state: as in kda_fused_scan. write: the write gate [B, T, HV, V], where beta is
            an erase gate.
        raw: q and k before they were divided by their lengths, or None: heads that cancel read
            unit_rows of these.
    Returns:
        o and the final state of kda_fused_scan, P and A of kda_gate_prepare, in k.dtype and in
        fp32 (fp64 for fp64 input), the latter for heads that cancel; and `cancels`, which these
        are, of q/k heads with all their value heads.
    Source: chapter 11b.
    """
    strength = beta if write is None else write
    options = {"chunk_size": chunk_size, "lower_bound": lower_bound, "safe_bound": safe_bound}
    scan = {"scale": scale, "output_final_state": output_final_state}
    made = []
    for rows in ((q, k), _fine(q, k, raw, chunk_size)):
        gc, P, A, kd, kg, qg, some = kda_gate_prepare(
            *rows, beta, g, A_log, dt_bias, cancelling=True, **options
        )
        o, S = kda_fused_scan(qg, kg, kd, v, strength, gc, P, A, initial_state, **scan)
        made.append((o, S, P, A, some))
    (o, S, P, A, found), (o_fine, S_fine, *fine, _) = made
    o, S = chosen(-1 - found, o_fine, o), chosen(-1 - found, S_fine, S, 1)
    return o, S, P, A, *fine, found


def _fine(q: Tensor, k: Tensor, raw: tuple[Tensor, Tensor] | None, chunk_size: int) -> list[Tensor]:
    """q and k as heads read them that cancel."""
    if raw is None:
        return [x.to(compute_dtype(x)) for x in (q, k)]
    return [unit_rows(x, chunk_size=chunk_size) for x in raw]


def kda_halves_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    inner: tuple[Tensor, Tensor],
    fine: tuple[Tensor, Tensor],
    cancels: Tensor,
    do: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Tensor | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    raw: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
    lower_bound: float | None = None,
    chunk_size: int,
) -> tuple[Tensor | None, ...]:
    """The backward pass of kda_halves: kda_gates, kda_fused_scans and kda_intra_gate_bwd.

    Args:
        q, k, v, beta, g, A_log, dt_bias, write, initial_state, raw, lower_bound: those of
            kda_halves.
        inner, fine, cancels: P and A, in k.dtype and not rounded, and which heads cancel, from
            kda_halves. do: [B, T, HV, V], gradient of o. dht: of the final state, or None.
    Returns:
        dq, dk, dbeta, dg, dA_log, ddt_bias, dv, with write its gradient, and dh0; with raw dq and
        dk of the divided rows.
    Source: chapter 11b.
    """
    erase, strength = (None, beta) if write is None else (beta, write)
    options = {"scale": scale, "chunk_size": chunk_size}
    gate = {"lower_bound": lower_bound, "chunk_size": chunk_size}
    made = []
    wide = _fine(q, k, raw, chunk_size), v.to(compute_dtype(v)), fine
    for rows, values, (P, A) in (((q, k), v, inner), wide):
        gc, kd, kg, qg = kda_gates(*rows, g, A_log, dt_bias, erase, **gate)
        *states, Z, dv, dh0 = kda_fused_scans(
            qg, kg, kd, v, strength, gc, P, A, do, initial_state, dht, scale=scale
        )
        h, v_new, dh = states
        left = kda_fused_intra_bwd(*rows, values, beta, gc, h, v_new, do, dh, Z, write, **options)
        dq, dk, dbeta, dgc, *of_values = left
        dv, *dwrite = of_values or (dv,)
        made.append((dq, dk, dbeta, dgc, dv, *dwrite, dh0))
    heads = *(2,) * (len(made[0]) - 1), 1
    pairs = zip(made[1], made[0], heads, strict=True)
    dq, dk, dbeta, dgc, *of_values, dh0 = (
        chosen(-1 - cancels, x, y, axis).to(y.dtype) for x, y, axis in pairs
    )
    dgates = gate_bwd(dgc, g, A_log, dt_bias, **gate)
    return dq, dk, dbeta, *dgates, *of_values, dh0
