"""``python -m linattn_edu puzzle``: stages with blanks, checked against the reference stages."""

import argparse
import ast
import functools
import importlib.util
import math
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from linattn_edu import testing
from linattn_edu.cp import halo
from linattn_edu.ops.check import interpreted, triton_problem
from linattn_edu.reference.delta.causal_conv1d import causal_conv1d
from linattn_edu.reference.delta.cp_merge import cp_merge, piece_map
from linattn_edu.reference.delta.cp_merge_bwd import cp_merge_bwd, piece_map_bwd
from linattn_edu.reference.delta.fused import intra
from linattn_edu.reference.delta.fused_bwd import scan_bwd
from linattn_edu.reference.delta.gate_bwd import gate_bwd
from linattn_edu.reference.delta.gate_cumsum import decay_matrix, gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.delta.kda_intra_bwd import kda_intra_bwd
from linattn_edu.reference.delta.l2norm import l2norm
from linattn_edu.reference.delta.output import output
from linattn_edu.reference.delta.output_bwd import output_bwd
from linattn_edu.reference.delta.recurrent import recurrent, recurrent_pool
from linattn_edu.reference.delta.rms_norm_gated import rms_norm_gated, rms_norm_gated_bwd
from linattn_edu.reference.delta.solve import solve
from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.reference.delta.wy import wy
from linattn_edu.reference.delta.wy_bwd import wy_bwd
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
from linattn_edu.teaching import choose_device

