"""Packed sequences, of every operator over sequences: the same bits as each by itself."""

from itertools import pairwise

import pytest
import torch
from gdn_checks import boundaries, by_value, launches, no_wait, same_bits
from grids import FULL, few
from ops.contract import (
    DELTA,
    FORMS,
    GPU,
    IMPLS,
    conv,
    dplr_chunks,
    ema,
    forms,
    gdn,
    gdn2,
    in_pieces,
    kda,
    recurrent_kda,
    safe,
    ssd,
)

from linattn_edu.cp import build_cp_context
from linattn_edu.ops.operator import composing
from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

F32 = (torch.float32,)
SOME = few(torch.float32, torch.bfloat16, more=(torch.float16,))
WHOLE = [f for f in FORMS if f.name != "ema, in pieces"]


@pytest.fixture(autouse=True)
def numbers_by_value(monkeypatch, request):
    """What a form changes; and the CPU's sigmoid of a number alone."""
    by_value(monkeypatch)
    for module, name, value in request.node.callspec.params["form"].patches:
        monkeypatch.setattr(module, name, value)


def indices(lengths, device, chunk_size=64, dtype=torch.int64):
    """[NT, 2]: sequence of each chunk, its number in the sequence."""
    rows = [(n, c) for n, T in enumerate(lengths) for c in range(-(-T // chunk_size))]
    return torch.tensor(rows, device=device, dtype=dtype)


def each_by_itself(form, x, do, dht, lengths, got, **options):
    """Assert that results have the bits of the sequences alone; sums over them, their digits."""
    sums = {n: 0 for n in form.sums() if n in got}
    for n, (a, b) in enumerate(pairwise(boundaries(lengths).tolist())):
        t, last = slice(a, b), dht if dht is None else dht[n : n + 1]
        if a == b:  # the state goes through
            state = x.get("initial_state")
            assert torch.equal(got["ht"][n], got["ht"][n] * 0 if state is None else state[n])
            assert state is None or torch.equal(got["dinitial_state"][n], dht[n])
            continue
        want = form.run(form.part(x, n, t), do[:, t], last, **options)
        same_bits(form.part(got, n, t), want, *sums)
        sums = {m: total + want[m].double() for m, total in sums.items()}
    for n, total in sums.items():
        assert_close(n, got[n], total, 5e-6 if got[n].element_size() > 2 else 2e-2)


@forms(
    "test_packed_sequences_equal_each_by_itself", *FORMS, in_pieces, dtypes=SOME, impl=IMPLS
)  # fmt: skip
def test_packed_sequences_equal_each_by_itself(form, dtype, impl, device):
    """Both passes, before the gate of a layer, documents within a sequence too."""
    x, do, dht, options = form.packed(form.lengths, dtype, device, raw=True)
    options["impl"] = impl
    got = form.run(x, do, dht, cu_seqlens=boundaries(form.lengths, device), **options)
    each_by_itself(form, x, do, dht, form.lengths, got, **options)


def little(form):
    """Lengths of sequences, one without tokens, of one or two chunks; and the option for that."""
    if form.chunk is None:
        return (2, 0, 3), {}
    return (15, 0, 20), {"chunk_size": 16} if form.chunk == 16 else {}


@forms("test_without_states", dtypes=F32, impl=IMPLS)
def test_without_states(form, dtype, impl, device):
    """What a sequence without tokens leaves is zero; without a final state the same outputs."""
    lengths, small = little(form)
    x, do, dht, options = form.packed(lengths, dtype, device, state=False)
    options |= small | {"impl": impl}
    bounds = boundaries(lengths, device)
    got = form.run(x, do, dht, cu_seqlens=bounds, **options)
    each_by_itself(form, x, do, dht, lengths, got, **options)
    o, none = form(x, cu_seqlens=bounds, **options)
    assert none is None and torch.equal(o, got["o"])


@forms("test_however_the_boundaries_are_given", dtypes=F32, impl=IMPLS)
def test_however_the_boundaries_are_given(form, dtype, impl, device):
    """int32, int64; known to the host, with the chunks counted before; a column of a table."""
    lengths, small = little(form)
    x, do, dht, options = form.packed(lengths, dtype, device)
    options |= small | {"impl": impl}
    bounds = boundaries(lengths, device, torch.int64)
    want = form.run(x, do, dht, cu_seqlens=bounds, **options)
    column = torch.stack([bounds, torch.full_like(bounds, sum(lengths))], 1)[:, 0]
    given = [{"cu_seqlens": column}]
    for integer in (torch.int32, torch.int64):
        known = {"cu_seqlens_cpu": boundaries(lengths, dtype=integer)}
        known["chunk_indices"] = indices(lengths, device, form.chunk or 16, integer)
        known = {n: known[n] for n in form.known}
        extras = {}, *({n: t} for n, t in known.items()), known
        if not FULL:
            extras = extras[:-1] if integer == torch.int32 else extras[-1:]
        given += [extra | {"cu_seqlens": bounds.to(integer)} for extra in extras]
    for extra in given:
        same_bits(form.run(x, do, dht, **options, **extra), want)


@forms("test_one_sequence_packed_is_a_batch_of_one", dtypes=F32, impl=IMPLS)
def test_one_sequence_packed_is_a_batch_of_one(form, dtype, impl, device):
    x, do, dht, options = form.short(dtype, device, raw=True)
    options["impl"] = impl
    got = form.run(x, do, dht, cu_seqlens=boundaries((form.T,), device), **options)
    same_bits(got, form.run(x, do, dht, **options))


@forms("test_neighbours_change_nothing", dtypes=SOME, impl=IMPLS)
def test_neighbours_change_nothing(form, dtype, impl, device):
    """Other tokens, gradients, lengths and more sequences around it: the same bits."""
    T = form.T
    some, others = (T // 4, T, 3), (3, T // 2, T, 0, 1)
    here, there = slice(T // 4, T // 4 + T), slice(3 + T // 2, 3 + T // 2 + T)
    (x, do, dht, options), (y, do_y, dht_y, _) = (
        form.packed(lengths, dtype, device, seed=seed, strong=seed > 0)
        for lengths, seed in ((some, 0), (others, 5))
    )
    for n, t in (y | {"do": do_y, "dht": dht_y}).items():
        source = (x | {"do": do, "dht": dht})[n]
        if n in ("initial_state", "dht"):
            t[2] = source[1]
        elif n in form.summed:
            t.copy_(source)
        else:
            t[:, there] = source[:, here]
    options["impl"] = impl
    a = form.run(x, do, dht, cu_seqlens=boundaries(some, device), **options)
    b = form.run(y, do_y, dht_y, cu_seqlens=boundaries(others, device), **options)
    same_bits(form.part(a, 1, here), form.part(b, 2, there), *form.sums())


@pytest.mark.gpu
@forms("test_no_wait_for_the_device", dtypes=(torch.float32, torch.bfloat16), chunks=(False, True))
def test_no_wait_for_the_device(form, dtype, chunks):
    """With cu_seqlens_cpu the host reads nothing from the GPU, forward or backward."""
    x, do, dht, options = form.packed(form.lengths, dtype, "cuda", raw=True)
    options |= {"cu_seqlens": boundaries(form.lengths, "cuda")}
    options |= {"cu_seqlens_cpu": boundaries(form.lengths)}
    if chunks and "chunk_indices" in form.known:
        options["chunk_indices"] = indices(form.lengths, "cuda", form.chunk)
        options |= {"chunk_size": 16} if form.chunk == 16 else {}
    want = form.run(x, do, dht, **options)  # compiles
    with no_wait():
        got = form.run(x, do, dht, **options)
    same_bits(got, want)


@forms("test_states_with_v_first", *DELTA, dtypes=SOME, packed=(False, True), impl=IMPLS)
def test_states_with_v_first(form, dtype, packed, impl, device):
    lengths, small = little(form)
    if packed:
        x, do, dht, options = form.packed(lengths, dtype, device)
        options |= small | {"cu_seqlens": boundaries(lengths, device)}
    else:
        x, do, dht, options = form.short(dtype, device)
    options["impl"] = impl
    want = form.run(x, do, dht, **options)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    got = form.run(x, do, dht.mT.contiguous(), state_v_first=True, **options)
    for n in ("ht", "dinitial_state"):
        assert got[n].shape == x["initial_state"].shape
        got[n] = got[n].mT
    same_bits(got, want)


@pytest.mark.parametrize("end", (17, 0))
@forms("test_tokens_behind_the_last_sequence", dtypes=F32, impl=IMPLS, raw=(False, True))
def test_tokens_behind_the_last_sequence(form, dtype, impl, raw, end, device):
    """Padding: outputs and gradients zero, and the bits of the call without; whatever is there, but
    where a function of one token comes first, whose gradient is its own.
    """
    check_behind(form, form.f, dtype, impl, raw, end, device)


@forms(
    "test_tokens_behind_the_last_sequence",
    # of the others test_contract has graphs: all of them go through one operator
    *(WHOLE if FULL or GPU else (gdn, recurrent_kda, dplr_chunks, ema)),
    dtypes=F32,
    impl=few("triton", more=IMPLS[:1]),
)
def test_tokens_behind_the_last_sequence_compiled(form, dtype, impl, device):
    """Of the kernels, which leave unwritten what is behind: what a graph does around them."""
    torch._dynamo.reset()
    f = torch.compile(form.f, fullgraph=True, backend="aot_eager")
    check_behind(form, f, dtype, impl, False, 17, device)


def check_behind(form, f, dtype, impl, raw, end, device):
    """f of a form on three sequences that end before T, beside form.f on them alone."""
    lengths = (end // 2, 0, end - end // 2)
    x, options = form.draw(1, end + 9, dtype, device, N=3, raw=raw)
    do, dht = form.cotangents(x, 3)
    options |= {"cu_seqlens": boundaries(lengths, device), "impl": impl}
    options |= {"chunk_size": 16} if form.chunk == 16 else {}
    short = {n: t[:, :end] if n in form.tokens else t for n, t in x.items()}
    want = form.run(short, do[:, :end], dht, **options)
    behind = {n: t for n, t in (x | {"do": do}).items() if n in (*form.tokens, "do")}
    for n, t in behind.items():
        if not raw and n != "residual":
            t[:, end:] = torch.nan
    got = form.run(x, do, dht, f=f, **options)
    for n, t in got.items():
        if n == "o" or n.removeprefix("d") in behind:
            rest = t[:, end:]
            if n == "o" and "residual" in x:  # which is added to it
                rest = rest - x["residual"][:, end:]
            assert not rest.any() or n == "dresidual"
            got[n], want[n] = t[:, :end], want[n][:, :end]
    same_bits(got, want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@forms(
    "test_a_graph_keeps_no_boundaries",
    *(FORMS if FULL or GPU else FORMS[::2]),
    dtypes=F32,
    host=(False, True),
)
def test_a_graph_keeps_no_boundaries(form, dtype, host, device):
    """Compiled once, it serves four pairs of sequences, also those that end before T; host: it is
    given their boundaries too, where the form takes them.
    """
    host = host and "cu_seqlens_cpu" in form.known
    x, options = form.draw(1, 20, dtype, device, N=2)
    options |= {"impl": "reference"} if device.type == "cpu" else {}
    torch._dynamo.reset()
    f = torch.compile(form.f, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, end in enumerate(((8, 20), (3, 20), (0, 20), (5, 17))):
        bounds = {"cu_seqlens": torch.tensor([0, *end], device=device)}
        bounds |= {"cu_seqlens_cpu": torch.tensor([0, *end])} if host else {}
        given = form.options | options | bounds
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = f(**x, **given)[0]
        assert torch.equal(got, form.f(**x, **given)[0])


@forms("test_behind_ends_that_the_host_does_not_read", *WHOLE, dtypes=F32)
def test_behind_ends_that_the_host_does_not_read(form, dtype, device, monkeypatch):
    """As on a GPU, where kernels go by cu_seqlens alone and leave what is behind unwritten."""
    monkeypatch.setattr(composing, "READABLE", ())
    lengths, end = (2, 0, 3), 5
    x, options = form.draw(1, end + 4, dtype, device, N=3)
    x.pop("residual", None)  # which is added behind the end too
    do, dht = form.cotangents(x, 3)
    options |= {"cu_seqlens": boundaries(lengths, device), "impl": "triton"}
    for t in (*(x[n] for n in form.tokens if n in x), do):
        t[:, end:] = torch.nan
    got = form.run(x, do, dht, **options)
    short = {n: t[:, :end] if n in form.tokens else t for n, t in x.items()}
    want = form.run(short, do[:, :end], dht, **options)
    for n in ("o", *(f"d{n}" for n in form.tokens if n in x)):
        assert not got[n][:, end:].any()
        got[n] = got[n][:, :end]
    same_bits(got, want)
    with torch.no_grad():
        o, _ = form(x, **options)
    assert not o[:, end:].any() and torch.equal(o[:, :end], want["o"])


ROOM = {
    "none of cu_seqlens": ({"cu_seqlens": None}, "max_num_seqs belongs to cu_seqlens"),
    "too many": ({"max_num_seqs": 2}, "must bound at most max_num_seqs=2 sequences, got 3"),
    "none": ({"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1, got 0"),
    "numbers": ({"cu_seqlens_cpu": torch.tensor([0, 2, 2, 5])}, "cu_seqlens_cpu must be None"),
    "a decrease": ({"cu_seqlens": torch.tensor([0, 3, 2, 5])}, "cu_seqlens must not decrease"),
    "checkpoints": ({"checkpoint_every_n_tokens": 64}, "not supported with max_num_seqs"),
    "ranks": (
        {"cp_context": build_cp_context(torch.tensor([0, 2, 2, 5])), "cu_seqlens": None},
        "cp_context must be None with max_num_seqs",
    ),
}


@pytest.mark.parametrize("wrong", ROOM)
@pytest.mark.parametrize("form", [gdn, kda, gdn2, dplr_chunks, ema, ssd[-1], conv], ids=str)
def test_no_room(form, wrong):
    changes, message = ROOM[wrong]
    if form is conv and wrong == "checkpoints":
        changes, message = {"chunk_indices": torch.zeros(1, 2, dtype=int)}, "chunk_indices must be"
    x, options = form.draw(1, 5, torch.float32, "cpu", N=1 if "of" in wrong else 3)
    given = {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "max_num_seqs": 3} | changes
    with launches() as ran, pytest.raises(ValueError, match=message):
        form(x, **options, **given)
    assert not ran


@forms(
    "test_room_for_any_boundaries",
    gdn,
    safe,
    gdn2,
    dplr_chunks,
    ema,
    *ssd,
    conv,
    dtypes=SOME,
    lengths=((15, 0, 20), (0, 0, 0), (1, 38, 1)),
    read=(False, True),
)
def test_room_for_any_boundaries(form, dtype, lengths, read, device, monkeypatch):
    """With max_num_seqs there are chunks that are of no sequence, and nothing of them is seen:
    where the host reads the boundaries and where it does not, which a GPU alone does not.
    """
    x, options = form.draw(1, 40, dtype, device, N=3)
    x.pop("residual", None)  # which is added behind the end too
    do, dht = form.cotangents(x, 3)
    options |= {"chunk_size": 16} if form.chunk == 16 else {}
    options |= {"cu_seqlens": boundaries(lengths, device), "impl": "triton"}
    for t in (*(x[n] for n in form.tokens if n in x), do):
        t[:, sum(lengths) :] = torch.nan
    want = form.run(x, do, dht, **options)
    if not read:
        monkeypatch.setattr(composing, "READABLE", ())
    same_bits(form.run(x, do, dht, **options, max_num_seqs=4), want, *form.sums())
    with torch.no_grad():
        o, S = form(x, **options, max_num_seqs=3, output_final_state=True)
    assert torch.equal(o, want["o"]) and torch.equal(S, want["ht"])


@forms("test_no_tokens", dtypes=SOME, impl=IMPLS, packed=(False, True), state=(True, False))
def test_no_tokens(form, dtype, impl, packed, state, device):
    """The initial state is the final one, and its gradient goes straight through."""
    x, options = form.draw(1 if packed else 2, 0, dtype, device, N=2, raw=True, state=state)
    do, dht = form.cotangents(x, 2)
    options |= {"cu_seqlens": torch.zeros(3, dtype=torch.int64, device=device)} if packed else {}
    options |= {"impl": impl}
    want = x["initial_state"] if state else torch.zeros_like(dht)
    with torch.no_grad():
        o, S = form(x, **options, output_final_state=True)
    assert o.shape == do.shape and o.dtype == dtype
    assert S.dtype == want.dtype and torch.equal(S, want) and S is not x.get("initial_state")
    got = form.run(x, do, dht, **options)
    assert got["o"].shape == do.shape and torch.equal(got["ht"], want)
    for n, t in x.items():
        if t.is_floating_point():
            assert got[f"d{n}"].shape == t.shape
            assert torch.equal(got[f"d{n}"], dht if n == "initial_state" else torch.zeros_like(t))
