"""A tensor goes by the files that check arguments once each, on its way to an operator."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import linattn_edu
from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.testing import gdn_inputs, kda_inputs

FILES = {f.__file__: Path(f.__file__).stem for f in (check, arguments)}


def parts(x):
    """x, and what tuples and dicts hold."""
    if isinstance(x, dict):
        x = (*x.values(),)
    return [y for part in x for y in parts(part)] if isinstance(x, tuple) else [x]


def visits(call, tensors: dict[str, Tensor]) -> Counter:
    """(tensor, file) -> how often another file hands it to a function of this one."""
    names, seen = {id(x): n for n, x in tensors.items()}, Counter()

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file in FILES and frame.f_back.f_code.co_filename != file:
            handed = {names[id(x)] for x in parts((*frame.f_locals.values(),)) if id(x) in names}
            seen.update((n, FILES[file]) for n in handed)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def randn(*shape):
    return torch.randn(*shape)


GDN = gdn_inputs(1, 20, 1, 2, 8, 6, initial_state=True).asdict()
KDA = kda_inputs(1, 20, 1, 2, 8, 6, initial_state=True).asdict()
RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
UNIT = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
HEADS = {"A_log": randn(2), "dt_bias": randn(2)}
CHANNELS = {"A_log": randn(2), "dt_bias": randn(16)}
SSD = {
    "x": randn(1, 20, 2, 4), "dt": randn(1, 20, 2), "A": -torch.rand(2), "B": randn(1, 20, 1, 8),
    "C": randn(1, 20, 1, 8), "D": randn(2), "z": randn(1, 20, 2, 4), "dt_bias": randn(2),
    "initial_states": randn(1, 2, 4, 8), "seq_idx": torch.zeros(1, 20, dtype=torch.int32),
}  # fmt: skip
STEP = {
    "state": randn(3, 2, 4, 8), "x": randn(3, 2, 4), "dt": randn(3, 2, 4), "A": -randn(2, 4, 8),
    "B": randn(3, 1, 8), "C": randn(3, 1, 8), "D": randn(2, 4), "z": randn(3, 2, 4),
    "dt_bias": randn(2, 4), "state_batch_indices": torch.arange(3),
}  # fmt: skip
CONV = {"weight": randn(4, 3), "bias": randn(4)}
CALLS = {
    "chunk_gated_delta_rule": GDN | UNIT,
    "chunk_gated_delta_rule of a layer": GDN | RAW | UNIT | HEADS | {"state_v_first": True}
    | {"initial_state": randn(1, 2, 6, 8)},
    "chunk_kda": KDA | UNIT | {"safe_gate": True, "g": -torch.rand(1, 20, 2, 8)},
    "chunk_kda of a layer": KDA | RAW | UNIT | CHANNELS,
    "fused_recurrent_gated_delta_rule": GDN | UNIT
    | {"gk": -torch.rand(1, 20, 2, 8), "gv": -torch.rand(1, 20, 2, 6)},
    "fused_recurrent_kda of a layer": KDA | RAW | UNIT | CHANNELS | {"inplace_final_state": True}
    | {"ssm_state_indices": torch.zeros(1, dtype=torch.int32)},
    "mamba_chunk_scan_combined": SSD | {"chunk_size": 16},
    "selective_state_update": STEP,
    "ema_scan": {"x": randn(1, 20, 3), "g": -torch.rand(1, 20), "weight": torch.rand(1, 20)}
    | {"initial_state": randn(1, 3)},
    "causal_conv1d": CONV | {"x": randn(1, 20, 4), "residual": randn(1, 20, 4)}
    | {"initial_state": randn(1, 4, 3)},
    "causal_conv1d_fn": CONV | {"x": randn(1, 4, 20), "seq_idx": SSD["seq_idx"]}
    | {"initial_states": randn(1, 4, 2)},
    "causal_conv1d_update": CONV | {"x": randn(2, 4), "conv_state": randn(2, 4, 2)}
    | {"conv_state_indices": torch.arange(2)},
    "rms_norm_gated": {"x": randn(2, 8), "weight": randn(8), "bias": randn(8), "z": randn(2, 8)},
    "l2norm": {"x": randn(2, 8)},
    "solve_tril": {"A": randn(1, 20, 1, 16)},
    "chunk_local_cumsum": {"g": randn(1, 20, 2), "chunk_size": 16},
    "chunk_global_cumsum": {"s": randn(1, 20, 2)},
    "fused_gdn_gate": {"g": randn(1, 20, 2), **HEADS},
    "fused_kda_gate": {"g": randn(1, 20, 2, 8), **CHANNELS},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_once_each(name):
    call = CALLS[name]
    tensors = {n: x for n, x in call.items() if isinstance(x, Tensor)}
    function = getattr(linattn_edu, name.split()[0])
    seen = visits(lambda: function(**call, impl="reference"), tensors)
    assert {n: seen[n, "check"] for n in tensors} == dict.fromkeys(tensors, 1)
    assert not [n for n in tensors if seen[n, "arguments"] > 1]


def test_a_second_visit_is_counted():
    x = randn(2, 8)

    def twice():
        linattn_edu.l2norm(x, impl="reference")
        check.same_device(("x", x), ("y", x))

    assert visits(twice, {"x": x}) == {("x", "check"): 2}
