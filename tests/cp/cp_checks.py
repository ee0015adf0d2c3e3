"""Operators on several ranks against one: what is drawn, cut, run on ranks, and compared."""

import functools
from typing import NamedTuple

import torch
from dplr.dplr_checks import inputs
from gdn_checks import gated

from linattn_edu import (
    causal_conv1d,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    ema_scan,
    mamba_chunk_scan_combined,
)
from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs, ssd_inputs

# relative RMS of several ranks against one
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Sizes(NamedTuple):
    """Of a head, keys and values; P of Mamba-2; other channels; tokens of a chunk."""

    K: int
    V: int
    P: int
    D: int
    C: int


SMALL, LARGE = Sizes(8, 6, 6, 5, 16), Sizes(128, 128, 64, 64, 64)


def _delta(make, f, raw, B, T, N, dtype, size):
    tokens = make(B, T, 1, 2, size.K, size.V, dtype=dtype, seed=T).asdict()
    tokens = {n: tokens[n] for n in ("q", "k", "v", "g", "beta")}
    shared, options = {}, {"chunk_size": size.C}
    if raw:
        shared = {"A_log": torch.randn(2, dtype=dtype), "dt_bias": torch.randn(2, dtype=dtype)}
        options["use_gate_in_kernel"] = True
    state = torch.randn(N, 2, size.K, size.V, dtype=dtype)
    return functools.partial(f, output_final_state=True, **options), tokens, shared, state


def _flags(B, T, N, dtype, size):
    """chunk_kda with what is computed inside the call, states [V, K], and everything kept."""
    _, tokens, _, state = _delta(kda_inputs, chunk_kda, False, B, T, N, dtype, size)
    shared = {"A_log": torch.randn(2, dtype=dtype), "dt_bias": torch.randn(2, size.K, dtype=dtype)}
    names = (
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
        "disable_recompute", "state_v_first", "output_final_state",
    )  # fmt: skip
    f = functools.partial(chunk_kda, chunk_size=size.C, **dict.fromkeys(names, True))
    return f, tokens, shared, state.mT.contiguous()


def _gdn2(B, T, N, dtype, size):
    _, tokens, shared, state = _delta(kda_inputs, chunk_gdn2, False, B, T, N, dtype, size)
    f = functools.partial(chunk_gdn2, chunk_size=size.C, output_final_state=True)
    return f, gated(tokens), shared, state


def _dplr(B, T, N, dtype, size):
    tokens = inputs(B, T, 2, size.K, size.V, dtype, N=N, seed=T)
    state = tokens.pop("initial_state").to(dtype)
    f = functools.partial(chunk_dplr_delta_rule, chunk_size=size.C, output_final_state=True)
    return f, tokens, {}, state


def _ssd(B, T, N, dtype, size):
    drawn = ssd_inputs(B, T, 2, 1, size.P, size.K, dtype=dtype, seed=T).asdict()
    tokens = {n: drawn[n] for n in ("x", "dt", "B", "C", "z")}
    shared = {n: drawn[n] for n in ("A", "D", "dt_bias")}

    def call(initial_state, **x):
        return f(**x, initial_states=initial_state)

    f = functools.partial(_states, chunk_size=size.C, dt_softplus=True)
    state = torch.randn(N, 2, size.P, size.K, dtype=dtype)
    return call, tokens, shared, state


def _states(*args, cu_seqlens=None, **kwargs):
    """out and the states of every sequence."""
    which = "return_final_states" if cu_seqlens is None else "return_varlen_states"
    return mamba_chunk_scan_combined(*args, cu_seqlens=cu_seqlens, **{which: True}, **kwargs)


def _ema(B, T, N, dtype, size):
    tokens = {
        "x": torch.randn(B, T, 2, size.D, dtype=dtype),
        "g": -torch.rand(B, T, 2, dtype=dtype),
        "weight": torch.randn(B, T, 2, dtype=dtype),
    }
    state = torch.randn(N, 2, size.D, dtype=dtype)
    f = functools.partial(ema_scan, output_final_state=True, chunk_size=size.C)
    return f, tokens, {}, state


def _conv(B, T, N, dtype, size):
    tokens = {n: torch.randn(B, T, size.D, dtype=dtype) for n in ("x", "residual")}
    shared = {
        "weight": torch.randn(size.D, 4, dtype=dtype), "bias": torch.randn(size.D, dtype=dtype)
    }  # fmt: skip
    state = torch.randn(N, size.D, 4, dtype=dtype)
    f = functools.partial(causal_conv1d, output_final_state=True, activation="silu")
    return f, tokens, shared, state


