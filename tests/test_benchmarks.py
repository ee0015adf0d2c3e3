"""The benchmarks without a GPU: counts, results, figures, the tuner's driver, the command line."""

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from benchmarks import adapters, first_call, forms, measure, plot, results, run, tune
from benchmarks.cases import ALL_STAGES, AWAITED, CASES, SCALING_T, Case, scaling_case, select, work
from benchmarks.progress import Progress
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import gdn_inputs, relative_rms

CHUNK = 4
TINY = Case("tiny", "gdn", 2, 7, 1, 2, 3, 2)
SMALL = Case("gdn_train", "gdn", 1, 80, 1, 2, 16, 16)
RATES = (4.3e12, 790e12)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about no GPU")


def module(*args: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# ---- the registry


def test_the_cases_are_those_that_the_peers_are_measured_on():
    assert {name: case.shape for name, case in CASES.items()} == {
        "gdn_train": (8, 4096, 16, 16, 128, 128),
        "gdn_gva": (1, 32768, 16, 32, 128, 128),
        "gdn_long": (1, 32768, 4, 4, 128, 128),
        "gdn_d64": (8, 4096, 32, 32, 64, 64),
    }
    assert SCALING_T == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    assert scaling_case(512).shape == (1, 512, 16, 16, 128, 128)


def test_select():
    assert [c.name for c in select([])] == list(CASES)
    assert [c.name for c in select(["gdn_l", "gdn_train"])] == ["gdn_train", "gdn_long"]
    with pytest.raises(ValueError, match="'kda'"):
        select(["kda"])


def nbytes(*values) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_bytes_of_a_stage_are_those_of_its_tensors(stage):
    i = gdn_inputs(*SMALL.shape, dtype=torch.bfloat16)
    args, kwargs = forms.stage_arguments(i, 16, "reference")[stage]
    out = forms.stage_function(stage, "reference")(*args, **kwargs)
    out = out if isinstance(out, tuple) else (out,)
    assert work(SMALL, f"stage:{stage}", 16).bytes == nbytes(*args, *out)


def test_bytes_of_the_forward_pass():
    i = gdn_inputs(*SMALL.shape, dtype=torch.bfloat16)
    moved = nbytes(*i.asdict().values()) + nbytes(i.v)  # o has the shape of v
    assert work(SMALL, "forward").bytes == moved
    assert work(SMALL, "quadratic").bytes == moved


class Scalars:
    """The chunked forms one multiply-add at a time, counted by what they are for."""

    def __init__(self):
        self.count = dict.fromkeys(("kkt", "qkt", "inverse", "state", "w", "lower"), 0)

    def dot(self, what, xs, ys):
        self.count[what] += len(xs)
        return sum(x * y for x, y in zip(xs, ys, strict=True))

    def pairs(self, q, k):
        """K K^T below the diagonal and Q K^T up to it, of one q/k head."""
        n = range(len(k))
        kk = {(i, j): self.dot("kkt", k[i], k[j]) for i in n for j in range(i)}
        qk = {(i, j): self.dot("qkt", q[i], k[j]) for i in n for j in range(i + 1)}
        return kk, qk

    def chunk(self, q, k, v, g, beta, S, kk, qk):
        """Outputs of one chunk of one value head; S[d][e] is updated."""
        n, K, V, s = len(v), len(S), len(S[0]), len(S) ** -0.5
        gc = [sum(g[: i + 1]) for i in range(n)]
        L = {key: beta[key[0]] * x for key, x in kk.items()}
        X = {(i, i): 1.0 for i in range(n)}
        for i in range(n):
            for m in range(i):
                between = range(m + 1, i)
                inner = [L[i, j] for j in between], [X[j, m] for j in between]
                X[i, m] = -L[i, m] - self.dot("inverse", *inner)
        for i in range(n):  # w of the five stages, not needed here
            for d in range(K):
                self.dot("w", [X[i, j] for j in range(i + 1)], [k[j][d] for j in range(i + 1)])
        column = [[S[d][e] for d in range(K)] for e in range(V)]
        W = [
            [v[i][e] - math.exp(gc[i]) * self.dot("state", k[i], column[e]) for e in range(V)]
            for i in range(n)
        ]
        R = {(i, j): x * math.exp(gc[i] - gc[j]) * beta[j] for (i, j), x in X.items()}
        P = {(i, j): s * x * math.exp(gc[i] - gc[j]) for (i, j), x in qk.items()}
        new = [[self.lower(R, W, i, e) for e in range(V)] for i in range(n)]
        o = [
            [
                s * math.exp(gc[i]) * self.dot("state", q[i], column[e]) + self.lower(P, new, i, e)
                for e in range(V)
            ]
            for i in range(n)
        ]
        for d in range(K):
            for e in range(V):
                rows = [math.exp(gc[-1] - gc[i]) * new[i][e] for i in range(n)]
                written = self.dot("state", [k[i][d] for i in range(n)], rows)
                S[d][e] = math.exp(gc[-1]) * S[d][e] + written
        return o

    def lower(self, M, x, i, e):
        return self.dot("lower", [M[i, j] for j in range(i + 1)], [x[j][e] for j in range(i + 1)])


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
        "stage:intra": c["kkt"] + c["qkt"] + c["inverse"],
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


def test_flops_of_one_token():
    one = Case("one", "gdn", 1, 1, 1, 1, 8, 4)
    assert work(one, "recurrent").flops == 7 * 8 * 4 + 3 * 4
    assert work(one, "stage:gate_cumsum").flops == 2
    assert work(one, "quadratic").flops == 2 * (8 + 4)  # q k^T and its product with v


def test_floor_is_the_larger_time():
    w = work(CASES["gdn_train"], "forward")
    assert w.floor_ms(1e12, math.inf) == pytest.approx(w.bytes / 1e9)
    assert w.floor_ms(math.inf, 1e12) == pytest.approx(w.flops / 1e9)
    known = {"gdn_train": 0.125, "gdn_gva": 0.19, "gdn_long": 0.03, "gdn_d64": 0.125}
    for name, floor in known.items():
        assert work(CASES[name], "forward").floor_ms() == pytest.approx(floor, rel=0.05)


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


# ---- rows, measured by nothing


@pytest.fixture
def no_clock(monkeypatch):
    """Calls run on the CPU; times and sizes are made up."""
    monkeypatch.setattr(measure, "time_ms", lambda f: (f(), 0.25)[1])
    monkeypatch.setattr(measure, "peak_mib", lambda f: (f(), 3.0)[1])
    monkeypatch.setattr(measure, "synchronize", lambda: None)


def test_forward_rows(no_clock):
    first = {("linattn_edu", SMALL.name): 1.5}
    ((row, line),) = run.forward_rows(SMALL, ["linattn_edu"], first, RATES, "cpu")
    assert (row["case"], row["what"]) == ("gdn_train", "forward")
    assert (row["ms"], row["peak_mib"], row["first_call_s"]) == (0.25, 3.0, 1.5)
    assert 0 < row["error"] < 5e-3
    assert row["bytes"] == work(SMALL, "forward").bytes
    assert "0.2500 ms" in line and "first call" in line


def test_a_library_that_fails_says_why_and_leaves_no_row(no_clock, monkeypatch):
    def missing():
        raise ImportError("No module named 'fla'")

    makers = {
        "fla": missing,
        "flash_qla": lambda: lambda i: torch.full_like(i.v, torch.nan),
        "linattn_edu": adapters.linattn_edu,
    }
    monkeypatch.setitem(adapters.LIBRARIES, "gdn", makers)
    out = list(run.forward_rows(SMALL, list(makers), {}, RATES, "cpu"))
    assert [row is not None for row, _ in out] == [False, False, True]
    assert "No module named 'fla'" in out[0][1] and "NaN" in out[1][1]


def test_a_lost_context_stops_the_run(no_clock, monkeypatch):
    def f(i):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(adapters.LIBRARIES, "gdn", {"fla": lambda: f})
    with pytest.raises(run.DeviceLost):
        list(run.forward_rows(SMALL, ["fla"], {}, RATES, "cpu"))


def test_stage_rows(no_clock):
    rows = [row for row, _ in run.stage_rows(SMALL, RATES, "cpu")]
    assert [row["what"] for row in rows] == [f"stage:{name}" for name in ALL_STAGES]
    assert all(row["library"] == "linattn_edu" and row["ms"] == 0.25 for row in rows)


def test_scaling_rows(no_clock, monkeypatch):
    monkeypatch.setattr(
        run, "scaling_case", lambda T: Case("gdn_scaling", "gdn", 1, T, 2, 2, 16, 16)
    )
    rows = [row for row, _ in run.scaling_rows(RATES, (32, 64), "cpu")]
    whats = ["chunked"] * 2 + ["recurrent"] * 2 + ["quadratic"] * 2
    assert [(row["what"], row["T"]) for row in rows] == list(zip(whats, [32, 64] * 3, strict=True))
    assert all(row["error"] < 5e-3 for row in rows)
    monkeypatch.setattr(measure, "time_ms", lambda f: 5000.0)
    rows = [row for row, _ in run.scaling_rows(RATES, (32, 64), "cpu")]
    assert [row and row["T"] for row in rows] == [32, None] * 3  # too slow to be doubled


def test_run_saves_and_merges(no_clock, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "gpu_name", lambda: "NVIDIA H200")
    inputs = measure.inputs
    monkeypatch.setattr(measure, "inputs", lambda case, device: inputs(case, "cpu"))
    monkeypatch.setattr(first_call, "child", lambda *a: {"first_call_s": 2.0})
    out = tmp_path / "gdn_h200.json"
    options = {"stages": False, "scaling": False, "jobs": 2}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    libraries = ["linattn_edu"]
    assert run.run([SMALL], libraries, out, first_call=True, **options) == 0
    again = Case("gdn_long", *list(vars(SMALL).values())[1:])
    assert run.run([again], libraries, out, first_call=False, **options) == 0
    assert results.load(out)["first_call_jobs"] == 2
    rows = results.load(out)["rows"]
    assert [(r["case"], r.get("first_call_s")) for r in rows] == [
        ("gdn_train", 2.0),
        ("gdn_long", None),
    ]
    assert "[  2/2" in capsys.readouterr().out


# ---- first calls


@needs_no_gpu
def test_a_first_call_that_fails_says_why(tmp_path):
    assert "why" in first_call.child("linattn_edu", CASES["gdn_train"], tmp_path, False)


def test_first_calls_share_their_kernels_but_not_what_a_tuner_chose(monkeypatch, tmp_path):
    def child(library, case, folder, stages):
        for name in (f"{library}/kernel.cubin", f"{library}/kernel.autotune.json"):
            (folder / "triton" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "triton" / name).write_text("x")
        return {"first_call_s": 3.0} if library == "fla" else {"why": "no"}

    monkeypatch.setattr(first_call, "child", child)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    wanted = [("fla", CASES["gdn_train"]), ("linattn_edu", CASES["gdn_train"])]
    seen = []
    seconds, folder = first_call.first_calls(
        wanted, jobs=2, stages=False, report=lambda *a: seen.append(a)
    )
    with folder:
        assert seconds == {("fla", "gdn_train"): 3.0}
        assert len(seen) == 2
        merged = Path(os.environ["TRITON_CACHE_DIR"])
        files = sorted(str(p.relative_to(merged)) for p in merged.rglob("*") if p.is_file())
        assert files == ["fla/kernel.cubin", "linattn_edu/kernel.cubin"]


# ---- results


def some(rows=(), **top) -> dict:
    base = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "fla": None}
    return {**base, "date": "2026-01-01", **top, "rows": list(rows)}


