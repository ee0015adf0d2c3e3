"""Context parallel: every operator on several ranks gives what it gives on one."""

import dataclasses
import functools
import threading

import pytest
import torch
from cp.cp_checks import OPERATORS, TOLERANCES, check, compare, draw, on_one, on_rank
from grids import FULL, few, parametrize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from linattn_edu import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    ema_scan,
    mamba_chunk_scan_combined,
    route,
)
from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.ops import gdn
from linattn_edu.ops.gdn.chunk import chunk
from linattn_edu.ops.kda import chunk as kda_chunk
from linattn_edu.ops.ssd import chunk as ssd

LAYOUTS = ("contiguous", "zigzag")
# one sequence; several, one without tokens, some shorter than a chunk, one over all cuts
BOUNDS = ((0, 100), (0, 10, 10, 37, 38, 90, 100), (0, 3, 97, 100))
operators = pytest.mark.parametrize("operator", OPERATORS)


@functools.cache
def alone(operator, bounds):
    """What is drawn, and what one rank makes of it."""
    drawn = draw(operator, bounds)
    return drawn, on_one(drawn, bounds)


@parametrize(world=(1, 2, 3, 4, 8), layout=LAYOUTS, operator=OPERATORS)
def test_ranks_are_one(operator, layout, world):
    for bounds in BOUNDS:
        drawn, whole = alone(operator, bounds)
        parts = simulate(world, functools.partial(on_rank, drawn, bounds, layout=layout))
        compare(whole, parts, drawn[2], TOLERANCES[torch.float64])


@operators
def test_a_batch_is_cut_alike(operator):
    check(operator, [0, 37], 3, B=2)
    check(operator, [0, 37], 2, B=2, layout="zigzag")
    check(operator, [0, 37], 1, B=2)


@operators
def test_a_token_a_piece(operator):
    """The halo of a convolution comes from several ranks, and its gradient goes to as many."""
    check(operator, [0, 1, 8], 8)
    check(operator, [0, 1, 8], 4, layout="zigzag")


@operators
def test_without_states(operator):
    check(operator, [0, 50, 90], 3, states=False)