WHERE = "https://github.com/linattn-edu/linattn_edu"
HINTS = 3
UNSAID = {"chunk_size", "scale", "eps"}  # options that a case's sizes say, or that follow from them
STILL = "still a blank"
BLANK = re.compile(r"^(?P<left>\s*(?:return\b|[^=#]*?[-+*/]?=)) (?P<right>.*?)  # blank: ")
# largest error of an entry, relative to the largest entry of the output
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class Wrong(Exception):
    """What is wrong with a reader's stage, in lines for the reader."""


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
    chapter: str  # and the name of its file
    truth: Callable  # the reference stage, with the puzzle's arguments
    arguments: tuple[str, ...]  # tensors of the family's inputs
    options: tuple[str, ...]  # numbers of them
    outputs: dict[str, str]  # name -> axes

    @property
    def number(self) -> str:
        """The number of its chapter, two digits."""
        return self.chapter[:2]

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return self.chapter[3:]


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
    P, _, AG = intra(i.q, i.k, i.beta, gc, chunk_size=C, return_inverse=True, gated=True)
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
    step, gc = chunk_cumsum(i.dt, i.A, i.dt_bias, softplus=True, **options)
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
        "g": step * i.A,
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
WITHIN = {"row", "column", "channel", "token-of-chunk", "place"}  # axes inside of a unit of work
CHUNKED = ("chunk_size",)
GDN = Family(drawn, "H HV K V")
KDA = Family(drawn_kda, "H HV K V")
CUT = Family(drawn, "H HV K V", PIECES)
CONV = Family(drawn_conv, "- - W D", WINDOWS)
LAYER = Family(drawn_layer, "H HV K V", LAYERS)
DECODING = Family(drawn_calls, "H HV K V", CALLS)
SSD = Family(drawn_ssd, "G H N P")
EMA = Family(drawn_ssd, "- H - D")
PUZZLES = {
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


# ---- files


def folder() -> Path:
    """The folder ``puzzles``: of the working directory, of one above it, or beside the library."""
    for root in (Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[1]):
        if (root / "puzzles" / "solutions").is_dir():
            return root / "puzzles"
    raise Wrong(
        "The puzzles are files of the repository, which the installed package does not have.\n"
        f"Get them with: git clone {WHERE}\n"
        "and run the command in that folder."
    )


def _short(path: Path) -> Path:
    """The path as seen from the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find(name: str) -> Puzzle:
    """The puzzle of a number ("05", "5") or of a stage ("state", "05_state")."""
    for puzzle in PUZZLES.values():
        if name.zfill(2) == puzzle.number or name in (puzzle.stage, puzzle.chapter):
            return puzzle
    raise Wrong(f"There is no puzzle {name}; there are {', '.join(PUZZLES)}.")


def blanked(solution: str) -> str:
    """The puzzle of a solution: what a line marked ``# blank:`` assigns or returns becomes ``...``.

    Raises:
        ValueError: a mark stands on a line that assigns and returns nothing.
    """
    lines = solution.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if "# blank:" in line:
            found = BLANK.match(line)
            if found is None:
                raise ValueError(f"line {i + 1} is marked as a blank and assigns nothing: {line}")
            lines[i] = f"{found['left']} ...  # blank: {line[found.end() :]}"
    return "".join(lines)


def hint(puzzle: Puzzle, level: int) -> str:
    """Hint 1 (the idea), 2 (what is multiplied by what) or 3 (nearly the lines)."""
    text = (folder() / "hints" / f"{puzzle.chapter}.md").read_text()
    hints = re.split(r"^## .*\n", text, flags=re.M)[1:]
    if not 1 <= level <= len(hints):
        raise Wrong(f"Hints are numbered from 1 to {len(hints)}, got {level}.")
    return hints[level - 1].strip()


def solution(puzzle: Puzzle) -> str:
    """The solved file."""
    return (folder() / "solutions" / f"{puzzle.chapter}.py").read_text()


# ---- the reader's file


def load(path: Path) -> ModuleType:
    """Run a reader's file. Its kernels are compiled or interpreted, as Triton was imported."""
    spec = importlib.util.spec_from_file_location(f"puzzle_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with reported(path):
        spec.loader.exec_module(module)
    return module


def open_blanks(path: Path) -> dict[str, list[str]]:
    """Function -> its blanks that are still open, as "file:line: what belongs there"."""
    text = path.read_text()
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Wrong(f"{path}:{error.lineno}: SyntaxError: {error.msg}") from None
    lines, found = text.splitlines(), {}
    for function in (x for x in tree.body if isinstance(x, ast.FunctionDef)):
        nodes = (x for x in ast.walk(function) if isinstance(x, ast.stmt))
        for node in sorted(nodes, key=lambda x: x.lineno):
            value = getattr(node, "value", None)
            statement = isinstance(node, ast.Assign | ast.AugAssign | ast.Return)
            if statement and isinstance(value, ast.Constant) and value.value is ...:
                what = lines[node.lineno - 1].partition("# blank: ")[2]
                blank = f"{path}:{node.lineno}: {STILL}" + (f": {what}" if what else "")
                found.setdefault(function.name, []).append(blank)
    return found


@contextmanager
def reported(path: Path | None) -> Iterator[None]:
    """Turn what a reader's code raises into `Wrong`, with the line of the reader's file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Wrong(_where(error, path)) from None


def _where(error: BaseException, path: Path | None) -> str:
    """The innermost line of the file that an exception went through, and what it says."""
    place = _line(error, path) if path else ""
    while error.__cause__ is not None:  # Triton wraps what a kernel raises
        error = error.__cause__
        place = (_line(error, path) if path else "") or place
    said = str(error).strip()
    return f"{place}{type(error).__name__}" + (f": {said}" if said else "")


def _line(error: BaseException, path: Path) -> str:
    """The line of the file in an exception's own trace, "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    text = path.read_text()
    # the compiler counts lines from the kernel's first one
    source, node = getattr(error, "src", None), getattr(error, "node", None)
    if node is not None and source in text:
        lines.append(text.partition(source)[0].count("\n") + node.lineno)
    return f"{path}:{lines[-1]}: {text.splitlines()[lines[-1] - 1].strip()}\n" if lines else ""


# ---- the check


def compare(puzzle: Puzzle, got: object, expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Raise Wrong with the first wrong entry of each output that is not what the reference has."""
    got = got if isinstance(got, tuple | list) else (got,)
    if len(got) != len(expected):
        names = ", ".join(puzzle.outputs)
        raise Wrong(f"must return {len(expected)} tensors ({names}), returned {len(got)}")
    outputs = list(zip(puzzle.outputs.items(), got, expected, strict=True))
    for (name, axes), x, ref in outputs:
        if not isinstance(x, Tensor):
            raise Wrong(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape != ref.shape:
            raise Wrong(f"{name} must have shape {list(ref.shape)} ({axes}), got {list(x.shape)}")
        if x.dtype != dtype:
            raise Wrong(f"{name} must be {dtype}, got {x.dtype}")
    wrong = [
        line
        for (name, axes), x, ref in outputs
        if (line := first_wrong(name, axes, x.detach().double().cpu(), ref, TOLERANCE[dtype]))
    ]
    if wrong:
        raise Wrong("\n".join(wrong))


def first_wrong(name: str, axes: str, x: Tensor, ref: Tensor, tol: float) -> str | None:
    """The first entry of x that is further from ref's than tol times ref's largest."""
    bad = differs(x, ref, tol)
    if not bad.any():
        return None
    first = tuple(bad.nonzero()[0].tolist())
    at = ", ".join(f"{axis} {i}" for axis, i in zip(axes.split(), first, strict=True))
    value = x[first].item()
    note = ", NaN: not written, or from a number that was not" if math.isnan(value) else ""
    return (
        f"{name}[{at}]: expected {ref[first].item():.6g}, got {value:.6g}{note} "
        f"(the first of {int(bad.sum())} wrong of {bad.numel()}{only_in(bad, axes)})"
        f"{likeness(x, ref, axes, tol)}"
    )


def differs(x: Tensor, ref: Tensor, tol: float) -> Tensor:
    """Which entries of x are further from ref's than tol times ref's largest; NaN is."""
    return ~((x - ref).abs() <= tol * ref.abs().max())


def only_in(bad: Tensor, axes: str) -> str:
    """Where all wrong entries are, if that is a run of a few heads, chunks or tokens."""
    said = []
    for i, axis in enumerate(axes.split()):
        wrong = bad.movedim(i, 0).reshape(bad.shape[i], -1).any(1).nonzero()[:, 0].tolist()
        run = wrong[-1] - wrong[0] + 1 == len(wrong) < bad.shape[i]
        if run and axis not in WITHIN:
            last = f" to {wrong[-1]}" if len(wrong) > 1 else ""
            said.append(f"{axis} {wrong[0]}{last}")
    return f", all in {', '.join(said)}" if said else ""


def likeness(x: Tensor, ref: Tensor, axes: str, tol: float) -> str:
    """What all of x is of the expected tensor, if one of a few slips explains it."""
    if not ref.numel() > 1 or not ref.abs().max() > 0:
        return ""

    def same(a: Tensor, b: Tensor) -> bool:
        return a.numel() > 1 and bool(b.any()) and not differs(a, b, tol).any()

    names = axes.split()
    if same(-x, ref):
        return "; all have the other sign"
    if x.ndim > 1 and x.shape[-1] == x.shape[-2] and same(x.mT, ref):
        return f"; {names[-2]} and {names[-1]} are swapped"
    factor = ((x * ref).sum() / ref.square().sum()).item()
    if factor and same(x / factor, ref):
        return f"; all are {factor:.4g} times what they should be"
    for i, axis in enumerate(names):
        n = x.shape[i] - 1
        if axis in WITHIN or n < 1:
            continue
        if same(x.flip(i), ref):
            return f"; the order of {axis} is reversed"
        if same(x.narrow(i, 1, n), ref.narrow(i, 0, n)):
            return f"; what belongs to {axis} i stands at {axis} i + 1"
        if same(x.narrow(i, 0, n), ref.narrow(i, 1, n)):
            return f"; what belongs to {axis} i + 1 stands at {axis} i"
    return ""


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x in another precision; numbers of slots stay what they are."""
    return x.to(dtype) if x.is_floating_point() else x


def run(
    puzzle: Puzzle, function: Callable, path: Path | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Check a stage on every case; raise Wrong at the first mistake."""
    for case in puzzle.family.cases:
        inputs = puzzle.family.inputs(case)
        tensors = [_as(dtype, inputs[name]) for name in puzzle.arguments]
        options = {name: inputs[name] for name in puzzle.options}
        more = "".join(f", {x} = {options[x]}" for x in puzzle.options if x not in UNSAID)
        expected = puzzle.truth(*(_as(torch.float64, x) for x in tensors), **options)
        expected = expected if isinstance(expected, tuple) else (expected,)
        try:
            with testing.poison(), reported(path):
                got = function(*(x.to(device, copy=True) for x in tensors), **options)
                if device.type == "cuda":
                    torch.cuda.synchronize()  # what a kernel raises, here
            compare(puzzle, got, expected, dtype)
        except Wrong as wrong:
            raise Wrong(f"{wrong}\nwith {case.said(puzzle.family.letters)}{more}") from None


def verdicts(
    puzzle: Puzzle,
    path: Path | None = None,
    *,
    torch_fn: Callable | None = None,
    kernel_fn: Callable | None = None,
) -> dict[str, str | None]:
    """What is checked -> what is wrong with it, None if nothing is."""
    device, blanks = torch.device("cpu"), {}
    if torch_fn is None or kernel_fn is not None:
        device = choose_device()
        if problem := triton_problem():
            raise Wrong(f"The puzzles need Triton: {problem}.")
    if torch_fn is None and kernel_fn is None:
        path = path or _short(folder() / f"{puzzle.chapter}.py")
        if not path.is_file():
            raise Wrong(f"{path}: there is no such file")
        blanks = open_blanks(path)
        module = load(path)
        torch_fn = getattr(module, f"{puzzle.stage}_torch", None)
        kernel_fn = getattr(module, f"{puzzle.stage}_triton", None)
        if torch_fn is None or kernel_fn is None:
            raise Wrong(f"{path} must have {puzzle.stage}_torch and {puzzle.stage}_triton")
    in_torch = blanks.pop(f"{puzzle.stage}_torch", [])
    in_kernel = [blank for function in blanks.values() for blank in function]
    how = "in the interpreter" if interpreted() else "compiled"
    found = {}
    for part, function, mine, dtype, place in (
        ("PyTorch, float64", torch_fn, in_torch, torch.float64, torch.device("cpu")),
        (f"Triton, float32, {how}", kernel_fn, in_kernel, torch.float32, device),
    ):
        if function is None:
            continue
        try:
            if mine:
                raise Wrong("\n".join(mine))
            run(puzzle, function, path, dtype, place)
            found[part] = None
        except Wrong as wrong:
            found[part] = str(wrong)
    return found


def check(
    name: str,
    path: str | Path | None = None,
    *,
    torch_fn: Callable | None = None,
    kernel_fn: Callable | None = None,
) -> bool:
    """Check a puzzle against the reference stage and print what was found.

    Without a usable GPU the kernel runs in Triton's interpreter, which is turned on as in
    `teaching.setup`: call that, or this, before anything imports triton.

    Args:
        name: "05", or "state".  path: A file with both functions; ``puzzles/05_state.py`` if None.
        torch_fn, kernel_fn: One or both of the functions themselves, in place of a file.
    Returns:
        Whether everything that was checked is right.
    """
    try:
        puzzle = find(name)
        found = verdicts(
            puzzle, None if path is None else Path(path), torch_fn=torch_fn, kernel_fn=kernel_fn
        )
    except Wrong as wrong:
        print(wrong)
        return False
    for part, wrong in found.items():
        said = "right" if wrong is None else "not yet\n" + textwrap.indent(wrong, "  ")
        print(f"{puzzle.number} {puzzle.stage}, {part}: {said}")
    right = not any(found.values())
    if not right:
        print(f"Hints: python -m linattn_edu puzzle {puzzle.number} --hint 1 (to {HINTS})")
    return right


def overview() -> int:
    """Print every puzzle and whether it is solved; 0 if all are."""
    solved = 0
    for puzzle in PUZZLES.values():
        try:
            found = verdicts(puzzle)
        except Wrong as wrong:
            found = {"file": str(wrong)}
        blanks = sum((wrong or "").count(STILL) for wrong in found.values())
        wrong = [part.partition(",")[0] for part, wrong in found.items() if wrong]
        said = f"{blanks} blanks" if blanks else f"not right: {', '.join(wrong)}"
        print(f"{puzzle.number}  {puzzle.stage:<31} {said if wrong else 'solved'}")
        solved += not wrong
    print(f"{solved} of {len(PUZZLES)} solved; python -m linattn_edu puzzle NUMBER checks one")
    return int(solved < len(PUZZLES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("number", nargs="?", help="such as 05; all of them if left out")
    parser.add_argument("--path", type=Path, metavar="FILE", help="instead of puzzles/NN_stage.py")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--hint", type=int, metavar="N", help=f"show hint N, 1 to {HINTS}")
    shown.add_argument("--solution", action="store_true", help="show the solution")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 only if what was checked is right, or what was asked for was shown."""
    try:
        if args.number is None:
            folder()
            return overview()
        puzzle = find(args.number)
        if args.hint is None and not args.solution:
            return int(not check(args.number, args.path))
        print(solution(puzzle) if args.solution else hint(puzzle, args.hint))
        return 0
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
