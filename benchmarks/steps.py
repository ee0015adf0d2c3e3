"""python -m benchmarks.steps: a token of a layer and of a model, called and as a captured step.

ms: of a token among TOKENS, by the host's clock until the GPU is done: a server waits for both.
guesses: the same where each call checks so many guesses, of which `right` stay and the others are
taken back; without the time of who guesses. 0: none. same_bits: whether the step gives what the
call gives.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import tables
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import EXIT_USAGE
from linattn_edu.layers import Cache, GatedDeltaNet, KimiDeltaAttention, Mamba2
from linattn_edu.models import Config, LanguageModel
from linattn_edu.models.language_model import RING

BATCHES = (1, 64)
TOKENS = {"cuda": 50, "cpu": 2}
GUESSED = ((0, 0), (4, 2))  # guesses of a call, and how many of them are right
WIDTHS = {"cuda": (2048, 16, 128), "cpu": (32, 2, 16)}  # of hidden states; heads; keys of a head
OF = {"gdn": "gdn_decode", "kda": "kda_decode", "mamba2": "ssd_decode", "model": "gdn_decode"}


def built(case: str, device: torch.device) -> nn.Module:
    """A layer, or a language model of four layers of Gated DeltaNet, in bf16."""
    width, heads, K = WIDTHS[device.type]
    factory = {"device": device, "dtype": torch.bfloat16}
    if case == "model":
        sizes = {"width": width, "heads": heads, "key_dim": K, "value_dim": K, "hidden": 2 * width}
        return LanguageModel(Config(vocabulary=64, **sizes)).to(**factory)
    if case == "mamba2":
        return Mamba2(width, d_state=K, headdim=K // 2, **factory)
    layer = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}[case]
    return layer(width, expand_v=1, head_dim=K, num_heads=heads, **factory)


def ms_of(f: Callable[[Tensor], Tensor], x: Tensor, tokens: int) -> float:
    """Milliseconds of a token."""
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    for _ in range(5):
        f(x)
    wait()
    begun = time.perf_counter()
    for _ in range(tokens):
        f(x)
    wait()
    return 1e3 * (time.perf_counter() - begun) / tokens


@torch.no_grad()
def rows_of(
    case: str, batch: int, guesses: int, right: int, device: torch.device
) -> Iterator[dict]:
    """A row for the call and one for the step."""
    torch.manual_seed(0)
    module, T = built(case, device), 1 + guesses
    if case == "model":
        x = torch.randint(64, (batch, T), device=device)
    else:
        x = torch.randn(batch, T, WIDTHS[device.type][0], device=device, dtype=torch.bfloat16)
    kept = {"ring": RING, "guesses": guesses} if guesses else {}
    caches = [module.make_cache(batch, **kept) for _ in range(2)]
    ways = {"call": partial(module, cache=caches[0]), "step": module.make_step(caches[1])}

    def turn(f: Callable[[Tensor], Tensor], cache: Cache | list[Cache], x: Tensor) -> Tensor:
        y = f(x)
        for part in [cache] if isinstance(cache, Cache) else cache:
            part.take_back(guesses - right)
        return y

    turns = {n: partial(turn, ways[n], cache) for n, cache in zip(ways, caches, strict=True)}
    found = [[f(x) for _ in range(3)] for f in turns.values()]
    same = all(map(torch.equal, *found))
    about = {"case": case, "library": "linattn_edu", "batch": batch, "same_bits": same}
    for name, f in turns.items():
        ms = round(ms_of(f, x, TOKENS[device.type]) / (1 + right), 4)
        yield {**about, "guesses": guesses, "right": right, "how": name, "ms": ms}


def main(argv: list[str]) -> int:
    p = tables.parser("steps", __doc__, batches=BATCHES)
    p.add_argument("--cases", nargs="+", default=[*OF], choices=[*OF], help="default all")
    args = p.parse_args(argv)
    ran = lambda row: (FUNCTIONS[OF[row["case"]]], "causal_conv1d_update")
    key = "case", "batch", "guesses", "how"
    if (table := tables.opened(args, "steps", *key, ran=ran)) is None:
        return EXIT_USAGE
    for case in args.cases:
        for batch in args.batches:
            for guessed in GUESSED:
                for row in rows_of(case, batch, *guessed, table.device):
                    table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
