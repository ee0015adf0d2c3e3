"""causal_conv1d_update: the short convolution token by token, with the state written in place."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops.causal_conv1d import activation_of, check_sizes
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import known


@repeated("conv_state")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    r"""Short causal convolution of new tokens: decoding. They are written into the state.

    .. math::

        y_t = \mathrm{act}\Big(b + \sum_{j=0}^{W-1} w_j\, u_{t-W+1+j}\Big), \qquad
        u_t = x_t \ \text{for}\ t \ge 0

    for each sequence and channel; tokens before the first are the state's. All arithmetic is in
    float32.

    Args:
        x: ``[B, D]``, one token, or ``[B, D, T]``, float32, float16 or bfloat16 (float64: reference
            only).
        conv_state: The tokens before, ``[B, D, S]``, S >= W - 1, newest last, any of these dtypes;
            overwritten with the last S tokens. Each of its B states must be contiguous, as
            ``[D, S]`` or as ``[S, D]``, and they must not overlap, nor share memory with another
            argument. y is computed from x before that is rounded to its dtype.
        weight: ``[D, W]``, W from 1 to 8, any of these dtypes.
        bias: b ``[D]``, any of these dtypes, zero if None.
        activation: None, or "silu" (also called "swish"), ``p * sigmoid(p)``.
        cache_seqlens: How many tokens each sequence had before ``[B]``, int32 or int64, >= 0:
            conv_state is then a ring, in which token number n is in column n mod S; only the
            columns of new tokens are written. It is not counted up. With S >= W + T - 2 any number
            of a call's T tokens, from one on, may be kept: the next call goes on from there, and
            writes over those that were rejected. None: columns are in order. On a GPU the numbers
            are not looked at.
        conv_state_indices: Slot of each sequence ``[B]``, int32 or int64, in a pool of states:
            conv_state is then ``[slots, D, S]``. Slots that are not named keep their bits. A
            negative slot is none: nothing is read or written there, and its row of y is zero. No
            slot may be named by two sequences. On the CPU slots are checked, when a compiled graph
            runs too. On a GPU they are not read; there a slot past the pool's end counts as
            negative, and one named twice is left with either state.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    The kernels give the same bits as :func:`causal_conv1d_fn` of all tokens at once, if the state
    holds x's dtype.

    A step has no gradient, as in causal_conv1d. Where one is recorded, as in decoding without
    torch.no_grad(), it runs, and a backward pass that comes to its output or to the new state is an
    error; under torch.compile neither asks for one. For training there is :func:`causal_conv1d_fn`.

    Returns:
        y, in shape and dtype as x.

    Raises:
        TypeError: An argument is no tensor of such a dtype.
        ValueError: Shapes, devices, strides, lengths or slots do not fit; conv_state is a leaf
            that needs a gradient; a transform of torch.func or forward-mode differentiation is at
            work; impl cannot run. Before any kernel runs.

    Source: the arguments are those of causal_conv1d 1.6 (Dao-AILab); chapter 27.
    """
    one = _check_tensors(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    activation = activation_of(activation)
    tensors = (conv_state, x, weight, bias)
    impl = check.resolve_impl(impl, x.device, tuple(y.dtype for y in tensors if y is not None))
    given = (x, weight, bias, cache_seqlens, conv_state_indices)
    inplace.check("conv_state", conv_state, given, "causal_conv1d_update", without_gradient=True)
    x = x[:, None] if one else x.mT

    def step(state: Tensor) -> Tensor:
        (y,) = update(x, weight, bias, state, cache_seqlens, conv_state_indices, activation, impl)
        return y

    y = inplace.stepped(step, conv_state, impl)
    return y[:, 0] if one else y.mT


def _check_tensors(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> bool:
    """Refuse tensors that do not fit; return whether x is one token without an axis."""
    one = isinstance(x, Tensor) and x.ndim == 2
    given = check_sizes(x, ("B", "D") if one else ("B", "D", "T"), weight)
    first = "B" if conv_state_indices is None else "slots"
    given.take("conv_state", conv_state, (first, "D", "S"))
    sizes = given.sizes
    if conv_state.shape[0] < 1:
        raise ValueError("conv_state must have a slot, got slots=0")
    least = max(sizes["W"] - 1, 1)
    if sizes["S"] < least:
        raise ValueError(
            f"conv_state must have S >= {least} with weight's W={sizes['W']}, got S={sizes['S']}"
        )
    if bias is not None:
        given.take("bias", bias, ("D",))
    others = {"cache_seqlens": cache_seqlens, "conv_state_indices": conv_state_indices}
    for name, y in others.items():
        if y is not None:
            given.integers(name, y)
            if y.shape != (sizes["B"],):
                raise ValueError(f"{name} must have shape [B={sizes['B']}], got {tuple(y.shape)}")
    if known(cache_seqlens) and bool((cache_seqlens < 0).any()):
        raise ValueError(f"cache_seqlens must be >= 0, got {cache_seqlens.min().item()}")
    if not (inplace.dense(conv_state) or inplace.dense(conv_state.mT)):
        raise ValueError(
            "conv_state must be contiguous in every sequence or slot, as [D, S] or [S, D], and "
            f"they must not overlap, got strides {conv_state.stride()} for "
            f"{tuple(conv_state.shape)}"
        )
    return one


@dataclass(frozen=True)
class Stages:
    """The convolution of new tokens, in place."""

    causal_conv1d_update: Callable = stage("delta.causal_conv1d_update")


stages = implementations(Stages)

# The channels are called H, as in causal_conv1d.
update = Operator(
    "causal_conv1d_update",
    {
        "x": "B T H",
        "weight": "H W",
        "bias": "H?",
        "state": "slots H S",
        "lengths": "B?",
        "indices": "B?",
    },
    {"y": like("B T H", "x")},
    options={"activation": "str?"},
    stages=stages,
    mutates="state",
    apart={"x": 2},
)


@update.forward
def forward(
    stages: Stages,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lengths: Tensor | None,
    indices: Tensor | None,
    activation: str | None,
) -> Tensor:
    """y; the new states go where the old ones are."""
    if known(indices):
        rows = [[slot] for slot in indices.tolist()]
        inplace.check_slots("conv_state_indices", "conv_state", rows, state.shape[0])
    return stages.causal_conv1d_update(
        state, x, weight, bias, lengths, indices, activation=activation
    )
