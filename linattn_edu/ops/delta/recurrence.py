"""The delta rule token by token, with any of its gates: the recurrence, with and without gradients.

The public functions are those of Gated DeltaNet (gate g; gk, gv), of Kimi Delta Attention (gk) and
of GDN-2 (gk, and gates of channels for what is erased, in the place of beta, and for what is
written).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta.gate import layer_gate, write_strength
from linattn_edu.ops.l2norm import unit
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import known, laid_out, needs_gradient, transformed, transposed, wide

LARGEST = (512, 512)  # K and V


@dataclass(slots=True)
class How:
    """What is done to the arguments on the way, and where.

    normalise: divide q and k by their length. raw_gate: g, or gk if g is None, is the raw gate of a
    layer, with lower_bound or without. sigmoid: beta is this factor times the sigmoid of what is
    given; 0: as given. v_first: states are [V, K]. impl: "auto" until the arguments are checked.
    gated: beta is an erase gate, and there is a write gate.
    """

    scale: float | None
    normalise: bool
    raw_gate: bool
    sigmoid: int
    v_first: bool
    lower_bound: float | None = None
    impl: str = "auto"
    gated: bool = False


def run(
    tensors: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    checked: check.Tensors,
    how: How,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """o and the final state or None, in new tensors.

    tensors: q, k, v, g, gk, gv, beta, the write gate if how.gated, A_log, dt_bias, initial_state.
    checked: what took them.
    """
    tensors, dtype = prepare(tensors, cu_seqlens, checked, how)
    if how.impl == "reference" or transformed() or needs_gradient(*tensors):
        o, final_state = differentiable(tensors, cu_seqlens, how)
    else:
        step = steps[how.v_first, how.gated]
        o, final_state = step(
            *given(tensors), cu_seqlens, how.scale, how.normalise, how.sigmoid, how.lower_bound,
            output_final_state, how.impl,
        )  # fmt: skip
    return o.to(dtype), final_state if output_final_state else None


def prepare(
    tensors: tuple[Tensor | None, ...], cu_seqlens: Tensor | None, checked: check.Tensors, how: How
) -> tuple[tuple[Tensor | None, ...], torch.dtype]:
    """Check what all forms share; return the tensors, q, k and v in one dtype, and that of o."""
    if known(cu_seqlens):
        check.lengths("cu_seqlens", cu_seqlens.tolist(), checked.sizes["T"])
    q, k, v, *rest = tensors
    how.impl = check.resolve_impl(how.impl, checked.device, tuple(checked.dtypes))
    how.scale = checked.sizes["K"] ** -0.5 if how.scale is None else how.scale
    dtype = v.dtype
    if not q.dtype == k.dtype == dtype:
        common = functools.reduce(torch.promote_types, (q.dtype, k.dtype, dtype))
        tensors = (q.to(common), k.to(common), v.to(common), *rest)
    return tensors, dtype


def given(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The tensors as the kernel that has everything in it takes them."""
    *others, dt_bias, initial_state = tensors
    bias = None if dt_bias is None else dt_bias.view(dt_bias.shape[0], -1)
    return *others, bias, initial_state


def plain(tensors: tuple[Tensor | None, ...], how: How) -> tuple[Tensor | None, ...]:
    """q, k, v, g, gk, gv, beta, and the write gate if there is one, of the recurrence itself: what
    the kernel does inside of it.
    """
    q, k, v, g, gk, gv, beta, *write, A_log, dt_bias, _ = tensors
    if how.raw_gate and g is None:
        gk = layer_gate(gk, A_log, dt_bias, how.lower_bound, how.impl)
    elif how.raw_gate:
        g = layer_gate(g, A_log, dt_bias, how.lower_bound, how.impl)
    if how.normalise:  # not rounded to 16 bit, as in the kernel
        # one call for both: decoding is a few short calls
        q, k = unit(torch.stack((q, k)).to(wide(q)), how.impl)
        v = v.to(wide(q))
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    return q, k, v, g, gk, gv, write_strength(beta, how.sigmoid), *write


def differentiable(
    tensors: tuple[Tensor | None, ...], cu_seqlens: Tensor | None, how: How
) -> tuple[Tensor, Tensor]:
    """o and the final state, with gradients."""
    q, k, v, g, gk, gv, beta, *write = plain(tensors, how)
    tensors = q, k, v, g, beta, gk, gv, transposed(tensors[-1], how.v_first), *write
    operator = gated if how.gated else recurrence
    o, final_state = operator(*tensors, cu_seqlens, how.scale, how.impl)
    return o, laid_out(final_state, how.v_first)


