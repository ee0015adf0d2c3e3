"""Stage cp_merge: maps of pieces and their chain, kernels against references and what they mean;
what cp_merge_bwd shares with it is tested here for both.
"""

from itertools import pairwise

import pytest
import stages
import torch
from delta.stage_checks import check_stage

from linattn_edu.kernels.delta import cp_merge as kernels
from linattn_edu.kernels.delta import cp_merge_bwd as kernels_bwd
from linattn_edu.packing import pack
from linattn_edu.reference.delta import cp_merge as references
from linattn_edu.reference.delta import cp_merge_bwd as references_bwd
from linattn_edu.reference.delta.state import state
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

arguments = stages.arguments
ROOMS = kernels, references
ROOMS_BWD = kernels_bwd, references_bwd
MAPS = {  # kernel, reference, options
    "piece_map": (*(room.piece_map for room in ROOMS), {}),
    "piece_map_bwd": (*(room.piece_map_bwd for room in ROOMS_BWD), {"scale": 0.3}),
}
MERGES = {
    "merge": [room.cp_merge for room in ROOMS],
    "merge_bwd": [room.cp_merge_bwd for room in ROOMS_BWD],
}
# rms error of an fp32 sum whose factors were rounded, over that of what it started from
ROUNDED = {torch.float16: 4e-4, torch.bfloat16: 3e-3}
JOINS = {
    "join": [room.cp_join for room in ROOMS],
    "join_bwd": [room.cp_join_bwd for room in ROOMS_BWD],
}
FADED = 1e-30  # the last bits of smaller numbers are less than 2^-126, a GPU's 0


def check_map(kernel, reference, args, **options):
    """As check_stage; in fp16 and bf16 the error of M is measured against I, from which it comes.

    M fades: against itself its error would grow with what was forgotten. In fp32 what is smaller
    than FADED is compared as if it were of that size.
    """
    ext, M = kernel(*args, **options)
    ext_64, M_64 = reference(*(x if x is None else x.double() for x in args), **options)
    assert ext.dtype == M.dtype == torch.float32
    error, norm = ((x.double().square().mean().sqrt().item()) for x in (M - M_64, M_64))
    if args[0].dtype == torch.float32:
        assert_close("S_ext", ext, ext_64, 5e-6)
        assert error <= 5e-6 * max(norm, FADED)
        return
    tol = ROUNDED[args[0].dtype]
    assert_close("S_ext", ext, ext_64, tol)
    unit = torch.eye(M.shape[-1]).square().mean().sqrt().item() if M.ndim == 4 else 1
    assert error <= tol * unit


MAP = {"check": check_map}

test_map_kernel_matches_reference = stages.matches("piece_map", **MAP)
test_map_of_a_gate_for_each_channel = stages.matches("piece_map", "kda", without=["h0"], **MAP)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_correction(dtype, map, device):
    kernel, reference, options = MAPS[map]
    given = arguments(map, "gdn", 100, 33, 40, 32, dtype, device)
    if map == "piece_map":
        k, _, u, gc, h0 = given
        args = (k, None, u, gc, h0, gc + 0.5)
    else:
        q, _, _, gc, do, _, dht = given
        args = (q, None, None, gc, do, None, dht)
    check_map(kernel, reference, args, chunk_size=32, **options)


@pytest.mark.parametrize(("map", "C"), [("piece_map", 32), ("piece_map_bwd", 16)])
def test_map_of_some_of_several_sequences(map, C, device):
    bounds, rows = [0, 40, 40, 41, 100, 165], [3, 0]
    kernel, _, options = MAPS[map]
    options = options | {"chunk_size": C}
    args = [x[:1] for x in arguments(map, "gdn", 165, 20, 24, C, torch.float32, device)[:-1]]
    packing = pack(torch.tensor(bounds, device=device), C)
    got = kernel(*args, packing=packing, rows=torch.tensor(rows, device=device), **options)
    for i, n in enumerate(rows):
        alone = (x[:, bounds[n] : bounds[n + 1]].contiguous() for x in args)
        for name, x, y in zip(("ext", "M"), got, kernel(*alone, **options), strict=True):
            assert torch.equal(x[i], y[0]), name


def maps(shape, numbers, device, dtype=torch.float32):
    """S_ext and M of pieces; matrices at most as long as one."""
    B, NP, H, K, _ = shape
    torch.manual_seed(sum(shape))
    S_ext = torch.randn(shape, device=device, dtype=dtype)
    if numbers:
        return S_ext, torch.rand(B, NP, H, device=device, dtype=dtype)
    M = torch.randn(B, NP, H, K, K, device=device, dtype=dtype)
    return S_ext, M / torch.linalg.matrix_norm(M, 2, keepdim=True)


