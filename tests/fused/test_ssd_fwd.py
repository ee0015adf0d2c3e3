"""The fused forward pass of Mamba-2: kernel against reference, chunks of one tile and of two."""

import math
from functools import partial
from itertools import accumulate, pairwise

import pytest
import stages
import torch
from fused.parts import AXES
from gdn_checks import launches, without_gluon
from grids import name, usual
from ssd.ssd_checks import check_stage, parts

from linattn_edu.kernels.delta.cp_merge import cp_join
from linattn_edu.kernels.delta.state import state
from linattn_edu.kernels.delta.state_bwd import state_bwd
from linattn_edu.kernels.fused.ssd_bwd import ssd_ends_bwd
from linattn_edu.kernels.fused.ssd_fwd import ssd_ends, ssd_fwd
from linattn_edu.kernels.gluon.kernels import ssd_fwd as ssd_fwd_gluon
from linattn_edu.kernels.routes import forced
from linattn_edu.kernels.ssd.chunk_cumsum import chunk_cumsum_log
from linattn_edu.packing import pack
from linattn_edu.reference.delta.cp_merge import piece_map as piece_map_reference
from linattn_edu.reference.delta.state import state as state_reference
from linattn_edu.reference.delta.state_bwd import state_bwd as state_bwd_reference
from linattn_edu.reference.fused.ssd_fwd import FORGOTTEN
from linattn_edu.reference.fused.ssd_fwd import ssd_fwd as ssd_fwd_reference

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("most", [None, 1, 2], ids="most={}".format)
@pytest.mark.parametrize("lengths", [(5,), (4, 0, 9, 0), (0, 0, 8, 3), (0,), (12, 4, 1)], ids=str)
def test_pieces_of_packed_sequences(lengths, most):
    """Every piece of every sequence in order; what is left over begins at a sequence's end.

    Those of 5 tokens and more come in 1 piece or in 2, whatever is beside them.
    """
    packing, size = pack(torch.tensor([0, *lengths]).cumsum(0), 2), 4 if most is None else 2
    table = packing.pieces(size, sum(lengths), most, 4).tolist()
    sizes = [
        size if most is None else size * -(-length // (most * size)) if length > 4 else 4
        for length in lengths
    ]
    counts = [max(1, -(-length // s)) for length, s in zip(lengths, sizes, strict=True)]
    pieces = [[n, i, sizes[n]] for n, count in enumerate(counts) for i in range(count)]
    assert table[: len(pieces)] == pieces
    assert all(i * s >= lengths[n] for n, i, s in table[len(pieces) :])
    if most is None:
        assert packing.piece_offsets(size).tolist() == [0, *accumulate(counts)]


@pytest.fixture(params=[4096, 128], ids="PIECE={}".format)
def piece(request, force):
    """Sequences of one piece, or of several."""
    force(SSD_PIECE=request.param)


ENDS = {"output_final_state": True}
test_scores = stages.matches("chunk_scores", "ssd_fused")
test_kernels = pytest.mark.usefixtures("piece")(stages.matches("ssd_fwd", "ssd_fused", more=ENDS))


test_ends = stages.matches("ssd_ends", "ssd_fused")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "C", "D"), [((6, 1), 128, "all"), ((8, 2), 64, "channels")])
def test_gluon(heads, C, D, dtype, piece, device, force):
    """The bits of plain Triton, which packed sequences have; twice: tiles are copied ahead."""
    if why := without_gluon(device):
        pytest.skip(why)
    r = stages.parts("ssd_fused", 2048, 128, 64, C, heads, D, dtype, device)
    args = r.C, r.B, r.scores, r.x, r.gs, r.gc, r.h0, r.D
    with forced(ssd_fwd="triton"):
        plain = ssd_fwd(*args, **ENDS)
    force(ssd_fwd="gluon")
    with launches() as ran:
        got, again = (ssd_fwd(*args, **ENDS) for _ in range(2))
    assert ran.count(ssd_fwd_gluon.ssd_fwd_gluon_kernel) == 2
    for x, twice, y in zip(got, again, plain, strict=True):
        assert torch.equal(x, twice) and torch.equal(x, y)


@pytest.mark.parametrize("T", [5, 128, 300, 256])
def test_over_ranks_the_ends_of_pieces_serve_twice(T, device, force):
    """They are the map of all, and bring each piece the state that enters it."""
    force(SSD_PIECE=128)
    r = stages.parts("ssd_fused", T, 33, 33, 64, (4, 2), "channels", torch.bfloat16, device)
    *maps, offsets = ssd_ends(r.B, r.x, r.gs, r.gc, chunk_size=64)
    assert offsets is None and maps[0].shape[1] == -(-T // 128)
    kernel = partial(ssd_fwd, maps=maps)
    args = (r.C, r.B, r.scores, r.x, r.gs, r.gc, r.h0, r.D)
    check_stage(kernel, ssd_fwd_reference, args, output_final_state=True)

    def whole(*args, **options):
        S_ext, M = piece_map_reference(*args, **options)
        return S_ext, M.where(M > FORGOTTEN, 0.0)

    args = (r.B, None, r.x, r.gc, r.h0, r.gs)
    check_stage(lambda *_, **__: cp_join(*maps, r.h0), whole, args, chunk_size=64)


def test_what_is_forgotten_is_not_read(device, force):
    """A piece begins with what the pieces before leave of a state, as far back as fp32 holds it."""
    force(SSD_PIECE=128)
    r = stages.parts("ssd_fused", 512, 16, 16, 64, (2, 1), "channels", torch.bfloat16, device)
    gc = r.gc - 40.0  # a chunk of 64 tokens forgets
    far = r.x.clone()
    far[:, :64] = math.nan
    for x in (r.x, far):
        S_ext, M, _ = ssd_ends(r.B, x, r.gs - 40.0, gc, chunk_size=64)
        assert S_ext.isfinite().all() and M.eq(0).all()
        out, last = ssd_fwd(r.C, r.B, r.scores, x, r.gs - 40.0, gc, output_final_state=True)
        assert out[:, 128:].isfinite().all() and last.isfinite().all()


@pytest.mark.parametrize("rows", [None, [0, 3], [4], []], ids=str)
@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
def test_ends_of_packed_sequences(back, rows, device, force):
    """To the bit those of each alone; at the edge of a sequence only where that is wanted."""
    force(SSD_PIECE=128)
    lengths = (300, 0, 40, 256, 65)
    r = stages.parts("ssd_fused", 661, 40, 33, 128, (4, 2), "none", torch.bfloat16, device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    packing, f = pack(bounds, 128), ssd_ends_bwd if back else ssd_ends
    gs, gc = chunk_cumsum_log(r.dt[:1], r.A, softplus=True, chunk_size=128, packing=packing)
    given = (r.C[:1], gc, r.dy[:1]) if back else (r.B[:1], r.x[:1], gs, gc)
    if rows is not None:
        rows = torch.tensor(rows, device=device, dtype=torch.int64)
    ends, kept, offsets = f(*given, chunk_size=128, packing=packing, rows=rows)
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        first, after = offsets[n : n + 2].tolist()
        assert after - first == max(1, -(-(b - a) // 128))
        if a == b:
            continue
        want = f(*(t[:, a:b] for t in given), chunk_size=128, piece=128)
        own = slice(first, after)
        if rows is not None and n not in rows:
            own = slice(first + 1, after) if back else slice(first, after - 1)
        of = slice(own.start - first, own.stop - first)
        assert torch.equal(ends[0, own], want[0][0, of]), n
        assert torch.equal(kept[0, own], want[1][0, of]), n


@pytest.mark.parametrize(tuple(AXES), usual(**AXES | {"P": (33, 64, 128)}), ids=name)
def test_the_scans_without_a_correction(T, N, P, C, heads, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device, *heads)
    args = (r.B, None, r.x, r.gc, r.h0, r.gs, r.seq_idx)
    check_stage(state, state_reference, args, chunk_size=C, output_final_state=True)
    args = (r.C, None, None, r.gc, r.dy, None, r.dht, r.seq_idx)
    check_stage(state_bwd, state_bwd_reference, args, scale=1.0, chunk_size=C)
