"""What every operator over sequences refuses before any kernel runs; each has cases of its own."""

import warnings

import pytest
import torch
from gdn_checks import boundaries, launches, refused
from ops.contract import (
    BY_CHANNEL,
    FORMS,
    conv,
    dplr,
    ema,
    gdn,
    gdn2,
    kda,
    recurrent_gdn,
    recurrent_kda,
    ssd,
)
from ops.test_contract_packed import indices
from torch import Tensor

LENGTHS = (5, 0, 15)
T = sum(LENGTHS)
BOUNDS = ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices")
DELTA = (gdn, kda, recurrent_gdn, recurrent_kda, *BY_CHANNEL)
SCALED = (*DELTA, dplr)
OPERATORS = (*SCALED, ssd[-1], ema, conv)
operators = pytest.mark.parametrize("form", OPERATORS, ids=str)
WRONG = (2, "yes", 0.5, -1)  # as a flag


def everything(form, device):
    """The arguments of a call with packed sequences that uses every tensor."""
    x, _, _, options = form.packed(LENGTHS, torch.float32, device, raw=True)
    known = {
        "cu_seqlens_cpu": boundaries(LENGTHS),
        "chunk_indices": indices(LENGTHS, device, form.chunk or 64, torch.int32),
    }
    bounds = {"cu_seqlens": boundaries(LENGTHS, device)} | {n: known[n] for n in form.known}
    options |= {"chunk_size": 16} if form.chunk == 16 else {}
    return x | form.options | options | bounds | {"output_final_state": True}


def other(n, change):
    """Changes: `n`, which must be there, by `change`."""
    return lambda a: {n: change(a[n])}


def host_unknown(change):
    """Changes of cu_seqlens, which nothing else says."""
    none = dict.fromkeys((*BOUNDS[1:], "initial_state"))
    return lambda a: {n: v for n, v in none.items() if n in a} | {BOUNDS[0]: change(a[BOUNDS[0]])}


def alone(name):
    """What belongs to cu_seqlens without it."""
    return lambda a: {n: None for n in (*BOUNDS, "initial_state") if n in a} | {name: a[name]}


def token_more(t):
    return torch.cat([t, t[:, -1:]], 1)


def another_half(t):
    return t.half() if t.dtype != torch.float16 else t.bfloat16()


def of_tensors(form, x):
    """Each tensor of no tensor, of integers, on another device, of another length or dtype than the
    first; the required ones left out.
    """
    first = form.tokens[0]
    for n, t in x.items():
        # a state is of no interest where there is none
        name = "initial_states?" if n == "initial_state" else n
        yield f"{n} as a list", TypeError, f"{name} must be a .*got list", other(n, Tensor.tolist)
        if t.is_floating_point():
            message = f"{name} must be float64, .*got torch.int32"
            yield f"{n} of integers", TypeError, message, other(n, Tensor.int)
        if n != first:
            message = f"{name} must be on .* like {first}, got meta"
            yield f"{n} elsewhere", ValueError, message, other(n, lambda t: t.to("meta"))
        if n in form.tokens[1:]:
            message = rf"{n} must have shape .*, got \(\d+, \d+"
            yield f"{n} of a token more", ValueError, message, other(n, token_more)
        if n in form.alike:
            message = rf"{n} must be (torch\.\w+) like {first}, got (?!\1)torch.b?float16"
            yield f"{n} of 16 bits", TypeError, message, other(n, another_half)
    for n in form.required:
        message = f"{n} must be a torch.Tensor .*got NoneType"
        yield f"no {n}", TypeError, message, lambda a, n=n: {n: None}
    for n in form.tokens:
        if n in x and x[n].ndim > 2 and (form, n) != (ema, "x"):  # which may have one head
            message = rf"{n} must have {x[n].ndim} dimensions \[B, T"
            yield f"{n} without its batch", ValueError, message, other(n, lambda t: t[0])
    message = "initial_states? must have shape .*got"
    for what, change in (
        ("states", lambda t: torch.cat([t, t])),
        ("layout of states", lambda t: torch.nn.functional.pad(t, (0, 1))),
    ):
        yield what, ValueError, message, other("initial_state", change)


def of_bounds(form):
    """cu_seqlens, and what else says where sequences begin."""
    first, bounds, host, rows = form.tokens[0], "cu_seqlens", "cu_seqlens_cpu", "chunk_indices"
    elsewhere, integers = f"must be on .* like {first}, got meta", "must be int32 or int64, got "
    meta, numbers = lambda t: t.to("meta"), "must be a tensor of int32 or int64, got "
    shape, count = r"must have shape \[N \+ 1\] .*, got \(1", r"must have \d+ rows, one for each "
    end = r"cu_seqlens must end at T=\d+ or before, got \d+"
    for n, what, error, message, change in (
        (bounds, "a list", TypeError, "must be a torch.Tensor .*got list", Tensor.tolist),
        (bounds, "of floats", TypeError, integers + "torch.float32", Tensor.float),
        (bounds, "of rank 2", ValueError, shape, lambda b: b[None]),
        (bounds, "of no sequence", ValueError, shape, lambda b: b[:1]),
        (bounds, "elsewhere", ValueError, elsewhere, meta),
        (host, "of another shape", ValueError, "must have the shape of cu_seqlens",
         lambda b: b.repeat(2)),
        (host, "of int16", TypeError, integers + "torch.int16", Tensor.short),
        (host, "elsewhere", ValueError, "must be on cpu, got meta", meta),
        (rows, "a list", TypeError, numbers + "list", Tensor.tolist),
        (rows, "of floats", TypeError, numbers + ".*float32", Tensor.float),
        (rows, "of rank 1", ValueError, r"must have shape \[NT, 2\], got \(2,\)", lambda c: c[0]),
        (rows, "elsewhere", ValueError, elsewhere, meta),
        (rows, "too few", ValueError, count, lambda c: c[:-1]),
        (rows, "too many", ValueError, count, lambda c: c.repeat(2, 1)),
    ):  # fmt: skip
        if n in (bounds, *form.known):
            yield f"{n} {what}", error, f"{n} {message}", other(n, change)
    for what, message, change in (
        ("begin", "cu_seqlens must begin with 0, got 1", lambda b: b + 1),
        ("end", end, lambda b: 2 * b),
        ("fall", r"cu_seqlens must not decrease, got \d+ and then 0", lambda b: b[[0, -1, 0, -1]]),
    ):
        yield f"{bounds} {what}", ValueError, message, host_unknown(change)
    message = f"{first} must have B = 1 with cu_seqlens, .*got B=2"
    of_two = lambda a: {n: torch.cat([a[n], a[n]]) for n in form.tokens if n in a}
    yield "batch", ValueError, message, of_two
    if form.known:
        unknown = {rows: None} if rows in form.known else {}
        yield f"{host} end", ValueError, end, lambda a: unknown | {host: 2 * a[host]}
    for n in form.known:
        message = f"{n} belongs to cu_seqlens, which is None"
        yield f"{n} alone", ValueError, message, alone(n)


