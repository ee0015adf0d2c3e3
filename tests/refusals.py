"""A table of calls that are refused, as a test with a case for each."""

import pytest
import torch
from gdn_checks import launches


def refuses(f, valid, *tables):
    """The test that f refuses each case, before any kernel runs and with its arguments as they
    were.

    valid: nothing -> the arguments of a call, by name. tables: what is wrong -> the changes to
    them, the error if it is no ValueError, its message.
    """
    cases = {name: case for table in tables for name, case in table.items()}

    @pytest.mark.parametrize("name", cases)
    def test(name):
        changes, *other, message = cases[name]
        (error,) = other or (ValueError,)
        given = valid() | changes
        kept = {n: t.detach().clone() for n, t in given.items() if is_plain(t)}
        with launches() as ran, pytest.raises(error, match=message):
            f(**given)
        assert not ran
        assert all(torch.equal(given[n], t) for n, t in kept.items())

    return test


def is_plain(t):
    """Whether t is a tensor of numbers that can be compared."""
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and not t.is_meta
