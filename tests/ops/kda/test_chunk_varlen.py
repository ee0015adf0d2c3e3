"""Packed sequences of chunk_kda: the same bits as each by itself, forward and backward."""

from itertools import pairwise

import pytest
import torch
from gdn_checks import DTYPES, boundaries, cotangents, exact
from kda_checks import check, inputs, spacing, triton
from ops.contract import kda

from linattn_edu import chunk_kda

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
IMPLS = ("reference", "triton")
SHORT = (15, 0, 20)
# the rows of fla's test_chunk_varlen and others with shut gates: H, HV, D, share of open and of
# shut gates, boundaries
ROWS = (
    (4, 4, 60, 0, 0.1, (0, 15)),
    (4, 4, 64, 0, 0.9, (0, 256, 500, 1000)),
    (4, 4, 128, 0.5, 0, (0, 256, 500, 1000)),
    (4, 4, 100, 0, 0, (0, 15, 100, 300, 1200, 2000)),
    (4, 4, 256, 0, 0.5, (0, 100, 300, 1200, 3000, 4096)),
    (2, 8, 64, 0, 0.1, (0, 256, 500, 1000)),
)
impls = pytest.mark.parametrize("impl", IMPLS)
C16 = {"chunk_size": 16}


def packed(lengths, dtype, device, HV=1, **kinds):
    """(arguments, do, dht) of sequences of these lengths, with a state each."""
    N = len(lengths)
    x = inputs(1, sum(lengths), 1, HV, 12, 8, dtype, device, N=N, **kinds)
    return x, *cotangents(x, N)


@impls
@pytest.mark.parametrize("v_first", [False, True])
def test_states_of_the_chunks_of_all_sequences(v_first, impl, device):
    """Those of the sequences one after the other; without a token there is no chunk."""
    x, _, _ = packed(SHORT, torch.float32, device)
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    options = {"return_intermediate_states": True, "impl": impl, "state_v_first": v_first, **C16}
    o, _, h = chunk_kda(**x, cu_seqlens=boundaries(SHORT, device), **options)
    assert h.shape == (1, 3, 1, *((8, 12) if v_first else (12, 8)))
    parts = [
        kda.part(x, n, slice(a, b)) for n, (a, b) in enumerate(pairwise((0, 15, 15, 35))) if b > a
    ]
    alone = [chunk_kda(**one, **options) for one in parts]
    assert torch.equal(h, torch.cat([one[2] for one in alone], 1))
    assert torch.equal(o, torch.cat([one[0] for one in alone], 1))


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        (row, dtype)
        for n, row in enumerate(ROWS)
        for dtype in (DTYPES if GPU else (DTYPES[n % len(DTYPES)],))
    ],
    ids=str,
)
def test_fla_s_rows(row, dtype, device):
    H, HV, D, mask, shut, bounds = row
    lengths = [b - a for a, b in pairwise(bounds)]
    if not GPU:
        H, HV, D = 1, min(2, HV // H), D // 4 - 1
        lengths = [min(T, 5 + T % 13) for T in lengths[:2]]
    kinds = {"mask": mask, "shut": shut, "N": len(lengths)}
    x = inputs(1, sum(lengths), H, HV, D, D, dtype, device, **kinds)
    do, dht = cotangents(x, len(lengths))
    bounds = boundaries(lengths, device, torch.int64)
    got = triton(x, do, dht, cu_seqlens=bounds)
    # shut gates cost the digits of the sums they enter: see test_kda_backward
    want, digits = exact(x, do, dht, cu_seqlens=bounds), spacing(x["g"])
    check(got, want, dtype, digits if shut else 0, dg=digits)
