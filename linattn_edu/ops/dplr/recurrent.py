"""The general delta rule token by token: the public functions, the declaration, the composition."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments, recurrence
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import known


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""The general delta rule one token after the other: a decay and a matrix of rank one, DPLR.

    .. math::

        S_t = \mathrm{diag}(e^{gk_t})\, S_{t-1} + b_t^\top (a_t S_{t-1}) + k_t^\top v_t, \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and head; q, k, v, a, b are rows, S is ``[K, V]``. a reads the state of
    before the decay, what it reads is added at b, and v is written at k: Kimi Delta Attention is
    this with ``k = beta c``, ``b = c`` and ``a = - beta c e^g``, c its key. One kernel takes a step
    a token, its state in registers; all arithmetic is in float32. Differentiable by every tensor;
    the backward pass computes the states again in blocks of sqrt(T) tokens (sqrt(T / N), of N
    packed sequences).

    Args:
        q: Queries ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only),
            K <= 512; T may be 0.
        k, a, b: Where v is written, what is read, where that is added ``[B, T, H, K]``, of q's
            dtype. The state stays bounded where ``diag(e^gk) + b^T a`` lengthens nothing.
        v: Values ``[B, T, H, V]`` of q's dtype, V <= 512.
        gk: Natural-log decay of each row of the state ``[B, T, H, K]``, <= 0, any of these dtypes.
            A positive one is refused on the CPU; on a GPU it is not looked for.
        scale: Factor of the output, ``K ** -0.5`` if None.
        initial_state: State before the first token ``[N, H, K, V]``, zero if None. N is B, or the
            number of sequences of cu_seqlens.
        output_final_state: Whether to return the state after the last token.
        reverse: Whether each sequence is gone through from its last token to its first.
        cu_seqlens: Boundaries ``[N + 1]``, int32 or int64, of N sequences packed one after the
            other into a batch of one, as in :func:`fused_recurrent_gated_delta_rule`.
        impl: "triton", "reference", or "auto": the kernels for CUDA tensors and under
            ``TRITON_INTERPRET=1``, else (and for float64) the reference.

    Returns:
        ``(o, final_state)``: o ``[B, T, H, V]`` in q's dtype; final_state ``[N, H, K, V]`` in
        float32 (float64 where q, gk or initial_state is), or None.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, scale or impl does not fit; the message names the argument,
            what was expected and what came. No kernel has run then.

    Source: Peng et al. 2025 (arXiv:2503.14456); the rule as in fla-core 0.6.0; chapter 01.
    """
    return run(
        {"q": q, "k": k, "v": v, "a": a, "b": b, "gk": gk}, initial_state, cu_seqlens, scale,
        output_final_state, reverse, impl,
    )  # fmt: skip


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7 one token after the other: :func:`fused_recurrent_dplr_delta_rule` by its own names.

    Args:
        r: Receptance, the q of that function.
        w: Natural-log decay, its gk.
        k, v, a, b: As there. A layer of RWKV-7 gives ``a = -c`` and ``b = eta * c``, c of unit
            length and eta in [0, 1] for each channel.
        scale: Factor of the output, ``K ** -0.5`` if None; a layer of RWKV-7 gives 1.
        initial_state, cu_seqlens, impl: As there.
        output_final_state: Whether to return the state after the last token: True if not given.
        head_first: Must be False: tensors are ``[B, T, H, ...]``.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: Peng et al. 2025 (arXiv:2503.14456); arguments as in fla-core 0.6.0; chapter 01.
    """
    check.absent("head_first", head_first, False)
    return run(
        {"r": r, "k": k, "v": v, "a": a, "b": b, "w": w}, initial_state, cu_seqlens, scale,
        output_final_state, False, impl,
    )  # fmt: skip


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """:func:`fused_recurrent_rwkv7` of a layer's own numbers: ``a = -kk`` and ``b = kk * a``.

    Args:
        r, w, k, v, initial_state, cu_seqlens, head_first, impl: As there.
        kk: Removal keys of unit length ``[B, T, H, K]``, of r's dtype.
        a: Rates, in [0, 1] for each channel ``[B, T, H, K]``, of r's dtype, in which the product
            with kk is rounded.
        scale: Factor of the output, 1 if not given; ``K ** -0.5`` if None.
        output_final_state: Whether to return the state after the last token: False if not given.
        reverse: As in :func:`fused_recurrent_dplr_delta_rule`.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: Peng et al. 2025 (arXiv:2503.14456); arguments as in fla-core 0.6.0; chapter 01.
    """
    check.absent("head_first", head_first, False)
    return run(
        {"r": r, "k": k, "v": v, "kk": kk, "a": a, "w": w}, initial_state, cu_seqlens, scale,
        output_final_state, reverse, impl, rates=True,
    )  # fmt: skip


def run(
    tensors: dict[str, Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    reverse: bool,
    impl: str,
    *,
    rates: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Check all arguments and run the recurrence.  tensors: q, k, v, a, b and gk by their names.
    rates: whether a removal key and its rates are in the places of a and b.
    """
    output_final_state, reverse = arguments.flags(
        output_final_state=output_final_state, reverse=reverse
    )
    given, scale, impl = checked(tensors, initial_state, cu_seqlens, scale, impl)
    if known(cu_seqlens):
        check.lengths("cu_seqlens", cu_seqlens.tolist(), given.sizes["T"])
    q, k, v, a, b, gk = tensors.values()
    if rates:
        a, b = -a, a * b
    given = q, k, v, a, b, gk, initial_state
    o, final_state = rank_one(*given, cu_seqlens, scale, reverse, impl)
    return o, final_state if output_final_state else None


