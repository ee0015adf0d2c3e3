"""Arguments of chunk_kda: every valid call against float64, every invalid one refused in time."""

import inspect

import pytest
import torch
from gdn_checks import DTYPES, cotangents, exact, launches, refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kda_checks import GATE, check, inputs, run, spacing
from ops.gdn.test_chunk_arguments import CASES as OF_GDN
from ops.gdn.test_chunk_arguments import INTEGERS, NAMES, other, packing, rounded

from linattn_edu import chunk_kda
from linattn_edu.testing import poison, relative_rms

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LONGEST = 40 if GPU else 18  # tokens of a sequence
few = settings(max_examples=30 if GPU else 8, derandomize=not GPU, deadline=None)


@st.composite
def calls(draw):
    """(tensors, do, dht, options) of a valid call."""
    flag = st.booleans()
    lengths = draw(
        st.none() | st.lists(st.integers(0, LONGEST), min_size=1, max_size=3).filter(any)
    )
    N = draw(st.integers(1, 2)) if lengths is None else len(lengths)
    B, T = (N, draw(st.integers(1, 2 * LONGEST))) if lengths is None else (1, sum(lengths))
    heads, dtype = draw(st.sampled_from([(1, 1), (1, 2), (2, 2)])), draw(st.sampled_from(DTYPES))
    V = draw(st.sampled_from([1, 8, 16, 27]))
    raw = [draw(flag) for _ in NAMES]
    # a key of one number has unit length whatever it is, and the gradient of that is rounding alone
    K = draw(st.sampled_from([8, 16, 27] if raw[0] else [1, 8, 16, 27]))
    options = dict(zip(NAMES, raw, strict=True)) | {"state_v_first": draw(flag)}
    options["allow_neg_eigval"] = raw[1] and draw(flag)
    options["scale"] = draw(st.none() | st.floats(0.1, 2))
    options["chunk_size"] = draw(st.sampled_from([16, 32, 64]))
    options |= {n: draw(flag) for n in ("output_final_state", "disable_recompute", "safe_gate")}
    kinds = dict(zip(("raw_qk", "raw_beta", "raw_gate"), raw, strict=True))
    kinds |= {"state": draw(flag), "norm": draw(st.sampled_from([0.1, 1]))}
    kinds |= {"mask": draw(st.sampled_from([0, 0.5])), "seed": draw(st.integers(0, 2**31))}
    bounds = st.sampled_from([-5.0, -5, -0.25])
    if raw[2]:
        options["lower_bound"] = draw(bounds if options["safe_gate"] else st.none() | bounds)
        bounded = options["lower_bound"] is not None
        without = draw(flag) and bounded
        kinds["parameters"] = [n for n in GATE if draw(flag) or (n == "A_log" and not without)]
    else:
        # lower_bound without safe_gate belongs to the gate of a layer
        options["lower_bound"] = draw(st.sampled_from([None, -5])) if options["safe_gate"] else None
        kinds["safe"] = options["safe_gate"]
    x = inputs(B, T, *heads, K, V, dtype, DEVICE, N=N, **kinds)
    do, dht = cotangents(x, N)
    if options["state_v_first"]:
        dht = dht.mT.contiguous()
        x |= {n: x[n].mT.contiguous() for n in x if n == "initial_state"}
    if lengths is not None:
        known = packing(lengths, options["chunk_size"], DEVICE, draw(st.sampled_from(INTEGERS)))
        options |= {n: v for n, v in known.items() if n == "cu_seqlens" or draw(flag)}
    return x, do, dht if options["output_final_state"] else None, options


def conditioning(x, do, dht, want, dtype, options):
    """How far arguments rounded once more move each result, relative to it."""
    smooth = ("g", *GATE)  # these are never rounded to dtype
    moved = {n: t if n in smooth else rounded(t, dtype) for n, t in x.items()}
    got = exact(moved, rounded(do, dtype), dht if dht is None else rounded(dht, dtype), **options)
    return {n: relative_rms(y, want[n]) for n, y in got.items()}


RUN_ONLY = (
    "chunk_size", "output_final_state", "cu_seqlens_cpu", "chunk_indices", "disable_recompute",
)  # fmt: skip


@few
@given(call=calls(), impl=st.sampled_from(["auto", "auto", "triton", "reference"]))
def test_any_valid_call(call, impl):
    x, do, dht, options = call
    dtype = x["q"].dtype
    asked = {n: v for n, v in options.items() if n not in RUN_ONLY}
    want = exact(x, do, dht, **asked)
    torch.manual_seed(0)
    moved = [conditioning(x, do, dht, want, dtype, asked) for _ in range(3)]
    at_least = {n: 4 * max(m[n] for m in moved) for n in want}
    if not options["use_gate_in_kernel"]:
        at_least["dg"] = max(at_least["dg"], spacing(x["g"]))
    with poison():
        got = run(x, do, dht, impl=impl, **options)
    assert ("ht" in got) == options["output_final_state"]
    check(got, want, dtype, **at_least)


