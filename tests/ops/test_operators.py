"""The operators registered with torch.library: schema, shapes for tracing, gradient, dispatch."""

import os

import gdn_checks
import pytest
import torch
from dplr import dplr_checks
from forks import python
from grids import FULL, parametrize
from recurrent_cases import case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from linattn_edu import (
    causal_conv1d,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    chunk_local_cumsum,
    ema_scan,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    l2norm,
    make_ring,
    mamba_chunk_scan_combined,
    rms_norm_gated,
    solve_tril,
)
from linattn_edu.ops import causal_conv1d as conv
from linattn_edu.ops import causal_conv1d_update as conv_update
from linattn_edu.ops import cumsum, ema, prefill, ring
from linattn_edu.ops import l2norm as norm
from linattn_edu.ops import rms_norm_gated as gated
from linattn_edu.ops import solve_tril as inverse
from linattn_edu.ops.delta import decode, gate, recurrence, replay
from linattn_edu.ops.dplr import chunk as rank_one
from linattn_edu.ops.dplr import recurrent
from linattn_edu.ops.gdn import chunk as gdn
from linattn_edu.ops.gdn2 import chunk as gdn2
from linattn_edu.ops.kda import chunk as kda
from linattn_edu.ops.operator.composing import several
from linattn_edu.ops.ssd import chunk as ssd
from linattn_edu.ops.ssd import replay as replay_ssd
from linattn_edu.ops.ssd import step
from linattn_edu.testing import ssd_inputs

IMPLS = ("triton", "reference")
T, HV, K, V = 3, 2, 8, 6
ALL = ("norm", "gate", "sigmoid", "neg", "v_first")


def leaves(tensors):
    """Copies that ask for a gradient, except of what is no floating-point tensor."""
    return tuple(x.clone().requires_grad_() if is_float(x) else x for x in tensors)


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def every(options):
    """Each with the kernels, the second, of packed sequences, with the reference."""
    return [("triton", o) for o in options] + [("reference", options[1])]


def packed_one(impl, options, of):
    """The case of `every` that is compiled too: the second, with the kernels."""
    return impl == "triton" and options == of[1]


SEEN_ALONE = ("test_schema", "test_autograd_registration", "test_faketensor")


def check(operator, *arguments, compiled=True):
    """The forward pass: schema, shapes for tracing, and the gradient if it has one.

    Not compiled: without AOTAutograd, which takes most of the time. What it traces differs from
    case to case in the shapes and in what has a gradient: `check_symbolic` asks for these.
    """
    given = leaves(arguments) if operator.backward_names else arguments
    compiled = FULL or compiled
    more = ("test_aot_dispatch_dynamic",) if compiled else ()
    torch.library.opcheck(operator.registered, given, test_utils=(*SEEN_ALONE, *more))
    if not compiled:
        check_symbolic(operator, given)


