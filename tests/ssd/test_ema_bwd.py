"""Stage ema_bwd: kernel against reference, reference against autograd of the recurrence."""

from itertools import pairwise

import pytest
import stages
import torch
from ssd.ema_checks import GATES, GIVEN, draw, loop
from ssd.test_ema import in_pieces

from linattn_edu.kernels.ssd import ema as kernels
from linattn_edu.kernels.ssd import ema_bwd as backward_kernels
from linattn_edu.kernels.ssd.ema_bwd import ema_bwd as kernel
from linattn_edu.kernels.ssd.ema_bwd import total
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.ssd.ema import ema
from linattn_edu.reference.ssd.ema_bwd import ema_bwd as reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

NAMES = ("dx", "dg", "dw", "dh0")


test_kernel = stages.matches("ema_bwd", "ema")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("given", GIVEN)
def test_reference_is_the_gradient_of_the_recurrence(given, gate):
    leaves = [
        t if t is None else t.requires_grad_() for t in draw(70, 5, given, gate, torch.float64)
    ]
    y, ht = loop(*leaves)
    dy, dht = torch.randn_like(y), None if leaves[3] is None else torch.randn_like(ht)
    loss = (dy * y).sum() + (0 if dht is None else (dht * ht).sum())
    want = torch.autograd.grad(loss, [t for t in leaves if t is not None])
    want = dict(zip([n for n, t in zip(NAMES, leaves, strict=True) if t is not None], want,
                    strict=True))  # fmt: skip
    with torch.no_grad():
        gc = gate_cumsum(leaves[1], chunk_size=16)
        _, h, _ = ema(*leaves[:2], gc, *leaves[2:], chunk_size=16)
        got = dict(zip(NAMES, reference(*leaves[:2], gc, leaves[2], h, dy, dht, chunk_size=16),
                       strict=True))  # fmt: skip
    for n, dx in want.items():
        assert_close(n, got[n], dx, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [31, 32, 33, 64, 65, 150])
def test_pieces(T, dtype, device, monkeypatch):
    in_pieces(monkeypatch, kernels, backward_kernels)
    stages.check("ema_bwd", "ema", T, 20, 16, "both", "trained", dtype, device, B=2)


@pytest.mark.parametrize("chunks", [2, 64])
def test_packed_sequences_are_each_by_itself(chunks, device, monkeypatch):
    """To the bit; those that are cut into pieces too."""
    in_pieces(monkeypatch, kernels, backward_kernels, chunks=chunks)
    lengths = (33, 0, 16, 150, 1, 64, 0, 97)
    x, g, weight, _ = draw(sum(lengths), 20, "both", "trained", device=device, B=1)
    dht, dy = torch.randn(len(lengths), 3, 20, device=device), torch.randn_like(x)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    gc = torch.cat([gate_cumsum(t, chunk_size=16) for t in g.split(lengths, 1) if t.shape[1]], 1)
    packing = pack(bounds, 16)
    chunks = packing.chunk_offsets.tolist()
    h = torch.randn(1, packing.chunks, 3, 20, device=device)
    got = kernel(x, g, gc, weight, h, dy, dht, chunk_size=16, packing=packing)
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        if a == b:
            assert torch.equal(got[3][n], dht[n])
            continue
        *one, dy_n = (t[:, a:b].contiguous() for t in (x, g, gc, weight, dy))
        want = kernel(*one, h[:, chunks[n] : chunks[n + 1]], dy_n, dht[n : n + 1], chunk_size=16)
        for name, alone, all_ in zip(NAMES, want, got, strict=True):
            part = all_[n : n + 1] if name == "dh0" else all_[:, a:b]
            assert torch.equal(alone, part), f"{name} of sequence {n}"


def test_the_parts_of_a_sum_are_added_in_their_order(device):
    parts = torch.randn(5, 2, 300, 3, device=device)
    want = torch.zeros(2, 300, 3, device=device)
    for part in parts:
        want += part
    assert torch.equal(total(parts, want), want)
    assert_close("bf16", total(parts, want.bfloat16()), want, 3e-3)
