"""Packed sequences: the same bits as each by itself; and what a gradient may depend on."""

from itertools import pairwise

import pytest
import torch
from gdn_checks import (
    DTYPES,
    check,
    cotangents,
    exact,
    inputs,
    no_wait,
    run,
    same_bits,
    spacing,
    triton,
)

from linattn_edu import fused_recurrent_gated_delta_rule

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
IMPLS = ("reference", "triton")
HEADS = 2 if GPU else 1
LENGTHS = (15, 0, 64, 1, 65, 100, 0)
SUMMED = ("dA_log", "ddt_bias")  # over all sequences
# the rows of fla's test_chunk_varlen: H, HV, D, share of open gates, boundaries
ROWS = (
    (4, 4, 60, 0, (0, 15)),
    (4, 4, 64, 0, (0, 256, 500, 1000)),
    (4, 4, 64, 0.5, (0, 256, 500, 1000)),
    (4, 4, 100, 0, (0, 15, 100, 300, 1200, 2000)),
    (2, 4, 64, 0, (0, 256, 500, 1000)),
    (2, 8, 64, 0, (0, 256, 500, 1000)),
)
dtypes = pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[::2], ids=str)
impls = pytest.mark.parametrize("impl", IMPLS)


def boundaries(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def indices(lengths, device, chunk_size=64, dtype=torch.int64):
    """[NT, 2]: sequence of each chunk, its number in the sequence."""
    rows = [(n, c) for n, T in enumerate(lengths) for c in range(-(-T // chunk_size))]
    return torch.tensor(rows, device=device, dtype=dtype)


def packed(lengths, dtype, device, HV=2, K=24, V=40, **kinds):
    """(arguments, do, dht) of sequences of these lengths, with a state each."""
    N = len(lengths)
    x = inputs(1, sum(lengths), 1, HV, K, V, dtype, device, N=N, **kinds)
    return x, *cotangents(x, N)


def part(x, n, tokens):
    """Sequence n of packed tensors: tokens by their axis 1, states by their axis 0."""
    return {
        name: t if name in ("A_log", "dt_bias", *SUMMED)
        else t[n : n + 1] if name in ("ht", "initial_state", "dinitial_state")
        else t[:, tokens]
        for name, t in x.items()
    }  # fmt: skip


def one_by_one(x, do, dht, lengths, **options):
    """Yield (number, tokens, results) of every sequence that has tokens, computed alone."""
    for n, (a, b) in enumerate(pairwise(boundaries(lengths).tolist())):
        if b > a:
            t = slice(a, b)
            yield n, t, run(part(x, n, t), do[:, t], dht[n : n + 1], **options)


@impls
@dtypes
def test_packed_sequences_equal_each_by_itself(dtype, impl, device):
    x, do, dht = packed(LENGTHS, dtype, device, HV=HEADS)
    options = {"output_final_state": True, "impl": impl}
    got = run(x, do, dht, cu_seqlens=boundaries(LENGTHS, device), **options)
    for n, tokens, want in one_by_one(x, do, dht, LENGTHS, **options):
        same_bits(part(got, n, tokens), want)
    for n, T in enumerate(LENGTHS):
        if not T:  # the state goes through
            assert torch.equal(got["ht"][n], x["initial_state"][n])
            assert torch.equal(got["dinitial_state"][n], dht[n])


@impls
@pytest.mark.parametrize("C", [16, 32])
def test_other_chunk_sizes_and_all_flags(C, impl, device):
    raw = dict.fromkeys(("raw_qk", "raw_beta", "raw_gate"), True)
    x, do, dht = packed((33, 0, 16, 20), torch.float32, device, HV=1, **raw)
    names = ("qk_l2norm", "beta_sigmoid", "gate")
    options = {f"use_{n}_in_kernel": True for n in names} | {"allow_neg_eigval": True}
    bounds = boundaries((33, 0, 16, 20), device)
    want = exact(x, do, dht, cu_seqlens=bounds, **options)
    options |= {"output_final_state": True, "impl": impl, "chunk_size": C}
    got = run(x, do, dht, cu_seqlens=bounds, **options)
    check(got, want, torch.float32)
    for n, tokens, alone in one_by_one(x, do, dht, (33, 0, 16, 20), **options):
        same_bits(part(got, n, tokens), alone, *SUMMED)


@impls
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_however_the_boundaries_are_given(dtype, impl, device):
    """int32, int64; known to the host, with the chunks counted before, or neither."""
    lengths = (15, 0, 20)
    x, do, dht = packed(lengths, torch.float32, device, HV=1)
    options = {"output_final_state": True, "impl": impl, "chunk_size": 16}
    want = run(x, do, dht, cu_seqlens=boundaries(lengths, device, torch.int64), **options)
    options["cu_seqlens"] = boundaries(lengths, device, dtype)
    host, chunks = boundaries(lengths, dtype=dtype), indices(lengths, device, 16, dtype)
    given = ({}, {"cu_seqlens_cpu": host}, {"chunk_indices": chunks})
    for extra in (*given, given[1] | given[2]):
        same_bits(run(x, do, dht, **options, **extra), want)


@impls
def test_boundaries_with_gaps(impl, device):
    """A column of a table: every other number in memory is none of cu_seqlens."""
    x, do, dht = packed((15, 0, 20), torch.float32, device, HV=1)
    bounds = boundaries((15, 0, 20), device, torch.int64)
    column = torch.stack([bounds, torch.full_like(bounds, 35)], 1)[:, 0]
    options = {"output_final_state": True, "impl": impl}
    want = run(x, do, dht, cu_seqlens=bounds, **options)
    same_bits(run(x, do, dht, cu_seqlens=column, **options), want)
    want = fused_recurrent_gated_delta_rule(**x, cu_seqlens=bounds, impl=impl)
    got = fused_recurrent_gated_delta_rule(**x, cu_seqlens=column, impl=impl)
    assert torch.equal(got[0], want[0])


@impls
def test_one_sequence_packed_is_a_batch_of_one(impl, device):
    x, do, dht = packed((70,), torch.float32, device, raw_gate=True)
    options = {"output_final_state": True, "impl": impl, "use_gate_in_kernel": True}
    got = run(x, do, dht, cu_seqlens=boundaries((70,), device), **options)
    same_bits(got, run(x, do, dht, **options))


@impls
def test_without_states(impl, device):
    """No initial state: what a sequence without tokens leaves is zero."""
    x, do, dht = packed((15, 0, 20), torch.float32, device, state=False)
    bounds = boundaries((15, 0, 20), device)
    got = run(x, do, dht, cu_seqlens=bounds, output_final_state=True, impl=impl)
    assert not got["ht"][1].any()
    check(got, exact(x, do, dht, cu_seqlens=bounds), torch.float32)
    got = run(x, do, None, cu_seqlens=bounds, impl=impl)
    assert "ht" not in got
    check(got, exact(x, do, None, cu_seqlens=bounds), torch.float32)


@impls
def test_states_with_v_first(impl, device):
    lengths = (15, 0, 20)
    x, do, dht = packed(lengths, torch.float32, device)
    options = {"cu_seqlens": boundaries(lengths, device), "output_final_state": True, "impl": impl}
    want = run(x, do, dht, **options)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    got = run(x, do, dht.mT.contiguous(), state_v_first=True, **options)
    for name in ("ht", "dinitial_state"):
        assert got[name].shape == (3, 2, 40, 24)
        got[name] = got[name].mT
    same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_fla_s_rows(row, dtype, device):
    H, HV, D, mask, bounds = row
    lengths = [b - a for a, b in pairwise(bounds)]
    if not GPU:
        H, HV, lengths = 1, min(2, HV // H), [min(T, 16 + T % 13) for T in lengths[:2]]
    x = inputs(1, sum(lengths), H, HV, D, D, dtype, device, mask=mask, N=len(lengths))
    do, dht = cotangents(x, len(lengths))
    bounds = boundaries(lengths, device, torch.int64)
    got = triton(x, do, dht, cu_seqlens=bounds)
    check(got, exact(x, do, dht, cu_seqlens=bounds), dtype, dg=spacing(x["g"]))


@impls
@dtypes
def test_neighbours_change_nothing(dtype, impl, device):
    """Other tokens, gradients, lengths and more sequences around it: the same bits."""
    x, do, dht = packed((20, 70, 9), dtype, device, HV=1)
    y, do_y, dht_y = packed((3, 33, 70, 0, 1), dtype, device, HV=1, seed=5)
    for name, t in (y | {"do": do_y, "dht": dht_y}).items():
        source = (x | {"do": do, "dht": dht})[name]
        if name in ("initial_state", "dht"):
            t[2] = source[1]
        else:
            t[:, 36:106] = source[:, 20:90]
    options = {"output_final_state": True, "impl": impl}
    a = run(x, do, dht, cu_seqlens=boundaries((20, 70, 9), device), **options)
    b = run(y, do_y, dht_y, cu_seqlens=boundaries((3, 33, 70, 0, 1), device), **options)
    same_bits(part(a, 1, slice(20, 90)), part(b, 2, slice(36, 106)))


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [False, True])
def test_no_wait_for_the_device(chunks):
    """With cu_seqlens_cpu the host reads nothing from the GPU, forward or backward."""
    x, do, dht = packed(LENGTHS, torch.bfloat16, "cuda", raw_gate=True)
    options = {
        "cu_seqlens": boundaries(LENGTHS, "cuda"), "cu_seqlens_cpu": boundaries(LENGTHS),
        "use_gate_in_kernel": True,
    }  # fmt: skip
    if chunks:
        options["chunk_indices"] = indices(LENGTHS, "cuda")
    triton(x, do, dht, **options)  # compiles
    with no_wait():
        got = triton(x, do, dht, **options)
    same_bits(got, triton(x, do, dht, **options))


def halves(dtype, device, cut, T=100):
    """(x, do, dht) and a second draw that differs from `cut` on."""
    x, y = (inputs(1, T, 1, HEADS, 24, 40, dtype, device, seed=s) for s in (0, 1))
    y = {n: t if n == "initial_state" else torch.cat([t[:, :cut], y[n][:, cut:]], 1)
         for n, t in x.items()}  # fmt: skip
    return x, y, *cotangents(x)


cuts = pytest.mark.parametrize("cut", [1, 40, 64, 77] if GPU else [40, 64])


@cuts
@dtypes
def test_dq_depends_on_nothing_after_its_token(cut, dtype, device):
    """Not on later tokens, not on the gradients of other outputs or of the final state."""
    x, y, do, dht = halves(dtype, device, cut)
    other = torch.randn_like(do)
    other[:, cut - 1] = do[:, cut - 1]
    a, b = triton(x, do, dht)["dq"], triton(y, other, 2 * dht)["dq"]
    assert torch.equal(a[:, cut - 1], b[:, cut - 1])


@cuts
@dtypes
def test_no_gradient_after_the_last_output_used(cut, dtype, device):
    """do is zero from the cut on, dht is not given: exact zeros there, and the prefix's before."""
    x, _, do, _ = halves(dtype, device, cut)
    do[:, cut:] = 0
    got = triton(x, do, None)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, cut:].any(), name
    prefix = {n: t if n == "initial_state" else t[:, :cut] for n, t in x.items()}
    want = triton(prefix, do[:, :cut], None)
    same_bits({n: got[n][:, :cut] for n in ("dq", "dv")}, {n: want[n] for n in ("dq", "dv")})


@cuts
@dtypes
def test_earlier_output_gradients_do_not_reach_later_tokens(cut, dtype, device):
    """What k, v, g and beta of a token get comes from its own output and later ones."""
    x, _, do, dht = halves(dtype, device, cut)
    other = torch.cat([torch.randn_like(do)[:, :cut], do[:, cut:]], 1)
    a, b = triton(x, do, dht), triton(x, other, dht)
    names = ("dq", "dk", "dv", "dg", "dbeta")
    same_bits({n: a[n][:, cut:] for n in names}, {n: b[n][:, cut:] for n in names})


@cuts
@dtypes
def test_dv_depends_on_no_value_and_no_earlier_token(cut, dtype, device):
    """Values enter linearly. The gates stay: their sums in a chunk begin with the earlier ones."""
    x, _, do, dht = halves(dtype, device, cut)
    y = inputs(1, 100, 1, HEADS, 24, 40, dtype, device, seed=1)
    for name in ("q", "k", "beta"):
        y[name] = torch.cat([y[name][:, :cut], x[name][:, cut:]], 1)
    y["g"] = x["g"]
    a, b = triton(x, do, dht)["dv"], triton(y, do, dht)["dv"]
    assert torch.equal(a[:, cut:], b[:, cut:])
