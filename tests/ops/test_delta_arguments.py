"""Arguments of the chunked delta rules: any valid call against float64, any invalid one refused."""

import gdn_checks
import kda_checks
import pytest
import torch
from gdn_checks import DTYPES, boundaries, cotangents, exact, launches, refused, spacing
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kda_checks import check, inputs, run
from ops.contract import GATE, GPU, NAMES, gdn, kda, recurrent_gdn, recurrent_kda
from ops.test_contract_packed import indices
from ops.test_contract_refused import cases, everything, other

from linattn_edu import chunk_gated_delta_rule, chunk_kda
from linattn_edu.testing import gdn_inputs, poison, relative_rms

DEVICE = "cuda" if GPU else "cpu"
LONGEST = 40 if GPU else 18  # tokens of a sequence
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
INTEGERS = (torch.int32, torch.int64)
few = settings(max_examples=30 if GPU else 8, derandomize=not GPU, deadline=None)
both = pytest.mark.parametrize("form", (gdn, kda), ids=str)
# options that change no result but by rounding
RUN_ONLY = (
    "chunk_size", "output_final_state", "cu_seqlens_cpu", "chunk_indices", "disable_recompute",
)  # fmt: skip


@st.composite
def calls(draw, form):
    """(tensors, do, dht, options) of a valid call."""
    flag, sizes = st.booleans(), [8, 16, 27] + [40] * (form is gdn)
    lengths = draw(
        st.none() | st.lists(st.integers(0, LONGEST), min_size=1, max_size=3).filter(any)
    )
    N = draw(st.integers(1, 2)) if lengths is None else len(lengths)
    B, T = (N, draw(st.integers(1, 2 * LONGEST))) if lengths is None else (1, sum(lengths))
    heads = draw(st.sampled_from([(1, 1), (1, 3 if form is gdn else 2), (2, 2)]))
    dtype, V = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, *sizes]))
    raw = [draw(flag) for _ in NAMES]
    # a key of one number has unit length whatever it is, and the gradient of that is rounding alone
    K = draw(st.sampled_from(sizes if raw[0] else [1, *sizes]))
    options = dict(zip(NAMES, raw, strict=True)) | {"state_v_first": draw(flag)}
    options["allow_neg_eigval"] = draw(flag)
    options["scale"] = draw(st.none() | st.floats(0.1, 2))
    options["chunk_size"] = draw(st.sampled_from([16, 32, 64]))
    options["output_final_state"] = draw(flag)
    kinds = dict(zip(("raw_qk", "raw_beta", "raw_gate"), raw, strict=True))
    kinds |= {"state": draw(flag), "norm": draw(st.sampled_from([0.1, 1]))}
    kinds |= {"mask": draw(st.sampled_from([0, 0.5])), "seed": draw(st.integers(0, 2**31))}
    if form is kda:
        draw_channels(draw, options, kinds)
    else:
        kinds["dt_bias"] = draw(flag)
    make = inputs if form is kda else gdn_checks.inputs
    x = make(B, T, *heads, K, V, dtype, DEVICE, N=N, **kinds)
    do, dht = cotangents(x, N)
    if options["state_v_first"]:
        dht = dht.mT.contiguous()
        x |= {n: x[n].mT.contiguous() for n in x if n == "initial_state"}
    if lengths is not None:
        integer = draw(st.sampled_from(INTEGERS))
        options["cu_seqlens"] = boundaries(lengths, DEVICE, integer)
        known = {
            "cu_seqlens_cpu": boundaries(lengths, dtype=integer),
            "chunk_indices": indices(lengths, DEVICE, options["chunk_size"], integer),
        }
        options |= {n: v for n, v in known.items() if draw(flag)}
    return x, do, dht if options["output_final_state"] else None, options


def draw_channels(draw, options, kinds):
    """What only a gate for each channel has."""
    flag, bounds = st.booleans(), st.sampled_from([-5.0, -5, -0.25])
    options |= {n: draw(flag) for n in ("disable_recompute", "safe_gate")}
    if kinds["raw_gate"]:
        options["lower_bound"] = draw(bounds if options["safe_gate"] else st.none() | bounds)
        bounded = options["lower_bound"] is not None
        without = draw(flag) and bounded
        kinds["parameters"] = [n for n in GATE if draw(flag) or (n == "A_log" and not without)]
    else:
        # lower_bound without safe_gate belongs to the gate of a layer
        options["lower_bound"] = draw(st.sampled_from([None, -5])) if options["safe_gate"] else None
        kinds["safe"] = options["safe_gate"]


def rounded(x, dtype):
    """The float64 value of x, each number one unit of rounding of dtype away from it."""
    return x.double() * (1 + UNIT[dtype] * (2 * torch.randint_like(x, 2).double() - 1))


def conditioning(x, do, dht, want, dtype, options):
    """How far arguments rounded once more move each result, relative to it."""
    smooth = ("g", *GATE)  # these are never rounded to dtype
    moved = {n: t if n in smooth else rounded(t, dtype) for n, t in x.items()}
    got = exact(moved, rounded(do, dtype), dht if dht is None else rounded(dht, dtype), **options)
    return {n: relative_rms(y, want[n]) for n, y in got.items()}