# name -> (batch, tokens, states, dtype, sizes) -> the call, tensors of tokens, of all, the initial
# states
OPERATORS = {
    "gdn": functools.partial(_delta, gdn_inputs, chunk_gated_delta_rule, False),
    "gdn_raw": functools.partial(_delta, gdn_inputs, chunk_gated_delta_rule, True),
    "kda": functools.partial(_delta, kda_inputs, chunk_kda, False),
    "kda_flags": _flags,
    "gdn2": _gdn2,
    "dplr": _dplr,
    "ssd": _ssd,
    "ema": _ema,
    "conv": _conv,
}


def draw(operator, bounds, B=1, states=True, dtype=torch.float64, device="cpu", size=SMALL):
    """(call, tensors of tokens, of all, initial states or None, cotangents of o and the states)."""
    torch.manual_seed(sum(bounds))
    N = B * (len(bounds) - 1)
    f, tokens, shared, state = OPERATORS[operator](B, bounds[-1], N, dtype, size)
    like = tokens["v"] if "v" in tokens else tokens["x"]
    state, do, dht = (
        t.to(device) for t in (state, torch.randn_like(like), torch.randn_like(state))
    )
    tokens, shared = ({n: t.to(device) for n, t in x.items()} for x in (tokens, shared))
    return f, tokens, shared, state if states else None, do, dht


def passes(f, tokens, shared, state, do, dht, **options):
    """(o, final states, gradients by name) of one call."""
    x = {n: t.detach().clone().requires_grad_() for n, t in {**tokens, **shared}.items()}
    state = state if state is None else state.detach().clone().requires_grad_()
    o, final = f(**x, initial_state=state, **options)
    inputs = {**x, **({} if state is None else {"state": state})}
    used = [final] if final.numel() else []
    gradients = torch.autograd.grad([o, *used], list(inputs.values()), [do, dht][: 1 + len(used)])
    return o.detach(), final.detach(), dict(zip(inputs, gradients, strict=True))


def on_one(drawn, bounds, B=1, **options):
    packed = {"cu_seqlens": torch.tensor(bounds, device=drawn[-1].device)} if B == 1 else {}
    return passes(*drawn, **packed, **options)


def on_rank(drawn, bounds, group, B=1, layout="contiguous", **options):
    """What a rank has of it: (its tokens, its first and last sequences, passes)."""
    f, tokens, shared, state, do, dht = drawn
    cu_seqlens = torch.tensor(bounds, device=do.device)
    context = build_cp_context(cu_seqlens, group, layout=layout)
    own = torch.cat([torch.arange(*part.tokens) for part in context.parts])
    N = len(bounds) - 1
    first, last = (
        [context.documents[n] + b * N for b in range(B) for n in rows]
        for rows in (context.first, context.last)
    )
    tokens = {n: t[:, own] for n, t in tokens.items()}
    state = state if state is None else state[first]
    cut = f, tokens, shared, state, do[:, own], dht[last]
    return own, first, last, passes(*cut, cp_context=context, **options)


def compare(whole, parts, shared, tol):
    """The results of all ranks are those of one; gradients of what all share are added."""
    o, final, gradients = whole
    for own, first, last, (o_r, final_r, gradients_r) in parts:
        assert_close("o", o_r, o[:, own], tol)
        pairs = [("final state", final_r, final[last], final)]
        for n, g in gradients_r.items():
            if n == "state":
                pairs.append((n, g, gradients[n][first], gradients[n]))
            elif n not in shared:
                pairs.append((n, g, gradients[n][:, own], gradients[n]))
        for n, got, want, of in pairs:
            assert got.shape == want.shape, n
            # the decay of a first token has no gradient: what is there was rounded
            rounding = 4 * torch.finfo(of.dtype).eps * of.abs().max() if of.numel() else 0
            if (want.abs() > rounding).any():
                assert_close(n, got, want, tol)
            else:
                assert (got.abs() <= rounding).all(), n
    for n in shared:
        assert_close(n, sum(part[3][2][n] for part in parts), gradients[n], tol)


def check(operator, bounds, world, *, B=1, layout="contiguous", states=True, dtype=torch.float64,
          device="cpu", change=lambda tokens: None, **options):  # fmt: skip
    """Ranks that are simulated against one.  change: of the tensors of tokens, in place."""
    drawn = draw(operator, bounds, B, states, dtype, device)
    change(drawn[1])
    whole = on_one(drawn, bounds, B, **options)
    run = functools.partial(on_rank, drawn, bounds, B=B, layout=layout, **options)
    compare(whole, simulate(world, run), drawn[2], TOLERANCES[dtype])
