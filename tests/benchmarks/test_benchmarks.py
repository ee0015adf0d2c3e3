"""The benchmarks without a GPU: counts, forms, results, figures, the command line."""

import json
import math
import os
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from benchmarking import (
    DECODE,
    DPLR_SMALL,
    EMA_SMALL,
    GDN2_DECODE,
    KDA_DECODE,
    KDA_SMALL,
    RWKV7_SMALL,
    SMALL,
    SSD_DECODE,
    SSD_SMALL,
    TINY,
    modules,
    needs_no_gpu,
    some,
    some_row,
)
from scalar_forms import Adjoints, Channels, Decays, Scalars

from benchmarks import adapters, forms, mamba, measure, plot, results
from benchmarks.adapters import DISTRIBUTIONS, OPTIONAL, refusal
from benchmarks.cases import (
    ALL_CALLS,
    CALLS,
    CASES,
    SCALING_T,
    STAGES,
    TRAINING,
    Case,
    scaling_case,
    select,
    work,
)
from benchmarks.progress import Progress
from linattn_edu import (
    chunk_dplr_delta_rule,
    chunk_kda,
    chunk_rwkv7,
    ema_scan,
    mamba_chunk_scan_combined,
    measurements,
    tables,
)
from linattn_edu.reference.delta.recurrent import recurrent, recurrent_bwd
from linattn_edu.testing import gdn_inputs, kda_inputs, relative_rms

CHUNK = 4
EMA_WIDE = Case("x", "ema", 1, 5, 1, 1, 1, 192)
SAFE = ("linattn_edu_safe", "fla_safe")


# ---- the registry


def test_the_cases_are_those_that_the_peers_are_measured_on():
    assert {name: case.shape for name, case in CASES.items()} == {
        "gdn_train": (8, 4096, 16, 16, 128, 128),
        "gdn_gva": (1, 32768, 16, 32, 128, 128),
        "gdn_long": (1, 32768, 4, 4, 128, 128),
        "gdn_d64": (8, 4096, 32, 32, 64, 64),
        "gdn_beta2": (8, 4096, 16, 16, 128, 128),
        "gdn_beta2_alike": (8, 4096, 16, 16, 128, 128),
        "gdn_decode": (128, 1, 16, 32, 128, 128),
        "kda_train": (8, 4096, 16, 16, 128, 128),
        "kda_kimi": (1, 32768, 32, 32, 128, 128),
        "kda_long": (1, 32768, 4, 4, 128, 128),
        "kda_beta2": (8, 4096, 16, 16, 128, 128),
        "kda_beta2_alike": (8, 4096, 16, 16, 128, 128),
        "gdn2_train": (8, 4096, 16, 16, 128, 128),
        "gdn2_beta2": (8, 4096, 16, 16, 128, 128),
        "gdn2_decode": (128, 1, 32, 32, 128, 128),
        "kda_decode": (128, 1, 32, 32, 128, 128),
        "dplr_train": (8, 4096, 16, 16, 128, 128),
        "rwkv7_train": (8, 4096, 32, 32, 64, 64),
        "ssd_2.7b": (8, 4096, 1, 80, 128, 64),
        "ssd_long": (1, 32768, 1, 80, 128, 64),
        "ssd_decode": (128, 1, 1, 80, 128, 64),
        "ema_train": (8, 4096, 1, 1, 1, 4096),
        "ema_long": (1, 32768, 1, 1, 1, 4096),
    }
    ssd = ("ssd_2.7b", "ssd_long", "ssd_decode", "ema_train", "ema_long")
    assert [name for name, case in CASES.items() if case.operator == "ssd"] == list(ssd)
    assert SCALING_T == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    assert scaling_case(512).shape == (1, 512, 16, 16, 128, 128)


def test_select():
    assert [c.name for c in select([])] == list(CASES)
    assert [c.name for c in select(["gdn_l", "gdn_train"])] == ["gdn_train", "gdn_long"]
    assert [c.name for c in select(["kda"])] == [
        "kda_train",
        "kda_kimi",
        "kda_long",
        "kda_beta2",
        "kda_beta2_alike",
        "kda_decode",
    ]
    with pytest.raises(ValueError, match="'kdb'"):
        select(["kdb"])


def nbytes(*values) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))


SHORT = (SMALL, KDA_SMALL, DPLR_SMALL, RWKV7_SMALL, SSD_SMALL, EMA_SMALL)
# of KDA, those that read the gates of a chunk's last token alone
LAST_GATES = ("state", "kda_scans", "state_bwd", "kda_scan", "kda_fused_scan", "kda_fused_scans")


