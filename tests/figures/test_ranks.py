"""The pieces on four ranks, against the recurrence token by token."""

import torch

from linattn_edu.figures import ranks
from linattn_edu.figures.ranks import CHUNK, RANKS, SCAN, TOKENS, K, merged
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close


def recurrence(part, S):
    """The state after the tokens of a slice, from S."""
    x = ranks.pieces().x
    inputs = (y[:, part] for y in (x.q, x.k, x.v, x.g, x.beta))
    return recurrent(*inputs, initial_state=S[None, None])[1][0, 0]


def test_what_the_ranks_compute_is_the_recurrence():
    found = ranks.pieces()
    S, empty = found.x.initial_state[0, 0], torch.zeros(K, K, dtype=torch.float64)
    for r in range(RANKS):
        part = slice(r * TOKENS, (r + 1) * TOKENS)
        assert_close(f"S_in of rank {r}", found.S_in[r], S, 1e-13)
        S_ext = recurrence(part, empty)
        if r:
            assert_close("S_ext", found.S_ext[r], S_ext, 1e-13)
            assert_close("M S + S_ext", found.M[r] @ S + S_ext, recurrence(part, S), 1e-13)
        S = recurrence(part, S)
        assert_close(f"S_out of rank {r}", found.S_out[r], S, 1e-13)
    assert_close("rank 0 knows", found.S_ext[0], found.S_out[0], 1e-13)
    assert not found.M[0].any()
    sizes = [y.abs().max() for y in (*found.S_in, *found.S_out, *found.S_ext)]
    assert max(sizes) < 3 and min(sizes) > 0.2, "to be seen in squares of size 1"


def test_a_rank_merges_the_maps_before_it_and_no_more():
    frames, _ = ranks.figure()
    assert len(frames) == SCAN + 1
    assert [merged(r, SCAN) for r in range(RANKS)] == list(range(RANKS))
    assert [merged(3, now) for now in range(SCAN + 1)] == [0, 0, 0, 0, 1, 2, 3, 3]
    for now, (svg, _) in enumerate(frames):
        assert svg.count("ready") == sum(r == 0 or merged(r, now) == r for r in range(RANKS))
        # S_ext, M, S and S_out that are not there yet; the last rank makes no map
        there = (RANKS - 1) * ((now >= 1) + (now >= 2)) + RANKS * (now >= SCAN) + 1
        there += sum(merged(r, now) > 0 for r in range(1, RANKS))
        assert svg.count("stroke-dasharray") == 4 * RANKS - there
    assert RANKS * TOKENS // CHUNK == 8