def ungated(a, **changes):
    """A call whose log decays are given."""
    off = {"use_gate_in_kernel": False, "lower_bound": None, "A_log": None, "dt_bias": None}
    return {"g": -a["g"].abs().clamp(max=4)} | off | {"safe_gate": False} | changes


def raw(**changes):
    return lambda a: {"use_gate_in_kernel": True, "A_log": a["A_log"]} | changes


# of the cases of chunk_gated_delta_rule: those whose arguments mean something else here
ELSEWHERE = ("A_log alone", "dt_bias alone", "gate without A_log", "dt_bias elements", "no g")
CASES = {n: case for n, case in OF_GDN.items() if n not in ELSEWHERE} | {
    "no g": (TypeError, "g must be a torch.Tensor .*got NoneType", lambda a: {"g": None}),
    "g of heads": (ValueError, r"g must have 4 dimensions \[B, T, HV, K\], got 3",
                   other("g", lambda g: g[..., 0])),
    "g channels": (ValueError, r"g must have shape \[B=\d, T=\d+, HV=\d, K=\d+\], got ",
                   other("g", lambda g: torch.cat([g, g], -1))),
    "g of key heads": (ValueError, r"g must have shape \[B=\d, T=\d+, HV=\d, K=\d+\], got ",
                       other("g", lambda g: torch.cat([g, g], 2))),
    "g dtype": (TypeError, "g must be float64, .*got torch.int32", other("g", lambda g: g.int())),
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
    "chunk_size": (ValueError, "chunk_size must be one of 16, 32, 64, got 128",
                   lambda a: {"chunk_size": 128}),
    "scale": (ValueError, "scale must be finite, got nan", lambda a: {"scale": float("nan")}),
    "impl": (ValueError, "impl must be one of", lambda a: {"impl": "cuda"}),
    **{flag: (TypeError, f"{flag} must be True or False, got {value!r}",
              lambda a, flag=flag, value=value: {flag: value})
       for flag, value in (("use_qk_l2norm_in_kernel", 2), ("use_beta_sigmoid_in_kernel", "yes"),
                           ("allow_neg_eigval", 0.0), ("use_gate_in_kernel", -1),
                           ("safe_gate", "1"), ("disable_recompute", "no"),
                           ("return_intermediate_states", 2), ("output_final_state", 1.0),
                           ("state_v_first", "1"), ("transpose_state_layout", 2))},
    **{name: (ValueError, f"{name} is not supported: leave it out, or give {default}, got {value}",
              lambda a, name=name, value=value: {name: value})
       for name, default, value in (("use_graph", False, True), ("max_num_seqs", None, 4))},
    "cp_context": (TypeError, "cp_context must come from build_cp_context, got int",
                   lambda a: {"cp_context": 1}),
}  # fmt: skip


def everything(device):
    """(tensors, options) of a call that uses every argument."""
    x = inputs(1, 20, 2, 4, 16, 24, torch.float32, device, N=3, raw_gate=True)
    options = dict.fromkeys((*NAMES, "output_final_state"), True) | packing((5, 0, 15), 64, device)
    options |= {"safe_gate": True, "lower_bound": -5.0, "disable_recompute": True}
    return x, options | {"return_intermediate_states": True}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_kernel(case, device):
    assert refused(chunk_kda, CASES[case], *everything(device))


@few
@given(call=calls(), case=st.sampled_from(list(CASES)), impl=st.sampled_from(["auto", "reference"]))
def test_any_invalid_call(call, case, impl):
    x, _, _, options = call
    assume(refused(chunk_kda, CASES[case], x, options | {"impl": impl}))


def test_kernels_are_counted(device):
    x, options = everything(device)
    with launches() as ran:
        o, S, h = chunk_kda(**x, **options, impl="triton")
    assert len(ran) > 5
    assert o.shape == x["v"].shape and S.shape == (3, 4, 16, 24) and h.shape == (1, 2, 4, 16, 24)


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


def test_rows_of_chunk_indices_are_counted(device):
    x, options = everything(device)
    for rows in ([[0, 0]], [[0, 0], [2, 0], [2, 1]]):
        options["chunk_indices"] = torch.tensor(rows, device=device)
        with pytest.raises(ValueError, match=r"chunk_indices must have 2 rows, .* of 64 tokens"):
            chunk_kda(**x, **options)


def test_the_deprecated_name_of_state_v_first(device):
    x, options = everything(device)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    want = chunk_kda(**x, **options, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="use state_v_first") as caught:
        got = chunk_kda(**x, **options, transpose_state_layout=True)
    assert [w.filename for w in caught] == [__file__]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_unknown_argument_is_refused(device):
    x, options = everything(device)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cp_contexts'"):
        chunk_kda(**x, **options, cp_contexts=None)


def test_arguments_stand_where_fla_has_them():
    names = list(inspect.signature(chunk_kda).parameters)
    assert names[:19] == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval", "safe_gate", "lower_bound", "disable_recompute",
        "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
    ]  # fmt: skip
