"""The chapters' puzzles: what each is checked on, the truth, and what its outputs' axes are."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu import testing
from linattn_edu.cp import halo
from linattn_edu.reference.delta.causal_conv1d import causal_conv1d
from linattn_edu.reference.delta.cp_merge import cp_merge, piece_map
from linattn_edu.reference.delta.cp_merge_bwd import cp_merge_bwd, piece_map_bwd
from linattn_edu.reference.delta.gate_bwd import gate_bwd
from linattn_edu.reference.delta.gate_cumsum import decay_matrix, gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.delta.kda_intra_bwd import kda_intra_bwd
from linattn_edu.reference.delta.l2norm import l2norm
from linattn_edu.reference.delta.output import output
from linattn_edu.reference.delta.output_bwd import output_bwd
from linattn_edu.reference.delta.recurrent import recurrent, recurrent_bwd, recurrent_pool
from linattn_edu.reference.delta.rms_norm_gated import rms_norm_gated, rms_norm_gated_bwd
from linattn_edu.reference.delta.solve import solve
from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.reference.delta.wy import wy
from linattn_edu.reference.delta.wy_bwd import wy_bwd
from linattn_edu.reference.dplr.intra_bwd import dplr_intra_bwd, dplr_rows_bwd
from linattn_edu.reference.fused.gdn_intra import intra_chunk
from linattn_edu.reference.fused.gdn_scans import scan_bwd
from linattn_edu.reference.ssd.chunk_cumsum import chunk_cumsum
from linattn_edu.reference.ssd.chunk_scan import chunk_scan
from linattn_edu.reference.ssd.chunk_scan_bwd_da_cs import chunk_scan_bwd_da_cs
from linattn_edu.reference.ssd.chunk_scan_bwd_dc import chunk_scan_bwd_dc
from linattn_edu.reference.ssd.chunk_scan_bwd_dstates import chunk_scan_bwd_dstates
from linattn_edu.reference.ssd.chunk_scan_chunk_state_bwd_dx import chunk_scan_chunk_state_bwd_dx
from linattn_edu.reference.ssd.chunk_state import chunk_state
from linattn_edu.reference.ssd.chunk_state_bwd_db import chunk_state_bwd_db
from linattn_edu.reference.ssd.ema import ema
from linattn_edu.reference.ssd.state_passing import state_passing
from linattn_edu.reference.ssd.state_passing_bwd import state_passing_bwd
from linattn_edu.reference.tiles import from_chunks, to_chunks


@dataclass(frozen=True)
class Case:
    """Sizes of the inputs that a stage is checked on."""

    B: int
    T: int
    H: int
    HV: int
    K: int = 20
    V: int = 40
    C: int = 16  # tokens of a chunk; 0 without chunks

    def said(self, letters: str) -> str:
        """The sizes in words; letters: what the stage calls H, HV, K and V."""
        sizes = zip(letters.split(), (self.H, self.HV, self.K, self.V), strict=True)
        named = ", ".join(f"{letter} = {size}" for letter, size in sizes if letter != "-")
        chunks = f" in chunks of {self.C}" if self.C else ""
        if self.C and (last := self.T % self.C):
            chunks += f", the last one short: {last} tokens"
        return f"B = {self.B}, T = {self.T} tokens{chunks}; {named}"


CASES = (Case(1, 32, 1, 1), Case(2, 40, 2, 4))
PIECES = (Case(1, 64, 1, 1), Case(2, 72, 1, 2))
WINDOWS = (Case(1, 32, 1, 1, K=4, C=0), Case(2, 40, 1, 1, K=4, C=0))
LAYERS = (Case(1, 16, 1, 1, C=0), Case(2, 20, 2, 4, C=0))
CALLS = (Case(1, 2, 1, 1, C=0), Case(4, 3, 2, 4, C=0))


@dataclass(frozen=True)
class Family:
    """Stages that share their inputs."""

    inputs: Callable[[Case], dict[str, object]]
    letters: str  # what they call H, HV, K and V; "-" for what they have not
    cases: tuple[Case, ...] = CASES


@dataclass(frozen=True)
class Puzzle:
    """One stage: its inputs, the truth, and what the axes of its outputs are called."""

    family: Family
    chapter: str  # and the name of its file; of a warm-up its number and name
    truth: Callable | None  # the reference stage, with the puzzle's arguments; of a warm-up none
    arguments: tuple[str, ...]  # tensors of the family's inputs
    options: tuple[str, ...]  # numbers of them
    outputs: dict[str, str]  # name -> axes

    @property
    def number(self) -> str:
        """The number of its chapter, such as 05 or 12d, or of a warm-up, such as w1."""
        return self.chapter.partition("_")[0]

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return self.chapter.partition("_")[2]


def decay(g: Tensor, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """gc of gate_cumsum, and the decay matrix of each chunk [B, T, HV, C]."""
    gc = gate_cumsum(g, chunk_size=chunk_size)
    return gc, from_chunks(decay_matrix(to_chunks(gc, chunk_size)), g.shape[1])


def pairs_bwd(q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, *pairs: Tensor) -> tuple[Tensor, ...]:
    """kda_intra_bwd of dP and dL alone, with nothing from outside the chunk."""
    NT = -(-q.shape[1] // pairs[0].shape[-1])
    no_rows = [torch.zeros_like(gc)] * 3
    no_ends = gc.new_zeros(len(gc), NT, *gc.shape[2:])
    return kda_intra_bwd(q, k, beta, gc, *pairs, *no_rows, no_ends, torch.zeros_like(beta))


def tokens_bwd(*tensors: Tensor, scale: float) -> tuple[Tensor, ...]:
    """dk, dv, db, dw, dh0 of GDN-2 from q, k, v, g, b, w, the states h before tokens, do, dht."""
    *tokens, dS = tensors
    found = []
    for t in reversed(range(tokens[0].shape[1])):
        q, k, v, g, b, w, h, do = (x[:, t : t + 1] for x in tokens)
        gates = {"gk": g, "write": w, "initial_state": h[:, 0]}
        _, dk, dv, _, db, _, _, dS, dw = recurrent_bwd(
            q, k, v, None, b, do, dS, **gates, scale=scale
        )
        found.append((dk, dv, db, dw))
    return *(torch.cat(x[::-1], 1) for x in zip(*found, strict=True)), dS


def rows_bwd(*tensors: Tensor, **options: float) -> tuple[Tensor, ...]:
    """dplr_intra_bwd of q, k, a, b, gc after dplr_rows_bwd of the rest, with nothing of scores."""
    *scores, dqg, dkg, dag, dbg, dgl = dplr_rows_bwd(*tensors[5:], **options)
    no_scores = map(torch.zeros_like, scores)
    return dplr_intra_bwd(*tensors[:5], *no_scores, dqg, dkg, dag, dbg, dgl)


def map_and_state(*piece: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """S_ext and M of a piece k, w, u, gc; what it makes of the state S_in, the last argument."""
    S_ext, M = piece_map(*piece[:-1], chunk_size=chunk_size)
    _, S_out = cp_merge(S_ext[:, None], M[:, None], piece[-1])
    return S_ext, M, S_out


def map_and_gradient(*piece: Tensor, **options: float) -> tuple[Tensor, Tensor, Tensor]:
    """dS_ext and dM of a piece q, k, w, gc, do, dv_out; what it makes of dS_out, the last."""
    dS_ext, dM = piece_map_bwd(*piece[:-1], **options)
    _, dS_in = cp_merge_bwd(dS_ext[:, None], dM[:, None], piece[-1])
    return dS_ext, dM, dS_in


def in_pieces(
    k: Tensor, w: Tensor, u: Tensor, gc: Tensor, S: Tensor, *, chunk_size: int, L: int
) -> tuple[Tensor, ...]:
    """S_ext, M and S_in of the pieces of L tokens; v_new and the final state of the whole."""
    options = {"chunk_size": chunk_size}
    parts = [slice(a, a + L) for a in range(0, w.shape[1], L)]
    maps = [piece_map(*(x[:, part] for x in (k, w, u, gc)), **options) for part in parts]
    S_ext, M = (torch.stack(x, 1) for x in zip(*maps, strict=True))
    _, v_new, final_state = state(k, w, u, gc, S, **options, output_final_state=True)
    return S_ext, M, cp_merge(S_ext, M, S)[0], v_new, final_state


def conv_in_pieces(
    x: Tensor, weight: Tensor, bias: Tensor, S: Tensor, *, cuts: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """S_ext and S_in of the pieces; y and the last tokens of the whole."""
    W, at = weight.shape[1], torch.tensor(cuts)
    S_ext = [halo.last_tokens(x_b[None], None, at[:-1], at[1:], W)[0] for x_b in x]
    u = torch.cat([S.mT, x], 1)
    S_in = torch.stack([u[:, c : c + W].mT for c in cuts[:-1]], 1)
    y, S_out = causal_conv1d(x, weight, bias, S, activation="silu", output_final_state=True)
    return torch.stack(S_ext), S_in, y, S_out


def layer(*tensors: Tensor, eps: float) -> tuple[Tensor, ...]:
    """q, k, v, y, do and dz of a layer from q, k, v, z, g, beta, wq, wk, wv, weight, dy."""
    *qkv, z, g, beta, wq, wk, wv, weight, dy = tensors
    q, k, v = (
        causal_conv1d(x.flatten(2), w.flatten(0, 1), activation="silu")[0].view_as(x)
        for x, w in zip(qkv, (wq, wk, wv), strict=True)
    )
    q, k = (l2norm(x, eps)[0] for x in (q, k))
    o, _ = recurrent(q, k, v, g, beta)
    weight = weight.expand(o.shape[-2:])
    y, rstd = rms_norm_gated(o, weight, None, z, eps=eps)
    do, _, _, dz = rms_norm_gated_bwd(o, weight, None, z, rstd, dy)
    return q, k, v, y, do, dz


def served(*tokens_and_pool: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o and the pool after a call with q, k, v, g, beta [N, T, ...], pool, slots, accepted."""
    *tokens, pool, slots, accepted = tokens_and_pool
    N, T = slots.shape
    pool, bounds = pool.clone(), list(range(0, N * T + 1, T))
    flat = (x.flatten(0, 1)[None] for x in tokens)
    o = recurrent_pool(*flat, pool, slots, accepted, scale=scale, bounds=bounds)
    return o.view_as(tokens[2]), pool


