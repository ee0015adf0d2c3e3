"""Public functions whose calls are written down whole: the same results, the same refusals."""

import sys

import pytest
import torch
from ops.calls import CALLS, call
from torch import Tensor

import linattn_edu
from linattn_edu.kernels.host import plan, tape
from linattn_edu.ops import ring, tensors
from linattn_edu.ops.repeated import repeat
from linattn_edu.ops.ring import make_ring
from linattn_edu.testing import gdn_inputs

WHOLE = (
    "fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "fused_recurrent_gdn2",
    "selective_state_update", "causal_conv1d_update", "rms_norm_gated", "l2norm",
    "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "mamba_chunk_scan_combined",
)  # fmt: skip
NAMES = [n for n in CALLS if n.split()[0] in WHOLE]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Calls in the interpreter are written down too, where as on a GPU no number is looked at."""
    monkeypatch.setattr(plan, "DEVICES", {"cuda", "cpu"})
    known = tensors.known
    for module in [m for n, m in sys.modules.items() if n.startswith("linattn_edu.ops.")]:
        if getattr(module, "known", None) is known:
            monkeypatch.setattr(module, "known", lambda x: False)


def programs() -> list:
    return [p for each in plan._all for p in each.values()]


def copied(given: dict) -> dict:
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}


def several(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def fails(f, **given) -> str:
    """How a call is refused."""
    with pytest.raises((TypeError, ValueError)) as error:
        f(**given)
    return f"{type(error.value).__name__}: {error.value}"


def repeated(f, given: dict, monkeypatch, times=3) -> None:
    """Call f so often that a program runs from here on, not f."""
    for _ in range(times):
        f(**copied(given))
    assert any(map(callable, programs())) and tape.NEVER not in programs()
    monkeypatch.setattr("linattn_edu.ops.check.Tensors.take", lambda *_, **__: pytest.fail("seen"))
    monkeypatch.setattr("linattn_edu.ops.check.Tensors.dense", lambda *_, **__: pytest.fail("seen"))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_results_are_those_of_the_function(name, device, monkeypatch):
    f, own, options = call(name, device)
    given, others = own | options, copied(own | options)
    with plan.off():
        expected = several(f(**others))
    with monkeypatch.context() as patch:
        repeated(f, given, patch)
        own |= copied(own)
        versions = {n: x._version for n, x in own.items()}
        got = several(f(**own, **options))
    for a, b in zip(got, expected, strict=True):
        assert a is b is None or (torch.equal(a, b) and a.stride() == b.stride())
    for n in own:
        assert torch.equal(own[n], others[n])
        assert (own[n]._version > versions[n]) == (not torch.equal(own[n], given[n]))
    if "inplace_final_state" in given:
        assert got[1] is own["initial_state"]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_what_is_wrong_is_refused_after_right_calls(name, device):
    """With the words of a first call: shapes, dtypes, layouts and options of each argument."""
    f, own, options = call(name, device)
    given = own | options
    wrong = [{n: x[..., :0]} for n, x in own.items()]
    wrong += [{n: x.to(torch.complex64)} for n, x in own.items()]
    wrong += [{n: x.to_sparse()} for n, x in own.items()]
    wrong += [{n: x.to("meta")} for n, x in list(own.items())[1:]]
    wrong += [{n: 2 if x is True else True} for n, x in options.items() if isinstance(x, bool)]
    wrong += [{"impl": "Triton"}, {"impl": 1}, {"unknown": None}]
    with plan.off():
        expected = [fails(f, **copied(given) | w) if refused(f, given, w) else None for w in wrong]
    for _ in range(3):
        f(**copied(given))
    for w, words in zip(wrong, expected, strict=True):
        if words is not None:
            assert fails(f, **copied(given) | w) == words
    assert sum(x is not None for x in expected) > len(own) + 3


def refused(f, given: dict, wrong: dict) -> bool:
    try:
        f(**copied(given) | wrong)
    except (TypeError, ValueError):
        return True
    return False


@torch.no_grad()
def test_true_is_not_one(device):
    x = gdn_inputs(1, 1, 1, 1, 16, 16, device=device).asdict()
    x = {n: t for n, t in x.items() if t is not None}
    f = linattn_edu.fused_recurrent_gated_delta_rule
    for _ in range(3):
        f(**x, scale=1)
    with pytest.raises(TypeError, match="scale must be a number or None, got bool"):
        f(**x, scale=True)


@torch.no_grad()
def test_what_is_written_must_lie_apart(device):
    """Whatever the addresses of earlier calls were."""
    state, x = torch.zeros(2, 8, 3, device=device), torch.ones(2, 8, device=device)
    weight = torch.ones(8, 3, device=device)
    for _ in range(4):
        linattn_edu.causal_conv1d_update(x, state, weight)
    memory = torch.zeros(48, device=device)
    beside = memory.view(2, 8, 3)
    with pytest.raises(ValueError, match="conv_state must not share memory"):
        linattn_edu.causal_conv1d_update(memory[32:].view(2, 8), beside, weight)
    assert not memory.any()


@torch.no_grad()
def test_a_number_in_a_tensor_is_read_each_time(device):
    x = torch.randn(3, 8, device=device)
    for eps in (1.0, 2.0, 3.0, 4.0, 5.0):
        y = linattn_edu.rms_norm_gated(x, eps=torch.tensor(eps, device=device))
        want = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(y, want)


def test_gradients_come_back(device):
    """A call that needs one is composed, whatever went before."""
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    with torch.no_grad():
        for _ in range(4):
            linattn_edu.rms_norm_gated(x, weight)
    weight.requires_grad_()
    linattn_edu.rms_norm_gated(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not linattn_edu.rms_norm_gated(x, weight).requires_grad


@torch.no_grad()
def test_a_ring_is_an_argument(device, monkeypatch):
    x = gdn_inputs(2, 12, 1, 2, 16, 16, device=device, dtype=torch.bfloat16).asdict()
    x = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    states = [torch.zeros(2, 2, 16, 16, device=device) for _ in range(2)]
    rings = [make_ring(s, 1, length=4, tokens=1) for s in states]
    f = linattn_edu.replay_gated_delta_rule
    for t in range(12):
        one = {n: y[:, t : t + 1].clone() for n, y in x.items()}
        with monkeypatch.context() as patch:
            if t > 2:
                patch.setattr(ring, "check_ring", lambda *_: pytest.fail("seen"))
            o = f(**one, state=states[0], ring=rings[0])
        with plan.off():
            want = f(**one, state=states[1], ring=rings[1])
        assert torch.equal(o, want)
    assert all(map(torch.equal, (states[0], *rings[0][:4]), (states[1], *rings[1][:4])))
    with pytest.raises(ValueError, match="must not share memory"):
        f(
            **one,
            state=states[0],
            ring=rings[0]._replace(writes=states[0].view(-1)[:320].view(2, 2, 5, 16)),
        )


@torch.inference_mode()
def test_inference_mode(device):
    """Its tensors, and others inside and outside of it."""
    for where in (True, False, True):
        with torch.inference_mode(where), torch.no_grad():
            state, x = torch.zeros(2, 8, 3, device=device), torch.ones(2, 8, device=device)
            weight = torch.ones(8, 3, device=device)
        for _ in range(4):
            linattn_edu.causal_conv1d_update(x, state, weight)
        assert torch.equal(state, torch.ones_like(state))
        with torch.inference_mode(False), torch.no_grad():
            y = linattn_edu.causal_conv1d_update(x, state, weight)
        assert torch.equal(y, torch.full_like(y, 3))


@torch.no_grad()
def test_a_host_that_reads_is_never_repeated(device):
    x, read = torch.ones(4, device=device), []

    def f():
        read.append(x.cpu().tolist() if device.type == "cuda" else x.sum().item())
        return x + 1

    programs = {}
    for _ in range(5):
        repeat(programs, [], [x], lambda: [False], f)
    assert len(read) == 5 and [*programs["plans"].values()] == [tape.NEVER]


@pytest.mark.parametrize(
    "name", ["fused_recurrent_gated_delta_rule", "fused_recurrent_kda of a layer"]
)
@torch.no_grad()
def test_results_are_made_where_they_shall_be(name, device):
    """In out and final_state_out, without a copy; at another alignment with one."""
    f, own, options = call(name, device)
    options |= {"output_final_state": True}
    want = f(**own, **options)
    memory = torch.full((1001,), torch.nan, device=device)
    for _ in range(4):
        rooms = [torch.full_like(x, torch.nan) for x in want]
        got = f(**own, **options, out=rooms[0], final_state_out=rooms[1])
        assert all(a is b and torch.equal(b, w) for a, b, w in zip(got, rooms, want, strict=True))
    (program,) = [p for p in programs() if callable(p) and p.writes]
    copies = [n for n, c in program.__globals__.items() if c is torch.ops.aten.copy_.default]
    assert not any(f" {n}(" in program.source for n in copies) and "empty(" not in program.source
    odd = memory[1 : 1 + want[0].numel()].view(want[0].shape)
    for _ in range(4):
        odd.fill_(torch.nan)
        got, _ = f(**own, **options, out=odd)
        assert got is odd and torch.equal(odd, want[0])
    shared = own["v"].view(-1).view(want[0].shape) if own["v"].shape == want[0].shape else own["v"]
    with pytest.raises(ValueError, match="must not share memory"):
        f(**own, **options, out=shared, final_state_out=rooms[1])
