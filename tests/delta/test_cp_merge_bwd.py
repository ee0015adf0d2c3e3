"""Stage cp_merge_bwd: adjoint maps of pieces, kernels against references, and what they mean."""

from functools import partial
from itertools import pairwise

import pytest
import stages
import torch
from delta.stage_checks import check_stage
from delta.test_cp_merge import SHAPES, check_map, maps
from fused.kda_checks import once

from linattn_edu.kernels.delta import cp_merge_bwd as kernels
from linattn_edu.packing import pack
from linattn_edu.reference.delta import cp_merge_bwd as references
from linattn_edu.reference.delta.cp_merge import piece_map
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")
OPTIONS = {"scale": 0.3, "chunk_size": 16}


arguments = partial(stages.arguments, "piece_map_bwd")
MAP = {"check": check_map}

test_map_kernel_matches_reference = stages.matches("piece_map_bwd", **MAP)
test_a_gate_for_each_channel = stages.matches("piece_map_bwd", "kda", once, without=["dht"], **MAP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_correction(dtype, device):
    q, _, _, gc, do, _, dht = arguments("gdn", 100, 33, 40, 32, dtype, device)
    args = (q, None, None, gc, do, None, dht)
    check_map(kernels.piece_map_bwd, references.piece_map_bwd, args, scale=0.3, chunk_size=32)


def test_some_of_several_sequences(device):
    bounds, rows = [0, 40, 40, 41, 100, 165], [3, 0]
    args = [x[:1] for x in arguments("gdn", 165, 20, 24, 16, torch.float32, device)[:-1]]
    packing = pack(torch.tensor(bounds, device=device), 16)
    there = torch.tensor(rows, device=device)
    got = kernels.piece_map_bwd(*args, packing=packing, rows=there, **OPTIONS)
    for i, n in enumerate(rows):
        alone = (x[:, bounds[n] : bounds[n + 1]].contiguous() for x in args)
        want = kernels.piece_map_bwd(*alone, **OPTIONS)
        for name, x, y in zip(("dS_ext", "dM"), got, want, strict=True):
            assert torch.equal(x[i], y[0]), name


@pytest.mark.parametrize("numbers", [False, True], ids=["matrices", "numbers"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_kernel_matches_reference(shape, numbers, device):
    dS_ext, dM = maps(shape, numbers, device)
    dht = torch.randn_like(dS_ext[:, 0])
    check_stage(kernels.cp_merge_bwd, references.cp_merge_bwd, (dS_ext, dM, dht))
    check_stage(kernels.cp_merge_bwd, references.cp_merge_bwd, (dS_ext, dM))


def test_merge_of_several_sequences(device):
    dS_ext, dM = maps((1, 6, 2, 20, 16), False, device)
    offsets = [0, 2, 2, 6]
    dht = torch.randn(3, *dS_ext.shape[2:], device=device)
    there = torch.tensor(offsets, device=device)
    dS_out, dS_in = kernels.cp_merge_bwd(dS_ext, dM, dht, offsets=there)
    for n in (0, 2):
        own = slice(offsets[n], offsets[n + 1])
        want = kernels.cp_merge_bwd(dS_ext[:, own], dM[:, own], dht[n : n + 1])
        assert torch.equal(dS_out[:, own], want[0])
        assert torch.equal(dS_in[n], want[1][0])
    assert torch.equal(dS_in[1], dht[1])


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
def test_pieces_are_the_sequence(channels):
    """In float64: the gradients at the cuts, from the maps of pieces alone; dM is M^T."""
    r = stages.parts("kda" if channels else "gdn", 150, 12, 10, 16, torch.float64, "cpu")
    args = [r.qg, r.kg, r.w, r.gc, r.do, r.P] if channels else [r.q, r.k, r.w, r.gc, r.do, r.dv_out]
    dht = r.dht

    def run(f, q, k, w, gc, do, last, **ends):
        given = {"dv_new": None, "P": last} if channels else {"dv_new": last}
        return f(q, k, w, gc, do, **given, **ends, **OPTIONS)

    dh, _, first = run(state_bwd, *args, dht=dht)
    cuts = (0, 32, 48, 112, 150)
    pieces = [[x[:, a:b] for x in args] for a, b in pairwise(cuts)]
    found = [run(references.piece_map_bwd, *piece) for piece in pieces]
    dS_ext, dM = (torch.stack(x, 1) for x in zip(*found, strict=True))
    dS_out, dS_in = references.cp_merge_bwd(dS_ext, dM, dht)
    assert_close("dS_out", dS_out, dh[:, [-(-cut // 16) - 1 for cut in cuts[1:]]], 1e-13)
    assert_close("dS_in", dS_in, first, 1e-13)
    for p, (_, k, w, gc, do, *_) in enumerate(pieces):
        _, M = piece_map(k, w, do, gc, chunk_size=16)
        assert_close("dM", dM[:, p], M.mT, 1e-13)
