"""What every operator over sequences keeps: bits, causality, gradients, what a training code does.

Each property once, for the forms of contract.py.
"""

import gdn_checks
import kda_checks
import pytest
import torch
from gdn_checks import GENERATIONS, by_value, launches, pretend, same_bits
from grids import FULL, ONE_ORDER, few, name
from ops.contract import (
    DELTA,
    FORMS,
    GPU,
    HALF,
    IMPLS,
    conv,
    ema,
    forms,
    gdn,
    kda,
    recurrence,
    recurrent_gdn,
    safe,
    ssd,
)
from torch.utils.checkpoint import checkpoint

from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

F32 = (torch.float32,)
SOME = few(torch.float32, torch.bfloat16, more=(torch.float16,))


# -- bits and causality


# in the interpreter of most the last dtype, of 16 bit where there is one
CAUSAL = [
    (f, C, d)
    for f in FORMS
    for C in f.cuts
    for d in (f.dtypes if FULL or GPU or f in (kda, safe, ema) else f.dtypes[-1:])
]


@pytest.mark.parametrize(("form", "C", "dtype"), CAUSAL, ids=name)
def test_causal_to_the_bit(form, C, dtype, device):
    """Other tokens from the cut on, gates included, the gates alone, or none at all: every output
    before it stays.

    A batch has a sequence for each cut. The gates that come later are as strong as they may be, or
    open: an anchor that saw one of them would move the exponents of the tokens before it.
    """
    T, cuts = form.cuts[C]
    last = len(cuts)
    cuts += cuts[: None if GPU else 1]
    (x, options), (y, _) = (
        form.draw(B, T, dtype, device, seed=seed, strong=seed > 0)
        for B, seed in ((1, 0), (len(cuts), 7))
    )
    before = torch.arange(T, device=device) < torch.tensor(cuts, device=device)[:, None]
    for n, t in x.items():
        kept = before.clone()
        kept[last:] |= n != form.gate
        shape = *kept.shape, *[1] * (t.ndim - 2)
        y[n] = torch.where(kept.view(shape), t, y[n]) if n in form.tokens else t
    y |= {n: t.expand(len(cuts), *t.shape[1:]) for n, t in x.items() if n == "initial_state"}
    options |= {"impl": "triton"} | ({"chunk_size": C} if C else {})
    (o, _), (others, _) = form(x, **options), form(y, **options)
    for cut, other in zip(cuts, others, strict=True):
        assert torch.equal(o[0, :cut], other[:cut]), cut
        assert not torch.equal(o[0, cut:], other[cut:])
    for cut in cuts[:last]:
        short, _ = form({n: t[:, :cut] if n in form.tokens else t for n, t in x.items()}, **options)
        assert torch.equal(o[:, :cut], short), cut


@forms("test_no_gradient_after_the_last_output_used", dtypes=SOME)
def test_no_gradient_after_the_last_output_used(form, dtype, device):
    """do is zero from the cut on, dht is not given: exact zeros there, and the prefix's before."""
    C, (T, cuts) = next(iter(form.cuts.items()))
    for cut in cuts[1:] if FULL else cuts[1:][-2:][:1]:
        x, options = form.draw(1, T, dtype, device)
        do, _ = form.cotangents(x)
        do[:, cut:] = 0
        options |= {"impl": "triton"} | ({"chunk_size": C} if C else {})
        got = form.run(x, do, None, **options)
        prefix = {n: t[:, :cut] if n in form.tokens else t for n, t in x.items()}
        want = form.run(prefix, do[:, :cut], None, **options)
        for n in form.tokens:
            if f"d{n}" in got:
                dx, alone = got[f"d{n}"], want[f"d{n}"]
                assert not dx[:, cut:].any(), (n, cut)
                assert_close(f"d{n}", dx[:, :cut], alone.double(), 5e-3)
                exempt = n not in form.same or (n, dtype) in form.but
                assert exempt or torch.equal(dx[:, :cut], alone), (n, cut)


def halves(form, dtype, device):
    """(x, options, do, dht, cut, y) for some cuts; y: a draw whose gates are as strong as they may
    be. Where dq has not the same bits, one cut in several sequences: few numbers are no yardstick.
    """
    C, (T, cuts) = next(iter(form.cuts.items()))
    near = ("q", dtype) in form.but
    for cut in cuts[-1:] if near else cuts if FULL else cuts[1:3]:
        (x, options), (y, _) = (
            form.draw(1 + 3 * near, T, dtype, device, seed=seed, strong=seed > 0) for seed in (0, 7)
        )
        options |= {"impl": "triton", "chunk_size": C}
        yield x, options, *form.cotangents(x), cut, y


