"""Runs of the benchmarks, measured by nothing: rows, first calls, what is saved."""

import json
import math
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarking import (
    DECODE,
    DEVICE,
    DPLR_SMALL,
    EMA_SMALL,
    GDN2_DECODE,
    KDA_DECODE,
    KDA_SMALL,
    RATES,
    RWKV7_SMALL,
    SMALL,
    SSD_DECODE,
    SSD_SMALL,
    needs_no_gpu,
    stop_the_clock,
)

from benchmarks import __main__ as command
from benchmarks import adapters, first_call, forms, measure, plot, results, rows, run
from benchmarks.cases import CASES, FUNCTIONS, STAGES, TRAINING, Case, work
from benchmarks.first_call import FirstCall
from linattn_edu import chunk_gated_delta_rule, chunk_kda, measurements


@pytest.fixture
def no_clock(monkeypatch):
    stop_the_clock(monkeypatch)


def reference():
    def f(i):
        chunked = chunk_gated_delta_rule if i.g.ndim == 3 else chunk_kda
        return chunked(i.q, i.k, i.v, i.g, i.beta, impl="reference")[0]

    return f


def decode():
    return lambda i: measure.reference(i, initial_state=i.initial_state)


def decode_inplace():
    def f(i):
        o, final_state = decode()(i)
        return o, i.initial_state.copy_(final_state)

    return f


@pytest.fixture
def stand_ins(monkeypatch):
    """Adapters that need no GPU and no other library."""
    both = {"linattn_edu": reference, "fla": reference}
    chunked = {"forward": {"linattn_edu": reference}, TRAINING: both}
    token = {"decode": {"linattn_edu": decode}, "decode_inplace": {"linattn_edu": decode_inplace}}
    for operator in ("gdn", "kda"):
        monkeypatch.setitem(adapters.LIBRARIES, operator, chunked)
        monkeypatch.setitem(adapters.LIBRARIES, f"{operator}_decode", token)


# ---- rows


def test_every_call_of_a_case_has_adapters():
    for case in CASES.values():
        for what in run.CALLS[case.op]:
            made = adapters.makers(case, what)
            assert "linattn_edu" in made and set(made) <= set(adapters.NAMES)
    every = ("linattn_edu", "linattn_edu_safe", "fla", "fla_safe", "attn_gym", "cudnn")
    assert tuple(adapters.makers(CASES["kda_kimi"], TRAINING)) == every
    for name in ("ssd_2.7b", "ema_long"):
        assert tuple(adapters.makers(CASES[name], TRAINING)) == ("linattn_edu", "mamba_ssm")


@pytest.mark.parametrize(
    ("case", "library"),
    [
        (SMALL, "linattn_edu"), (KDA_SMALL, "linattn_edu"), (KDA_SMALL, "linattn_edu_safe"),
        (SSD_SMALL, "linattn_edu"), (EMA_SMALL, "linattn_edu"), (DPLR_SMALL, "linattn_edu"),
        (RWKV7_SMALL, "linattn_edu"),
    ],
)  # fmt: skip
def test_forward_rows(case, library, no_clock):
    ((row, line),) = rows.call_rows(case, "forward", [library], RATES, DEVICE)
    assert (row["case"], row["what"]) == (case.name, "forward")
    assert (row["ms"], row["peak_mib"]) == (0.25, 3.0)
    assert 0 < row["error"] < 5e-3
    assert row["bytes"] == work(case, "forward").bytes
    assert "0.2500 ms" in line and "error" in line


