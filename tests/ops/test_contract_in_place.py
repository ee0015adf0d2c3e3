"""What every step, and every prefill, that writes its states in place keeps: where they lie, who
sees it, what it refuses. Each has its values, slots and drafts in its own file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from gdn_checks import by_value, gated, launches
from grids import FULL, parametrize
from ops import contract
from ops.conv import test_causal_conv1d_update as conv_cases
from ops.ssd import test_step as ssd_cases
from recurrent_cases import case, kda_case
from torch.autograd import forward_ad

from linattn_edu import (
    causal_conv1d_update,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
    mamba_chunk_scan_combined,
    selective_state_update,
)
from linattn_edu.testing import assert_close, poison

CUDA = torch.cuda.is_available()
IMPLS = ("triton", "reference")
REFERENCE_ON_CPU = True  # on a GPU the bits of its products depend on the batch
B, SLOTS, ROWS = 3, 6, (4, 0, 2)
SHARED = ("A", "A_log", "D", "dt_bias", "weight", "bias")  # of all sequences


@dataclass(frozen=True)
class Step:
    """`make(B, slots, device)` returns the states of all slots and the other tensors by name, of
    one token; `call(states, x, rows, **options)` the output, rows: the slot of each sequence.
    """

    name: str
    make: Callable
    call: Callable
    slots: str  # the argument that names them
    decays: tuple = ()
    apart: bool = False  # states that are not slots of a pool may lie apart, too
    near: float = 0.0  # how near results are where numbers lie at other addresses
    without_gradient: bool = False  # it runs where one is recorded, and has none
    shared: tuple = SHARED  # tensors of all sequences

    def __str__(self):
        return self.name

    def drawn(self, pool, device, B=B, slots=SLOTS):
        """(states, the other tensors, rows); without a pool the sequences' own states."""
        states, x = self.make(B, slots if pool else B, device)
        rows = torch.tensor(ROWS, device=device) if pool else None
        return states, {n: t for n, t in x.items() if t is not None}, rows

    def run(self, states, x, rows, **options):
        """The output; what a kernel leaves unwritten is NaN."""
        with poison(), torch.no_grad():
            return self.call(states, x, rows, **options)


def of_delta(f, make, **flags):
    def call(states, x, rows, **options):
        o, same = f(
            **x, **flags, initial_state=states, inplace_final_state=True, ssm_state_indices=rows,
            **options,
        )  # fmt: skip
        assert same is states
        return o

    return make, call


def gdn_case(B, slots, device):
    x = case(1, B=B, N=slots, gates="g gk gv", device=device)
    return x.pop("initial_state"), x


def raw_kda_case(B, slots, device):
    x, _ = kda_case(1, B=B, N=slots, gate="bounded", device=device)
    return x.pop("initial_state"), x


def of_chunks(form):
    """`make` and `call` of the prefill of a form, of a chunk and a token."""

    def make(B, slots, device):
        x, _ = form.draw(B, 17, torch.float32, device, N=slots)
        return x.pop("initial_state"), x

    return of_delta(form.f, make, chunk_size=16)


def of_mamba(B, slots, device):
    x, _ = contract.of_mamba(B, 17, (2, 1, 20, 24), torch.float32, device, N=slots)
    return x.pop("initial_state"), x


def call_mamba(states, x, rows, **options):
    out, same = mamba_chunk_scan_combined(
        **x, chunk_size=16, initial_states=states, inplace_final_states=True,
        state_batch_indices=rows, return_final_states=True, **options,
    )  # fmt: skip
    assert same is states
    return out


def raw_gdn2_case(B, slots, device):
    states, x = raw_kda_case(B, slots, device)
    return states, gated(x)


def of_ssd(B, slots, device):
    """For many sequences of a size that takes the wide tile."""
    sizes = (8, 64, 32) if B > 3 else (4, 20, 24)
    states, x = ssd_cases.case(*sizes, B=B, slots=slots, device=device)
    del x["dt_softplus"]
    return states, x