def check_symbolic(operator, arguments):
    """Outputs and gradients of tensors whose sizes are symbols are like those of the tensors."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        given = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        found = passes(operator, given)
    given = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), arguments)
    given = [
        x.requires_grad_(y.requires_grad) if isinstance(x, torch.Tensor) else x
        for x, y in zip(given, arguments, strict=True)
    ]
    for got, want in zip(found, passes(operator, given), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.ndim == want.ndim and got.dtype == want.dtype, (got, want)
            assert got.requires_grad == want.requires_grad
            known = [
                (int(n), m) for n, m in zip(got.shape, want.shape, strict=True) if known_size(n)
            ]
            assert all(n == m for n, m in known), (got.shape, want.shape)


def known_size(n):
    """Not so where it follows from numbers in a tensor, as that of the chunks of sequences does."""
    return not has_free_unbacked_symbols(n)


def passes(operator, arguments):
    """The outputs of what is registered, and the gradients of all that asks for one."""
    outputs = several(operator.registered(*arguments))
    inputs = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    ends = [y for y in outputs if y.requires_grad]
    if not ends:
        return outputs
    cotangents = [torch.ones_like(y) for y in ends]
    return *outputs, *torch.autograd.grad(ends, inputs, cotangents, allow_unused=True)


def check_shapes(operator, *arguments):
    """The same of what has no gradient of its own: it mutates nothing, and is traced aright."""
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator.registered, arguments, test_utils=utils)


def check_backward(operator, *arguments, without=()):
    """The backward pass, for random gradients of the outputs but those named."""
    given = dict(zip(operator.names, arguments, strict=True))
    outputs = dict(zip(operator.outputs, operator._run(*arguments), strict=True))
    for n, out in operator.outputs.items():
        given[n] = outputs[n]
        if out.gradient:
            absent = outputs[n] is None or n in without
            given[out.gradient] = None if absent else torch.randn_like(outputs[n])
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operator.registered_backward, [given[n] for n in operator.backward_names], test_utils=utils
    )


def chunk_arguments(device, packed=False, dtype=torch.float32, gate=False, state=True):
    """The tensors of the chunked form; cu_seqlens and what goes with it."""
    flags, N = ("gate",) * gate, 3 if packed else 1
    x = case(T, (1, HV), K, V, N=N, device=device, dtype=dtype, flags=flags, state=state)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    return tuple(x.get(n) for n in names), packing_of(packed, device)


def packing_of(packed, device):
    """cu_seqlens, the same on the CPU; no chunk_indices; nothing on other ranks."""
    cu_seqlens = bounds(device) if packed else None
    return cu_seqlens, cu_seqlens if cu_seqlens is None else cu_seqlens.cpu(), None, None, None


def bounds(device):
    return torch.tensor([0, 2, 2, T], device=device)


HALF = {"dtype": torch.bfloat16}  # beside a gate in float32
CHUNK = ({}, {"packed": True, **HALF}, {"gate": True, "state": False}, HALF)


@pytest.mark.parametrize(("impl", "options"), every(CHUNK), ids=str)
def test_chunk(impl, options, device):
    tensors, packing = chunk_arguments(device, **options)
    wants_state = tensors[-1] is not None
    halves = options == HALF
    rest = (*packing, 0.5, wants_state, 16, halves, "", impl, "")
    saved = "gc P AG P_low AG_low" if halves else "gc A"
    check(gdn.chunk, *tensors, *rest, saved, compiled=packed_one(impl, options, CHUNK))
    check_shapes(gdn.chunk, *tensors, *packing, 0.5, not wants_state, 16, halves, "", impl, "", "")
    check_backward(gdn.chunk, *tensors, *rest, saved)


def kda_arguments(device, packed=False, dtype=torch.float32, gate=(), state=True):
    """The tensors of chunk_kda; cu_seqlens and what goes with it."""
    N = 3 if packed else 1
    x = case(T, (1, HV), K, V, N=N, device=device, dtype=dtype, gates="gk", state=state)
    x |= {"g": x["gk"], "A_log": torch.zeros(HV, device=device)}
    x["dt_bias"] = torch.zeros(HV, K, device=device)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    packing = packing_of(packed, device)
    unused = {"A_log", "dt_bias"} - set(gate)
    return tuple(None if n in unused else x[n] for n in names), packing


ALL_KEPT, ROWS_KEPT = "P A gc w kg qg h v_new", "P A gc kg qg kd"
SOME_FINE = "P A P_fine A_fine cancels"
# what there is, the gate's lower bound and the one that is promised, what is saved and kept: with
# P and A alone, or the gated rows too, by the fused stages
KDA = (
    ({}, None, -5.0, "P A", "h"),
    ({"packed": True, "gate": ("A_log", "dt_bias")}, -5.0, -5.0, ALL_KEPT, ""),
    ({"packed": True}, None, None, "P A", "h"),
    ({"gate": ("A_log",), "state": False, "dtype": torch.bfloat16}, None, None, "P A", ""),
    ({"packed": True, "dtype": torch.bfloat16}, None, -5.0, "P A", ""),
    ({"gate": ("dt_bias",), "dtype": torch.bfloat16}, -5.0, None, ALL_KEPT, ""),
    ({"gate": ("A_log",), "dtype": torch.bfloat16}, None, None, ROWS_KEPT, ""),
    ({"halves": 1, "dtype": torch.bfloat16}, None, None, SOME_FINE, ""),
    (
        {"halves": 1, "raw": True, "packed": True, "dtype": torch.bfloat16},
        None,
        None,
        SOME_FINE,
        "",
    ),
    ({"halves": 2, "packed": True, "dtype": torch.bfloat16}, None, None, "P_fine A_fine", ""),
)


KINDS = [(*each, False) for each in every(KDA)]
KINDS += [(*each, True) for each in every(KDA) if FULL or each[1] in (KDA[1], KDA[4])]


@pytest.mark.parametrize(("impl", "options", "gates"), KINDS, ids=str)
def test_chunk_kda(impl, options, gates, device):
    """And GDN-2, which has the same composition."""
    given, bound, safe, save, keep = options
    given = dict(given)
    halves, raw = given.pop("halves", 0), given.pop("raw", False)
    tensors, packing = kda_arguments(device, **given)
    wants_state = tensors[-1] is not None
    fused = 2 * (halves > 0 or (save, keep) in (("P A", ""), (ROWS_KEPT, "")))
    tensors += tensors[:2] if raw else (None, None)
    chunk = kda.chunk
    if gates:
        q, k, v, g, beta, *rest = tensors
        given = gdn_checks.gated({"q": q.expand(-1, -1, HV, -1), "v": v, "beta": beta})
        chunk, tensors = gdn2.chunk, (q, k, v, g, given["b"], given["w"], *rest)
    numbers, form = (*packing, 0.5, bound, safe), (16, fused, halves, "", impl, keep)
    compiled = packed_one(impl, options, KDA)
    check(chunk, *tensors, *numbers, wants_state, *form, save, compiled=compiled)
    check_shapes(chunk, *tensors, *numbers, not wants_state, *form, "")
    check_backward(chunk, *tensors, *numbers, wants_state, *form, save)


def recurrent_arguments(device, gates="g", packed=False, dtype=torch.float32, state=True):
    """q, k, v, g, beta, gk, gv, initial_state, cu_seqlens."""
    x = case(
        T, (1, HV), K, V, N=3 if packed else 1, gates=gates, state=state, device=device, dtype=dtype
    )
    names = ("q", "k", "v", "g", "beta", "gk", "gv", "initial_state")
    cu_seqlens = bounds(device) if packed else None
    return *(x[n] for n in names), cu_seqlens


RECURRENT = (
    {"gates": "g"},
    {"gates": "gk gv", "packed": True},
    {"gates": "", "state": False},
    {"gates": "g gk gv", "dtype": torch.float16},
)


@pytest.mark.parametrize(("impl", "options"), every(RECURRENT), ids=str)
def test_recurrent(impl, options, device):
    arguments = (*recurrent_arguments(device, **options), 0.5, impl)
    compiled = packed_one(impl, options, RECURRENT)
    check(recurrence.recurrence, *arguments, compiled=compiled)
    for without in ((), ("final_state",)):
        check_backward(recurrence.recurrence, *arguments, without=without)
    q, k, v, g, beta, *rest = arguments[:8]
    b, w = gates_of(v, beta)
    arguments = (q, k, v, g, b, *rest, w, *arguments[8:])
    check(recurrence.gated, *arguments, compiled=compiled)
    check_backward(recurrence.gated, *arguments)


DPLR = ({}, {"N": 3}, {"state": False, "dtype": torch.bfloat16})


@pytest.mark.parametrize(("impl", "options"), every(DPLR), ids=str)
def test_dplr_recurrent(impl, options, device):
    options = {"dtype": torch.float32} | options
    x = dplr_checks.inputs(1, T, HV, K, V, device=device, **options)
    tensors = [x.get(n) for n in (*dplr_checks.NAMES, "initial_state")]
    cu_seqlens = bounds(device) if "N" in options else None
    arguments = (*tensors, cu_seqlens, 0.5, True, impl)
    compiled = packed_one(impl, options, DPLR)
    check(recurrent.rank_one, *arguments, compiled=compiled)
    for without in ((), ("final_state",)):
        check_backward(recurrent.rank_one, *arguments, without=without)
    bounds_of = (cu_seqlens, cu_seqlens if cu_seqlens is None else cu_seqlens.cpu())
    arguments = (*tensors, *bounds_of, *(None,) * 3, 0.5, True, 16, "", impl, "", "")
    check(rank_one.chunk, *arguments, compiled=compiled)
    check_backward(rank_one.chunk, *arguments, without=("final_state",) * ("N" in options))


def gates_of(v, beta):
    """GDN-2's gates, of K and V channels."""
    x = gdn_checks.gated({"q": v.new_empty(*v.shape[:3], K), "v": v, "beta": beta})
    return x["b"], x["w"]


