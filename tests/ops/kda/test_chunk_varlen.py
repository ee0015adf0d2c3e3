"""Packed sequences of chunk_kda: the same bits as each by itself, forward and backward."""

from itertools import pairwise

import pytest
import torch
from gdn_checks import DTYPES, cotangents, exact, no_wait, same_bits
from kda_checks import check, inputs, run, spacing, triton
from ops.gdn.test_chunk_varlen import SUMMED, boundaries, indices, part

from linattn_edu import chunk_kda

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
IMPLS = ("reference", "triton")
LENGTHS = (15, 0, 64, 1, 65, 100, 0) if GPU else (15, 0, 1, 17, 0)
SHORT = (15, 0, 20)
# the rows of fla's test_chunk_varlen and others with shut gates: H, HV, D, share of open and of
# shut gates, boundaries
ROWS = (
    (4, 4, 60, 0, 0.1, (0, 15)),
    (4, 4, 64, 0, 0.9, (0, 256, 500, 1000)),
    (4, 4, 128, 0.5, 0, (0, 256, 500, 1000)),
    (4, 4, 100, 0, 0, (0, 15, 100, 300, 1200, 2000)),
    (4, 4, 256, 0, 0.5, (0, 100, 300, 1200, 3000, 4096)),
    (2, 8, 64, 0, 0.1, (0, 256, 500, 1000)),
)
dtypes = pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[::2], ids=str)
impls = pytest.mark.parametrize("impl", IMPLS)
C16 = {"chunk_size": 16}


def packed(lengths, dtype, device, HV=1, **kinds):
    """(arguments, do, dht) of sequences of these lengths, with a state each."""
    N = len(lengths)
    x = inputs(1, sum(lengths), 1, HV, 12, 8, dtype, device, N=N, **kinds)
    return x, *cotangents(x, N)


def one_by_one(x, do, dht, lengths, **options):
    """Yield (number, tokens, results) of every sequence that has tokens, computed alone."""
    for n, (a, b) in enumerate(pairwise(boundaries(lengths).tolist())):
        if b > a:
            t = slice(a, b)
            yield n, t, run(part(x, n, t), do[:, t], dht[n : n + 1], **options)


@pytest.mark.parametrize(
    ("safe", "keep"), [(s, k) for s in (False, True) for k in (False, True) if GPU or s == k]
)
@impls
@dtypes
def test_packed_sequences_equal_each_by_itself(dtype, impl, safe, keep, device):
    x, do, dht = packed(LENGTHS, dtype, device, HV=2 if GPU else 1, safe=safe)
    options = {"output_final_state": True, "impl": impl, "safe_gate": safe}
    options |= {"disable_recompute": keep} | ({} if GPU else C16)
    got = run(x, do, dht, cu_seqlens=boundaries(LENGTHS, device), **options)
    for n, tokens, want in one_by_one(x, do, dht, LENGTHS, **options):
        same_bits(part(got, n, tokens), want)
    for n, T in enumerate(LENGTHS):
        if not T:  # the state goes through
            assert torch.equal(got["ht"][n], x["initial_state"][n])
            assert torch.equal(got["dinitial_state"][n], dht[n])


@impls
@pytest.mark.parametrize("bound", [None, -5.0])
def test_all_flags(bound, impl, device):
    raw = dict.fromkeys(("raw_qk", "raw_beta", "raw_gate"), True)
    lengths = (18, 0, 3)
    x, do, dht = packed(lengths, torch.float32, device, HV=2 if GPU else 1, **raw)
    names = ("qk_l2norm", "beta_sigmoid", "gate")
    options = {f"use_{n}_in_kernel": True for n in names} | {"allow_neg_eigval": True}
    options |= {"lower_bound": bound, "safe_gate": bound is not None}
    bounds = boundaries(lengths, device)
    want = exact(x, do, dht, cu_seqlens=bounds, **options)
    options |= {"output_final_state": True, "impl": impl, **C16}
    got = run(x, do, dht, cu_seqlens=bounds, **options)
    check(got, want, torch.float32)
    for n, tokens, alone in one_by_one(x, do, dht, lengths, **options):
        same_bits(part(got, n, tokens), alone, *SUMMED)


@impls
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_however_the_boundaries_are_given(dtype, impl, device):
    """int32, int64; known to the host, with the chunks counted before, or neither."""
    x, do, dht = packed(SHORT, torch.float32, device)
    options = {"output_final_state": True, "impl": impl, **C16}
    want = run(x, do, dht, cu_seqlens=boundaries(SHORT, device, torch.int64), **options)
    options["cu_seqlens"] = boundaries(SHORT, device, dtype)
    host, chunks = boundaries(SHORT, dtype=dtype), indices(SHORT, device, 16, dtype)
    given = ({"cu_seqlens_cpu": host}, {"chunk_indices": chunks})
    for extra in (*given, given[0] | given[1]) if GPU else given:
        same_bits(run(x, do, dht, **options, **extra), want)


@impls
def test_boundaries_with_gaps(impl, device):
    """A column of a table: every other number in memory is none of cu_seqlens."""
    x, _, _ = packed(SHORT, torch.float32, device)
    bounds = boundaries(SHORT, device, torch.int64)
    column = torch.stack([bounds, torch.full_like(bounds, 35)], 1)[:, 0]
    got, want = (chunk_kda(**x, cu_seqlens=b, impl=impl, **C16)[0] for b in (column, bounds))
    assert torch.equal(got, want)


