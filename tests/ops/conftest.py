"""What tests of the operators ask for by name."""

import pytest
from gdn_checks import by_value


@pytest.fixture
def numbers_by_value(monkeypatch):
    """PyTorch's sigmoid and softplus of a number, wherever in a tensor it stands."""
    by_value(monkeypatch)
