"""Contexts: what they say of each rank, and what they and the operators refuse."""

import re

import pytest
import torch
from cp.cp_checks import OPERATORS, draw
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn_edu import causal_conv1d, mamba_chunk_scan_combined
from linattn_edu.cp import build_cp_context, groups, simulate
from linattn_edu.cp.context import PLACES


class Rank:
    """A rank of a group that is never asked for more than its numbers."""

    group_name = "none"

    def __init__(self, rank, world):
        self.numbers = rank, world

    def rank(self):
        return self.numbers[0]

    def size(self):
        return self.numbers[1]


def contexts(bounds, world, **options):
    bounds = torch.tensor(bounds)
    return [build_cp_context(bounds, Rank(r, world), **options) for r in range(world)]


@settings(max_examples=200, deadline=None)
@given(
    layout=st.sampled_from(["contiguous", "zigzag"]),
    world=st.integers(1, 6),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8),
)
def test_every_token_is_on_one_rank_in_its_sequence(layout, world, lengths):
    bounds = [0]
    for n in [*lengths, 2 * world]:
        bounds.append(bounds[-1] + n)
    sequence = torch.repeat_interleave(torch.tensor(bounds).diff())
    all_ranks = contexts(bounds, world, layout=layout)
    tokens, first, last = [], [], []
    for context in all_ranks:
        own = torch.cat([torch.arange(*part.tokens) for part in context.parts])
        tokens += own.tolist()
        counts = context.cu_seqlens_cpu.diff()
        documents = torch.tensor(context.documents)
        assert torch.equal(sequence[own], documents.repeat_interleave(counts))
        assert torch.equal(context.cu_seqlens, context.cu_seqlens_cpu)
        assert (context.tokens, context.num_seqs) == (len(own), len(documents))
        first += [context.documents[n] for n in context.first]
        last += [context.documents[n] for n in context.last]
        for part in context.parts:
            a, b = part.tokens
            goes_on = a not in bounds
            assert (part.head is not None) == goes_on
            assert (part.tail is not None) == (b not in bounds)
            begin = bounds[int(sequence[a])] if goes_on else a
            assert part.before == a - begin
    assert sorted(tokens) == list(range(bounds[-1]))
    assert sorted(first) == sorted(last) == list(range(len(bounds) - 1))


def test_fields():
    one, two, three = contexts([0, 2, 10, 12], 3, conv1d_kernel_size=4)
    assert [c.cu_seqlens.tolist() for c in (one, two, three)] == [[0, 2, 4], [0, 4], [0, 2, 4]]
    assert [c.pre_num_ranks for c in (one, two, three)] == [0, 1, 2]
    assert [c.post_num_ranks for c in (one, two, three)] == [2, 1, 0]
    assert [c.is_first_rank for c in (one, two, three)] == [True, False, False]
    assert [c.is_last_rank for c in (one, two, three)] == [False, False, True]
    assert [c.pre_num_conv_tokens for c in (one, two, three)] == [0, 2, 3]
    assert [c.is_cp_enabled for c in (one, *contexts([0, 5], 1))] == [True, False]
    copy = two.copy_for_backward()
    assert copy.cu_seqlens.data_ptr() != two.cu_seqlens.data_ptr()
    assert torch.equal(copy.cu_seqlens, two.cu_seqlens)
    assert copy.parts == two.parts


def test_a_group_that_was_not_begun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        build_cp_context(torch.tensor([0, 9]), torch.distributed.group.WORLD)


def test_uneven_parts():
    assert [c.tokens for c in contexts([0, 11], 4)] == [2, 3, 3, 3]
    zigzag = contexts([0, 11], 2, layout="zigzag")
    assert [[p.tokens for p in c.parts] for c in zigzag] == [[(0, 2), (8, 11)], [(2, 5), (5, 8)]]


