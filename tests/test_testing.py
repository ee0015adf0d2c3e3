"""The comparison itself: it must fail when it should."""

import math

import pytest
import torch

from linattn_edu.testing import (
    assert_close,
    gdn_inputs,
    kda_inputs,
    poison,
    relative_rms,
    ssd_inputs,
    ssd_passes,
    ssd_recurrence,
    verdict,
)


def test_relative_rms():
    ref = torch.tensor([3.0, 4.0])
    assert relative_rms(ref, ref) == 0
    assert relative_rms(ref + torch.tensor([0.0, 0.5]), ref) == pytest.approx(0.1)
    assert relative_rms(torch.tensor([3.0, math.nan]), ref) == math.inf
    assert relative_rms(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5
    with pytest.raises(ValueError, match="finite"):
        relative_rms(ref, torch.tensor([1.0, math.inf]))
    with pytest.raises(ValueError, match="shape"):
        relative_rms(ref, torch.zeros(1, 2))


def test_report_names_the_worst_element():
    x = torch.ones(2, 3)
    x[1, 2] = 2
    with pytest.raises(AssertionError, match=r"o: relative RMS .*\n.*\n  worst at \(1, 2\): got 2"):
        assert_close("o", x, torch.ones(2, 3), 1e-3)
    x[0, 1] = math.nan
    with pytest.raises(AssertionError, match=r"not finite: 1 of 6\n  worst at \(0, 1\)"):
        assert_close("o", x, torch.ones(2, 3), 1e9)


def test_verdict_prints_no_measured_digit(capsys):
    ref = torch.ones(4)
    verdict("o", ref * (1 + 1e-6), ref, 1e-5)
    first = capsys.readouterr().out
    verdict("o", ref, ref, 1e-5)
    assert first == capsys.readouterr().out
    assert "OK" in first and "1e-05" in first
    with pytest.raises(AssertionError):
        verdict("o", ref * 2, ref, 1e-5)


def test_inputs_are_reproducible_and_trained_like():
    a, b = (gdn_inputs(2, 300, 2, 4, 16, 8, seed=3) for _ in range(2))
    assert all(
        torch.equal(x, y)
        for x, y in zip(a.asdict().values(), b.asdict().values(), strict=True)
        if x is not None
    )
    assert (a.g <= 0).all() and -0.12 < a.g.mean() < -0.01
    assert torch.allclose(a.k.norm(dim=-1), torch.ones(2, 300, 2))
    with pytest.raises(ValueError, match="gate"):
        gdn_inputs(1, 1, 1, 1, 1, 1, gate="open")


def test_gates_for_each_channel():
    def drawn(gate):
        return kda_inputs(2, 300, 2, 4, 16, 8, gate=gate).g

    assert drawn("trained").shape == (2, 300, 4, 16)
    assert (drawn("trained") <= 0).all() and -0.12 < drawn("trained").mean() < -0.01
    assert (drawn("none") == 0).all() and (drawn("closed") == -1e4).all()
    assert 0.12 < (drawn("reset") == -1e4).float().mean() < 0.13
    assert -5 <= drawn("safe").min() < -4.9 and -0.1 < drawn("safe").max() < 0
    with pytest.raises(ValueError, match="gate"):
        drawn("open")


def test_poison_fills_and_restores():
    original = torch.empty
    with poison():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.ones(2).new_empty(2).isnan().all()
    assert torch.empty is original


def test_passes_of_mamba_2_are_those_of_the_recurrence():
    """By autograd, with documents; the parts of the decay's gradient are all there."""
    x = ssd_inputs(2, 20, 4, 2, 5, 3, dtype=torch.float64)
    r = ssd_passes(x, x.seq_idx, chunk_size=16)
    new = torch.nn.functional.pad(x.seq_idx[:, 1:] != x.seq_idx[:, :-1], (1, 0))
    g = (r.step * x.A).masked_fill(new[..., None], -math.inf)
    leaves = [y.clone().requires_grad_() for y in (x.C, x.B, x.x, r.h0)]
    C, B, u, h0 = leaves
    y, last = ssd_recurrence(C, B, r.step[..., None] * u, g, h0)
    loss = (r.dy * (y + x.D[:, None] * u)).sum() + (r.dht * last).sum()
    assert relative_rms(r.final, last) < 1e-13
    wanted = torch.autograd.grad(loss, leaves)
    for name, want in zip(("dC", "dB", "dx", "dh0"), wanted, strict=True):
        assert relative_rms(getattr(r, name), want) < 1e-13, name
    shapes = {getattr(r, f"dgc_{place}").shape for place in ("state", "inter", "scores")}
    assert shapes == {r.gc.shape}
    assert r.dlast_passing.shape == r.dlast_state.shape == (2, 2, 4)