@parametrize(1, flags=((), ALL), packed=(False, True))
def test_steps(flags, packed, device):
    x = case(T, (1, HV), K, V, N=3 if packed else 1, gates="g gk gv", flags=flags, device=device)
    x = {n: t.view(HV, 1) if n == "dt_bias" and t is not None else t for n, t in x.items()}
    cu_seqlens, slots = bounds(device) if packed else None, (None, None)
    rest = (cu_seqlens, 0.5, bool(flags), 2 * bool(flags), None)
    for of_channels in (False, True):
        if of_channels:
            x["beta"], x["write"] = gates_of(x["v"], x["beta"])
            rest = (cu_seqlens, 0.5, bool(flags), 0, None)
        step = recurrence.steps[bool(flags), of_channels]
        tensors = tuple(x.get(n) for n in step.inputs)
        for output_final_state in (True, False):
            check_shapes(step, *tensors, *rest, output_final_state, "triton")
        check(decode.steps_[of_channels], *tensors, *slots, *rest, bool(flags), "triton")


@parametrize(1, lower_bound=(None, -5.0), of_channels=(False, True))
def test_steps_of_a_pool(lower_bound, of_channels, device):
    """With a raw gate for each channel; slots for each token, of which some were rejected."""
    x = case(T, (1, HV), K, V, N=5, gates="gk", flags=("v_first",), device=device)
    x |= {"A_log": torch.zeros(HV, device=device), "dt_bias": torch.zeros(HV, K, device=device)}
    x["beta"], x["write"] = gates_of(x["v"], x["beta"]) if of_channels else (x["beta"], None)
    step = recurrence.steps[True, of_channels]
    *tensors, pool = (x[n] for n in step.inputs)
    indices = torch.tensor([[3, 1], [-1, 0], [4, -1]], device=device)
    slots = (indices, torch.tensor([2, 1, 1], device=device))
    flags = (bounds(device), 0.5, True, 0, lower_bound)
    for state, where in ((pool[:3], (None, None)), (pool, slots)):
        given = (*tensors, state, *where, *flags, True, "triton")
        check(decode.steps_[of_channels], *given, compiled=where is slots)
    check_shapes(step, *tensors, pool[:3], *flags, True, "triton")
    tensors = tensors[: 7 + of_channels]
    numbers = (bounds(device), 0.5, True, "reference")
    check(decode.pools_[of_channels], *tensors, pool, *slots, *numbers)
    check(prefill.read, pool, slots[0].flatten()[:1], "slots", "pool", "reference")


