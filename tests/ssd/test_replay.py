"""A checkpoint and a ring of Mamba-2: kernel against reference, and against the recurrence."""

import pytest
import torch
from grids import parametrize

from linattn_edu.kernels.ssd.replay import replay as kernel
from linattn_edu.ops.ring import make_ring
from linattn_edu.reference.delta.replay import commit
from linattn_edu.reference.ssd.replay import replay as reference
from linattn_edu.reference.ssd.selective_state_update import selective_state_update
from linattn_edu.testing import assert_close, ssd_inputs

pytestmark = pytest.mark.usefixtures("poison")
TOKENS = ("x", "dt", "B", "C", "z")
SIZES = ((1, 1, 12, 16), (4, 2, 40, 20), (2, 1, 70, 33))  # H, G, P, N


def drawn(T, H, G, P, N, *, decay="trained", dtype=torch.float32, device="cpu", without=()):
    """(arguments of the tokens of two sequences by name, the states before them)."""
    x = ssd_inputs(2, T, H, G, P, N, dtype=dtype, device=device, decay=decay).asdict()
    x |= {"D": x["D"][:, None], **dict.fromkeys(without)}
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    return {n: x[n] for n in names}, x["initial_states"]


def cut(x, begin, end):
    part = lambda n, y: y if y is None or n not in TOKENS else y[:, begin:end].contiguous()
    return {n: part(n, y) for n, y in x.items()}


def ring_of(state, x, length, tokens=4, **kinds):
    """A ring whose entries are NaN until they are written."""
    ring = make_ring(
        state, x["B"].shape[2], length=length, tokens=min(tokens, length), dtype=x["B"].dtype,
        state_v_first=True, **kinds,
    )  # fmt: skip
    for part in ring[:3]:
        part.fill_(float("nan"))
    return ring


def decoded(f, x, state, ring, cuts, **options):
    """out of calls that end at these tokens; state and ring are written."""
    return torch.cat([
        f(**cut(x, begin, end), state=state, keys=ring.keys, writes=ring.writes,
          decays=ring.decays, counts=ring.counts, length=ring.length, **options)
        for begin, end in zip((0, *cuts[:-1]), cuts, strict=True)
    ], 1)  # fmt: skip


def committed(state, ring):
    return commit(state.mT, *ring[:4], torch.arange(len(state), device=state.device))


def wide(x):
    return {n: y if y is None else y.double() for n, y in x.items()}


def recurrence(x, state, *, softplus):
    """out and the last states, token by token."""
    x, S, out = wide(x), state.double().clone(), []
    bias = None if x["dt_bias"] is None else x["dt_bias"][:, None]
    for t in range(x["x"].shape[1]):
        one = {n: x[n] if x[n] is None else x[n][:, t] for n in ("x", "B", "C", "z")}
        out.append(selective_state_update(
            S, **one, dt=x["dt"][:, t, :, None], A=x["A"][:, None, None], D=x["D"], dt_bias=bias,
            softplus=softplus,
        ))  # fmt: skip
    return torch.stack(out, 1), S


@pytest.mark.parametrize("length", [1, 4, 8, 16])
@pytest.mark.parametrize("without", [(), ("z", "D", "dt_bias")], ids=["all", "none"])
def test_reference_is_the_recurrence(without, length):
    """In float64, to rounding, over many folds, by calls of one and of several tokens."""
    x, state = drawn(41, 4, 2, 5, 6, dtype=torch.float64, without=without)
    want, final = recurrence(x, state, softplus=True)
    cuts = [n for n in range(1, 42) if n % 3 or length == 1]
    ring = ring_of(state, x, length)
    assert_close("out", decoded(reference, x, state, ring, cuts, softplus=True), want, 1e-12)
    committed(state, ring)
    assert_close("S", state, final, 1e-12)


@parametrize(
    sizes=SIZES, length=(8, 4, 16), without=((), ("z",), ("D", "dt_bias")),
    decay=("trained", "none", "reset", "closed"),
)  # fmt: skip
def test_kernel_matches_reference(sizes, length, without, decay, device):
    """Both from the same numbers: outputs, states, what the ring has."""
    x, state = drawn(11, *sizes, decay=decay, device=device, without=without)
    want_state = state.double()
    ring, want_ring = ring_of(state, x, length), ring_of(want_state, wide(x), length)
    cuts = (1, 2, 4, 7, 8, 11)
    got = decoded(kernel, x, state, ring, cuts, softplus=True)
    want = decoded(reference, wide(x), want_state, want_ring, cuts, softplus=True)
    assert_close("out", got, want, 5e-6)
    assert torch.equal(ring.counts, want_ring.counts)
    for name in ("keys", "writes", "decays"):
        a, b = getattr(ring, name), getattr(want_ring, name)
        assert torch.equal(a.isnan(), b.isnan())
        assert_close(name, a.nan_to_num(), b.nan_to_num(), 5e-6)
    committed(state, ring)
    committed(want_state, want_ring)
    assert_close("S", state, want_state, 5e-6)


def test_a_weight_for_each_row_and_steps_as_they_are(device):
    x, state = drawn(6, 2, 1, 40, 20, device=device)
    x |= {"D": torch.randn(2, 40, device=device), "dt": x["dt"].abs(), "dt_bias": None}
    want, _ = recurrence(x, state, softplus=False)
    got = decoded(kernel, x, state, ring_of(state, x, 4), (1, 2, 3, 4, 5, 6))
    assert_close("out", got, want, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, device):
    """Of the states too: rounded where a ring is folded, not for each token."""
    x, start = drawn(20, 4, 2, 12, 16, dtype=dtype, device=device)
    want, final = recurrence(x, start, softplus=True)
    for kinds, tol in (((torch.float32, None), 5e-6), ((dtype, dtype), 8e-3)):
        state = start.to(kinds[0], copy=True)
        ring = ring_of(state, x, 8, writes_dtype=kinds[1])
        out = decoded(kernel, x, state, ring, range(1, 21), softplus=True)
        committed(state, ring)
        assert out.dtype == dtype and state.dtype == kinds[0]
        assert_close("out", out, want, 6e-3)
        assert_close("S", state, final, tol)
