"""The fused stages with a gate for each channel, where rows are two halves of bfloat16."""

from types import SimpleNamespace

import pytest
import stages
import torch
from fused.kda_checks import parametrize
from stages.fused import IN_HALVES, ROUNDED

from linattn_edu.kernels.fused.kda_scans import kda_gates
from linattn_edu.reference.fused.kda_scans import kda_gated
from linattn_edu.testing import relative_rms

pytestmark = pytest.mark.usefixtures("poison")

# two numbers of bf16 keep 16 bits, and their product loses that of both low ones
CLOSE = {torch.float32: 2**-13, torch.bfloat16: 2**-8}

cases = parametrize(1, gate=("mixed", "shut", "open"), C=(64, 32), K=(72, 24), V=(40, 64))
families = pytest.mark.parametrize("family", ["kda_fused", "gdn2_fused"])


def near(x, want, dtype=None):
    """Whether x is as near the exact one as its numbers are, or those of dtype; of rows of both
    halves, their sum.
    """
    close = CLOSE[dtype or x.dtype]
    if x.shape[-1] == 2 * want.shape[-1]:
        x, close = sum(x.double().chunk(2, -1)), CLOSE[torch.float32]
    return x.shape == want.shape and relative_rms(x, want) < close


def read(family, gate, C, K, V, device):
    """What stages read, and the same in fp64, with what is given to halves in bf16 rounded."""
    r = stages.parts(family, 70, K, V, C, torch.float32, device, H=2, gate=gate)
    rounded = {n: x.bfloat16() for n, x in vars(r).items() if n in ROUNDED.split()}
    exact = {n: x.double() for n, x in (vars(r) | rounded).items() if torch.is_tensor(x)}
    return r, SimpleNamespace(**vars(r) | exact)


@cases
@families
def test_scans_and_what_is_left_of_a_chunk(family, gate, C, K, V, device):
    r, exact = read(family, gate, C, K, V, device)
    for name in IN_HALVES[1:]:  # of gates below
        plain, paired = (s for s in stages.STAGES if (s.name, s.family) == (name, family))
        args, options = paired.call(r)
        assert options["fine"]
        given, same = plain.call(exact)
        got, exact_ones = paired.kernel(*args, **options), plain.reference(*given, **same)
        for i, (x, want) in enumerate(zip(got, exact_ones, strict=True)):
            # one beta's is in part of v_new, which does not fit the states that are rounded here
            whole = (i, family) == (2, "kda_fused") and "intra" in name
            dtype = torch.bfloat16 if whole else None
            assert (x is None and want is None) or near(x, want, dtype), name


@cases
@families
def test_gated_rows(family, gate, C, K, V, device):
    """Of the gates that they come with, which are those of whole rows to the bit."""
    r, exact = read(family, gate, C, K, V, device)
    erase, options = (None if r.write is None else r.beta), {"chunk_size": C}
    q, k = r.q.bfloat16(), r.k.bfloat16()
    gc, *rows = kda_gates(q, k, r.g, None, None, erase, fine=True, **options)
    assert torch.equal(gc, kda_gates(q, k, r.g, None, None, erase, **options)[0])
    erase = None if erase is None else erase.double()
    want = kda_gated(exact.q, exact.k, gc.double(), erase, **options)
    assert all(map(near, rows, want))
