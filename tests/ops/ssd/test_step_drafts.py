"""selective_state_update of several tokens a sequence, each with a slot; some are rejected."""

import pytest
import torch
from gdn_checks import no_wait
from ops.ssd.test_step import case, tensor, update

from linattn_edu import selective_state_update
from linattn_edu.testing import assert_close

IMPLS = ("triton", "reference")
REFERENCE_ON_CPU = True  # on a GPU the bits of its products depend on the batch
SLOTS = 12
TOKENS = ("x", "dt", "B", "C", "z")
impls = pytest.mark.parametrize("impl", IMPLS)


def tokens(n, device, dtype=torch.float32, state=torch.float32):
    """A pool, and the arguments of n tokens."""
    return case(B=n, slots=SLOTS, dtype=dtype, state=state, device=device)


def part(x, rows):
    return {n: y[rows] if n in TOKENS and tensor(y) else y for n, y in x.items()}


def ints(rows, device):
    return torch.tensor(rows, dtype=torch.int32, device=device)


def same(got, want, impl):
    """Bits of the kernels; PyTorch's silu has other bits in other places."""
    want = torch.stack([*want])
    near = 0 if impl == "triton" else 5e-3 if got.element_size() == 2 else 1e-6
    assert_close("tokens", got, want, near)


def alone(start, x, rows, impl):
    """Outputs and all states of these tokens of one sequence, a call for each."""
    outs, states, state = [], [], start[None].clone()
    for t in rows:
        outs.append(update(state, part(x, slice(t, t + 1)), impl)[0])
        states.append(state[0].clone())
    return outs, states


@impls
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_calls_of_their_own(dtype, state, impl, device):
    """Sequences of 3, 0 and 2 tokens, and a token behind the last."""
    pool, x = tokens(6, device, dtype, state)
    before = pool.clone()
    rows, accepted = [[3, 5, 1], [6, 7, 8], [0, 2, 9]], [2, 1, 3]
    out = update(pool, x, impl, state_batch_indices=ints(rows, device),
                 num_accepted_tokens=ints(accepted, device),
                 cu_seqlens=ints([0, 3, 3, 5], device))  # fmt: skip
    for n, a, b in ((0, 0, 3), (2, 3, 5)):
        want, states = alone(before[rows[n][accepted[n] - 1]], x, range(a, b), impl)
        same(out[a:b], want, impl)
        same(pool[rows[n][: b - a]], states, impl)
    kept = [4, 6, 7, 8, 9, 10, 11]
    assert not out[5].any() and torch.equal(pool[kept], before[kept])


@impls
def test_fewer_slots_than_tokens(impl, device):
    """Past the last column, the last state alone; so with one slot, and with states in order."""
    pool, x = tokens(5, device)
    cu, before = ints([0, 3, 5], device), pool.clone()
    want = [alone(before[s], x, range(*r), impl) for s, r in ((4, (0, 3)), (0, (3, 5)))]
    outs = want[0][0] + want[1][0]
    last = want[0][1][-1], want[1][1][-1]
    for rows in ([[4, 1], [0, 2]], [[4], [0]], [4, 0]):
        state = before.clone()
        out = update(state, x, impl, state_batch_indices=ints(rows, device), cu_seqlens=cu)
        same(out, outs, impl)
        ends = [1, 2] if rows == [[4, 1], [0, 2]] else [4, 0]
        same(state[ends], last, impl)
        if ends == [1, 2]:
            same(state[[4, 0]], (want[0][1][0], want[1][1][0]), impl)
    states = before[[4, 0]].clone()
    same(update(states, x, impl, cu_seqlens=cu), outs, impl)
    same(states, last, impl)
    one = before.clone()  # one token a sequence, without boundaries
    out = update(one, part(x, slice(2)), impl, state_batch_indices=ints([[4, 3], [0, 2]], device),
                 num_accepted_tokens=ints([1, 2], device))  # fmt: skip
    same(one[4:5], want[0][1][:1], impl)
    same(out, (want[0][0][0], alone(before[2], x, [1], impl)[0][0]), impl)


@impls
def test_slots_that_are_none(impl, device):
    """A sequence without a start is padding, whatever its tokens are; a state without a slot is
    not kept."""
    pool, x = tokens(4, device)
    x["x"], x["B"] = x["x"].clone(), x["B"].clone()
    x["x"][:2], x["B"][1] = torch.nan, torch.inf
    before = pool.clone()
    out = update(pool, x, impl, state_batch_indices=ints([[-1, 5], [2, -1]], device),
                 cu_seqlens=ints([0, 2, 4], device))  # fmt: skip
    want, states = alone(before[2], x, (2, 3), impl)
    assert not out[:2].any()
    same(out[2:], want, impl)
    same(pool[2:3], states[:1], impl)
    others = [s for s in range(SLOTS) if s != 2]
    assert torch.equal(pool[others], before[others])