@both
@few
@given(data=st.data(), impl=st.sampled_from(["auto", "auto", "triton", "reference"]))
def test_any_valid_call(form, data, impl):
    x, do, dht, options = data.draw(calls(form))
    dtype = x["q"].dtype
    asked = {n: v for n, v in options.items() if n not in RUN_ONLY}
    want = exact(x, do, dht, **asked)
    torch.manual_seed(0)
    moved = [conditioning(x, do, dht, want, dtype, asked) for _ in range(3)]
    at_least = {n: 4 * max(m[n] for m in moved) for n in want}
    if not options["use_gate_in_kernel"]:
        of_gates = kda_checks.spacing if form is kda else spacing
        at_least["dg"] = max(at_least["dg"], of_gates(x["g"]))
    with poison():
        got = gdn_checks.run(x, do, dht, form.f, impl=impl, **options)
    assert ("ht" in got) == options["output_final_state"]
    form.check(got, want, dtype, **at_least)


def ungated(a, **changes):
    """A call whose log decays are given."""
    off = {"use_gate_in_kernel": False, "lower_bound": None, "A_log": None, "dt_bias": None}
    off |= {"safe_gate": False} if a["g"].ndim == 4 else {}
    off = off if a["g"].ndim == 4 else {n: v for n, v in off.items() if n != "lower_bound"}
    return {"g": -a["g"].abs().clamp(max=4)} | off | changes


def raw(**changes):
    return lambda a: {"use_gate_in_kernel": True, "A_log": a["A_log"]} | changes


# what is wrong, beside what every operator refuses: the error, its message, the changes
OF_BOTH = {
    "A_log elements": (ValueError, r"A_log must have the elements of \[HV=\d\], in any shape, got ",
                       other("A_log", lambda x: torch.cat([x, x])[None])),
    "two layouts": (ValueError, "state_v_first and transpose_state_layout are one argument",
                    lambda a: {"state_v_first": True, "transpose_state_layout": False}),
    "transpose_state_layout": (TypeError, "transpose_state_layout must be True or False, got 2",
                               lambda a: {"transpose_state_layout": 2}),
    "cp_context": (TypeError, "cp_context must come from build_cp_context, got str",
                   lambda a: {"cp_context": "no"}),
}  # fmt: skip
OF_GDN = {
    "A_log alone": (ValueError, "A_log is used with use_gate_in_kernel=True only",
                    lambda a: ungated(a, A_log=a["g"][0, 0])),
    "dt_bias alone": (ValueError, "dt_bias is used with use_gate_in_kernel=True only",
                      lambda a: ungated(a, dt_bias=a["g"][0, 0])),
    "gate without A_log": (ValueError, "A_log must be given with use_gate_in_kernel=True, got None",
                           lambda a: {"use_gate_in_kernel": True, "A_log": None}),
    "dt_bias elements": (ValueError, r"dt_bias must have the elements of \[HV=\d\], in any shape",
                         other("dt_bias", lambda x: x.repeat(3, 1))),
}  # fmt: skip
OF_KDA = {
    "g of heads": (ValueError, r"g must have 4 dimensions \[B, T, HV, K\], got 3",
                   other("g", lambda g: g[..., 0])),
    "g channels": (ValueError, r"g must have shape \[B=\d, T=\d+, HV=\d, K=\d+\], got ",
                   other("g", lambda g: torch.cat([g, g], -1))),
    "g of key heads": (ValueError, r"g must have shape \[B=\d, T=\d+, HV=\d, K=\d+\], got ",
                       other("g", lambda g: torch.cat([g, g], 2))),
    "beta of channels": (ValueError, "beta must have 3 dimensions",
                         lambda a: {"beta": a["g"]}),
    "A_log without a gate": (ValueError, "A_log is used with use_gate_in_kernel=True only",
                             lambda a: ungated(a, A_log=a["A_log"])),
    "bias without a gate": (ValueError, "dt_bias is used with use_gate_in_kernel=True only",
                            lambda a: ungated(a, dt_bias=a["g"][0, 0].flatten())),
    "bound without a gate": (ValueError, "lower_bound is used with use_gate_in_kernel or safe_gate",
                             lambda a: ungated(a, lower_bound=-5.0)),
    "neither rate nor bound": (ValueError, "A_log or lower_bound must be given with use_gate_in_k",
                               raw(A_log=None, lower_bound=None, safe_gate=False)),
    "bound above zero": (ValueError, "lower_bound must be < 0, the least log decay, got 0.5",
                         raw(lower_bound=0.5, safe_gate=False)),
    "bound of zero": (ValueError, "lower_bound must be < 0, the least log decay, got 0",
                      raw(lower_bound=0, safe_gate=False)),
    "bound not finite": (ValueError, "lower_bound must be finite, got -inf",
                         raw(lower_bound=-float("inf"), safe_gate=False)),
    "bound no number": (TypeError, "lower_bound must be a number or None, got str",
                        raw(lower_bound="-5", safe_gate=False)),
    "bound a flag": (TypeError, "lower_bound must be a number or None, got bool",
                     raw(lower_bound=True, safe_gate=True)),
    "safe without a bound": (ValueError, "safe_gate=True with use_gate_in_kernel=True needs lower",
                             raw(lower_bound=None, safe_gate=True)),
    "safe below -5": (ValueError, r"lower_bound must be in \[-5, 0\) with safe_gate=True, got -5.5",
                      raw(lower_bound=-5.5, safe_gate=True)),
    "safe above zero": (ValueError, r"lower_bound must be in \[-5, 0\) with safe_gate=True, got 0",
                        raw(lower_bound=0.0, safe_gate=True)),
    "safe without a gate": (ValueError, r"lower_bound must be in \[-5, 0\) .*, got -6",
                            lambda a: ungated(a, safe_gate=True, lower_bound=-6)),
    "dt_bias elements": (ValueError, r"dt_bias must have the elements of \[HV=\d, K=\d+\], in any ",
                         other("dt_bias", lambda x: torch.cat([x, x]))),
    "graph alone": (ValueError, "use_graph belongs to cu_seqlens, which is None",
                    lambda a: {"use_graph": True, "cu_seqlens": None}),
}  # fmt: skip
# and of KDA token by token, which has no safe_gate
BY_TOKEN = (
    "g of heads", "g channels", "g of key heads", "beta of channels", "A_log without a gate",
    "bias without a gate", "neither rate nor bound", "bound above zero", "bound of zero",
    "bound not finite", "bound no number", "dt_bias elements", "A_log elements",
)  # fmt: skip