@functools.cache
def drawn(case: Case) -> dict[str, object]:
    """Everything that a stage of the delta rule may be given, in float64, by name."""
    i = testing.gdn_inputs(
        case.B, case.T, case.H, case.HV, case.K, case.V, dtype=torch.float64, initial_state=True
    )
    C = case.C
    gc = gate_cumsum(i.g, chunk_size=C)
    A = solve(i.k, i.beta, chunk_size=C)
    w, u = wy(i.k, i.v, i.beta, gc, A)
    P, _, AG = intra_chunk(i.q, i.k, i.beta, gc, chunk_size=C, return_inverse=True, gated=True)
    h, v_new, _ = state(i.k, w, u, gc, i.initial_state, chunk_size=C)
    g_hard = i.g.clone()
    g_hard[:, 7] = -100.0  # e^100 is infinite in float32
    random = torch.Generator().manual_seed(1)
    do, dht, a, A_log, dt_bias = (
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in (i.v.shape, i.initial_state.shape, gc.shape, gc.shape[2:], gc.shape[2:])
    )
    scale, options = case.K**-0.5, {"chunk_size": C}
    _, dk_out, dv_out, dgc = output_bwd(i.q, i.k, v_new, h, gc, do, scale=scale, **options)
    dh, dv_new, _ = state_bwd(i.q, i.k, w, gc, do, dv_out, dht, scale=scale, **options)
    return {
        **i.asdict(),
        "g_hard": g_hard,
        "gc": gc,
        "A": A,
        "P": P,
        "AG": AG,
        "w": w,
        "u": u,
        "h": h,
        "v_new": v_new,
        "do": do,
        "dht": dht,
        "dk_out": dk_out,
        "dv_out": dv_out,
        "dgc": dgc,
        "dh": dh,
        "dv_new": dv_new,
        "a": a,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "chunk_size": C,
        "scale": scale,
        "L": 2 * C,
    }


