"""The grid every stage of Mamba-2 is held to, and what its stages read."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from delta import stage_checks
from delta.stage_checks import CHUNKS, DIMS, DTYPES, TOKENS
from grids import FULL, name, pairs, usual

from linattn_edu.reference.ssd.chunk_cumsum import chunk_cumsum
from linattn_edu.reference.ssd.chunk_scan_bwd_dstates import chunk_scan_bwd_dstates
from linattn_edu.reference.ssd.chunk_state import chunk_state
from linattn_edu.reference.ssd.chunk_state_bwd_db import chunk_state_bwd_db
from linattn_edu.reference.ssd.state_passing import state_passing
from linattn_edu.reference.ssd.state_passing_bwd import state_passing_bwd
from linattn_edu.testing import ssd_inputs

WIDE = [(20, 256, 256, 16, "all", torch.float32), (40, 16, 256, 32, "all", torch.bfloat16)]
# what there is beside x, step, B and C
GIVEN = ("all", "none", "documents", "channels")


def _grid():
    """`grids.usual`; in the full suite every pair, twice as many."""
    some = (pairs if FULL else usual)(T=TOKENS, N=DIMS, P=DIMS, C=CHUNKS, given=GIVEN, dtype=DTYPES)
    more = pairs(dtype=DTYPES, given=GIVEN, C=CHUNKS, P=DIMS, N=DIMS, T=TOKENS) if FULL else []
    return list(dict.fromkeys([*some, *(case[::-1] for case in more), *WIDE]))


grid = pytest.mark.parametrize(("T", "N", "P", "C", "given", "dtype"), _grid(), ids=name)


def parts(T, N, P, C, given, dtype, device, H=4, G=2):
    """What the stages read, by the reference stages: two heads on each group.

    given: "all", D a number a head, z, states and documents; "none" of them; "documents" alone;
    "channels": D a number a channel, and states.
    Short sequences come in a batch: the rounding error of a handful of numbers is no yardstick.
    All is the same in every run.
    """
    seed = hash((T, N, P)) % 2**31
    batch = max(1, (256 if torch.cuda.is_available() else 4) // T)
    x = ssd_inputs(batch, T, H, G, P, N, dtype=dtype, device=device, seed=seed)
    generator = torch.Generator(x.x.device).manual_seed(seed)

    def randn(like, dtype=None):
        options = {"dtype": dtype or like.dtype, "device": like.device, "generator": generator}
        return torch.randn(like.shape, **options)

    r = SimpleNamespace(x=x.x, B=x.B, C=x.C, dt=x.dt, A=x.A, dt_bias=x.dt_bias)
    r.D = {"all": x.D, "channels": randn(x.x[0, 0], x.D.dtype)}.get(given)
    r.z = x.z if given == "all" else None
    r.seq_idx = x.seq_idx if given in ("all", "documents") else None
    states = given in ("all", "channels")
    r.h0 = x.initial_states.mT.contiguous() if states else None
    r.dht = randn(r.h0) if states else None
    r.dy = randn(x.x)
    r.step, r.gc = chunk_cumsum(x.dt, x.A, x.dt_bias, softplus=True, chunk_size=C)
    r.gs = r.gc - r.step.log2()
    options = {"chunk_size": C}
    r.s = chunk_state(r.B, r.x, r.step, r.gc, r.seq_idx, **options)
    r.h, _ = state_passing(r.s, r.gc, r.h0, r.seq_idx, **options)
    r.dh_out = chunk_scan_bwd_dstates(r.C, r.gc, r.dy, r.seq_idx, **options)
    r.ds, r.dlast, _ = state_passing_bwd(r.dh_out, r.gc, r.h, r.dht, r.seq_idx, **options)
    r.dB_state, *_ = chunk_state_bwd_db(r.B, r.x, r.step, r.gc, r.ds, r.seq_idx, **options)
    return r


# a kernel rounds the operands of its products
check_stage = partial(stage_checks.check_stage, rounds=True)