def without_safe_gate(error, message, change):
    return error, message, lambda a: {n: v for n, v in change(a).items() if n != "safe_gate"}


CASES = {gdn: OF_BOTH | OF_GDN, kda: OF_BOTH | OF_KDA}
CASES[recurrent_gdn] = OF_GDN
CASES[recurrent_kda] = {what: without_safe_gate(*CASES[kda][what]) for what in BY_TOKEN}
OWN = [(form, what) for form, cases_of in CASES.items() for what in cases_of]


@pytest.mark.parametrize(("form", "what"), OWN, ids=str)
def test_refused_before_any_kernel(form, what, device):
    assert refused(form.f, CASES[form][what], everything(form, device), {})


@both
@few
@given(data=st.data(), impl=st.sampled_from(["auto", "reference"]))
def test_any_invalid_call(form, data, impl):
    x, _, _, options = data.draw(calls(form))
    every = cases(form) | CASES[form]
    change = every[data.draw(st.sampled_from(list(every)))]
    assume(refused(form.f, change, x, options | {"impl": impl}))


@pytest.mark.parametrize(
    ("name", "value", "options", "message"),
    [
        ("above zero", 0.5, {}, "g must be a log decay, <= 0 everywhere, got a maximum of 0.5"),
        ("above zero", 0.5, {"safe_gate": True}, "g must be a log decay, <= 0 everywhere"),
        ("below -5", -5.5, {"safe_gate": True}, "g must be >= -5.0 with safe_gate=True, .* -5.5"),
        ("below -1", -2, {"safe_gate": True, "lower_bound": -1}, "g must be >= -1.0 .* -2$"),
    ],
)
def test_decays_that_cost_nothing_to_read_are_compared(name, value, options, message):
    x = inputs(1, 20, 1, 1, 8, 8, torch.float32, norm=10)
    x["g"][0, 7, 0, 3] = value
    with launches() as ran, pytest.raises(ValueError, match=message):
        chunk_kda(**x, **options)
    assert not ran


def test_a_decay_at_the_bound_is_within_it(device):
    x = inputs(1, 20, 1, 1, 8, 8, torch.float32, device, norm=10)
    x["g"][:, 3:9] = -5
    assert chunk_kda(**x, safe_gate=True)[0].isfinite().all()


def test_a_bound_and_no_promise(device):
    """A bounded gate may go as low as its bound, below -5 too; the promise is something else."""
    x = inputs(1, 20, 1, 2, 8, 8, torch.float32, device, raw_gate=True)
    do, dht = cotangents(x)
    flags = {"use_gate_in_kernel": True, "lower_bound": -20}
    got = run(x, do, dht, **flags, output_final_state=True, chunk_size=16)
    check(got, exact(x, do, dht, **flags), torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_cpu": [0, 5, 20]}, "cu_seqlens_cpu must be cu_seqlens"),
        ({"chunk_indices": [[1, 0], [0, 0]]}, "chunk_indices must hold the sequence of each chunk"),
        ({"chunk_indices": [[0, 0]]}, "chunk_indices must have 2 rows"),
    ],
)
def test_numbers_that_cost_nothing_to_read_are_compared(changes, message):
    x = gdn_inputs(1, 20, 1, 1, 8, 8).asdict() | {"cu_seqlens": torch.tensor([0, 10, 20])}
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_rule(**x, **{n: torch.tensor(v) for n, v in changes.items()})