def joined(one, other, cut):
    """The tokens of one before the cut, of the other from there on."""
    return torch.cat([one[:, :cut], other[:, cut:]], 1)


@forms("test_dq_depends_on_nothing_after_its_token", gdn, kda, dtypes=SOME)
def test_dq_depends_on_nothing_after_its_token(form, dtype, device):
    """Not on later tokens, not on the gradients of other outputs or of the final state."""
    for x, options, do, dht, cut, y in halves(form, dtype, device):
        later = {n: joined(t, y[n], cut) if n in form.tokens else t for n, t in x.items()}
        other = torch.randn_like(do)
        other[:, cut - 1] = do[:, cut - 1]
        want = form.run(x, do, dht, **options)["dq"][:, cut - 1]
        got = form.run(later, other, 2 * dht, **options)["dq"][:, cut - 1]
        assert_close("dq", got, want.double(), 5e-3 if ("q", dtype) in form.but else 0)


@forms("test_earlier_output_gradients_do_not_reach_later_tokens", gdn, kda, dtypes=SOME)
def test_earlier_output_gradients_do_not_reach_later_tokens(form, dtype, device):
    """What k, v, g and beta of a token get comes from its own output and later ones."""
    for x, options, do, dht, cut, _ in halves(form, dtype, device):
        other = joined(torch.randn_like(do), do, cut)
        a, b = (
            {f"d{n}": got[f"d{n}"][:, cut:] for n in form.tokens}
            for got in (form.run(x, given, dht, **options) for given in (do, other))
        )
        same_bits(a, b)


@forms("test_dv_depends_on_no_value_and_no_earlier_token", gdn, kda, dtypes=SOME)
def test_dv_depends_on_no_value_and_no_earlier_token(form, dtype, device):
    """Values enter linearly. The gates stay: their sums in a chunk begin with the earlier ones."""
    for x, options, do, dht, cut, y in halves(form, dtype, device):
        other = x | {n: joined(y[n], x[n], cut) for n in ("q", "k", "beta")}
        other |= {n: y[n] for n in ("v", "initial_state")}
        a, b = (form.run(given, do, dht, **options)["dv"][:, cut:] for given in (x, other))
        assert torch.equal(a, b), cut


@forms("test_same_bits_every_run_and_in_any_batch")
def test_same_bits_every_run_and_in_any_batch(form, dtype, device):
    """Outputs and gradients; those of parameters from run to run, where programs run at once."""
    B, T, *sizes = form.crowd if GPU else (2, form.T)
    kinds = {"sizes": sizes[0]} if sizes else {}
    for impl in IMPLS if form.exactly else IMPLS[1:]:
        x, options = form.draw(B, T, dtype, device, raw=True, **kinds)
        do, dht = form.cotangents(x)
        options["impl"] = impl
        whole = form.run(x, do, dht, **options)
        if GPU:
            same_bits(form.run(x, do, dht, **options), whole)
        one = slice(1, 2)
        alone = form.run(form.of_batch(x, 1), do[one], dht[one], **options)
        if GPU or ONE_ORDER:
            same_bits(alone, form.of_batch(whole, 1))
        for n, t in form.of_batch(whole, 1).items():
            assert_close(n, alone[n], t.double(), 4 * torch.finfo(t.dtype).eps)


def shown_as(show, f):
    """f of what `show` makes of each tensor, so that gradients come by way of it."""
    return lambda **given: f(
        **{n: show(n, t) if torch.is_tensor(t) else t for n, t in given.items()}
    )


@forms("test_unaligned_storage", dtypes=SOME, impl=IMPLS)
def test_unaligned_storage(form, dtype, impl, device):
    """Tensors and gradients that begin one element behind an aligned one: the same bits. Loads of
    16 bytes, or an address without the offset of its storage, read the neighbour before.
    """

    def shift(n, t):
        y = torch.cat([t.new_full((1,), 77), t.flatten()])[1:].view(t.shape)
        assert y.is_contiguous() and y.data_ptr() % 16
        return y

    x, do, dht, options = form.short(dtype, device)
    options["impl"] = impl
    want = form.run(x, do, dht, **options)
    odd = shift("do", do), shift("dht", dht)
    same_bits(form.run(x, *odd, shown_as(shift, form.f), **options), want)


GATES = ("g", "gk", "gv", "beta", "b", "w", "dt")


def apart(n, t):
    """Gates expanded over the heads (strides of 0), of the others every second number of a tensor
    with NaN between.
    """
    if n in GATES:
        return t[:, :, :1].expand(t.shape)
    other = torch.full_like(t, torch.nan) if t.is_floating_point() else t
    return torch.stack([t, other], -1)[..., 0]


