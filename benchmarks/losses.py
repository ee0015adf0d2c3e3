"""python -m benchmarks.losses: one model trained by the reference, by the kernels, and by fla.

The same weights at first, the same batches, float32. How far the losses of each come to lie from
those of the reference is in the file, and printed. "nudged" is the reference from weights that are
larger by 2^-22 of themselves: what becomes of one rounding in so many steps. fla takes part where
it is installed, with its own layers, which load the state dict of ours.
"""

import argparse
import sys
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.progress import Progress, fail
from benchmarks.results import save, stamped
from linattn_edu import data
from linattn_edu.models import Config, LanguageModel

MIXERS = ("gdn", "kda")
LAYERS = {"gdn": "layers.GatedDeltaNet", "kda": "layers.KimiDeltaAttention"}
WAYS = ("reference", "nudged", "triton", "fla")
LENGTH, BATCH, RATE = 256, 8, 2e-3


class OfFla(nn.Module):
    """A layer of fla in the place of ours, with its parameters."""

    def __init__(self, mixer: str, config: Config, ours: nn.Module):
        from fla.layers import GatedDeltaNet, KimiDeltaAttention

        super().__init__()
        self.layer = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}[mixer](
            hidden_size=config.width, expand_v=config.value_dim / config.key_dim,
            head_dim=config.key_dim, num_heads=config.heads,
        )  # fmt: skip
        self.layer.load_state_dict(ours.state_dict(), strict=True)

    def forward(self, x, **absent):
        return self.layer(x)[0]


def model_of(mixer: str, way: str, device: torch.device) -> LanguageModel:
    """The same model for each way."""
    torch.manual_seed(0)
    config = Config((mixer,) * 2, 256, 128, 2, 32, 64, 256)
    model = LanguageModel(config, "triton" if way == "triton" else "reference")
    if way == "fla":
        for block in model.blocks:
            block.mixer = OfFla(mixer, config, block.mixer)
    if way == "nudged":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 2**-22)
    return model.to(device)


def losses(mixer: str, way: str, steps: int, device: torch.device) -> list[float]:
    """Of each step, nats a byte."""
    model, windows = model_of(mixer, way, device), data.Windows(data.text(), LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    found = []
    for step in range(steps):
        inputs, targets = (x.to(device) for x in windows.batch(BATCH, 0, step))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.steps < 1:
        return fail(f"--steps must be at least 1, got {args.steps}")
    device, ways = torch.device(args.device), list(WAYS)
    if device.type == "cpu":
        ways = ["reference", "nudged"]
    else:
        try:
            import fla.layers  # noqa: F401
        except ImportError:
            ways.remove("fla")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results = {"gpu": gpu, "torch": torch.__version__, "date": str(date.today()), "rows": []}
    progress = Progress(len(args.mixers) * len(ways))
    for mixer in args.mixers:
        reference = None
        for way in ways:
            progress.at(f"{mixer}, {way}")
            begun = time.perf_counter()
            got = losses(mixer, way, args.steps, device)
            reference = reference or got
            apart = max(abs(a - b) for a, b in zip(got, reference, strict=True))
            seconds = round(time.perf_counter() - begun, 1)
            row = {"mixer": mixer, "way": way, "apart": apart, "seconds": seconds}
            row["losses"] = [round(x, 5) for x in got]
            results["rows"].append(stamped(row, (LAYERS[mixer],)))
            save(args.out, results)
            progress.step(
                f"{mixer} {way:<10}last loss {got[-1]:.4f}, at most {apart:.1e} "
                f"from the reference, {seconds} s"
            )
    progress.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
