"""What tokens read of the states: kernel against reference, two heads a program."""

import pytest
import stages


@pytest.fixture
def many(force):
    """Two heads a program where heads are summed."""
    force(SSD_MANY=2)


test_kernel = pytest.mark.usefixtures("many")(stages.matches("ssd_bwd_dc", "ssd_fused"))