def turned(n, t):
    """The first axes behind the others."""
    return t.transpose(1, -1).contiguous().transpose(1, -1) if t.ndim > 1 else t


def heads_first(n, t):
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim > 2 else t


@forms("test_strides_and_what_is_left_alone", dtypes=F32, impl=IMPLS)
def test_strides_and_what_is_left_alone(form, dtype, impl, device, monkeypatch):
    """Arguments and gradients that are not contiguous give the same bits; none is changed. A kernel
    that takes a stride of a head or a channel for 1 reads another's gate, or the NaN between.
    """
    by_value(monkeypatch)
    x, do, dht, options = form.short(dtype, device, raw=True)
    do = torch.ones((), device=device).expand(do.shape)  # as sum().backward() gives it
    x |= {n: t[:, :, :1].expand(t.shape).contiguous() for n, t in x.items() if n in GATES}
    options["impl"] = impl
    want = form.run(x, do.contiguous(), dht, **options)
    for show in (apart, turned, heads_first):
        odd = {n: show(n, t) for n, t in x.items()}
        kept = {n: t.clone() for n, t in (odd | {"dht": dht}).items()}
        got = form.run(x, do, dht.mT.contiguous().mT, shown_as(show, form.f), **options)
        for n in (n for n in x if n in GATES and show is apart):  # of which the first is read
            total = want[f"d{n}"].sum(2, keepdim=True)
            assert torch.equal(got[f"d{n}"][:, :, :1], total) and not got[f"d{n}"][:, :, 1:].any()
            got[f"d{n}"] = want[f"d{n}"]
        same_bits(got, want)
        with torch.no_grad():
            form(odd, **options)
        same_bits(odd | {"dht": dht}, kept)


@forms("test_a_nan_shows", dtypes=F32, impl=IMPLS)
def test_a_nan_shows(form, dtype, impl, device):
    """In its own head, from its token on and in the state."""
    x, options = form.draw(1, form.T, dtype, device)
    t = form.T // 3
    x[form.gate][0, t, 0] = torch.nan
    o, S = form(x, **options, output_final_state=True, impl=impl)
    assert o[:, t:, 0].isnan().any() and S[:, 0].isnan().any()
    assert o[:, :, 1].isfinite().all() and S[:, 1].isfinite().all()


@forms(
    "test_splitting_a_sequence_equals_one_call",
    dtypes=F32, impl=IMPLS, share=few(0.7, more=(0.01, 0.8)), state=(True, False),
)  # fmt: skip
def test_splitting_a_sequence_equals_one_call(form, dtype, impl, share, state, device):
    """The gradients too, through the state between the parts; begun with a state, or with none."""
    x, do, dht, options = form.short(dtype, device, state=state)
    cut = max(1, int(share * form.T))
    options["impl"] = impl

    def split(initial_state=None, **given):
        parts, state = [], initial_state
        for t in (slice(cut), slice(cut, None)):
            one = {n: y[:, t] if n in form.tokens else y for n, y in given.items()}
            y, state = form.f(**one, initial_state=state)
            parts.append(y)
        return torch.cat(parts, 1), state

    got, want = form.run(x, do, dht, split, **options), form.run(x, do, dht, **options)
    if form.exactly and impl == "triton":
        same_bits(got, {n: want[n] for n in ("o", "ht")})
    for n, t in want.items():
        assert_close(n, got[n], t, 2e-6 if form.exactly or n in ("o", "ht") else 5e-5)


# -- what a training code does


@forms("test_only_one_output_is_used", dtypes=F32, impl=IMPLS, used=("o", "ht"))
def test_only_one_output_is_used(form, dtype, impl, used, device):
    x, do, dht, options = form.short(dtype, device)
    x.pop("residual", None)  # no state has it
    zeros = (do, 0 * dht) if used == "o" else (0 * do, dht)
    given = (do, None) if used == "o" else (None, dht)
    form.check(form.run(x, *given, **options, impl=impl), form.exact(x, *zeros, **options), dtype)


@forms("test_without_a_state", dtypes=F32, impl=IMPLS)
def test_without_a_state(form, dtype, impl, device):
    """It is returned on request alone."""
    x, do, _, options = form.short(dtype, device, state=False)
    got = form.run(x, do, None, **options, impl=impl, output_final_state=False)
    assert "ht" not in got and "dinitial_state" not in got
    form.check(got, form.exact(x, do, None, **options), dtype)