@functools.cache
def drawn_kda(case: Case) -> dict[str, object]:
    """The same for a gate a channel, some of which close at one token."""
    i = testing.kda_inputs(case.B, case.T, case.H, case.HV, case.K, case.V, dtype=torch.float64)
    i.g[:, 7, :, ::4] = -100.0
    gc = gate_cumsum(i.g, chunk_size=case.C)
    random = torch.Generator().manual_seed(1)
    dP, dL = (
        from_chunks(to_chunks(x, case.C).tril(-strict), case.T)
        for strict, x in enumerate(
            torch.randn(2, *gc.shape[:3], case.C, generator=random, dtype=torch.float64)
        )
    )
    return {
        "q": i.q,
        "k": i.k,
        "beta": i.beta,
        "gc": gc,
        "dP": dP,
        "dL": dL,
        "chunk_size": case.C,
    }


@functools.cache
def drawn_gdn2(case: Case) -> dict[str, object]:
    """The same for GDN-2, with the state that enters each token, which may be any."""
    i = testing.kda_inputs(case.B, case.T, case.H, case.HV, case.K, case.V, dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    b, w, do, dht, h = (
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in (
            i.g.shape, i.v.shape, i.v.shape,
            (case.B, case.HV, case.K, case.V), (*i.g.shape, case.V),
        )
    )  # fmt: skip
    gates = {"b": 2 * b.sigmoid(), "w": w.sigmoid()}
    return {**i.asdict(), **gates, "do": do, "dht": dht, "h": h, "scale": case.K**-0.5}


@functools.cache
def drawn_dplr(case: Case) -> dict[str, object]:
    """Rows of DPLR with HV heads and the gates of `drawn_kda`, and the states around each chunk."""
    gc = drawn_kda(case)["gc"]
    values = (*gc.shape[:3], case.V)
    states = (case.B, -(-case.T // case.C), *gc.shape[2:], case.V)
    shapes = dict.fromkeys("qkab", gc.shape) | dict.fromkeys(("v", "e", "do", "dx"), values)
    shapes |= dict.fromkeys(("h", "dh"), states)
    random = torch.Generator().manual_seed(1)
    return {
        **{n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in shapes.items()},
        "gc": gc,
        "chunk_size": case.C,
        "scale": case.K**-0.5,
    }


@functools.cache
def drawn_conv(case: Case) -> dict[str, object]:
    """What a short convolution of V channels over K tokens is given, in pieces."""
    random = torch.Generator().manual_seed(1)
    x, weight, bias, initial_state = (
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in (
            (case.B, case.T, case.V), (case.V, case.K), (case.V,), (case.B, case.V, case.K)
        )
    )  # fmt: skip
    return {
        "x": x,
        "weight": weight,
        "bias": bias,
        "initial_state": initial_state,
        "cuts": (0, 1, 3, case.T // 2, case.T),
    }


@functools.cache
def drawn_layer(case: Case) -> dict[str, object]:
    """What a layer has projected, its taps and the weight of its norm."""
    i = testing.gdn_inputs(case.B, case.T, case.H, case.HV, case.K, case.V, dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    heads = {"q": (case.H, case.K), "k": (case.H, case.K), "v": (case.HV, case.V)}
    values = (case.B, case.T, *heads["v"])
    shapes = {
        **{name: (case.B, case.T, *head) for name, head in heads.items()},
        **{f"w{name}": (*head, 4) for name, head in heads.items()},
        "z": values,
        "dy": values,
        "weight": values[-1:],
    }
    return {
        **{n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in shapes.items()},
        "g": i.g,
        "beta": i.beta,
        "eps": 1e-6,
    }


@functools.cache
def drawn_calls(case: Case) -> dict[str, object]:
    """The same for B sequences that decode T tokens a call, with states in a pool of slots."""
    i = testing.gdn_inputs(case.B, case.T, case.H, case.HV, case.K, case.V, dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    n_slots = case.B * case.T + 2
    pool = torch.randn(n_slots, case.HV, case.K, case.V, generator=random, dtype=torch.float64)
    slots = torch.randperm(n_slots, generator=random)[: case.B * case.T].view(case.B, case.T)
    slots[2:3] = -1  # a place without a sequence
    accepted = torch.tensor([2, 3, 1, 1])[: case.B]
    return {
        **i.asdict(),
        "pool": pool,
        "slots": slots,
        "accepted": accepted,
        "scale": case.K**-0.5,
    }


@functools.cache
def drawn_ssd(case: Case) -> dict[str, object]:
    """The same for Mamba-2, with H groups of HV heads, K rows and V columns of the state."""
    i = testing.ssd_inputs(case.B, case.T, case.HV, case.H, case.V, case.K, dtype=torch.float64)
    options = {"chunk_size": case.C}
    random = torch.Generator().manual_seed(1)
    first = i.initial_states.mT.contiguous()
    dy, dht = (torch.randn(x.shape, generator=random, dtype=torch.float64) for x in (i.x, first))
    A = i.A / 8  # a chunk keeps some of its state, and no gradient is too small to be read
    step, gc = chunk_cumsum(i.dt, A, i.dt_bias, softplus=True, **options)
    s = chunk_state(i.B, i.x, step, gc, **options)
    h, _ = state_passing(s, gc, first, **options)
    dh_out = chunk_scan_bwd_dstates(i.C, gc, dy, **options)
    ds, _, _ = state_passing_bwd(dh_out, gc, h, dht, **options)
    dB_state, _, _ = chunk_state_bwd_db(i.B, i.x, step, gc, ds, **options)
    return {
        "C": i.C,
        "B": i.B,
        "x": i.x,
        "step": step,
        "gc": gc,
        "g": step * A,
        "h": h,
        "dy": dy,
        "dht": dht,
        "dh_out": dh_out,
        "ds": ds,
        "dB_state": dB_state,
        "first": first[:, :, 0].contiguous(),
        **options,
    }


HEAD = "batch token head"
PAIRS = "batch token head token-of-chunk"
STATE = "batch head row column"
STATES = "batch chunk head row column"
MAPS = "batch piece head row column"
CHUNKED = ("chunk_size",)
GDN = Family(drawn, "H HV K V")
KDA = Family(drawn_kda, "H HV K V")
GDN2 = Family(drawn_gdn2, "H HV K V", LAYERS)
DPLR = Family(drawn_dplr, "- H K V")
CUT = Family(drawn, "H HV K V", PIECES)
CONV = Family(drawn_conv, "- - W D", WINDOWS)
LAYER = Family(drawn_layer, "H HV K V", LAYERS)
DECODING = Family(drawn_calls, "H HV K V", CALLS)
SSD = Family(drawn_ssd, "G H N P")
EMA = Family(drawn_ssd, "- H - D")
STAGES = {
    puzzle.number: puzzle
    for puzzle in (
        Puzzle(
            GDN,
            "01_recurrent",
            lambda *x, **more: recurrent(*x[:5], initial_state=x[5], **more),
            ("q", "k", "v", "g", "beta", "initial_state"),
            ("scale",),
            {"o": f"{HEAD} column", "final_state": STATE},
        ),
        Puzzle(GDN, "02_gate_cumsum", decay, ("g_hard",), CHUNKED, {"gc": HEAD, "G": PAIRS}),
        Puzzle(GDN, "03_solve", solve, ("k", "beta"), CHUNKED, {"A": PAIRS}),
        Puzzle(
            GDN,
            "04_wy",
            wy,
            ("k", "v", "beta", "gc", "A"),
            (),
            {"w": f"{HEAD} row", "u": f"{HEAD} column"},
        ),
        Puzzle(
            GDN,
            "05_state",
            lambda *x, **more: state(*x, **more, output_final_state=True),
            ("k", "w", "u", "gc", "initial_state"),
            CHUNKED,
            {"h": STATES, "v_new": f"{HEAD} column", "final_state": STATE},
        ),
        Puzzle(
            GDN,
            "06_output",
            output,
            ("q", "k", "v_new", "h", "gc"),
            ("scale", *CHUNKED),
            {"o": f"{HEAD} column"},
        ),
        Puzzle(
            KDA,
            "07_kda_intra",
            kda_intra,
            ("q", "k", "beta", "gc"),
            CHUNKED,
            {"P": PAIRS, "A": PAIRS},
        ),
        Puzzle(
            GDN,
            "08_output_bwd",
            output_bwd,
            ("q", "k", "v_new", "h", "gc", "do"),
            ("scale", *CHUNKED),
            {"dq": f"{HEAD} row", "dk": f"{HEAD} row", "dv_new": f"{HEAD} column", "dgc": HEAD},
        ),
        Puzzle(
            GDN,
            "09_state_bwd",
            state_bwd,
            ("q", "k", "w", "gc", "do", "dv_out", "dht"),
            ("scale", *CHUNKED),
            {"dh": STATES, "dv_new": f"{HEAD} column", "dh0": STATE},
        ),
        Puzzle(
            GDN,
            "10_wy_bwd",
            lambda *x: wy_bwd(*x, torch.zeros_like(x[3]))[:3],
            ("k", "v", "beta", "gc", "A", "h", "v_new", "dh", "dv_new", "dk_out"),
            (),
            {"dk": f"{HEAD} row", "dv": f"{HEAD} column", "dbeta": HEAD},
        ),
        Puzzle(
            KDA,
            "11_kda_intra_bwd",
            pairs_bwd,
            ("q", "k", "beta", "gc", "dP", "dL"),
            (),
            {
                "dq": f"{HEAD} channel",
                "dk": f"{HEAD} channel",
                "dbeta": HEAD,
                "dgc": f"{HEAD} channel",
            },
        ),
        Puzzle(
            GDN,
            "12_gate_bwd",
            gate_bwd,
            ("dgc", "a", "A_log", "dt_bias"),
            CHUNKED,
            {"da": HEAD, "dA_log": "head", "ddt_bias": "head"},
        ),
        Puzzle(
            GDN2,
            "12d_gdn2",
            tokens_bwd,
            ("q", "k", "v", "g", "b", "w", "h", "do", "dht"),
            ("scale",),
            {
                "dk": f"{HEAD} row",
                "dv": f"{HEAD} column",
                "db": f"{HEAD} row",
                "dw": f"{HEAD} column",
                "dh0": STATE,
            },
        ),
        Puzzle(
            DPLR,
            "12e_dplr",
            rows_bwd,
            ("q", "k", "a", "b", "gc", "v", "e", "do", "dx", "h", "dh"),
            ("scale", *CHUNKED),
            dict.fromkeys(("dq", "dk", "da", "db", "dgc"), f"{HEAD} channel"),
        ),
        Puzzle(
            SSD,
            "13_ssd",
            chunk_scan,
            ("C", "B", "x", "step", "gc", "h"),
            CHUNKED,
            {"y": f"{HEAD} column"},
        ),
        Puzzle(
            SSD,
            "14_chunk_scan_bwd_dstates",
            chunk_scan_bwd_dstates,
            ("C", "gc", "dy"),
            CHUNKED,
            {"dh_out": STATES},
        ),
        Puzzle(
            SSD,
            "15_state_passing_bwd",
            state_passing_bwd,
            ("dh_out", "gc", "h", "dht"),
            CHUNKED,
            {"ds": STATES, "dlast": "batch chunk head", "dh0": STATE},
        ),
        Puzzle(
            SSD,
            "16_chunk_state_bwd_db",
            chunk_state_bwd_db,
            ("B", "x", "step", "gc", "ds"),
            CHUNKED,
            {"dB_state": "batch token group row", "dgc": HEAD, "dlast": "batch chunk head"},
        ),
        Puzzle(
            SSD,
            "17_chunk_scan_bwd_dc",
            chunk_scan_bwd_dc,
            ("C", "B", "x", "step", "gc", "h", "dy", "dB_state"),
            CHUNKED,
            {"dC": "batch token group row", "dB": "batch token group row", "dgc": HEAD},
        ),
        Puzzle(
            SSD,
            "18_chunk_scan_chunk_state_bwd_dx",
            lambda *x, **more: chunk_scan_chunk_state_bwd_dx(*x, **more)[:2],
            ("C", "B", "x", "step", "gc", "ds", "dy"),
            CHUNKED,
            {"dx": f"{HEAD} column", "dstep": HEAD},
        ),
        Puzzle(
            SSD,
            "19_chunk_scan_bwd_da_cs",
            chunk_scan_bwd_da_cs,
            ("C", "B", "x", "step", "gc", "dy"),
            CHUNKED,
            {"dgc": HEAD},
        ),
        Puzzle(
            EMA,
            "20_ema",
            lambda x, g, gc, S, **more: ema(x, g, gc, None, S, **more, output_final_state=True),
            ("x", "g", "gc", "first"),
            CHUNKED,
            {
                "y": f"{HEAD} channel",
                "h": "batch chunk head channel",
                "final_state": "batch head channel",
            },
        ),
        Puzzle(
            GDN,
            "21_cp_merge",
            map_and_state,
            ("k", "w", "u", "gc", "initial_state"),
            CHUNKED,
            {
                "S_ext": STATE,
                "M": STATE,
                "S_out": STATE,
            },
        ),
        Puzzle(
            GDN,
            "22_cp_merge_bwd",
            map_and_gradient,
            ("q", "k", "w", "gc", "do", "dv_out", "dht"),
            ("scale", *CHUNKED),
            {"dS_ext": STATE, "dM": STATE, "dS_in": STATE},
        ),
        Puzzle(
            CONV,
            "23_cp_conv",
            conv_in_pieces,
            ("x", "weight", "bias", "initial_state"),
            ("cuts",),
            {
                "S_ext": "batch piece channel place",
                "S_in": "batch piece channel place",
                "y": "batch token channel",
                "S_out": "batch channel place",
            },
        ),
        Puzzle(
            GDN,
            "24_fusion",
            scan_bwd,
            ("q", "k", "beta", "gc", "P", "AG", "do", "dht"),
            ("scale",),
            {"dh": STATES, "Z": f"{HEAD} column", "dv": f"{HEAD} column", "dh0": STATE},
        ),
        Puzzle(
            CUT,
            "25_few_heads",
            in_pieces,
            ("k", "w", "u", "gc", "initial_state"),
            (*CHUNKED, "L"),
            {
                "S_ext": MAPS,
                "M": MAPS,
                "S_in": MAPS,
                "v_new": f"{HEAD} column",
                "final_state": STATE,
            },
        ),
        Puzzle(
            DECODING,
            "26_decoding",
            served,
            ("q", "k", "v", "g", "beta", "pool", "slots", "accepted"),
            ("scale",),
            {"o": "sequence token head column", "pool": "slot head row column"},
        ),
        Puzzle(
            LAYER,
            "27_model_end_to_end",
            layer,
            ("q", "k", "v", "z", "g", "beta", "wq", "wk", "wv", "weight", "dy"),
            ("eps",),
            {
                "q": f"{HEAD} channel",
                "k": f"{HEAD} channel",
                **dict.fromkeys(("v", "y", "do", "dz"), f"{HEAD} column"),
            },
        ),
    )
}
