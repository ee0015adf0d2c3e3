"""The short convolution: both kernels against the reference, and that against PyTorch's own."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from delta.stage_checks import DTYPES, check_stage
from grids import combinations, few, parametrize
from grids import name as short
from ssd import ssd_checks

from linattn_edu.kernels.delta import causal_conv1d as kernels
from linattn_edu.packing import pack
from linattn_edu.reference.delta import causal_conv1d as references
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

GIVEN = ("nothing", "bias", "state", "both")
ACTIVATIONS = (None, "silu")
ROOMS = pytest.mark.parametrize("room", [kernels, references], ids=["kernel", "reference"])
NUMPY = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in the interpreter
OUTPUTS = ("y", "final state")


def draw(N, T, D, W, given="both", dtype=torch.float32, device="cpu", wide=torch.float32):
    """x, weight, bias and state or None, of which those of the layer are wide; dy and dht.

    The same numbers on every device. No sum of dy, nor of dy times x, cancels to nearly nothing.
    """
    generator = torch.Generator().manual_seed(1000 * T + 10 * D + W)

    def randn(*shape, dtype=dtype):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(*shape, generator=generator, dtype=exact).to(device, dtype)

    x, dy, state, dht = (randn(*shape) for shape in 2 * ((N, T, D),) + 2 * ((N, D, W),))
    dy = dy + x + 1
    weight, bias = randn(D, W, dtype=wide), randn(D, dtype=wide)
    bias = bias if given in ("bias", "both") else None
    return (x, weight, bias, state if given in ("state", "both") else None), (dy, dht)


CASES = combinations(
    T=few(1, 3, 130, more=(2, 15, 64, 65, 100, 257)), W=few(1, 4, more=(2, 3, 8)),
    D=few(33, 70, more=(1,)), dtype=DTYPES, given=GIVEN, activation=ACTIVATIONS,
)  # fmt: skip
WIDEST = (65, 8, 33, torch.bfloat16, "both", "silu")  # slow in the interpreter


@pytest.mark.parametrize(
    ("T", "W", "D", "dtype", "given", "activation"), dict.fromkeys((*CASES, WIDEST)), ids=short
)
def test_kernels_match_references(T, W, D, dtype, given, activation, device):
    x, (dy, dht) = draw(3 if T < 15 else 1, T, D, W, given, dtype, device)
    options = {"activation": activation}
    stages = (kernels.causal_conv1d, references.causal_conv1d)
    check_stage(*stages, x, **options, output_final_state=True)
    stages = (kernels.causal_conv1d_bwd, references.causal_conv1d_bwd)
    check_stage(*stages, (*x, dy, dht if T % 2 else None), **options)


@parametrize(T=(1, 3, 7, 20), W=(1, 2, 3, 4, 8), given=GIVEN, activation=ACTIVATIONS)
def test_reference_is_pytorchs_convolution(T, W, given, activation):
    """Outputs, and gradients by autograd, in float64."""
    x, (dy, dht) = draw(2, T, 5, W, given, torch.float64, wide=torch.float64)
    leaves = [None if t is None else t.clone().requires_grad_() for t in x]
    one, weight, bias, state = leaves
    u = torch.cat([torch.zeros_like(dht).mT if state is None else state.mT, one], 1)
    p = F.conv1d(u[:, 1:].mT, weight[:, None], bias, groups=5).mT
    want = (F.silu(p) if activation else p, u[:, T:].mT)
    got = references.causal_conv1d(*x, activation=activation, output_final_state=True)
    for name, a, b in zip(OUTPUTS, got, want, strict=True):
        assert_close(name, a, b, 1e-12)
    given_leaves = [t for t in leaves if t is not None]
    want = torch.autograd.grad(want, given_leaves, (dy, dht))
    got = references.causal_conv1d_bwd(*x, dy, dht, activation=activation)
    assert [dt is None for dt in got] == [t is None for t in x]
    for t, a, b in zip(given_leaves, (dt for dt in got if dt is not None), want, strict=True):
        assert_close(f"gradient of {tuple(t.shape)}", a, b, 1e-12)


@pytest.mark.parametrize("given", few("both", more=("nothing",)))
def test_packed_sequences_are_each_by_itself(given, device):
    """To the bit, shorter than W, empty, and longer than a chunk; sums are of all of them."""
    lengths, W = (3, 0, 70, 1, 64, 0), 4
    N, bounds = len(lengths), torch.tensor([0, *lengths], device=device).cumsum(0)
    (x, weight, bias, _), (dy, _) = draw(1, sum(lengths), 20, W, given, device=device)
    (*_, state), (_, dht) = draw(N, 1, 20, W, given, device=device)
    packed = {"activation": "silu", "packing": pack(bounds, kernels.BT)}
    y, ht = kernels.causal_conv1d(x, weight, bias, state, output_final_state=True, **packed)
    dx, dw, db, dh0 = kernels.causal_conv1d_bwd(x, weight, bias, state, dy, dht, **packed)
    sums = torch.zeros(2, *dw.shape, dtype=torch.float64, device=device)
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        own = None if state is None else state[n : n + 1]
        if a == b:
            left = torch.zeros_like(ht[n]) if state is None else state[n]
            assert torch.equal(ht[n], left) and (state is None or torch.equal(dh0[n], dht[n]))
            continue
        one = x[:, a:b].clone(), weight, bias, own
        want = kernels.causal_conv1d(*one, activation="silu", output_final_state=True)
        assert torch.equal(y[:, a:b], want[0]) and torch.equal(ht[n : n + 1], want[1])
        args = (*one, dy[:, a:b].clone(), dht[n : n + 1])
        want = kernels.causal_conv1d_bwd(*args, activation="silu")
        assert torch.equal(dx[:, a:b], want[0])
        assert state is None or torch.equal(dh0[n : n + 1], want[3])
        args = [None if t is None else t.double() for t in args]
        want = references.causal_conv1d_bwd(*args, activation="silu")
        sums[0] += want[1]
        sums[1] += 0 if bias is None else want[2][:, None]
    assert_close("dweight", dw, sums[0], 5e-6)
    if bias is not None:
        assert_close("dbias", db, sums[1, :, 0], 5e-6)


@pytest.mark.parametrize("cut", few(2, 63, more=(1, 64, 70)))
def test_a_split_sequence_has_the_same_bits(cut, device):
    (x, weight, bias, state), _ = draw(2, 80, 33, 4, device=device)
    options = {"activation": "silu", "output_final_state": True}
    y, ht = kernels.causal_conv1d(x, weight, bias, state, **options)
    for tokens in (slice(cut), slice(cut, None)):
        part = x[:, tokens].clone(), weight, bias, state
        got, state = kernels.causal_conv1d(*part, **options)
        assert torch.equal(got, y[:, tokens])
    assert torch.equal(state, ht)


@NUMPY
@ROOMS
@pytest.mark.parametrize("T", [2, 20])
def test_the_oldest_token_of_a_state_is_in_no_sum(T, room, device):
    """It may be anything, as where a cache was never written."""
    (x, weight, bias, state), (dy, dht) = draw(2, T, 5, 4, device=device)
    odd = state.clone()
    odd[:, :, 0] = torch.tensor([torch.nan, torch.inf], device=device)[:, None]
    results = []
    for s in (state, odd):
        y, ht = room.causal_conv1d(x, weight, bias, s, activation="silu", output_final_state=True)
        args = x, weight, bias, s, dy, dht
        results.append((y, ht, *room.causal_conv1d_bwd(*args, activation="silu")))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@NUMPY
@ROOMS
def test_no_token_after_the_last_can_overflow(room, device):
    """A sum over what comes next of the same sequence is none of its outputs."""
    (x, weight, _, _), (dy, _) = draw(1, 10, 3, 2, device=device)
    x[:, -1], weight[:, 0], weight[:, 1] = 1e30, 1e20, 1e-30
    x[:, :-1] = 0
    dx, dw, _, _ = room.causal_conv1d_bwd(x, weight, None, None, dy, activation="silu")
    assert dx.isfinite().all() and dw.isfinite().all()


@NUMPY
@ROOMS
def test_silu_at_its_ends(room, device):
    x = torch.tensor([-1e30, -1e4, -50.0, 0.0, 50.0, 1e4, 1e30], device=device).view(1, 7, 1)
    weight, dy = torch.ones(1, 1, device=device), torch.ones_like(x)
    y, _ = room.causal_conv1d(x, weight, activation="silu")
    assert_close("y", y / x.abs().clamp(min=1), F.silu(x.double()) / x.abs().clamp(min=1), 1e-6)
    dx, *_ = room.causal_conv1d_bwd(x, weight, None, None, dy, activation="silu")
    want = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], device=device).view(1, 7, 1)
    assert_close("dx", dx, want, 1e-6)


def numbers(T, N, device="cpu"):
    """seq_idx [N, T] of rows with other boundaries, which fall where tiles and sums begin and end;
    padding in front, between and behind, and a number that comes again.
    """
    rows = []
    for n in range(N):
        row = torch.zeros(T, dtype=torch.int32)
        for number, begin in enumerate((2 + n, 3 + n, 6, 62 + n, 64, 65, 66)):
            row[begin:] = number + 1
        row[6 : 7 + n] = -1 - n
        row[4 + n : 5 + n] = 1
        if n:
            row[:n] = -1
            row[max(T - n, 1) :] = -3
        rows.append(row)
    return torch.stack(rows).to(device)


def runs(row):
    """(number, tokens) of every sequence of a row of seq_idx."""
    bounds = [0, *(t for t in range(1, len(row)) if row[t] != row[t - 1]), len(row)]
    return [(row[a].item(), slice(a, b)) for a, b in pairwise(bounds)]


@parametrize(
    T=few(3, 70, more=(1,)), W=few(4, more=(1, 8)), dtype=DTYPES,
    given=few("both", "nothing", more=("bias", "state")), activation=ACTIVATIONS,
)  # fmt: skip
def test_kernels_match_references_with_sequences(T, W, dtype, given, activation, device):
    x, (dy, dht) = draw(2, T, 3, W, given, dtype, device)
    seq_idx = numbers(T, 2, device)
    options = {"activation": activation}
    stages = (kernels.causal_conv1d, references.causal_conv1d)
    ssd_checks.check_stage(*stages, (*x, seq_idx), **options, output_final_state=True)
    stages = (kernels.causal_conv1d_bwd, references.causal_conv1d_bwd)
    args = (*x, dy, dht if T % 2 else None, seq_idx)
    ssd_checks.check_stage(*stages, args, **options)


@NUMPY
@ROOMS
@pytest.mark.parametrize("given", few("both", more=("nothing",)))
def test_sequences_are_each_by_itself(room, given, device):
    """The kernels to the bit; padding gives zeros, and what it holds reaches nothing."""
    T, D, W, N = 70, 3, 4, 2
    (x, weight, bias, state), (dy, dht) = draw(N, T, D, W, given, device=device)
    seq_idx, options = numbers(T, N, device), {"activation": "silu"}
    padding = seq_idx < 0
    x[padding], dy[padding] = torch.nan, torch.inf
    final = {"output_final_state": True}
    y, ht = room.causal_conv1d(x, weight, bias, state, seq_idx, **options, **final)
    args = x, weight, bias, state, dy, dht, seq_idx
    dx, dw, db, dh0 = room.causal_conv1d_bwd(*args, **options)
    same = torch.equal if room is kernels else lambda a, b: torch.allclose(a, b, 1e-5, 1e-5)
    assert not y[padding].any() and not dx[padding].any()
    sums = torch.zeros(2, *dw.shape, dtype=torch.float64, device=device)
    for n in range(N):
        for number, t in runs(seq_idx[n]):
            first, last = t.start == 0, t.stop == T
            if number < 0:
                assert not last or not ht[n].any()
                assert not first or dh0 is None or not dh0[n].any()
                continue
            one = x[n : n + 1, t].clone()
            own = state[n : n + 1] if first and state is not None else None
            want = room.causal_conv1d(one, weight, bias, own, **options, **final)
            assert same(y[n, t], want[0][0]) and (not last or same(ht[n], want[1][0]))
            args = weight, bias, own, dy[n : n + 1, t].clone(), dht[n : n + 1] if last else None
            want = room.causal_conv1d_bwd(one, *args, **options)
            assert same(dx[n, t], want[0][0]) and (own is None or same(dh0[n], want[3][0]))
            args = (a if a is None else a.double() for a in (one, *args))
            want = references.causal_conv1d_bwd(*args, **options)
            sums[0] += want[1]
            sums[1] += 0 if bias is None else want[2][:, None]
    assert_close("dweight", dw, sums[0], 5e-6)
    if bias is not None:
        assert_close("dbias", db, sums[1, :, 0], 5e-6)