@forms("test_one_tensor_alone_needs_a_gradient", dtypes=F32, impl=IMPLS)
def test_one_tensor_alone_needs_a_gradient(form, dtype, impl, device):
    """The same bits as when all do, which are right before the gate of a layer, too."""
    x, do, dht, options = form.short(dtype, device, raw=True)
    exact = form.exact(x, do, dht, **options)
    options |= {"output_final_state": True, "impl": impl}
    want = form.run(x, do, dht, **options)
    form.check(want, exact, dtype)
    for n in form.alone:
        if n in x:
            leaf = x[n].clone().requires_grad_()
            outputs = zip(form(x | {n: leaf}, **options), (do, dht), strict=True)
            outputs, given = zip(*((y, dy) for y, dy in outputs if y.requires_grad), strict=True)
            (got,) = torch.autograd.grad(outputs, leaf, given)
            assert torch.equal(got, want[f"d{n}"]), n


WIDE = [(f, n) for f in FORMS for n in f.wide if f.dtypes[-1] in HALF]


@pytest.mark.parametrize(("form", "wide"), WIDE, ids=str)
@pytest.mark.parametrize("dtype", few(torch.bfloat16, more=(torch.float16,)), ids=str)
def test_one_is_wider(form, wide, dtype, device):
    """One in float32, the others in 16 bit: each gradient has the dtype of its tensor."""
    x, do, dht, options = form.short(dtype, device)
    x |= {n: x[n].to(torch.float32 if n == wide else dtype) for n in form.wide if n in x}
    got = form.run(x, do, dht.to(dtype if form.exactly else dht.dtype), **options, impl="triton")
    floats = {n: t.dtype for n, t in x.items() if t.is_floating_point()}
    assert {n: got[f"d{n}"].dtype for n in floats} == floats
    assert got["o"].dtype == dtype
    assert got["ht"].dtype == (dtype if form.exactly else torch.float32)
    form.check(got, form.exact(x, do, dht, **options), dtype)


@forms("test_checkpointing_autocast_and_a_changed_output", dtypes=SOME, impl=IMPLS)
def test_checkpointing_autocast_and_a_changed_output(form, dtype, impl, device):
    x, do, dht, options = form.short(dtype, device, raw=True)
    options["impl"] = impl
    want = form.run(x, do, dht, **options)

    def again(**arguments):
        return checkpoint(form.f, **arguments, use_reentrant=False)

    same_bits(form.run(x, do, dht, again, **options), want)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        same_bits(form.run(x, do, dht, **options), want)

    def changed(**arguments):
        o, ht = form.f(**arguments)
        return o.mul_(2), ht.add_(1)

    same_bits(form.run(x, do / 2, dht, changed, **options), want, "o", "ht")


@forms("test_a_second_backward_pass", dtypes=F32, impl=IMPLS)
def test_a_second_backward_pass(form, dtype, impl, device):
    """It needs retain_graph and finds what it reads as it was; it has no gradient of its own."""
    x, do, _, options = form.short(dtype, device)
    leaves = [x[n].requires_grad_() for n in form.tokens if n in x]
    o, _ = form(x, **options, impl=impl)
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    second = torch.autograd.grad(o, leaves, do, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        second[0].sum().backward()
    o, _ = form(x, **options, impl=impl)
    torch.autograd.grad(o, leaves, do)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, leaves, do)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@forms(
    "test_fullgraph",
    # of the others test_contract_packed has graphs: all of them go through one operator
    *(FORMS if FULL or GPU else (kda, recurrent_gdn, ssd[-1], conv)),
    dtypes=F32,
    packed=(True, False),
)
def test_fullgraph(form, dtype, packed, backend, device):
    """One graph for two lengths, before the gate of a layer, and the results of eager mode; without
    a gradient those of test_contract_packed.
    """

    def f(**given):
        bounds = {}
        if packed:
            T = given[form.tokens[0]].shape[1]
            bounds["cu_seqlens"] = torch.tensor([0, 3, 3, T], device=device)
            known = {"cu_seqlens_cpu": torch.tensor([0, 3, 3, T])}
            bounds |= {n: t for n, t in known.items() if n in form.known}
        return form.f(**given, **bounds, **options, output_final_state=True)

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    lengths = (4, 6) if form.chunk is None else (17, 20)
    for T in lengths:
        raw = backend != "inductor"  # whose own sigmoid rounds the gates otherwise
        x, kinds = form.draw(1, T, dtype, device, N=3 if packed else None, raw=raw)
        options = form.options | kinds
        do, dht = form.cotangents(x, 3 if packed else 1)
        with torch._dynamo.config.patch(error_on_recompile=lengths[0] != T):
            got = gdn_checks.run(x, do, dht, g)
        for n, t in gdn_checks.run(x, do, dht, f).items():
            assert got[n].dtype == t.dtype
            assert_close(n, got[n], t, 1e-6)


