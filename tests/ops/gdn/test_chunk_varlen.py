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
