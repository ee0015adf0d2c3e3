"""Defects that other libraries of linear attention had, each as a test of every operator that could
have it: outputs and gradients against the recurrence in float64, or to the bit. The forms and their
tolerances are those of contract.py; attention-gym's ledger of cuDNN's kernels and transformers
#48455 name the cases.
"""

from itertools import accumulate
from math import log

import pytest
import torch
from gdn_checks import TOLERANCES, boundaries, exact, pretend, same_bits, tolerance
from grids import ONE_ORDER, few, name
from ops.contract import (
    BY_CHANNEL,
    DELTA,
    GPU,
    IMPLS,
    STATES,
    conv,
    ema,
    forms,
    gdn,
    kda,
    recurrent_gdn,
    recurrent_kda,
    safe,
    ssd,
)
from ops.test_contract_packed import each_by_itself

from linattn_edu import mamba_chunk_scan_combined, selective_state_update
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.packing import pack
from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

F32, F16 = (torch.float32,), (torch.float16,)
SOME = few(torch.float32, torch.bfloat16, more=(torch.float16,))
SMALL = (0.0, 1e-10, 1e-6)  # beta


def strengths(x):
    """What a write is multiplied by: beta, or of GDN-2 b and w."""
    return [n for n in ("beta", "b", "w") if n in x]


@forms("test_a_beta_of_next_to_nothing", *DELTA, dtypes=SOME, impl=IMPLS)
def test_a_beta_of_next_to_nothing(form, dtype, impl, device):
    """dbeta is the gradient there too. Computed as a sum over beta times something, divided by
    beta, it is NaN or zero at 0, and half of it is lost at 1e-10.
    """
    x, do, dht, options = form.short(dtype, device)
    for i, beta in enumerate(SMALL):
        for n in strengths(x):
            x[n][:, i :: len(SMALL) + 1] = beta  # one token in four keeps its own
    got, want = form.run(x, do, dht, **options, impl=impl), form.exact(x, do, dht, **options)
    form.check(got, want, dtype)
    for i, beta in enumerate(SMALL):
        at = slice(i, None, len(SMALL) + 1)
        for d in (f"d{n}" for n in strengths(x)):
            assert want[d][:, at].norm() > 0
            tol = tolerance("dbeta", dtype)
            assert_close(f"{d} at {beta}", got[d][:, at], want[d][:, at], tol)


@forms("test_no_write_at_all", *DELTA, dtypes=SOME, impl=IMPLS)
def test_no_write_at_all(form, dtype, impl, device):
    """beta is 0 everywhere, no state is given: outputs are zero, dbeta is not; of GDN-2 dw."""
    x, do, dht, options = form.short(dtype, device, state=False)
    for n in strengths(x):
        x[n].zero_()
    got, want = form.run(x, do, dht, **options, impl=impl), form.exact(x, do, dht, **options)
    assert not got["o"].any() and not got["ht"].any() and not got["dv"].any()
    assert want[f"d{strengths(x)[-1]}"].norm() > 0
    form.check(got, want, dtype)


def cancelling(form, T, dtype, device):
    """Arguments in which v is 4096 and the state answers 4096 + 2."""
    K, V, like = 16, 16, {"dtype": dtype, "device": device}
    x = {"q": torch.zeros(1, T, 1, K, **like), "k": torch.zeros(1, T, 1, K, **like)}
    x["q"][..., 1], x["k"][..., :2] = K**0.5, 1
    gates = (1, T, 1) if form in (gdn, recurrent_gdn) else (1, T, 1, K)
    x |= {"v": torch.full((1, T, 1, V), 4096.0, **like), "g": torch.zeros(gates, device=device)}
    if form in BY_CHANNEL:
        x |= {n: torch.full((1, T, 1, D), 0.25, device=device) for n, D in (("b", K), ("w", V))}
    else:
        x |= {"beta": torch.full((1, T, 1), 0.25, device=device)}
    x["initial_state"] = torch.zeros(1, 1, K, V, device=device)
    x["initial_state"][:, :, 0], x["initial_state"][:, :, 1] = 4096, 2
    return x


