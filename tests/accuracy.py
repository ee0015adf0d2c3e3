"""How far the results of every operator are from float64, in roundings: accuracy.json, which the
page "What is tested where" shows and ops/test_accuracy.py holds.

    python tests/accuracy.py    compute all of it anew, in the interpreter (minutes)

A rounding is the relative RMS error of the exact result rounded to the dtype of the inputs: no
kernel that returns this dtype can be nearer. Of fewer than 50 numbers, and of numbers that
this dtype happens to hold exactly, it is the error of rounding random ones.
"""

import json
import multiprocessing
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(Path(__file__).parents[1]))

import gdn_checks
import numpy as np
import pytest
import torch
from grids import pairs
from interpreter import quicken
from ops.ema import ema_cases
from ops.ssd import ssd_cases
from ops.test_alike import inputs
from torch import Tensor

import linattn_edu
from linattn_edu.testing import relative_rms

FILE = Path(__file__).with_suffix(".json")
DTYPES = ("float32", "bfloat16", "float16")
TOKENS, STEPS, SIZE = 256, 64, 32  # in chunks, token by token; K, V, P, N and D
FEW = 50  # numbers
KEYS = {"random keys": 0.0, "keys of cosine .97": 0.97, "one key": 1.0}
WEIGHTS = ("weight given", "weight 1 - decay")
BETAS, GATES = (0.9, 1.0, 2.0), (-1.0, -0.005, 0.0)


class Case(NamedTuple):
    """What a row is of; gate is the log decay of every token."""

    operator: str
    inputs: str
    beta: float | None
    gate: float

    def __str__(self) -> str:
        return ", ".join(str(x) for x in self if x is not None)


def cases() -> list[Case]:
    """Every row; token by token they are fewer."""
    every = [(k, b, g) for k in KEYS for b in BETAS for g in GATES]
    some = set(pairs(keys=KEYS, beta=BETAS, gate=GATES))
    found = [Case(f, *kind) for f in ("chunk_gated_delta_rule", "chunk_kda") for kind in every]
    steps = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
    found += [Case(f, *kind) for f in steps for kind in every if kind in some]
    mamba = ("mamba_chunk_scan_combined", "selective_state_update")
    found += [Case(f, k, None, g) for f in mamba for k in KEYS for g in GATES]
    found += [Case("ema_scan", w, None, g) for w in WEIGHTS for g in GATES]
    return found[:-1]  # where nothing decays, 1 - decay is 0