@pytest.mark.parametrize("safe", [False, True])
def test_every_library_of_kda_is_called_alike(safe, monkeypatch):
    """The other library stands in: fla cannot run here."""
    import linattn_edu

    seen = []
    stand_in = SimpleNamespace(chunk_kda=lambda *a, **k: seen.append((a, k)) or ("o", None))
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.kda", stand_in)
    monkeypatch.setattr(linattn_edu, "chunk_kda", stand_in.chunk_kda)
    i = measure.inputs(KDA_SMALL, DEVICE)
    made = adapters.makers(KDA_SMALL, "forward")
    for library in ("linattn_edu", "fla"):
        assert made[f"{library}_safe" if safe else library]()(i) == "o"
    (ours, options), (theirs, given) = seen
    assert all(x is y for x, y in zip(ours, theirs, strict=True))
    assert options == given | {"impl": "triton"}
    assert given == ({"safe_gate": True, "lower_bound": -5.0} if safe else {})


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    ("case", "package"), [(DPLR_SMALL, "generalized_delta_rule"), (RWKV7_SMALL, "rwkv7")]
)
def test_fla_is_called_as_the_general_delta_rule_is(case, package, safe, monkeypatch):
    """The operator stands in, as fla cannot run here: the same output, from the same arguments."""
    import linattn_edu

    name, seen = FUNCTIONS[case.op], []

    def theirs(*args, **given):
        seen.append(given)
        return getattr(linattn_edu, name)(*args, **given, impl="triton")

    stand_in(monkeypatch, f"fla.ops.{package}", **{name: theirs})
    i, made = measure.inputs(case, DEVICE), adapters.makers(case, "forward")
    o = made["fla_safe" if safe else "fla"]()(i)
    assert torch.equal(o, made["linattn_edu"]()(i))
    assert seen == [{"safe_gate": True, "lower_bound": -math.exp(-0.5)} if safe else {}]
    assert i.gk.min() > -math.exp(-0.5)


@pytest.mark.parametrize(
    ("name", "package"),
    [("gdn_beta2", "gated_delta_rule"), ("kda_beta2", "kda"), ("gdn2_beta2", "gdn2")],
)
def test_a_beta_up_to_2_is_declared_to_ours(name, package, monkeypatch, no_clock):
    """The operator stands in for fla's, which is told nothing: both are right on these inputs."""
    import linattn_edu

    case = replace(CASES[name], B=1, T=80, H=2, HV=2, K=16, V=16)
    f, seen = FUNCTIONS[case.op], []
    rule = getattr(linattn_edu, f)

    def of(library):
        def call(*args, **given):
            seen.append((library, given.pop("allow_neg_eigval", None)))
            return rule(*args, **given | {"impl": "reference"}, allow_neg_eigval=True)

        return call

    stand_in(monkeypatch, f"fla.ops.{package}", **{f: of("fla")})
    monkeypatch.setattr(linattn_edu, f, of("linattn_edu"))
    monkeypatch.setattr(rows, "refusal", lambda *_: None)
    beta = measure.inputs(case, DEVICE).beta
    assert 1.2 < beta.max() <= 2 and beta.min() < 1
    got = list(rows.call_rows(case, TRAINING, ["linattn_edu", "fla"], RATES, DEVICE))
    assert [row["library"] for row, _ in got] == ["linattn_edu", "fla"]
    assert all(row["error"] < 5e-3 and row["error_dbeta"] < 1e-2 for row, _ in got)
    assert {*seen} == {("linattn_edu", True), ("fla", None)}


def stand_in(monkeypatch, name: str, **functions) -> None:
    """A module with these functions, and the packages around it."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


def sequences(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [tokens, ...] of sequences one after the other, as [B, T, ...]."""
    assert offsets.dtype == torch.int32 and offsets[-1] == len(x)
    return torch.stack([x[a:b] for a, b in pairwise(offsets)])


@pytest.mark.parametrize("what", ["forward", TRAINING])
def test_attn_gym_and_cudnn_compute_the_same_kda(what, monkeypatch, no_clock):
    """Each with what its function takes; the recurrence stands in for their kernels."""

    def recurrence(q, k, v, g, beta):
        return chunk_kda(q, k, v, g, beta, impl="reference")[0]

    def gym(q, k, v, gate, beta, *, impl):
        assert impl == "fused"
        return recurrence(q, k, v, gate, beta), None

    def cudnn(q, k, v, g, beta, cu_seqlens):
        assert beta.dtype == g.dtype == torch.float32 and q.is_contiguous()
        both = [sequences(x, cu_seqlens) for x in (q, k, v, g, beta)]
        return recurrence(*both).flatten(0, 1), None

    stand_in(monkeypatch, "attn_gym.linear", chunk_kda=gym)
    stand_in(monkeypatch, "cudnn.linear_attention", kimi_delta_attention=cudnn)
    case = replace(KDA_SMALL, B=2)
    monkeypatch.setattr(rows, "refusal", lambda *_: None)
    got = [row for row, _ in rows.call_rows(case, what, ["attn_gym", "cudnn"], RATES, DEVICE)]
    assert [row["library"] for row in got] == ["attn_gym", "cudnn"]
    assert all(row["error"] < 5e-3 for row in got)


