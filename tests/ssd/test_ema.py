"""Stage ema: kernel against reference, reference against the recurrence and against SSD."""

from itertools import pairwise

import pytest
import stages
import torch
from ssd.ema_checks import GATES, GIVEN, draw, loop, parts
from ssd.ssd_checks import check_stage

from linattn_edu.kernels.ssd import ema as kernels
from linattn_edu.kernels.ssd.ema import ema as kernel
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.ssd.chunk_cumsum import chunk_cumsum
from linattn_edu.reference.ssd.chunk_scan import chunk_scan
from linattn_edu.reference.ssd.chunk_state import chunk_state
from linattn_edu.reference.ssd.ema import ema as reference
from linattn_edu.reference.ssd.state_passing import state_passing
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


test_kernel = stages.matches("ema", "ema")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("given", GIVEN)
def test_reference_is_the_recurrence(given, gate):
    x, g, weight, h0 = draw(100, 5, given, gate, torch.float64)
    gc = gate_cumsum(g, chunk_size=16)
    options = {"chunk_size": 16, "output_final_state": True}
    y, h, ht = reference(x, g, gc, weight, h0, **options)
    want, last = loop(x, g, weight, h0)
    first = torch.zeros_like(want[:, :1]) if h0 is None else h0[:, None]
    assert_close("y", y, want, 1e-12)
    assert_close("h", h, torch.cat([first, want[:, 15:-1:16]], 1), 1e-12)
    assert_close("ht", ht, last, 1e-12)


def test_reference_is_mamba_without_b_and_c():
    """N = 1 and B = C = 1: the weight is the step, and A carries the decay."""
    x, g, weight, h0 = draw(100, 6, "both", "trained", torch.float64)
    one = torch.ones(*g.shape[:2], 1, 1, dtype=g.dtype)
    A = -torch.ones(g.shape[2], dtype=g.dtype)
    _, gc = chunk_cumsum(-g, A, chunk_size=16)
    assert_close("gc", gc, gate_cumsum(g, chunk_size=16), 1e-14)
    s = chunk_state(one, x, weight, gc, chunk_size=16)
    options = {"chunk_size": 16, "output_final_state": True}
    h, ht = state_passing(s, gc, h0[..., None, :], **options)
    y = chunk_scan(one, one, x, weight, gc, h, chunk_size=16)
    got = reference(x, g, gc, weight, h0, **options)
    for name, a, b in zip(("y", "h", "ht"), got, (y, h[..., 0, :], ht[..., 0, :]), strict=True):
        assert_close(name, a, b, 1e-13)


def in_pieces(monkeypatch, *modules, chunks=2):
    """Pieces so short that few tokens have many."""
    for module in modules:
        monkeypatch.setattr(module, "PIECE", chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [31, 32, 33, 64, 65, 150])
def test_pieces(T, dtype, device, monkeypatch):
    in_pieces(monkeypatch, kernels)
    stages.check("ema", "ema", T, 20, 16, "both", "trained", dtype, device, B=2)


def test_pieces_of_the_length_that_ships(device):
    r = parts(16 * (2 * kernels.PIECE + 1) + 3, 5, 16, "state", "trained", torch.float32, device)
    args = (r.x[..., :1, :], r.g[..., :1], r.gc[..., :1], None, r.h0[:, :1])
    args = [t if t is None else t.contiguous() for t in args]
    check_stage(kernel, reference, args, chunk_size=16, output_final_state=True)


@pytest.mark.parametrize("chunks", [2, 64])
def test_packed_sequences_are_each_by_itself(chunks, device, monkeypatch):
    """To the bit; those that are cut into pieces too."""
    in_pieces(monkeypatch, kernels, chunks=chunks)
    lengths = (33, 0, 16, 150, 1, 64, 0, 97)
    x, g, weight, h0 = draw(sum(lengths), 20, "both", "trained", device=device, B=1)
    h0 = torch.randn(len(lengths), 3, 20, device=device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    packing = pack(bounds, 16)
    gc = torch.cat([gate_cumsum(t, chunk_size=16) for t in g.split(lengths, 1) if t.shape[1]], 1)
    options = {"chunk_size": 16, "output_final_state": True}
    y, h, ht = kernel(x, g, gc, weight, h0, packing=packing, **options)
    chunks = packing.chunk_offsets.tolist()
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        if a == b:
            assert torch.equal(ht[n], h0[n])
            continue
        one = [t[:, a:b].contiguous() for t in (x, g, gc, weight)]
        y_n, h_n, ht_n = kernel(*one, h0[n : n + 1], **options)
        assert torch.equal(y[:, a:b], y_n) and torch.equal(ht[n], ht_n[0])
        assert torch.equal(h[:, chunks[n] : chunks[n + 1]], h_n)


def test_weight_of_a_slow_average(device):
    """1 - e^g keeps the digits of a small g; a weight too small for float16 is not lost."""
    g = -torch.logspace(-12, 2, 64, device=device, dtype=torch.float64).view(64, 1, 1)
    x = torch.ones(64, 1, 1, 3, device=device)
    y, *_ = kernel(x, g.float(), g.float(), chunk_size=16)
    relative = y.double() / -torch.expm1(g.float().double())[..., None] - 1
    assert relative.abs().max() < 1e-6
    x, g, _, _ = draw(64, 20, "neither", "trained", torch.float16, device)
    g = 1e-6 * g
    args = (x, g, gate_cumsum(g, chunk_size=64))
    want, *_ = reference(*(t.double() for t in args), chunk_size=64)
    _, _, ht = kernel(*args, chunk_size=64, output_final_state=True)
    assert_close("ht", ht, want[:, -1], 1e-6)
    got = kernel(x, g, args[2], torch.full_like(g, 1e-7), chunk_size=64)[0]
    want = reference(*(t.double() for t in (*args, torch.full_like(g, 1e-7))), chunk_size=64)[0]
    large = want.abs() > 1e-7  # what float16 can hold
    assert_close("y", got[large], want[large], 0.05)


def test_one_launch_gives_the_bits_of_another(device):
    r = parts(150, 33, 32, "both", "reset", torch.bfloat16, device)
    args = (r.x, r.g, r.gc, r.weight, r.h0)
    first = kernel(*args, chunk_size=32, output_final_state=True)
    again = kernel(*args, chunk_size=32, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    y, *none = kernel(*args, chunk_size=32, return_states=False)
    assert torch.equal(y, first[0]) and none == [None, None]
