"""A model with layers of this library as an ONNX graph, in the standard's operators.

Opset 27 has LinearAttention, the delta rule and the decayed sum with their gates, and
CausalConvWithState, the short convolution. :func:`export` takes a model through
``torch.onnx.export``, with a table that says what becomes of each operator that
``linattn_edu.ops`` registers with PyTorch.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from linattn_edu.layers.cache import Cache
from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d import convolve
from linattn_edu.ops.delta.gate import gates
from linattn_edu.ops.delta.recurrence import recurrence, steps
from linattn_edu.ops.gdn.chunk import chunk as gdn
from linattn_edu.ops.kda.chunk import chunk as kda
from linattn_edu.ops.l2norm import EPS
from linattn_edu.ops.l2norm import norm as l2norm
from linattn_edu.ops.operator import Operator
from linattn_edu.ops.rms_norm_gated import norm as rms_norm_gated

try:
    import onnx_ir
    from onnx.helper import find_min_ir_version_for, make_opsetid
    from onnxscript import version_converter
    from onnxscript.values import Opset
except ImportError as error:
    raise ImportError("linattn_edu.onnx needs onnx: pip install 'linattn_edu[onnx]'") from error

OPSET = 27  # the first with both operators
CONVERTED = 18, 25  # what PyTorch writes, and the last that onnxscript converts to by itself
ASIDE = "linattn_edu"  # a domain where no converter looks
op, standard = Opset("", CONVERTED[0]), Opset("", OPSET)
FLOAT = onnx_ir.DataType.FLOAT
NEW = "LinearAttention", "CausalConvWithState"

# names of operators begin with these -> why the standard has no place for them
LACKS = {
    ("chunk_gdn2", "recurrent_gated"): "it has no gates of channels for erasing and writing",
    ("chunk_dplr", "dplr"): "a key changes its state, not a and b",
    ("mamba", "selective_state_update"): "it has no steps, no D and no groups of B and C",
    ("ema",): "its state is a matrix for each head",
}


def export(module: nn.Module, x: Tensor, *, states: bool = True) -> torch.onnx.ONNXProgram:
    """The ONNX graph of a module, of opset 27, for any batch and any number of tokens from one on.

    The operators of :class:`GatedDeltaNet`, :class:`KimiDeltaAttention`,
    :class:`ShortConvolution` and of the functions that they run become LinearAttention and
    CausalConvWithState; gates, norms and projections become the plain operators that they are made
    of. Needs ``pip install 'linattn_edu[onnx]'``.

    Args:
        module: A layer, a ``models.LanguageModel`` of "gdn" and "kda", or with states=False any
            module of one tensor that has such layers inside. Float32, float16 or bfloat16.
        x: An input ``[B, T, ...]``, of which the dtype, the device and the sizes after T count.
        states: Whether the states go in and out, for which the module needs a ``make_cache``. Of
            each layer, in the order of ``Cache.states`` and in its shapes, the inputs are
            ``past_{layer}_conv_{i}`` and ``past_{layer}_recurrent``, the outputs
            ``present_{layer}_...``; those of ``make_cache`` are the states of no tokens. A call
            gives what ``module(x, cache=cache)`` gives, and the cache after it. With False the
            graph has x and y alone, as ``module(x)``.

    LinearAttention is called in float32, as the gates of a layer are, CausalConvWithState in x's
    dtype, to which weights are rounded; q and k are repeated where there are more value heads. Run
    by onnx's reference evaluator, the graph gives the module's numbers to 2e-6 in float32, 2e-3 in
    float16 and 1e-2 in bfloat16 (relative RMS). Infinite rates exp(A_log) times zero are NaN there,
    where the operators count them as zero.

    Returns:
        The program: ``save(path)`` writes it, ``model_proto`` is what onnx takes. Input x, output
        y.

    Raises:
        TypeError: x is no tensor, states no bool.
        ValueError: x has no two axes; there are no states to give (no ``make_cache``, attention
            beside the layers); an operator is none of the standard's (Mamba-2, GDN-2, DPLR and
            RWKV-7, EMA), or an argument is not (packed sequences, ranks, gv, float64). The message
            names it.

    Source: ONNX 1.23, LinearAttention-27 and CausalConvWithState-27; chapter 27.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor [B, T, ...], got {type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"x must have shape [B, T, ...], got {tuple(x.shape)}")
    batch, tokens = Dim("batch"), Dim("tokens")
    example = x.new_zeros(2, 3, *x.shape[2:])  # sizes that no call would treat otherwise
    caches, names = _states(module) if check.flag("states", states) else ([], [])
    past = [state for cache in caches for state in cache.states]
    with torch.no_grad():
        program = torch.export.export(
            _WithStates(module, caches),
            (example, *past),
            dynamic_shapes=_shapes(past, {0: batch, 1: tokens}, {0: batch}),
        )
        _refuse(program)
        made = torch.onnx.export(
            program,
            custom_translation_table=TABLE,
            dynamic_shapes=_shapes(past, {0: "batch", 1: "tokens"}, {}),  # their names
            input_names=["x", *(f"past_{name}" for name in names)],
            output_names=["y", *(f"present_{name}" for name in names)],
            opset_version=CONVERTED[0],
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    _convert(made.model)
    made.optimize()
    return made


def _shapes(past: Sequence[Tensor], x: dict, state: dict) -> tuple[dict | tuple, ...]:
    """What PyTorch is told of the axes of x and of the states, by the arguments of forward."""
    return (x, (state,) * len(past)) if past else (x,)


class _WithStates(nn.Module):
    """A module as a function of x and of the states of its caches: y and the new states."""

    def __init__(self, module: nn.Module, caches: list[Cache]):
        super().__init__()
        self.module = module
        self.layers = [(cache.layer, len(cache.conv_states)) for cache in caches]
        self.whole = not isinstance(getattr(module, "conv_shapes", None), tuple)

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        left, caches = [state.clone() for state in past], []
        for layer, convolutions in self.layers:
            conv, recurrent = left[:convolutions], left[convolutions]
            caches.append(Cache(layer, tuple(conv), recurrent))
            left = left[convolutions + 1 :]
        if not caches:
            return (self.module(x),)
        y = self.module(x, cache=caches if self.whole else caches[0])
        return (y, *(state for cache in caches for state in cache.states))


def _states(module: nn.Module) -> tuple[list[Cache], list[str]]:
    """The caches of two sequences, and the names of their states."""
    if not hasattr(module, "make_cache"):
        raise ValueError(
            f"states must be False for {type(module).__name__}, which has no make_cache"
        )
    made = module.make_cache(2)
    caches = made if isinstance(made, list) else [made]
    for cache in caches:
        if not isinstance(cache, Cache):
            raise ValueError(
                f"states must be False for a model with {type(cache).__name__}, which grows"
            )
    names = []
    for n, cache in enumerate(caches):
        names += [f"{n}_conv_{i}" for i in range(len(cache.conv_states))] + [f"{n}_recurrent"]
    return caches, names


def _convert(model: onnx_ir.Model) -> None:
    """Bring the model to opset 27, whose new operators no converter knows: they stand aside."""
    new = [node for node in model.graph.all_nodes() if node.op_type in NEW]
    for node in new:
        node.domain, node.version = ASIDE, 1
    model.opset_imports[ASIDE] = 1
    logger = logging.getLogger(version_converter.__name__)
    logger.disabled = True  # it tells that onnx itself converts, and what we raise
    try:
        for version in (CONVERTED[1], OPSET):
            version_converter.convert_version(model, version, fallback=True)
    finally:
        logger.disabled = False
    if model.opset_imports[""] != OPSET:
        raise RuntimeError(f"onnx cannot convert this graph to opset {OPSET}")
    model.ir_version = find_min_ir_version_for([make_opsetid("", OPSET)])
    for node in model.graph.all_nodes():
        if node.domain == ASIDE:
            node.domain, node.version = "", OPSET
    del model.opset_imports[ASIDE]


# -- what is refused


def _refuse(program: ExportedProgram) -> None:
    """Refuse operators that the standard does not have, by name."""
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", None) == "linattn_edu":
            _refuse_call(node)


def _refuse_call(node: fx.Node) -> None:
    name = node.target._schema.name.split("::")[1]
    if node.target not in OPERATORS:
        why = [reason for begins, reason in LACKS.items() if name.startswith(begins)]
        why = why or ["it writes in place or is a part of an operator; export takes the layer"]
        raise ValueError(f"{name} cannot be exported to ONNX's LinearAttention: {why[0]}")
    operator = OPERATORS[node.target]
    given = dict(zip(operator.names, node.args, strict=True))
    for argument in (*operator.bounds, "seq_idx", "gv"):
        if given.get(argument) is not None:
            raise ValueError(f"{name} cannot be exported with {argument}, which ONNX has not")
    if given.get("g") is not None and given.get("gk") is not None:
        raise ValueError(f"{name} cannot be exported with both g and gk: ONNX has one decay")
    if given.get("scale") == 0:
        raise ValueError(f"{name} cannot be exported with scale=0, which means K ** -0.5 in ONNX")
    dtype = node.args[0].meta["val"].dtype
    if dtype == torch.float64:
        raise ValueError(f"{name} cannot be exported in {dtype}: ONNX has float32 and less")


# -- the table

Value = Any  # onnxscript's
TABLE: dict[Callable, Callable] = {}
OPERATORS: dict[Callable, Operator] = {}


def _translates(*operators: Operator) -> Callable:
    """Take a function of the named arguments of these operators for what becomes of them."""

    def taken(f: Callable) -> Callable:
        for operator in operators:

            def translate(*args: Value, operator: Operator = operator) -> Value:
                given = dict(zip(operator.names, args, strict=True))
                outputs = f(**given)
                if len(operator.outputs) == 1:
                    return outputs[0]
                return outputs if given.get("output_final_state", True) else outputs[:1]

            target = getattr(torch.ops.linattn_edu, operator.name).default
            TABLE[target], OPERATORS[target] = translate, operator
        return f

    return taken


@_translates(convolve)
def _convolution(
    x: Value, weight: Value, bias: Value, initial_state: Value, activation: str | None, **_: Value
) -> tuple[Value, ...]:
    """The state has one token more than ONNX's, the oldest, which is in no sum."""
    W = weight.shape[1]
    tokens = op.Transpose(x, perm=[0, 2, 1])
    past = None
    if initial_state is not None:
        initial_state = op.CastLike(initial_state, x)
        past = _columns(initial_state, 1, W)
    y, present = standard.CausalConvWithState(
        tokens,
        op.Unsqueeze(op.CastLike(weight, x), _integers(1)),
        None if bias is None else op.CastLike(bias, x),
        past,
        activation=activation or "none",
    )
    if initial_state is None:  # a row of zeros in front of x
        first = _columns(tokens, 0, 1)
        initial_state = op.Expand(op.Sub(first, first), _integers(1, 1, W))
    oldest = _columns(op.Concat(initial_state, tokens, axis=2), -W, 1 - W or 2**31)
    return op.Transpose(y, perm=[0, 2, 1]), op.Concat(oldest, present, axis=2)


@_translates(gdn, kda, recurrence, *steps.values())
def _attention(
    q: Value, k: Value, v: Value, beta: Value, initial_state: Value, scale: float,
    g: Value = None, gk: Value = None, A_log: Value = None, dt_bias: Value = None,
    lower_bound: float | None = None, normalise: bool = False, sigmoid: int = 0, **_: Value,
) -> tuple[Value, ...]:  # fmt: skip
    decay, HV, dtype = gk if g is None else g, v.shape[2], q.dtype
    heads, channels = q.shape, () if decay is None else decay.shape
    if A_log is not None or dt_bias is not None or lower_bound is not None:
        (decay,) = _gate(decay, A_log, dt_bias, lower_bound)
    if normalise:
        q, k = (_l2norm(x, EPS)[0] for x in (q, k))
    if beta is None:  # ones, one for all heads
        tokens = op.Concat(op.Shape(v, start=0, end=2), _integers(1), axis=0)
        beta = op.Expand(op.Constant(value_floats=[1.0]), tokens)
    beta = op.Cast(beta, to=FLOAT)
    if sigmoid:
        beta = op.Mul(op.Sigmoid(beta), float(sigmoid))
    if initial_state is not None:
        initial_state = op.Cast(initial_state, to=FLOAT)
    o, present = standard.LinearAttention(
        _in_rows(q, heads, HV), _in_rows(k, heads, HV), _in_rows(v, v.shape, HV), initial_state,
        None if decay is None else _in_rows(decay, channels, HV), beta,
        update_rule="delta" if decay is None else "gated_delta",
        scale=float(scale), q_num_heads=HV, kv_num_heads=HV,
    )  # fmt: skip
    return op.Reshape(op.Cast(o, to=dtype), _integers(0, 0, HV, -1)), present


@_translates(*gates.values())
def _gate(
    g: Value, A_log: Value, dt_bias: Value, lower_bound: float | None, **_: Value
) -> tuple[Value, ...]:
    """eq:delta-gate, or eq:kda-gate with a bound."""
    raw = op.Cast(g, to=FLOAT)
    heads = _integers(*g.shape[2:])  # of one number, or of K
    if dt_bias is not None:
        raw = op.Add(raw, op.Reshape(op.Cast(dt_bias, to=FLOAT), heads))
    rate = None
    if A_log is not None:
        rate = op.Exp(op.Cast(A_log, to=FLOAT))
        rate = op.Reshape(rate, _integers(-1, *[1] * (len(g.shape) - 3)))
    if lower_bound is None:
        return (op.Neg(op.Mul(rate, op.Softplus(raw))),)
    raw = raw if rate is None else op.Mul(rate, raw)
    return (op.Mul(op.Sigmoid(raw), float(lower_bound)),)


@_translates(l2norm)
def _l2norm(x: Value, eps: float, impl: str = "") -> tuple[Value, ...]:
    y = op.Cast(x, to=FLOAT)
    squares = op.ReduceSumSquare(y, _integers(-1), keepdims=1)
    return (op.Cast(op.Div(y, op.Sqrt(op.Add(squares, eps))), to=x.dtype),)


@_translates(rms_norm_gated)
def _rms_norm_gated(
    x: Value, weight: Value, bias: Value, z: Value, eps: float, norm_before_gate: bool,
    activation: str, **_: Value,
) -> tuple[Value, ...]:  # fmt: skip
    y, gate = op.Cast(x, to=FLOAT), None
    if z is not None:
        z = op.Cast(z, to=FLOAT)
        gate = op.Sigmoid(z) if activation == "sigmoid" else op.Mul(z, op.Sigmoid(z))
    if gate is not None and not norm_before_gate:
        y = op.Mul(y, gate)
    squares = op.ReduceMean(op.Mul(y, y), _integers(-1), keepdims=1)
    y = op.Div(y, op.Sqrt(op.Add(squares, eps)))
    if weight is not None:
        y = op.Mul(y, op.Cast(weight, to=FLOAT))
    if bias is not None:
        y = op.Add(y, op.Cast(bias, to=FLOAT))
    if gate is not None and norm_before_gate:
        y = op.Mul(y, gate)
    return (op.Cast(y, to=x.dtype),)


def _integers(*numbers: int) -> Value:
    return op.Constant(value_ints=list(numbers))


def _columns(x: Value, first: int, end: int) -> Value:
    """x [B, D, T] from this column to before that."""
    return op.Slice(x, _integers(first), _integers(end), _integers(2))


def _in_rows(x: Value, shape: Sequence[int], HV: int) -> Value:
    """x of shape [B, T, H, ...] in float32, its heads repeated to HV, side by side in a row."""
    x = op.Cast(x, to=FLOAT)
    if len(shape) == 4 and shape[2] < HV:
        H, K = shape[2:]
        x = op.Reshape(x, _integers(0, 0, H, 1, K))
        x = op.Expand(x, _integers(1, 1, 1, HV // H, 1))
    return x if len(shape) == 3 else op.Reshape(x, _integers(0, 0, -1))