@parametrize(1, channels=(False, True), impl=IMPLS)
def test_replay(channels, impl, device):
    """And the fold of what a ring has."""
    x = case(T, (1, HV), K, V, B=2, N=3, gates="gk" if channels else "g", device=device)
    pool = x["initial_state"]
    empty = make_ring(pool, 1, length=4, tokens=T, channels=channels, dtype=torch.float32)
    slots, accepted = torch.tensor([2, -1], device=device), torch.tensor([1, 0], device=device)
    tensors = [x.get(n) for n in replay.replay_.inputs[:8]]
    for where in ((pool[:2], None, None), (pool, slots, accepted)):
        parts = (part[: len(where[0])] for part in empty[:4])
        arguments = (*tensors, *parts, *where, 0.5, True, 0, None, False, 4, impl)
        check(replay.replay_, *arguments, compiled=where[1] is slots)
    for last in (None, accepted):
        compiled = last is not None
        check(ring.commit_, *empty[:4], pool, slots, last, False, impl, compiled=compiled)


def tokens_of_ssd(n, device):
    """What n tokens have, what may be left out, and as many states."""
    x = ssd_inputs(n, 1, 4, 2, K, V, device=device)
    tokens = (x.x[:, 0], x.dt[:, 0, :, None], x.A[:, None, None], x.B[:, 0], x.C[:, 0])
    return tokens, (x.D[:, None].expand(-1, K), x.z[:, 0], x.dt_bias[:, None]), x.initial_states