@pytest.mark.parametrize(
    ("case", "stage"),
    [(case, stage) for case in (SMALL, KDA_SMALL, SSD_SMALL) for stage in STAGES[case.op]],
)
def test_bytes_of_a_stage_are_those_of_its_tensors(case, stage):
    i = measure.inputs(case, "cpu")
    args, kwargs = forms.stage_arguments(i, 16, "reference")[stage]
    out = forms.stage_function(stage, "reference")(*args, **kwargs)
    out = out if isinstance(out, tuple) else (out,)
    moved = nbytes(*args, *out)
    if case is KDA_SMALL and stage in LAST_GATES:
        gc = next(x for x in args if x.shape == i.g.shape and x.dtype == i.g.dtype)
        moved += nbytes(gc[:, 15::16]) - nbytes(gc)  # of gc the last tokens only
    if case is SSD_SMALL and stage == "ssd_states":
        moved += nbytes(args[3][:, ::32]) - nbytes(args[3])  # of gc a token a chunk
    assert work(case, f"stage:{stage}", 16).bytes == moved


@pytest.mark.parametrize("case", SHORT)
def test_bytes_of_the_forward_pass(case):
    i = measure.inputs(case, "cpu")
    out = i.x if case.operator == "ssd" else i.v  # o has its shape
    moved = nbytes(*i.asdict().values()) + nbytes(out)
    assert work(case, "forward").bytes == moved
    if case is SMALL:
        assert work(case, "quadratic").bytes == moved


@pytest.mark.parametrize("case", SHORT)
def test_bytes_of_both_passes_are_those_of_two_calls(case):
    i = measure.inputs(case, "cpu")
    inputs, out = nbytes(*i.asdict().values()), i.x if case.operator == "ssd" else i.v
    forward, backward = inputs + nbytes(out), inputs + nbytes(out) + inputs
    assert work(case, "forward_backward").bytes == forward + backward


@pytest.mark.parametrize("case", [DECODE, KDA_DECODE, GDN2_DECODE])
@pytest.mark.parametrize("what", ["decode", "decode_inplace"])
def test_bytes_of_a_decoded_token(case, what):
    i = measure.inputs(case, "cpu")
    assert work(case, what).bytes == nbytes(*i.asdict().values(), i.v, i.initial_state)


def test_bytes_of_a_decoded_token_of_mamba_2():
    i = measure.inputs(SSD_DECODE, "cpu")
    moved = nbytes(*i.asdict().values(), i.x, i.initial_state)
    assert work(SSD_DECODE, "decode_inplace") == work(SSD_DECODE, "decode_graph")
    assert work(SSD_DECODE, "decode_inplace").bytes == moved
    assert SSD_DECODE.state_bytes == nbytes(i.initial_state)


@pytest.fixture(scope="module")
def counted():
    """Multiply-adds of the tiny case by purpose; the same code gives the right output."""
    i = gdn_inputs(*TINY.shape, dtype=torch.float64)
    scalars, o = Scalars(), torch.empty_like(i.v)
    q, k, v, g, beta = (x.tolist() for x in (i.q, i.k, i.v, i.g, i.beta))
    for b in range(TINY.B):
        S = [[[0.0] * TINY.V for _ in range(TINY.K)] for _ in range(TINY.HV)]
        for first in range(0, TINY.T, CHUNK):
            rows = range(first, min(first + CHUNK, TINY.T))
            q_, k_ = ([x[b][t][0] for t in rows] for x in (q, k))
            kk, qk = scalars.pairs(q_, k_)
            for h in range(TINY.HV):
                v_, g_, beta_ = ([x[b][t][h] for t in rows] for x in (v, g, beta))
                out = scalars.chunk(q_, k_, v_, g_, beta_, S[h], kk, qk)
                o[b, first : first + len(rows), h] = torch.tensor(out, dtype=o.dtype)
    assert relative_rms(o, recurrent(i.q, i.k, i.v, i.g, i.beta)[0]) < 1e-12
    return scalars.count


def test_flops_are_the_multiply_adds_of_the_scalar_form(counted):
    c = counted
    product, triangle = c["state"] // 3, c["lower"] // 2  # three and two of each are used above
    fused = {
        "stage:intra_chunk": c["kkt"] + c["qkt"] + c["inverse"],
        "stage:scan": c["state"] + c["lower"],
    }
    expected = {
        **fused,
        "stage:solve": c["kkt"] + c["inverse"],
        "stage:wy": c["w"] + triangle,
        "stage:state": 2 * product,
        "stage:output": product + c["qkt"] + triangle,
        "forward": sum(fused.values()),
        "chunked": sum(fused.values()),
    }
    assert {what: work(TINY, what, CHUNK).flops for what in expected} == {
        what: 2 * n for what, n in expected.items()
    }


@pytest.mark.parametrize("shape", [TINY.shape, (1, 9, 2, 4, 2, 3)])
def test_flops_of_the_adjoints_are_the_multiply_adds_of_the_scalar_form(shape):
    case = Case("tiny", "gdn", *shape)
    i = gdn_inputs(*case.shape, dtype=torch.float64)
    do = measure.gradient(i.v)
    scalars = Adjoints(i, do, CHUNK)
    scalars.run()
    expected = recurrent_bwd(i.q, i.k, i.v, i.g, i.beta, do)
    for name, gradient in zip(("q", "k", "v", "g", "beta"), expected, strict=False):
        assert relative_rms(getattr(scalars, f"d{name}"), gradient) < 1e-12, name
    assert {stage: work(case, f"stage:{stage}", CHUNK).flops for stage in scalars.count} == {
        stage: 2 * n for stage, n in scalars.count.items()
    }
    both = work(case, "forward", CHUNK).flops + 2 * sum(scalars.count.values())
    assert work(case, "forward_backward", CHUNK).flops == both