# -- values


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_float64_runs_in_the_reference(form, device):
    x, do, dht, options = form.short(torch.float64, device, raw=True)
    with launches() as ran:
        got = form.run(x, do, dht, **options)
        same_bits(form.run(x, do, dht, **options, impl="reference"), got)
    assert not ran
    want = form.exact(x, do, dht, **options)
    for n, t in got.items():
        assert t.dtype == torch.float64
        assert_close(n, t, want[n], 1e-10)
    with pytest.raises(ValueError, match=r"impl='triton' cannot run here: .*float64 was given"):
        form(x, **options, impl="triton")


FLAGS = (
    {},
    {"use_qk_l2norm_in_kernel": True},
    {"use_gate_in_kernel": True},
    {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"state_v_first": True},
)
BOUNDED = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}


@pytest.mark.parametrize(
    ("checks", "flags"),
    [*((gdn_checks, f) for f in FLAGS), *((kda_checks, f) for f in (*FLAGS, BOUNDED))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@pytest.mark.parametrize("C", [16, 64])
def test_float64_with_every_flag(C, checks, flags):
    """The reference, and what all is compared with: autograd of the recurrence."""
    kinds = {"raw_qk": "use_qk_l2norm_in_kernel", "raw_gate": "use_gate_in_kernel"}
    kinds = {kind: flag in flags for kind, flag in kinds.items()}
    x = checks.inputs(2, 100, 2, 4, 12, 12, torch.float64, **kinds)
    do, dht = gdn_checks.cotangents(x)
    got = checks.run(x, do, dht, output_final_state=True, chunk_size=C, impl="reference", **flags)
    for n, want in gdn_checks.exact(x, do, dht, **flags).items():
        assert_close(n, got[n], want, 1e-10)


@pytest.mark.parametrize("form", (gdn, kda), ids=str)
@pytest.mark.parametrize("raw", [False, True])
def test_the_adjoint_compared_with_is_autograd_s(raw, form):
    x, do, dht, options = form.short(torch.float64, "cpu", raw=raw)
    want = recurrence(x, do, dht, **options)
    for n, got in form.exact(x, do, dht, **options).items():
        assert_close(n, got, want[n], 1e-12)


@forms("test_scale_is_a_factor_of_the_output", *DELTA, dtypes=F32, impl=IMPLS)
def test_scale_is_a_factor_of_the_output(form, dtype, impl, device):
    x, options = form.draw(1, form.T, dtype, device)
    (o, _), (twice, _), (none, _) = (
        form(x, **options, impl=impl, **scale)
        for scale in ({}, {"scale": 2 * x["q"].shape[-1] ** -0.5}, {"scale": 0})
    )
    assert_close("o", twice, 2 * o, 1e-6)
    assert not none.any()


@forms("test_rows_of_a_generation", generation=GENERATIONS)
def test_rows_of_a_generation(form, dtype, generation, device, monkeypatch):
    """Its tiles compute the same; that they compile is tests/kernels."""
    pretend(monkeypatch, generation)
    for i, (T, sizes) in enumerate(form.rows):
        x, options = form.draw(1, T, dtype, device, sizes=sizes)
        do, dht = form.cotangents(x)
        if i:
            got = form(x, **options, output_final_state=True, impl="triton")
            got = dict(zip(("o", "ht"), got, strict=True))
        else:
            got = form.run(x, do, dht, **options, impl="triton")
        form.check(got, form.exact(x, do, dht, **options), dtype)


@pytest.mark.gpu
@forms("test_more_heads_than_a_grid_axis_holds", gdn, kda, *ssd)
def test_more_heads_than_a_grid_axis_holds(form, dtype):
    sizes = (1, 2, 16, 16) if form in (gdn, kda) else (2, 1, *form.sizes[2:])
    x, options = form.draw(40000, 1, dtype, "cuda", state=False, sizes=sizes)
    want, _ = form({n: t.double() for n, t in x.items()}, **options)
    assert_close("o", form(x, **options)[0], want, 5e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@forms("test_tensors_on_another_gpu_than_the_current_one")
def test_tensors_on_another_gpu_than_the_current_one(form, dtype):
    x, do, dht, options = form.short(dtype, "cuda:1")
    form.check(form.run(x, do, dht, **options), form.exact(x, do, dht, **options), dtype)


def test_what_a_form_lacks_is_a_property_of_the_others():
    from ops import test_contract_packed

    known = {*globals(), *vars(test_contract_packed)}
    for form in FORMS:
        assert form.lacks.keys() <= known and all(form.lacks.values())
