"""The fused forward pass of Mamba-2: kernel against reference, chunks of one tile and of two."""

import pytest
import stages
import torch
from fused.parts import AXES
from grids import name, pairs
from ssd.ssd_checks import check_stage, parts

from linattn_edu.kernels.delta.state import state
from linattn_edu.kernels.delta.state_bwd import state_bwd
from linattn_edu.packing import pack
from linattn_edu.reference.delta.state import state as state_reference
from linattn_edu.reference.delta.state_bwd import state_bwd as state_bwd_reference

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("lengths", [(5,), (4, 0, 9, 0), (0, 0, 8, 3), (0,), (12, 4, 1)], ids=str)
def test_pieces_of_packed_sequences(lengths):
    """Every piece of every sequence in order; what is left over begins at a sequence's end."""
    cu_seqlens, size = torch.tensor([0, *lengths]).cumsum(0), 4
    table = pack(cu_seqlens, 2).pieces(size, sum(lengths)).tolist()
    pieces = [[n, i] for n, length in enumerate(lengths) for i in range(-(-length // size))]
    assert table[: len(pieces)] == pieces
    assert all(i * size >= lengths[n] for n, i in table[len(pieces) :])


@pytest.fixture(params=[4096, 128], ids="PIECE={}".format)
def piece(request, force):
    """Sequences of one piece, or of several."""
    force(SSD_PIECE=request.param)


ENDS = {"output_final_state": True}
test_scores = stages.matches("chunk_scores", "ssd_fused")
test_kernels = pytest.mark.usefixtures("piece")(stages.matches("ssd_fwd", "ssd_fused", more=ENDS))


@pytest.mark.parametrize(tuple(AXES), pairs(**AXES | {"P": (33, 64, 128)}), ids=name)
def test_the_scans_without_a_correction(T, N, P, C, heads, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device, *heads)
    args = (r.B, None, r.x, r.gc, r.h0, r.gs, r.seq_idx)
    check_stage(state, state_reference, args, chunk_size=C, output_final_state=True)
    h = r.h.to(dtype)
    args = (r.C, None, None, r.gc, r.dy, None, r.dht, r.seq_idx)
    check_stage(state_bwd, state_bwd_reference, args, scale=1.0, chunk_size=C)
    *_, dlast = state_bwd(*args, h, scale=1.0, chunk_size=C)
    wide = [y.double() if y is not None and y.is_floating_point() else y for y in (*args, h)]
    ds, *_, exact = state_bwd_reference(*wide, scale=1.0, chunk_size=C)
    # an inner product that may cancel: beside the largest that it could be
    largest = (h.double().square().sum((-1, -2)) * ds.square().sum((-1, -2))).sqrt()
    assert ((dlast.double() - exact).abs() <= torch.finfo(dtype).eps / 8 * largest + 1e-30).all()
