"""Empty tensors in the place of what stages read: enough to see which rows their launchers pick."""

from types import SimpleNamespace

import torch
from stages.record import options

from linattn_edu.kernels.delta.recurrent import BV
from linattn_edu.kernels.routes import by_kind, kind_of, limits
from linattn_edu.kernels.ssd import ema
from linattn_edu.kernels.tiles import block, cdiv

empty = torch.empty


def of_sizes(K, V, dtype, C):
    """family -> its parts, for heads of these sizes in chunks of C tokens."""
    found = {
        "gdn": [gated(K, V, dtype, C)],
        "kda": [gated(K, V, dtype, C, channels=True)],
        "gdn2": [with_gates(gated(K, V, dtype, C, channels=True))],
        "gdn_fused": [gated(K, V, dtype, C)],
        "kda_fused": [gated(K, V, dtype, C, channels=True)],
        "gdn2_fused": [with_gates(gated(K, V, dtype, C, channels=True))],
        "recurrent": [recurrent(K, V, dtype, C)],
        "dplr": [rank_one(K, V, dtype, C)],
    }
    if V <= 256:
        found["ssd"] = [ssd(K, V, dtype, C, given) for given in ("all", "none", "channels")]
        found["ssd_fused"] = ssd_fused(K, V, dtype)
    if V <= 128:
        found["ema"] = [average(V, dtype, n) for n in (1, ema.PIECE + 1)]
        found["convolution"] = [convolution(V, dtype, W) for W in (3, 4, 8)]
        found["norm"] = list(norms(V, dtype))
    return found


def gated(K, V, dtype, C, channels=False, chunks=1):
    """A sequence and a head of the delta rule, with a gate a head or a gate a channel."""
    T = chunks * C
    qk, v, beta = empty(1, T, 1, K, dtype=dtype), empty(1, T, 1, V, dtype=dtype), empty(1, T, 1)
    g, A = qk.float() if channels else beta, empty(1, T, 1, C, dtype=dtype)
    S, M = empty(1, 1, 1, K, V + K).split([V, K], -1)  # of one map
    kind = kind_of(qk, 1, V, 64, None)
    held = by_kind.gdn_backward_stages(kind).takes == "fused"
    h, h0 = empty(1, chunks, 1, K, V, dtype=dtype), empty(1, 1, K, V)
    r = SimpleNamespace(**options(C), held=held, beta=beta, h=h, dh=h, h0=h0, dht=h0)
    names = {
        "q k w qg kg kd dk_out dqg dkg": qk,
        "dkb": qk.float(), "v u v_new do dv_out dv_new Z": v,
        "A P R AG dL": A, "dP": A.float(),
        "g gc dgc_out": g, "one": empty(1), "bias": empty(K), "rstd": beta, "dbeta": beta,
        "dgl": h[..., 0].float(), "S": S, "M": M, "number": M[..., 0, 0],
    }  # fmt: skip
    vars(r).update((n, x) for some, x in names.items() for n in some.split())
    r.halved = by_kind.gdn_halves(kind).takes == "halves"
    r.halves, r.low, r.put = (r.P, r.A), (r.v, r.v), (r.v, h0)
    r.cancels = empty(1, 1, dtype=torch.int32)
    r.ways = r.cancels
    r.only = r.cancels, empty(1 + chunks, dtype=torch.int32)
    given = by_kind.kda_halves(kind._replace(dtype=torch.bfloat16)).takes == "halves"
    r.fine, r.some = (given and dtype == x for x in (torch.float32, torch.bfloat16))
    r.items, r.inner, r.whole = r.only[1], (r.P, r.A), (r.P.float(), r.A.float())
    r.raw = qk, qk
    return r


def with_gates(r):
    """The same with gates of channels for what is erased and written, and what a layer gives."""
    slots = empty(1, 2, dtype=torch.int32)
    vars(r).update(beta=r.q, write=r.v, bias=empty(r.q.shape[-1]), slots=slots)
    r.accepted = slots[:, 0]
    return r


def recurrent(K, V, dtype, T):
    qk, v, g = empty(1, T, 1, K, dtype=dtype), empty(1, T, 1, V, dtype=dtype), empty(1, T, 1)
    slots, R = empty(1, 2, dtype=torch.int32), 24
    ring = {"keys": empty(1, 1, R, K, dtype=dtype), "writes": empty(1, 1, R, V),
            "decays": empty(1, 1, R, 1), "decays_wide": empty(1, 1, R, K),
            "counts": empty(1, 1, cdiv(V, min(block(V), BV)), 3, dtype=torch.int32)}  # fmt: skip
    return SimpleNamespace(
        **ring, q=qk, k=qk, v=v, g=g, beta=g, gk=qk, gk_wide=qk.float(), gv_wide=v.float(),
        h0=empty(1, 1, K, V), one=empty(1), bias=empty(K), slots=slots, accepted=slots[:, 0],
    )  # fmt: skip


def rank_one(K, V, dtype, T):
    """A sequence and a head of the general delta rule, of one chunk."""
    qk, v, S = empty(1, T, 1, K, dtype=dtype), empty(1, T, 1, V, dtype=dtype), empty(1, 1, K, V)
    A, h = empty(1, T, 1, T, dtype=dtype), S[:, None].to(dtype)
    names = {
        "q k a b qg kg ag bg dqg dkg dag dbg": qk, "gk gc": qk.float(), "v e do dx": v,
        "M ak qb qk dab dak dqb dqk": A, "h dh": h, "dgl": h[..., 0].float(),
        "initial_state dht": S,
    }  # fmt: skip
    parts = {n: x for some, x in names.items() for n in some.split()}
    return SimpleNamespace(**options(T), **parts)


