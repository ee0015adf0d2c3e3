"""The recurrence: kernel against reference, and the properties the delta rule is chosen for."""

import pytest
import stages
import torch
from delta.stage_checks import check_stage, grid, inputs
from recurrent_cases import TOLERANCE, case, close, cotangents, double, oracle, run

from linattn_edu.kernels.delta.recurrent import recurrent as kernel
from linattn_edu.kernels.delta.recurrent import recurrent_bwd as kernel_bwd
from linattn_edu.reference.delta.recurrent import recurrent as reference
from linattn_edu.reference.delta.recurrent import recurrent_bwd as reference_bwd
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    if device.type == "cpu":  # the interpreter goes token by token and tile by tile
        T = min(T, 17 if V <= 128 else 3)
    x = inputs(T, K, V, dtype, device)
    args = (x.q, x.k, x.v, x.g, x.beta)
    check_stage(kernel, reference, args, scale=0.3, initial_state=x.initial_state)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [(1, 16, 12), (5, 33, 20), (17, 20, 40)], ids=str)
def test_erase_and_write_gates(size, dtype, device):
    stages.check("recurrent recurrent_bwd", "gdn2", *size, 16, dtype, device)


def test_full_write_replaces_what_was_stored():
    """beta = 1 and unit keys: after the write, reading the key gives the new value exactly."""
    x = gdn_inputs(1, 1, 1, 1, 16, 8, dtype=torch.float64, initial_state=True)
    x.beta[:] = 1
    x.g[:] = 0
    o, _ = reference(x.k, x.k, x.v, x.g, x.beta, scale=1.0, initial_state=x.initial_state)
    assert_close("o", o, x.v, 1e-12)


def test_nothing_written_and_nothing_forgotten():
    x = gdn_inputs(1, 9, 1, 1, 16, 8, dtype=torch.float64, initial_state=True, gate="none")
    x.beta[:] = 0
    _, S = reference(**x.asdict())
    assert torch.equal(S, x.initial_state)


def test_closed_gate_forgets():
    x = gdn_inputs(1, 5, 1, 1, 16, 8, dtype=torch.float64, initial_state=True, gate="closed")
    _, S = reference(**x.asdict())
    last = x.k[:, -1, :, :, None] * (x.beta[:, -1, :, None] * x.v[:, -1])[:, :, None, :]
    assert_close("S", S, last, 1e-12)


def test_state_shrinks_without_writes_of_value():
    """v = 0: |S| never grows for beta in [0, 2] and unit keys."""
    x = gdn_inputs(1, 40, 1, 1, 16, 8, dtype=torch.float64, initial_state=True, gate="none")
    beta = torch.linspace(0, 2, 40, dtype=torch.float64).view(1, 40, 1)
    S = x.initial_state
    for t in range(40):
        one = slice(t, t + 1)
        _, after = reference(
            x.q[:, one], x.k[:, one], 0 * x.v[:, one], x.g[:, one], beta[:, one], initial_state=S
        )
        assert after.norm() <= S.norm() * (1 + 1e-12)
        S = after


GATES = ("", "g", "gk", "gv", "g gk gv")
# T, heads, K, V: GVA, sizes that are no powers of two, more columns than one program takes
SHAPES = ((1, (1, 1), 16, 16), (2, (2, 4), 5, 3), (17, (1, 2), 33, 12), (30, (1, 1), 16, 20))
LARGE = ((257, (2, 6), 64, 100), (1000, (1, 2), 128, 128))  # on a GPU
NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dgk", "dgv", "dh0")
LENGTHS = (0, 5, 1, 0, 7, 0)

shapes = pytest.mark.parametrize("shape", SHAPES + LARGE * torch.cuda.is_available(), ids=str)
gates = pytest.mark.parametrize("gates", GATES)