def some_row(case="gdn_train", library="fla", what="forward", ms=1.0, **more) -> dict:
    w = work(CASES.get(case) or scaling_case(more.get("T", 256)), what)
    counts = {"bytes": w.bytes, "flops": w.flops, "floor_ms": w.floor_ms()}
    return {"case": case, "library": library, "what": what, "ms": ms, **counts, **more}


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
    lengths = [some_row("gdn_scaling", "linattn_edu", "chunked", T=T) for T in (512, 256)]
    assert [r["T"] for r in results.merge(None, some(lengths))["rows"]] == [256, 512]


@pytest.mark.parametrize("change", [{"triton": "3.7.1"}, {"gpu": "NVIDIA B200"}, {"fla": "0.7"}])
def test_merge_drops_what_was_measured_elsewhere(change):
    old, new = some([some_row("gdn_long")], fla="0.6.0"), some([some_row()], **change)
    assert results.differences(old, new)
    assert [r["case"] for r in results.merge(old, new)["rows"]] == ["gdn_train"]


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
    assert results.default_path("NVIDIA H200").name == "gdn_h200.json"
    assert results.default_path("NVIDIA A100-SXM4-80GB").name == "gdn_a100_sxm4_80gb.json"


# ---- figures


def made_up() -> dict:
    rows = [some_row(case, library) for case in CASES for library in ("linattn_edu", "fla")]
    rows += [some_row("gdn_train", "flash_qla", ms=0.4)]
    rows += [some_row(case, "linattn_edu", f"stage:{s}") for case in CASES for s in ALL_STAGES]
    rows += [
        some_row("gdn_scaling", "linattn_edu", what, T / 1e3, T=T)
        for what in ("chunked", "recurrent", "quadratic")
        for T in SCALING_T
    ]
    return some(rows)


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    data = tmp_path / "data"
    results.save(data / "gdn_a100.json", made_up() | {"gpu": "NVIDIA A100"})
    results.save(data / "gdn_h200.json", made_up())
    texts = []
    for name in ("one", "two"):
        assert plot.main(["--data", str(data), "--out", str(tmp_path / name)]) == 0
        files = sorted((tmp_path / name).iterdir())
        texts.append([file.read_bytes() for file in files])
    names = {"forward", "roofline", "scaling"}
    assert {p.stem for p in files} == names | {f"{name}_gdn_a100" for name in names}
    assert texts[0] == texts[1]  # no date, no random ids
    for file in files:
        assert ET.parse(file).getroot().tag.endswith("svg")
        assert b"<dc:date>" not in file.read_bytes()
    assert "gdn_h200.json: NVIDIA H200, torch 2.11.0, 2026-01-01" in capsys.readouterr().out