def in_stages(form, x):
    """Whether the kernels of a form's backward pass are those of the stages one by one."""
    stages = by_kind.gdn_backward_stages if form is gdn else by_kind.kda_backward_stages
    kind = kind_of(x["q"], *x["v"].shape[2:], 64, None)
    return form is safe or (form.chunk is not None and stages(kind).takes == "staged")


# what is left of dbeta's digits where v and the state's answer cancel
DBETA = {torch.float32: 3e-3, torch.float16: 3e-3, torch.bfloat16: 1e-2}


@forms("test_what_is_written_is_a_small_difference", *DELTA, impl=IMPLS)
def test_what_is_written_is_a_small_difference(form, dtype, impl, device):
    """v is 4096 and the state answers 4096 + 2: every token writes a part of -2, then of -1.
    Rounded to bfloat16 before v is taken from it, 4098 is 4096, and nothing is written: outputs
    stay 2 where 1.5, 1.25, 1.125, ... are exact.
    """
    x = cancelling(form, 4 if form.chunk is None else 64, dtype, device)
    do, dht = form.cotangents(x)
    chunks = {} if form.chunk is None else {"chunk_size": 64}
    got, want = form.run(x, do, dht, **chunks, impl=impl), form.exact(x, do, dht)
    written = 0.5 ** torch.arange(1, do.shape[1] + 1, dtype=torch.float64, device=device) - 1
    written = written[None, :, None, None].expand(do.shape)
    assert_close("o", want["o"] - 2, written, 1e-12)
    # 4096 is exact where a sum has the order of the other one; else it rounds by 2^-12
    least = 0 if GPU or ONE_ORDER else 2**-11
    assert_close("o", got["o"].double() - 2, written, max(least, TOLERANCES[dtype][0]))
    wide = dtype == torch.float32
    # in chunks dbeta is the difference of two sums some thousand times as large; keys are alike
    every = 0 if wide else 1.5e-2
    form.check(got, want, dtype, every=every, dbeta=DBETA[dtype], o=max(every, least))


@forms("test_a_small_difference_in_stages", gdn, kda, safe)
def test_a_small_difference_in_stages(form, dtype, device, monkeypatch):
    """The same by the kernels of the stages one by one: both parts of dbeta, v's and the state's,
    have a factor that is rounded, and one of them goes from stage to stage.
    """
    if not GPU:
        pretend(monkeypatch, "ampere")
    x = cancelling(form, 32, dtype, device)
    assert GPU or in_stages(form, x)
    # drawn alike on every device: what is left of dbeta's digits depends on the draw
    do, dht = (y.to(device) for y in form.cotangents({n: t.cpu() for n, t in x.items()}))
    got, want = form.run(x, do, dht, chunk_size=32, impl="triton"), form.exact(x, do, dht)
    form.check(got, want, dtype, every=1.5e-2)
    assert_close("dbeta", got["dbeta"], want["dbeta"], DBETA[dtype])