def test_flashinfer_gets_factors_and_packed_sequences(monkeypatch, no_clock):
    def rule(q, k, v, g, beta, *, cu_seqlens, max_seqlen):
        assert g.dtype == beta.dtype == torch.float32 and ((g > 0) & (g <= 1)).all()
        assert max_seqlen == cu_seqlens[1]
        both = [sequences(x, cu_seqlens) for x in (q, k, v, g.log(), beta)]
        return chunk_gated_delta_rule(*both, impl="reference")[0].flatten(0, 1)

    stand_in(monkeypatch, "flashinfer.gdn_prefill", chunk_gated_delta_rule=rule)
    monkeypatch.setattr(rows, "refusal", lambda *_: None)
    case = replace(SMALL, B=2)
    ((row, _),) = rows.call_rows(case, "forward", ["flashinfer"], RATES, DEVICE)
    assert row["error"] < 5e-3
    assert list(rows.call_rows(case, TRAINING, ["flashinfer"], RATES, DEVICE)) == []


@pytest.mark.parametrize("case", [SSD_SMALL, EMA_SMALL])
def test_training_rows_of_mamba_2(case, no_clock):
    with torch.no_grad():
        ((row, _),) = rows.call_rows(case, TRAINING, ["linattn_edu"], RATES, DEVICE)
    names = measure.inputs(case, DEVICE).asdict()
    assert {key for key in row if key.startswith("error_d")} == {f"error_d{x}" for x in names}
    assert all(0 < row[f"error_d{x}"] < 2e-2 for x in names)


@pytest.mark.parametrize("what", ["decode_inplace", "decode_graph"])
def test_the_kernel_decodes_a_token_of_mamba_2(what, no_clock, monkeypatch):
    graphs = []
    monkeypatch.setattr(measure, "captured", lambda f: graphs.append(f) or f)
    inputs = measure.inputs(SSD_DECODE, DEVICE)
    got = rows.call_rows(SSD_DECODE, what, ["linattn_edu"], RATES, DEVICE)
    ((row, line),) = got
    assert row["error"] < 5e-3 and row["error_state"] < 1e-6
    traffic = 2 * inputs.initial_state.numel() * 4
    assert row["state_share"] == pytest.approx(traffic / 4.3e12 / 0.25e-3, rel=1e-4)
    assert "state" in line and len(graphs) == (what == "decode_graph")


@pytest.mark.gpu
def test_a_graph_runs_what_was_captured():
    x = torch.zeros(3, device="cuda")
    replay = measure.captured(lambda: x.add_(1))
    replay()
    assert x.tolist() == [1.0] * 3


@pytest.fixture
def mamba_ssm(monkeypatch, tmp_path):
    """Sources of mamba_ssm made up, whose root cannot be imported."""
    root = tmp_path / "mamba_ssm"
    triton = root / "ops" / "triton"
    triton.mkdir(parents=True)
    for folder in (root / "ops", triton):
        (folder / "__init__.py").touch()
    text = '__version__ = "2.3.2"\nimport selective_scan_cuda_that_is_not_there\n'
    (root / "__init__.py").write_text(text)
    (triton / "ssd_combined.py").write_text(
        "def mamba_chunk_scan_combined(*args, **kwargs):\n    return args, kwargs\n"
    )
    (triton / "selective_state_update.py").write_text(
        "from linattn_edu import selective_state_update\n"
    )
    monkeypatch.setenv("MAMBA_SRC", str(tmp_path))
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