SHAPES = ((1, 1, 1, 16, 16), (2, 3, 2, 33, 20), (1, 5, 1, 128, 70), (1, 2, 1, 200, 16))


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("numbers", [False, True], ids=["matrices", "numbers"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_kernel_matches_reference(shape, numbers, merge, device):
    S_ext, M = maps(shape, numbers, device)
    end = torch.randn_like(S_ext[:, 0])
    check_stage(*MERGES[merge], (S_ext, M, end))
    check_stage(*MERGES[merge], (S_ext, M))


def test_merge_of_columns_side_by_side(device):
    S_ext, M = maps((2, 3, 2, 32, 24), False, device)
    joint = torch.cat([S_ext, M], -1)
    got = kernels.cp_merge(joint[..., :24], joint[..., 24:])
    want = kernels.cp_merge(S_ext, M)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("merge", MERGES)
def test_merge_of_several_sequences(merge, device):
    """One of them has no piece: what comes in goes through."""
    kernel, _ = MERGES[merge]
    S_ext, M = maps((1, 6, 2, 20, 16), False, device)
    offsets = [0, 2, 2, 6]
    ends = torch.randn(3, *S_ext.shape[2:], device=device)
    at_pieces, through = kernel(S_ext, M, ends, offsets=torch.tensor(offsets, device=device))
    for n in (0, 2):
        own = slice(offsets[n], offsets[n + 1])
        want = kernel(S_ext[:, own], M[:, own], ends[n : n + 1])
        assert torch.equal(at_pieces[:, own], want[0])
        assert torch.equal(through[n], want[1][0])
    assert torch.equal(through[1], ends[1])


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_join_kernel_matches_reference(shape, join, device):
    S_ext, M = maps(shape, True, device)
    check_stage(*JOINS[join], (S_ext, M, torch.randn_like(S_ext[:, 0])))
    check_stage(*JOINS[join], (S_ext, M))


@pytest.mark.parametrize("join", JOINS)
def test_join_of_some_of_several_sequences(join, device):
    """Into rows that are further apart, as in a message; of a sequence without pieces too."""
    kernel, _ = JOINS[join]
    S_ext, M = maps((1, 6, 2, 20, 16), True, device)
    offsets, rows = [0, 2, 2, 6], [2, 1]
    ends = torch.randn(2, *S_ext.shape[2:], device=device)
    message = torch.full((2, 2, 20, 20), float("nan"), device=device)
    places = {n: torch.tensor(x, device=device) for n, x in (("offsets", offsets), ("rows", rows))}
    S, number = kernel(S_ext, M, ends, out=(message[..., :16], message[..., 0, 16]), **places)
    for i, n in enumerate(rows):
        own = slice(offsets[n], offsets[n + 1])
        want = kernel(S_ext[:, own], M[:, own], ends[i : i + 1])
        assert torch.equal(S[i], want[0][0]) and torch.equal(number[i], want[1][0])
    assert torch.equal(S[1], ends[1]) and (number[1] == 1).all()
    message[..., :16], message[..., 0, 16] = 0, 0
    assert message.isnan().sum() == 2 * 2 * (20 * 4 - 1)  # nothing else is written


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
def test_maps_are_the_sequence(channels):
    """In float64: the states at the cuts, from the maps of pieces alone."""
    family = "kda" if channels else "gdn"
    *args, h0 = arguments("piece_map", family, 150, 12, 10, 16, torch.float64, "cpu")
    h, _, last = state(*args, h0, chunk_size=16, output_final_state=True)
    cuts = (0, 32, 48, 112, 150)
    pieces = [[x[:, a:b] for x in args] for a, b in pairwise(cuts)]
    found = [references.piece_map(*piece, chunk_size=16) for piece in pieces]
    S_in, S_out = references.cp_merge(*(torch.stack(x, 1) for x in zip(*found, strict=True)), h0)
    assert_close("S_in", S_in, h[:, [cut // 16 for cut in cuts[:-1]]], 1e-13)
    assert_close("S_out", S_out, last, 1e-13)
    known, _ = references.piece_map(*pieces[0], h0, chunk_size=16, transition=False)
    assert_close("the first piece's state", known, S_in[:, 1], 1e-13)
