"""Packed sequences: the same bits as each by itself; and what a gradient may depend on."""

from itertools import pairwise

import pytest
import torch
from gdn_checks import (
    DTYPES,
    boundaries,
    check,
    cotangents,
    exact,
    inputs,
    same_bits,
    spacing,
    triton,
)

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
HEADS = 2 if GPU else 1
# the rows of fla's test_chunk_varlen: H, HV, D, share of open gates, boundaries
ROWS = (
    (4, 4, 60, 0, (0, 15)),
    (4, 4, 64, 0, (0, 256, 500, 1000)),
    (4, 4, 64, 0.5, (0, 256, 500, 1000)),
    (4, 4, 100, 0, (0, 15, 100, 300, 1200, 2000)),
    (2, 4, 64, 0, (0, 256, 500, 1000)),
    (2, 8, 64, 0, (0, 256, 500, 1000)),
)
dtypes = pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[::2], ids=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_fla_s_rows(row, dtype, device):
    H, HV, D, mask, bounds = row
    lengths = [b - a for a, b in pairwise(bounds)]
    if not GPU:
        H, HV, lengths = 1, min(2, HV // H), [min(T, 16 + T % 13) for T in lengths[:2]]
    x = inputs(1, sum(lengths), H, HV, D, D, dtype, device, mask=mask, N=len(lengths))
    do, dht = cotangents(x, len(lengths))
    bounds = boundaries(lengths, device, torch.int64)
    got = triton(x, do, dht, cu_seqlens=bounds)
    check(got, exact(x, do, dht, cu_seqlens=bounds), dtype, dg=spacing(x["g"]))


def halves(dtype, device, cut, T=100):
    """(x, do, dht) and a second draw that differs from `cut` on."""
    x, y = (inputs(1, T, 1, HEADS, 24, 40, dtype, device, seed=s) for s in (0, 1))
    y = {n: t if n == "initial_state" else torch.cat([t[:, :cut], y[n][:, cut:]], 1)
         for n, t in x.items()}  # fmt: skip
    return x, y, *cotangents(x)


cuts = pytest.mark.parametrize("cut", [1, 40, 64, 77] if GPU else [40, 64])


@cuts
@dtypes
def test_dq_depends_on_nothing_after_its_token(cut, dtype, device):
    """Not on later tokens, not on the gradients of other outputs or of the final state."""
    x, y, do, dht = halves(dtype, device, cut)
    other = torch.randn_like(do)
    other[:, cut - 1] = do[:, cut - 1]
    a, b = triton(x, do, dht)["dq"], triton(y, other, 2 * dht)["dq"]
    assert torch.equal(a[:, cut - 1], b[:, cut - 1])


@cuts
@dtypes
def test_earlier_output_gradients_do_not_reach_later_tokens(cut, dtype, device):
    """What k, v, g and beta of a token get comes from its own output and later ones."""
    x, _, do, dht = halves(dtype, device, cut)
    other = torch.cat([torch.randn_like(do)[:, :cut], do[:, cut:]], 1)
    a, b = triton(x, do, dht), triton(x, other, dht)
    names = ("dq", "dk", "dv", "dg", "dbeta")
    same_bits({n: a[n][:, cut:] for n in names}, {n: b[n][:, cut:] for n in names})


@cuts
@dtypes
def test_dv_depends_on_no_value_and_no_earlier_token(cut, dtype, device):
    """Values enter linearly. The gates stay: their sums in a chunk begin with the earlier ones."""
    x, _, do, dht = halves(dtype, device, cut)
    y = inputs(1, 100, 1, HEADS, 24, 40, dtype, device, seed=1)
    for name in ("q", "k", "beta"):
        y[name] = torch.cat([y[name][:, :cut], x[name][:, cut:]], 1)
    y["g"] = x["g"]
    a, b = triton(x, do, dht)["dv"], triton(y, do, dht)["dv"]
    assert torch.equal(a[:, cut:], b[:, cut:])
