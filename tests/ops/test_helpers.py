"""Bad input, and kernels where they cannot run: the message names argument and case."""

import pytest
import torch
from refusals import refuses

from linattn_edu import (
    chunk_gated_delta_rule,
    chunk_local_cumsum,
    fused_recurrent_gated_delta_rule,
    l2norm,
    solve_tril,
)
from linattn_edu.ops import check
from linattn_edu.ops.gdn import chunk
from linattn_edu.testing import gdn_inputs

SIZES = (2, 20, 2, 4, 16, 24)  # B, T, H, HV, K, V
RAW = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}


new = torch.zeros


def bounds(*numbers):
    return torch.tensor(numbers)


DELTA = {
    "k shape": ({"k": new(2, 20, 2, 8)}, r"k must have shape \[B=2, T=20, H=2, K=16\]"),
    "g shape": ({"g": new(2, 20, 2)}, r"g must have shape \[B=2, T=20, HV=4\]"),
    "beta shape": ({"beta": new(2, 20, 5)}, r"beta must have shape .*HV=4"),
    "v first": ({"state_v_first": True}, "initial_state must have shape .*V=24, K"),
    "head counts": (
        {"v": new(2, 20, 3, 24), "g": new(2, 20, 3), "beta": new(2, 20, 3), "initial_state": None},
        r"multiple of q's 2 heads .*HV=3",
    ),
    "no row": (gdn_inputs(0, 20, 2, 2, 8, 8).asdict(), "q must have B >= 1, got B=0"),
    "no value": (gdn_inputs(2, 20, 2, 2, 8, 0).asdict(), "v must have V >= 1, got V=0"),
    "V": (gdn_inputs(1, 1, 1, 1, 2, 513).asdict(), "v must have V <= 512, got V=513"),
}
CHUNKED = {"K": (gdn_inputs(1, 1, 1, 1, 257, 2).asdict(), "must have K <= 256, got K=257")}
RECURRENT = {
    "gk shape": (
        {"gk": new(2, 20, 4, 24)},
        r"gk must have shape \[B=2, T=20, HV=4, K=16\], got \(2, 20, 4, 24\)",
    ),
    "raw g missing": (RAW | {"g": None}, "g must be given with use_gate_in_kernel=True"),
    "no beta": (
        {"beta": None, "use_beta_sigmoid_in_kernel": True},
        "beta must be given with use_beta_sigmoid_in_kernel=True, got None",
    ),
    "cp_context": ({"cp_context": 1}, "cp_context is not supported: .* got 1"),
    "K": (gdn_inputs(1, 1, 1, 1, 513, 2).asdict(), "q and k must have K <= 512, .*513"),
}


def delta():
    return gdn_inputs(*SIZES, initial_state=True).asdict()


test_chunked_form_refuses = refuses(chunk_gated_delta_rule, delta, DELTA, CHUNKED)
test_recurrent_form_refuses = refuses(fused_recurrent_gated_delta_rule, delta, DELTA, RECURRENT)

G = {"g": new(1, 20, 2), "chunk_size": 16}
CUMSUM = {
    "g no tensor": ({"g": None}, TypeError, "g must be a torch.Tensor .*got NoneType"),
    "g rank": ({"g": new(20, 2)}, r"g must have 3 dimensions \[B, T, H\], got 2"),
    "g dtype": ({"g": new(1, 20, 2).int()}, TypeError, "g must be float.*int32"),
    "g empty": ({"g": new(1, 4, 0)}, "g must have no empty axis but T"),
    "chunk_size": ({"chunk_size": 48}, "chunk_size must be a power of two, got 48"),
    "reverse": ({"reverse": 2}, TypeError, "reverse must be True or False, got 2"),
    "scale": ({"scale": float("nan")}, "scale must be finite, got nan"),
    "output_dtype": ({"output_dtype": torch.int8}, TypeError, "output_dtype must be a floating"),
    "batch": ({"g": new(2, 9, 1), "cu_seqlens": bounds(0, 9)}, "g must have B = 1"),
    "end": ({"cu_seqlens": bounds(0, 29)}, "cu_seqlens must end at T=20 or before"),
    "cpu alone": ({"cu_seqlens_cpu": bounds(0, 9)}, "cu_seqlens_cpu belongs to cu_seq"),
    "lengths": (
        {"cu_seqlens": bounds(0, 20), "cu_seqlens_cpu": bounds(0, 5, 20)},
        r"cu_seqlens_cpu must have the shape of cu_seqlens, \(2,\), got \(3,\)"
    ),
    "indices": (
        {"cu_seqlens": bounds(0, 20), "chunk_indices": bounds(0, 1)},
        r"chunk_indices must have shape \[NT, 2\], got \(2,\)"
    ),
    "number of chunks": (
        {"cu_seqlens": bounds(0, 20), "chunk_indices": bounds([0, 0])},
        "chunk_indices must have 2 rows, one for each chunk of 16 tokens, got 1"
    ),
    "impl": ({"impl": "gpu"}, "impl must be one of"),
}  # fmt: skip


