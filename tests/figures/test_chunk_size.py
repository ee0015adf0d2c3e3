"""Bytes, products and powers of two by the length of a chunk against the formulas."""

import re

import pytest

from benchmarks.cases import CASES, work
from linattn_edu.figures import chunk_size
from linattn_edu.figures.chunk_size import SIZES, costs, powers

CASE = CASES["gdn_train"]
K = V = CASE.K
FOUND = {chunk: costs(CASE, work, chunk) for chunk in SIZES}


@pytest.mark.parametrize("chunk", SIZES)
def test_counts_follow_the_formulas(chunk):
    # tiles of G: two in stages, one fused; beside them rows of 2^gc or 2^(last - gc), and 2^last
    assert powers("staged", chunk) == pytest.approx(2 * chunk + 3 + 1 / chunk)
    assert powers("fused", chunk) == pytest.approx(chunk + 2 + 1 / chunk)
    here, there = FOUND[chunk]["bytes"], FOUND[64]["bytes"]
    # A and the states, each written and read; P and R, each written and read
    assert here["staged"] - there["staged"] == pytest.approx(
        4 * (chunk - 64) + 4 * K * V * (1 / chunk - 1 / 64)
    )
    assert here["fused"] - there["fused"] == pytest.approx(8 * (chunk - 64))


def test_what_the_captions_say():
    with_state = 3 * 2 * K * V / 1e3
    flops = {c: FOUND[c]["products, kFLOP"] for c in SIZES}
    moved = {c: FOUND[c]["bytes"] for c in SIZES}
    assert moved[16]["staged"] / 2 < 4 * K * V / 16, "16: most bytes are states"
    for quantity in (flops, moved):
        assert 1.2 < quantity[64]["fused"] / quantity[16]["fused"] < 1.3, "64: a quarter more"
    assert min(SIZES, key=lambda c: moved[c]["staged"]) == 128 == (K * V) ** 0.5
    assert 0.7 < (flops[128]["fused"] - with_state) / with_state < 1, "128: nearly as many"
    assert flops[256]["fused"] - with_state > with_state < flops[256]["staged"] - with_state


def test_the_frames_show_the_counts():
    frames, _ = chunk_size.figure(CASE, work)
    for chunk, (svg, caption) in zip(SIZES, frames, strict=True):
        for values in FOUND[chunk].values():
            for value in values.values():
                assert f'font-weight="bold" xml:space="preserve">{value:.0f}</text>' in svg
                assert re.search(rf"\b{value:.0f} ", caption)