@settings(max_examples=60 if FULL else 20, deadline=None)
@given(
    operator=st.sampled_from(list(OPERATORS)),
    layout=st.sampled_from(LAYOUTS),
    world=st.integers(1, 5),
    states=st.booleans(),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_drawn_documents(operator, layout, world, states, lengths):
    bounds = [0]
    for n in [*lengths, 2 * world]:
        bounds.append(bounds[-1] + n)
    check(operator, bounds, world, layout=layout, states=states)


@parametrize(1, operator=OPERATORS, layout=LAYOUTS)
def test_kernels(operator, layout, device):
    world = 3 if layout == "contiguous" else 2
    options = {"impl": "triton", "dtype": torch.float32, "device": device}
    check(operator, [0, 10, 80], world, layout=layout, **options)


@pytest.mark.parametrize("operator", ["ssd", "kda_flags"])
def test_fused_kernels(operator, device):
    """Those of Mamba-2; of Kimi Delta Attention with the gated rows kept between the passes."""
    check(operator, [0, 10, 80], 3, impl="triton", dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("keep", [False, True])
def test_kernels_in_halves(keep, device):
    """KDA that multiplies float32 in halves; maps of pieces are of whole numbers."""
    options = {"allow_neg_eigval": True, "disable_recompute": keep, "impl": "triton"}
    check("kda", [0, 10, 80], 3, dtype=torch.bfloat16, device=device, **options)


DOCUMENTS = [0, 100, 700, 700, 800]


@pytest.mark.parametrize(
    ("bounds", "B", "layout"),
    few(([0, 512], 1, "zigzag"), ([0, 600], 2, "contiguous"), (DOCUMENTS, 1, "contiguous"),
        more=(([0, 512], 1, "contiguous"), ([0, 600], 2, "zigzag"), (DOCUMENTS, 1, "zigzag"))),
    ids=str,
)  # fmt: skip
def test_pieces_of_mamba_2(bounds, B, layout, device, force):
    """Parts of several pieces: one sequence and whole pieces, a batch and a rest, documents."""
    force(SSD_PIECE=128)
    world = 2 if layout == "contiguous" else 1 + (B == 1)
    options = {"impl": "triton", "dtype": torch.bfloat16, "device": device, "chunk_size": 128}
    check("ssd", bounds, world, B=B, layout=layout, **options)


@pytest.mark.parametrize("what", ["ssd_ends", "ssd_ends_bwd"])
def test_a_piece_without_an_end_is_noticed(what, device, force, monkeypatch):
    """Where the map of a part lacks its last piece, or that of gradients its first."""
    force(SSD_PIECE=128)
    stages = ssd.fused_stages("triton")
    make = getattr(stages, what)
    wrong = dataclasses.replace(
        stages, **{what: lambda *x, rows, **y: make(*x, rows=rows[:0], **y)}
    )
    monkeypatch.setattr(ssd, "fused_stages", lambda impl: wrong)
    options = {"impl": "triton", "dtype": torch.bfloat16, "device": device, "chunk_size": 128}
    with pytest.raises(AssertionError, match="relative RMS"):
        check("ssd", [0, 512], 2, **options)


ROUTED = {
    "gdn": (chunk_gated_delta_rule, {"chunk_size": 16, "output_final_state": True}),
    "kda": (chunk_kda, {"chunk_size": 16, "output_final_state": True}),
    "ssd": (mamba_chunk_scan_combined, {"chunk_size": 16, "return_varlen_states": True}),
    "ema": (ema_scan, {"chunk_size": 16, "output_final_state": True}),
    "conv": (causal_conv1d, {"output_final_state": True}),
}


@parametrize(1, operator=ROUTED, kind=((torch.bfloat16, "contiguous"), (torch.float32, "zigzag")))
def test_the_route_of_a_rank(operator, kind, monkeypatch):
    """The kernels that it launches, asked for by itself: without anything that others send."""
    if torch.cuda.is_available():
        pytest.skip("tensors on the CPU run no kernels here")
    from triton.runtime.interpreter import InterpretedFunction

    bounds, world, ran, (dtype, layout) = [0, 10, 10, 37, 100], 3, {}, kind
    f, options = ROUTED[operator]
    _, tokens, shared, *_ = draw(operator, bounds, dtype=dtype)
    original = InterpretedFunction.run

    def run(self, *args, **kwargs):
        ran[threading.get_ident()].append(self.fn.__name__)
        return original(self, *args, **kwargs)

    def on_rank(group, exchange=True):
        context = build_cp_context(torch.tensor(bounds), group, layout=layout)
        own = torch.cat([torch.arange(*part.tokens) for part in context.parts])
        x = {n: t[:, own] for n, t in tokens.items()} | shared
        if not exchange:
            return route(f, **x, cp_context=context, **options)
        ran[threading.get_ident()] = launched = []
        x = {n: t.clone().requires_grad_() for n, t in x.items()}
        out = [y for y in f(**x, cp_context=context, **options) if y.numel()]
        torch.autograd.grad(out, list(x.values()), [torch.ones_like(y) for y in out])
        return launched

    # one rank after the other, each alone
    groups = simulate(world, lambda group: group)
    found = [on_rank(group, exchange=False) for group in groups]
    monkeypatch.setattr(InterpretedFunction, "run", run)
    assert [x.kernels for x in found] == simulate(world, on_rank)
    assert all(("exchange", world, "cp_context") in x.choices for x in found)


def test_ranks_on_other_routes_understand_each_other(device, monkeypatch):
    """Of a rank whose part is packed, or no whole chunks, the backward pass may run in stages."""
    original, here = kda_chunk._fused_passes, threading.local()
    passes = [0, 1, 2]  # in fused stages

    def fused(*args):
        return passes[here.rank] if hasattr(here, "rank") else original(*args)

    monkeypatch.setattr(kda_chunk, "_fused_passes", fused)
    bounds, options = [0, 144], {"impl": "triton"}
    drawn = draw("kda", bounds, dtype=torch.bfloat16, device=device)

    def run(group):
        here.rank = group.rank()
        return on_rank(drawn, bounds, group, **options)

    whole, parts = on_one(drawn, bounds, **options), simulate(3, run)
    compare(whole, parts, drawn[2], TOLERANCES[torch.bfloat16])


def test_what_a_program_is_kept_by():
    """Of two plans with the same shapes, which merge other maps, no program serves both."""
    found = []
    for bounds in ([0, 64], [0, 16, 64]):  # rank 2 goes on from rank 0, or from rank 1
        groups = simulate(4, lambda group: group)
        place = build_cp_context(torch.tensor(bounds), groups[2]).place(
            1, torch.device("cpu"), True
        )
        args = ("nccl", "triton", "", "")  # the last options: group, impl, keep, save
        numbers, rows = chunk._exchange(place.bounds, args)
        found.append((numbers, [x.tolist() for x in rows]))
    assert found[0][1] == found[1][1] and found[0][0] != found[1][0]


def test_activation_checkpointing():
    bounds = [0, 30, 70]
    f, *drawn = draw("gdn", bounds)

    def f_again(**x):
        return checkpoint(lambda: f(**x), use_reentrant=False)

    plain = simulate(2, lambda group: on_rank((f, *drawn), bounds, group))
    again = simulate(2, lambda group: on_rank((f_again, *drawn), bounds, group))
    for one, two in zip(plain, again, strict=True):
        assert torch.equal(one[3][0], two[3][0])
        assert all(torch.equal(g, two[3][2][n]) for n, g in one[3][2].items())


WRONG = {
    "order": ("cp_merge", lambda f: lambda S, M: f(S.flip(1), M.flip(1))),
    "order back": ("cp_merge_bwd", lambda f: lambda S, M: f(S.flip(1), M.flip(1))),
    "transpose": ("cp_merge", lambda f: lambda S, M: f(S, M.mT)),
    "transpose back": ("cp_merge_bwd", lambda f: lambda S, M: f(S, M.mT)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_merge_is_noticed(mistake, monkeypatch):
    name, wrong = WRONG[mistake]
    stages = gdn.stages("reference")
    stages = dataclasses.replace(stages, **{name: wrong(getattr(stages, name))})
    monkeypatch.setattr(chunk, "stages", lambda impl: stages)
    monkeypatch.setattr(chunk, "forward_stages", lambda impl: stages)
    check("gdn", [0, 30], 2)  # where nothing is merged
    with pytest.raises(AssertionError, match="relative RMS"):
        check("gdn", [0, 90], 4)