@pytest.mark.parametrize("impl", IMPLS)
def test_replay_of_ssd(impl, device):
    x = ssd_inputs(2, T, 4, 2, K, V, device=device)
    tensors = (x.x, x.dt, x.A, x.B, x.C)
    more = (x.D[:, None].expand(-1, K).contiguous(), x.z, x.dt_bias)
    empty = make_ring(x.initial_states, 2, length=4, tokens=T, dtype=x.B.dtype, state_v_first=True)
    slots, accepted = torch.tensor([1, -1], device=device), torch.tensor([1, 0], device=device)
    for given, where in ((more, (None, None)), ((None, None, None), (slots, accepted))):
        arguments = (*tensors, *given, *empty[:4], x.initial_states, *where, True, 4, impl)
        check(replay_ssd.replay_, *arguments, compiled=(impl == "triton") == (given is more))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_step_of_ssd(impl, pool, device):
    """One number a head, and one for each row; with all that may be left out, and without."""
    tokens, rest, states = tokens_of_ssd(2, device)
    indices = torch.tensor([-1, 1], device=device) if pool else None
    for given in (rest, (None, None, None)):
        compiled = impl == "triton" and pool == (given is rest)
        check(step.update, *tokens, *given, states, indices, True, impl, compiled=compiled)


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_drafts_of_ssd(impl, accepted, device):
    tokens, rest, states = tokens_of_ssd(5, device)
    indices = torch.tensor([[-1, 1, 2], [0, -1, 4]], device=device)
    where = (indices, torch.tensor([2, 1], device=device) if accepted else None,
             torch.tensor([0, 3, 4], device=device))  # fmt: skip
    for given in (rest, (None, None, None)):
        compiled = impl == "triton" and accepted == (given is rest)
        check(step.drafts, *tokens, *given, states, *where, True, impl, compiled=compiled)


SSD = (
    {},
    {"packed": True, "given": ("D", "z", "dt_bias", "initial_states", "seq_idx")},
    {"given": ("D", "initial_states"), "dtype": torch.bfloat16},
    {"packed": True, "given": ("dt_bias", "z"), "dtype": torch.bfloat16},
)


