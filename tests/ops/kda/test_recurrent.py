"""fused_recurrent_kda: its gates, its limits, in place, bad input."""

import pytest
import torch
from recurrent_cases import kda_case
from refusals import refuses

from linattn_edu import fused_recurrent_kda
from linattn_edu.testing import assert_close

IMPLS = ("triton", "reference")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of NumPy, in the interpreter
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("raw", [-1e4, -30.0, 30.0, 1e4])
def test_gates_at_their_ends(raw, impl, device):
    """The softplus reaches no decay and a full reset; the bounded gate stops at its bound."""
    x, rest = kda_case(1, device=device, gate="softplus")
    x["g"].fill_(raw)
    x["beta"].zero_()
    start = x["initial_state"].double()
    x = {n: t for n, t in x.items() if n not in ("A_log", "dt_bias")}
    A_log = torch.zeros(2, device=device)
    for lower_bound in (None, -5):
        rest["lower_bound"] = lower_bound
        _, S = fused_recurrent_kda(**x, A_log=A_log, **rest, impl=impl)
        least = lower_bound or -raw
        want = start * torch.tensor(least if raw > 0 else 0.0).double().exp()
        # e^g is no closer than the product g log2(e) is in float32; below e^-100 it is 0
        assert_close("S", S, want, max(1e-6, min(abs(least), 100) * 2**-24))


new = torch.zeros
RAW = {"use_gate_in_kernel": True, "A_log": new(2), "dt_bias": new(32)}
# beside what test_delta_arguments has of both forms
REFUSED = {
    "bound without a gate": ({"lower_bound": -5.0}, "lower_bound is used with use_ga"),
    "bias rank": (
        RAW | {"dt_bias": new(2, 16, 1, 2)},
        r"dt_bias must have the elements of \[HV=2, K=16\], in any shape, got \(2, 16, 1, 2\)",
    ),
    "cp_context": ({"cp_context": 1}, "cp_context is not supported: .* got 1"),
    "misspelt": ({"safe_gate": True}, TypeError, "unexpected keyword argument"),
}


test_refused_before_any_kernel = refuses(fused_recurrent_kda, lambda: kda_case(3)[0], REFUSED)
