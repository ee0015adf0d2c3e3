"""A piece of a sequence as an affine map of the state, for parallelism of anyone's own."""

import torch
from torch import Tensor

from linattn_edu.ops import check


def state_and_map(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""What pieces of sequences make of the state that enters them: the delta rule's affine map.

    .. math::

        S_{\mathrm{out}} = M S_{\mathrm{in}} + S_{\mathrm{ext}}, \qquad
        M = \prod_t (I - \beta_t k_t^\top k_t)\, \mathrm{diag}(e^{g_t})

    for each piece and value head, the last token's factor on the left; k and v are rows, S is
    ``[K, V]``. It is that of :func:`chunk_gated_delta_rule`, or with a gate for each channel of
    :func:`chunk_kda`. Two pieces one after the other have the map ``(M_2 M_1, M_2 S_1 + S_2)``; so
    whoever holds the maps of all pieces has the state that enters each, and gives it to the
    operator as initial_state. Differentiable by k, v, g and beta, from both results.

    It costs two calls of the operator, one of them on values of width K. Where cp_context is given
    the operators make and send such maps themselves, for less.

    Args:
        k: Keys ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only), of unit
            length, K <= 256; T may be 0.
        v: Values ``[B, T, HV, V]`` of k's dtype, HV a multiple of H, V <= 512.
        g: Natural-log decay ``[B, T, HV]``, or of each channel ``[B, T, HV, K]``, <= 0, any of
            these dtypes.
        beta: Write strength ``[B, T, HV]``, any of these dtypes.
        cu_seqlens: Boundaries ``[N + 1]`` of N pieces packed into a batch of one.
        cu_seqlens_cpu, chunk_size, impl: As in :func:`chunk_gated_delta_rule`.

    Returns:
        ``(S_ext, M)``: ``[N, HV, K, V]``, the state after a piece from zero, and ``[N, HV, K, K]``;
        float32 (float64 where k or g is). N is B without cu_seqlens.

    Raises:
        TypeError, ValueError: as :func:`chunk_gated_delta_rule`.

    Source: chapter 21; Yang et al. 2024 (arXiv:2412.06464).
    """
    from linattn_edu.ops.gdn import chunk_gated_delta_rule
    from linattn_edu.ops.kda import chunk_kda

    given, channels = check.Tensors(), getattr(g, "ndim", 3) == 4
    given.take("k", k, ("B", "T", "H", "K"))
    given.take("v", v, ("B", "T", "HV", "V"), alike=True)
    given.take("g", g, ("B", "T", "HV", "K") if channels else ("B", "T", "HV"))
    given.take("beta", beta, ("B", "T", "HV"))
    sizes = given.sizes
    N = sizes["B"] if cu_seqlens is None else check.boundaries("cu_seqlens", cu_seqlens)
    options = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "impl": impl}
    options |= {"chunk_size": chunk_size, "output_final_state": True}
    f, q = chunk_kda if channels else chunk_gated_delta_rule, k.detach()
    # eq:cp-ext   S_ext: the state after the piece, from zero
    _, S_ext = f(q, k, v, g, beta, **options)
    # eq:cp-transition   M: the same with v = 0, from I
    nothing = v.new_zeros(*v.shape[:3], sizes["K"])
    eye = torch.eye(sizes["K"], dtype=S_ext.dtype, device=k.device)
    eye = eye.expand(N, sizes["HV"], *eye.shape).contiguous()
    _, M = f(q, k, nothing, g, beta, initial_state=eye, **options)
    return S_ext, M


def state_and_number(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""As :func:`state_and_map` for Mamba-2, whose map is a number.

    .. math::

        S_{\mathrm{out}} = m S_{\mathrm{in}} + S_{\mathrm{ext}}, \qquad
        m = \exp \sum_t \Delta_t A, \qquad
        \Delta_t = \mathrm{clamp}(dt_t + dt\_bias)

    with the softplus of what is clamped if dt_softplus is true.
    Differentiable by x, dt, A, B and dt_bias, from both results.

    Args:
        All as in :func:`mamba_chunk_scan_combined`; cu_seqlens bounds N pieces packed into a batch
        of one.

    Returns:
        ``(S_ext, m)``: ``[N, H, P, state]`` and ``[N, H]``, float32 (float64 where x or dt
        is). N is the batch without cu_seqlens.

    Raises:
        TypeError, ValueError: as :func:`mamba_chunk_scan_combined`.

    Source: chapter 21; Dao and Gu 2024 (arXiv:2405.21060).
    """
    from linattn_edu.ops.ssd import mamba_chunk_scan_combined

    which = "return_final_states" if cu_seqlens is None else "return_varlen_states"
    options = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, which: True}
    options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "impl": impl}

    def states(x: Tensor, start: Tensor | None = None) -> Tensor:
        return mamba_chunk_scan_combined(
            x, dt, A, B, B.detach(), chunk_size, initial_states=start, **options
        )[1]

    # eq:cp-ext   S_ext: the state after the piece, from zero
    S_ext = states(x)
    # eq:cp-number   m: what is left of a state of ones
    ones = S_ext.new_ones(*S_ext.shape[:2], 1, S_ext.shape[3])
    return S_ext, states(x.new_zeros(*x.shape[:3], 1), ones)[:, :, 0, 0]
