"""Every kernel in Gluon, interpreted, against its reference; and what the interpreter finds."""

import pytest
import torch
from kernels.gluon_cases import CASES

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_reference(name, seed):
    CASES[name].check(torch.device("cpu"), seed=seed)
