"""The whole argument list: every valid call against float64, every invalid one refused in time."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from gdn_checks import DTYPES, check, cotangents, exact, inputs, launches, refused, run, spacing
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.testing import gdn_inputs, poison, relative_rms

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LONGEST = 40 if GPU else 18  # tokens of a sequence
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
INTEGERS = (torch.int32, torch.int64)
NAMES = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
few = settings(max_examples=20 if GPU else 12, derandomize=not GPU, deadline=None)


@st.composite
def calls(draw):
    """(tensors, do, dht, options) of a valid call."""
    flag = st.booleans()
    lengths = draw(
        st.none() | st.lists(st.integers(0, LONGEST), min_size=1, max_size=3).filter(any)
    )
    N = draw(st.integers(1, 2)) if lengths is None else len(lengths)
    B, T = (N, draw(st.integers(1, 2 * LONGEST))) if lengths is None else (1, sum(lengths))
    heads, dtype = draw(st.sampled_from([(1, 1), (1, 3), (2, 2)])), draw(st.sampled_from(DTYPES))
    V = draw(st.sampled_from([1, 8, 16, 27, 40]))
    raw = [draw(flag) for _ in NAMES]
    # a key of one number has unit length whatever it is, and the gradient of that is rounding alone
    K = draw(st.sampled_from([8, 16, 27, 40] if raw[0] else [1, 8, 16, 27, 40]))
    options = dict(zip(NAMES, raw, strict=True)) | {"state_v_first": draw(flag)}
    options["allow_neg_eigval"] = raw[1] and draw(flag)
    options["scale"] = draw(st.none() | st.floats(0.1, 2))
    options["chunk_size"] = draw(st.sampled_from([16, 32, 64]))
    options["output_final_state"] = draw(flag)
    kinds = dict(zip(("raw_qk", "raw_beta", "raw_gate"), raw, strict=True))
    kinds |= {"dt_bias": draw(flag), "state": draw(flag), "norm": draw(st.sampled_from([0.1, 1]))}
    kinds |= {"mask": draw(st.sampled_from([0, 0.5])), "seed": draw(st.integers(0, 2**31))}
    x = inputs(B, T, *heads, K, V, dtype, DEVICE, N=N, **kinds)
    do, dht = cotangents(x, N)
    if options["state_v_first"]:
        dht = dht.mT.contiguous()
        x |= {n: x[n].mT.contiguous() for n in x if n == "initial_state"}
    if lengths is not None:
        known = packing(lengths, options["chunk_size"], DEVICE, draw(st.sampled_from(INTEGERS)))
        options |= {n: v for n, v in known.items() if n == "cu_seqlens" or draw(flag)}
    return x, do, dht if options["output_final_state"] else None, options


def packing(lengths, chunk_size, device, dtype=torch.int64):
    """cu_seqlens, and what else of it the caller may have."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    rows = [(n, c) for n, T in enumerate(lengths) for c in range(-(-T // chunk_size))]
    return {
        "cu_seqlens": bounds.to(device),
        "cu_seqlens_cpu": bounds,
        "chunk_indices": torch.tensor(rows, dtype=dtype, device=device),
    }


def rounded(x, dtype):
    """The float64 value of x, each number one unit of rounding of dtype away from it."""
    return x.double() * (1 + UNIT[dtype] * (2 * torch.randint_like(x, 2).double() - 1))


def conditioning(x, do, dht, want, dtype, options):
    """How far arguments rounded once more move each result, relative to it."""
    smooth = ("g", "A_log", "dt_bias")  # these are never rounded to dtype
    moved = {n: t if n in smooth else rounded(t, dtype) for n, t in x.items()}
    got = exact(moved, rounded(do, dtype), dht if dht is None else rounded(dht, dtype), **options)
    return {n: relative_rms(y, want[n]) for n, y in got.items()}


@few
@given(call=calls(), impl=st.sampled_from(["auto", "auto", "triton", "reference"]))
def test_any_valid_call(call, impl):
    x, do, dht, options = call
    dtype = x["q"].dtype
    skipped = ("chunk_size", "output_final_state", "cu_seqlens_cpu", "chunk_indices")
    asked = {n: v for n, v in options.items() if n not in skipped}
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


def other(name, change):
    """Changes: `name`, which must be there, by `change`."""
    return lambda a: {name: change(a[name])}


def unknown(**changes):
    """Changes of cu_seqlens, which the host does not know otherwise."""
    return {"cu_seqlens_cpu": None, "chunk_indices": None} | changes