def test_plot_draws_only_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    results.save(tmp_path / "gdn_h200.json", some([some_row()]))
    assert plot.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["forward.svg"]


def test_plot_without_results(tmp_path, capsys):
    assert plot.main(["--data", str(tmp_path)]) == 2
    assert "no results" in capsys.readouterr().err


# ---- the tuner


@pytest.mark.parametrize("kernel", tune.PLACES)
def test_tuner_checks_a_row_and_puts_the_shipped_one_back(kernel, monkeypatch):
    monkeypatch.setattr(tune, "SMALL_T", 70)
    case = Case("tiny", "gdn", 2, 128, 1, 2, 16, 16)
    rows = list(tune.candidates(kernel, CASES["gdn_train"]))
    assert len(rows) == len({json.dumps(row) for row in rows}) > 1
    sizes = {"BK": 16, "BV": 16, "BH": 16}
    row = {name: sizes.get(name, x) for name, x in rows[0].items()}
    place = tune.PLACES[kernel]
    module = import_module(f"linattn_edu.kernels.delta.{place.module}")
    before = getattr(module, place.table)
    result = tune.Worker("cpu").run(kernel, case, row, timed=False)
    assert result["error"] < 5e-3
    assert getattr(module, place.table) is before


def test_tuner_uses_the_row_that_it_is_given():
    with tune.installed("scan", SMALL, {"BV": 32, "num_warps": 2, "num_stages": 5}, "hopper"):
        from linattn_edu.kernels.delta.fused import SCAN_CONFIGS
        from linattn_edu.kernels.tiles import widest

        chosen = widest(SCAN_CONFIGS, torch.empty(1, 1, 1, 128, dtype=torch.bfloat16), 8, 128)
    assert chosen == {"BV": 32, "num_warps": 2, "num_stages": 5}


