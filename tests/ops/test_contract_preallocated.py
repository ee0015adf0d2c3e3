"""Results in memory that the caller has, of every operator that servers call."""

import pytest
import torch
from gdn_checks import boundaries, launches
from grids import FULL, few
from ops.contract import (
    BY_CHANNEL,
    IMPLS,
    dplr_chunks,
    ema,
    forms,
    gdn,
    kda,
    recurrent_gdn,
    recurrent_kda,
    ssd,
)

pytestmark = pytest.mark.usefixtures("poison", "numbers_by_value")

SERVED = (gdn, kda, recurrent_gdn, recurrent_kda, *BY_CHANNEL, dplr_chunks, ema, *ssd)
F32 = (torch.float32,)
LENGTHS = (5, 0, 12)
T = sum(LENGTHS) + 3


def state_out(form):
    return "final_states_out" if form in ssd else "final_state_out"


def packed(form, dtype, device):
    """A call of packed sequences that end before T, and its results."""
    x, options = form.draw(1, T, dtype, device, N=len(LENGTHS))
    options |= {"cu_seqlens": boundaries(LENGTHS, device), "output_final_state": True}
    options |= {"chunk_size": 16} if form.chunk == 16 else {}
    return x, options


@forms(
    "test_results_go_where_they_are_asked_for", *SERVED,
    dtypes=few(torch.float32, torch.bfloat16, more=(torch.float16,)), impl=IMPLS,
)  # fmt: skip
def test_results_go_where_they_are_asked_for(form, dtype, impl, device):
    """They are returned, with the bits of the call without, in rows of a larger buffer too."""
    x, options = packed(form, dtype, device)
    options["impl"] = impl
    with torch.no_grad():
        want = form(x, **options)
        buffer = torch.full((2, *want[0].shape[1:]), torch.nan, dtype=dtype, device=device)
        rooms = {"out": buffer[1:], state_out(form): torch.full_like(want[1], torch.nan)}
        got = form(x, **options, **rooms)
    assert [t.data_ptr() for t in got] == [t.data_ptr() for t in rooms.values()]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert buffer[0].isnan().all() and not buffer[1, T - 3 :].any()
    alone = form(x, **options, out=rooms["out"].fill_(torch.nan))
    assert alone[0] is rooms["out"] and torch.equal(alone[0], want[0])
    assert torch.equal(alone[1], want[1]) and alone[1] is not got[1]


def grown(n):
    return lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + n)


REFUSED = {
    "shape": (ValueError, "must have shape .*, got ", grown(1)),
    "dtype": (TypeError, "must be torch.float32, .*got torch.float64", torch.Tensor.double),
    "integers": (TypeError, "must be float64, .*got torch.int32", torch.Tensor.int),
    "a list": (TypeError, "must be a torch.Tensor", torch.Tensor.tolist),
    "elsewhere": (ValueError, "must be on .*, got meta", lambda t: t.to("meta")),
    "a gradient": (ValueError, "must not require a gradient", torch.Tensor.requires_grad_),
    "gaps": (ValueError, "must be contiguous", lambda t: grown(1)(t)[..., :-1]),
}


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("form", SERVED[:-3] + SERVED[-1:], ids=str)
def test_refused(form, wrong, device):
    """Before any kernel, and nothing is written, whichever of the two does not fit."""
    error, message, change = REFUSED[wrong]
    x, options = packed(form, torch.float32, device)
    rooms = dict(zip(("out", state_out(form)), map(torch.zeros_like, form(x, **options)), strict=1))
    for n in rooms:
        bad = change(rooms[n].clone())
        with launches() as ran, pytest.raises(error, match=f"^{n} {message}"):
            form(x, **options, **rooms | {n: bad})
        assert not ran and not any(t.any() for t in rooms.values())


@pytest.mark.parametrize("form", SERVED[:-3] + SERVED[-1:], ids=str)
def test_refused_beside_others(form, device):
    """Memory of another argument or of both results, gradients, states that nobody asks for."""
    x, options = packed(form, torch.float32, device)
    o, S = (t.detach().clone() for t in form(x, **options))
    name, v = state_out(form), form.tokens[2] if form.tokens[0] == "q" else "x"
    both = torch.zeros(o.numel() + S.numel() - 1, device=device)
    half = {"out": both[: o.numel()].view_as(o), name: both[-S.numel() :].view_as(S)}
    place = "inplace_final_state" + "s" * (form in ssd)
    leaf = {v: x[v].clone().requires_grad_()}
    cases = [
        ({"out": x[v].contiguous()}, "out must not share memory with another argument"),
        ({name: x["initial_state"]}, f"{name} must not share memory with another argument"),
        (half, f"(out|{name}) must not share memory with another argument"),
        ({"out": o, "output_final_state": False, name: S}, f"{name} needs "),
        (leaf | {"out": o}, "out cannot be written where a gradient is recorded"),
        (leaf | {name: S}, f"{name} cannot be written where a gradient is recorded"),
    ]
    if form not in (dplr_chunks, ema, *ssd):
        cases += [({place: True, name: S}, f"{name} must be None with {place}=True")]
    for given, message in cases:
        given = x | {n: t for n, t in given.items() if n in x}, given
        before = o.clone()
        with launches() as ran, pytest.raises(ValueError, match=message):
            form(given[0], **options | {n: t for n, t in given[1].items() if n not in x})
        assert not ran and torch.equal(o, before)
    with torch.no_grad():
        form(x | leaf, **options, out=o)
    message = "out cannot be written inside a transform of torch.func"
    with pytest.raises(ValueError, match=message):
        torch.func.vmap(lambda y: form(x | {v: y}, **options, out=o)[0])(x[v][None])


@forms("test_compiled", *(SERVED if FULL else SERVED[::3]), dtypes=F32)
def test_compiled(form, dtype, device):
    """A graph writes there too."""
    x, options = packed(form, dtype, device)
    options |= {"impl": "reference"} if device.type == "cpu" else {}
    torch._dynamo.reset()
    f = torch.compile(form.f, fullgraph=True, backend="aot_eager")
    want = form(x, **options)
    rooms = {"out": torch.zeros_like(want[0]), state_out(form): torch.zeros_like(want[1])}
    f(**x, **form.options | options | rooms)
    assert all(torch.equal(a, b) for a, b in zip(rooms.values(), want, strict=True))
