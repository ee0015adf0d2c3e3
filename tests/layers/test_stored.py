"""State dicts of fla's and mamba_ssm's layers, and what their layers gave: see store.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from layers.store import CASES, draw, run, values

from linattn_edu import layers
from linattn_edu.testing import assert_close, relative_rms

# of the peers' kernels, which multiply float32 as tf32: 11 bits of each factor
SINGLE = {"layers_cpu": 1e-5, "layers_cuda": 2e-3}
FILES = sorted(Path(__file__).parent.glob("layers_*.npz"))


def shapes(file):
    """Of each case that a file has."""
    with np.load(file) as found:
        return json.loads(str(found["shapes"]))


PAIRS = [(file, case) for file in FILES for case in shapes(file)]
each = pytest.mark.parametrize(
    "stored, case", PAIRS, indirect=["stored"], ids=lambda x: getattr(x, "stem", x)
)


def ours(case, dtype, device):
    """run of our layer: load_state_dict is strict in it."""
    cls, arguments, _ = CASES[case]
    impl = "reference" if device.type == "cpu" else "auto"
    layer = getattr(layers, cls)(**arguments, impl=impl)

    def call(layer, x, mask):
        more = {"v_first": x} if getattr(layer, "v_lora", None) is not None else {}
        return layer(x, mask, **more)

    return run(layer, case, call, dtype, device)


@pytest.fixture
def stored(request):
    with np.load(request.param) as file:
        return {"of": request.param.stem, **file}


def test_every_case_is_stored():
    assert {case for _, case in PAIRS} == CASES.keys()


@each
def test_names_and_shapes(stored, case):
    cls, arguments, _ = CASES[case]
    layer = getattr(layers, cls)(**arguments)
    given = json.loads(str(stored["shapes"]))[case]
    assert {n: list(x.shape) for n, x in layer.state_dict().items()} == given
    assert draw(case, given)[0].keys() == given.keys()


@each
def test_single_precision(stored, case, device):
    for key, x in ours(case, torch.float32, device).items():
        assert_close(key, x, values(stored[f"{case}.float32.{key}"]), SINGLE[stored["of"]])


@each
def test_bfloat16_is_as_near_to_the_exact_numbers(stored, case, device, monkeypatch):
    """Theirs rounds in other places: two roundings of a chain of ten are not one."""
    found = ours(case, torch.bfloat16, device)

    def rounded(case, shapes):
        state, *others = draw(case, shapes)
        return {n: x.bfloat16().float() for n, x in state.items()}, *(
            x.bfloat16().float() for x in others
        )

    monkeypatch.setattr("layers.store.draw", rounded)
    for key, exact in ours(case, torch.float64, device).items():
        theirs = values(stored[f"{case}.bfloat16.{key}"])
        assert relative_rms(found[key], exact) < max(5e-3, 1.25 * relative_rms(theirs, exact)), key
        assert_close(key, found[key], theirs, 1.5e-2)