WORKER = """
import json, os, sys
for item in json.load(sys.stdin):
    print(json.dumps({"n": item["n"], "started": True}), flush=True)
    if item["n"] == 1:
        os._exit(9)
    if item["n"] == 3:
        import time
        time.sleep(60)
    result = {"failed": "CUDA error"} if item["n"] == 4 else {"error": 0.5}
    print(json.dumps({"n": item["n"], **result}), flush=True)
    if item["n"] == 4:
        sys.exit(1)
print("noise")
"""


def test_tuner_goes_on_after_a_worker_that_dies_or_hangs(monkeypatch):
    monkeypatch.setattr(tune, "LIMIT_S", 3)
    items = [{"n": n} for n in range(6)]
    seen = []
    tune.drive(items, False, lambda x: seen.append(x["n"]), (sys.executable, "-c", WORKER))
    assert seen == list(range(6))
    assert [("died" in x.get("failed", ""), x.get("error")) for x in items] == [
        (False, 0.5), (True, None), (False, 0.5), (True, None), (False, None), (False, 0.5),
    ]  # fmt: skip


def test_tuner_gives_up_when_no_worker_starts():
    items = [{"n": 0}, {"n": 1}]
    tune.drive(items, False, lambda x: None, (sys.executable, "-c", "raise SystemExit(5)"))
    assert all("did not start (exit code 5)" in x["failed"] for x in items)