def of_conv(B, slots, device):
    x = conv_cases.tensors(device=device, slots=slots)
    x["x"] = x["x"].repeat(B // len(x["x"]), 1, 1)
    return x.pop("conv_state"), x


RAW = {"use_gate_in_kernel": True, "lower_bound": -5.0}
STEPS = (
    Step(
        "gdn", *of_delta(fused_recurrent_gated_delta_rule, gdn_case), "ssm_state_indices",
        decays=("g", "gk", "gv"),
    ),
    Step("gdn2", *of_delta(fused_recurrent_gdn2, raw_gdn2_case, **RAW), "ssm_state_indices"),
    Step("kda", *of_delta(fused_recurrent_kda, raw_kda_case, **RAW), "ssm_state_indices"),
    Step(
        "ssd", of_ssd, lambda S, x, rows, **options: selective_state_update(
            S, **x, dt_softplus=True, state_batch_indices=rows, **options
        ), "state_batch_indices", apart=True, near=1e-6, without_gradient=True,
    ),
    Step(
        "conv", of_conv, lambda S, x, rows, **options: causal_conv1d_update(
            **x, conv_state=S, activation="silu", conv_state_indices=rows, **options
        ), "conv_state_indices", apart=True, without_gradient=True,
    ),
    *(
        Step(
            f"prefill, {form}", *of_chunks(form), "ssm_state_indices", decays=form.decay,
            shared=form.summed,
        )
        for form in (contract.gdn, contract.kda, contract.gdn2, contract.dplr_chunks, contract.ema)
    ),
    Step("prefill, ssd", of_mamba, call_mamba, "state_batch_indices", decays=("A",)),
)  # fmt: skip
steps = pytest.mark.parametrize("step", STEPS, ids=str)
impls = pytest.mark.parametrize("impl", IMPLS)
each = parametrize(step=STEPS, pool=(False, True), impl=IMPLS)
once = parametrize(1, step=STEPS, pool=(False, True), impl=IMPLS)
pools = pytest.mark.parametrize("pool", [False, True], ids=["states", "pool"])


def same(got, want, near=0.0):
    """Outputs and states by twos, to the bit if nothing is said."""
    for name, a, b in zip(("out", "states"), got, want, strict=True):
        assert torch.equal(a, b) or near
        assert_close(name, a, b, near)


@parametrize(shift=(0, 1), step=STEPS, pool=(False, True), impl=IMPLS)
def test_at_any_address(shift, step, pool, impl, device):
    """What lies around the states is left as it is."""
    states, x, rows = step.drawn(pool, device)
    buffer = torch.full((states.numel() + 9,), 7.0, device=device)
    inner = slice(4 + shift, 4 + shift + states.numel())
    view = buffer[inner].view(states.shape).copy_(states)
    assert bool(view.data_ptr() % 16) == bool(shift)
    out, want = (step.run(S, x, rows, impl=impl) for S in (view, states))
    # compiled, loads of other widths sum in another order
    same((out, view), (want, states), 1e-6 if shift and pool and device.type == "cuda" else 0.0)
    assert (buffer[: inner.start] == 7).all() and (buffer[inner.stop :] == 7).all()


@parametrize(gap=(32, 21), step=STEPS, pool=(False, True), impl=IMPLS)
def test_states_lie_apart(gap, step, pool, impl, device):
    """As in the pages of a cache, or beside those of other layers."""
    if not pool and not step.apart:
        pytest.skip("its own states lie one after the other")
    states, x, rows = step.drawn(pool, device)
    pages = torch.full((len(states), states[0].numel() + gap), 7.0, device=device)
    apart = pages[:, :-gap].view(states.shape).copy_(states)
    out, want = (step.run(S, x, rows, impl=impl) for S in (apart, states))
    same((out, apart), (want, states), 1e-6)  # narrower loads: another kernel
    assert (pages[:, -gap:] == 7).all()


@once
def test_autograd_sees_that_they_are_written(step, pool, impl, device):
    """A gradient that needs the states as they were is not computed from the new ones."""
    states, x, rows = step.drawn(pool, device)
    weight = torch.ones_like(states, requires_grad=True)
    y = (weight * states).sum()
    step.call(states, x, rows, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@once
def test_inference_mode(step, pool, impl, device):
    """States made there, which have no version, are written there, and outside of it."""
    states, x, rows = step.drawn(pool, device)
    start = states.clone()
    want = step.run(states, x, rows, impl=impl)
    with torch.inference_mode():
        made, again = start.clone(), start.clone()
        same((step.call(made, x, rows, impl=impl), made), (want, states))
    same((step.call(again, x, rows, impl=impl), again), (want, states))


@each
def test_where_no_gradient_is_recorded(step, pool, impl, device):
    """Every tensor may ask for one, as parameters do; without torch.no_grad() it is refused, or, of
    a step that has none, an error once a backward pass comes to it.
    """
    states, x, rows = step.drawn(pool, device)
    start = states.clone()
    want = step.run(start, x, rows, impl=impl)
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    out = step.run(states, leaves, rows, impl=impl)
    assert not out.requires_grad
    same((out, states), (want, start))
    refused = pytest.raises(ValueError, match=r"needs: call it under torch.no_grad\(\)")
    for n, leaf in leaves.items():
        if step.without_gradient:
            again, there = states.clone(), start.clone()
            got = step.call(there, x | {n: leaf}, rows, impl=impl)
            same((got, there), (step.run(again, x, rows, impl=impl), again))
            with pytest.raises(RuntimeError, match="update has no gradient"):
                got.sum().backward()
            continue
        with launches() as ran, refused:
            step.call(states, x | {n: leaf}, rows, impl=impl)
        assert not ran and torch.equal(states, start)
    leaf = states.clone().requires_grad_()
    with launches() as ran, refused:
        step.call(leaf, x, rows, impl=impl)
    assert not ran and torch.equal(leaf, states)
    if step.without_gradient:  # states of a prefill that was recorded, some of a larger tensor
        made = torch.cat([leaf, leaf]) * 1
        got, whole = step.call(made[: len(leaf)], x, rows, impl=impl), states.clone()
        same((got, made[: len(leaf)]), (step.run(whole, x, rows, impl=impl), whole))
        with pytest.raises(RuntimeError, match="has written has no gradient"):
            made.sum().backward()


@each
def test_an_argument_in_the_memory_of_the_states_is_refused(step, pool, impl, device):
    """It would be overwritten while it is read; beside the states it is none of its business."""
    start, x, rows = step.drawn(pool, device)
    x = {n: t.contiguous() for n, t in x.items()}
    last = start.clone()
    want = step.run(last, x, rows, impl=impl)
    for n, t in x.items():
        size = t.numel()
        arena = torch.zeros(start.numel() + size, device=device)
        states = arena[: start.numel()].view(start.shape)
        for first in (0, 7, start.numel() - 1):
            states.copy_(start)
            view = arena[first : first + size].view(t.shape)
            view.fill_(-0.5) if n in step.decays else None
            before = arena.clone()
            with launches() as ran, pytest.raises(ValueError, match="must not share memory with"):
                step.run(states, x | {n: view}, rows, impl=impl)
            assert not ran and torch.equal(arena, before), n
        states.copy_(start)
        beside = arena[start.numel() :].view(t.shape).copy_(t)
        out = step.run(states, x | {n: beside}, rows, impl=impl)
        same((out, states), (want, last), step.near)


WRONG_SLOTS = {
    "a list": (lambda rows: rows.tolist(), TypeError, "a tensor of int"),
    "floats": (torch.Tensor.float, TypeError, "a tensor of int32 or int64, got torch.float32"),
    "of two sequences": (lambda rows: rows[:2], ValueError, r"shape \[.*=3\].*, got \(2,\)"),
    "of three axes": (lambda rows: rows[:, None, None], ValueError, r"shape \[.*got \(3, 1, 1\)"),
    "elsewhere": (lambda rows: rows.to("meta"), ValueError, "on cpu like .*, got meta"),
    "past the end": (lambda rows: rows + 2, ValueError, "below the 6 slots of .*, got 6 for se"),
    "named twice": (lambda rows: rows % 4, ValueError, "for one sequence only, got 0 for 0 and 1"),
}


@pytest.mark.parametrize("wrong", WRONG_SLOTS)
@steps
def test_slots_that_are_refused(step, wrong):
    change, error, message = WRONG_SLOTS[wrong]
    pool, x, rows = step.drawn(True, "cpu")
    before = pool.clone()
    with launches() as ran, pytest.raises(error, match=rf"^{step.slots} must .*{message}"):
        step.run(pool, x, change(rows))
    assert not ran and torch.equal(pool, before)


@pools
@steps
def test_a_transform_is_refused(step, pool, device):
    states, x, rows = step.drawn(pool, device)
    before, first = states.clone(), next(iter(x))
    f = lambda y: step.call(states, x | {first: y}, rows)
    for transformed, y in (
        (torch.func.vmap(f), x[first][None]),
        (torch.func.grad(lambda y: f(y).sum()), x[first]),
    ):
        with pytest.raises(ValueError, match=r"a transform of torch.func \(vmap, grad\) cannot"):
            transformed(y)
        assert torch.equal(states, before)


@steps
def test_forward_mode_is_refused(step, device):
    states, x, rows = step.drawn(False, device)
    before, first = states.clone(), next(iter(x))
    with forward_ad.dual_level():
        x[first] = forward_ad.make_dual(x[first].contiguous(), torch.ones_like(x[first]))
        with pytest.raises(ValueError, match="overwrites what a gradient needs"):
            step.call(states, x, rows)
    assert torch.equal(states, before)


@steps
def test_many_sequences_in_any_order(step, device, monkeypatch):
    """On a GPU enough for a wide tile; each has the bits that it has in a call of its own."""
    by_value(monkeypatch)
    N = 300 if CUDA else 6
    pool, x, _ = step.drawn(True, device, N, 2 * N)
    start = pool.clone()
    rows = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N]
    out = step.run(pool, x, rows.to(device), impl="triton")
    for n in range(0, N, max(1, N // 10)):
        one = {m: t if m in step.shared else t[n : n + 1] for m, t in x.items()}
        state = start[rows[n] : rows[n] + 1].clone()
        alone = step.run(state, one, None, impl="triton")
        same((out[n : n + 1], pool[rows[n] : rows[n] + 1]), (alone, state))


@parametrize(dtype=(torch.int32, torch.int64), step=STEPS, impl=IMPLS)
def test_slots_of_a_pool(dtype, step, impl, device, monkeypatch):
    """Each sequence as in a call of its own; padding gives zeros and touches nothing."""
    by_value(monkeypatch)
    pool, x, _ = step.drawn(True, device)
    start, rows = pool.clone(), [4, -1, 0]
    out = step.run(pool, x, torch.tensor(rows, dtype=dtype, device=device), impl=impl)
    assert not out[1].any()
    for n, slot in ((0, 4), (2, 0)):
        one = {m: t if m in step.shared else t[n : n + 1] for m, t in x.items()}
        state = start[slot : slot + 1].clone()
        alone = step.run(state, one, None, impl=impl)
        same((out[n : n + 1], pool[slot : slot + 1]), (alone, state))
    others = [1, 2, 3, 5]
    assert torch.equal(pool[others], start[others])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@parametrize(1, step=STEPS if FULL or CUDA else STEPS[::2], pool=(False, True), impl=IMPLS)
def test_fullgraph(step, pool, impl, backend, device):
    """The graph writes the states. It does not know the slots while it is traced: it refuses wrong
    ones when it runs, writes nothing then, and serves again.
    """
    states, x, rows = step.drawn(pool, device)
    f = lambda states, x, rows: step.call(states, x, rows, impl=impl)
    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, backend=backend)
    other = states.clone()

    def check(rows, x=x, recorded=False):
        with torch.set_grad_enabled(recorded):
            got, want = g(states, x, rows), f(other, x, rows)
        assert not got.requires_grad
        same((got, states), (want, other))

    check(rows)
    check(rows)
    if step.without_gradient:
        check(rows, {n: t.detach().requires_grad_() for n, t in x.items()}, recorded=True)
    if not pool or CUDA:  # there the numbers are taken on trust
        return
    for wrong, message in (
        ([1, 4, 1], "must name a slot for one sequence only, got 1 for 0 and 2"),
        ([1, SLOTS, 2], f"below the {SLOTS} slots of .*, got {SLOTS} for sequence 1"),
    ):
        for call in (g, f):
            with torch.no_grad(), pytest.raises(ValueError, match=message):
                call(states, x, torch.tensor(wrong))
            assert torch.equal(states, other)
    check(torch.tensor([-1, 5, 2]))


PREFILLS = [s for s in STEPS if s.name.startswith("prefill")]
prefills = pytest.mark.parametrize("step", PREFILLS, ids=str)


@impls
@prefills
def test_packed_prompts_over_a_pool(step, impl, device):
    """Each starts from its slot and leaves its state there, with the bits of a call that is given
    the states; one without a slot is padding, one without tokens leaves its state as it is.
    """
    pool, x, _ = step.drawn(True, device)
    x = {n: t if n in step.shared else t.flatten(0, 1)[None] for n, t in x.items()}  # 51 tokens
    bounds = {"cu_seqlens": torch.tensor([0, 16, 16, 33, 49], device=device), "impl": impl}
    start, rows = pool.clone(), torch.tensor([4, 2, -1, 0], device=device)
    own = start[rows].contiguous()
    want = step.run(own, x, None, **bounds)
    out = step.run(pool, x, rows, **bounds)
    assert not out[:, 16:33].any() and not out[:, 49:].any()
    same((out[:, :16], pool[[4, 2]]), (want[:, :16], own[:2]))
    same((out[:, 33:49], pool[0]), (want[:, 33:49], own[3]))
    assert torch.equal(pool[[1, 2, 3, 5]], start[[1, 2, 3, 5]])
    nowhere = torch.full((4,), -1, device=device)
    assert not step.run(pool, x, nowhere, **bounds).any() and torch.equal(pool[4], own[0])


@pytest.mark.parametrize("form", [contract.gdn, contract.kda, contract.gdn2], ids=str)
def test_a_pool_of_transposed_states(form, device):
    x, _ = form.draw(2, 17, torch.float32, device, N=3)
    rows = torch.tensor([2, 0], device=device)
    pool, how = x.pop("initial_state"), {"ssm_state_indices": rows, "chunk_size": 16}
    other = pool.mT.contiguous()
    how["inplace_final_state"] = True
    with torch.no_grad():
        want, _ = form.f(**x, initial_state=pool, **how)
        got, states = form.f(**x, initial_state=other, state_v_first=True, **how)
    assert states is other
    same((got, other.mT), (want, pool))


@prefills
def test_prefills_that_are_refused(step):
    pool, x, rows = step.drawn(True, "cpu")
    before = pool.clone()
    with launches() as ran:
        with pytest.raises(ValueError, match=r"a slot for each sequence, got \(3, 1\)"):
            step.run(pool, x, rows[:, None])
        with pytest.raises(TypeError, match=r"must be torch.float32, torch.float16 or torch.bf"):
            step.run(pool.double(), x, rows)
        with pytest.raises(ValueError, match="must have a slot at least"):
            step.run(pool[:0], x, rows)
    assert not ran and torch.equal(pool, before)


def test_a_pool_that_is_not_asked_for_is_refused():
    x, _ = contract.gdn.draw(1, 3, torch.float32, "cpu", N=2)
    with pytest.raises(ValueError, match="needs inplace_final_state=True, got False"):
        chunk_gated_delta_rule(**x, ssm_state_indices=torch.tensor([1]))
    states, x = of_mamba(1, 1, "cpu")
    x |= {"chunk_size": 16, "initial_states": states, "cu_seqlens": torch.tensor([0, 17])}
    with pytest.raises(ValueError, match="return_varlen_states must be False with inplace_final_"):
        mamba_chunk_scan_combined(**x, inplace_final_states=True, return_varlen_states=True)
