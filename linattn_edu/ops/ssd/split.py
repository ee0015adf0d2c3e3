"""A Mamba-2 layer between its projections: convolution, scan, norm, and the last projection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d import activation_of, causal_conv1d_fn
from linattn_edu.ops.rms_norm_gated import check_eps, rms_norm_gated
from linattn_edu.ops.ssd.chunk import LARGEST, check_options, mamba_chunk_scan_combined


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    *,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""A Mamba-2 layer after its first projection: training.

    .. math::

        [z,\, xBC,\, dt] &= zxbcdt, \qquad
        [x,\, B,\, C] = \mathrm{act}(\mathrm{conv}(xBC)), \\
        out &= \mathrm{norm}(\mathrm{scan}(x, dt, A, B, C, D),\, z)\, W_{out}^\top + b_{out}

    conv is :func:`causal_conv1d_fn`, scan :func:`mamba_chunk_scan_combined` with the softplus of
    dt + dt_bias, and norm :func:`rms_norm_gated` of each of the G groups; without rmsnorm_weight
    there is no norm, and the gate silu(z) alone. Differentiable by all tensors but seq_idx, from
    out and from the final states.

    Args:
        zxbcdt: ``[B, T, 2 H P + 2 G N + H]``, float32, float16 or bfloat16 (float64: reference
            only). It may begin with 2 M numbers more, of which out begins with the M of
            silu(first) times second, as a gated MLP beside the layer.
        conv1d_weight: ``[H P + 2 G N, W]``, W from 1 to 8.
        conv1d_bias: ``[H P + 2 G N]``, or None: 0.
        dt_bias: ``[H]``, or None: 0.
        A: Rate of the log decay of each head ``[H]``, <= 0.
        D: Weight of x, ``[H]`` or ``[H, P]``.
        chunk_size, initial_states, dt_limit, return_final_states: As in
            :func:`mamba_chunk_scan_combined`.
        seq_idx: Sequence of each token ``[B, T]``, int32 or int64: where it changes, convolution
            and state start anew. The scan lets NaN and inf of one sequence reach others of its row,
            as :func:`mamba_chunk_scan_combined` says.
        activation: Of the convolution: "silu", "swish" or None.
        rmsnorm_weight: ``[H P]``, or None: no norm.
        rmsnorm_eps: Added to the mean of squares.
        outproj_weight: W_out ``[E, M + H P]``, of zxbcdt's dtype unless autocast is on, or None: no
            projection.
        outproj_bias: b_out ``[E]``, or None.
        headdim: P, needed where D is ``[H]``.
        ngroups: G.
        norm_before_gate: Whether the gate silu(z) comes after the norm, or before it.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Accuracy: as of the three; in float16 states must stay below 65504, as in
    :func:`mamba_chunk_scan_combined`.

    Memory: autograd keeps what passes from one of the three to the next.

    Returns:
        out ``[B, T, E]``, or ``[B, T, M + H P]`` without outproj_weight; with return_final_states
        ``(out, states)``, the states ``[B, H, P, N]`` after the last token.

    Raises:
        TypeError, ValueError: as in the three, whose arguments these are. No kernel has run then.

    Source: Dao and Gu 2024 (arXiv:2405.21060), section 7; the arguments are those of mamba_ssm
    2.3.2; chapter 27.
    """
    tensors = {
        "conv1d_bias": conv1d_bias, "dt_bias": dt_bias, "A": A, "initial_states": initial_states,
        "rmsnorm_weight": rmsnorm_weight, "outproj_weight": outproj_weight,
        "outproj_bias": outproj_bias,
    }  # fmt: skip
    given = check.Tensors()
    H, P, N, M = _check_tensors(given, zxbcdt, conv1d_weight, D, headdim, ngroups, tensors)
    if seq_idx is not None:
        given.sequence_numbers("seq_idx", seq_idx)
    check.resolve_impl(impl, zxbcdt.device, tuple(given.dtypes))
    check_options(chunk_size, dt_limit)
    activation_of(activation)
    check_eps("rmsnorm_eps", rmsnorm_eps)
    norm_before_gate = check.flag("norm_before_gate", norm_before_gate)
    final = check.flag("return_final_states", return_final_states)
    inner, normed = H * P, rmsnorm_weight is not None
    mlp, z, xBC, dt = zxbcdt.split([2 * M, inner, inner + 2 * ngroups * N, H], -1)
    xBC = causal_conv1d_fn(
        xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation, impl=impl
    ).mT
    x, B, C = xBC.split([inner, ngroups * N, ngroups * N], -1)
    results = mamba_chunk_scan_combined(
        x.unflatten(-1, (H, P)), dt, A, *(t.unflatten(-1, (ngroups, N)) for t in (B, C)),
        chunk_size, D, None if normed else z.unflatten(-1, (H, P)), dt_bias, initial_states,
        seq_idx, dt_softplus=True, dt_limit=dt_limit, return_final_states=final, impl=impl,
    )  # fmt: skip
    out, *states = results if final else (results,)
    out = out.flatten(-2)
    if normed:
        out = rms_norm_gated(
            out, rmsnorm_weight, None, z, rmsnorm_eps, inner // ngroups, norm_before_gate, impl=impl
        )
    if M:
        first, second = mlp.chunk(2, -1)
        out = torch.cat([F.silu(first) * second, out], -1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, *states) if final else out


