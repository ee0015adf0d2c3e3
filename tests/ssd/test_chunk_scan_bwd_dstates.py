"""Stage chunk_scan_bwd_dstates: kernel against reference."""

import pytest
import stages
import torch
from ssd.ssd_checks import parts

from linattn_edu.kernels.ssd.chunk_scan_bwd_dstates import chunk_scan_bwd_dstates as kernel
from linattn_edu.packing import pack

pytestmark = pytest.mark.usefixtures("poison")


test_kernel = stages.matches("chunk_scan_bwd_dstates", "ssd")


def test_sequences_in_a_pack_are_those_alone(device):
    """To the bit, documents included; one sequence has no token."""
    bounds = [0, 33, 33, 34, 70]
    r = parts(70, 32, 33, 16, "documents", torch.float32, device)
    given = [y[:1].contiguous() for y in (r.C, r.gc, r.dy, r.seq_idx)]
    packing = pack(torch.tensor(bounds, device=device), 16)
    dh = kernel(*given, chunk_size=16, packing=packing)
    edges = packing.chunk_offsets.tolist()
    for n in (0, 2, 3):
        tokens, chunks = (slice(x[n], x[n + 1]) for x in (bounds, edges))
        alone = kernel(*(y[:, tokens].contiguous() for y in given), chunk_size=16)
        assert torch.equal(dh[:, chunks], alone)
