"""Stage state_passing_bwd: kernel against reference."""

import pytest
import stages
import torch
from ssd.ssd_checks import check_stage, parts

from linattn_edu.kernels.ssd.state_passing_bwd import state_passing_bwd as kernel
from linattn_edu.packing import pack
from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.ssd.state_passing import state_passing
from linattn_edu.reference.ssd.state_passing_bwd import state_passing_bwd as reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def check(kernel, reference, args, chunk_size):
    """dlast is an inner product of terms of either sign: they are its yardstick, for each entry."""
    options, (dh_out, gc, h, *_, seq_idx) = {"chunk_size": chunk_size}, args
    got_ds, dlast, got_dh0 = kernel(*args, **options)
    first = (lambda *_, **__: (got_ds, got_dh0)), (lambda *x, **y: reference(*x, **y)[::2])
    check_stage(*first, args, **options)
    ds, exact, _ = reference(dh_out.double(), gc.double(), *args[2:], **options)
    a = decays(gc.double(), seq_idx, chunk_size)[3][..., 0, 0].transpose(1, 2)
    terms = (h.double() * ds).abs().sum((-1, -2))
    assert dlast.dtype == torch.float32 and dlast.shape == exact.shape
    bound = (1e-6 * a + torch.finfo(torch.float32).tiny * (a > 0)) * terms
    assert ((dlast - exact).abs() <= bound).all()


test_kernel = stages.matches("state_passing_bwd", "ssd", check=check)


def test_reference_is_the_gradient_of_state_passing():
    """dlast is the gradient of the chunk's own log decay: gc is read at its last tokens alone."""
    r = parts(70, 5, 3, 16, "all", torch.float64, "cpu")
    leaves = [y.clone().requires_grad_() for y in (r.s, r.gc, r.h0)]
    s, gc, h0 = leaves
    given = {"seq_idx": r.seq_idx, "chunk_size": 16}
    h, final = state_passing(s, gc, h0, output_final_state=True, **given)
    ds, dgc, dh0 = torch.autograd.grad((h * r.dh_out).sum() + (final * r.dht).sum(), leaves)
    got = reference(r.dh_out, r.gc, r.h, r.dht, **given)
    ends = [15, 31, 47, 63, 69]
    natural = dgc[:, ends] / torch.log(torch.tensor(2.0, dtype=torch.float64))
    for name, y, want in zip(("ds", "dlast", "dh0"), got, (ds, natural, dh0), strict=True):
        assert_close(name, y, want, 1e-12)
    dgc[:, ends] = 0
    assert (dgc == 0).all()


def test_sequences_in_a_pack_are_those_alone(device):
    """To the bit, the sum over the programs included; one of them has no token."""
    bounds = [0, 33, 33, 34, 70]
    r = parts(70, 32, 65, 16, "none", torch.float32, device)
    lengths = torch.tensor(bounds, device=device)
    packing = pack(lengths, 16)
    shape = packing.chunks, 4, 32, 65
    dh_out, h = (torch.randn(1, *shape, device=device) for _ in range(2))
    dht = torch.randn(4, 4, 32, 65, device=device)
    gc = r.gc[:1].contiguous()
    ds, dlast, dh0 = kernel(dh_out, gc, h, dht, chunk_size=16, packing=packing)
    edges = packing.chunk_offsets.tolist()
    for n in (0, 2, 3):
        tokens, chunks = (slice(x[n], x[n + 1]) for x in (bounds, edges))
        alone = kernel(
            *(y.contiguous() for y in (dh_out[:, chunks], gc[:, tokens], h[:, chunks])),
            dht[n : n + 1],
            chunk_size=16,
        )
        packed = ds[:, chunks], dlast[:, chunks], dh0[n : n + 1]
        assert all(torch.equal(y, z) for y, z in zip(packed, alone, strict=True))
    assert torch.equal(dh0[1], dht[1])


def test_the_gradient_of_the_last_chunk_is_that_of_the_final_state(device):
    r = parts(70, 16, 16, 32, "channels", torch.float32, device)
    ds, _, _ = kernel(r.dh_out, r.gc, r.h, r.dht, chunk_size=32)
    assert torch.equal(ds[:, -1], r.dht)


def test_the_sums_over_programs_are_the_same_bits_twice(device):
    r = parts(100, 64, 65, 16, "all", torch.float32, device)
    first, again = (kernel(r.dh_out, r.gc, r.h, r.dht, r.seq_idx, chunk_size=16) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(first, again, strict=True))