@pytest.mark.parametrize("shape", [TINY.shape, (1, 9, 2, 4, 2, 3)])
def test_flops_of_kda_are_the_multiply_adds_of_the_scalar_form(shape):
    case = Case("tiny", "kda", *shape)
    i = kda_inputs(*case.shape, dtype=torch.float64)
    do = measure.gradient(i.v)
    scalars = Channels(i, do, CHUNK)
    scalars.run()
    assert relative_rms(scalars.o, measure.reference(i)[0]) < 1e-12
    for name, gradient in measure.reference_gradients(i, do).items():
        assert relative_rms(getattr(scalars, f"d{name}"), gradient) < 1e-12, name
    count = scalars.count
    w, u = count.pop("w"), count.pop("u")
    scan, scans = count["state"] + count["output"], count["state"] + count["state_bwd"]
    expected = {**count, "wy": w + u, "kda_scan": scan, "kda_scans": scans}
    left = count["kda_output_bwd"] + count["kda_wy_bwd"] - u + count["kda_intra_bwd"]
    expected |= {"kda_prepare": count["kda_intra"], "kda_fused_intra_bwd": left}
    expected |= {"kda_fused_scan": scan + u, "kda_fused_scans": scans + 2 * u}  # A W, A^T dv_new
    assert {stage: work(case, f"stage:{stage}", CHUNK).flops for stage in expected} == {
        stage: 2 * n for stage, n in expected.items()
    }
    assert {*expected, "gate_cumsum", "kda_gates", "gate_bwd"} == set(STAGES["kda"])
    both = sum(2 * n for n in (*count.values(), u))  # v_new needs no w
    assert work(case, "forward_backward", CHUNK).flops == both
    forward = sum(2 * count[stage] for stage in ("kda_intra", "state", "output")) + 2 * u
    assert work(case, "forward", CHUNK).flops == forward


@pytest.mark.parametrize("shape", [(2, 7, 1, 2, 3, 2), (1, 9, 2, 4, 2, 3)])
def test_flops_of_mamba_2_are_the_multiply_adds_of_the_scalar_form(shape):
    case = Case("tiny", "ssd", *shape)
    i = measure.inputs(case, "cpu").double()
    dy = measure.gradient(i.x)
    for chunk, fused in ((CHUNK, False), (2 * CHUNK, True)):
        scalars = Decays(i, dy, chunk)
        scalars.run()
        assert relative_rms(scalars.y, i.recurrence()[0]) < 1e-12
        gradients = i.gradients(dy)
        for name in ("x", "B", "C"):
            assert relative_rms(getattr(scalars, f"d{name}"), gradients[name]) < 1e-12, name
        n = scalars.count
        inner = n["dmx"] + 2 * n["dscores"]  # dscores from dY X^T, dscores B and dscores^T C
        if fused:
            expected = {
                "stage:ssd_states": n["write"],
                "stage:ssd_fwd": n["write"] + n["read"] + n["mx"],
                "stage:ssd_states_bwd": n["dstates"],
                "stage:ssd_bwd_dc": n["dc_state"],
                "stage:ssd_bwd_dx": n["cb"] + n["db_state"] + n["dx_state"] + n["mtdy"] + inner,
            }
        else:
            expected = {
                "stage:chunk_state": n["write"],
                "stage:chunk_scan": n["read"] + n["cb"] + n["mx"],
                "stage:chunk_scan_bwd_dstates": n["dstates"],
                "stage:chunk_state_bwd_db": n["db_state"],
                "stage:chunk_scan_bwd_dc": n["dc_state"] + inner,
                "stage:chunk_scan_chunk_state_bwd_dx": n["dx_state"] + n["cb"] + n["mtdy"],
            }
            adjoints = sum(n[x] for x in ("dstates", "db_state", "dc_state", "dx_state", "mtdy"))
            forward = n["cb"] + n["write"] + n["read"] + n["mx"]
            expected |= {"forward": forward, TRAINING: forward + adjoints + inner}
        assert {what: work(case, what, CHUNK).flops for what in expected} == {
            what: 2 * x for what, x in expected.items()
        }


def test_flops_of_one_token():
    one = Case("one", "gdn", 1, 1, 1, 1, 8, 4)
    assert work(one, "recurrent").flops == 7 * 8 * 4 + 3 * 4
    assert work(one, "decode") == work(one, "decode_inplace")
    assert work(one, "decode").flops == work(one, "recurrent").flops
    assert work(one, "stage:recurrent_bwd").flops == 20 * 8 * 4 + 6 * 4
    assert work(one, "stage:gate_cumsum").flops == 2
    token = Case("one", "ssd_decode", 1, 1, 1, 1, 8, 4)
    assert work(token, "decode_inplace").flops == 5 * 8 * 4 + 3 * 4
    average = Case("one", "ema", 1, 1, 1, 1, 1, 4)
    assert (work(average, "forward").flops, work(average, TRAINING).flops) == (3 * 4, 12 * 4)
    whole = Case("one", "ssd", 1, 5, 1, 1, 8, 4)
    assert work(whole, "stage:chunk_scores").flops == 2 * 5 * 5 * 8
    # of a pair of tokens below the diagonal C . B and dy . x, and nothing on it
    assert work(whole, "stage:chunk_scan_bwd_da_cs").flops == 2 * 10 * (8 + 4)
    assert work(one, "stage:gate_bwd").flops == 1
    assert work(one, "quadratic").flops == 2 * (8 + 4)  # q k^T and its product with v


