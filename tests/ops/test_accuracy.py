"""No result is further from float64 than tests/accuracy.json, which the book shows, says."""

import accuracy
import pytest
import torch
from accuracy import DTYPES, Case
from grids import FULL, name

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the table is the interpreter's"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

MOST = 1.3  # errors of the table
# roundings: about ten of float32, what another order of sums costs a float32 result
NOTHING = {"float32": 0.0, "bfloat16": 2e-4, "float16": 2e-3}
GDN, KDA, MAMBA = "chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined"
SAMPLE = [
    (Case(GDN, "one key", 0.9, -0.005), "bfloat16"),
    (Case(GDN, "keys of cosine .97", 1.0, -1.0), "float16"),
    (Case(GDN, "random keys", 2.0, 0.0), "float32"),
    (Case(KDA, "keys of cosine .97", 0.9, -0.005), "bfloat16"),
    (Case(KDA, "one key", 1.0, 0.0), "float16"),
    (Case(KDA, "random keys", 0.9, -1.0), "float32"),
    (Case("fused_recurrent_gated_delta_rule", "one key", 0.9, 0.0), "bfloat16"),
    (Case("fused_recurrent_kda", "keys of cosine .97", 2.0, -1.0), "float16"),
    (Case(MAMBA, "random keys", None, -0.005), "bfloat16"),
    (Case(MAMBA, "one key", None, -1.0), "float16"),
    (Case(MAMBA, "keys of cosine .97", None, 0.0), "float32"),
    (Case("selective_state_update", "one key", None, -0.005), "float16"),
    *((Case("ema_scan", accuracy.WEIGHTS[i % 2], None, -0.005), d) for i, d in enumerate(DTYPES)),
]
EVERY = [(c, d) for c in accuracy.cases() for d in DTYPES]


@pytest.mark.parametrize(("case", "dtype"), EVERY if FULL else SAMPLE, ids=name)
def test_no_error_is_larger_than_the_table_says(case, dtype):
    told = accuracy.read()[case][dtype]
    found = accuracy.results(case, dtype)
    assert found.keys() == told.keys()
    most = {n: MOST * e + NOTHING[dtype] for n, e in told.items()}
    worse = {n: (e, told[n]) for n, e in found.items() if not e <= most[n]}
    assert not worse, f"name: (roundings, what the table says): {worse}"


def test_the_table_is_of_every_case():
    """`python tests/accuracy.py` writes it."""
    assert [*accuracy.read()] == accuracy.cases()
    assert {c for c, _ in SAMPLE} <= {*accuracy.cases()}
    assert {(c.operator, d) for c, d in SAMPLE} >= {
        (f, d) for f in (GDN, KDA, MAMBA, "ema_scan") for d in DTYPES
    }


def test_an_error_is_counted_in_roundings():
    exact = accuracy.drawn(1000, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert accuracy.error(exact.to(dtype), exact, dtype) == 1
        noise = accuracy.drawn(1000, seed=1, dtype=torch.float64)
        off = exact + 10 * (exact.to(dtype) - exact).norm() / noise.norm() * noise
        assert abs(accuracy.error(off, exact, dtype) - 10) < 0.1
    # of a sum that cancels: as a part of its terms
    one = torch.tensor([1.0], dtype=torch.float64)
    assert accuracy.error(one + 1, one, torch.float16, terms=100.0) == pytest.approx(
        accuracy.error(one + 0.01, one, torch.float16)
    )
