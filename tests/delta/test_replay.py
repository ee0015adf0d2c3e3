"""A checkpoint and a ring: kernel against reference, and both against the recurrence."""

import pytest
import torch
from grids import parametrize

from linattn_edu.kernels.delta import replay as kernels
from linattn_edu.ops.ring import make_ring
from linattn_edu.reference.delta import replay as references
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

pytestmark = pytest.mark.usefixtures("poison")
LENGTHS = (1, 4, 8, 16)
SHAPES = ((1, 2, 16, 12), (2, 4, 20, 40), (1, 1, 33, 70))  # H, HV, K, V
F64 = torch.float64


def drawn(T, H, HV, K, V, *, channels, gate="random", dtype=torch.float32, device="cpu", N=2):
    """(arguments of the tokens by name, the states before them)."""
    make = kda_inputs if channels else gdn_inputs
    x = make(N, T, H, HV, K, V, dtype=dtype, device=device, initial_state=True).asdict()
    if gate != "random":
        strong = (
            torch.rand(x["g"].shape, device=device) < {"strong": 1, "mixed": 0.2, "weak": 0}[gate]
        )
        x["g"] = torch.where(strong, -30.0, -1e-4).to(x["g"])
    state = x.pop("initial_state")
    if channels:
        x |= {"gk": x["g"], "g": None}
    return {n: x[n] for n in ("q", "k", "v", "g", "gk", "beta") if n in x}, state


def tokens(x, begin, end):
    return {n: None if y is None else y[:, begin:end].contiguous() for n, y in x.items()}


def ring_of(state, x, length, tokens=4, **kinds):
    """A ring whose entries are NaN until they are written."""
    channels = x.get("gk") is not None
    ring = make_ring(
        state, x["q"].shape[2], length=length, tokens=min(tokens, length), channels=channels,
        dtype=x["q"].dtype, **kinds,
    )  # fmt: skip
    for part in ring[:3]:
        part.fill_(float("nan"))
    return ring


def wide(x):
    return {n: None if y is None else y.double() for n, y in x.items()}


def decoded(room, x, state, ring, cuts, **options):
    """o of calls that end at these tokens; state and ring are written."""
    outputs = []
    for begin, end in zip((0, *cuts[:-1]), cuts, strict=True):
        one = tokens(x, begin, end)
        gk = {"gk": one.pop("gk")} if "gk" in one else {}
        outputs.append(
            room.replay(**one, state=state, **ring_args(ring), length=ring.length, **gk, **options)
        )
    return torch.cat(outputs, 1)


def ring_args(ring):
    return {n: getattr(ring, n) for n in ("keys", "writes", "decays", "counts")}


def committed(room, state, ring, **options):
    slots = torch.arange(len(state), device=state.device)
    return room.commit(state, **ring_args(ring), indices=slots, **options)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("length", LENGTHS)
def test_reference_is_the_recurrence(length, channels):
    """In float64, to rounding, over many folds, by calls of one and of several tokens."""
    x, state = drawn(41, 2, 4, 6, 5, channels=channels, dtype=F64)
    want, final = recurrent(**x, initial_state=state)
    cuts = [n for n in range(1, 42) if n % 3 or length == 1]
    ring = ring_of(state, x, length)
    o = decoded(references, x, state, ring, cuts)
    assert_close("o", o, want, 1e-12)
    committed(references, state, ring)
    assert_close("S", state, final, 1e-12)


@parametrize(
    shape=SHAPES, length=(8, 4, 16), channels=(False, True), normalise=(False, True),
    gate=("random", "mixed", "strong", "weak"),
)  # fmt: skip
def test_kernel_matches_reference(shape, length, channels, normalise, gate, device):
    """Both from the same numbers: outputs, states, what the ring has."""
    x, state = drawn(11, *shape, channels=channels, gate=gate, device=device)
    want_state = state.double()
    ring, want_ring = ring_of(state, x, length), ring_of(want_state, wide(x), length)
    cuts = (1, 2, 4, 7, 8, 11)
    got = decoded(kernels, x, state, ring, cuts, normalise=normalise, scale=0.3)
    want = decoded(references, wide(x), want_state, want_ring, cuts, normalise=normalise, scale=0.3)
    assert_close("o", got, want, 5e-6)
    assert torch.equal(ring.counts, want_ring.counts)
    for name in ("keys", "writes", "decays"):
        a, b = getattr(ring, name), getattr(want_ring, name)
        assert torch.equal(a.isnan(), b.isnan())
        assert_close(name, a.nan_to_num(), b.nan_to_num(), 5e-6)
    counts = committed(kernels, state, ring), committed(references, want_state, want_ring)
    assert torch.equal(*counts) and torch.equal(ring.counts, want_ring.counts)
    assert_close("S", state, want_state, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_keys_and_writes_in_half_precision(channels, dtype, device):
    """Keys are exact; so are writes, or, where they are to be of 16 bit, rounded once."""
    x, start = drawn(20, 1, 2, 16, 12, channels=channels, dtype=dtype, device=device)
    cuts = range(1, 21)
    want, final = references_of(wide(x), start.double(), cuts)
    for kind, tol in ((None, 5e-6), (dtype, 4e-3)):
        state = start.clone()
        ring = ring_of(state, x, 8, writes_dtype=kind)
        o = decoded(kernels, x, state, ring, cuts, normalise=True)
        committed(kernels, state, ring)
        assert o.dtype == dtype
        assert_close("o", o, want, 4e-3)
        assert_close("S", state, final, tol)


def references_of(x, state, cuts):
    ring = ring_of(state, x, 8)
    o = decoded(references, x, state, ring, cuts, normalise=True)
    committed(references, state, ring)
    return o, state


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_a_gate_that_is_shut(channels, device):
    """-inf forgets all before, and nothing after it becomes NaN."""
    x, state = drawn(10, 1, 2, 16, 12, channels=channels, device=device)
    gate = x["gk"] if channels else x["g"]
    gate[:, 4:6] = -torch.inf
    want, final = recurrent(**wide(x), initial_state=state.double())
    ring = ring_of(state, x, 8)
    o = decoded(kernels, x, state, ring, range(1, 11))
    committed(kernels, state, ring)
    assert_close("o", o, want, 5e-6)
    assert_close("S", state, final, 5e-6)


def test_keys_alike(device):
    """One key, written and corrected again: beta to 2."""
    x, state = drawn(30, 1, 1, 16, 12, channels=False, gate="weak", device=device)
    near = 0.05 * torch.randn(x["k"].shape, device=device) + x["k"][:, :1]
    x["k"] = near / near.norm(dim=-1, keepdim=True)
    x["beta"] = 1.9 * torch.ones_like(x["beta"])
    want, _ = recurrent(**wide(x), initial_state=state.double())
    o = decoded(kernels, x, state, ring_of(state, x, 16), range(1, 31))
    assert_close("o", o, want, 3e-5)