@pytest.mark.parametrize(("impl", "options"), every(SSD), ids=str)
def test_ssd(impl, options, device):
    """Kernels in stages for float32, fused for bfloat16."""
    asked, options = options, {"given": (), "packed": False, "dtype": torch.float32} | options
    x, given = ssd_inputs(1, T, 4, 2, K, V, dtype=options["dtype"], device=device), options["given"]
    x.D, states = x.D[:, None], x.initial_states.mT.contiguous()
    if options["packed"]:
        states = states.repeat(3, 1, 1, 1)
    D, z, bias, idx = (getattr(x, n) if n in given else None
                       for n in ("D", "z", "dt_bias", "seq_idx"))  # fmt: skip
    wants_state = "initial_states" in given
    tensors = x.x, x.dt, x.A, x.B, x.C, D, z, bias, states if wants_state else None, idx
    packing = packing_of(options["packed"], device)
    form = "fused" if impl == "triton" and x.x.element_size() == 2 else impl
    numbers = (True, 0.0, 1e9)
    compiled = packed_one(impl, asked, SSD)
    check(
        ssd.scan, *tensors, *packing, *numbers, wants_state, 16, "", form, "", "", compiled=compiled
    )
    check_shapes(ssd.scan, *tensors, *packing, *numbers, not wants_state, 16, "", form, "", "")
    check_backward(ssd.scan, *tensors, *packing, *numbers, wants_state, 16, "", form, "", "")


EMA = (
    {},
    {"packed": True},
    {"weight": False, "state": False},
    {"weight": False, "dtype": torch.bfloat16},
)


@pytest.mark.parametrize(("impl", "options"), every(EMA), ids=str)
def test_ema(impl, options, device):
    compiled = packed_one(impl, options, EMA)
    options = {"weight": True, "state": True, "packed": False, "dtype": torch.float32} | options
    x = torch.randn(1, T, HV, V, device=device).to(options["dtype"])
    g, weight = -torch.rand(1, T, HV, device=device), torch.rand(1, T, HV, device=device)
    packing = packing_of(options["packed"], device)
    state = torch.randn(3 if options["packed"] else 1, HV, V, device=device)
    tensors = x, g, weight if options["weight"] else None, state if options["state"] else None
    given = (*tensors, *packing, options["state"], 16, "", impl, "", "gc h")
    check(ema.scan, *given, compiled=compiled)
    check_shapes(ema.scan, *tensors, *packing, not options["state"], 16, "", impl, "", "")
    check_backward(ema.scan, *given)


CONV = [{}, {"packed": True}, {"dtype": torch.bfloat16, "bias": False, "state": False}]
CONV += [{"sequences": True}, {"sequences": True, "bias": False}]


@pytest.mark.parametrize(("impl", "options"), every(CONV), ids=str)
def test_convolution(impl, options, device):
    compiled = packed_one(impl, options, CONV)
    options = {"bias": True, "state": True, "packed": False, "dtype": torch.float32} | options
    x = torch.randn(1, T, K, device=device).to(options["dtype"])
    numbers = torch.arange(T, device=device, dtype=torch.int32)[None] // 2
    numbers = numbers if options.get("sequences") else None
    weight, bias = torch.randn(K, 4, device=device), torch.randn(K, device=device)
    packing = packing_of(options["packed"], device)
    state = torch.randn(3 if options["packed"] else 1, K, 4, device=device)
    tensors = x, weight, bias if options["bias"] else None, state if options["state"] else None
    tensors = (*tensors, numbers, *packing)
    given = (*tensors, options["state"], "silu", 64, "", impl, "", "")
    check(conv.convolve, *given, compiled=compiled)
    check_shapes(conv.convolve, *tensors, not options["state"], None, 64, "", impl, "", "")
    check_backward(conv.convolve, *given)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_convolution_in_place(impl, ring, device):
    x, state = torch.randn(2, 1, K, device=device), torch.randn(5, K, 4, device=device)
    weight, slots = torch.randn(K, 4, device=device), torch.tensor([3, 0], device=device)
    lengths = 2 * slots if ring else None
    tensors = x, weight, None if ring else weight[:, 0].contiguous(), state, lengths, slots
    compiled = impl == "triton"
    check(conv_update.update, *tensors, "silu" if ring else None, impl, compiled=compiled)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_gated_norm(impl, given, device):
    x, z = torch.randn(2, 3, 2, 4, device=device), torch.randn(2, 3, 2, 4, device=device)
    tensors = x, *((z[0, 0], z[0, 1], z) if given else (None, None, None))
    check(gated.norm, *tensors, 1e-6, given, "silu", impl, compiled=impl == "triton")
    check_backward(gated.norm, *tensors, 1e-6, given, "silu", impl)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_gates(impl, channels, device):
    shape = (HV, K) if channels else (HV,)
    a, A_log = torch.randn(1, T, *shape, device=device), torch.zeros(HV, device=device)
    operator = gate.gates[a.ndim]
    for bias in (torch.randn(shape, device=device), None):
        compiled = impl == "triton" and bias is not None
        check(operator, a, A_log, bias, None, impl, compiled=compiled)
        check_backward(operator, a, A_log, bias, None, impl)
    if channels:
        check(operator, a, None, None, -5.0, impl, compiled=False)
        check_backward(operator, a, None, None, -5.0, impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 4, 5)], ids=str)
