"""Stages dplr_scan, dplr_states and dplr_map: kernels against the reference, and what maps mean."""

from functools import partial
from itertools import pairwise

import stages
import torch
from delta.stage_checks import check_rounded

from linattn_edu.kernels.dplr.scan import dplr_map as kernel
from linattn_edu.packing import pack
from linattn_edu.reference.delta.cp_merge import cp_merge
from linattn_edu.reference.dplr.scan import dplr_map
from linattn_edu.testing import assert_close

test_kernels_match_the_reference = stages.matches("dplr_scan dplr_states", "dplr")
test_maps_match_the_reference = stages.matches(
    "dplr_map", "dplr", check=partial(check_rounded, factor=1.5)
)


def test_maps_are_the_sequence():
    """In float64: the states at the cuts, from the maps of pieces alone."""
    sizes = "dplr", 150, 12, 10, 16, torch.float64, "cpu"
    h, _ = stages.find("dplr_states", "dplr").reference(*stages.arguments("dplr_states", *sizes))
    *args, h0 = stages.arguments("dplr_map", *sizes)
    cuts = (0, 32, 48, 112, 150)
    pieces = [[x[:, a:b] for x in args] for a, b in pairwise(cuts)]
    found = [dplr_map(*piece) for piece in pieces]
    S_in, S_out = cp_merge(*(torch.stack(x, 1) for x in zip(*found, strict=True)), h0)
    assert_close("S_in", S_in, h[:, [cut // 16 for cut in cuts[:-1]]], 1e-13)
    assert_close("S_out", S_out, dplr_map(*args, h0, transition=False)[0], 1e-13)


def test_map_of_some_of_several_sequences(device):
    """Into rows of a message; without a transition its place is zero."""
    bounds, rows, V = [0, 40, 40, 41, 100], [3, 0], 24
    *args, _ = stages.arguments("dplr_map", "dplr", 100, 20, V, 16, torch.float32, device)
    args = [x[:1] for x in args]
    packing = pack(torch.tensor(bounds, device=device), 16)
    for transition in (True, False):
        message = torch.full((2, 2, 20, V + 20), float("nan"), device=device)
        which = {"rows": torch.tensor(rows, device=device), "out": message}
        kernel(*args, packing=packing, transition=transition, **which)
        for i, n in enumerate(rows):
            alone = (x[:, bounds[n] : bounds[n + 1]].contiguous() for x in args)
            S_ext, M = kernel(*alone, transition=transition)
            M = torch.zeros_like(message[0, :, :, V:]) if M is None else M[0]
            assert torch.equal(message[i], torch.cat([S_ext[0], M], -1))
