"""Bad input: one case each; the message names the argument, what was expected, what came."""

import pytest
import torch
from refusals import refuses

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.ops import check
from linattn_edu.ops.gdn import chunk
from linattn_edu.testing import gdn_inputs

SIZES = (2, 20, 2, 4, 16, 24)  # B, T, H, HV, K, V


def arguments(**changes):
    return gdn_inputs(*SIZES, initial_state=True).asdict() | changes


def new(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


CASES = {
    "k shape": ({"k": new(2, 20, 2, 8)}, ValueError, r"k must have shape \[B=2, T=20, H=2, K=16\]"),
    "g heads": ({"g": new(2, 20, 2)}, ValueError, r"g must have shape \[B=2, T=20, HV=4\]"),
    "beta shape": ({"beta": new(2, 20, 5)}, ValueError, r"beta must have shape .*HV=4"),
    "state shape": (
        {"initial_state": new(2, 4, 24, 16)},
        ValueError,
        r"initial_state must have shape \[N=2, HV=4, K=16, V=24\], got \(2, 4, 24, 16\)",
    ),
    "head counts": (
        {"v": new(2, 20, 3, 24), "g": new(2, 20, 3), "beta": new(2, 20, 3), "initial_state": None},
        ValueError,
        r"multiple of q's 2 heads .*HV=3",
    ),
}


test_refused_before_any_kernel = refuses(chunk_gated_delta_rule, arguments, CASES)


@pytest.mark.parametrize("sizes", [(2, 20, 2, 2, 257, 8), (2, 20, 2, 2, 8, 513)])
def test_head_dimension_too_large(sizes):
    with pytest.raises(ValueError, match=r"must have (K <= 256, got K=257|V <= 512, got V=513)"):
        chunk_gated_delta_rule(**gdn_inputs(*sizes).asdict())


@pytest.mark.parametrize("sizes", [(0, 20, 2, 2, 8, 8), (2, 20, 2, 2, 8, 0)])
def test_empty_input(sizes):
    with pytest.raises(ValueError, match=r"(q|v) must have ([BV]) >= 1, got \2=0"):
        chunk_gated_delta_rule(**gdn_inputs(*sizes).asdict())


def test_triton_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(check, "interpreted", lambda: False)
    with pytest.raises(
        ValueError, match="impl='triton' cannot run here: the tensors are on the CPU"
    ):
        chunk_gated_delta_rule(**arguments(impl="triton"))


def test_auto_takes_the_reference_where_kernels_cannot_run(monkeypatch):
    monkeypatch.setattr(check, "interpreted", lambda: False)
    chosen = []
    for name in ("stages", "forward_stages"):
        found = getattr(chunk.chunk, name)
        monkeypatch.setattr(chunk.chunk, name, lambda impl, f=found: chosen.append(impl) or f(impl))
    o, _ = chunk_gated_delta_rule(**arguments())
    assert o.isfinite().all()
    assert chosen == ["reference"]


def test_triton_without_triton(monkeypatch):
    monkeypatch.setattr(check, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        chunk_gated_delta_rule(**arguments(impl="triton"))


def test_triton_on_another_device():
    x = {n: t.to("meta") for n, t in arguments().items()}
    with pytest.raises(ValueError, match="no kernel for the device meta"):
        chunk_gated_delta_rule(**x, impl="triton")