def test_mamba_ssm_is_called_alike(mamba_ssm, monkeypatch):
    import linattn_edu

    seen = []
    ours = SimpleNamespace(scan=lambda *a, **k: seen.append((a, k)))
    monkeypatch.setattr(linattn_edu, "mamba_chunk_scan_combined", ours.scan)
    i, made = measure.inputs(SSD_SMALL, DEVICE), adapters.makers(SSD_SMALL, "forward")
    made["linattn_edu"]()(i)
    ((args, options),), (theirs, given) = seen, made["mamba_ssm"]()(i)
    assert len(args) == len(theirs) == 6 and theirs[5] == 256
    assert all(x is y for x, y in zip(args, theirs, strict=True))
    assert options == given | {"impl": "triton"} and given["D"] is i.D
    assert adapters.version_of("mamba_ssm") == "2.3.2"
    libraries = ["linattn_edu", "mamba_ssm"]
    assert list(adapters.makers(SSD_DECODE, "decode_inplace")) == libraries


@pytest.mark.parametrize("what", ["forward", TRAINING])
def test_an_average_by_mamba_ssm(what, mamba_ssm, no_clock):
    source = "from linattn_edu import mamba_chunk_scan_combined\n"
    (mamba_ssm / "ops" / "triton" / "ssd_combined.py").write_text(source)
    ((row, _),) = rows.call_rows(EMA_SMALL, what, ["mamba_ssm"], RATES, DEVICE)
    assert all(x < 1e-2 for key, x in row.items() if key.startswith("error"))


def test_a_token_of_mamba_ssm(mamba_ssm, no_clock):
    got = rows.call_rows(SSD_DECODE, "decode_inplace", ["mamba_ssm"], RATES, DEVICE)
    ((row, _),) = got
    assert row["error"] < 5e-3 and row["error_state"] < 1e-6


def test_without_mamba_ssm(monkeypatch, tmp_path):
    monkeypatch.setenv("MAMBA_SRC", str(tmp_path))
    assert adapters.version_of("mamba_ssm") is None
    with pytest.raises(ModuleNotFoundError, match="MAMBA_SRC names no folder"):
        adapters.makers(SSD_SMALL, "forward")["mamba_ssm"]()
    monkeypatch.delenv("MAMBA_SRC")
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'mamba_ssm'"):
        adapters.makers(EMA_SMALL, "forward")["mamba_ssm"]()


@pytest.mark.parametrize("case", [SMALL, KDA_SMALL])
def test_training_rows(case, no_clock, stand_ins):
    with torch.no_grad():  # as in a run
        got = list(rows.call_rows(case, TRAINING, ["linattn_edu", "flash_qla"], RATES, DEVICE))
    ((row, line),) = got
    assert (row["what"], row["library"], row["peak_mib"]) == (TRAINING, "linattn_edu", 3.0)
    errors = {key: x for key, x in row.items() if key.startswith("error_d")}
    assert set(errors) == {f"error_d{x}" for x in ("q", "k", "v", "g", "beta")}
    assert all(0 < x < 2e-2 for x in errors.values())
    assert "dbeta" in line


def test_a_training_step_starts_without_gradients():
    step = measure.TrainingStep(measure.inputs(SMALL, DEVICE))
    with torch.no_grad():
        step(reference())
        first = step.i.k.grad
        step(reference())
    assert step.i.k.grad is not first and torch.equal(step.i.k.grad, first)
    assert all(x.is_leaf for x in (step.i.q, step.i.g, step.i.beta))


@pytest.mark.parametrize("case", [DECODE, KDA_DECODE])
@pytest.mark.parametrize("what", ["decode", "decode_inplace"])
def test_decode_rows(case, what, no_clock, stand_ins):
    inputs = measure.inputs(case, DEVICE)
    ((row, _),) = rows.call_rows(case, what, ["linattn_edu", "flash_qla"], RATES, DEVICE)
    assert row["error"] < 5e-3 and row["error_state"] < 1e-6
    assert torch.equal(inputs.initial_state, measure.inputs(case, DEVICE).initial_state)


@pytest.mark.parametrize("case", [DECODE, KDA_DECODE, GDN2_DECODE])
@pytest.mark.parametrize("what", ["decode", "decode_inplace"])
def test_the_kernel_decodes_a_token(case, what, no_clock):
    ((row, _),) = rows.call_rows(case, what, ["linattn_edu"], RATES, DEVICE)
    assert row["error"] < 5e-3 and row["error_state"] < 1e-6


