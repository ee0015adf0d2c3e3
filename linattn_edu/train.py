"""``python -m linattn_edu train``: a small language model of bytes, trained on this machine.

The text is that of Python's help (:func:`linattn_edu.data.text`) or a file. What a run has
done is in the file ``checkpoint.pt`` of its folder, which is replaced at once and never half
written; its losses are in ``losses.json`` and the picture ``loss.svg``.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu import data
from linattn_edu.models import MIXERS, Config, LanguageModel

CHECKPOINT, PICTURE, LOSSES = "checkpoint.pt", "loss.svg", "losses.json"
WARMUP = 20  # steps until the learning rate is full
VALIDATION = 64  # windows
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
PROMPT = b"The for statement "


@dataclass(frozen=True)
class Settings:
    """What a run follows from; a checkpoint is resumed with the same alone."""

    mixer: str = "gdn"
    steps: int = 300
    seed: int = 0
    layers: int = 4
    width: int = 128
    heads: int = 2
    batch: int = 8
    length: int = 256
    learning_rate: float = 4e-3

    def __post_init__(self):
        if self.mixer not in (*MIXERS, "hybrid"):
            raise ValueError(
                f"--mixer must be one of {', '.join((*MIXERS, 'hybrid'))}, got {self.mixer}"
            )
        for name in ("steps", "layers", "width", "heads", "batch", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in 0 to 2^63 - 1, got {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate must be above 0, got {self.learning_rate}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width must be a multiple of twice --heads, got {self.width} and {self.heads}"
            )

    def config(self) -> Config:
        """The model: of a hybrid every fourth layer is softmax attention, the others gdn."""
        mixers = (self.mixer,) * self.layers
        if self.mixer == "hybrid":
            mixers = tuple("attention" if i % 4 == 3 else "gdn" for i in range(self.layers))
        value_dim = self.width // self.heads
        return Config(
            mixers, 256, self.width, self.heads, value_dim // 2, value_dim, 3 * self.width
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step: up in a few steps, then down in a line to zero."""
        up = (step + 1) / min(WARMUP, self.steps)
        return self.learning_rate * min(1.0, up, (self.steps - step) / self.steps * 1.1)


