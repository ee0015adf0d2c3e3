"""What the fused stages read, by the reference stages, and the grid of those of Mamba-2."""

from types import SimpleNamespace

import pytest
import torch
from delta.stage_checks import inputs
from fused.kda_checks import SCALE, kda_stage_inputs
from gdn_checks import holds
from grids import FULL, name, pairs, usual
from ssd import ssd_checks

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused.gdn_intra import intra_chunk
from linattn_edu.reference.fused.gdn_scans import scans
from linattn_edu.reference.fused.kda_fwd import kda_prepare
from linattn_edu.reference.fused.kda_scans import kda_fused_scans
from linattn_edu.reference.fused.ssd_bwd_dc import ssd_bwd_dc
from linattn_edu.reference.fused.ssd_fwd import chunk_scores

AXES = {
    "T": (*ssd_checks.TOKENS, 130, 192),
    "N": (16, 33, 64, 100, 128),
    "P": (16, 33, 64),
    "C": (128, 64, 32),
    "heads": ((4, 2), (3, 3), (5, 1)),
    "given": ssd_checks.GIVEN,
    "dtype": (torch.float16, torch.bfloat16),
}
CASES = usual(**AXES)
if FULL:
    CASES = pairs(**AXES) + [c[::-1] for c in pairs(**dict(reversed(AXES.items())))]
ssd_grid = pytest.mark.parametrize(tuple(AXES), CASES, ids=name)


def small(device):
    """A dtype that the kernels hold: on a GPU of 16 bits."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def held(x):
    """Whether the kernels hold such heads here; the interpreter holds any."""
    return not x.q.is_cuda or holds(x.q, x.v)


def gdn(T, K, V, C, dtype, device, own=False):
    """(inputs, everything the fused stages read) of Gated DeltaNet. own: with a q/k head for each
    value head.
    """
    x = inputs(T, K, V, dtype, device)
    if own:
        x.q, x.k = (t.repeat_interleave(2, 2) for t in (x.q, x.k))
    r = SimpleNamespace(held=held(x), gc=gate_cumsum(x.g, chunk_size=C))
    r.do, r.dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    r.P, r.R, r.AG = intra_chunk(x.q, x.k, x.beta, r.gc, **options)
    args = (x.q, x.k, x.v, x.beta, r.gc, r.P, r.AG, r.do, x.initial_state, r.dht)
    r.h, r.v_new, r.dh, r.Z, *_ = scans(*args, scale=SCALE)
    return x, r


def kda(T, K, V, C, dtype, device, g=None, **kinds):
    """The same of Kimi Delta Attention. g: other gates. kinds: as in kda_stage_inputs."""
    x = kda_stage_inputs(T, K, V, dtype, device, **kinds)
    torch.manual_seed(T + K)
    x.g = x.g if g is None else g
    r = SimpleNamespace(held=held(x), gc=gate_cumsum(x.g, chunk_size=C))
    r.P, r.A, r.kd, r.kg, r.qg = kda_prepare(x.q, x.k, x.beta, r.gc, chunk_size=C)
    r.do, r.dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    strength = x.beta if x.write is None else x.write
    args = (r.qg, r.kg, r.kd, x.v, strength, r.gc, r.P, r.A, r.do, x.initial_state, r.dht)
    r.h, r.v_new, r.dh, r.Z, *_ = kda_fused_scans(*args, scale=SCALE)
    return x, r


def ssd(T, N, P, C, heads, given, dtype, device):
    """Those of ssd_checks, states rounded as the fused stages keep them, and what they add."""
    r = ssd_checks.parts(T, N, P, C, given, dtype, device, *heads)
    r.h, r.dh = r.h.to(dtype), r.ds.to(dtype)
    r.scores = chunk_scores(r.C, r.B, r.seq_idx, chunk_size=C)
    r.inter, r.dgc, _ = ssd_bwd_dc(r.C, r.gc, r.h, r.dh, r.dy, r.seq_idx, chunk_size=C)
    r.inter, r.dgc = r.inter.float(), r.dgc.float()
    return r
