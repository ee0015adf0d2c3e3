"""Stage cp_merge_bwd: maps of pieces back in time, and their chain; see test_cp_merge too."""

from itertools import pairwise

import pytest
import stages
import torch
from delta.test_cp_merge import MAP
from fused.kda_checks import once

from linattn_edu.reference.delta import cp_merge as references
from linattn_edu.reference.delta import cp_merge_bwd as references_bwd
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

test_map_bwd_kernel_matches_reference = stages.matches("piece_map_bwd", **MAP)
test_map_bwd_of_a_gate_for_each_channel = stages.matches(
    "piece_map_bwd", "kda", once, without=["dht"], **MAP
)


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
def test_maps_bwd_are_the_sequence(channels):
    """In float64: the gradients at the cuts, from the maps of pieces alone; dM is M^T."""
    r = stages.parts("kda" if channels else "gdn", 150, 12, 10, 16, torch.float64, "cpu")
    args = [r.qg, r.kg, r.w, r.gc, r.do, r.P] if channels else [r.q, r.k, r.w, r.gc, r.do, r.dv_out]
    dht = r.dht

    def run(f, q, k, w, gc, do, last, **ends):
        given = {"dv_new": None, "P": last} if channels else {"dv_new": last}
        return f(q, k, w, gc, do, **given, **ends, scale=0.3, chunk_size=16)

    dh, _, first = run(state_bwd, *args, dht=dht)
    cuts = (0, 32, 48, 112, 150)
    pieces = [[x[:, a:b] for x in args] for a, b in pairwise(cuts)]
    found = [run(references_bwd.piece_map_bwd, *piece) for piece in pieces]
    dS_ext, dM = (torch.stack(x, 1) for x in zip(*found, strict=True))
    dS_out, dS_in = references_bwd.cp_merge_bwd(dS_ext, dM, dht)
    assert_close("dS_out", dS_out, dh[:, [-(-cut // 16) - 1 for cut in cuts[1:]]], 1e-13)
    assert_close("dS_in", dS_in, first, 1e-13)
    for p, (_, k, w, gc, do, *_) in enumerate(pieces):
        _, M = references.piece_map(k, w, do, gc, chunk_size=16)
        assert_close("dM", dM[:, p], M.mT, 1e-13)