@impls
def test_one_sequence_packed_is_a_batch_of_one(impl, device):
    x, do, dht = packed((20,), torch.float32, device, raw_gate=True)
    options = {"output_final_state": True, "impl": impl, "use_gate_in_kernel": True, **C16}
    got = run(x, do, dht, cu_seqlens=boundaries((20,), device), **options)
    same_bits(got, run(x, do, dht, **options))


@impls
def test_without_states(impl, device):
    """No initial state: what a sequence without tokens leaves is zero."""
    x, do, dht = packed(SHORT, torch.float32, device, state=False)
    bounds = boundaries(SHORT, device)
    got = run(x, do, dht, cu_seqlens=bounds, output_final_state=True, impl=impl, **C16)
    assert not got["ht"][1].any()
    check(got, exact(x, do, dht, cu_seqlens=bounds), torch.float32)
    got = run(x, do, None, cu_seqlens=bounds, impl=impl, **C16)
    assert "ht" not in got
    check(got, exact(x, do, None, cu_seqlens=bounds), torch.float32)


@impls
@pytest.mark.parametrize("v_first", [False, True])
def test_states_of_the_chunks_of_all_sequences(v_first, impl, device):
    """Those of the sequences one after the other; without a token there is no chunk."""
    x, _, _ = packed(SHORT, torch.float32, device)
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    options = {"return_intermediate_states": True, "impl": impl, "state_v_first": v_first, **C16}
    o, _, h = chunk_kda(**x, cu_seqlens=boundaries(SHORT, device), **options)
    assert h.shape == (1, 3, 1, *((8, 12) if v_first else (12, 8)))
    parts = [part(x, n, slice(a, b)) for n, (a, b) in enumerate(pairwise((0, 15, 15, 35))) if b > a]
    alone = [chunk_kda(**one, **options) for one in parts]
    assert torch.equal(h, torch.cat([one[2] for one in alone], 1))
    assert torch.equal(o, torch.cat([one[0] for one in alone], 1))


@impls
def test_states_with_v_first(impl, device):
    x, do, dht = packed(SHORT, torch.float32, device)
    options = {"cu_seqlens": boundaries(SHORT, device), "output_final_state": True, "impl": impl}
    want = run(x, do, dht, **options, **C16)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    got = run(x, do, dht.mT.contiguous(), state_v_first=True, **options, **C16)
    for name in ("ht", "dinitial_state"):
        assert got[name].shape == (3, 1, 8, 12)
        got[name] = got[name].mT
    same_bits(got, want)


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        (row, dtype)
        for n, row in enumerate(ROWS)
        for dtype in (DTYPES if GPU else (DTYPES[n % len(DTYPES)],))
    ],
    ids=str,
)
def test_fla_s_rows(row, dtype, device):
    H, HV, D, mask, shut, bounds = row
    lengths = [b - a for a, b in pairwise(bounds)]
    if not GPU:
        H, HV, D = 1, min(2, HV // H), D // 4 - 1
        lengths = [min(T, 5 + T % 13) for T in lengths[:2]]
    kinds = {"mask": mask, "shut": shut, "N": len(lengths)}
    x = inputs(1, sum(lengths), H, HV, D, D, dtype, device, **kinds)
    do, dht = cotangents(x, len(lengths))
    bounds = boundaries(lengths, device, torch.int64)
    got = triton(x, do, dht, cu_seqlens=bounds)
    # shut gates cost the digits of the sums they enter: see test_kda_backward
    want, digits = exact(x, do, dht, cu_seqlens=bounds), spacing(x["g"])
    check(got, want, dtype, digits if shut else 0, dg=digits)


@impls
@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[2:], ids=str)
def test_neighbours_change_nothing(dtype, impl, device):
    """Other tokens, gradients, lengths and more sequences around it: the same bits."""
    x, do, dht = packed((5, 20, 3), dtype, device)
    y, do_y, dht_y = packed((3, 17, 20, 0, 1), dtype, device, seed=5, shut=0.5)
    for name, t in (y | {"do": do_y, "dht": dht_y}).items():
        source = (x | {"do": do, "dht": dht})[name]
        if name in ("initial_state", "dht"):
            t[2] = source[1]
        else:
            t[:, 20:40] = source[:, 5:25]
    options = {"output_final_state": True, "impl": impl, **C16}
    a = run(x, do, dht, cu_seqlens=boundaries((5, 20, 3), device), **options)
    b = run(y, do_y, dht_y, cu_seqlens=boundaries((3, 17, 20, 0, 1), device), **options)
    same_bits(part(a, 1, slice(5, 25)), part(b, 2, slice(20, 40)))


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_no_wait_for_the_device(keep, chunks):
    """With cu_seqlens_cpu the host reads nothing from the GPU, forward or backward."""
    x, do, dht = packed(LENGTHS, torch.bfloat16, "cuda", raw_gate=True)
    options = {
        "cu_seqlens": boundaries(LENGTHS, "cuda"), "cu_seqlens_cpu": boundaries(LENGTHS),
        "use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True,
        "disable_recompute": keep,
    }  # fmt: skip
    if chunks:
        options["chunk_indices"] = indices(LENGTHS, "cuda")
    triton(x, do, dht, **options)  # compiles
    with no_wait():
        got = triton(x, do, dht, **options)
    same_bits(got, triton(x, do, dht, **options))