test_chunk_local_cumsum_refuses = refuses(chunk_local_cumsum, lambda: G, CUMSUM)

A = {"A": new(1, 20, 2, 16)}
SOLVE = {
    "A no tensor": ({"A": 1}, TypeError, "A must be a torch.Tensor .*got int"),
    "A rank": ({"A": new(20, 2, 16)}, r"A must have 4 dimensions \[B, T, H, C\], got 3"),
    "A dtype": ({"A": new(1, 20, 2, 16).bool()}, TypeError, "A must be float.*bool"),
    "A empty": ({"A": new(1, 20, 0, 16)}, "A must have no empty axis"),
    "C": ({"A": new(1, 20, 2, 8)}, "A must have C = 16, 32 or 64, got C=8"),
    "output_dtype": ({"output_dtype": torch.int8}, TypeError, "output_dtype must be a floating"),
    "batch": (
        {"A": new(2, 9, 1, 16), "cu_seqlens": bounds(0, 9)},
        "A must have B = 1 with cu_seqlens, .* got B=2",
    ),
    "fall": ({"cu_seqlens": bounds(0, 9, 8, 20)}, "cu_seqlens must not decrease"),
    "cpu device": (
        {"cu_seqlens": bounds(0, 20), "cu_seqlens_cpu": bounds(0, 20).to("meta")},
        "cu_seqlens_cpu must be on cpu, got meta",
    ),
    "device": (
        {"cu_seqlens": bounds(0, 20).to("meta")},
        "cu_seqlens must be on cpu like A, got meta",
    ),
    "indices alone": ({"chunk_indices": bounds([0, 0])}, "chunk_indices belongs to cu"),
}


test_solve_tril_refuses = refuses(solve_tril, lambda: A, SOLVE)

L2NORM = {
    "x no tensor": ({"x": [3.0, 4.0]}, TypeError, "x must be a torch.Tensor .*got list"),
    "x dtype": ({"x": bounds(1, 2)}, TypeError, "x must be float.*int64"),
    "x number": ({"x": torch.tensor(1.0)}, r"x must have shape \[..., D\] .*got \(\)"),
    "x empty": ({"x": new(3, 0)}, r"D >= 1, got \(3, 0\)"),
    "eps": ({"eps": -1e-6}, "eps must be >= 0, got -1e-06"),
    "eps missing": ({"eps": None}, "eps must be >= 0, got None"),
    "eps type": ({"eps": "small"}, TypeError, "eps must be a number or None, got str"),
    "eps finite": ({"eps": float("inf")}, "eps must be finite, got inf"),
    "output_dtype": ({"output_dtype": torch.bool}, TypeError, "output_dtype must be a floating"),
    "impl": ({"impl": None}, "impl must be one of .*got None"),
    "width": ({"x": new(1, 65537), "impl": "triton"}, "D up to 65536, got 65537"),
}


test_l2norm_refuses = refuses(l2norm, lambda: {"x": new(2, 3)}, L2NORM)

CALLS = {
    "chunk": lambda **o: chunk_gated_delta_rule(**delta(), **o),
    "recurrent": lambda **o: fused_recurrent_gated_delta_rule(**gdn_inputs(*SIZES).asdict(), **o),
    "cumsum": lambda **o: chunk_local_cumsum(**G, **o),
    "solve_tril": lambda **o: solve_tril(**A, **o),
    "l2norm": lambda **o: l2norm(new(2, 3), **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_triton_where_it_cannot_run(name, monkeypatch):
    monkeypatch.setattr(check, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="impl='triton' cannot run here: the tensors are on the C"):
        CALLS[name](impl="triton")
    CALLS[name](impl="auto")


def test_auto_takes_the_reference_where_kernels_cannot_run(monkeypatch):
    monkeypatch.setattr(check, "interpreted", lambda: False)
    chosen = []
    for name in ("stages", "forward_stages"):
        found = getattr(chunk.chunk, name)
        monkeypatch.setattr(chunk.chunk, name, lambda impl, f=found: chosen.append(impl) or f(impl))
    o, _ = chunk_gated_delta_rule(**delta())
    assert o.isfinite().all()
    assert chosen == ["reference"]


def test_triton_without_triton(monkeypatch):
    monkeypatch.setattr(check, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        chunk_gated_delta_rule(**delta(), impl="triton")


def test_triton_on_another_device():
    x = {n: t.to("meta") for n, t in delta().items()}
    with pytest.raises(ValueError, match="no kernel for the device meta"):
        chunk_gated_delta_rule(**x, impl="triton")


def test_triton_has_no_float64(device):
    x = new(2, 16, 1, 16, dtype=torch.float64, device=device)
    for call in (l2norm, solve_tril, lambda x, impl: chunk_local_cumsum(x, 16, impl=impl)):
        with pytest.raises(ValueError, match="float64 was given"):
            call(x, impl="triton")
    mixed = gdn_inputs(*SIZES, device=device).asdict()
    mixed["beta"] = mixed["beta"].double()
    with pytest.raises(ValueError, match="float64 was given"):
        fused_recurrent_gated_delta_rule(**mixed, impl="triton")
