"""A gate for each channel: what the stages of Kimi Delta Attention read, on stage_checks' grid."""

from types import SimpleNamespace

import gdn_checks
import pytest
import torch
from delta import stage_checks
from delta.stage_checks import CHUNKS, DIMS, DTYPES, SIZES, TOKENS, WIDE, inputs
from gdn_checks import without_gluon
from grids import FULL, name, parametrize, spread

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_bwd import kda_output_bwd, kda_wy_bwd
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.reference.delta.wy import wy
from linattn_edu.testing import gdn_inputs

GATES = ("mixed", "shut", "bounded", "open")
SCALE = 0.3


def _brief(times):
    """The whole grid where it runs; the interpreter takes longer for kernels of blocks of 16: so
    each number of tokens up to two chunks comes so many times.
    """
    axes = {"T": TOKENS[:-1], "K": DIMS, "V": DIMS, "C": CHUNKS, "dtype": DTYPES}
    return stage_checks.grid if FULL else pytest.mark.parametrize(
        SIZES, [*spread(times, **axes), *WIDE], ids=name
    )  # fmt: skip


grid, once = _brief(2), _brief(1)
gates = parametrize(gate=GATES, C=CHUNKS, dtype=DTYPES)


def kda_gate(gate, *shape, seed, device):
    """Log decays. mixed: from 1e-4 to 10 in size, as trained channels are; shut: one of eight of
    these at -1e4; bounded: down to -5, which one channel of three has at every token; open: 0.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    g = -(2 * torch.randn(*shape, **options) - 2).exp()
    if gate == "shut":
        g = torch.where(torch.rand(*shape, **options) < 0.125, -1e4, g)
    elif gate == "bounded":
        g = g.clamp(min=-5)
        g[..., ::3] = -5
    return torch.zeros_like(g) if gate == "open" else g


# A_log and dt_bias given or not, the lower bound
RAW = {
    "softplus": (True, True, None),
    "softplus, no bias": (True, False, None),
    "bounded": (True, True, -5.0),
    "bounded, no bias": (True, False, -5.0),
    "bounded, bias alone": (False, True, -0.5),
    "bounded, bare": (False, False, -2.0),
}


def raw_gate(kind, T, HV, K, device, dtype=torch.float32):
    """Raw gates on both sides of zero and what makes them a log decay, which no floor reaches."""
    generator = torch.Generator(device=device).manual_seed(T + K)
    rate, bias, lower_bound = RAW[kind]

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    a, A_log, dt_bias = (2 * randn(2, T, HV, K)).to(dtype), randn(HV) / 2, randn(HV * K)
    return a, A_log if rate else None, dt_bias if bias else None, {"lower_bound": lower_bound}


def kda_stage_inputs(T, K, V, dtype, device, H=1, gate="mixed", gated=False):
    """stage_checks.inputs with a decay for each channel; gated: beta an erase gate, and write."""
    x = inputs(T, K, V, dtype, device) if H == 1 else gdn_inputs(
        1, T, H, H, K, V, dtype=dtype, device=device, initial_state=True
    )  # fmt: skip
    x.g = kda_gate(gate, *x.g.shape, K, seed=T + K, device=device)
    x.write = None
    if gated:
        gates = gdn_checks.gated({"q": x.q, "v": x.v, "beta": x.beta}, seed=T)
        x.beta, x.write = gates["b"], gates["w"]
    return x


def forward_parts(x, C):
    """What the stages of the forward pass leave, by the reference."""
    r, options = SimpleNamespace(), {"chunk_size": C}
    r.gc = gate_cumsum(x.g, **options)
    r.P, r.A = kda_intra(x.q, x.k, x.beta, r.gc, **options)
    r.w, r.u, r.kg, r.qg = wy(x.k, x.v, x.beta, r.gc, r.A, x.q, x.write)
    r.h, r.v_new, _ = state(r.kg, r.w, r.u, r.gc, x.initial_state, **options)
    return r


def backward_parts(T, K, V, C, dtype, device, **kinds):
    """(inputs, everything the stages of the backward pass read), by the reference."""
    x = kda_stage_inputs(T, K, V, dtype, device, **kinds)
    r, options = forward_parts(x, C), {"scale": SCALE, "chunk_size": C}
    r.do, r.dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    r.dqg, r.dP = kda_output_bwd(r.v_new, r.h, r.do, **options)
    args = (r.qg, r.kg, r.w, r.gc, r.do, None, r.dht)
    r.dh, r.dv_new, _ = state_bwd(*args, P=r.P, **options)
    r.dkb, r.dkg, _, r.dL, r.dbeta, r.dgl = kda_wy_bwd(
        x.v, x.beta if x.write is None else x.write, r.A, r.h, r.v_new, r.dh, r.dv_new
    )
    return x, r


def needs_gluon(device):
    """Skip a test where the kernels in Gluon do not run."""
    if why := without_gluon(device):
        pytest.skip(why)
