"""dplr_recurrent and dplr_recurrent_bwd: the reference against the rule, kernels against it."""

import pytest
import stages
import torch
from dplr.dplr_checks import NAMES, exact, inputs
from gdn_checks import cotangents

from linattn_edu.reference.dplr.recurrent import dplr_recurrent, dplr_recurrent_bwd
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")
LARGE = ((100, 64, 100), (257, 128, 128), (20, 300, 40))
SIZES = ((1, 16, 12), (2, 5, 3), (5, 33, 20), (17, 20, 40), *LARGE * torch.cuda.is_available())
reverse = pytest.mark.parametrize("reverse", [False, True])


@reverse
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 9, 10, 17])
def test_reference_is_the_rule_and_its_gradient(T, reverse):
    """Where a block of sqrt(T) tokens ends with the sequence, and where it does not."""
    x = inputs(2, T, 2, 5, 6, torch.float64, seed=T, strong=T == 9)
    do, dht = cotangents(x)
    want = exact(x, do, dht, reverse=reverse)
    args, options = [x[n] for n in NAMES], {"initial_state": x["initial_state"], "reverse": reverse}
    got = (*dplr_recurrent(*args, **options), *dplr_recurrent_bwd(*args, do, dht, **options))
    names = ("o", "ht", *(f"d{n}" for n in (*NAMES, "initial_state")))
    for name, y in zip(names, got, strict=True):
        assert_close(name, y, want[name], 1e-12)


@reverse
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_match_the_reference(size, reverse, dtype, device):
    more = {"reverse": reverse}
    stages.check("dplr_recurrent dplr_recurrent_bwd", "dplr", *size, 16, dtype, device, more=more)


def test_without_a_state_at_either_end(device):
    without = ("initial_state", "dht")
    stages.check("dplr_recurrent dplr_recurrent_bwd", "dplr", 7, 16, 20, 16, torch.float32, device,
                 without=without)  # fmt: skip