def test_a_library_that_fails_says_why_and_leaves_no_row(no_clock, monkeypatch):
    def missing():
        raise ImportError("No module named 'fla'")

    makers = {
        "fla": missing,
        "fla_safe": lambda: lambda i: torch.full_like(i.v, torch.nan),
        "linattn_edu": adapters.linattn_edu,
    }
    monkeypatch.setitem(adapters.LIBRARIES["gdn"], "forward", makers)
    out = list(rows.call_rows(SMALL, "forward", list(makers), RATES, DEVICE))
    assert [row is not None for row, _ in out] == [False, False, True]
    assert "No module named 'fla'" in out[0][1] and "NaN" in out[1][1]


def test_a_case_that_a_library_refuses_is_not_tried():
    ((row, line),) = rows.call_rows(CASES["gdn_d64"], "forward", ["flash_qla"], RATES, "meta")
    assert row is None and "K = V = 128 only" in line
    refused = {
        (case.name, what, library)
        for case in CASES.values()
        for what in run.CALLS[case.op]
        for library in adapters.makers(case, what)
        if adapters.refusal(case, what, library)
    }
    of_128 = {("gdn_d64", what, "flash_qla") for what in ("forward", TRAINING)}
    gave_nan = {(case, what, library) for library, case, what in adapters.FAILED}
    untried = {
        (case.name, what, library)
        for case in CASES.values()
        if case.op.endswith("_beta2")
        for what, made in adapters.LIBRARIES[case.op].items()
        for library in made
        if library not in ("linattn_edu", "linattn_edu_safe")
        and (library, case.operator) != ("fla", "gdn")
    }
    assert refused == of_128 | {("gdn_d64", "forward", "flashinfer")} | gave_nan | untried
    assert adapters.refusal(CASES["gdn_train"], TRAINING, "flashinfer") == "no such call"
    assert adapters.refusal(SMALL, "forward", "attn_gym") == "K = V = 64 or 128 only"
    assert adapters.refusal(KDA_SMALL, "forward", "attn_gym") == "K = V = 128 only"
    assert adapters.refusal(KDA_SMALL, TRAINING, "cudnn") == "K = V = 128 only"
    assert adapters.refusal(CASES["gdn_decode"], "decode", "flash_qla") == "no such call"


def test_a_backward_pass_that_fails_leaves_the_others(no_clock, monkeypatch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, do):
            raise NotImplementedError("no backward pass")

    makers = {"fla": lambda: lambda i: Broken.apply(i.v), "linattn_edu": reference}
    monkeypatch.setitem(adapters.LIBRARIES["gdn"], TRAINING, makers)
    out = list(rows.call_rows(SMALL, TRAINING, list(makers), RATES, DEVICE))
    assert [row is not None for row, _ in out] == [False, True]
    assert "no backward pass" in out[0][1]


@pytest.mark.parametrize("said", ["CUDA error: misaligned address", "something else"])
def test_a_lost_context_stops_the_process(said, no_clock, monkeypatch):
    def f(i):
        monkeypatch.setattr(measure, "synchronize", lambda: 1 / 0)  # fails as all that follows
        raise RuntimeError(said)

    monkeypatch.setitem(adapters.LIBRARIES["gdn"], "forward", {"fla": lambda: f})
    with pytest.raises(rows.DeviceLost):
        list(rows.call_rows(SMALL, "forward", ["fla"], RATES, DEVICE))


@pytest.mark.parametrize("case", [SMALL, KDA_SMALL, SSD_SMALL])
def test_stage_rows(case, no_clock):
    got = [row for row, _ in rows.stage_rows(case, RATES, DEVICE)]
    expected = [(f"stage:{name}", "linattn_edu") for name in STAGES[case.op]]
    if case is KDA_SMALL:
        expected.insert(2, ("stage:kda_intra", "linattn_edu_safe"))
    assert [(row["what"], row["library"]) for row in got] == expected
    assert all(row["ms"] == 0.25 for row in got)
    assert [*rows.stage_rows(KDA_DECODE, RATES, DEVICE)] == []


def test_stage_rows_without_a_kernel(no_clock, monkeypatch):
    original = forms.stage_function

    def stage_function(name, impl):
        if name == "output_bwd":
            raise ModuleNotFoundError("No module named 'output_bwd'")
        return original(name, "reference")

    monkeypatch.setattr(forms, "stage_function", stage_function)
    got = list(rows.stage_rows(SMALL, RATES, DEVICE))
    missing = {name for name, (row, _) in zip(STAGES["gdn"], got, strict=True) if row is None}
    assert missing == {"output_bwd", "state_bwd", "wy_bwd", "gate_bwd"}


