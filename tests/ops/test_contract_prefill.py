"""A prompt in pieces, by every chunked operator: the whole's bits, and its states on the way."""

import pytest
import torch
from gdn_checks import boundaries, launches, same_bits
from grids import few
from ops.contract import IMPLS, dplr_chunks, ema, forms, gdn, gdn2, kda, ssd

from linattn_edu.kernels import routes
from linattn_edu.testing import assert_close, relative_rms

pytestmark = pytest.mark.usefixtures("poison", "numbers_by_value")

INVARIANT = (gdn, kda, gdn2, *ssd)
CHUNKED = (*INVARIANT, dplr_chunks, ema)
SOME = few(torch.float32, torch.bfloat16, more=(torch.float16,))
F32 = (torch.float32,)
EPS = {t: torch.finfo(t).eps for t in (*F32, torch.bfloat16, torch.float16)}
N, LENGTHS = 16, (33, 0, 16, 5, 48)


def called(form, x, **options):
    """o, the final state and the states at every N tokens if they are asked for."""
    return form(x, **{"output_final_state": True, "chunk_size": N} | options)


def tokens(form, x, a, b):
    return {n: t[:, a:b] if n in form.tokens else t for n, t in x.items()}


@forms("test_pieces_of_whole_chunks", *CHUNKED, dtypes=SOME, impl=IMPLS)
def test_pieces_of_whole_chunks(form, dtype, impl, device):
    """Cut between chunks, a prompt has the bits of the whole; so it has with checkpoints, which are
    the states of its pieces. Of a reference PyTorch rounds a number by what is beside it: once.
    """

    def same(x, y):
        return torch.equal(x, y) if impl == "triton" else relative_rms(x, y) <= EPS[x.dtype]

    x, options = form.draw(2, 3 * N + 7, dtype, device)
    options["impl"] = impl
    whole, last = called(form, x, **options)
    o, final, kept = called(form, x, **options, checkpoint_every_n_tokens=N)
    assert same(o, whole) and same(final, last) and kept.shape[1] == 3
    for c in range(3):
        _, before = called(form, tokens(form, x, 0, (c + 1) * N), **options)
        assert same(kept[:, c], before)
        rest = tokens(form, x, (c + 1) * N, None) | {"initial_state": kept[:, c].contiguous()}
        after, end = called(form, rest, **options)
        assert same(after, whole[:, (c + 1) * N :]) and same(end, last)


@forms("test_pieces_of_any_length", *CHUNKED, dtypes=SOME, impl=IMPLS)
def test_pieces_of_any_length(form, dtype, impl, device):
    """Cut anywhere the chunks are others: as near to the recurrence as the whole is."""
    T = 3 * N + 7
    x, options = form.draw(1, T, dtype, device)
    do, dht = form.cotangents(x)
    want = form.exact(x, do, dht, **options)
    outputs, state = [], x["initial_state"]
    for a, b in ((0, 1), (1, 20), (20, T)):
        piece = tokens(form, x, a, b) | {"initial_state": state}
        o, state = called(form, piece, **options, impl=impl)
        outputs.append(o)
    got = {"o": torch.cat(outputs, 1), "ht": state}
    form.check(got, want, dtype)


