"""The fused backward pass of Mamba-2: kernel against reference, chunks of one tile and of two."""

import pytest
import stages


@pytest.fixture
def many(force):
    """Two heads a program where heads are summed."""
    force(SSD_MANY=2)


test_kernels = pytest.mark.usefixtures("many")(stages.matches("ssd_bwd_bc ssd_bwd_dx", "ssd_fused"))