def backward_case(shape, gates, device, **options):
    """(arguments, options, do, dht) of recurrent_bwd; beta reaches 2."""
    x = case(*shape, gates=gates, device=device, seed=shape[0], **options)
    x["beta"] = 2 * x["beta"]
    do, dht = cotangents((x["v"], torch.empty(shape_of_states(x), device=device)))
    gk_gv = {n: x[n] for n in ("gk", "gv")}
    args = tuple(x[n] for n in ("q", "k", "v", "g", "beta"))
    return args, {"scale": 0.3, "initial_state": x["initial_state"], **gk_gv}, do, dht


def shape_of_states(x):
    (B, _, _, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
    return (B if x["initial_state"] is None else len(x["initial_state"])), HV, K, V


def wide(args):
    return tuple(x.double() if isinstance(x, torch.Tensor) else x for x in args)


def wide_options(options):
    return dict(zip(options, wide(options.values()), strict=True))


def compare(got, want, tol, tol_gates):
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape
            close(name, a, b, tol_gates if name[1:] in ("g", "gk", "gv", "beta") else tol)


@gates
@shapes
def test_kernel_with_every_gate(shape, gates, device):
    args, options, _, _ = backward_case(shape, gates, device)
    got = kernel(*args, **options)
    want = reference(*wide(args), **wide_options(options))
    for name, a, b in zip(("o", "S"), got, want, strict=True):
        assert_close(name, a, b, 5e-6)


@gates
@shapes
def test_backward_kernel_matches_reference(shape, gates, device):
    """With a gradient of the final state and an initial state, or with neither: by the gate."""
    with_state = GATES.index(gates) % 2 == shape[0] % 2
    args, options, do, dht = backward_case(shape, gates, device, state=with_state)
    dht = dht if with_state else None
    want = reference_bwd(*wide(args), *wide((do, dht)), **wide_options(options))
    compare(kernel_bwd(*args, do, dht, **options), want, 1e-5, 3e-5)


@pytest.mark.parametrize("shape", [(3, (1, 2), 300, 40), (2, (2, 4), 512, 70)], ids=str)
def test_keys_wider_than_a_chunk_takes(shape, device):
    """The second with programs enough for the wide tile."""
    args, options, do, dht = backward_case(shape, "g gk", device)
    got = kernel(*args, **options)
    want = reference(*wide(args), **wide_options(options))
    for name, a, b in zip(("o", "S"), got, want, strict=True):
        assert_close(name, a, b, 5e-6)
    want = reference_bwd(*wide(args), *wide((do, dht)), **wide_options(options))
    compare(kernel_bwd(*args, do, dht, **options), want, 1e-5, 3e-5)


@pytest.mark.parametrize("dht", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_backward_kernel_without_one_end(state, dht, device):
    args, options, do, last = backward_case((5, (1, 2), 8, 6), "g", device, state=state, B=2)
    last = last if dht else None
    want = reference_bwd(*wide(args), *wide((do, last)), **wide_options(options))
    compare(kernel_bwd(*args, do, last, **options), want, 1e-5, 3e-5)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 9, 10, 17, 30])
