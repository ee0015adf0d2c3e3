"""Pieces that begin where a state is forgotten: scans give what they give on whole sequences."""

import pytest
import torch
from delta.stage_checks import inputs
from grids import parametrize

from linattn_edu.kernels.delta import warm_up
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum
from linattn_edu.kernels.fused import gdn_fwd, gdn_intra, gdn_scans
from linattn_edu.packing import pack
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")
# T; and boundaries where several sequences are packed: short ones are not cut, one is empty
SHAPES = {
    "whole pieces": (256, None),
    "a rest": (230, None),
    "packed": (420, [0, 64, 64, 192, 420]),
    "packed, the last one whole": (420, [0, 64, 324, 420]),
}


def drawn(shape, device):
    """Arguments of the stages, and the packing; one head forgets everywhere, one at one place."""
    T, bounds = SHAPES[shape]
    x = inputs(T, 20, 24, torch.float32, device)
    one = slice(0, 1 if bounds else None)
    own = {} if bounds is None else {"packing": pack(torch.tensor(bounds, device=device), 16)}
    q, k, v, beta, g = (t[one] for t in (x.q, x.k, x.v, x.beta, x.g))
    g = g.clone()
    g[..., 0] = -3.0
    g[..., 1] = -0.01
    g[:, [120, 130], 1] = -40.0  # before and behind a piece's bound
    N = x.initial_state.shape[0] if bounds is None else len(bounds) - 1
    h0, dht = torch.randn(2, N, *x.initial_state.shape[1:], device=device)
    return q, k, v, beta, gate_cumsum(g, chunk_size=16, **own), h0, dht, own


@pytest.fixture
def cut(force, monkeypatch):
    """Pieces of 64 tokens, found forgotten in 32."""
    force(PROGRAMS=0, PER_PROGRAM=32, MULTIPROCESSORS=1)
    monkeypatch.setattr(warm_up, "REACH", 32)


@parametrize(1, shape=SHAPES, given=(False, True), processors=(1, 132))
def test_scans(shape, given, processors, cut, force, device):
    q, k, v, beta, gc, h0, dht, own = drawn(shape, device)
    h0, dht = (h0, dht) if given else (None, None)
    do = torch.randn_like(v)
    P, R, _ = gdn_intra.intra_chunk(q, k, beta, gc, chunk_size=16, **own)
    _, _, AG = gdn_intra.intra_chunk(
        q, k, beta, gc, chunk_size=16, return_inverse=True, gated=True, **own
    )
    force(both_widths=int(processors > 1))
    _, (*wide, warmup) = warm_up.warm_up(k, beta, gc, 24, chunk_size=16, **own)

    def run():
        o = gdn_fwd.scan(q, k, v, gc, P, R, h0, scale=0.3, output_final_state=True, **own)
        return *o, *gdn_scans.scans(q, k, v, beta, gc, P, AG, do, h0, dht, scale=0.3, **own)

    got = run()
    force(FULL=0)
    for i, (a, b) in enumerate(zip(got, run(), strict=True)):
        assert_close(f"output {i}", a, b, 5e-6)
    assert (warmup < 0).any() and (warmup > 0).any()
    assert [(x < 0).all() for x in wide] == [True] * (processors > 1)