def _check_tensors(
    given: check.Tensors,
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    D: Tensor,
    headdim: int | None,
    ngroups: int,
    tensors: dict[str, Tensor | None],
) -> tuple[int, int, int, int]:
    """Refuse tensors that do not fit; return H, P, N and M."""
    sizes = given.sizes
    given.take("zxbcdt", zxbcdt, ("B", "T", "L"))
    whole = isinstance(D, Tensor) and D.ndim == 2
    given.take("D", D, ("H", "P") if whole else ("H",))
    for name, value in (("headdim", headdim), ("ngroups", ngroups)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    if headdim is None and not whole:
        raise ValueError("headdim must be given where D has the shape [H], got None")
    P = sizes.setdefault("P", headdim)
    if headdim not in (None, P):
        raise ValueError(f"headdim must be D's P={P}, got {headdim}")
    H = sizes["H"]
    if H < 1 or not 1 <= P <= LARGEST:
        raise ValueError(f"D and headdim must have H >= 1 and P from 1 to {LARGEST}, got {H}, {P}")
    if ngroups is None or ngroups < 1 or H % ngroups:
        raise ValueError(f"ngroups must divide H={H}, got {ngroups}")
    given.take("conv1d_weight", conv1d_weight, ("channels", "W"))
    N, rest = divmod(sizes["channels"] - H * P, 2 * ngroups)
    if rest or not 1 <= N <= LARGEST:
        raise ValueError(
            f"conv1d_weight must have H P + 2 G N channels with H={H}, P={P}, G={ngroups} and N "
            f"from 1 to {LARGEST}, got {sizes['channels']}"
        )
    M, rest = divmod(sizes["L"] - 2 * H * P - 2 * ngroups * N - H, 2)
    if M < 0 or rest:
        raise ValueError(
            f"zxbcdt must have 2 H P + 2 G N + H = {2 * H * P + 2 * ngroups * N + H} numbers a "
            f"token, or an even number more, got {sizes['L']}"
        )
    sizes |= {"N": N, "H P": H * P, "M + H P": M + H * P}
    shapes = {
        "conv1d_bias": ("channels",), "dt_bias": ("H",), "A": ("H",),
        "initial_states": ("B", "H", "P", "N"), "rmsnorm_weight": ("H P",),
        "outproj_weight": ("E", "M + H P"), "outproj_bias": ("E",),
    }  # fmt: skip
    projected = ("outproj_weight", "outproj_bias")
    alike = projected if not torch.is_autocast_enabled(zxbcdt.device.type) else ()
    for name, shape in shapes.items():
        if tensors[name] is not None or name == "A":
            given.take(name, tensors[name], shape, alike=name in alike, decay=name == "A")
    if tensors["outproj_weight"] is None and tensors["outproj_bias"] is not None:
        raise ValueError("outproj_bias needs outproj_weight, got None")
    return H, P, N, M
