"""Decoding over a pool of states: slots, padding, tokens that are rejected later."""

import pytest
import torch
from gdn_checks import by_value, gated
from grids import parametrize
from recurrent_cases import case, kda_case, options
from refusals import refuses

from linattn_edu import fused_recurrent_gated_delta_rule, fused_recurrent_gdn2, fused_recurrent_kda
from linattn_edu.testing import assert_close, poison

CUDA = torch.cuda.is_available()
IMPLS = ("triton", "reference")
REFERENCE_ON_CPU = True  # on a GPU the bits of its products depend on the batch
ALL = ("norm", "sigmoid", "neg", "v_first")
WHOLE = ("A_log", "dt_bias", "initial_state")
SLOTS = 12


def kda(T, B, device, *, gate="bounded", flags=ALL, dtype=torch.float32):
    x, rest = kda_case(T, B=B, device=device, gate=gate, flags=flags, dtype=dtype, N=SLOTS)
    return fused_recurrent_kda, x, rest


def gdn2(T, B, device, *, flags=("norm", "v_first"), **kinds):
    _, x, rest = kda(T, B, device, flags=flags, **kinds)
    of_beta = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    return fused_recurrent_gdn2, gated(x), {n: y for n, y in rest.items() if n not in of_beta}


def gdn(T, B, device, flags=(*ALL, "gate"), dtype=torch.float32):
    x = case(T, B=B, device=device, gates="g gk gv", flags=flags, dtype=dtype, N=SLOTS)
    return fused_recurrent_gated_delta_rule, x, options(flags)


def tokens(x, *, n=None, t=slice(None)):
    """The arguments of some tokens, without the state; of the sequence n alone if given."""
    rows = slice(None) if n is None else slice(n, n + 1)
    kept = {m: y if y is None or m in WHOLE else y[rows, t] for m, y in x.items()}
    return {m: y for m, y in kept.items() if m != "initial_state"}


def ints(rows, device, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype, device=device)


def pooled(call, pool, indices, accepted=None, **changes):
    """Outputs of the call; the pool must come back. What the call does not name keeps its bits."""
    f, x, rest = call
    before = pool.clone()
    with poison(), torch.no_grad():
        o, same = f(
            **tokens(x), **(rest | changes), initial_state=pool, inplace_final_state=True,
            ssm_state_indices=indices, num_accepted_tokens=accepted,
        )  # fmt: skip
    assert same is pool
    named = indices.flatten().tolist()
    others = [s for s in range(len(pool)) if s not in named]
    assert torch.equal(pool[others], before[others])
    return o


def alone(call, n, T, start, **changes):
    """Outputs and all states of the first T tokens of sequence n, a call for each of them."""
    f, x, rest = call
    outputs, states = [], [start[None]]
    for t in range(T):
        part = tokens(x, n=n, t=slice(t, t + 1))
        with torch.no_grad():
            o, S = f(**part, **(rest | changes), initial_state=states[-1])
        outputs.append(o[0])
        states.append(S)
    return torch.cat(outputs), [S[0] for S in states]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("make", [kda, gdn, gdn2], ids=["kda", "gdn", "gdn2"])
def test_a_slot_for_each_token(make, impl, device, monkeypatch):
    """Each state where its token has a slot; past the last column, the last state alone."""
    by_value(monkeypatch)
    call = make(4, 3, device)
    pool = call[1]["initial_state"].clone()
    start = pool.clone()
    rows = [[3, 5, 1, 0], [-1, 2, 4, 6], [8, 9, -1, 10]]
    o = pooled(call, pool, ints(rows, device), impl=impl)
    assert not o[1].any() and torch.equal(pool[[2, 4, 6]], start[[2, 4, 6]])
    for n in (0, 2):
        want, states = alone(call, n, 4, start[rows[n][0]], impl=impl)
        assert torch.equal(o[n], want)
        for slot, S in zip(rows[n], states[1:], strict=True):
            assert slot < 0 or torch.equal(pool[slot], S)
    narrow = start.clone()
    o_narrow = pooled(call, narrow, ints([r[:2] for r in rows], device), impl=impl)
    assert torch.equal(o_narrow, o)
    for n in (0, 2):
        _, states = alone(call, n, 4, start[rows[n][0]], impl=impl)
        assert torch.equal(narrow[rows[n][0]], states[1])
        assert torch.equal(narrow[rows[n][1]], states[4])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("make", [kda, gdn, gdn2], ids=["kda", "gdn", "gdn2"])