def unpacked(**changes):
    """A call without cu_seqlens."""
    return unknown(cu_seqlens=None, initial_state=None) | changes


def chunks(a, *rows, **kwargs):
    return {"chunk_indices": torch.tensor(rows, device=a["cu_seqlens"].device).to(**kwargs)}


def two_of_each(a):
    tokens = ("q", "k", "v", "g", "beta")
    return {"cu_seqlens": a["cu_seqlens"]} | {n: torch.cat([a[n], a[n]]) for n in tokens}


def falling(a):
    bounds = a["cu_seqlens"]
    return unknown(cu_seqlens=bounds[[0, -1, 0, -1]], initial_state=None)


def ungated(a, **changes):
    """A call whose gate is given: g is not positive then."""
    off = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}
    return {"g": -a["g"].abs()} | off | changes


# what is wrong: the error, its message, the changes to a valid call
CASES = {
    "bounds list": (TypeError, "cu_seqlens must be a torch.Tensor .*got list",
                    other("cu_seqlens", lambda b: b.tolist())),
    "bounds dtype": (TypeError, "cu_seqlens must be int32 or int64, got torch.float32",
                     other("cu_seqlens", lambda b: b.float())),
    "bounds rank": (ValueError, r"cu_seqlens must have shape \[N \+ 1\] .*, got \(1, ",
                    other("cu_seqlens", lambda b: b[None])),
    "no sequence": (ValueError, r"cu_seqlens must have shape \[N \+ 1\] .*, got \(1,\)",
                    other("cu_seqlens", lambda b: b[:1])),
    "bounds device": (ValueError, "cu_seqlens must be on .* like q, got meta",
                      other("cu_seqlens", lambda b: b.to("meta"))),
    "batch": (ValueError, "q must have B = 1 with cu_seqlens, .*, got B=2", two_of_each),
    "begin": (ValueError, "cu_seqlens must begin with 0, got 1",
              lambda a: unknown(cu_seqlens=a["cu_seqlens"] + 1)),
    "end": (ValueError, r"cu_seqlens must end at T=\d+, got ",
            lambda a: unknown(cu_seqlens=2 * a["cu_seqlens"])),
    "falling": (ValueError, r"cu_seqlens must not decrease, got \d+ and then 0", falling),
    "host alone": (ValueError, "cu_seqlens_cpu belongs to cu_seqlens, which is None",
                   lambda a: unpacked(cu_seqlens_cpu=a["cu_seqlens"].cpu())),
    "host shape": (ValueError, "cu_seqlens_cpu must have the shape of cu_seqlens",
                   lambda a: {"cu_seqlens_cpu": a["cu_seqlens"].cpu().repeat(2)}),
    "host dtype": (TypeError, "cu_seqlens_cpu must be int32 or int64, got torch.int16",
                   lambda a: {"cu_seqlens_cpu": a["cu_seqlens"].cpu().short()}),
    "host device": (ValueError, "cu_seqlens_cpu must be on cpu, got meta",
                    lambda a: {"cu_seqlens_cpu": a["cu_seqlens"].to("meta")}),
    "host numbers": (ValueError, r"cu_seqlens must end at T=\d+, got ",
                     lambda a: {"cu_seqlens_cpu": 2 * a["cu_seqlens"].cpu()}),
    "chunks alone": (ValueError, "chunk_indices belongs to cu_seqlens, which is None",
                     lambda a: unpacked(**chunks(a, [0, 0]))),
    "chunks dtype": (TypeError, "chunk_indices must be a tensor of int32 or int64, got .*float32",
                     lambda a: chunks(a, [0, 0], dtype=torch.float32)),
    "chunks list": (TypeError, "chunk_indices must be a tensor of int32 or int64, got list",
                    lambda a: {"cu_seqlens": a["cu_seqlens"], "chunk_indices": [[0, 0]]}),
    "chunks shape": (ValueError, r"chunk_indices must have shape \[NT, 2\], got \(2,\)",
                     lambda a: chunks(a, 0, 0)),
    "chunks device": (ValueError, "chunk_indices must be on .* like q, got meta",
                      lambda a: chunks(a, [0, 0], device="meta")),
    "A_log alone": (ValueError, "A_log is used with use_gate_in_kernel=True only",
                    lambda a: ungated(a, A_log=a["g"][0, 0])),
    "dt_bias alone": (ValueError, "dt_bias is used with use_gate_in_kernel=True only",
                      lambda a: ungated(a, dt_bias=a["g"][0, 0])),
    "gate without A_log": (ValueError, "A_log must be given with use_gate_in_kernel=True, got None",
                           lambda a: {"use_gate_in_kernel": True, "A_log": None}),
    "A_log elements": (ValueError, r"A_log must have the elements of \[HV=\d\], in any shape, got ",
                       other("A_log", lambda x: torch.cat([x, x])[None])),
    "A_log dtype": (TypeError, "A_log must be float64, .*got torch.int32",
                    other("A_log", lambda x: x.int())),
    "A_log device": (ValueError, "A_log must be on .* like q, got meta",
                     other("A_log", lambda x: x.to("meta"))),
    "dt_bias elements": (ValueError, r"dt_bias must have the elements of \[HV=\d\], in any shape",
                         other("dt_bias", lambda x: x.repeat(3, 1))),
    "dt_bias device": (ValueError, "dt_bias must be on .* like q, got meta",
                       other("dt_bias", lambda x: x.to("meta"))),
    "neg_eigval alone": (ValueError, "allow_neg_eigval=True .* needs use_beta_sigmoid_in_kernel",
                         lambda a: {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}),
    "states": (ValueError, r"initial_state must have shape \[N=\d, HV=\d, .*\], got ",
               other("initial_state", lambda x: torch.cat([x, x]))),
    "layout of states": (ValueError, r"initial_state must have shape \[N=\d, HV=\d, [KV]=\d+, ",
                         other("initial_state", lambda x: F.pad(x, (0, 1)))),
    "two layouts": (ValueError, "state_v_first and transpose_state_layout are one argument",
                    lambda a: {"state_v_first": True, "transpose_state_layout": False}),
    **{flag: (TypeError, f"{flag} must be True or False, got {value!r}",
              lambda a, flag=flag, value=value: {flag: value})
       for flag, value in (("use_qk_l2norm_in_kernel", 2), ("use_beta_sigmoid_in_kernel", "yes"),
                           ("allow_neg_eigval", 0.0), ("use_gate_in_kernel", -1),
                           ("output_final_state", 1.0), ("state_v_first", "1"),
                           ("transpose_state_layout", 2))},
    "cp_context": (TypeError, "cp_context must come from build_cp_context, got str",
                   lambda a: {"cp_context": "no"}),
    "no beta": (TypeError, "beta must be a torch.Tensor .*got NoneType", lambda a: {"beta": None}),
    "no g": (TypeError, "g must be a torch.Tensor .*got NoneType", lambda a: {"g": None}),
}  # fmt: skip