@dataclass(frozen=True)
class Stages:
    """The recurrence and its reverse."""

    recurrent: Callable = stage("delta.recurrent")
    recurrent_bwd: Callable = stage("delta.recurrent")


stages = implementations(Stages)


def _operations(s: dict) -> tuple[int, int]:
    """Operations, forward and backward: two for each multiply-add with a number of the state."""
    state = 2 * s["B"] * s["T"] * s["HV"] * s["K"] * s["V"]
    return 3 * state, 10 * state


_GATES = {"g": "B T HV?", "gk": "B T HV K?", "gv": "B T HV V?"}
_EVERY = "q g beta gk gv initial_state"

LACKS = ("write",)  # where beta is a number


def _declare(name: str, beta: str, write: dict[str, str], **more: object) -> Operator:
    """The recurrence with the axes of beta, and with a write gate or without."""
    return Operator(
        name,
        {
            "q": "B T H K",
            "k": "B T H K",
            "v": "B T HV V",
            "g": _GATES["g"],
            "beta": beta,
            "gk": _GATES["gk"],
            "gv": _GATES["gv"],
            "initial_state": "N HV K V?",
            **write,
        },
        {
            "o": like("B T HV V", "q", gradient="do"),
            "final_state": widened("N HV K V", _EVERY, gradient="dht"),
        },
        options={"scale": "float"},
        stages=stages,
        packed="tokens",
        flops=_operations,
        **more,
    )


recurrence = _declare("recurrent", "B T HV", {}, lacks=LACKS)
gated = _declare("recurrent_gated", "B T HV K", {"write": "B T HV V"})


@gated.forward
@recurrence.forward
def forward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    gk: Tensor | None,
    gv: Tensor | None,
    write: Tensor | None = None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and the final state.  Only the kernels take cu_seqlens."""
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    return stages.recurrent(
        q, k, v, g, beta,
        gk=gk, gv=gv, write=write, scale=scale, initial_state=initial_state, **packed,
    )  # fmt: skip


@gated.backward
@recurrence.backward
def backward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None,
    *,
    gk: Tensor | None,
    gv: Tensor | None,
    write: Tensor | None = None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dg, dbeta, dgk, dgv, the gradients of the initial state and of the write gate."""
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    return stages.recurrent_bwd(
        q, k, v, g, beta, do, dht,
        gk=gk, gv=gv, write=write, scale=scale, initial_state=initial_state, **packed,
    )  # fmt: skip


def _given(strength: dict[str, str]) -> dict[str, str]:
    """The tensors as they are given: what `plain` does to them, the kernel does inside."""
    return {
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T HV V",
        **_GATES,
        **strength,
        "A_log": "HV?",
        "dt_bias": "HV PER?",  # of each gate of a head
    }


# by whether there are gates of channels for what is erased and for what is written
GIVEN = {
    False: _given({"beta": "B T HV?"}),
    True: _given({"beta": "B T HV K", "write": "B T HV V"}),
}
FLAGS = {"scale": "float", "normalise": "bool", "sigmoid": "int", "lower_bound": "float?"}


def _step(v_first: bool, gated: bool) -> Operator:
    """The recurrence without gradients in one kernel."""
    state = "V K" if v_first else "K V"
    step = Operator(
        "recurrent_step" + "_gated" * gated + "_v_first" * v_first,
        GIVEN[gated] | {"initial_state": f"N HV {state}?"},
        {"o": like("B T HV V", "v"), "final_state": widened(f"N HV {state}", "initial_state")},
        options=FLAGS | {"output_final_state": "bool"},
        stages=stages,
        packed="tokens",
        lacks=() if gated else LACKS,
    )

    @step.forward
    def forward(
        stages, q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, scale, normalise, sigmoid,
        lower_bound, output_final_state, cu_seqlens=None, write=None,
    ):  # fmt: skip
        return stages.recurrent(
            q, k, v, g, beta, gk=gk, gv=gv, write=write, A_log=A_log, dt_bias=dt_bias, scale=scale,
            normalise=normalise, sigmoid=sigmoid, lower_bound=lower_bound, v_first=v_first,
            initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return step


steps = {  # by v_first and gated
    (False, False): _step(False, False),
    (True, False): _step(True, False),
    (False, True): _step(False, True),
    (True, True): _step(True, True),
}
