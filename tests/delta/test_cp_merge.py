"""Stage cp_merge: maps of pieces and their chain, kernel against reference, what they mean."""

from functools import partial
from itertools import pairwise

import pytest
import stages
import torch
from delta.stage_checks import check_stage

from linattn_edu.kernels.delta import cp_merge as kernels
from linattn_edu.packing import pack
from linattn_edu.reference.delta import cp_merge as references
from linattn_edu.reference.delta.state import state
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

arguments = partial(stages.arguments, "piece_map")
# rms error of an fp32 sum whose factors were rounded, over that of what it started from
ROUNDED = {torch.float16: 4e-4, torch.bfloat16: 3e-3}
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
test_a_gate_for_each_channel = stages.matches("piece_map", "kda", without=["h0"], **MAP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_correction(dtype, device):
    k, _, u, gc, h0 = arguments("gdn", 100, 33, 40, 32, dtype, device)
    args = (k, None, u, gc, h0, gc + 0.5)
    check_map(kernels.piece_map, references.piece_map, args, chunk_size=32)


def test_some_of_several_sequences(device):
    bounds, rows = [0, 40, 40, 41, 100, 165], [3, 0]
    k, w, u, gc, _ = (x[:1] for x in arguments("gdn", 165, 20, 24, 32, torch.float32, device))
    packing = pack(torch.tensor(bounds, device=device), 32)
    rows_there = torch.tensor(rows, device=device)
    got = kernels.piece_map(k, w, u, gc, chunk_size=32, packing=packing, rows=rows_there)
    for i, n in enumerate(rows):
        alone = (x[:, bounds[n] : bounds[n + 1]].contiguous() for x in (k, w, u, gc))
        want = kernels.piece_map(*alone, chunk_size=32)
        for name, x, y in zip(("S_ext", "M"), got, want, strict=True):
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


@pytest.mark.parametrize("numbers", [False, True], ids=["matrices", "numbers"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_kernel_matches_reference(shape, numbers, device):
    S_ext, M = maps(shape, numbers, device)
    h0 = torch.randn_like(S_ext[:, 0])
    check_stage(kernels.cp_merge, references.cp_merge, (S_ext, M, h0))
    check_stage(kernels.cp_merge, references.cp_merge, (S_ext, M))


def test_merge_of_columns_side_by_side(device):
    S_ext, M = maps((2, 3, 2, 32, 24), False, device)
    joint = torch.cat([S_ext, M], -1)
    got = kernels.cp_merge(joint[..., :24], joint[..., 24:])
    want = kernels.cp_merge(S_ext, M)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_merge_of_several_sequences(device):
    S_ext, M = maps((1, 6, 2, 20, 16), False, device)
    offsets = [0, 2, 2, 6]
    h0 = torch.randn(3, *S_ext.shape[2:], device=device)
    S_in, S_out = kernels.cp_merge(S_ext, M, h0, offsets=torch.tensor(offsets, device=device))
    for n in (0, 2):
        own = slice(offsets[n], offsets[n + 1])
        want = kernels.cp_merge(S_ext[:, own], M[:, own], h0[n : n + 1])
        assert torch.equal(S_in[:, own], want[0])
        assert torch.equal(S_out[n], want[1][0])
    assert torch.equal(S_out[1], h0[1])


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
def test_pieces_are_the_sequence(channels):
    """In float64: the states at the cuts, from the maps of pieces alone."""
    *args, h0 = arguments("kda" if channels else "gdn", 150, 12, 10, 16, torch.float64, "cpu")
    h, _, last = state(*args, h0, chunk_size=16, output_final_state=True)
    cuts = (0, 32, 48, 112, 150)
    pieces = [[x[:, a:b] for x in args] for a, b in pairwise(cuts)]
    found = [references.piece_map(*piece, chunk_size=16) for piece in pieces]
    S_in, S_out = references.cp_merge(*(torch.stack(x, 1) for x in zip(*found, strict=True)), h0)
    assert_close("S_in", S_in, h[:, [cut // 16 for cut in cuts[:-1]]], 1e-13)
    assert_close("S_out", S_out, last, 1e-13)
    known, _ = references.piece_map(*pieces[0], h0, chunk_size=16, transition=False)
    assert_close("the first piece's state", known, S_in[:, 1], 1e-13)