# what has room for a state beyond 65504, by what the docstrings of chunked operators say
ROOM = [(f, d) for f in (gdn, kda) for d in (torch.bfloat16, torch.float32)]
ROOM += [(f, d) for f in (recurrent_gdn, recurrent_kda) for d in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("form", "dtype"), ROOM, ids=name)
def test_states_beyond_float16(form, dtype, device):
    """A state of 7e4 whose outputs and gradients fit: chunks in float16, which copy states in 16
    bit, make it NaN; what their docstrings name as the cure holds it.
    """
    x, do, dht, options = form.short(dtype, device)
    x = {n: t for n, t in x.items() if n not in ("gk", "gv")}
    x["g"] = torch.full_like(x["g"], -0.5)
    x["initial_state"] = torch.full_like(x["initial_state"], 7e4)
    options |= {"scale": 1e-3}
    got = form.run(x, do, dht, **options, impl="triton")
    want = exact(x, do, dht, **options)
    assert 5 < want["o"].abs().max() < 70
    form.check(got, want, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_mamba_states_beyond_float16(dtype, device):
    """x and B up to 60 and a memory that hardly fades: in chunks, and, from x in float16, token by
    token with a state in float32, as the docstring says.
    """
    H, P, N, T = 1, 8, 16, 200
    generator = torch.Generator(device=device).manual_seed(0)
    like = {"device": device, "generator": generator}
    x, B, C = (60 * torch.rand(1, T, n, m, **like) for n, m in ((H, P), (1, N), (1, N)))
    x, B, C = x.half(), B.half(), (C * 1e-5).half()
    dt, A = torch.full((1, T, H), 0.5, device=device), torch.full((H,), -1e-3, device=device)
    given = (t.double() for t in (x, dt, A, B, C))
    state = {"chunk_size": 64, "return_final_states": True}
    want, last = mamba_chunk_scan_combined(*given, **state, impl="reference")
    assert last.abs().max() > 65504 > want.abs().max()
    given = (t.to(dtype) for t in (x, B, C))
    x_, B_, C_ = given
    out, h = mamba_chunk_scan_combined(x_, dt, A, B_, C_, **state, impl="triton")
    tol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close("out", out, want, tol)
    assert_close("state", h, last, tol)
    h, rows = torch.zeros_like(h), []
    for i in range(T):
        step = x[:, i], dt[:, i, :, None].expand(1, H, P), A[:, None, None].expand(H, P, N)
        rows.append(selective_state_update(h, *step, B[:, i], C[:, i], impl="triton"))
    assert_close("out, by token", torch.stack(rows, 1), want, 1e-3)
    assert_close("state, by token", h, last, 1e-4)


EMPTY = (*[0] * 20, 3, *[0] * 30, 1, 17, *[0] * 21)  # 71 of them


# of one head
LITTLE = {
    gdn: (1, 1, 16, 16), kda: (1, 1, 16, 16), recurrent_gdn: ((1, 1), 16, 16),
    recurrent_kda: ((1, 1), 16, 16), ssd[-1]: (1, 1, 16, 16), ema: (1, 16), conv: (4, 4),
}  # fmt: skip


@pytest.mark.usefixtures("numbers_by_value")
@forms("test_many_documents_without_tokens", *LITTLE, dtypes=F32, impl=IMPLS)
def test_many_documents_without_tokens(form, dtype, impl, device):
    """71 of them among three: the bits of the three alone, and the states of the others and their
    gradients go through. Chunks counted by document, or a document found by its first token, mix
    up their neighbours.
    """
    lengths = tuple(min(T, 3) for T in EMPTY) if form.chunk is None else EMPTY
    x, do, dht, options = form.packed(lengths, dtype, device, sizes=LITTLE[form])
    options |= {"impl": impl} | ({"chunk_size": 16} if form.chunk == 16 else {})
    got = form.run(x, do, dht, cu_seqlens=boundaries(lengths, device), **options)
    each_by_itself(form, x, do, dht, lengths, got, **options)


@forms("test_products_beyond_float16", *DELTA, dtypes=F16, impl=IMPLS)
def test_products_beyond_float16(form, dtype, impl, device):
    """beta is 2^-10 and v up to 6e4: sums of v over channels are beyond float16, beta times them
    are not. Rounded before beta, they are inf and dk is NaN.
    """
    x, do, dht, options = form.short(dtype, device)
    do = 8 * do
    x["v"] = (2e4 * x["v"].float()).clamp(-6e4, 6e4).to(dtype)
    for n in strengths(x):
        x[n] = torch.full_like(x[n], 2**-10, dtype=torch.float32)  # its gradient is beyond it too
    want = form.exact(x, do, dht, **options)
    # GDN-2's dw is no sum: a product of the same numbers, some of them smaller
    assert form in BY_CHANNEL or (want["dbeta"].abs() > 65504).any()
    assert all(want[f"d{n}"].abs().max() < 65504 for n in ("q", "k", "v"))
    form.check(form.run(x, do, dht, **options, impl=impl), want, dtype)


@forms(
    "test_gates_at_the_bound", *DELTA, *ssd, ema,
    dtypes=SOME, impl=IMPLS,
)  # fmt: skip
def test_gates_at_the_bound(form, dtype, impl, device):
    """Log decays are -5 at every token and channel, over a whole chunk of 64. The exponent of a
    difference that is masked afterwards is 315: inf, and its gradient NaN.
    """
    T = 4 if form.chunk is None else 66
    x, options = form.draw(1, T, dtype, device)
    if "dt" in x:
        x["A"].fill_(-5)
        x["dt"] = (log(torch.e - 1) - x["dt_bias"]).expand(x["dt"].shape).to(dtype).contiguous()
    for n in ("g", "gk", "gv"):
        if n in x:
            x[n].fill_(-5)
    do, dht = form.cotangents(x)
    chunks = {} if form.chunk is None else {"chunk_size": 64}
    got = form.run(x, do, dht, **options, **chunks, impl=impl)
    form.check(got, form.exact(x, do, dht, **options), dtype)


def ends(form, N, impl, device, both=True):
    """Assert that of N packed sequences of one token or two, the first, those about the 4096th and
    the last have the bits of a call of them alone.
    """
    lengths = [1 + n % 2 for n in range(N)]
    x, do, dht, options = form.packed(lengths, torch.float32, device, sizes=LITTLE[form])
    bounds = boundaries(lengths, device)

    def results(x, do, dht, bounds):
        if both:
            return form.run(x, do, dht, cu_seqlens=bounds, impl=impl, **options)
        y = form(x, cu_seqlens=bounds, impl=impl, output_final_state=True, **options)
        return dict(zip(("o", "ht"), y, strict=True))

    def some(y, a, b):
        tokens = slice(int(bounds[a]), int(bounds[b]))
        return {
            n: t[a:b] if n in STATES
            else t if {n, n.removeprefix("d")} & {*form.summed}
            else t[:, tokens]
            for n, t in y.items()
        }  # fmt: skip

    got = results(x, do, dht, bounds)
    for a, b in ((0, 2), (4094, 4098), (N - 3, N)):
        given = some(x | {"do": do}, a, b)
        want = results(given, given.pop("do"), dht[a:b], boundaries(lengths[a:b], device))
        same_bits(some(got, a, b), want, *form.sums())


@pytest.mark.parametrize("form", few(recurrent_gdn, conv, more=(recurrent_kda,)), ids=str)
def test_five_thousand_sequences(form, device, numbers_by_value):
    """A table of 4096 sequences ends before the last ones. The operators that pass over sequences
    quickly, without gradients: all others on a GPU.
    """
    ends(form, 5_000, "reference", device, both=False)


@pytest.mark.gpu
@pytest.mark.parametrize("N", (5_000, 70_000))
@forms("test_thousands_of_sequences", *LITTLE, dtypes=F32)
def test_thousands_of_sequences(form, dtype, N, device):
    """As above in both passes; a grid has no more than 65,535 programs on its second axis."""
    ends(form, N, "triton", device)


@pytest.mark.parametrize("N", (5_000, 70_000))
def test_chunks_of_thousands_of_sequences(N, device):
    """The tables that kernels go by, counted by hand. A counter of 16 bit ends at 32,767."""
    lengths = [(0, 1, 16, 17, 40)[n % 5] for n in range(N)]
    packing = pack(boundaries(lengths, device), 16)
    rows = [(n, c) for n, T in enumerate(lengths) for c in range(-(-T // 16))]
    offsets = [0, *accumulate(-(-T // 16) for T in lengths)]
    assert packing.chunk_indices.tolist() == [[*row] for row in rows]
    assert packing.chunk_offsets.tolist() == offsets
    pieces = packing.pieces(16, sum(lengths))
    rows = [(n, c, 16) for n, T in enumerate(lengths) for c in range(max(1, -(-T // 16)))]
    assert torch.equal(pieces[: len(rows)].cpu(), torch.tensor(rows))
