"""The benchmark of several ranks, with processes on the CPU."""

import json
import os
from functools import partial

import pytest
import torch
from processes import with_forks

from benchmarks import ranks, results, tables
from linattn_edu.figures import speedup

CPU = torch.device("cpu")
PROGRAM = """
from benchmarks import ranks
sys.exit(ranks.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_some_ranks_of_one_start(tmp_path):
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}  # the reference
    out = tmp_path / "cp.json"
    other = {"case": "gdn_96", "library": "fla", "what": "forward", "layout": "contiguous"}
    other |= {"gate": "trained", "ranks": 2, "tokens": 96, "ms": 1.0}
    again = other | {"library": "linattn_edu", "gate": "none", "ms": -1.0}
    day = {"date": "2026-01-01"}
    results.save(out, tables.heading(CPU) | day | {"fla": "0.0.1", "rows": [other, again]})
    other |= day  # which a row keeps
    more = ["--ranks", "2,3", "--cases", "none,short"]
    with_forks(PROGRAM, "--device", "cpu", "--out", str(out), *more, env=env)
    data = json.loads(out.read_text())
    assert other in data["rows"] and data["fla"] == "0.0.1"  # of a run before
    rows = [row for row in data["rows"] if row != other]
    gates = {(r["case"], r["gate"]) for r in rows}
    lengths = {16: (1,), 32: (1, 2), 48: (1, 3)}
    short = {(f"{op}_{n}", "trained") for op in ("gdn", "kda", "ssd") for n in lengths}
    assert gates == short | {("gdn_96", "none"), ("kda_96", "none")}
    for case, gate in gates:
        here = [r for r in rows if (r["case"], r["gate"]) == (case, gate)]
        tokens = int(case.split("_")[1])
        assert {r["tokens"] for r in here} == {tokens}
        found = sorted((r["ranks"], r["layout"], r["what"]) for r in here)
        calls = ("forward", "forward_backward")
        wanted = [(1, "contiguous", what) for what in calls] + [
            (n, layout, what)
            for n in lengths.get(tokens, (1, 2, 3))[1:]
            for layout in ("contiguous", "zigzag")
            for what in (*calls, "gather")
        ]
        assert found == wanted
    assert all(r["ms"] > 0 and r["row_ms"] > 0 and r["graph_ms"] is None for r in rows)
    several = [r for r in rows if r["ranks"] > 1 and r["what"] != "gather"]
    errors = [r[n] for r in several for n in ("error", "error_gradients")]
    assert 0 < max(errors) < 1e-4
    sent = {(r["case"], r["ranks"], r["layout"]): r["bytes"] for r in rows if r["what"] == "gather"}
    assert sent["gdn_96", 2, "contiguous"] == 8 * 8 * 4  # of two ranks none needs a transition
    assert sent["gdn_96", 3, "contiguous"] == 8 * 16 * 4
    assert sent["ssd_32", 2, "contiguous"] == 2 * 8 * (8 + 4) * 4  # a number in four columns
    assert sent["ssd_32", 2, "zigzag"] == 2 * sent["ssd_32", 2, "contiguous"]
    assert all(r["sources"].keys() == {ranks.FUNCTIONS[ranks.op_of(r)], "cp"} for r in rows)


def test_what_is_measured(monkeypatch):
    monkeypatch.setattr(ranks, "fla", lambda op: op in ranks.OURS)
    found = ranks.jobs(ranks.parsed([]))
    points = [(j.op, j.gate, j.tokens, n) for j in found if j.library == "linattn_edu"
              for n in j.ranks]  # fmt: skip
    assert len(points) == len(set(points))  # nothing twice
    for op in ("gdn", "kda", "ssd"):
        trained = {(T, n) for o, gate, T, n in points if (o, gate) == (op, "trained")}
        wanted = {(speedup.tokens_of(case, n), n) for case in ("strong", "weak", "short")
                  for n in (1, 2, 4)}  # fmt: skip
        wanted |= {(T, 1) for T, _ in wanted}
        assert trained == wanted
        none = {(T, n) for o, gate, T, n in points if (o, gate) == (op, "none")}
        assert none == (set() if op == "ssd" else {(speedup.STRONG, n) for n in (1, 2, 4)})
    peers = [j for j in found if j.library == "fla"]
    assert found[-len(peers) :] == peers
    beside = {(j.op, j.gate, j.tokens, n) for j in peers for n in j.ranks}
    longer = ranks.jobs(ranks.parsed(["--ops", "gdn,kda", "--cases", "strong,none,weak"]))
    ours = (j for j in longer if j.library == "linattn_edu")
    assert beside == {(j.op, j.gate, j.tokens, n) for j in ours for n in j.ranks}
    few = ranks.parsed(["--ranks", "3", "--ops", "ssd", "--cases", "none,weak"])
    assert [(j.case, j.ranks) for j in ranks.jobs(few)] == [("ssd_16k", (1,)), ("ssd_48k", (1, 3))]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--ops", "gdn,mamba"], "--ops must be of gdn, kda, ssd, got mamba"),
        (["--cases", "long"], "--cases must be of strong, none, weak, short, got long"),
        (["--ranks", "0,2"], "--ranks must be 1 or more, got 0"),
    ],
)
def test_a_wrong_argument(more, said, capsys):
    with pytest.raises(SystemExit):
        ranks.main(more)
    assert said in capsys.readouterr().err


def test_what_fails_is_said(capsys):
    team = ranks.Team(CPU, 1, None, None)
    assert team.attempt("fla", lambda: 3) == 3
    assert team.attempt("fla", partial(int, "x\ny")) is None
    err = capsys.readouterr().err
    assert err.startswith("fla: ValueError: invalid literal") and err.count("\n") == 1


def test_what_differs():
    ref = torch.tensor([3.0, 4.0])
    assert ranks.apart(ref + torch.tensor([0.0, 0.5]), ref) == pytest.approx(0.1)
    assert ranks.apart(ref * float("nan"), ref) == float("inf")


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="there are four GPUs")
def test_too_few_gpus(capsys):
    assert ranks.main([]) == 2
    assert "4 GPUs are wanted" in capsys.readouterr().err
