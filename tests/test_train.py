"""``python -m linattn_edu train``: what it writes, going on to the bit, and what it refuses."""

import json
import math
import os
import signal
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from grids import few

from linattn_edu import data, train
from linattn_edu.__main__ import main

SMALL = ["--steps=6", "--layers=1", "--width=16", "--heads=1", "--batch=2", "--length=16"]


@pytest.fixture(autouse=True)
def text(tmp_path):
    """A text of its own, so that the help of this Python does not matter."""
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    return path


def run(out, *options, text):
    return main(["train", "--out", str(out), "--text", str(text), "--every=2", "--device=cpu",
                 *SMALL, *options])  # fmt: skip


def state(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


def same(a, b):
    """The same numbers to the bit, whatever they are in."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def interrupt_at(monkeypatch, step):
    """Ctrl-C in the middle of a step: after the backward pass, before the optimiser."""
    clip = torch.nn.utils.clip_grad_norm_
    calls = []

    def clip_and_interrupt(*args):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return clip(*args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_interrupt)


@pytest.mark.parametrize("mixer", few("hybrid", more=("gdn",)))
def test_interrupted_and_resumed_to_the_bit(mixer, tmp_path, text, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGINT)
    assert run(tmp_path / "whole", "--mixer", mixer, text=text) == 0
    with monkeypatch.context() as m:
        interrupt_at(m, 3)
        assert run(tmp_path / "parts", "--mixer", mixer, text=text) == 130
    assert "stopped after step 3 of 6; --resume goes on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert state(tmp_path / "parts")["step"] == 3
    assert run(tmp_path / "parts", "--resume", text=text) == 0
    assert same(state(tmp_path / "parts"), state(tmp_path / "whole"))
    assert not same(state(tmp_path / "parts")["model"], {})
    names = sorted(p.name for p in (tmp_path / "parts").iterdir())
    assert names == ["checkpoint.pt", "loss.svg", "losses.json"]
    said = capsys.readouterr().out
    assert "goes on after step 3" in said and "nats a byte" in said


def test_losses_and_their_picture(tmp_path, text, capsys):
    assert run(tmp_path / "out", "--mixer=ema", text=text) == 0
    held = state(tmp_path / "out")
    assert len(held["losses"]) == 6 and [s for s, _ in held["validation"]] == [2, 4, 6]
    assert abs(held["losses"][0] - math.log(256)) < 0.5
    curve = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert curve["mixer"] == "ema" and curve["steps"] == 6
    assert [round(x, 4) for x in held["losses"]] == curve["losses"]
    assert [list(x) for x in held["validation"]] == curve["validation"]
    root = ET.parse(tmp_path / "out" / "loss.svg").getroot()
    assert root.tag.endswith("svg")
    assert f"held-out text: {held['validation'][-1][1]:.3f} nats a byte" in capsys.readouterr().out


def test_without_matplotlib_it_says_so(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(tmp_path / "out", "--mixer=ema", text=text) == 0
    assert "matplotlib is missing" in capsys.readouterr().out
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["checkpoint.pt", "losses.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    train.replace(path, lambda new: new.write_text("old"))

    def fail(new):
        new.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.replace(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()).count(path) == 1
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".new")]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, text, capsys):
    settings = train.Settings("ema", 4, layers=1, width=16, heads=1, batch=2, length=16)
    held = train.Run(settings, text.read_bytes(), torch.device("cpu"))
    with torch.no_grad():
        held.model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"smaller --learning-rate than 0\.004"):
        held.train(2, lambda run: pytest.fail("it was reported"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--mixer=rwkv"],
            "--mixer must be one of gdn, kda, mamba2, ema, rwkv7, attention, hybrid",
        ),
        (["--steps=0"], "--steps must be at least 1, got 0"),
        (["--seed=-1"], "--seed must be in 0 to 2^63 - 1, got -1"),
        (["--seed=99999999999999999999"], "--seed must be in 0 to 2^63 - 1, got 9999"),
        (["--device=meta"], "--device must be one that PyTorch can use, got meta"),
        (["--every=0"], "--every must be at least 1, got 0"),
        (["--width=18", "--heads=2"], "--width must be a multiple of twice --heads"),
        (["--learning-rate=nan"], "--learning-rate must be above 0, got nan"),
        (["--length=500"], "text must have at least 5010 bytes"),
        (["--text=nowhere"], "text must be a file that can be read, got nowhere"),
        (["--device=tpu"], "--device must be one that PyTorch can use, got tpu"),
        (["--resume"], "--resume needs a run in --out, and there is no"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(options, says, tmp_path, text, capsys):
    assert run(tmp_path / "out", *options, text=text) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_is_neither_overwritten_nor_changed(tmp_path, text, capsys):
    out = tmp_path / "out"
    assert run(out, "--mixer=ema", text=text) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    other = tmp_path / "other"
    other.write_bytes(text.read_bytes()[::-1])
    for options, source, says in (
        ([], text, "add --resume to go on with it"),
        (["--resume", "--mixer=gdn"], text, "has --mixer ema, not gdn"),
        (["--resume", "--seed=1", "--width=32"], text, "--seed 0, not 1, --width 16, not 32"),
        (["--resume"], other, "has another text"),
    ):
        assert run(out, *options, text=source) == 2
        assert says in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert run(text, text=text) == 2
    assert "--out must be a folder, got the file" in capsys.readouterr().err
    held = state(out)
    held["model"]["norm.weight"] = torch.zeros(3)
    for changed, says in (
        (held, "norm.weight"),
        ({k: held[k] for k in ("settings", "text")}, "model"),
    ):
        torch.save(changed, out / "checkpoint.pt")
        assert run(out, "--resume", text=text) == 2
        error = capsys.readouterr().err
        assert "does not fit this program" in error and says in error and error.count("\n") == 1
    torch.save(state(out) | held, out / "checkpoint.pt")
    whole = (out / "checkpoint.pt").read_bytes()
    for at in (len(whole) // 3, len(whole) // 2, 2 * len(whole) // 3):  # a disk that forgets
        (out / "checkpoint.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        assert run(out, "--resume", text=text) == 2
        error = capsys.readouterr().err
        assert "is no checkpoint of this program: " in error and error.count("\n") == 1
    (out / "checkpoint.pt").write_bytes(b"half")
    assert run(out, "--resume", text=text) == 2
    assert "is no checkpoint of this program" in capsys.readouterr().err


def test_a_second_run_in_a_folder_is_refused(tmp_path, text, capsys):
    pytest.importorskip("fcntl")
    out = tmp_path / "out"
    out.mkdir()
    with train.alone(out) as first:
        assert first and run(out, "--mixer=ema", text=text) == 2
    assert "another run is at work" in capsys.readouterr().err and not list(out.iterdir())
    assert run(out, "--mixer=ema", "--steps=1", text=text) == 0


def test_a_full_disk_is_an_error_of_one_line(tmp_path, text, monkeypatch, capsys):
    save, out = torch.save, tmp_path / "out"

    def fill(held, path):
        if held["step"] == 4:  # as torch.save fails where the disk ends
            path.write_bytes(b"half")
            raise RuntimeError("unexpected pos 64 vs 0")
        save(held, path)

    monkeypatch.setattr(torch, "save", fill)
    assert run(out, "--mixer=ema", text=text) == 1
    error = capsys.readouterr().err
    assert "cannot be written" in error and error.count("\n") == 1
    assert [p.name for p in out.iterdir()] == ["checkpoint.pt"] and state(out)["step"] == 2


def test_stopped_in_the_last_step_is_whole(tmp_path, text, monkeypatch, capsys):
    interrupt_at(monkeypatch, 6)
    assert run(tmp_path / "out", "--mixer=ema", text=text) == 0
    assert "held-out text" in capsys.readouterr().out


# ---- the text


def test_the_text_of_this_python_has_no_paragraph_twice():
    pytest.importorskip("pydoc_data.topics")
    paragraphs = data.text().decode().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 1000
    assert len(data.text()) > 300_000


def test_without_the_help_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"no pydoc_data\.topics.*give a file"):
        data.text()


def test_windows_hold_the_end_out():
    text = bytes(range(200))
    windows = data.Windows(text, 5)
    inputs, targets = windows.batch(400, seed=0, step=0)
    assert torch.equal(inputs + 1, targets)
    assert (inputs.min(), targets.max()) == (0, 179)
    inputs, targets = windows.validation(100)
    assert torch.equal(inputs + 1, targets)
    assert (inputs.min(), targets.max(), len(inputs)) == (180, 199, 15)
    again = data.Windows(text, 5)
    assert torch.equal(windows.batch(4, 1, 2)[0], again.batch(4, 1, 2)[0])
    assert not torch.equal(windows.batch(4, 1, 2)[0], windows.batch(4, 2, 2)[0])
