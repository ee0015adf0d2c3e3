"""python -m benchmarks.recall: which operator solves associative recall, with how large a state.

A model of one layer for each mixer, size of the keys and learning rate, trained on the CPU or a
GPU. The file is written after each of them: the command run again goes on where it was stopped.
"""

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path

import torch

from benchmarks.progress import Progress, fail
from benchmarks.results import save
from linattn_edu.models import MIXERS
from linattn_edu.recall import Recall, accuracy, learn, small_model

PAIRS, LENGTH, VOCABULARY = (4, 8, 16), 64, 64
STEPS, RATES, SEEDS = 1200, (1e-2,), (0,)
KEYS = (2, 4, 8, 16)


def cases(mixers: list[str]) -> list[tuple[str, int]]:
    """Mixer and size of its keys; "ema" has no keys, the memory of "attention" is all tokens."""
    found = [(mixer, K) for K in KEYS for mixer in mixers if mixer in ("gdn", "kda", "mamba2")]
    return found + [(mixer, 32) for mixer in mixers if mixer in ("ema", "attention")]


def numbers_kept(mixer: str, K: int, model) -> int:
    """Numbers that the recurrence keeps of a sequence; of attention those after its last token."""
    if mixer == "attention":
        return 2 * LENGTH * K
    return model.blocks[0].mixer.make_cache(1).recurrent_state.numel()


def row(mixer: str, K: int, rate: float, seed: int, steps: int, device: torch.device) -> dict:
    """Train one model; how much it answers right, by pairs."""
    tasks = [Recall(pairs, LENGTH, VOCABULARY) for pairs in PAIRS]
    impl = "reference" if device.type == "cpu" else "auto"
    model = small_model(mixer, K, VOCABULARY, seed, impl).to(device)
    begun, losses = time.perf_counter(), []
    learn(model, tasks, steps, rate, seed=seed, report=lambda step, loss: losses.append(loss))
    return {
        "mixer": mixer,
        "key_dim": K,
        "state": numbers_kept(mixer, K, model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "learning_rate": rate,
        "seed": seed,
        "steps": steps,
        "accuracy": {str(t.pairs): round(accuracy(model, t), 4) for t in tasks},
        "losses": [round(sum(losses[i : i + 15]) / 15, 4) for i in range(0, steps, 15)],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("chapters/data/recall.json"))
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), metavar="MIXER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), metavar="RATE")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.mixers) - set(MIXERS)):
        return fail(f"--mixers must be among {', '.join(MIXERS)}, got {', '.join(unknown)}")
    if args.steps < 15:
        return fail(f"--steps must be at least 15, got {args.steps}")
    if not args.out.parent.is_dir():
        return fail(f"--out must be in a folder that is there, got {args.out}")
    device = torch.device(args.device)
    data = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    names = ("mixer", "key_dim", "learning_rate", "seed", "steps")
    there = {tuple(r[n] for n in names) for r in data["rows"]}
    todo = [
        (mixer, K, rate, seed, args.steps)
        for mixer, K in cases(args.mixers)
        for rate in args.rates
        for seed in SEEDS
        if (mixer, K, rate, seed, args.steps) not in there
    ]
    progress = Progress(len(todo))
    for case in todo:
        progress.at(f"{case[0]}, K = {case[1]}")
        r = row(*case, device)
        data |= {"device": device.type, "torch": torch.__version__, "date": str(date.today())}
        data |= {"length": LENGTH, "vocabulary": VOCABULARY}
        data["rows"].append(r)
        save(args.out, data)
        progress.step(
            f"{r['mixer']:<10}K = {r['key_dim']:<4}state {r['state']:>5}, rate {case[2]}: "
            + ", ".join(f"{p} pairs {a:.3f}" for p, a in r["accuracy"].items())
        )
    progress.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
