"""mamba_chunk_scan_combined on packed sequences and rows of documents: as each by itself."""

import pytest
import torch
from gdn_checks import boundaries, by_value, same_bits
from grids import few
from kernels.gluon_cases import NO_GPU
from ops.contract import ssd
from ops.ssd.ssd_cases import FORMS, check, cotangents, exact, forms, impls, inputs, run, tolerance
from ops.test_contract_packed import each_by_itself

from linattn_edu import mamba_chunk_scan_combined
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

# one form of the reference, whose chunks are any, and the three of the kernels
RUNS = (("float32", "reference"), *((form, "triton") for form in FORMS))


def packed(form, lengths, device, given="all", **kinds):
    """(tensors, options, do, dht) of sequences of these lengths, with a state each."""
    P, N, dtype = FORMS[form]
    states = len(lengths)
    x, options = inputs(1, sum(lengths), 2, 1, P, N, dtype, device, given, states=states, **kinds)
    return x, options, *cotangents(x, states)


def together(x, do, dht, lengths, **options):
    """`run` of all sequences at once, with the states of each."""
    bounds = options.pop("cu_seqlens", None)
    options["cu_seqlens"] = boundaries(lengths, do.device) if bounds is None else bounds
    return run(x, do, dht, return_final_states=False, return_varlen_states=True, **options)


@NO_GPU
def test_the_gradient_of_a_gate_does_not_depend_on_where_it_stands():
    """With the CPU's own functions: the last numbers of a tensor fill no vector register."""
    lengths, generator = (30, 51, 17), torch.Generator().manual_seed(0)
    shapes = (1, 98, 1, 3), (1, 98, 1), (1,), *((1, 98, 1, n) for n in (4, 4, 3, 3))
    x, dt, A, B, C, z, do = (torch.randn(s, generator=generator) for s in shapes)
    z.requires_grad_()

    def dz(t, **bounds):
        tokens = (y[:, t] for y in (x, dt.abs()))
        out = mamba_chunk_scan_combined(
            *tokens, -A.abs(), B[:, t], C[:, t], 16, z=z[:, t], impl="triton", **bounds
        )
        return torch.autograd.grad(out, z, do[:, t])[0][:, t]

    whole = dz(slice(98), cu_seqlens=boundaries(lengths))
    for a, b in ((0, 30), (30, 81), (81, 98)):
        assert torch.equal(whole[:, a:b], dz(slice(a, b)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("raw", "long"), [(True, False), (False, True), *few(more=((True, True), (False, False)))]
)
def test_long_sequences_in_pieces(raw, long, device, force, monkeypatch):
    """Pieces of 128 tokens, not 4096: as in one piece, and packed to the bit as each alone; also
    where longer sequences beside them have longer ones.
    """
    by_value(monkeypatch)
    lengths, fused = (300, 0, 129, 400 if long else 128, 5), ssd[0]
    x, do, dht, options = fused.packed(lengths, torch.bfloat16, device, raw=raw)
    options["impl"] = "triton"
    x["dt"] = x["dt"] - 5  # so that a piece remembers the one before
    bounds = boundaries(lengths, device)
    whole = fused.run(x, do, dht, cu_seqlens=bounds, **options)
    force(**{"SSD_PIECE": 256, "SSD_LEAST": 128, "ssd_pieces": 2} if long else {"SSD_PIECE": 128})
    got = fused.run(x, do, dht, cu_seqlens=bounds, **options)
    for name in ("o", "ht"):
        assert_close(name, got[name], whole[name], tolerance(name, torch.bfloat16))
    each_by_itself(fused, x, do, dht, lengths, got, **options)


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


@pytest.mark.parametrize(
    ("lengths", "form", "impl"),
    [(((64, 7, 57, 9), (5,) * 6)[i % 2], *x) for i, x in enumerate(RUNS)],
)
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
