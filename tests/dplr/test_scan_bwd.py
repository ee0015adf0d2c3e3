"""Stages dplr_scan_bwd and dplr_map_bwd: kernels against the reference, and what the map means."""

from functools import partial

import stages
import torch
from delta.stage_checks import check_rounded

from linattn_edu.reference.dplr.scan import dplr_map
from linattn_edu.reference.dplr.scan_bwd import dplr_map_bwd
from linattn_edu.testing import assert_close

test_kernels_match_the_reference = stages.matches("dplr_scan_bwd", "dplr")
test_maps_match_the_reference = stages.matches(
    "dplr_map_bwd", "dplr", check=partial(check_rounded, factor=1.5)
)


def test_the_map_takes_a_gradient_through():
    """In float64: dM is M transposed, and a known gradient comes out as the scan has it."""
    sizes = "dplr", 70, 12, 10, 16, torch.float64, "cpu"
    *args, dht = stages.arguments("dplr_map_bwd", *sizes)
    options = stages.find("dplr_map_bwd", "dplr").call(stages.parts(*sizes))[1]
    S_ext, dM = dplr_map_bwd(*args, **options)
    _, M = dplr_map(*stages.arguments("dplr_map", *sizes))
    assert_close("dM", dM, M.mT, 1e-13)
    scan = stages.find("dplr_scan_bwd", "dplr")
    dh0 = scan.reference(*args, dht, **options)[-1]
    assert_close("dh0", S_ext + dM @ dht, dh0, 1e-13)
    known, _ = dplr_map_bwd(*args, dht, **options, transition=False)
    assert_close("known", known, dh0, 1e-13)