@forms(
    "test_checkpoints_of_packed_sequences", *CHUNKED, dtypes=F32, impl=IMPLS, state=(True, False)
)
def test_checkpoints_of_packed_sequences(form, dtype, impl, state, device):
    """Each has the bits of a call of its own, o, its states and the gradients through both."""
    T = sum(LENGTHS) + 3
    x, options = form.draw(1, T, dtype, device, N=len(LENGTHS), state=state)
    options |= {"impl": impl, "checkpoint_every_n_tokens": N}
    x = {n: t.requires_grad_() for n, t in x.items()}
    bounds = boundaries(LENGTHS, device)
    o, last, kept = called(form, x, cu_seqlens=bounds, **options)
    assert not o[:, sum(LENGTHS) :].any() and len(kept) == sum(n // N for n in LENGTHS)
    do, dkept = torch.randn_like(o), torch.randn_like(kept)
    got = dict(zip(x, torch.autograd.grad((o, kept), [*x.values()], (do, dkept)), strict=True))
    first = done = 0
    sums = {n: 0 for n in x if n in form.summed}
    for n, length in enumerate(LENGTHS):
        if not length:
            continue
        own = slice(first, first + length)
        one = {m: t[n : n + 1] if m == "initial_state" else t for m, t in x.items()}
        one = tokens(form, one, own.start, own.stop)
        one = {m: t.detach().requires_grad_() for m, t in one.items()}
        alone, end, states = called(form, one, **options)
        assert torch.equal(o[:, own], alone) and torch.equal(last[n : n + 1], end)
        assert torch.equal(kept[done : done + length // N], states[0])
        into = {alone: do[:, own]}
        if length >= N:
            into[states] = dkept[None, done : done + length // N]
        gradients = dict(
            zip(one, torch.autograd.grad([*into], [*one.values()], [*into.values()]), strict=True)
        )
        sums = {m: total + gradients.pop(m) for m, total in sums.items()}
        same_bits({m: form.part(got, n, own)[m] if m in form.tokens else got[m][n : n + 1]
                   for m in gradients}, gradients)  # fmt: skip
        first, done = first + length, done + length // N
    for m, total in sums.items():
        assert_close(m, got[m], total, 5e-6)


@forms("test_gradients_through_checkpoints", *CHUNKED, dtypes=(torch.float32,))
def test_gradients_through_checkpoints(form, dtype, device):
    """In float64 those of the prefixes, each a call of its own, and of the whole."""
    x, options = form.draw(1, 2 * N + 5, dtype, device)
    x = {n: t.double().requires_grad_() for n, t in x.items()}
    options["impl"] = "reference"
    o, last, kept = called(form, x, **options, checkpoint_every_n_tokens=N)
    want = called(form, x, **options)
    want = *want, *(called(form, tokens(form, x, 0, c * N), **options)[1] for c in (1, 2))
    got = o, last, *kept.unbind(1)
    grads = [torch.randn_like(t) for t in got]
    leaves = [*x.values()]
    for n, a, b in zip(
        x, torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads),
        strict=True,
    ):  # fmt: skip
        assert_close(f"d{n}", a, b, 1e-11)


@forms("test_no_checkpoint", *CHUNKED, dtypes=F32, impl=IMPLS)
def test_no_checkpoint(form, dtype, impl, device):
    """Of sequences that are shorter, or have no tokens; the other results are as without."""
    for T in (0, 5):
        x, options = form.draw(2, T, dtype, device)
        o, last, kept = called(form, x, **options, impl=impl, checkpoint_every_n_tokens=N)
        want = called(form, x, **options, impl=impl)
        assert torch.equal(o, want[0]) and torch.equal(last, want[1])
        assert kept.shape == (2, 0, *last.shape[1:]) and kept.dtype == last.dtype
    x, options = form.draw(1, 0, dtype, device, N=2)
    options |= {"impl": impl, "cu_seqlens": boundaries((0, 0), device)}
    o, last, kept = called(form, x, **options, checkpoint_every_n_tokens=N)
    assert torch.equal(last, x["initial_state"].to(last.dtype)) and len(kept) == 0 == o.numel()


REFUSED = {
    "no number of chunks": (24, ValueError, "a multiple of the chunk's 16 tokens, got 24"),
    "none": (0, ValueError, "a multiple of the chunk's 16 tokens, got 0"),
    "a float": (16.0, TypeError, "an integer or None, got 16.0"),
    "a flag": (True, TypeError, "an integer or None, got True"),
}


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("form", [gdn, kda, gdn2, ssd[-1], dplr_chunks, ema], ids=str)
def test_refused(form, wrong):
    every, error, message = REFUSED[wrong]
    x, options = form.draw(1, 20, torch.float32, "cpu")
    with launches() as ran, pytest.raises(error, match=f"checkpoint_every_n_tokens .*{message}"):
        called(form, x, **options, checkpoint_every_n_tokens=every)
    assert not ran


@forms("test_batch_invariant", *INVARIANT, dtypes=F32)
def test_batch_invariant(form, dtype, device):
    """It changes no bit; the reference is refused, and where kernels cut a long sequence."""
    x, options = form.draw(1, 4 * N, dtype, device)
    want = called(form, x, **options, impl="triton")
    got = called(form, x, **options, impl="triton", batch_invariant=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match="needs the kernels, got impl='reference'"):
        called(form, x, **options, impl="reference", batch_invariant=True)
    if form in ssd[1:]:  # whose stages one by one cut nothing
        return
    options |= {"impl": "triton", "batch_invariant": True}
    cut = {"pieces_by_maps": 32, "SSD_PIECE": 32, "ssd_piece": 32}
    with routes.forced(**cut), launches() as ran:
        message = "no kernel cuts, got T=64: give checkpoint_every_n_tokens"
        with pytest.raises(ValueError, match=message):
            called(form, x, **options)
    assert not ran