def test_reference_is_the_gradient_of_the_recurrence(T, gates):
    """Where a block of sqrt(T) tokens ends with the sequence, and where it does not."""
    x = case(T, (2, 4), 5, 6, B=2, dtype=torch.float64, gates=gates, seed=T)
    outputs, want = run(oracle, x)
    rest = {n: x[n] for n in ("gk", "gv", "initial_state")}
    args = (x[n] for n in ("q", "k", "v", "g", "beta"))
    got = dict(zip(NAMES, reference_bwd(*args, *cotangents(outputs), **rest), strict=True))
    for name, b in want.items():
        assert_close(f"d{name}", got["d" + {"initial_state": "h0"}.get(name, name)], b, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_backward_kernel_in_half_precision(dtype, device):
    args, options, do, dht = backward_case((17, (1, 2), 16, 12), "g gk gv", device, dtype=dtype)
    got = kernel_bwd(*args, do, dht, **options)
    assert [x.dtype for x in got] == [dtype] * 3 + [torch.float32] * 5
    want = reference_bwd(*wide(args), *wide((do, dht)), **wide_options(options))
    compare(got, want, *TOLERANCE[dtype][1:])


@gates
@pytest.mark.parametrize("state", [True, False])
def test_packed_sequences(state, gates, device):
    """Lengths 0 and 1 among them, at both ends too; each as if it were alone."""
    cu_seqlens = torch.tensor(LENGTHS, device=device).cumsum(0)
    cu_seqlens = torch.cat([cu_seqlens.new_zeros(1), cu_seqlens])
    shape = (sum(LENGTHS), (1, 2), 8, 6)
    x = case(*shape, N=len(LENGTHS), gates=gates, device=device, state=state)
    want, d_want = run(oracle, double(x), scale=0.3, cu_seqlens=cu_seqlens)
    args = tuple(x[n] for n in ("q", "k", "v", "g", "beta"))
    rest = {n: x[n] for n in ("gk", "gv", "initial_state")} | {"scale": 0.3}
    got = kernel(*args, **rest, cu_seqlens=cu_seqlens)
    for name, a, b in zip(("o", "S"), got, want, strict=True):
        assert_close(name, a, b, 5e-6)
    d_outputs = [d.float() for d in cotangents(want)]
    got = kernel_bwd(*args, *d_outputs, **rest, cu_seqlens=cu_seqlens)
    for name, a in zip(NAMES, got, strict=True):
        key = {"dh0": "initial_state"}.get(name, name[1:])
        if key in d_want:
            close(name, a, d_want[key], 3e-5)


def test_backward_of_packed_sequences_has_the_bits_of_each_alone(device):
    args, options, do, dht = backward_case((9, (1, 2), 8, 6), "g", device, N=2)
    cu_seqlens = torch.tensor([0, 4, 9], device=device)
    whole = kernel_bwd(*args, do, dht, **options, cu_seqlens=cu_seqlens)
    again = kernel_bwd(*args, do, dht, **options, cu_seqlens=cu_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True) if a is not None)
    options["initial_state"] = options["initial_state"][1:]
    alone = kernel_bwd(*(x[:, 4:] for x in args), do[:, 4:], dht[1:], **options)
    for name, a, b in zip(NAMES, whole, alone, strict=True):
        if a is not None:
            assert torch.equal(a[1:] if name == "dh0" else a[:, 4:], b), name


FLAGS = (("norm",), ("sigmoid",), ("sigmoid", "neg"), ("gate",), ("v_first",),
         ("norm", "gate", "sigmoid", "neg", "v_first"))  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags_of_the_kernel(flags, inplace, device):
    x = case(6, (1, 2), 9, 20, B=2, flags=flags, device=device, gates="g gk gv")
    want = oracle(**double(x), flags=flags)
    state = x["initial_state"]
    got, S = kernel(
        **x, normalise="norm" in flags, sigmoid=("sigmoid" in flags) + ("neg" in flags),
        v_first="v_first" in flags, inplace=inplace,
    )  # fmt: skip
    assert (S is state) == inplace
    assert_close("o", got, want[0], 5e-6)
    assert_close("S", S, want[1], 5e-6)


def test_state_is_not_written_unless_asked_for(device):
    x = case(3, device=device)
    kept = x["initial_state"].clone()
    o, S = kernel(**x, output_final_state=False)
    assert S is None and torch.equal(x["initial_state"], kept)
    assert torch.equal(o, kernel(**x)[0])


def test_a_bias_may_be_left_out(device):
    x = case(3, flags=("gate",), device=device) | {"dt_bias": None}
    o, _ = kernel(**x)
    assert_close("o", o, oracle(**double(x), flags=("gate",))[0], 5e-6)


@pytest.mark.gpu
def test_wide_tile_of_many_heads():
    """With heads enough the kernel takes 32 columns in two warps: the same numbers."""
    x = case(50, (40, 40), 100, 72, B=32, device="cuda", gates="g gk gv")
    for name, a, b in zip(("o", "S"), kernel(**x), oracle(**double(x)), strict=True):
        assert_close(name, a, b, 5e-6)