def test_floor_is_the_larger_time():
    w = work(CASES["gdn_train"], "forward")
    assert w.floor_ms(1e12, math.inf) == pytest.approx(w.bytes / 1e9)
    assert w.floor_ms(math.inf, 1e12) == pytest.approx(w.flops / 1e9)
    known = {"gdn_train": 0.125, "gdn_gva": 0.19, "gdn_long": 0.03, "gdn_d64": 0.125}
    known |= {"kda_train": 0.19, "kda_kimi": 0.38, "kda_long": 0.047}
    for name, floor in known.items():
        assert work(CASES[name], "forward").floor_ms() == pytest.approx(floor, rel=0.05)
    assert work(CASES["ssd_2.7b"], "forward").floor_ms() == pytest.approx(0.166, rel=0.05)
    assert work(CASES["ema_long"], "forward").floor_ms() == pytest.approx(0.125, rel=0.05)
    assert work(CASES["ssd_decode"], "decode_inplace").floor_ms() == pytest.approx(0.157, rel=0.05)
    for name in ("gdn_decode", "kda_decode"):
        assert work(CASES[name], "decode").floor_ms() == pytest.approx(0.125, rel=0.05)


# ---- forms


@pytest.mark.parametrize("limit", [1, 2**31])
def test_quadratic_form_is_the_recurrence(limit, monkeypatch):
    monkeypatch.setattr(forms, "QUADRATIC_BYTES", limit)  # head by head, and all at once
    i = gdn_inputs(2, 70, 2, 4, 16, 8)
    ref = recurrent(*(x.double() for x in (i.q, i.k, i.v, i.g, i.beta)))[0]
    assert relative_rms(forms.quadratic(i), ref) < 1e-5


def test_oracle_measures_a_slice_of_heads():
    i = gdn_inputs(2, 40, 3, 6, 16, 16)
    o = recurrent(i.q, i.k, i.v, i.g, i.beta)[0]
    oracle = measure.Oracle(i, tokens=32)
    assert oracle.heads == [0, 1, 4, 5]
    assert oracle.error(o) < 1e-6
    o[0, 31, 5] += 1
    assert oracle.error(o) > 1e-3


def test_oracle_starts_from_the_initial_state():
    i = measure.inputs(DECODE, "cpu")
    o, state = recurrent(*list(i.asdict().values())[:5], initial_state=i.initial_state)
    oracle = measure.Oracle(i)
    assert oracle.error(o) < 5e-3 and oracle.state_error(state) < 1e-6
    state[0, 3] += 1
    assert oracle.state_error(state) > 1e-3


@pytest.mark.parametrize("cosine", measure.ALIKE)
def test_errors_with_keys_alike(cosine):
    """Keys of a head have that cosine; an error of each tensor by name, None where it is none."""
    case = Case("x", "gdn", 1, 64, 4, 8, 64, 8, 4)
    i = measure.alike(measure.inputs(case, "cpu"), cosine)
    k = i.k[0].transpose(0, 1).double()
    row, column = torch.triu_indices(64, 64, 1)
    cosines = (k @ k.mT)[:, row, column]
    assert abs(cosines.mean() - cosine) < 0.03 and (k.norm(dim=-1) - 1).abs().max() < 1e-2
    oracle = measure.GradientOracle(case, "cpu", cosine)
    assert torch.equal(
        oracle.step.i.k, measure.alike(measure.inputs(measure.short(case), "cpu"), cosine).k
    )

    def f(i):
        return recurrent(i.q, i.k, i.v, i.g, i.beta)[0]

    errors = measure.alike_errors({cosine: oracle}, f)
    names = [f"rho{100 * cosine:.0f}_{x}" for x in ("o", "dq", "dk", "dv", "dg", "dbeta")]
    assert [*errors] == names and max(errors.values()) < 1e-5
    broken = measure.alike_errors({cosine: oracle}, lambda i: f(i) * torch.nan)
    assert [*broken.values()] == [None] * 6


