"""The general delta rule by the names of its chunked form, for training and prefill."""

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.dplr.recurrent import run


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: None = None,
    lower_bound: float | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The general delta rule, by the name that training and prefill call.

    The function of :func:`fused_recurrent_dplr_delta_rule`, and its kernels: there are none that
    take a chunk of tokens at a time. So it goes through a sequence token by token in both passes,
    one program for 32 columns of a state, 16 in the backward pass: with few heads and long
    sequences most of a GPU is idle. All arithmetic is in float32, whatever the gates are.

    Args:
        q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, impl: As in
            :func:`fused_recurrent_dplr_delta_rule`.
        cu_seqlens_cpu: The numbers of cu_seqlens on the CPU; they are checked, and else not needed.
        safe_gate, disable_recompute: True or False, chunk_size: 16, 32, 64 or None. They say how
            chunks are computed, and change nothing here; so does lower_bound, a number or None.
        cp_context: Must be None.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: Peng et al. 2025 (arXiv:2503.14456); arguments as in fla-core 0.6.0; chapter 01.
    """
    _check_chunks(safe_gate, chunk_size, disable_recompute, cp_context, lower_bound)
    return run(
        {"q": q, "k": k, "v": v, "a": a, "b": b, "gk": gk}, initial_state, cu_seqlens, scale,
        output_final_state, False, impl, cu_seqlens_cpu,
    )  # fmt: skip


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: None = None,
    lower_bound: float | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7 by the name that training and prefill call: :func:`chunk_dplr_delta_rule` by its own.

    Args:
        r, w, k, v, a, b: As in :func:`fused_recurrent_rwkv7`.
        scale: Factor of the output, 1 if not given; ``K ** -0.5`` if None.
        initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, safe_gate, chunk_size: As in
            :func:`chunk_dplr_delta_rule`.
        disable_recompute, cp_context, lower_bound, impl: Likewise.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: Peng et al. 2025 (arXiv:2503.14456); arguments as in fla-core 0.6.0; chapter 01.
    """
    _check_chunks(safe_gate, chunk_size, disable_recompute, cp_context, lower_bound)
    return run(
        {"r": r, "k": k, "v": v, "a": a, "b": b, "w": w}, initial_state, cu_seqlens, scale,
        output_final_state, False, impl, cu_seqlens_cpu,
    )  # fmt: skip


def _check_chunks(
    safe_gate: bool,
    chunk_size: int | None,
    disable_recompute: bool,
    cp_context: None,
    lower_bound: float | None,
) -> None:
    """Refuse what says nothing of chunks, and ranks."""
    arguments.flags(safe_gate=safe_gate, disable_recompute=disable_recompute)
    if chunk_size is not None:
        check.choice("chunk_size", chunk_size, arguments.CHUNK_SIZES)
    check.absent("cp_context", cp_context)
    check.number("lower_bound", lower_bound)