def test_tuner_summary_lists_the_bad_ones_and_the_best():
    base = {"kernel": "solve", "case": vars(CASES["gdn_train"])}
    items = [
        {**base, "row": {"BK": 32}, "error": 1e-3, "ms": 0.2},
        {**base, "row": {"BK": 64}, "error": 1e-3, "ms": 0.1},
        {**base, "row": {"BK": 128}, "error": 0.3},
        {**base, "row": {"BK": 16}, "failed": "the worker died (exit code 1)"},
        {**base, "row": {"BK": 8}, "failed": "OutOfResources: shared memory"},
    ]
    text = tune.summary(items)
    assert text.index("wrong results:") < text.index("BK=128") < text.index("failed:")
    assert text.index("BK=16") < text.index("best of") < text.index("BK=64") < text.index("BK=32")
    assert "5 candidates, 1 need" in text


# ---- the command line


def test_list_works_anywhere():
    done = module("benchmarks", "--list")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*CASES, *AWAITED))


def test_a_case_that_waits_for_its_operator_says_so():
    with pytest.raises(ValueError, match="kda_train waits for chunk_kda"):
        select(["kda_train"])


@needs_no_gpu
@pytest.mark.parametrize("args", [("benchmarks",), ("benchmarks.tune", "solve")])
def test_without_a_gpu_it_says_so(args):
    done = module(*args)
    assert done.returncode == 2
    assert "CUDA GPU" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("benchmarks", "gdn_trian"), "gdn_trian"),
        (("benchmarks", "--libraries", "fla,flsa"), "flsa"),
        (("benchmarks.tune", "slove"), "slove"),
    ],
)
def test_a_wrong_name_is_named(args, named):
    done = module(*args)
    assert done.returncode == 2
    assert named in done.stderr and "Traceback" not in done.stderr


def test_progress_without_a_terminal(capsys):
    progress = Progress(2)
    progress.at("nothing")
    progress.step("first")
    progress.step("second")
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  1/2") and lines[1].endswith("second")
