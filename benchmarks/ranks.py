"""python -m benchmarks.ranks: one long sequence on one GPU and on several, beside fla.

Starts a process for each GPU. Every time is the median of REPEATS calls, L2 emptied before each, on
the slowest rank; the error is that of a rank's output, or worst gradient, against one GPU's.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from benchmarks import measure
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import fail
from benchmarks.results import default_path, save, stamped
from benchmarks.tuning import compile_side_by_side
from linattn_edu import build_cp_context, chunk_gated_delta_rule, chunk_kda
from linattn_edu.testing import gdn_inputs, kda_inputs, relative_rms

TOKENS, HEADS, SIZE = 65536, 32, 128
WARMUP, REPEATS = 5, 15
NAMES = ("q", "k", "v", "g", "beta")
LAYOUTS = ("contiguous", "zigzag")
OURS = {"gdn": (chunk_gated_delta_rule, gdn_inputs), "kda": (chunk_kda, kda_inputs)}


def fla(op: str):
    """fla's function of an operator, and its contexts; None where it is not installed."""
    try:
        from fla.ops.cp import build_cp_context as context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as gdn
        from fla.ops.kda import chunk_kda as kda
    except ImportError:
        return None
    return {"gdn": gdn, "kda": kda}[op], context


def once(device: torch.device, f) -> float:
    """Milliseconds of one call, which begins on all ranks at once."""
    if device.type == "cpu":
        dist.barrier()
        begun = time.perf_counter()
        f()
        return 1e3 * (time.perf_counter() - begun)
    torch.empty(2**26, dtype=torch.int32, device=device).zero_()  # empties L2
    dist.all_reduce(torch.zeros(1, device=device))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    f()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def time_ms(device: torch.device, f) -> float:
    """The median on the slowest rank."""
    for _ in range(WARMUP):
        f()
    own = statistics.median(once(device, f) for _ in range(REPEATS))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(every)


def passes(f, tensors: dict, do: torch.Tensor, **options):
    """The two calls that are timed."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}

    def forward():
        with torch.no_grad():
            return f(**tensors, **options)[0]

    def both():
        o = f(**leaves, **options)[0]
        return (o.detach(), *torch.autograd.grad(o, list(leaves.values()), do))

    return {"forward": forward, "forward_backward": both}


def rows_of(op: str, device: torch.device, tokens: int, heads: int, size: int) -> Iterator[dict]:
    """The rows of an operator, as they come; rank 0 alone needs them."""
    ours, inputs = OURS[op]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    i = inputs(1, tokens, heads, heads, size, size, dtype=dtype, device=device)
    x = {n: getattr(i, n) for n in NAMES}
    do = torch.randn(i.v.shape, device=device, generator=seeded(device)).to(dtype)
    world, cu_seqlens = dist.get_world_size(), torch.tensor([0, tokens], device=device)
    whole = passes(ours, x, do)["forward_backward"]()
    group = dist.group.WORLD
    contexts = {n: build_cp_context(cu_seqlens, group, layout=n) for n in LAYOUTS}
    libraries = {"linattn_edu": (ours, contexts["contiguous"], contexts["contiguous"])}
    libraries["linattn_edu_zigzag"] = ours, contexts["zigzag"], contexts["zigzag"]
    if (found := fla(op)) is not None and device.type != "cpu":
        f, build = found
        own = build(cu_seqlens=cu_seqlens, group=group)
        libraries["fla"] = f, own, contexts["contiguous"]
    for library, (f, own, where) in libraries.items():

        def mine(y, where=where):
            return torch.cat([y[:, slice(*part.tokens)] for part in where.parts], 1)

        cut = {n: mine(t) for n, t in x.items()}
        on = {world: passes(f, cut, mine(do), cp_context=own)}
        if library in ("linattn_edu", "fla"):  # on one GPU there is one layout
            on[1] = passes(f, x, do)
        got = on[world]["forward_backward"]()
        errors = [relative_rms(a, mine(b)) for a, b in zip(got, whole, strict=True)]
        every = [None] * world
        dist.all_gather_object(every, errors)
        del got
        for ranks, calls in sorted(on.items()):
            for what, call in calls.items():
                row = {"case": f"{op}_{tokens >> 10}k", "library": library, "what": what}
                row |= {"ranks": ranks, "ms": round(time_ms(device, call), 4)}
                if ranks > 1:
                    row["error"] = max(e[0] for e in every)
                    row["error_gradients"] = max(max(e[1:]) for e in every)
                yield row
    message = torch.zeros(1, heads, size, 2 * size, device=device)
    gathered = message.new_empty(world, *message.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    ms = round(time_ms(device, lambda: gather(gathered, message)), 4)
    row = {"case": f"{op}_{tokens >> 10}k", "library": "linattn_edu", "what": "gather"}
    yield row | {"ranks": world, "ms": ms, "bytes": message.numel() * 4}


def seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(1)


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """What one process does."""
    device = torch.device(args.device, rank if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        compile_side_by_side()
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"init_method": f"file://{meeting}", "rank": rank, "world_size": args.ranks}
    dist.init_process_group(backend, **options)
    rows = []
    for op in args.ops.split(","):
        for row in rows_of(op, device, args.tokens, args.heads, args.size):
            rows.append(stamped(row, (FUNCTIONS[op], "cp")))
            if rank == 0:
                print(json.dumps(row), flush=True)
                save(args.out, {**heading(device), "rows": rows})
    dist.destroy_process_group()


def heading(device: torch.device) -> dict:
    """Where and with what it was measured."""
    import triton

    from benchmarks.adapters import version_of

    gpu = "CPU" if device.type == "cpu" else measure.gpu_name()
    data = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    data |= {"fla": version_of("fla"), "cuda": torch.version.cuda}
    return data | {"date": date.today().isoformat()}


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    p.add_argument("--ranks", type=int, default=2, help="GPUs (default 2)")
    p.add_argument("--ops", default="gdn,kda", help="comma-separated (default gdn,kda)")
    p.add_argument("--tokens", type=int, default=TOKENS)
    p.add_argument("--heads", type=int, default=HEADS)
    p.add_argument("--size", type=int, default=SIZE, help="of a key and of a value")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=Path, help="file of results (chapters/data/cp_<gpu>.json)")
    args = p.parse_args(argv)
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        return fail(f"{args.ranks} GPUs are wanted, torch sees {torch.cuda.device_count()}")
    if args.out is None:
        args.out = default_path("cpu" if args.device == "cpu" else measure.gpu_name(), "cp")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (args, f"{folder}/meeting"), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