def test_scaling_rows(no_clock, monkeypatch):
    monkeypatch.setattr(
        rows, "scaling_case", lambda T: Case("gdn_scaling", "gdn", 1, T, 2, 2, 16, 16)
    )
    got = [row for row, _ in rows.scaling_rows(RATES, (32, 64), DEVICE)]
    whats = ["chunked"] * 2 + ["recurrent"] * 2 + ["quadratic"] * 2
    assert [(row["what"], row["T"]) for row in got] == list(zip(whats, [32, 64] * 3, strict=True))
    assert all(row["error"] < 5e-3 for row in got)
    monkeypatch.setattr(measure, "time_ms", lambda f: 5000.0)
    got = [row for row, _ in rows.scaling_rows(RATES, (32, 64), DEVICE)]
    assert [row and row["T"] for row in got] == [32, None] * 3  # too slow to be doubled


# ---- a run


@pytest.fixture
def on_this_device(no_clock, stand_ins, monkeypatch):
    inputs, oracle = measure.inputs, measure.GradientOracle
    monkeypatch.setattr(measure, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(measure, "inputs", lambda case, device: inputs(case, DEVICE))
    monkeypatch.setattr(measure, "GradientOracle", lambda case, *x: oracle(case, DEVICE, *x[1:]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(first_call, "child", lambda item, folder, limit: {"first_call_s": 2.0})


def test_run_saves_and_merges(on_this_device, tmp_path, capsys):
    out, libraries = tmp_path / "gdn_h200.json", ["linattn_edu"]
    assert run.run([SMALL, DECODE], libraries, out, parts=("calls",)) == 0
    said = capsys.readouterr().out
    assert "[  4/4" in said and "not measured yet: gdn_gva forward linattn_edu" in said
    assert "gdn_train forward linattn_edu" not in said
    again = Case("gdn_long", *list(vars(SMALL).values())[1:])
    assert run.run([SMALL, again], libraries, out, parts=("first_call",), jobs=2) == 0
    assert results.load(out)["first_call_jobs"] == 2
    got = results.load(out)["rows"]
    assert [(r["case"], r["what"], "ms" in r, r.get("first_call_s")) for r in got] == [
        ("gdn_train", "forward", True, 2.0),
        ("gdn_train", "forward_backward", True, 2.0),
        ("gdn_long", "forward", False, 2.0),
        ("gdn_long", "forward_backward", False, 2.0),
        ("gdn_decode", "decode", True, None),
        ("gdn_decode", "decode_inplace", True, None),
    ]
    assert run.run([again], libraries, out, parts=("calls",), calls=("forward",)) == 0
    got = results.load(out)["rows"]
    assert [("ms" in r, r["first_call_s"]) for r in got[2:4]] == [(True, 2.0), (False, 2.0)]


def test_a_run_is_saved_row_by_row(on_this_device, monkeypatch, tmp_path):
    seen = []
    save = results.save
    monkeypatch.setattr(
        results, "save", lambda path, data: (seen.append(len(data["rows"])), save(path, data))
    )
    parts = ("calls", "stages")
    assert run.run([SMALL], ["linattn_edu"], tmp_path / "x.json", parts=parts) == 0
    assert seen == list(range(1, 3 + len(STAGES["gdn"])))


def test_after_a_lost_context_another_process_goes_on(on_this_device, monkeypatch, tmp_path):
    def f(i):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    makers = {"linattn_edu": lambda: f, "fla": reference}
    monkeypatch.setitem(adapters.LIBRARIES["gdn"], "forward", makers)
    out, libraries = tmp_path / "x.json", ["linattn_edu", "fla"]
    options = {"parts": ("calls",), "jobs": 3}

    def again(begun):
        return run.run([SMALL], libraries, out, begun=json.loads(json.dumps(begun)), **options)

    assert run.run([SMALL], libraries, out, again=again, **options) == 1
    got = results.load(out)["rows"]
    assert [(r["library"], r["what"]) for r in got] == [
        ("linattn_edu", TRAINING), ("fla", TRAINING),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ([], ("calls",)),
        (["--first-call"], ("first_call",)),
        (["--stages", "--scaling"], ("stages", "scaling")),
        (["--all"], run.PARTS),
    ],
)
def test_the_parts_of_a_run(given, parts, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(measure, "usable_gpu", lambda: None)
    monkeypatch.setattr(measure, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "run", lambda *a, **k: seen.append((a, k)) or 0)
    argv = [*given, "gdn_decode", "--what", "decode", "--out", str(tmp_path / "x.json")]
    assert command.main(argv) == 0
    ((cases, libraries, _), options) = seen[0]
    assert [case.name for case in cases] == ["gdn_decode"] and "fla" in libraries
    assert options["parts"] == parts and options["calls"] == ("decode",)
    calls = []
    monkeypatch.setattr(command.subprocess, "call", lambda c: calls.append(c) or 0)
    options["again"]([("gdn_decode", "decode", "fla")])
    args = command.parser().parse_args(calls[0][3:])
    assert args.begun == [["gdn_decode", "decode", "fla"]] and args.cases == ["gdn_decode"]


def test_each_operator_has_its_file(monkeypatch, tmp_path):
    seen, calls = [], []

    def one(cases, libraries, out, **options):
        seen.append(({case.operator for case in cases}, out.name, options))
        return 1 if options["begun"] is None and out.name == "kda_h200.json" else 0

    monkeypatch.setattr(results, "DATA", tmp_path)
    monkeypatch.setattr(measure, "usable_gpu", lambda: None)
    monkeypatch.setattr(measure, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "run", one)
    assert command.main(["gdn", "kda", "--all"]) == 1
    assert [x[:2] for x in seen] == [({"gdn"}, "gdn_h200.json"), ({"kda"}, "kda_h200.json")]
    assert [x[2]["parts"] == run.PARTS for x in seen] == [True, False]  # one has the scaling
    monkeypatch.setattr(command.subprocess, "call", lambda c: calls.append(c) or 0)
    seen[1][2]["again"]([("kda_train", "forward", "fla")])
    assert command.main(calls[0][3:]) == 0  # what is left, in a fresh process
    assert seen[2][:2] == ({"kda"}, "kda_h200.json")
    assert seen[2][2]["begun"] == [["kda_train", "forward", "fla"]] and len(seen) == 3
    assert command.main(["kda", "--scaling"]) == 2
    assert command.main(["ssd", "ema"]) == 0
    assert seen[3][:2] == ({"ssd"}, "ssd_h200.json")


def test_what_does_not_compile_in_time_is_told(on_this_device, tmp_path, monkeypatch):
    """Not timed, and its row says why; a time from before stays, and what was measured after."""
    out, parts = tmp_path / "gdn_h200.json", {"parts": ("calls",), "calls": ("forward",)}

    def child(item, folder, limit):
        return {"why": f"not compiled in {limit} s", "late": True}

    monkeypatch.setattr(first_call, "child", child)
    again = Case("gdn_long", *list(vars(SMALL).values())[1:])
    assert run.run([SMALL], ["linattn_edu"], out, **parts) == 0
    (before,) = results.load(out)["rows"]
    assert run.run([SMALL, again], ["linattn_edu"], out, jobs=2, limit=7, **parts) == 0
    first, second = results.load(out)["rows"]
    assert first == before and second["refused"] == "not compiled in 7 s" and "ms" not in second
    data = results.load(out)
    assert ("gdn_long", "forward", "linattn_edu") not in results.missing(data)
    said = "Not measured: linattn_edu, not compiled in 7 s: gdn_long forward."
    assert said in measurements.provenance(data)
    shown = plot.grid([*data["rows"], second | {"library": "fla", "ms": 1.0}], "forward")
    assert shown["gdn_long"]["linattn_edu"] == {"absent": "not compiled in 7 s"}
    assert run.run([again], ["linattn_edu"], out, **parts) == 0
    assert "refused" not in results.load(out)["rows"][1]


# ---- first calls


def test_what_fresh_processes_do(stand_ins):
    def fresh(*parts, jobs=1, calls=("forward", TRAINING)):
        got = run._fresh([SMALL], ["linattn_edu", "fla"], parts, calls, jobs)
        return [(item.library, *item.whats) for item in got]

    assert fresh("calls", "stages") == []  # compiled where they are timed
    assert fresh("calls", "stages", jobs=2) == [
        ("fla", TRAINING, "gradients"),
        ("linattn_edu", "forward", TRAINING, "gradients"),
        ("linattn_edu", "stages"),
    ]
    got = run._fresh([KDA_SMALL, KDA_DECODE], ["linattn_edu"], ("stages",), (), 2)
    assert [(item.case.name, *item.whats) for item in got] == [("kda_train", "stages")]
    assert fresh("first_call", calls=(TRAINING,)) == [("fla", TRAINING), ("linattn_edu", TRAINING)]


@pytest.mark.parametrize("what", ["forward", TRAINING])
def test_a_first_call_in_this_process(what, no_clock, stand_ins):
    assert 0 < first_call.measure(SMALL, "linattn_edu", what, DEVICE) < 60


def test_a_process_says_how_long_the_first_of_its_calls_took(monkeypatch, capsys):
    monkeypatch.setattr(first_call, "measure", lambda case, library, what: {"forward": 1.5}[what])
    monkeypatch.setattr(first_call, "compile_stages", lambda case: 9.0)
    monkeypatch.setattr(first_call, "compile_gradients", lambda case, library: 9.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    argv = ["linattn_edu", "gdn_train", "forward", "gradients", "stages"]
    assert first_call.main(argv) == 0
    assert capsys.readouterr().out == '{"first_call_s": 1.5}\n'


def test_what_gradients_are_compared_on_is_compiled_too(no_clock, stand_ins):
    assert 0 < first_call.compile_gradients(SMALL, "linattn_edu", DEVICE) < 60


def test_stages_are_compiled_although_one_fails(monkeypatch, no_clock, capsys):
    inputs = measure.inputs
    monkeypatch.setattr(measure, "inputs", lambda case, device: inputs(SMALL, DEVICE))
    ran = []

    def stage_call(arguments, name, *, safe):
        if name == "wy":
            raise RuntimeError("wy is broken")
        return lambda: ran.append((name, safe))

    monkeypatch.setattr(forms, "stage_call", stage_call)
    first_call.compile_stages(SMALL)
    assert ran == [(name, False) for name in STAGES["gdn"] if name != "wy"]
    assert "wy is broken" in capsys.readouterr().err


@needs_no_gpu
def test_a_first_call_that_fails_says_why(tmp_path):
    item = FirstCall("linattn_edu", CASES["gdn_train"], ("forward",))
    assert "no CUDA GPU" in first_call.child(item, tmp_path)["why"]


def test_a_process_that_says_nothing_is_given_up(monkeypatch, tmp_path):
    done = SimpleNamespace(stdout="", stderr="", returncode=-9)
    monkeypatch.setattr(first_call.subprocess, "run", lambda *a, **k: done)
    item = FirstCall("fla", CASES["gdn_train"], (TRAINING,))
    assert first_call.child(item, tmp_path) == {"why": "exit code -9"}


def test_first_calls_share_their_kernels_but_not_what_a_tuner_chose(monkeypatch):
    def child(item, folder, limit):
        for name in (f"{item.library}/kernel.cubin", f"{item.library}/kernel.autotune.json"):
            (folder / "triton" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "triton" / name).write_text("x")
        return {"first_call_s": 3.0} if item.library == "fla" else {"why": "no"}

    monkeypatch.setattr(first_call, "child", child)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    wanted = [FirstCall(x, CASES["gdn_train"], ("forward",)) for x in ("fla", "linattn_edu")]
    seen = {}

    def report(item, result):
        seen[item.library] = result

    with first_call.first_calls(wanted, jobs=2, report=report):
        assert seen == {"fla": {"first_call_s": 3.0}, "linattn_edu": {"why": "no"}}
        merged = Path(os.environ["TRITON_CACHE_DIR"])
        files = sorted(str(p.relative_to(merged)) for p in merged.rglob("*") if p.is_file())
        assert files == ["fla/kernel.cubin", "linattn_edu/kernel.cubin"]
