"""A number that is none stays where it is: in its batch entry, head and document, and in outputs
that come after it.
"""

import pytest
import torch
from gdn_checks import boundaries, same_bits
from ops import calls
from ops.contract import (
    BY_CHANNEL,
    IMPLS,
    STATES,
    conv,
    dplr_chunks,
    ema,
    forms,
    gdn,
    kda,
    recurrent_gdn,
    recurrent_kda,
    ssd,
)  # fmt: skip

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

F32 = (torch.float32,)
ONE_OF_EACH = (gdn, kda, recurrent_gdn, recurrent_kda, *BY_CHANNEL, ssd[-1], ema, conv)


def with_nan(x, where):
    """Copies of tensors with NaN at where[name], if there is an index."""
    x = {n: t.clone() for n, t in x.items()}
    for n, index in where.items():
        x[n][index] = torch.nan
    return x


def floats(x):
    return [n for n, t in x.items() if t.is_floating_point()]


@forms("test_a_nan_stays_in_its_batch_entry", *ONE_OF_EACH, dtypes=F32, impl=IMPLS)
def test_a_nan_stays_in_its_batch_entry(form, dtype, impl, device):
    """Every tensor of one entry is NaN: the other has its bits in both passes. Masks that
    multiply by zero, and rows read beyond an entry, carry it over.
    """
    x, options = form.draw(2, min(form.T, 20), dtype, device)
    do, dht = form.cotangents(x)
    options["impl"] = impl
    bad = with_nan(x, {n: 1 for n in floats(x) if n not in form.summed})
    got, want = (form.of_batch(form.run(y, do, dht, **options), 0) for y in (bad, x))
    same_bits(got, want)


@forms("test_a_nan_stays_in_its_head", *ONE_OF_EACH, dtypes=F32, impl=IMPLS)
def test_a_nan_stays_in_its_head(form, dtype, impl, device):
    """Everything that is one head's, or of a convolution one channel's, is NaN; q, k, B and C
    are shared. The other heads have their bits, and the gradients of what is theirs.
    """
    x, options = form.draw(1, min(form.T, 20), dtype, device)
    do, dht = form.cotangents(x)
    options["impl"] = impl

    def head(n, h):
        return (slice(None),) * (0 if n in form.summed else 1 if n in STATES else 2) + (h,)

    own = [n for n in floats(x) if n not in ("q", "k", "B", "C")]
    bad = with_nan(x, {n: head(n, 1) for n in own})
    got, want = (form.run(y, do, dht, **options) for y in (bad, x))
    for n in ("o", "ht", *(f"d{n}" for n in own)):
        at = head(n if n == "ht" else n.removeprefix("d"), 0)
        assert torch.equal(got[n][at], want[n][at]), n


@forms("test_a_nan_stays_in_its_document", *ONE_OF_EACH, dtypes=F32, impl=IMPLS)
def test_a_nan_stays_in_its_document(form, dtype, impl, device):
    """Every token of the one in the middle, and its state, are NaN: the bits of those before and
    behind it stay in both passes. A chunk or a window that reaches over a boundary and is masked
    by a product carries it over.
    """
    lengths = (2, 1, 3) if form.chunk is None else (5, 6, 9)
    x, do, dht, options = form.packed(lengths, dtype, device)
    options |= {"impl": impl, "cu_seqlens": boundaries(lengths, device)}
    a, b = lengths[0], lengths[0] + lengths[1]
    where = {n: (0, slice(a, b)) for n in floats(x) if n in form.tokens}
    bad = with_nan(x, where | {"initial_state": 1})
    got, want = (form.run(y, do, dht, **options) for y in (bad, x))
    for n, tokens in ((0, slice(a)), (2, slice(b, None))):
        same_bits(form.part(got, n, tokens), form.part(want, n, tokens), *form.sums())


T = 20  # of calls.py
LATER = [
    n for n in calls.CALLS
    if n != "causal_conv1d_fn"  # whose tokens are behind the channels
    and any(t.shape[1:2] == (T,) for t in calls.call(n)[1].values())
]  # fmt: skip
# within a chunk products whose upper half is masked carry it back
CHUNKED = (
    "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "chunk_dplr_delta_rule",
    "mamba_chunk_scan_combined", "ema_scan",
)  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LATER)
def test_a_nan_does_not_reach_earlier_tokens(name, impl, device):
    """Of every function of tokens: all that comes later is NaN, outputs before keep their bits; of
    the CHUNKED ones those of earlier chunks, as their docstrings say. Rows read past the end of a
    chunk, or anything summed over a sequence, carry it back.
    """
    f, x, options = calls.call(name, device)
    cut = kept = 17
    if name.split()[0] in CHUNKED:
        kept = options["chunk_size"] = 16
    later = [n for n in floats(x) if x[n].shape[1:2] == (T,)]
    bad = with_nan(x, {n: (slice(None), slice(cut, None)) for n in later})
    with torch.no_grad():
        got, want = (f(**y, **options, impl=impl) for y in (bad, x))
    got, want = (y if isinstance(y, tuple) else (y,) for y in (got, want))
    assert want[0].shape[1] == T
    assert got[0][:, cut:].isnan().any()
    for a, b in zip(got, want, strict=True):
        if b is not None and b.shape[1:2] == (T,):
            assert torch.equal(a[:, :kept], b[:, :kept])


@forms(
    "test_earlier_chunks_keep_their_bits", gdn, kda, dplr_chunks, *ssd, ema,
    dtypes=(torch.float32, torch.bfloat16), impl=IMPLS,
)  # fmt: skip
def test_earlier_chunks_keep_their_bits(form, dtype, impl, device):
    """A NaN in the midst of a chunk, of one tensor after the other: every chunk before it."""
    C = 16
    x, options = form.draw(1, 3 * C, dtype, device)
    options |= {"chunk_size": C, "impl": impl}
    with torch.no_grad():
        want, _ = form(x, **options)
        for n in (n for n in floats(x) if n in form.tokens):
            got, _ = form(with_nan(x, {n: (slice(None), 2 * C + 5)}), **options)
            assert got[:, 2 * C + 5 :].isnan().any(), n
            assert torch.equal(got[:, : 2 * C], want[:, : 2 * C]), n