def test_gradient_oracle_is_short_and_knows_each_gradient():
    case = Case("x", "gdn", 2, 40, 4, 8, 16, 8, 4)
    assert measure.short(case).shape == (1, 40, 2, 4, 16, 8)
    assert measure.short(CASES["gdn_gva"]).shape == (1, 2048, 2, 4, 128, 128)
    oracle = measure.GradientOracle(case, "cpu")
    errors = oracle.errors(lambda i: recurrent(i.q, i.k, i.v, i.g, i.beta)[0])
    assert list(errors) == ["error", *(f"error_d{x}" for x in ("q", "k", "v", "g", "beta"))]
    assert max(errors.values()) < 1e-5
    errors = oracle.errors(lambda i: recurrent(i.q, i.k, i.v, i.g, i.beta.detach() + 0 * i.beta)[0])
    assert errors["error_dbeta"] > 0.5 and errors["error_dk"] < 1e-5
    with pytest.raises(ArithmeticError, match="no gradient came back for q"):
        oracle.errors(lambda i: recurrent(i.q.detach(), i.k, i.v, i.g, i.beta)[0])


@pytest.mark.parametrize("case", [KDA_SMALL, KDA_DECODE])
def test_the_oracles_of_a_gate_for_each_channel(case):
    i = measure.inputs(case, "cpu")
    assert i.g.shape == (*i.v.shape[:3], case.K) and i.g.min() >= -5
    o, state = recurrent(i.q, i.k, i.v, None, i.beta, gk=i.g, initial_state=i.initial_state)
    oracle = measure.Oracle(i)
    assert oracle.error(o) < 5e-3 and oracle.state_error(state) < 1e-6
    if i.initial_state is None:
        oracle = measure.GradientOracle(case, "cpu")
        errors = oracle.errors(lambda i: chunk_kda(i.q, i.k, i.v, i.g, i.beta, impl="reference")[0])
        assert list(errors) == ["error", *(f"error_d{x}" for x in ("q", "k", "v", "g", "beta"))]
        assert max(errors.values()) < 1e-2


@pytest.mark.parametrize("case", [DPLR_SMALL, RWKV7_SMALL, SSD_SMALL, EMA_SMALL])
def test_the_oracles_of_operators_with_inputs_of_their_own(case):
    def reference(i):
        if case.op == "dplr":
            return chunk_dplr_delta_rule(i.q, i.k, i.v, i.a, i.b, i.gk, impl="reference")[0]
        if case.op == "rwkv7":
            return chunk_rwkv7(i.q, i.gk, i.k, i.v, i.a, i.b, impl="reference")[0]
        if case.op == "ema":
            return ema_scan(i.x, i.g, impl="reference")[0]
        return mamba_chunk_scan_combined(i.x, i.dt, i.A, i.B, i.C, 32, D=i.D, impl="reference")

    i = measure.inputs(case, "cpu")
    oracle = measure.Oracle(i, tokens=70)
    y = reference(i)
    assert oracle.error(y) < 5e-3 and oracle.error(y[:, :40]) < 5e-3
    y[0, 69] += 1
    assert oracle.error(y) > 1e-2
    oracle = measure.GradientOracle(case, "cpu")
    errors = oracle.errors(reference)
    assert list(errors) == ["error", *(f"error_d{name}" for name in i.asdict())]
    assert max(errors.values()) < 1e-2


def test_the_oracle_of_a_token_of_mamba_2():
    i = measure.inputs(SSD_DECODE, "cpu")
    out, state = i.recurrence()
    oracle = measure.Oracle(i)
    assert oracle.error(out) < 5e-3 and oracle.state_error(state) < 1e-6
    state[0, 3] += 1
    assert oracle.state_error(state) > 1e-3
    assert all(y.stride(-1) == 0 for y in i.expanded())


def test_a_recurrence_is_differentiated_in_pieces(monkeypatch):
    i = measure.inputs(SSD_SMALL, "cpu").double()
    dy, found = measure.gradient(i.x), []
    for tokens in (1, 32, 100):
        monkeypatch.setattr(mamba, "PIECE", tokens)
        found.append(i.gradients(dy))
    for name, x in found[0].items():
        assert relative_rms(found[1][name], x) < 1e-14 and relative_rms(found[2][name], x) < 1e-14


def test_an_average_is_mamba_2s_scan():
    i = measure.inputs(EMA_SMALL, "cpu").double()
    x, dt, A, B, C, _ = adapters.average_as_scan(i)
    assert x.shape == (2, 80, 1, 33) and dt.shape == (2, 80, 1)
    zeros = torch.zeros_like(A)
    y, _ = mamba.Scan(x, dt, A, B, C, zeros).recurrence()
    assert relative_rms(y.flatten(2), i.recurrence()[0].flatten(2)) < 1e-12
    wide = measure.inputs(EMA_WIDE, "cpu")
    x, dt, *_ = adapters.average_as_scan(wide)
    assert x.shape == (1, 5, 3, 64) and dt.shape == (1, 5, 3)


def test_a_stage_is_only_stopped_by_those_it_needs(monkeypatch):
    original = forms.stage_function

    def stage_function(name, impl):
        if name in ("state_bwd", "intra_chunk"):
            raise RuntimeError(f"{name} is broken")
        return original(name, "reference")

    monkeypatch.setattr(forms, "stage_function", stage_function)
    arguments = forms.StageArguments(gdn_inputs(*SMALL.shape), 16)
    broken = {}
    for name in STAGES["gdn"]:
        try:
            forms.stage_call(arguments, name)()
        except RuntimeError as error:
            broken[name] = str(error)
    state_bwd = dict.fromkeys(("state_bwd", "wy_bwd", "gate_bwd"), "state_bwd is broken")
    assert broken == {
        **dict.fromkeys(("intra_chunk", "scan"), "intra_chunk is broken"),
        **state_bwd,
    }