class Run:
    """A model, its optimiser, and how far they are."""

    def __init__(self, settings: Settings, text: bytes, device: torch.device):
        self.settings, self.device = settings, device
        self.windows = data.Windows(text, settings.length)
        self.digest = hashlib.sha256(text).hexdigest()
        # on a CPU never the kernels in the interpreter, which TRITON_INTERPRET=1 would take
        impl = "reference" if device.type == "cpu" else "auto"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = LanguageModel(settings.config(), impl).to(device)
        decayed, others = [], []
        for p in self.model.parameters():
            plain = p.ndim < 2 or getattr(p, "_no_weight_decay", False)
            (others if plain else decayed).append(p)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
        self.step = 0
        self.losses: list[float] = []  # of each step
        self.validation: list[tuple[int, float]] = []  # steps done, loss

    def state(self) -> dict:
        return {
            "settings": asdict(self.settings),
            "text": self.digest,
            "step": self.step,
            "losses": self.losses,
            "validation": self.validation,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], list(state["losses"])
        self.validation = [tuple(x) for x in state["validation"]]

    def loss(self, model: Callable, batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """Nats a byte."""
        inputs, targets = (x.to(self.device, non_blocking=True) for x in batch)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self, model: Callable, dtype: torch.dtype) -> float:
        """The loss of windows of the held-out end of the text."""
        inputs, targets = self.windows.validation(VALIDATION)
        parts = [x.split(self.settings.batch) for x in (inputs, targets)]
        total = sum(
            len(part[0]) * self.loss(model, part, dtype) for part in zip(*parts, strict=True)
        )
        return float(total / len(inputs))

    def train(
        self,
        every: int,
        report: Callable[["Run"], None],
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Take the steps that are left, until stop() is True; whether all were taken.

        report(self) is called after every so many steps and after the last.

        Raises:
            FloatingPointError: the loss is not finite; nothing of it was reported.
        """
        s, model = self.settings, self.model
        call = torch.compile(model) if compiled else model
        recent: list[Tensor] = []
        while self.step < s.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = s.rate(self.step)
            loss = self.loss(call, self.windows.batch(s.batch, s.seed, self.step), dtype)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            recent.append(loss.detach())
            self.step += 1
            stopped = stop()
            if self.step % every == 0 or self.step == s.steps or stopped:
                losses = torch.stack(recent).tolist()  # waits for the device: not at every step
                if not all(map(math.isfinite, losses)):
                    raise FloatingPointError(
                        f"the loss is not finite at a step before {self.step}: try a smaller "
                        f"--learning-rate than {s.learning_rate}"
                    )
                self.losses += losses
                recent.clear()
                if self.step % every == 0 or self.step == s.steps:
                    self.validation.append((self.step, self.validate(call, dtype)))
                report(self)
            if stopped:
                return self.step == s.steps
        return True


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside path and put it in its place at once."""
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        with new.open("rb") as f:
            os.fsync(f.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _save(state: dict, path: Path) -> None:
    """torch.save, whose error of a full disk is none of the operating system."""
    try:
        torch.save(state, path)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be written: {_sentence(error)}") from None


@contextmanager
def alone(folder: Path):
    """Keep other runs out of a folder; yields whether none is there.

    The lock ends with the process, however that ends. Where the system has none, nobody is kept
    out.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first = True
    except BlockingIOError:
        first = False
    except OSError:  # a file system without locks
        first = True
    try:
        yield first
    finally:
        os.close(handle)


def draw(run: Run, path: Path) -> bool:
    """The picture of the losses; whether matplotlib is there to draw it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure((6, 3.6), layout="constrained")
    ax = figure.add_subplot()
    ax.plot(range(1, len(run.losses) + 1), run.losses, color="#9dbbdc", lw=0.8, label="training")
    steps, held_out = zip(*run.validation, strict=True) if run.validation else ((), ())
    ax.plot(steps, held_out, "o-", color="#c86a1b", ms=3, label="held-out text")
    ax.set(xlabel="step", ylabel="loss, nats a byte", title=run.settings.mixer)
    ax.legend(frameon=False)
    replace(path, lambda new: figure.savefig(new, format="svg", metadata={"Date": None}))
    return True


@contextmanager
def interruptible():
    """Ctrl-C (and SIGTERM) finish the step instead of stopping within it; again, they stop at once.

    Yields a function that says whether that was asked for.
    """
    asked = []

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    for f in fields(Settings):
        kind = type(f.default)
        parser.add_argument(
            f"--{f.name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(),
            help=f"{', '.join((*MIXERS, 'hybrid'))}; {f.default} if left out"
            if f.name == "mixer" else f"{f.default} if left out",
        )  # fmt: skip
    parser.add_argument("--text", type=Path, metavar="FILE", help="instead of Python's help")
    parser.add_argument("--device", help="such as cpu or cuda; cuda if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="on a GPU: yes")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints; 50")


def prepare(args: argparse.Namespace) -> tuple[Run, torch.dtype, bool]:
    """Check everything, write nothing.

    Raises:
        ValueError: what does not fit, in one sentence.
    """
    path = args.out / CHECKPOINT
    given = {f.name: getattr(args, f.name) for f in fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {args.out}")
    if args.every < 1:
        raise ValueError(f"--every must be at least 1, got {args.every}")
    state = None
    if args.resume:
        state = read(path)
        if wrong := [n for n, x in given.items() if state["settings"][n] != x]:
            said = ", ".join(f"--{n} {state['settings'][n]}, not {given[n]}" for n in wrong)
            raise ValueError(
                f"the run in {args.out} has {said}: leave it out, or begin another run"
            )
        given = state["settings"]
    elif path.exists():
        raise ValueError(
            f"--out holds a run already, {path}: add --resume to go on with it, or name another"
        )
    settings = Settings(**given)
    device = _device(args.device)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    compiled = device.type != "cpu" if args.compile is None else args.compile
    run = Run(settings, data.text(args.text), device)
    if state is not None:
        if state.get("text") != run.digest:
            raise ValueError(
                f"the run in {args.out} has another text: give the same --text, and for Python's "
                "help the same Python"
            )
        try:
            run.load(state)
        except Exception as error:  # of a file that was changed, or of another version
            raise ValueError(f"{path} does not fit this program: {_sentence(error)}") from None
    return run, getattr(torch, dtype), compiled


def read(path: Path) -> dict:
    """A checkpoint.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise ValueError(f"--resume needs a run in --out, and there is no {path}")
    try:
        with zipfile.ZipFile(path) as parts:
            if damaged := parts.testzip():
                raise ValueError(f"its part {damaged} has other bytes than were written")
        state = torch.load(path, map_location="cpu", weights_only=True)
        Settings(**state["settings"])
    except Exception as error:
        reason = _sentence(error)
        raise ValueError(f"{path} is no checkpoint of this program: {reason}") from None
    return state


def _sentence(error: BaseException) -> str:
    """The first line of an error, which may have none, and the next if it only leads to that."""
    lines = f"{type(error).__name__} {error}".splitlines()
    return " ".join(x.strip() for x in lines[: 2 if lines[0].endswith(":") else 1])


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"--device must be one that PyTorch can use, got {name}: {_sentence(error)}"
        ) from None
    return device


def main(args: argparse.Namespace) -> int:
    """The command; its exit code."""
    try:
        prepared = prepare(args)
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    with alone(args.out) as first:
        if not first:
            print(f"error: another run is at work in {args.out}", file=sys.stderr)
            return EXIT_USAGE
        try:
            return _train(args, *prepared)
        except (FloatingPointError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


def _train(args: argparse.Namespace, run: Run, dtype: torch.dtype, compiled: bool) -> int:
    """Train, write the files, say what came out; the exit code."""
    s = run.settings
    numbers = sum(p.numel() for p in run.model.parameters())
    print(
        f"{s.mixer}: {numbers:,} parameters, {len(run.windows.train):,} bytes of text, "
        f"{s.batch} x {s.length} bytes a step, on {run.device}, {str(dtype).split('.')[1]}"
        + (", compiled" if compiled else "")
        + (f"; goes on after step {run.step}" if run.step else "")
    )
    bar, begun = _bar(run), time.perf_counter()

    def report(run: Run) -> None:
        replace(args.out / CHECKPOINT, lambda new: _save(run.state(), new))
        said = f"loss {sum(run.losses[-20:]) / len(run.losses[-20:]):.3f}"
        if run.validation and run.validation[-1][0] == run.step:
            said += f", held out {run.validation[-1][1]:.3f}"
        if bar is None:
            print(f"[{run.step}/{s.steps} {time.perf_counter() - begun:4.0f} s] {said}", flush=True)
        else:
            bar.set_postfix_str(said)

    with interruptible() as asked:

        def stop() -> bool:
            if bar is not None:
                bar.update()
            return asked()

        try:
            whole = run.train(args.every, report, dtype, compiled, stop)
        finally:
            if bar is not None:
                bar.close()
    curve = asdict(s) | {"device": str(run.device), "torch": torch.__version__}
    curve |= {"losses": [round(x, 4) for x in run.losses], "validation": run.validation}
    replace(args.out / LOSSES, lambda new: new.write_text(json.dumps(curve) + "\n"))
    drawn = draw(run, args.out / PICTURE)
    print(f"wrote {args.out / CHECKPOINT}" + (f" and {args.out / PICTURE}" if drawn else ""))
    if not drawn:
        print("no picture: matplotlib is missing (pip install 'linattn_edu[train]')")
    if not whole:
        print(f"stopped after step {run.step} of {s.steps}; --resume goes on")
        return EXIT_INTERRUPTED
    loss = run.validation[-1][1]
    print(f"held-out text: {loss:.3f} nats a byte, {loss / math.log(2):.3f} bits")
    prompt = torch.tensor([list(PROMPT)], device=run.device)
    said = run.model.generate(prompt, 200, 0.7, torch.Generator(run.device).manual_seed(s.seed))
    print(bytes(said[0].tolist()).decode(errors="replace"))
    return 0


def _bar(run: Run):
    """tqdm's bar on a terminal; None, and lines instead, elsewhere or without tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=run.settings.steps, initial=run.step, unit="step", dynamic_ncols=True)