def of_options(form):
    for i, flag in enumerate(form.flags):
        value = WRONG[i % len(WRONG)]
        message = f"{flag} must be True or False, got {value!r}"
        yield flag, TypeError, message, lambda a, flag=flag, value=value: {flag: value}
    for n, value, error, message in (
        ("impl", "cuda", ValueError, "must be one of 'auto', 'triton', 'reference', got 'cuda'"),
        *((("scale", float("nan"), ValueError, "must be finite, got nan"),
           ("scale", True, TypeError, "must be a number or None, got bool"),
           ("scale", "big", TypeError, "must be a number or None, got str")) * (form in SCALED)),
        *(("chunk_size", value, ValueError, f"must be one of 16, 32, 64, got {value}")
           for value in (48, 128, True, 64.0) if form in (gdn, kda, gdn2, ema)),
    ):  # fmt: skip
        yield f"{n} {value}", error, f"{n} {message}", lambda a, n=n, value=value: {n: value}
    message = "unexpected keyword argument 'output_finl_state'"
    yield "misspelt", TypeError, message, lambda a: {"output_finl_state": True}


def cases(form):
    """What is wrong -> the error, its message, the changes to a valid call."""
    x, _ = form.draw(1, 2, torch.float32, "cpu", raw=True)
    every = (*of_tensors(form, x), *of_bounds(form), *of_options(form))
    return {what: case for what, *case in every}


def where(form, what, device):
    """On a GPU nobody reads the numbers of sequences that have no copy on the host."""
    unread = not form.known and what in ("cu_seqlens begin", "cu_seqlens end", "cu_seqlens fall")
    return torch.device("cpu") if unread else device


CASES = [
    pytest.param(form, what, case, id=f"{form}: {what}")
    for form in OPERATORS
    for what, case in cases(form).items()
]


@pytest.mark.parametrize(("form", "what", "case"), CASES)
def test_refused_before_any_kernel(form, what, case, device):
    assert refused(form.f, case, everything(form, where(form, what, device)), {})


# where it is known without a route
KERNELS = {conv: ["causal_conv1d_kernel"], ema: ["gate_cumsum_kernel", "ema_kernel"]}


@operators
def test_kernels_are_counted(form, device):
    """The call that is refused when it is changed runs some, with impl="reference" none."""
    with launches() as ran:
        o, S = form.f(**everything(form, device))
    assert len(ran) >= (1 if form.chunk is None else 2) or form is conv
    assert form not in KERNELS or [f.fn.__name__ for f in ran] == KERNELS[form]
    assert o.shape[:2] == (1, T) and len(S) == len(LENGTHS)
    with launches() as ran:
        form.f(**everything(form, device), impl="reference")
    assert not ran


@operators
def test_a_state_for_each_of_the_batch(form):
    x, options = form.draw(2, 3, torch.float32, "cpu")
    x["initial_state"] = x["initial_state"][:1]
    with launches() as ran, pytest.raises(ValueError, match=r"initial_states? must have .*N=2"):
        form(x, **options)
    assert not ran


@pytest.mark.parametrize("form", [f for f in FORMS if f.decay], ids=str)
def test_a_positive_decay_is_refused_on_the_cpu(form):
    """There its numbers cost nothing to read; a NaN passes, and shows in the result."""
    for n in form.decay:
        x, options = form.draw(1, 5, torch.float32, "cpu")
        x[n].view(-1)[1] = 0.5
        message = f"{n} must be a log decay, <= 0 everywhere, got a maximum of 0.5"
        with launches() as ran, pytest.raises(ValueError, match=message):
            form(x, **options)
        assert not ran
        x[n].view(-1)[1] = torch.nan
        assert form(x, **options)[0].isnan().any()


@pytest.mark.parametrize("form", DELTA, ids=str)
def test_the_deprecated_name_of_state_v_first(form, device):
    given = everything(form, device)
    given["initial_state"] = given["initial_state"].mT.contiguous()
    want = form.f(**given, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="use state_v_first") as caught:
        got = form.f(**given, transpose_state_layout=True)
    assert [w.filename for w in caught] == [__file__]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="state_v_first and transpose_state_layout are one"):
        form.f(**given, state_v_first=True, transpose_state_layout=False)
    with warnings.catch_warnings(), pytest.raises(TypeError, match="transpose_state_layout must"):
        warnings.simplefilter("error")
        form.f(**given, transpose_state_layout="no")