# ---- results


def test_merge_keeps_what_was_not_measured_again():
    old = some([some_row("gdn_long"), some_row(ms=2.0, first_call_s=9.0)], fla="0.6.0")
    new = some([some_row(ms=3.0), some_row("gdn_gva")], date="2026-02-02")
    both = results.merge(old, new)
    assert [(r["case"], r["ms"]) for r in both["rows"]] == [
        ("gdn_train", 3.0),
        ("gdn_gva", 1.0),
        ("gdn_long", 1.0),
    ]
    assert both["rows"][0]["first_call_s"] == 9.0
    assert (both["fla"], both["date"]) == ("0.6.0", "2026-02-02")
    first = {"case": "gdn_long", "library": "flash_qla", "what": "forward_backward"}
    first["first_call_s"] = 7.0  # measured alone, before or after the times
    timed = some_row("gdn_long", "flash_qla", "forward_backward")
    for rows in ([first, timed], [timed, first]):
        both = results.merge(None, some(rows))["rows"]
        assert both == results.merge(some(rows[:1]), some(rows[1:]))["rows"]
        assert both == [{**timed, "first_call_s": 7.0}]
        assert list(both[0])[-1] == "first_call_s"
    every = [some_row(case) for case in CASES]
    assert [r["case"] for r in results.merge(None, some(every[::-1]))["rows"]] == [*CASES]
    lengths = [some_row("gdn_scaling", "linattn_edu", "chunked", T=T) for T in (512, 256)]
    assert [r["T"] for r in results.merge(None, some(lengths))["rows"]] == [256, 512]


@pytest.mark.parametrize("change", [{"triton": "3.7.1"}, {"gpu": "NVIDIA B200"}, {"fla": "0.7"}])
def test_merge_drops_what_was_measured_elsewhere(change):
    old, new = some([some_row("gdn_long")], fla="0.6.0"), some([some_row()], **change)
    assert results.differences(old, new)
    assert [r["case"] for r in results.merge(old, new)["rows"]] == ["gdn_train"]


def test_an_absent_peers_rows_stay_where_only_triton_differs():
    peers = [some_row(library="flashinfer"), some_row(library="fla")]
    ours = some_row(library="linattn_edu")
    old = some([ours, *peers], flashinfer="0.5", fla="0.6.0", date="2026-01-01")
    new = some([ours | {"ms": 3.0}], triton="3.9.0", date="2026-02-02")
    both = results.merge(old, new)
    assert [(r["library"], r.get("date")) for r in both["rows"]] == [
        ("linattn_edu", None),
        ("flashinfer", "2026-01-01"),
    ]
    assert (both["triton"], both["flashinfer"], both["date"]) == ("3.9.0", "0.5", "2026-02-02")
    for change in ({"flashinfer": "0.6"}, {"gpu": "NVIDIA B200"}):  # there, or elsewhere
        assert len(results.merge(old, {**new, **change})["rows"]) == 1


def test_save_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "data" / "x.json"
    data = some([some_row(), some_row("gdn_gva")])
    results.save(path, data)
    assert json.loads(path.read_text()) == data
    assert results.load(path) == data
    assert results.load(tmp_path / "none.json") is None

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        results.save(path, some())
    assert results.load(path) == data
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_default_file_is_named_after_the_gpu():
    assert results.default_path("NVIDIA H200", "gdn").name == "gdn_h200.json"
    assert results.default_path("NVIDIA A100-SXM4-80GB", "kda").name == "kda_a100_sxm4_80gb.json"


# ---- figures


def made_up(operator: str = "gdn") -> dict:
    cases = [case for case in CASES.values() if case.operator == operator]
    rows = [
        some_row(case.name, library, what)
        for case in cases
        for what in CALLS[case.op]
        for library in ("linattn_edu", "fla")
    ]
    rows += [
        some_row(case.name, "linattn_edu", f"stage:{s}")
        for case in cases
        for s in STAGES.get(case.op, ())
    ]
    if operator == "ssd":
        return some([r for r in rows if r["library"] != "fla"])
    if operator == "kda":
        return some(rows + [some_row("kda_train", x, ms=0.4) for x in SAFE])
    rows += [some_row("gdn_train", "flash_qla", ms=0.4)]
    rows += [{"case": "gdn_gva", "library": "fla", "what": "forward", "first_call_s": 1.0}]
    rows += [
        some_row("gdn_scaling", "linattn_edu", what, T / 1e3, T=T)
        for what in ("chunked", "recurrent", "quadratic")
        for T in SCALING_T
    ]
    return some(rows)


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    data, again = tmp_path / "data", tmp_path / "again"
    results.save(data / "gdn_a100.json", made_up() | {"gpu": "NVIDIA A100"})
    results.save(data / "kda_h200.json", made_up("kda"))
    results.save(data / "ssd_h200.json", made_up("ssd"))
    for folder, out in ((data, "one"), (again, "two")):
        results.save(folder / "gdn_h200.json", made_up())
        assert plot.main(["--data", str(folder), "--out", str(tmp_path / out)]) == 0
    files = sorted((tmp_path / "one").iterdir())
    names = {"forward", "backward", "roofline", "roofline_backward", "scaling"}
    more = {f"{name}_{op}_h200" for op in ("kda", "ssd") for name in names - {"scaling"}}
    assert {p.stem for p in files} == names | more | {f"{name}_gdn_a100" for name in names}
    assert {p.stem for p in (tmp_path / "two").iterdir()} == names
    for file in (tmp_path / "two").iterdir():  # no date, no random ids
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes()
    for file in files:
        assert ET.parse(file).getroot().tag.endswith("svg")
        assert b"<dc:date>" not in file.read_bytes()
    assert "gdn_h200.json: NVIDIA H200, torch 2.11.0, 2026-01-01" in capsys.readouterr().out