def checked(
    tensors: dict[str, Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    impl: str,
    cp_context: CPContext | None = None,
    pool: bool = False,
) -> tuple[check.Tensors, float, str]:
    """All tensors checked, but for the numbers of the boundaries: what was given, scale, impl.
    pool: initial_state holds any number of states.
    """
    given, (*others, gate) = check.Tensors(), tensors
    for name in others:
        shape = ("B", "T", "H", "V" if name == "v" else "K")
        given.take(name, tensors[name], shape, alike=given.first is not None)
    given.take(gate, tensors[gate], ("B", "T", "H", "K"), decay=True)
    names = (given.first, "k", "v")
    check.head_counts(given.sizes | {"HV": given.sizes["H"]}, names, recurrence.LARGEST)
    state = "initial_state", initial_state
    arguments.count_sequences(given, cu_seqlens, cp_context, state)
    if initial_state is not None:
        given.take("initial_state", initial_state, ("slots" if pool else "N", "H", "K", "V"))
    scale = check.number("scale", scale)
    scale = given.sizes["K"] ** -0.5 if scale is None else scale
    return given, scale, check.resolve_impl(impl, given.device, tuple(given.dtypes))


@dataclass(frozen=True)
class Stages:
    """The recurrence and its reverse."""

    dplr_recurrent: Callable = stage("dplr.recurrent")
    dplr_recurrent_bwd: Callable = stage("dplr.recurrent")


stages = implementations(Stages)


def _operations(s: dict) -> tuple[int, int]:
    """Operations, forward and backward: two for each multiply-add with a number of the state."""
    state = 2 * s["B"] * s["T"] * s["H"] * s["K"] * s["V"]
    return 4 * state, 13 * state


# of both operators of the rule
TENSORS = {
    **dict.fromkeys(("q", "k"), "B T H K"),
    "v": "B T H V",
    **dict.fromkeys(("a", "b", "gk"), "B T H K"),
    "initial_state": "N H K V?",
}
OUTPUTS = {
    "o": like("B T H V", "q", gradient="do"),
    "final_state": widened("N H K V", "q gk initial_state", gradient="dht"),
}
rank_one = Operator(
    "dplr_recurrent",
    TENSORS,
    OUTPUTS,
    options={"scale": "float", "reverse": "bool"},
    stages=stages,
    packed="tokens",
    flops=_operations,
)


@rank_one.forward
def forward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and the final state.  Only the kernels take cu_seqlens."""
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    return stages.dplr_recurrent(
        q, k, v, a, b, gk, scale=scale, initial_state=initial_state, reverse=reverse, **packed
    )


@rank_one.backward
def backward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    do: Tensor,
    dht: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, da, db, dgk and the gradient of the initial state."""
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    return stages.dplr_recurrent_bwd(
        q, k, v, a, b, gk, do, dht,
        scale=scale, initial_state=initial_state, reverse=reverse, **packed,
    )  # fmt: skip
