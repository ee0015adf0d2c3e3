"""mamba_chunk_scan_combined on packed sequences and rows of documents: as each by itself."""

from itertools import pairwise

import pytest
import torch
from gdn_checks import no_wait, same_bits
from ops.ssd.ssd_cases import (
    FORMS,
    IMPLS,
    check,
    cotangents,
    exact,
    forms,
    impls,
    inputs,
    run,
    scan,
    tolerance,
)

from linattn_edu import mamba_chunk_scan_combined
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
LENGTHS = (15, 0, 64, 1, 65, 0)
SUMMED = ("A", "D", "dt_bias")  # over all tokens
STATES = ("ht", "initial_states", "dinitial_states")
# one form of the reference, whose chunks are any, and the three of the kernels
RUNS = (("float32", "reference"), *((form, "triton") for form in FORMS))
runs = pytest.mark.parametrize(("form", "impl"), RUNS)


def boundaries(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def packed(form, lengths, device, given="all", **kinds):
    """(tensors, options, do, dht) of sequences of these lengths, with a state each."""
    P, N, dtype = FORMS[form]
    states = len(lengths)
    x, options = inputs(1, sum(lengths), 2, 1, P, N, dtype, device, given, states=states, **kinds)
    return x, options, *cotangents(x, states)


def part(x, n, tokens):
    """Sequence n of packed tensors: tokens by their axis 1, states by their axis 0."""
    return {
        name: t[n : n + 1] if name in STATES
        else t if name.removeprefix("d") in SUMMED or name in SUMMED
        else t[:, tokens]
        for name, t in x.items()
    }  # fmt: skip


def together(x, do, dht, lengths, **options):
    """`run` of all sequences at once, with the states of each."""
    bounds = options.pop("cu_seqlens", None)
    options["cu_seqlens"] = boundaries(lengths, do.device) if bounds is None else bounds
    return run(x, do, dht, return_final_states=False, return_varlen_states=True, **options)


def each(lengths):
    """(number, tokens) of every sequence that has tokens."""
    for n, (a, b) in enumerate(pairwise(boundaries(lengths).tolist())):
        if b > a:
            yield n, slice(a, b)


def total(parts):
    """Gradients that are sums over all tokens, from those of the sequences."""
    return {n: sum(p[n] for p in parts) for n in parts[0] if n.removeprefix("d") in SUMMED}


@runs
def test_packed_sequences_equal_each_by_itself(form, impl, device):
    """To the bit, both passes, documents within a sequence too; but for sums over them all."""
    x, options, do, dht = packed(form, LENGTHS, device)
    if not GPU:  # where the bits of PyTorch's sigmoid depend on where in memory a number lies
        x.pop("z", None)
    options["impl"] = impl
    got, alone = together(x, do, dht, LENGTHS, **options), []
    for n, tokens in each(LENGTHS):
        want = run(part(x, n, tokens), do[:, tokens], dht[n : n + 1], **options)
        same_bits(part(got, n, tokens), want, *(f"d{name}" for name in SUMMED))
        alone.append(want)
    for n, T in enumerate(LENGTHS):
        if not T:  # the state goes through
            assert torch.equal(got["ht"][n], x["initial_states"][n])
            assert torch.equal(got["dinitial_states"][n], dht[n])
    for name, want in total(alone).items():
        torch.testing.assert_close(got[name], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("given", ["all", "channels"])
def test_long_sequences_in_pieces(given, device, force):
    """Pieces of 128 tokens, not 4096: as in one piece, and packed to the bit as each alone."""
    lengths = (300, 0, 129, 128, 5)
    x, options, do, dht = packed("fused", lengths, device, given)
    if not GPU:  # as above
        x.pop("z", None)
    options["impl"] = "triton"
    whole = together(x, do, dht, lengths, **options)
    force(SSD_PIECE=128)
    got = together(x, do, dht, lengths, **options)
    for name in ("o", "ht"):
        assert_close(name, got[name], whole[name], tolerance(name, torch.bfloat16))
    for n, tokens in each(lengths):
        want = run(part(x, n, tokens), do[:, tokens], dht[n : n + 1], **options)
        same_bits(part(got, n, tokens), want, *(f"d{name}" for name in SUMMED))
    assert torch.equal(got["ht"][1], x["initial_states"][1])


@runs
def test_without_initial_states(form, impl, device):
    """What a sequence without tokens leaves is zero."""
    lengths = (15, 0, 70)
    x, options, do, dht = packed(form, lengths, device, "none")
    got = together(x, do, dht, lengths, impl=impl, **options)
    assert not got["ht"][1].any()
    for n, tokens in each(lengths):
        want = run(part(x, n, tokens), do[:, tokens], dht[n : n + 1], impl=impl, **options)
        same_bits(part(got, n, tokens), want, "dA")


@impls
def test_states_that_are_returned(impl, device):
    """out; final, the last sequence's as mamba_ssm has it; varlen, of each; in this order."""
    lengths = (15, 0, 20)
    x, options, *_ = packed("float32", lengths, device, "channels")
    options |= {"impl": impl, "cu_seqlens": boundaries(lengths, device)}
    arguments = {**x, **options, "chunk_size": 16}
    f = mamba_chunk_scan_combined
    flags = ("return_final_states", "return_varlen_states")
    out = f(**arguments)
    both = f(**arguments, **dict.fromkeys(flags, True))
    assert [y.shape for y in both] == [out.shape, (1, 2, 24, 40), (3, 2, 24, 40)]
    assert torch.equal(both[1], both[2][-1:]) and torch.equal(both[0], out)
    for i, flag in enumerate(flags):
        one = f(**arguments, **{flag: True})
        assert len(one) == 2 and torch.equal(one[1], both[1 + i])
    assert all(y.dtype == torch.float32 and y.is_contiguous() for y in both[1:])


@runs
@pytest.mark.parametrize("lengths", [(64, 7, 57, 9), (5,) * 6], ids=str)
def test_documents_agree_with_packed_sequences(lengths, form, impl, device):
    """seq_idx on a row; ids that fall; documents that begin at a chunk's first token, and within.

    The first document has the initial states, the last one leaves the final ones.
    """
    x, options, do, dht = packed(form, lengths, device, "channels")
    x["initial_states"][1:] = 0
    dht[:-1] = 0
    options |= {"impl": impl, "chunk_size": 64}
    want = together(x, do, dht, lengths, **options)
    ids = torch.tensor([5, 2, 9, -1, 3, 2][: len(lengths)], device=device)
    ids = ids.repeat_interleave(torch.tensor(lengths, device=device))[None]
    row = x | {"initial_states": x["initial_states"][:1]}
    got = run(row | {"seq_idx": ids}, do, dht[-1:], **options)
    reference = exact(row | {"seq_idx": ids}, do, dht[-1:], dt_softplus=True)
    check(got, reference, x["x"].dtype)
    want["ht"], want["dinitial_states"] = want["ht"][-1:], want["dinitial_states"][:1]
    want |= {n: reference[n] for n in ("terms", "spacing")}
    check(got, {n: y.double() if torch.is_tensor(y) else y for n, y in want.items()}, x["x"].dtype)


@forms
def test_only_where_ids_change_matters(form, device):
    P, N, dtype = FORMS[form]
    x, options = inputs(1, 70, 2, 1, P, N, dtype, device, "documents")
    do, dht = cotangents(x)
    ids = x["seq_idx"]
    options["impl"] = "triton"
    want = run(x, do, dht, **options)
    for other in (7 - 3 * ids.long(), torch.where(ids % 2 == 0, 2, 2**31 - 1).int()):
        same_bits(run(x | {"seq_idx": other}, do, dht, **options), want)


@forms
def test_documents_do_not_leak(form, device):
    """Other numbers in one document change nothing in the others, either way."""
    P, N, dtype = FORMS[form]
    x, options = inputs(1, 140, 2, 1, P, N, dtype, device, "documents")
    ids = torch.zeros(1, 140, dtype=torch.int32, device=device)
    ids[:, 50:], ids[:, 100:] = 1, 2
    x["seq_idx"] = ids
    do, dht = cotangents(x)
    want = run(x, do, dht, **options, impl="triton")
    other = {n: t.clone() for n, t in x.items()}
    for n in ("x", "B", "C"):
        other[n][:, 50:100] = torch.randn_like(other[n][:, 50:100])
    got = run(other, do, dht, **options, impl="triton")
    for n in ("o", "dx", "dB", "dC"):
        for kept in (slice(0, 50), slice(100, 140)):
            assert torch.equal(got[n][:, kept], want[n][:, kept]), n
    assert torch.equal(got["ht"], want["ht"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@impls
def test_however_the_boundaries_are_given(impl, dtype, device):
    """int32, int64; known to the host or not; a column of a table."""
    lengths = (15, 0, 20)
    x, options, do, dht = packed("float32", lengths, device)
    options |= {"impl": impl, "chunk_size": 16}
    want = together(x, do, dht, lengths, **options)
    bounds = boundaries(lengths, device, dtype)
    column = torch.stack([bounds, torch.full_like(bounds, 35)], 1)[:, 0]
    known = {"cu_seqlens_cpu": boundaries(lengths, dtype=dtype)}
    for given, extra in ((bounds, {}), (column, known)):
        got = together(x, do, dht, lengths, cu_seqlens=given, **options, **extra)
        same_bits(got, want)


@pytest.mark.parametrize(("form", "impl"), [run for run in RUNS if run[0] != "staged"])
def test_neighbours_change_nothing(form, impl, device):
    """Other tokens, gradients, lengths and more sequences around it: the same bits."""
    x, options, do, dht = packed(form, (20, 70, 9), device, "channels")
    y, _, do_y, dht_y = packed(form, (3, 33, 70, 0, 1), device, "channels", seed=5)
    for name, t in (y | {"do": do_y, "dht": dht_y}).items():
        source = (x | {"do": do, "dht": dht})[name]
        if name in ("initial_states", "dht"):
            t[2] = source[1]
        elif name in SUMMED:
            t.copy_(source)
        else:
            t[:, 36:106] = source[:, 20:90]
    a = together(x, do, dht, (20, 70, 9), impl=impl, **options)
    b = together(y, do_y, dht_y, (3, 33, 70, 0, 1), impl=impl, **options)
    a, b = part(a, 1, slice(20, 90)), part(b, 2, slice(36, 106))
    same_bits(a, b, *(f"d{n}" for n in SUMMED))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bounds", [None, [0, 0], [0, 0, 0]], ids=str)
def test_no_tokens(bounds, impl, device):
    """The states go through, and so does their gradient."""
    states = 2 if bounds is None else len(bounds) - 1
    x, options = inputs(2 if bounds is None else 1, 0, 2, 1, 24, 40, device=device, states=states)
    do, dht = cotangents(x, states)
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device=device)
        options |= {"return_varlen_states": True, "return_final_states": False}
    got = run(x, do, dht, impl=impl, **options)
    assert got["o"].shape == x["x"].shape
    assert torch.equal(got["ht"], x["initial_states"])
    assert torch.equal(got["dinitial_states"], dht)
    assert not any(got[f"d{n}"].any() for n in SUMMED)
    x.pop("initial_states")
    _, last = scan(**x, **options, impl=impl)
    assert not last.any() and len(last) == states


@pytest.mark.gpu
def test_no_wait_for_the_device():
    """With cu_seqlens_cpu the host reads nothing from the GPU, forward or backward."""
    x, options, do, dht = packed("fused", LENGTHS, "cuda")
    options |= {"cu_seqlens": boundaries(LENGTHS, "cuda"), "cu_seqlens_cpu": boundaries(LENGTHS)}
    want = together(x, do, dht, LENGTHS, **options)
    with no_wait():
        got = together(x, do, dht, LENGTHS, **options)
    same_bits(got, want)