def drawn(data: dict, folder: Path) -> dict[str, list[str]]:
    """The texts of the figures, which matplotlib leaves beside their outlines."""
    files = plot.draw(data, folder)
    return {p.stem: re.findall(r"<!-- (.*?) -->", p.read_text(encoding="utf-8")) for p in files}


def test_a_bar_that_is_not_there_says_why(tmp_path):
    """A library that can run a case was not measured; only one that cannot has no bar for good."""
    pytest.importorskip("matplotlib")
    data = made_up()
    data["rows"] += [some_row("gdn_long", "flash_qla", TRAINING)]
    texts = drawn(data, tmp_path)
    for figure in ("forward", "backward"):
        said = sorted(text for text in texts[figure] if text.startswith("flash_qla: "))
        reasons = [
            "K = V = 128 only",
            "not measured",
            "not measured",
            "not tried with beta up to 2",
            "not tried with beta up to 2",
        ]
        assert said == [f"flash_qla: {why}" for why in reasons]
    assert not [text for every in texts.values() for text in every if text.startswith("no ")]


def test_what_is_missing_is_what_a_library_can_run():
    data = some([some_row("gdn_train", "linattn_edu", "forward")], fla="0.6.0", flash_qla="0.1.3")
    missing = results.missing(data)
    assert ("gdn_gva", TRAINING, "flash_qla") in missing
    assert ("gdn_train", "forward", "linattn_edu") not in missing
    assert not [x for x in missing if x[0] == "gdn_d64" and x[2] == "flash_qla"]
    assert not [x for x in missing if x[0].startswith("kda")]  # they have a file of their own
    alone = results.missing(data | dict.fromkeys(DISTRIBUTIONS))
    assert {library for _, _, library in alone} == {"linattn_edu"}


@pytest.mark.parametrize("shown_by", ["a version", "a row"])
def test_an_optional_library_that_was_there_leaves_nothing_out(shown_by):
    data = some([some_row("gdn_train", "linattn_edu", "forward")], **dict.fromkeys(DISTRIBUTIONS))
    assert not {library for _, _, library in results.missing(data)} & set(OPTIONAL)
    done = ("gdn_gva", "forward", "flashinfer")
    if shown_by == "a row":
        data["rows"] += [some_row(*done[::2], done[1])]
    else:
        data["flashinfer"] = "0.7.2"
    missing = {x for x in results.missing(data) if x[2] == "flashinfer"}
    every = {(case, "forward", "flashinfer") for case in ("gdn_train", "gdn_gva", "gdn_long")}
    assert missing == (every - {done} if shown_by == "a row" else every)
    data["rows"] += [some_row("kda_long", "cudnn", "forward")]
    missing = {x for x in results.missing(data) if x[2] == "cudnn"}
    assert ("kda_kimi", TRAINING, "cudnn") in missing and len(missing) == 5


COMMITTED = results.of_operators()
committed = pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
BESIDE = {"gdn": tables.BESIDE, "ssd": tables.BESIDE_SSD}  # the tables of the README


def without_a_number(data: dict) -> set[tuple[str, str, str]]:
    """(case, call, library) of what a figure, a table of its page or the README shows as not there.

    A figure says so in place of a bar, a table has no line for a library that stands in it. The
    README has an empty cell, or, where the last library has no number, no line.
    """
    rows = [row for row in data["rows"] if "ms" in row]
    said = set()
    for what in ALL_CALLS:
        for case, here in plot.grid(rows, what).items():
            said |= {(case, what, library) for library, row in here.items() if "absent" in row}
    here = {CASES[row["case"]].operator for row in rows if row["case"] in CASES}
    for libraries in (BESIDE[op] for op in here if op in BESIDE):
        _, lines = tables.beside_cells(rows, libraries)
        shown = {tuple(line[:2]): dict(zip(libraries, line[2:], strict=False)) for line in lines}
        for case, what in {(r["case"], r["what"]) for r in rows if r["what"] in tables.PASSES}:
            line = shown.get((case, tables.PASSES[what]), {list(libraries)[-1]: ""})
            said |= {(case, what, library) for library, ms in line.items() if not ms}
    return said


