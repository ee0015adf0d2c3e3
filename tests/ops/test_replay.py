"""Decoding that does not write its state: folds, tokens that are taken back, slots, refusals."""

import pytest
import torch
from gdn_checks import by_value
from grids import parametrize
from ops.replay_cases import SHARED, STEPS, tokens
from refusals import refuses

from linattn_edu import commit_ring, make_ring, replay_gated_delta_rule, replay_kda
from linattn_edu.testing import assert_close, gdn_inputs, poison

CUDA = torch.cuda.is_available()
IMPLS = ("triton", "reference")
steps = pytest.mark.parametrize("step", STEPS, ids=str)
impls = pytest.mark.parametrize("impl", IMPLS)
once = parametrize(1, step=STEPS, impl=IMPLS)


def run(step, x, states, ring, **options):
    """The output; what a kernel leaves unwritten is NaN."""
    with poison(), torch.no_grad():
        return step.call(x, states, ring, **options)


def ints(rows, device, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype, device=device)


def with_guesses(x, right, generator):
    """The same arguments where sequence n has `right[n]` tokens of its own, then wrong ones."""
    x = dict(x)
    for name in ("k", "v", "B", "x", "dt"):
        if name in x:
            y = x[name]
            guess = torch.randn(y.shape, generator=generator).to(y)
            own = torch.arange(y.shape[1])[None] < torch.tensor(right)[:, None]
            x[name] = torch.where(own.to(y.device).view(*own.shape, *[1] * (y.ndim - 2)), y, guess)
    return x


def guesses(x, done, m):
    """m tokens of each sequence, from its number `done` on; the last one again at its end."""
    N, T = len(done), x["T"]
    rows = torch.tensor([[min(d + j, T - 1) for j in range(m)] for d in done])
    each = torch.arange(N)[:, None]
    return {
        n: y if n in SHARED else y[each.to(y.device), rows.to(y.device)]
        for n, y in x.items()
        if n != "T"
    }


def speculate(step, x, states, ring, rounds, m, seed=0, slots=None, impl="auto"):
    """Outputs of each sequence, by calls of m guesses; rounds: how many each has right in each."""
    generator = torch.Generator().manual_seed(seed)
    N, T = len(rounds[0]), next(y.shape[1] for n, y in x.items() if n not in SHARED)
    own, done, last = [[] for _ in range(N)], [0] * N, None
    for right in rounds:
        now = with_guesses(guesses(x | {"T": T}, done, m), right, generator)
        o = run(step, now, states, ring, ssm_state_indices=slots, num_accepted_tokens=last,
                impl=impl)  # fmt: skip
        for n in range(N):
            own[n].append(o[n, : right[n]])
            done[n] += right[n]
        last = ints(right, states.device)
    folded = commit_ring(states, ring, ssm_state_indices=slots, num_accepted_tokens=last, impl=impl)
    assert folded.dtype == torch.int32 and len(folded) == N
    return [torch.cat(o) for o in own]


def rounds_of(N, T, m):
    """Rounds of up to m tokens each until all sequences have T."""
    generator, done, rounds = torch.Generator().manual_seed(0), [0] * N, []
    while min(done) < T:
        drawn = torch.randint(0, m + 1, (N,), generator=generator).tolist()
        rounds.append([min(n, T - d) for n, d in zip(drawn, done, strict=True)])
        done = [d + n for d, n in zip(done, rounds[-1], strict=True)]
    return rounds