def test_packed_sequences_and_rows_past_them(make, impl, device):
    """Sequences of 2, 0 and 1 tokens; the one without tokens leaves its slot as it is."""
    f, x, rest = make(3, 1, device)
    pool = x["initial_state"].clone()
    start, indices = pool.clone(), ints([[4, 2], [5, 6], [0, 1]], device)
    rest = rest | {"impl": impl}
    o = pooled((f, x, rest), pool, indices, cu_seqlens=ints([0, 2, 2, 3], device))
    first, states = alone((f, x, rest), 0, 2, start[4])
    assert torch.equal(o[0, :2], first) and torch.equal(pool[[4, 2]], torch.stack(states[1:]))
    assert torch.equal(pool[[5, 6, 1]], start[[5, 6, 1]])
    with torch.no_grad():
        last, S = f(**tokens(x, t=slice(2, 3)), **rest, initial_state=start[:1])
    assert torch.equal(o[:, 2:], last) and torch.equal(pool[0], S[0])


def speculate(call, T, accepted, pool, columns, device, impl):
    """Decode T tokens of one sequence in drafts of `columns`, of which `accepted` are kept."""
    f, x, rest = call
    slots = ints([list(range(3, 3 + columns))], device)
    outputs, done, kept = [], 0, 1
    generator = torch.Generator(device=device).manual_seed(9)
    while done < T:
        part = tokens(x, t=slice(done, done + columns))
        n = part["q"].shape[1]
        now = min(accepted[len(outputs) % len(accepted)], n)
        for name in ("k", "v"):  # the tokens that will be rejected were bad guesses
            guess = torch.randn(part[name].shape, generator=generator, device=device)
            part[name] = torch.cat([part[name][:, :now], guess.to(part[name])[:, now:]], 1)
        o = pooled((f, part, rest), pool, slots, ints([kept], device), impl=impl)
        outputs.append(o[:, :now])
        done, kept = done + now, now
    return torch.cat(outputs, 1), pool[3 + kept - 1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("make", [kda, gdn, gdn2], ids=["kda", "gdn", "gdn2"])
def test_rejected_tokens_leave_no_trace(make, impl, device):
    """Drafts of 3 tokens of which 1 to 3 are kept: the bits of decoding token by token."""
    call = make(9, 1, device, dtype=torch.bfloat16)
    pool = call[1]["initial_state"].float()
    want, states = alone(call, 0, 9, pool[3], impl=impl)
    o, S = speculate(call, 9, (2, 1, 3, 1), pool, 3, device, impl)
    assert torch.equal(o[0], want) and torch.equal(S, states[-1])


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_lie_apart_in_memory(impl, device):
    """As in the pages of a cache: what is between the slots is left as it is."""
    call = kda(2, 2, device)
    start = call[1]["initial_state"]
    pages = torch.full((SLOTS, start[0].numel() + 21), 7.0, device=device)
    pool = pages[:, :-21].view(start.shape).copy_(start)
    whole = start.clone()
    rows = ints([[3, 8], [0, 1]], device)
    o, want = (pooled(call, p, rows, impl=impl) for p in (pool, whole))
    assert_close("o", o, want, 1e-6)  # narrower loads make another kernel
    assert_close("pool", pool, whole, 1e-6)
    assert (pages[:, -21:] == 7).all()


def test_float64_runs_in_the_reference(device):
    call = kda(3, 2, device, dtype=torch.float64)
    pool = call[1]["initial_state"].clone()
    start = pool.clone()
    o = pooled(call, pool, ints([2, 5], device))
    f, x, rest = call
    want, S = f(**tokens(x), **rest, initial_state=start[[2, 5]])
    assert o.dtype == torch.float64
    assert_close("o", o, want, 1e-14)
    assert_close("S", pool[[2, 5]], S, 1e-14)


WRONG = {
    "slot named twice": ([[3, 8], [8, 1]], [1, 1], "must name a slot for one sequence only, got 8"),
    "slot beyond": ([[3, 8], [0, SLOTS]], [1, 1], f"below the {SLOTS} slots .*, got {SLOTS}"),
    "count of 0": ([[3, 8], [0, 1]], [1, 0], "num_accepted_tokens must be 1 to S=2, got 0 for seq"),
    "count of -1": ([[3, 8], [0, 1]], [-1, 1], "num_accepted_tokens must be 1 to S=2, got -1"),
    "count beyond": ([[3, 8], [0, 1]], [1, 3], "num_accepted_tokens must be 1 to S=2, got 3"),
}


@pytest.mark.skipif(CUDA, reason="there the numbers are taken on trust")
@parametrize(1, make=(kda, gdn, gdn2), impl=IMPLS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_graph_refuses_wrong_numbers_when_it_runs(impl, make, device):
    """They are not known while it is traced; nothing is written then, and it serves again."""
    f, x, rest = make(2, 2, device)
    rest = rest | {"inplace_final_state": True, "impl": impl}
    x, pool = tokens(x), x["initial_state"].clone()

    def step(pool, rows, kept):
        return f(**x, **rest, initial_state=pool, ssm_state_indices=rows, num_accepted_tokens=kept)[
            0
        ]

    torch._dynamo.reset()
    g = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        g(pool, ints([[3, 8], [0, 1]], device), ints([2, 1], device))
        start = pool.clone()
        for rows, kept, message in WRONG.values():
            for call in (g, step):
                with pytest.raises(ValueError, match=message):
                    call(pool, ints(rows, device), ints(kept, device))
                assert torch.equal(pool, start)
        again = ints([[-1, 8], [0, 1]], device), ints([1, 2], device)
        got, want = g(pool, *again), step(start, *again)
    assert torch.equal(got, want) and torch.equal(pool, start)


new = torch.zeros
I64 = {"dtype": torch.int64}
PAIRS = torch.tensor([[3, 1], [0, 2]])
# beside what test_contract_in_place has of all steps
REFUSED = {
    "in place only": (
        {"inplace_final_state": False},
        "ssm_state_indices .* needs inplace_final_state=True, got False",
    ),
    "no pool": ({"initial_state": None}, "initial_state must be given with inplace"),
    "pool rank": (
        {"initial_state": new(2, 16, 12)},
        r"initial_state must have 4 dimensions \[slots, HV, K, V\]",
    ),
    "pool shape": (
        {"initial_state": new(5, 2, 12, 16)},
        r"initial_state must have shape \[slots=5, HV=2, K=16, V=12\]",
    ),
    "pool dtype": (
        {"initial_state": new(5, 2, 16, 12).double()},
        TypeError,
        "initial_state must be torch.float32, .* with inplace_final_state=True, got torch.float64",
    ),
    "gaps in a slot": (
        {"initial_state": new(5, 2, 16, 24)[..., ::2]},
        "initial_state must be contiguous in every slot",
    ),
    "one memory for all slots": (
        {"initial_state": new(1, 2, 16, 12).expand(5, 2, 16, 12)},
        "slots must not overlap",
    ),
    "no column": ({"ssm_state_indices": new(2, 0, **I64)}, r"got \(2, 0\)"),
    "shared": (
        {"ssm_state_indices": torch.tensor([[1, 2], [3, 1]])},
        "must name a slot for one sequence only, got 1 for 0 and 1",
    ),
    "accepted alone": (
        {"ssm_state_indices": None, "initial_state": None, "num_accepted_tokens": new(2, **I64)},
        "num_accepted_tokens belongs to ssm_state_indices, which is None",
    ),
    "accepted of one slot": (
        {"num_accepted_tokens": torch.tensor([1, 1])},
        r"num_accepted_tokens needs ssm_state_indices of shape \[N, S\]",
    ),
    "accepted dtype": (
        {"ssm_state_indices": PAIRS, "num_accepted_tokens": new(2)},
        TypeError,
        "num_accepted_tokens must be a tensor of int32 or int64, got torch.float32",
    ),
    "accepted shape": (
        {"ssm_state_indices": PAIRS, "num_accepted_tokens": new(2, 1, **I64)},
        r"num_accepted_tokens must have shape \[N=2\], got \(2, 1\)",
    ),
    "accepted device": (
        {"ssm_state_indices": PAIRS, "num_accepted_tokens": new(2, device="meta", **I64)},
        "num_accepted_tokens must be on cpu like q, got meta",
    ),
    "none accepted": (
        {"ssm_state_indices": PAIRS, "num_accepted_tokens": torch.tensor([1, 0])},
        "num_accepted_tokens must be 1 to S=2, got 0 for sequence 1",
    ),
    "all accepted": (
        {"ssm_state_indices": PAIRS, "num_accepted_tokens": torch.tensor([3, 1])},
        "num_accepted_tokens must be 1 to S=2, got 3 for sequence 0",
    ),
}


def valid():
    _, x, _ = kda(1, 2, "cpu", gate="log", flags=())
    x |= {"initial_state": new(5, 2, 16, 12), "ssm_state_indices": torch.tensor([3, 1])}
    return x | {"inplace_final_state": True}


test_refused_before_any_kernel = refuses(fused_recurrent_kda, valid, REFUSED)