def everything(device):
    """(tensors, options) of a call that uses every argument."""
    x = inputs(1, 20, 2, 4, 16, 24, torch.float32, device, N=3, raw_gate=True)
    options = dict.fromkeys((*NAMES, "output_final_state"), True) | packing((5, 0, 15), 64, device)
    return x, options


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_kernel(case, device):
    assert refused(chunk_gated_delta_rule, CASES[case], *everything(device))


@few
@given(call=calls(), case=st.sampled_from(list(CASES)), impl=st.sampled_from(["auto", "reference"]))
def test_any_invalid_call(call, case, impl):
    x, _, _, options = call
    assume(refused(chunk_gated_delta_rule, CASES[case], x, options | {"impl": impl}))


def test_kernels_are_counted(device):
    x, options = everything(device)
    with launches() as ran:
        chunk_gated_delta_rule(**x, **options, impl="triton")
    assert len(ran) > 3


def test_rows_of_chunk_indices_are_counted(device):
    x, options = everything(device)
    for rows in ([[0, 0]], [[0, 0], [2, 0], [2, 1]]):
        options["chunk_indices"] = torch.tensor(rows, device=device)
        with pytest.raises(ValueError, match=r"chunk_indices must have 2 rows, .* of 64 tokens"):
            chunk_gated_delta_rule(**x, **options)


def test_the_deprecated_name_of_state_v_first(device):
    x, options = everything(device)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    want = chunk_gated_delta_rule(**x, **options, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="use state_v_first") as caught:
        got = chunk_gated_delta_rule(**x, **options, transpose_state_layout=True)
    assert [w.filename for w in caught] == [__file__]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with warnings.catch_warnings(), pytest.raises(TypeError, match="transpose_state_layout must"):
        warnings.simplefilter("error")
        chunk_gated_delta_rule(**x, **options, transpose_state_layout="no")


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