def ssd(N, P, dtype, T, given, state=torch.float32):
    """Two heads on a group; given: as in ssd_checks.parts."""
    x, B, number = empty(1, T, 2, P, dtype=dtype), empty(1, T, 1, N, dtype=dtype), empty(1, T, 2)
    A, rows, h = empty(2), empty(2, P), empty(1, 1, 2, N, P, dtype=state)
    every, ids = given == "all", empty(1, T, dtype=torch.int32)
    r = SimpleNamespace(**options(T), x=x, dy=x, B=B, C=B, A=A, rows=rows, ids=ids, h=h)
    r.step = r.gc = r.gs = number
    r.dt, r.dlast, r.softplus = number.to(dtype), empty(1, 1, 2), every
    r.D = {"all": A, "channels": rows}.get(given)
    r.skip = {"all": rows[:, :1], "channels": rows}.get(given)
    r.dt_bias, r.z, r.seq_idx = (y if every else None for y in (A, x, ids))
    r.s = r.ds = r.dh_out = h
    r.ends, r.slots = True, empty(T, dtype=torch.int32)
    r.ring = {
        "state": empty(T, 2, P, N), "keys": empty(T, 1, 24, N, dtype=dtype),
        "writes": empty(T, 2, 24, P, dtype=dtype if every else torch.float32),
        "decays": empty(T, 2, 24, 1), "length": 16,
        "counts": empty(T, 2, cdiv(P, min(block(P), BV)), 3, dtype=torch.int32),
    }  # fmt: skip
    r.drafts, r.bounds = empty(T, 4, dtype=torch.int32), empty(T + 1, dtype=torch.int32)
    # a token of T sequences: with one number a head; with one for each row and entry
    token = {"x": x[0], "B": B[0]}
    state, dt = empty(T, 2, P, N), r.dt[0, ..., None]
    r.one = SimpleNamespace(
        **token, state=state, dt=dt, A=A[:, None, None], D=rows[:, :1], bias=A[:, None]
    )
    r.all = SimpleNamespace(**token, state=state.to(dtype), A=empty(2, P, N))
    r.h0, r.dht, r.dB_state = h[0].float(), h[0] if every else None, B.float()
    return r


def ssd_fused(N, P, dtype):
    """Chunks of two tiles and of one, where the fused stages hold the heads."""
    found = []
    for T in (128, 64):
        for given in ("none", "all", "documents"):
            r = ssd(N, P, dtype, T, given, state=dtype)
            if by_kind.ssd_stages(kind_of(r.B, 2, P, T, None)).takes == "staged":
                return found
            whole = empty(1, limits.SSD_PIECE + T, 2, max(N, P), dtype=dtype)
            r.long = SimpleNamespace(x=whole[..., :P], C=whole[..., :N], gc=whole[..., 0].float())
            r.dt, r.dt_bias, r.dht, r.scores = (
                r.step,
                r.A,
                empty(1, 2, N, P),
                empty(1, T, 1, T, dtype=dtype),
            )
            r.dh, r.h0, r.ends, r.piece = r.h, None, False, 2 * T
            r.inter, r.dgc = r.B.float(), r.step
            r.D = {"none": r.A, "all": r.rows}.get(given)
            r.seq_idx = None if given == "none" else r.ids
            found.append(r)
    return found


def average(D, dtype, chunks):
    """Exponential moving averages: of one chunk with nothing given, else with everything."""
    T, given = 64 * chunks, chunks > 1
    x, g = empty(1, T, 1, D, dtype=dtype), empty(1, T, 1)
    weight, state = (g, empty(1, 1, D)) if given else (None, None)
    wanted = {"output_final_state": given, "return_states": given}
    return SimpleNamespace(
        x=x, g=g, gc=g, weight=weight, h0=state, dht=state, h=empty(1, chunks, 1, D), dy=x,
        **options(64), wanted=wanted,
    )  # fmt: skip


def convolution(D, dtype, W):
    """Short convolutions: of 3 tokens with nothing given, else with everything."""
    x, weight = empty(1, 64, D, dtype=dtype), empty(D, W, dtype=dtype)
    r = SimpleNamespace(x=x, weight=weight, bias=None, state=None, activation=None, width=W)
    r.seq_idx, r.pool = empty(1, 64, dtype=torch.int32), empty(2, D, W, dtype=dtype)
    r.own, r.ends, r.slots = r.pool[:1], W > 3, r.seq_idx[0, :1] if W > 3 else None
    if W > 3:
        r.bias, r.state, r.activation = weight[:, 0], empty(1, D, W, dtype=dtype), "silu"
    return r


def norms(D, dtype):
    """Gated norms: of one group with nothing given; of two with everything, in both orders."""
    for G, before, activation in ((1, True, "silu"), (2, True, "silu"), (2, False, "sigmoid")):
        x = empty(1, G, D, dtype=dtype)
        weight, z = (empty(G, D), x) if G > 1 else (None, None)
        kinds = {"norm_before_gate": before, "activation": activation}
        yield SimpleNamespace(x=x, weight=weight, z=z, rstd=empty(1, G), kinds=kinds)
