"""A number that is none stays where it is: in its batch entry, head and document, and in outputs
that come after it.
"""

import pytest
import torch
from gdn_checks import boundaries, same_bits
from ops import calls
from ops.contract import (
    IMPLS,
    STATES,
    conv,
    ema,
    forms,
    gdn,
    in_pieces,
    kda,
    recurrent_gdn,
    recurrent_kda,
    ssd,
)  # fmt: skip

from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

F32 = (torch.float32,)
ONE_OF_EACH = (gdn, kda, recurrent_gdn, recurrent_kda, ssd[-1], ema, conv)


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


@forms(
    "test_a_reset_ends_a_nan", ema, in_pieces,
    dtypes=(torch.float32, torch.float16), impl=IMPLS, bad=(torch.nan, torch.inf),
)  # fmt: skip
def test_a_reset_ends_a_nan(form, dtype, impl, bad, device, monkeypatch):
    """ema_scan with g = -inf at a token, in a chunk's midst, at its head, and in a later piece: of
    bad numbers on one side nothing reaches the other, neither in y and the state nor backwards in
    the gradients. A factor that multiplies by zero carries them over, and so does one that a
    rounded difference of two sums of g leaves at 2^-149.
    """
    for patch in form.patches:
        monkeypatch.setattr(*patch)
    x, options = form.draw(1, 70, dtype, device)
    resets = (5, 22, 32, 57)
    x["g"][:, [3, 4, 5, 21, 22, 32, 40, 57]] = -torch.inf
    do, dht = form.cotangents(x)
    options["impl"] = impl
    want = form.run(x, do, dht, **options)
    for r in resets:
        for wrong, right in ((slice(r), slice(r, None)), (slice(r, None), slice(r))):
            y, dy, dS = {n: t.clone() for n, t in x.items()}, do.clone(), dht.clone()
            for n in ("x", "weight"):
                y[n][:, wrong] = bad
            dy[:, wrong] = bad
            before, behind = r // 16 * 16, r // 16 * 16 + 16  # a gate's NaN has the whole chunk
            y["g"][:, slice(before) if wrong.stop else slice(behind, None)] = torch.nan
            edge, kept = ("initial_state", "ht") if right.start else ("ht", "dinitial_state")
            y["initial_state"][:] = bad if edge == "initial_state" else y["initial_state"]
            dS[:] = bad if edge == "ht" else dS
            got = form.run(y, dy, dS, **options)
            assert not got["o"][:, wrong].isfinite().all()
            right = {n: (slice(None), right) for n in ("o", "dx", "dg", "dweight")} | {kept: ...}
            for n, at in right.items():
                if impl == "reference":
                    assert torch.equal(got[n][at], want[n][at]), (n, r)
                else:  # that chunk is computed token by token
                    assert_close(n, got[n][at], want[n][at], 1e-5 if dtype == F32[0] else 5e-3)


T = 20  # of calls.py
LATER = [
    n for n in calls.CALLS
    if n != "causal_conv1d_fn"  # whose tokens are behind the channels
    and any(t.shape[1:2] == (T,) for t in calls.call(n)[1].values())
]  # fmt: skip
# within a chunk products whose upper half is masked carry it back
CHUNKED = ("chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined", "ema_scan")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", LATER)
def test_a_nan_does_not_reach_earlier_tokens(name, impl, device):
    """Of every function of tokens: all that comes later is NaN, outputs before keep their bits; of
    the CHUNKED ones in earlier chunks. Rows read past the end of a chunk, or anything summed over a
    sequence, carry it back.
    """
    f, x, options = calls.call(name, device)
    cut = 17
    if name.split()[0] in CHUNKED:
        cut = options["chunk_size"] = 16
    later = [n for n in floats(x) if x[n].shape[1:2] == (T,)]
    bad = with_nan(x, {n: (slice(None), slice(cut, None)) for n in later})
    with torch.no_grad():
        got, want = (f(**y, **options, impl=impl) for y in (bad, x))
    got, want = (y if isinstance(y, tuple) else (y,) for y in (got, want))
    assert want[0].shape[1] == T
    assert got[0][:, cut:].isnan().any()
    for a, b in zip(got, want, strict=True):
        if b is not None and b.shape[1:2] == (T,):
            assert torch.equal(a[:, :cut], b[:, :cut])