@parametrize(sizes=((8, 1), (16, 3), (8, 4), (5, 2), (1, 1)), step=STEPS, impl=IMPLS)
def test_the_recurrence(sizes, step, impl, device):
    """44 tokens of three sequences, guesses taken back, counts that differ, over many folds."""
    length, m = sizes
    N, T = 3, 44 if impl == "reference" or CUDA else 20
    x, states = step.drawn(T, N, device, slots=5)
    slots = ints([4, 0, 2], device)
    want, final = step.oracle(x, states[slots.long()])
    kept = states.clone()
    ring = step.empty(states, x, length, tokens=m)
    o = speculate(step, x, states, ring, rounds_of(N, T, m), m, slots=slots, impl=impl)
    assert_close("o", torch.stack(o), want, 1e-5)
    assert_close("S", states[slots.long()], final, 1e-5)
    assert torch.equal(states[[1, 3]], kept[[1, 3]])
    assert all(part[[1, 3]].isnan().all() for part in ring[:3])


@once
def test_what_is_refused_leaves_no_trace(step, impl, device, monkeypatch):
    """Wrong guesses, whatever they are: the same bits; so has a sequence alone."""
    by_value(monkeypatch)
    x, start = step.drawn(10, 3, device)
    rounds = ([4, 2, 1], [1, 1, 3], [3, 4, 2], [2, 2, 2])
    states = start.clone(), start.clone()
    found = [
        speculate(step, x, S, step.empty(S, x), rounds, 4, seed=seed, impl=impl)
        for seed, S in enumerate(states)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(*states)


@impls
@steps
def test_a_sequence_alone_has_the_bits_that_it_has_among_others(step, impl, device, monkeypatch):
    """In any slot, among sequences whose rings are fuller or folded, and padding."""
    by_value(monkeypatch)
    x, start = step.drawn(12, 4, device, slots=6)
    states, ring = start.clone(), None
    ring = step.empty(states, x, length=4, tokens=2)
    rows = ([4, -1, 0, 2], [4, 1, -5, 2], [-1, 1, 0, 2], [4, 1, 0, 2])
    alone = {}
    for slot in (4, 0):
        alone[slot] = start[slot : slot + 1].clone()
    rings = {slot: step.empty(alone[slot], x, length=4, tokens=2) for slot in alone}
    for t, slots in enumerate(rows * 3):
        now = tokens(x, t, t + 1)
        kept = states.clone(), [part.clone() for part in ring[:4]]
        o = run(step, now, states, ring, ssm_state_indices=ints(slots, device), impl=impl)
        for n, slot in enumerate(slots):
            if slot < 0:
                assert not o[n].any()
            elif slot in alone:
                one = tokens(x, t, t + 1, slice(n, n + 1))
                want = run(step, one, alone[slot], rings[slot], impl=impl)
                assert torch.equal(o[n : n + 1], want)
                assert torch.equal(states[slot], alone[slot][0])
        others = [s for s in range(6) if s not in slots]
        for now, before in zip((states, *ring[:4]), (kept[0], *kept[1]), strict=True):
            assert torch.equal(now[others].nan_to_num(7), before[others].nan_to_num(7))


@once
def test_commit(step, impl, device):
    """The plain state, after which decoding goes on; what is padding keeps its bits."""
    x, states = step.drawn(6, 3, device)
    _, final = step.oracle(x, states)
    ring, start = step.empty(states, x), states.clone()
    for t in range(3):
        run(step, tokens(x, 2 * t, 2 * t + 2), states, ring, impl=impl)
    assert torch.equal(states, start)
    folded = commit_ring(states, ring, ssm_state_indices=ints([2, -1, 0], device), impl=impl)
    assert folded.tolist() == [6, 0, 6] and torch.equal(states[1], start[1])
    assert_close("S", states[[0, 2]], final[[0, 2]], 1e-5)
    assert commit_ring(states, ring, impl=impl).tolist() == [0, 6, 0]
    assert_close("S", states, final, 1e-5)
    after = states.clone()
    assert not commit_ring(states, ring, impl=impl).any() and torch.equal(states, after)


@once
def test_a_slot_of_a_new_sequence(step, impl, device):
    """counts[slot] = 0 forgets what was there, whatever is said of its last tokens."""
    x, states = step.drawn(6, 2, device)
    start = states.clone()
    ring = step.empty(states, x)
    run(step, tokens(x, 0, 3), states, ring, impl=impl)
    ring.counts[1] = 0
    accepted = ints([3, 2], device)
    o = run(step, tokens(x, 3, 6), states, ring, num_accepted_tokens=accepted, impl=impl)
    whole, _ = step.oracle(x, start)
    new, _ = step.oracle(tokens(x, 3, 6, slice(1, 2)), start[1:])
    assert_close("o", o[:1], whole[:1, 3:], 1e-5)
    assert_close("o", o[1:], new, 1e-5)


@parametrize(1, step=STEPS, dtype=(torch.float16, torch.bfloat16))
def test_half_precision(dtype, step, device):
    x, states = step.drawn(12, 2, device, dtype=dtype)
    states = states.float()
    want, _ = step.oracle(x, states)
    for kind in (None, dtype):
        again = states.clone()
        ring = step.empty(again, x, writes_dtype=kind)
        o = torch.cat([run(step, tokens(x, t, t + 1), again, ring) for t in range(12)], 1)
        assert o.dtype == dtype
        assert_close("o", o, want, 5e-3)


@steps
def test_float64_runs_in_the_reference(step, device):
    x, states = step.drawn(12, 2, device, dtype=torch.float64)
    want, _ = step.oracle(x, states)
    ring = step.empty(states, x)
    o = torch.cat([run(step, tokens(x, t, t + 2), states, ring) for t in range(0, 12, 2)], 1)
    assert_close("o", o, want, 1e-12)


@once
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_fullgraph(step, impl, device):
    x, states = step.drawn(6, 2, device)
    other = states.clone()
    rings = step.empty(states, x), step.empty(other, x)
    slots = ints([1, 0], device)

    def f(x, states, ring, accepted):
        how = {"ssm_state_indices": slots, "num_accepted_tokens": accepted, "impl": impl}
        return step.call(x, states, ring, **how)

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for t in range(3):
            one, accepted = tokens(x, 2 * t, 2 * t + 2), ints([1, 2], device)
            assert torch.equal(
                g(one, states, rings[0], accepted), f(one, other, rings[1], accepted)
            )
            assert torch.equal(states, other) and torch.equal(rings[0].counts, rings[1].counts)


@once
def test_inference_mode(step, impl, device):
    """A state and a ring made there are written there, and outside of it."""
    x, start = step.drawn(5, 2, device)
    found = []
    for inside in (False, True):
        with torch.inference_mode(inside):
            states = start.clone()
            ring = step.empty(states, x, length=2, tokens=1)
            outputs = [run(step, tokens(x, t, t + 1), states, ring, impl=impl) for t in range(3)]
        outputs += [run(step, tokens(x, t, t + 1), states, ring, impl=impl) for t in (3, 4)]
        commit_ring(states, ring, impl=impl)
        found.append((*outputs, states))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@once
def test_autograd_sees_that_they_are_written(step, impl, device):
    x, states = step.drawn(2, 2, device)
    ring = step.empty(states, x)
    weight = torch.ones((), requires_grad=True, device=device)
    products = [(weight * part).sum() for part in ring[:3]]
    run(step, x, states, ring, impl=impl)
    for y in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@once
def test_states_lie_apart_in_memory(step, impl, device):
    """As in the pages of a cache, at any address: what is between them is left as it is."""
    x, start = step.drawn(6, 2, device)
    pages = torch.full((2, start[0].numel() + 21), 7.0, device=device)
    apart = pages[:, :-21].view(start.shape).copy_(start)
    whole, found = start.clone(), []
    for states in (apart, whole):
        ring = step.empty(states, x, length=2, tokens=1)
        o = [run(step, tokens(x, t, t + 1), states, ring, impl=impl) for t in range(6)]
        commit_ring(states, ring, impl=impl)
        found.append(torch.cat(o, 1))
    assert_close("o", *found, 1e-6)  # narrower loads make another kernel
    assert_close("S", apart, whole, 1e-6)
    assert (pages[:, -21:] == 7).all()


@steps
def test_a_transform_is_refused(step, device):
    x, states = step.drawn(1, 2, device)
    ring, name = step.empty(states, x), next(iter(x))
    with pytest.raises(ValueError, match=r"a transform of torch.func \(vmap, grad\) cannot"):
        torch.func.vmap(lambda y: step.call(x | {name: y}, states, ring))(x[name][None])


@pytest.mark.gpu
@steps
def test_cuda_graph(step, device):
    """One graph serves calls that fold and calls that do not, and counts that differ."""
    x, states = step.drawn(30, 3, device)
    want, _ = step.oracle(x, states)
    ring, one = step.empty(states, x, length=4), tokens(x, 0, 2)
    one = {n: y.clone() for n, y in one.items()}
    accepted = ints([0, 0, 0], device)
    call = lambda: run(step, one, states, ring, num_accepted_tokens=accepted)
    start = states.clone()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    states.copy_(start)
    ring.counts.zero_()
    done = [0, 0, 0]
    for step_number in range(20):
        right = [2, 1, 1 + step_number % 2]
        for n, y in one.items():
            if x[n].ndim > 1 and x[n].shape[:2] == (3, 30):
                for i, d in enumerate(done):
                    y[i].copy_(x[n][i, d : d + 2] if d + 2 <= 30 else x[n][i, :2])
        graph.replay()
        for i, d in enumerate(done):
            if d + 2 <= 30:
                assert_close("o", o[i], want[i, d : d + 2], 1e-5)
        accepted.copy_(ints(right, device))
        done = [d + r for d, r in zip(done, right, strict=True)]


def valid(channels=False):
    x = gdn_inputs(2, 1, 1, 2, 16, 12, dtype=torch.float32, initial_state=True).asdict()
    state = x.pop("initial_state")
    ring = make_ring(state, 1, length=4, tokens=2, dtype=torch.float32)
    return x | {"state": state, "ring": ring}


TOKENS = ("q", "k", "v", "g", "beta")


def changed(**parts):
    return valid()["ring"]._replace(**parts)


new = torch.zeros
REFUSED = {
    "no ring": ({"ring": None}, TypeError, "ring must come from make_ring, got NoneType"),
    "no state": ({"state": None}, TypeError, "state must be a torch.Tensor of shape"),
    "state of another size": (
        {"state": new(2, 2, 12, 16)},
        r"state must have shape \[slots=2, HV=2, K=16, V=12\]",
    ),
    "state of 64 bit": (
        {"state": new(2, 2, 16, 12).double()},
        TypeError,
        "state must be torch.float32, torch.float16 or torch.bfloat16, got torch.float64",
    ),
    "gaps in a state": (
        {"state": new(2, 2, 16, 24)[..., ::2]},
        "state must be contiguous in every slot",
    ),
    "slots without names": (
        {"state": new(3, 2, 16, 12), "ring": make_ring(new(3, 2, 16, 12), 1, dtype=torch.float32)},
        "state must have N=2 slots without ssm_state_indices, got 3",
    ),
    "ring of another pool": (
        {"state": new(3, 2, 16, 12)},
        r"ring.keys must have shape \[slots=3, H=1",
    ),
    "ring of other keys": (
        {"ring": changed(keys=new(2, 1, 6, 16).bfloat16())},
        TypeError,
        "ring.keys must be torch.float32 like q, got torch.bfloat16",
    ),
    "ring with channels": (
        {"ring": changed(decays=new(2, 2, 6, 16))},
        "ring must be made with channels=False: ring.decays must have 1 gates, got 16",
    ),
    "ring of some gates": (
        {"ring": changed(decays=new(2, 2, 6, 3))},
        "ring.decays must have 1 or K=16 gates",
    ),
    "counts": (
        {"ring": changed(counts=new(2, 2, 2, 3, dtype=torch.int32))},
        r"ring.counts must be int32 of shape \(2, 2, 1, 3\), got torch.int32 \(2, 2, 2, 3\)",
    ),
    "gaps in a ring": (
        {"ring": changed(keys=new(2, 1, 6, 32)[..., ::2])},
        "ring.keys must be contiguous",
    ),
    "too many tokens": (
        {n: y.repeat_interleave(3, 1) for n, y in valid().items() if n in TOKENS},
        "q must have 1 to 2 tokens, as many as ring is made for, got T=3",
    ),
    "slots": (
        {"ssm_state_indices": torch.tensor([1])},
        r"ssm_state_indices must have shape \[N=2\], got \(1,\)",
    ),
    "slots that are no numbers": (
        {"ssm_state_indices": new(2)},
        TypeError,
        "ssm_state_indices must be a tensor of int32",
    ),
    "slot named twice": (
        {"ssm_state_indices": torch.tensor([1, 1])},
        "ssm_state_indices must name a slot for one sequence only, got 1 for 0 and 1",
    ),
    "slot beyond": (
        {"ssm_state_indices": torch.tensor([0, 2])},
        "below the 2 slots of state, got 2",
    ),
    "accepted": (
        {"num_accepted_tokens": torch.tensor([1, 1, 1])},
        r"num_accepted_tokens must have shape \[N=2\], got \(3,\)",
    ),
    "accepted beyond": (
        {"num_accepted_tokens": torch.tensor([1, 3])},
        "num_accepted_tokens must be 0 to 2, got 3 for sequence 1",
    ),
    "accepted below": ({"num_accepted_tokens": torch.tensor([-1, 0])}, "must be 0 to 2, got -1"),
    "a gradient": ({"v": new(2, 1, 2, 12, requires_grad=True)}, "call it under torch.no_grad"),
    "scale": ({"scale": float("nan")}, "scale must be finite"),
    "flag": ({"use_gate_in_kernel": 2}, TypeError, "use_gate_in_kernel must be True or False"),
    "no gate": ({"g": None}, TypeError, "g must be a torch.Tensor"),
    "growth": ({"g": torch.ones(2, 1, 2)}, "g must be a log decay"),
}
test_refused_before_any_kernel = refuses(replay_gated_delta_rule, valid, REFUSED)


def test_memory_that_is_shared_is_refused():
    x = valid()
    x["v"] = x["ring"].writes.view(-1)[:48].view(2, 1, 2, 12)
    with pytest.raises(
        ValueError, match=r"ring.writes must not share memory with another argument"
    ):
        replay_gated_delta_rule(**x)


def test_kda_needs_a_ring_with_channels():
    x = valid()
    x["g"] = -torch.ones(2, 1, 2, 16)
    with pytest.raises(ValueError, match="ring must be made with channels=True"):
        replay_kda(**x)


RINGS = {
    "state": ({"state": new(2, 2, 16)}, "state must have 4 dimensions"),
    "heads": ({"heads": 3}, "heads must divide the HV=2 heads of state, got 3"),
    "none": ({"heads": 0}, "heads must be an integer >= 1"),
    "length": ({"length": 65}, "length must be at most 64, got 65"),
    "tokens": ({"tokens": 9}, "tokens must be at most 8, got 9"),
    "dtype": ({"dtype": torch.int32}, TypeError, "dtype must be a floating-point dtype"),
    "writes": ({"writes_dtype": int}, TypeError, "writes_dtype must be a floating-point dtype"),
    "channels": ({"channels": 3}, TypeError, "channels must be True or False, got 3"),
    "v first": ({"state_v_first": "no"}, TypeError, "state_v_first must be True or False"),
}
test_rings_that_are_refused = refuses(
    make_ring, lambda: {"state": new(2, 2, 16, 12), "heads": 1}, RINGS
)