def test_l2norm(shape, dtype, device):
    x = torch.randn(shape, device=device, dtype=dtype)
    for impl in IMPLS[dtype == torch.float64 :]:
        check(norm.norm, x, 1e-6, impl, compiled=impl == "triton" and dtype == torch.float32)
        check_backward(norm.norm, x, 1e-6, impl)


def helper_bounds(device, given):
    """cu_seqlens, cu_seqlens_cpu and chunk_indices of sequences of 3, 0 and 17 tokens."""
    cu_seqlens = torch.tensor([0, 3, 3, 20], device=device)
    indices = torch.tensor([[0, 0], [2, 0], [2, 1]], device=device)
    return {
        "nothing": (None, None, None),
        "cpu": (cu_seqlens, cu_seqlens.cpu(), None),
        "indices": (cu_seqlens, None, indices),
    }[given]


@pytest.mark.parametrize("given", ["nothing", "cpu", "indices"])
@pytest.mark.parametrize("impl", IMPLS)
def test_cumsum_and_solve(impl, given, device):
    packing = helper_bounds(device, given)
    x = torch.randn(1, 20, 3, device=device)
    compiled = impl == "triton"
    check(cumsum.local, x, *packing, 2.0, True, 16, impl, compiled=compiled)
    check_shapes(cumsum.local, x.bfloat16(), *packing, 1.0, False, 16, impl)
    check(cumsum.whole, x, packing[0], 2.0, True, impl, compiled=compiled)
    A = torch.randn(1, 20, 1, 16, device=device) / 4
    check(inverse.solve, A, *packing, impl, compiled=compiled)
    check_backward(inverse.solve, A, *packing, impl)


def test_every_operator_is_checked():
    """The names this file knows are those the library registers."""
    registered = {str(s.name).split("::")[1] for s in torch._C._jit_get_all_schemas()
                  if str(s.name).startswith("linattn_edu::")}  # fmt: skip
    registered = {n for n in registered if not n.startswith("toy_")}  # of test_operator
    differentiable = (
        "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "l2norm", "recurrent",
        "recurrent_gated", "dplr_recurrent", "chunk_dplr_delta_rule", "solve_tril", "gdn_gate",
        "kda_gate", "ema_scan", "mamba_chunk_scan_combined", "causal_conv1d", "rms_norm_gated",
    )  # fmt: skip
    assert registered == {
        *differentiable, *(f"{n}_backward" for n in differentiable),
        "chunk_local_cumsum", "chunk_global_cumsum",  # whose adjoints they are themselves
        "recurrent_pool", "recurrent_step", "recurrent_step_v_first", "recurrent_step_",
        "recurrent_pool_gated", "recurrent_step_gated", "recurrent_step_gated_v_first",
        "recurrent_step_gated_",
        "selective_state_update", "selective_state_update_drafts", "causal_conv1d_update",
        "pool_rows", "replay_delta_rule", "replay_selective_state_update", "commit_ring",
    }  # fmt: skip