def test_one_rank_needs_no_group():
    bounds = torch.tensor([0, 5, 9])
    for layout in ("contiguous", "zigzag"):
        context = build_cp_context(bounds, layout=layout)
        assert context.cu_seqlens.tolist() == [0, 5, 9]
        assert not context.is_cp_enabled


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cu_seqlens": [0, 3]}, TypeError, "cu_seqlens must be a torch.Tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([1, 9])}, ValueError, "cu_seqlens must begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 9, 8])}, ValueError, "cu_seqlens must not decrease"),
        ({"cu_seqlens": torch.tensor([0, 1])}, ValueError, "a token for each of the 2 parts"),
        ({"layout": "zigzag", "cu_seqlens": torch.tensor([0, 3])}, ValueError, "of the 4 parts"),
        ({"layout": "ring"}, ValueError, "layout must be one of 'contiguous', 'zigzag'"),
        ({"use_tf32x3_affine_chain": False}, ValueError, "leave it out, or give True, got False"),
        ({"group": 2}, TypeError, "group must be a ProcessGroup or None, got int"),
        ({"conv1d_kernel_size": 0}, ValueError, "conv1d_kernel_size must be an integer >= 1"),
        ({"cu_seqlens_cpu": torch.tensor([0, 5, 9])}, ValueError, "must have the shape of"),
    ],
)
def test_a_context_refuses(options, error, message):
    given = {"cu_seqlens": torch.tensor([0, 9]), "group": Rank(0, 2)}
    with pytest.raises(error, match=re.escape(message)):
        build_cp_context(**given | options)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_refuse(operator):
    f, tokens, shared, state, *_ = draw(operator, [0, 9])
    group = Rank(1, 2)
    context = build_cp_context(torch.tensor([0, 9]), group)  # of the tokens from 4 on
    own = {n: t[:, 4:] for n, t in tokens.items()}
    for options, error, message in (
        ({}, ValueError, "must have a row for each of the 0 sequences that begin on rank 1 of 2"),
        ({**tokens, "initial_state": None}, ValueError, "the T=5 tokens that cp_context gives"),
        ({"cp_context": group}, TypeError, "must come from build_cp_context, got Rank"),
    ):
        given = {**own, **shared, "initial_state": state, "cp_context": context}
        with pytest.raises(error, match=re.escape(message)):
            f(**given | options)
    given = {**own, **shared, "initial_state": None}
    with pytest.raises(ValueError, match="cu_seqlens must be None with cp_context"):
        f(**given, cu_seqlens=torch.tensor([0, 5]), cp_context=context)
    group.numbers = 1, 3
    with pytest.raises(
        ValueError, match="built for rank 1 of 2, and its group now has rank 1 of 3"
    ):
        f(**given, cp_context=context)


def test_documents_by_number_are_refused():
    f, tokens, shared, *_ = draw("ssd", [0, 9])
    context = build_cp_context(torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="seq_idx must be None with cp_context"):
        f(**tokens, **shared, initial_state=None, cp_context=context,
          seq_idx=torch.zeros(1, 9, dtype=torch.int32))  # fmt: skip
    x = {n: tokens[n] for n in ("x", "dt", "B", "C")}
    with pytest.raises(ValueError, match="needs cu_seqlens or cp_context"):
        mamba_chunk_scan_combined(**x, A=shared["A"], chunk_size=16, return_varlen_states=True)


def test_the_first_error_of_a_rank_ends_all():
    def rank(group):
        if group.rank() == 1:
            raise KeyError("one")
        f, tokens, *_ = draw("gdn", [0, 9])
        context = build_cp_context(torch.tensor([0, 9]), group)
        f(**{n: t[:, : context.tokens] for n, t in tokens.items()}, cp_context=context)

    with pytest.raises(KeyError, match="one"):
        simulate(2, rank)


def test_a_context_keeps_few_places():
    context = build_cp_context(torch.tensor([0, 5, 9]))
    for B in range(1, 40):
        assert context.place(B, torch.device("cpu")).B == B
    assert len(context._kept) <= PLACES
    assert context.place(39, torch.device("cpu")) is context.place(39, torch.device("cpu"))


def test_a_rank_that_never_calls():
    """The others are told, and do not wait for ever; the error is the same from run to run."""
    bounds = torch.tensor([0, 9])

    def rank(group):
        context = build_cp_context(bounds, group)
        if group.rank() == 1:
            return None
        x = torch.ones(1, context.tokens, 2)
        return causal_conv1d(x, torch.ones(2, 3), cp_context=context)

    with pytest.raises(RuntimeError, match="rank 1 of 3 has ended, and the others wait for its t"):
        simulate(3, rank)


def test_a_context_after_its_simulation():
    contexts = simulate(2, lambda group: build_cp_context(torch.tensor([0, 9]), group))
    x = torch.ones(1, contexts[1].tokens, 2)
    with pytest.raises(ValueError, match=r"of rank 1 of simulate\(\), which is over"):
        causal_conv1d(x, torch.ones(2, 3), cp_context=contexts[1])


@pytest.mark.parametrize("operator", OPERATORS)
def test_arguments_are_refused_before_anything_is_sent(operator, monkeypatch):
    """Each tensor in turn, and what is no tensor: the other ranks get an error of their own, or
    wait for the whole timeout.
    """
    sent = []
    monkeypatch.setattr(groups.Gathering, "__init__", lambda *args: sent.append(args))
    f, tokens, shared, state, *_ = draw(operator, [0, 40])
    context = contexts([0, 40], 2)[0]
    right = {n: x[:, :20] for n, x in tokens.items()} | shared | {"initial_state": state}
    wrong = [{n: torch.cat([x, x])} for n, x in right.items()] + [
        {n: x.int()} for n, x in right.items()
    ]
    for change in [*wrong, {"impl": "fast"}, {"cp_context": 3}]:
        with pytest.raises((TypeError, ValueError)):
            f(**({**right, "cp_context": context} | change))
        assert not sent, change
    with pytest.raises(AttributeError):  # all is well but for what was to be sent
        f(**right, cp_context=context)
    assert sent