@impls
def test_drafts_of_which_some_are_rejected(impl, device):
    """As the tokens that are kept, one by one."""
    T, columns = 11, 3
    pool, x = tokens(T, device)
    want, states = alone(pool[4], x, range(T), impl)
    rows, count, done, outs = ints([[4, 7, 2]], device), 1, 0, []
    for kept in (2, 1, 3, 1, 3, 1):
        end = min(done + columns, T)
        given = part(x, torch.arange(done, end, device=device))
        guessed = kept < end - done  # what is rejected is another token
        if guessed:
            given["x"] = given["x"].clone()
            given["x"][kept:] += 1
        out = update(pool, given, impl, state_batch_indices=rows,
                     num_accepted_tokens=ints([count], device),
                     cu_seqlens=ints([0, end - done], device))  # fmt: skip
        outs += [*out[:kept]]
        same(pool[rows[0, kept - 1]][None], [states[done + kept - 1]], impl)
        done, count = done + kept, kept
    assert done == T
    same(torch.stack(outs), want, impl)


WRONG = [
    ({"cu_seqlens": [0, 2, 5]}, "cu_seqlens must end at T=4 or before, got 5"),
    ({"cu_seqlens": [1, 2, 4]}, "cu_seqlens must begin with 0"),
    ({"cu_seqlens": [0, 3, 2]}, "cu_seqlens must not decrease"),
    ({"cu_seqlens": [0, 1, 2, 4]}, r"state_batch_indices must have shape \[B=3\] or \[B=3, S\]"),
    ({"state_batch_indices": [[[1]], [[2]]]}, r"shape \[B=2\] or \[B=2, S\]"),
    ({"state_batch_indices": None, "num_accepted_tokens": None}, "state must have B=2 states"),
    ({"state_batch_indices": None}, r"num_accepted_tokens needs .* \[B, S\].* got None"),
    ({"state_batch_indices": [1, 2]}, r"num_accepted_tokens needs .* \[B, S\].* got \(2,\)"),
    ({"num_accepted_tokens": [1]}, r"num_accepted_tokens must have shape \[B=2\]"),
    ({"num_accepted_tokens": [1, 3]}, "num_accepted_tokens must be 1 to S=2, got 3 for sequence 1"),
    ({"num_accepted_tokens": [0, 1]}, "num_accepted_tokens must be 1 to S=2, got 0 for sequence 0"),
    ({"state_batch_indices": [[1, 2], [3, 2]]}, "for one sequence only, got 2 for 0 and 1"),
    ({"state_batch_indices": [[1, 2], [3, SLOTS]]}, f"must be below the {SLOTS} slots of state"),
]


@pytest.mark.parametrize(("change", "match"), WRONG, ids=[m[:40] for _, m in WRONG])
def test_refusals(change, match):
    pool, x = tokens(4, "cpu")
    before = pool.clone()
    given = {"cu_seqlens": [0, 2, 4], "state_batch_indices": [[1, 2], [3, 4]],
             "num_accepted_tokens": [1, 2]} | change  # fmt: skip
    given = {n: None if y is None else ints(y, "cpu") for n, y in given.items()}
    for impl in ("reference",) if torch.cuda.is_available() else IMPLS:  # numbers on the CPU
        with pytest.raises(ValueError, match=match):
            update(pool, x, impl, **given)
    for name in given:
        with pytest.raises(TypeError, match=f"{name} must be .*int32 or int64, got torch.float32"):
            update(pool, x, "auto", **({"state_batch_indices": ints([[1], [3], [4], [5]], "cpu")}
                                       | {name: torch.ones(5)}))  # fmt: skip
    assert torch.equal(pool, before)


@impls
def test_fullgraph(impl, device):
    pool, x = tokens(5, device)
    where = {"state_batch_indices": ints([[3, 5, 1], [0, 2, 9]], device),
             "num_accepted_tokens": ints([2, 1], device),
             "cu_seqlens": ints([0, 3, 5], device)}  # fmt: skip
    f = lambda pool, x: 2 * selective_state_update(pool, **x, **where, impl=impl)
    torch._dynamo.reset()
    other = pool.clone()
    with torch.no_grad():
        got = torch.compile(f, fullgraph=True, backend="aot_eager")(pool, x)
        assert_close("out", got, f(other, x), 1e-6)
    assert_close("state", pool, other, 1e-6)


@pytest.mark.gpu
def test_what_is_not_there_on_a_gpu():
    """Slots, counts and boundaries are not read by the host; what is not there counts as none."""
    pool, x = tokens(6, "cuda")
    before = pool.clone()
    rows = ints([[2**30, 1], [3, 4], [5, 2**30]], "cuda")
    where = rows, ints([1, 3, 1], "cuda"), ints([0, 2, 4, 6], "cuda")
    with no_wait():
        out = update(pool, x, "triton", **dict(zip(
            ("state_batch_indices", "num_accepted_tokens", "cu_seqlens"), where, strict=True
        )))  # fmt: skip
    assert not out[:4].any() and out[4:].any()
    assert torch.equal(pool[[1, 3, 4]], before[[1, 3, 4]]) and not torch.equal(pool[5], before[5])
