"""Ranks whose keys are nearly parallel, of a sequence as fla's context-parallel tests had it: see
processes.run_ranks.

Rank 0 prints the error of o against the recurrence in float64, on one GPU and over the ranks, and
that of fla where it can be imported; "right" is written to FILE.RANK.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ops.test_nearly_parallel import MOST, F, K, nearly_parallel
from processes import be_a_rank

from benchmarks.ranks import fla
from linattn_edu.cp import build_cp_context
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import relative_rms

TOKENS = 2048


def check(device: torch.device, rank: int, world: int) -> None:
    bounds = torch.tensor([0, TOKENS], device=device)
    context = build_cp_context(bounds, dist.group.WORLD)
    own = slice(*context.parts[0].tokens)
    for family, f in F.items():
        x = nearly_parallel(family == "kda", TOKENS, torch.bfloat16, device)
        cut = [y[:, own].contiguous() for y in x]
        q, k, v, g, beta = (y.double() for y in x)
        gates = {"g": None, "gk": g} if family == "kda" else {"g": g}
        want, _ = recurrent(q, k, v, beta=beta, scale=K**-0.5, **gates)
        errors = {}
        for C in (64, 16):
            errors[f"chunks of {C}"] = f(*x, chunk_size=C)[0][:, own]
            errors[f"chunks of {C}, ranks"] = f(*cut, chunk_size=C, cp_context=context)[0]
        if (peer := fla(family)) is not None:
            f, build = peer
            errors["fla"] = f(*x)[0][:, own]
            errors["fla, ranks"] = f(*cut, cp_context=build(bounds, group=dist.group.WORLD))[0]
        errors = {n: relative_rms(o, want[:, own]) for n, o in errors.items()}
        every = [None] * world
        dist.all_gather_object(every, errors)
        errors = {n: max(e[n] for e in every) for n in errors}
        if rank == 0:
            print(family, *(f"{n}: {e:.1e};" for n, e in errors.items()), flush=True)
        for C in (64, 16):
            assert errors[f"chunks of {C}, ranks"] < MOST[C], errors


if __name__ == "__main__":
    be_a_rank(check)
