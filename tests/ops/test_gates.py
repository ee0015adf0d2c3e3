"""The raw gate of a layer at its limits, in every form: both passes stay finite, and right."""

import gdn_checks
import kda_checks
import pytest
import torch
from gdn_checks import cotangents, exact
from grids import parametrize

from linattn_edu import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)

IMPLS = ("reference", "triton")
FORMS = {
    "chunk_gdn": (chunk_gated_delta_rule, gdn_checks, None),
    "recurrent_gdn": (fused_recurrent_gated_delta_rule, gdn_checks, None),
    "chunk_kda": (chunk_kda, kda_checks, None),
    "chunk_kda, bounded": (chunk_kda, kda_checks, -5.0),
    "recurrent_kda": (fused_recurrent_kda, kda_checks, None),
    "recurrent_kda, bounded": (fused_recurrent_kda, kda_checks, -5.0),
}
# A_log of a head: exp(A_log) is no number of float32, or the limit itself
LIMITS = {"no float32": 90.0, "infinite": torch.inf, "zero": -torch.inf}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of NumPy
@parametrize(name=FORMS, impl=IMPLS, limit=LIMITS)
def test_rates_at_their_limits(name, impl, limit, device):
    """As with a rate so large, or so small, that float64 has the limit too."""
    f, checks, bound = FORMS[name]
    x = checks.inputs(1, 9, 1, 2, 6, 8, torch.float32, device, raw_gate=True)
    x["A_log"] = torch.tensor([LIMITS[limit], 0.3], device=device)
    do, dht = cotangents(x)
    flags = {"use_gate_in_kernel": True} | ({"lower_bound": bound} if bound else {})
    got = checks.run(x, do, dht, f=f, output_final_state=True, impl=impl, **flags)
    x["A_log"][0] = max(-300.0, min(300.0, LIMITS[limit]))
    want = exact(x, do, dht, **flags)
    assert all(y.isfinite().all() for y in want.values())
    checks.check(got, want, torch.float32)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@parametrize(name=FORMS, impl=IMPLS, raw=(-torch.inf, torch.inf))
def test_raw_gates_at_their_limits(name, impl, raw, device):
    """Some tokens are shut for good, or open: as far as float64 is concerned, too."""
    f, checks, bound = FORMS[name]
    x = checks.inputs(1, 9, 1, 2, 6, 8, torch.float32, device, raw_gate=True)
    do, dht = cotangents(x)
    flags = {"use_gate_in_kernel": True} | ({"lower_bound": bound} if bound else {})
    x["g"][:, 3] = raw
    got = checks.run(x, do, dht, f=f, output_final_state=True, impl=impl, **flags)
    x["g"][:, 3] = -1e4 if raw < 0 else 1e4
    want = exact(x, do, dht, **flags)
    assert not got["dg"][:, 3].any()
    checks.check(got, want, torch.float32)
