"""Kernels compiled before they are launched: those that are launched, with nothing done."""

import sys

import gdn_checks
import pytest
import torch
from forks import python
from gdn_checks import same_bits
from kernels.test_plan import CASES, drawn, everywhere, passes
from kernels.workers import lines_of

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.kernels.host import plan, precompile
from linattn_edu.kernels.host.watching import Operations
from linattn_edu.testing import gdn_inputs

__all__ = ["everywhere"]  # a fixture of every test here


def form(x):
    """Of an argument, what chooses the kernel that is compiled."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return x


def launch(kernel, args, kwargs):
    named = {n: form(x) for n, x in kwargs.items()}
    return kernel.fn.__name__, [*map(form, args)], named


@pytest.mark.parametrize("name", [n for n in CASES if n != "in pieces"])
def test_what_is_launched_is_compiled_before(name, device, poison, monkeypatch):
    """By both passes, every launch with its arguments; and inputs, outputs and gradients are as
    without."""
    x, f = CASES[name](0, device)
    kept = {n: t.clone() for n, t in x.items()}
    with plan.off():
        expected = passes(x, f)
    given, launched = [], []
    for kind in (gdn_checks.JITFunction, gdn_checks.InterpretedFunction):
        original = kind.run

        def run(self, *args, original=original, warmup, **kwargs):
            if not warmup:
                named = {n: t for n, t in kwargs.items() if n != "grid"}
                launched.append(launch(self, args, named))
            return original(self, *args, warmup=warmup, **kwargs)

        monkeypatch.setattr(kind, "run", run)
    monkeypatch.setattr(
        precompile, "_only_compile",
        lambda run, kernel, args, grid, kwargs: given.append(launch(kernel, args, kwargs)),
    )  # fmt: skip
    same_bits(passes(x, f), expected)
    same_bits(x, kept)
    assert given == launched and given


def test_operations_give_forms_alone(device):
    """Of the dtype, shape and strides of what they would give; nothing is written or read."""
    x = torch.arange(6.0, device=device).view(2, 3)
    calls = (
        lambda: x.mT.sum(0),
        lambda: (x * 2).to(torch.bfloat16),
        lambda: torch.cat([x, x.flip(0)]).mT.contiguous(),
        lambda: x.sort()[1],
        lambda: torch.zeros(3, device=device),
        lambda: x.new_zeros(2, 2),
        lambda: x[1:].view(3, 1),
    )
    for call in calls:
        with Operations(precompile._only_made):
            got = call()
        assert form(got) == form(call())
    with Operations(precompile._only_made):
        assert x.zero_() is x and x.mul_(x.sum()) is x
        x[0].copy_(x[1])
        with pytest.raises((NotImplementedError, RuntimeError)):
            x.sum().item()
    assert torch.equal(x, torch.arange(6.0, device=device).view(2, 3))


def test_a_composition_that_reads_a_number_runs_as_ever(device):
    place, x, composed = plan.plans(), torch.ones(4, device=device), []

    def compose():
        composed.append(len(composed))
        return (x * x.sum().item(),)

    for _ in range(3):
        assert plan.run(place, (), [x], compose)[0].tolist() == [4.0] * 4
    assert composed == [0, 1, 2, 3], "one time more, for its kernels"


def test_other_lengths_until_nothing_is_left_to_compile(device, monkeypatch):
    left = iter([3, 0, 1, 0])
    monkeypatch.setattr(plan, "precompile", lambda compose: next(left))

    def calls(T, heads=1):
        x = drawn(gdn_inputs, 1, T, heads, heads, 16, 16, seed=0, device=device)
        chunk_gated_delta_rule(**x)

    for T in (16, 20, 24, 28):
        calls(T)
    assert next(left) == 1, "with the first two"
    calls(16, heads=2)
    calls(20, heads=2)
    assert next(left, None) is None, "other heads have other kernels"


def test_kernels_for_hopper():
    """Which need not be present: compiled side by side, to the same bits, and errors told in their
    place."""
    results = {}
    for line in lines_of("compile_ahead.py"):
        results |= line
    assert results == {
        "side_by_side": {
            "launched": 3 * ["sum_kernel", "max_kernel"],
            "launchers elsewhere": 2,
            "same binaries": True,
            "threads left": 0,
        },
        "with_an_error": {"launched": 2 * ["max_kernel"], "told": 2 * ["CompilationError"]},
        "interrupted": {"told": True, "launched": ["max_kernel"], "as before": True},
    }


def test_no_call_imports_the_compiler_of_pytorch():
    """Which takes a second or two; a call that is watched would, by PyTorch's default."""
    code = """
import sys, torch
from linattn_edu import l2norm
from linattn_edu.kernels.host import plan
plan.DEVICES.add("cpu")
for _ in range(3):
    l2norm(torch.ones(2, 16), impl="triton")
programs = [p for each in plan._all for p in each.values()]
print(any(map(callable, programs)), "torch._dynamo" in sys.modules)
"""
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = python("-c", code, env=variables)
    assert done.stdout.split() == ["True", "False"], done.stderr