def results(case: Case, dtype: str) -> dict[str, float]:
    """name -> the error of each output and gradient, in roundings; of zero there is none."""
    kind = getattr(torch, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", in_order)
        got, want = RUN.get(case.operator, delta)(case, kind)
    terms = want.get("terms", {})
    assert all(want[n].any() or not y.any() for n, y in got.items())
    return {n: error(y, want[n], kind, terms.get(n)) for n, y in got.items() if want[n].any()}


def in_order(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
    """Products term by term, as a GPU without tensor cores sums them. A BLAS has an order of its
    own on every CPU, and errors in float32 differ by a factor of two or more.
    """
    a, b = a.astype(dtype), b.astype(dtype)
    total = a[..., :, 0, None] * b[..., 0, None, :]
    for k in range(1, a.shape[-1]):
        total += a[..., :, k, None] * b[..., k, None, :]
    return total


def error(got: Tensor, want: Tensor, dtype: torch.dtype, terms: float | None = None) -> float:
    """In roundings; of a sum that cancels as a part of its terms, where their norm is given."""
    size, random = want.norm().item(), drawn(4096, dtype=torch.float64)
    part = size / max(size, terms or 0)
    rounding = relative_rms(want.to(dtype), want) if want.numel() >= FEW else 0
    usual = relative_rms(random.to(dtype), random)
    assert rounding < 1, f"the exact result does not fit {dtype}"
    return part * relative_rms(got, want) / (rounding if rounding > usual / 4 else usual)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def delta(case, dtype):
    T = STEPS if "recurrent" in case.operator else TOKENS
    sizes = {"T": T, "H": 1, "HV": 1, "K": SIZE, "V": SIZE}
    channels = case.operator.endswith("kda")
    x = inputs(KEYS[case.inputs], 1.0, case.gate, dtype, "cpu", **sizes, channels=channels)
    x["beta"].fill_(case.beta)
    do, dht = gdn_checks.cotangents(x)
    f = getattr(linattn_edu, case.operator)
    got = gdn_checks.triton(x, do, dht, f=f, allow_neg_eigval=case.beta > 1)
    return got, gdn_checks.exact(x, do, dht)


def mamba_inputs(case, dtype, T):
    """Steps of 1; C is unit, B as the keys are, for two heads."""
    x = inputs(KEYS[case.inputs], 1.0, 0, dtype, "cpu", T=T, HV=2, K=SIZE, V=SIZE)
    x = {"x": x["v"], "B": x["k"], "C": x["q"], "initial_states": x["initial_state"].mT}
    x = {n: t.contiguous() for n, t in x.items()}
    return x | {"dt": torch.ones(1, T, 2), "A": torch.full((2,), case.gate), "D": drawn(2)}


def mamba(case, dtype):
    x = mamba_inputs(case, dtype, TOKENS)
    do, dht = ssd_cases.cotangents(x)
    return ssd_cases.run(x, do, dht, impl="triton"), ssd_cases.exact(x, do, dht)


def mamba_steps(case, dtype):
    x = mamba_inputs(case, dtype, STEPS)
    want = ssd_cases.recurrence(**ssd_cases.wide(x))
    state, o = x["initial_states"].clone(), []
    A, D = x["A"][:, None, None].expand(state.shape[1:]), x["D"][:, None].expand(x["x"].shape[2:])
    for t in range(STEPS):
        y, B, C = (x[n][:, t] for n in ("x", "B", "C"))
        dt = x["dt"][:, t, :, None].expand(y.shape)
        o.append(linattn_edu.selective_state_update(state, y, dt, A, B, C, D, impl="triton"))
    return dict(zip(("o", "ht"), (torch.stack(o, 1), state), strict=True)), dict(
        zip(("o", "ht"), want, strict=True)
    )


def average(case, dtype):
    x = {"x": drawn(1, TOKENS, 2, SIZE).to(dtype), "g": torch.full((1, TOKENS, 2), case.gate)}
    x |= {"weight": 0.1 * drawn(1, TOKENS, 2, seed=1)} if case.inputs == WEIGHTS[0] else {}
    x["initial_state"] = drawn(1, 2, SIZE, seed=2)
    dy, dht = drawn(*x["x"].shape, seed=3).to(dtype), drawn(1, 2, SIZE, seed=4)
    got = ema_cases.run(x, dy, dht, output_final_state=True, impl="triton")
    return got, ema_cases.exact(x, dy, dht)


RUN = {
    "mamba_chunk_scan_combined": mamba,
    "selective_state_update": mamba_steps,
    "ema_scan": average,
}


@cache
def read() -> dict[Case, dict[str, dict[str, float]]]:
    """Case -> dtype -> name -> error, as the file has them."""
    rows = json.loads(FILE.read_text())
    return {Case(*(r[n] for n in Case._fields)): {d: r[d] for d in DTYPES} for r in rows}


def row(case: Case) -> str:
    """A line of the file."""
    torch.set_num_threads(1)
    errors = {d: {n: float(f"{e:.3g}") for n, e in results(case, d).items()} for d in DTYPES}
    print(case, flush=True)
    return json.dumps(case._asdict() | errors)


if __name__ == "__main__":
    quicken()
    with multiprocessing.Pool() as pool:
        rows = pool.map(row, cases(), chunksize=1)
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")