WATCHED = {
    "chunk_kda": lambda x: chunk_kda(x, x, x, -x.abs(), x[..., 0].abs())[0],
    "chunk_gdn2": lambda x: chunk_gdn2(x, x, x, -x.abs(), x.abs(), x.abs())[0],
    "chunk_gated_delta_rule": lambda x: chunk_gated_delta_rule(
        x, x, x, -x[..., 0].abs(), x[..., 1].abs()
    )[0],
    "dplr_recurrent": lambda x: fused_recurrent_dplr_delta_rule(x, x, x, -x, x, -x.abs())[0],
    "chunk_dplr_delta_rule": lambda x: chunk_dplr_delta_rule(x, x, x, -x, x, -x.abs())[0],
    "recurrent": lambda x: fused_recurrent_gated_delta_rule(x, x, x)[0],
    "ema_scan": lambda x: ema_scan(x, -x[..., 0].abs(), x[..., 1])[0],
    "mamba_chunk_scan_combined": lambda x: mamba_chunk_scan_combined(
        x, x[..., 1].square(), -x[0, 0, :, 0].abs(), x, x, 16, D=x[0, 0, :, 1], z=x
    ),
    "causal_conv1d": lambda x: causal_conv1d(
        x.flatten(2), x[0, 0, 0].expand(4, -1).mT, activation="silu"
    )[0].view_as(x),
    "l2norm": l2norm,
    "rms_norm_gated": lambda x: rms_norm_gated(x, x[0, 0, 0], None, x, group_size=8),
    "solve_tril": solve_tril,
    "chunk_local_cumsum": lambda x: chunk_local_cumsum(x, 16),
}


class Watch(TorchDispatchMode):
    """Notes the operators of this library that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if f.namespace == "linattn_edu":
            self.seen.append(f.name().removeprefix("linattn_edu::"))
        return f(*args, **kwargs or {})


@pytest.mark.parametrize("name", WATCHED)
def test_who_watches_sees_the_operator(name, device):
    """Selective checkpointing, say, sees it by its name; the results are the same."""
    x = (torch.randn(1, 5, 1, 16, device=device) / 4).requires_grad_()
    plain = WATCHED[name](x)
    (dx,) = torch.autograd.grad(plain.sum(), x)
    with Watch() as watch:
        y = WATCHED[name](x)
        (watched,) = torch.autograd.grad(y.sum(), x)
    backward = f"{name}_backward" if name != "chunk_local_cumsum" else name
    assert watch.seen == [name, backward]
    assert torch.equal(y, plain) and torch.equal(watched, dx)


@pytest.mark.parametrize("name", WATCHED)
def test_fake_tensors_have_no_numbers_to_check(name):
    with FakeTensorMode():
        assert WATCHED[name](torch.randn(1, 5, 1, 16)).shape == (1, 5, 1, 16)


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("leaf", [False, True])
def test_forward_mode_is_refused(leaf, name, device):
    """And no tangent is lost without a word."""
    x = torch.randn(1, 5, 1, 16, device=device, requires_grad=leaf) / 4
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward mode"):
            WATCHED[name](x)


def test_calls_that_nobody_watches_import_no_compiler():
    """PyTorch's compiler takes seconds to import, and is imported by an operator's first call."""
    program = """
import sys, torch
from linattn_edu import chunk_gated_delta_rule, chunk_kda, fused_recurrent_kda
x = torch.rand(1, 5, 1, 16, requires_grad=True)
options = {"use_qk_l2norm_in_kernel": True}
chunk_kda(x, x, x, -x, x[..., 0], **options)[0].sum().backward()
chunk_gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], **options)[0].sum().backward()
fused_recurrent_kda(x, x, x, -x, x[..., 0], **options)[0].sum().backward()
assert x.grad.isfinite().all()
print("torch._dynamo" in sys.modules)
"""
    done = python("-c", program, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.stdout.strip() == "False", done.stderr