@committed
def test_the_committed_results_leave_nothing_out(path):
    """Every library has a number for every case that its adapter can run."""
    data = results.load(path)
    assert not results.missing(data)
    # whether or not the file says that the library was there
    assert not results.missing({name: x for name, x in data.items() if name == "rows"})
    told = {(r["case"], r["what"], r["library"]) for r in data["rows"] if r.get("refused")}
    for case, what, library in without_a_number(data) - told:
        assert refusal(CASES[case], what, library), (case, what, library)


@committed
def test_a_number_that_is_taken_out_is_noticed(path, tmp_path):
    """Of each call of each library, one after the other, in a copy of the results."""
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    data = results.load(copy)
    calls = [r for r in data["rows"] if r["case"] in CASES and r["what"] in ALL_CALLS]
    calls = [r for r in calls if "refused" not in r]
    assert len(calls) > 1
    for row in calls:
        results.save(copy, data | {"rows": [r for r in data["rows"] if r is not row]})
        key, cut = (row["case"], row["what"], row["library"]), results.load(copy)
        assert results.missing(cut) == [key]
        beside = [r for r in calls if r["what"] == row["what"] and r is not row]
        if {row["case"], row["library"]} <= {r[n] for r in beside for n in ("case", "library")}:
            said = {x for x in without_a_number(cut) if not refusal(CASES[x[0]], *x[1:])}
            assert key in said, "a figure leaves it out and does not say so"


def test_the_figures_have_texts_for_the_committed_absences(tmp_path):
    """What is said to be absent is read off the drawing too: no bar is left out in silence."""
    pytest.importorskip("matplotlib")
    data = measurements.load("gdn")
    cut = [r for r in data["rows"] if (r["case"], r["library"]) != ("gdn_gva", "fla")]
    for rows in (data["rows"], cut):
        texts = drawn({**data, "rows": rows}, tmp_path)
        for figure, what in (("forward", "forward"), ("backward", TRAINING)):
            said = sorted(text for text in texts[figure] if ": " in text)
            grid = plot.grid(rows, what).values()
            found = [(x, row) for here in grid for x, row in here.items()]
            assert said == sorted(f"{x}: {row['absent']}" for x, row in found if "absent" in row)


@committed
def test_the_committed_figures_are_those_of_the_results(path, tmp_path):
    """By their texts: the outlines depend on the version of matplotlib and its fonts."""
    pytest.importorskip("matplotlib")
    suffix = measurements.suffix(path.stem)
    for figure, texts in drawn(results.load(path), tmp_path).items():
        committed = (plot.FIGURES / f"{figure}{suffix}.svg").read_text(encoding="utf-8")
        assert re.findall(r"<!-- (.*?) -->", committed) == texts, "run: python -m benchmarks plot"


def test_plot_draws_only_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    results.save(tmp_path / "gdn_h200.json", some([some_row()]))
    assert plot.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["forward.svg"]


def test_plot_without_results(tmp_path, capsys):
    assert plot.main(["--data", str(tmp_path)]) == 2
    assert "no results" in capsys.readouterr().err


# ---- the command line


def test_list_works_anywhere():
    code, out, err = modules([("benchmarks", "--list")])["benchmarks", "--list"]
    assert code == 0, err
    assert all(name in out for name in (*CASES, *ALL_CALLS))


NEED_A_GPU = [
    ("benchmarks",),
    ("benchmarks", "--all"),
    ("benchmarks.pieces",),
    ("benchmarks.rungs",),
    ("benchmarks.tune", "solve"),
    ("benchmarks.first_call", "linattn_edu", "gdn_train", "forward"),
]
WRONG = {
    ("benchmarks", "gdn_trian"): "gdn_trian",
    ("benchmarks", "--libraries", "fla,flsa"): "flsa",
    ("benchmarks", "--what", "forward,backwards"): "backwards",
    ("benchmarks.tune", "slove"): "slove",
    ("benchmarks.first_call",): "LIBRARY CASE CALL",
    ("benchmarks.first_call", "flsa", "gdn_train", "forward"): "flsa",
    ("benchmarks.first_call", "fla", "gdn_trian", "forward"): "gdn_trian",
    ("benchmarks.first_call", "fla", "gdn_train", "decode"): "decode",
    ("benchmarks.first_call", "flash_qla", "gdn_d64", "forward"): "K = V = 128 only",
}


@needs_no_gpu
def test_without_a_gpu_it_says_so():
    for args, (code, out, err) in modules(NEED_A_GPU).items():
        assert (code, out) == (2, ""), args
        (line,) = err.splitlines()
        assert line.startswith("error: ") and "CUDA GPU" in line, args


def test_a_wrong_name_is_named():
    for args, (code, _, err) in modules(list(WRONG)).items():
        assert code == 2, args
        assert WRONG[args] in err and "Traceback" not in err, args


def test_progress_without_a_terminal(capsys):
    progress = Progress(2)
    progress.at("nothing")
    progress.step("first")
    progress.step("second")
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  1/2") and lines[1].endswith("second")
