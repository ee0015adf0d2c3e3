"""python -m benchmarks.ranks: one long sequence on one GPU and on several, beside fla.

Starts a process for each GPU, once; those that a number of ranks leaves over wait. Every time is
that of the slowest rank. ms: median of calls that begin together, L2 emptied before each. row_ms:
of a call among 10 that are queued one after the other, as the layers of a model are. graph_ms: of a
call replayed from a CUDA graph, null where it cannot be captured. The error is that of the output,
or worst gradient, against one GPU's.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from benchmarks import measure, tables
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import fail
from benchmarks.tuning import compile_side_by_side
from linattn_edu import (
    build_cp_context,
    chunk_gated_delta_rule,
    chunk_kda,
    mamba_chunk_scan_combined,
)
from linattn_edu.cp.groups import Gathering
from linattn_edu.figures import speedup
from linattn_edu.kernels.host import plan
from linattn_edu.testing import gdn_inputs, kda_inputs, ssd_inputs

RANKS = (1, 2, 4)
LIBRARIES = ("linattn_edu", "fla")
CASES = ("strong", "none", "weak", "short")  # none: strong without gates, which forgets nothing
# by case: tokens, of all ranks or of each
TOKENS = {
    "cuda": {"strong": speedup.STRONG, "weak": speedup.WEAK, "short": speedup.SHORT},
    "cpu": {"strong": 96, "weak": 32, "short": 16},
}
# H, HV, K, V; of Mamba-2 heads, groups, P, N
SIZES = {
    "cuda": {"gdn": (32, 32, 128, 128), "kda": (32, 32, 128, 128), "ssd": (80, 1, 64, 128)},
    "cpu": {"gdn": (1, 1, 8, 8), "kda": (1, 1, 8, 8), "ssd": (2, 1, 8, 8)},
}
LAYOUTS = ("contiguous", "zigzag")
OURS = {"gdn": (chunk_gated_delta_rule, gdn_inputs), "kda": (chunk_kda, kda_inputs)}
NAMES = ("q", "k", "v", "g", "beta")
SSD = partial(mamba_chunk_scan_combined, chunk_size=256, dt_softplus=True)
SSD_NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias")
SHARED = ("A", "D", "dt_bias")  # whole on every rank, so that gradients are parts of a sum
KEY = ("case", "gate", "library", "layout", "what", "ranks")  # of a row
WARMUP, REPEATS = 3, 15
ROW = {"cuda": 10, "cpu": 2}  # calls in a row
QUEUES = 3  # rows of calls, of which the median counts


@dataclass(frozen=True)
class Job:
    """What is measured of one sequence."""

    op: str
    gate: str
    tokens: int
    ranks: tuple[int, ...]
    library: str = "linattn_edu"

    @property
    def case(self) -> str:
        n = self.tokens
        return f"{self.op}_{n if n % 1024 else f'{n >> 10}k'}"


def jobs(args: argparse.Namespace) -> list[Job]:
    """The jobs of a run, without any twice; peers, which may have to tune themselves, at its end.

    A case of weak scaling or short parts has as many tokens as there are ranks for it, and also its
    time on one. Peers are not asked for short parts.
    """
    found, peers, seen = [], [], set()
    strong = args.tokens or TOKENS[args.device]["strong"]
    for case in args.cases:
        gate = "none" if case == "none" else "trained"
        for op in args.ops:
            if case == "none" and op not in OURS:
                continue
            if case in ("strong", "none"):
                lengths = {strong: args.ranks}
            else:
                each = TOKENS[args.device][case]
                lengths = {each * n: tuple(sorted({1, n})) for n in args.ranks}
            for tokens, ranks in lengths.items():
                new = tuple(n for n in ranks if (op, gate, tokens, n) not in seen)
                seen |= {(op, gate, tokens, n) for n in new}
                found += [Job(op, gate, tokens, new)] if new else []
                peers += [Job(op, gate, tokens, new, "fla")] if new and case != "short" else []
    found += [job for job in peers if args.device != "cpu" and fla(job.op)]
    return [job for job in found if job.library in args.libraries]


def fla(op: str):
    """fla's function of an operator, and what makes its contexts; None where there is none."""
    try:
        from fla.ops.cp import build_cp_context as context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as gdn
        from fla.ops.kda import chunk_kda as kda
    except ImportError:
        return None
    f = {"gdn": gdn, "kda": kda}.get(op)
    return f and (f, context)


# ---- ranks that measure together


@dataclass
class Team:
    """The first ranks of the world, on each of them."""

    device: torch.device
    size: int
    group: dist.ProcessGroup | None  # of their tensors; None: one rank
    control: dist.ProcessGroup | None  # of what their hosts say to each other

    def gathered(self, x: object) -> list:
        """What each rank has."""
        every = [x] * self.size
        if self.control is not None:
            dist.all_gather_object(every, x, group=self.control)
        return every

    def attempt(self, name: str, f: Callable):
        """f(), or None where it fails on any rank, of which the first says why."""
        found, why = None, None
        try:
            found = f()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        reasons = [x for x in self.gathered(why) if x]
        if not reasons:
            return found
        if self.group is None or self.group.rank() == 0:
            print(f"{name}: {reasons[0]}", file=sys.stderr, flush=True)
        return None

    def timed(self, f: Callable, calls: int = 1, flush: bool = True) -> float:
        """Milliseconds of one of some calls, the first of which begins on all ranks at once."""
        if self.device.type == "cpu":
            self.gathered(None)
            begun = time.perf_counter()
            for _ in range(calls):
                f()
            return 1e3 * (time.perf_counter() - begun) / calls
        if flush:
            torch.empty(2**26, dtype=torch.int32, device=self.device).zero_()  # empties L2
        if self.group is not None:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            f()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls

    def median(self, f: Callable, repeats: int, **options) -> float:
        """The median on the slowest rank."""
        repeats = repeats if self.device.type == "cuda" else 1
        own = statistics.median(self.timed(f, **options) for _ in range(repeats))
        return round(max(self.gathered(own)), 4)

    def times(self, name: str, f: Callable) -> dict:
        """ms, row_ms and graph_ms of a call that has been made before."""
        for _ in range(WARMUP if self.device.type == "cuda" else 0):
            f()
        times = {"ms": self.median(f, REPEATS)}
        times["row_ms"] = self.median(f, QUEUES, calls=ROW[self.device.type], flush=False)
        replay = None
        if self.device.type == "cuda" and name not in _REFUSED:
            # the threads of NCCL may look at events meanwhile
            capture = partial(measure.captured, f, capture_error_mode="thread_local")
            replay = self.attempt(f"{name} as a CUDA graph", capture)
            _REFUSED.update(() if replay else (name,))
        return times | {"graph_ms": replay and self.median(replay, REPEATS)}


_REFUSED: set[str] = set()  # calls that no CUDA graph takes, the same on all ranks of a team


# ---- calls and rows


def drawn(job: Job, device: torch.device) -> tuple[Callable, dict[str, Tensor], Tensor]:
    """Our function, the tensors of the whole sequence, the gradient of the output."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape, options = (1, job.tokens, *SIZES[device.type][job.op]), {"dtype": dtype}
    options["device"] = device
    if job.op in OURS:
        f, inputs = OURS[job.op]
        i, names, like = inputs(*shape, gate=job.gate, **options), NAMES, "v"
    else:
        f, names, like = SSD, SSD_NAMES, "x"
        i = ssd_inputs(*shape, decay=job.gate, **options)
    x = {n: getattr(i, n) for n in names}
    return f, x, measure.gradient(x[like])


def passes(f: Callable, tensors: dict, do: Tensor, **options) -> dict[str, Callable]:
    """The two calls that are timed."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}

    def output(x: dict) -> Tensor:
        o = f(**x, **options)
        return o[0] if isinstance(o, tuple) else o

    def forward() -> tuple[Tensor]:
        with torch.no_grad():
            return (output(tensors),)

    def both() -> tuple[Tensor, ...]:
        o = output(leaves)
        return (o.detach(), *torch.autograd.grad(o, list(leaves.values()), do))

    return {"forward": forward, "forward_backward": both}


def apart(x: Tensor, ref: Tensor) -> float:
    """testing.relative_rms, on the device: these tensors are large."""
    x, ref = x.double(), ref.double()
    error = ((x - ref).norm() / ref.norm()).item()
    return error if math.isfinite(error) else math.inf


def rows_of(job: Job, team: Team, f: Callable, x: dict, do: Tensor, whole: tuple) -> Iterator[dict]:
    """The rows of a job on a team, as they come, on each of its ranks.

    whole: The output and the gradients on one GPU.
    """
    ours = job.library == "linattn_edu"
    if not ours:
        f, build = fla(job.op)

    def row(what: str, layout: str) -> dict:
        places = {"layout": layout, "gate": job.gate, "ranks": team.size, "tokens": job.tokens}
        return {"case": job.case, "library": job.library, "what": what} | places

    def ran(calls: dict[str, Callable]) -> tuple[list[str], tuple[Tensor, ...]]:
        """First calls: those that run, where a peer may fail in one, and what the last gives."""
        names, got = [], ()
        for what, call in calls.items():
            name = f"{job.library} {job.case}, {team.size}, {what}"
            if (result := call() if ours else team.attempt(name, call)) is not None:
                names, got = [*names, what], result
        return names, got

    if team.size == 1:
        calls = passes(f, x, do)
        for what in ran(calls)[0]:
            name = f"{job.library} {job.op} {what} on 1"
            yield row(what, LAYOUTS[0]) | team.times(name, calls[what])
        return
    cu_seqlens = torch.tensor([0, job.tokens], device=team.device)
    for layout in LAYOUTS if ours else LAYOUTS[:1]:
        context = build_cp_context(cu_seqlens, team.group, layout=layout)
        own = context if ours else build(cu_seqlens=cu_seqlens, group=team.group)

        def mine(y: Tensor, parts=context.parts) -> Tensor:
            return torch.cat([y[:, slice(*part.tokens)] for part in parts], 1)

        cut = {n: t if n in SHARED else mine(t) for n, t in x.items()}
        calls = passes(f, cut, mine(do), cp_context=own)
        names, got = ran(calls)
        errors = []
        for name, a, b in zip(("o", *x), got, whole, strict=False):  # or o alone
            if name in SHARED:
                a = a.double()
                dist.all_reduce(a, group=team.group)
            errors.append(apart(a, b if name in SHARED else mine(b)))
        del got
        every = [max(e) for e in zip(*team.gathered(errors), strict=True)]
        error = (
            {"error": every[0], "error_gradients": max(every[1:], default=None)} if names else {}
        )
        for what in names:
            name = f"{job.library} {job.op} {what} over {team.size}"
            yield row(what, layout) | team.times(name, calls[what]) | error
        if ours:
            sent = messages(calls["forward"])
            times = team.times(f"gather over {team.size}", partial(gather, sent, team))
            nbytes = sum(message.nbytes for message in sent)
            yield row("gather", layout) | times | {"bytes": nbytes}


def messages(call: Callable) -> list[Tensor]:
    """What a rank sends in a call."""
    sent, begin = [], Gathering.__init__

    def watched(self, x: Tensor, *args):
        sent.extend([] if x.is_meta else [x])
        begin(self, x, *args)

    with patch.object(Gathering, "__init__", watched), plan.off():
        call()
    return sent


def gather(sent: list[Tensor], team: Team) -> None:
    """Send messages as a call does, and nothing else."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for x in sent:
        gather(x.new_empty(team.size * len(x), *x.shape[1:]), x, group=team.group)


# ---- processes


def measure_jobs(rank: int, args: argparse.Namespace, device: torch.device) -> None:
    """All jobs, on a rank of the world."""
    teams = {}
    for n in sorted({*args.ranks, args.world}):
        group = control = None
        if n > 1:
            group = control = dist.new_group(range(n))
            control = dist.new_group(range(n), backend="gloo") if device.type == "cuda" else group
        teams[n] = Team(device, n, group, control)
    table = None
    if rank == 0:
        table = tables.opened(args, "cp", *KEY, ran=lambda row: (FUNCTIONS[op_of(row)], "cp"))
    for job in jobs(args):
        f, x, do = drawn(job, device)
        whole = passes(f, x, do)["forward_backward"]() if max(job.ranks) > 1 else ()
        for n in job.ranks:
            teams[args.world].gathered(None)  # nobody disturbs those who measure
            for row in rows_of(job, teams[n], f, x, do, whole) if rank < n else ():
                if table is not None:
                    table.add(row)
        del x, do, whole


def op_of(row: dict) -> str:
    """The operator of a row."""
    return row["case"].split("_")[0]


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """What one process does."""
    device = torch.device(args.device, rank if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        compile_side_by_side()
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"init_method": f"file://{meeting}", "rank": rank, "world_size": args.world}
    dist.init_process_group(backend, **options)
    measure_jobs(rank, args, device)
    gc.collect()  # threads of a group end with the last reference to it
    dist.destroy_process_group()


def parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments; ranks begin with one, which all are compared with."""
    p = tables.parser("ranks", __doc__, file="cp")
    every = (*OURS, "ssd")

    def listed(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(sorted({1, *map(int, text.split(","))}))

    p.add_argument("--ranks", type=numbers, default=RANKS, help="GPUs (default 1,2,4)")
    p.add_argument("--ops", type=listed, default=every, help=f"(default {','.join(every)})")
    p.add_argument("--cases", type=listed, default=CASES, help=f"(default {','.join(CASES)})")
    p.add_argument("--libraries", type=listed, default=LIBRARIES, help="(default both)")
    p.add_argument("--tokens", type=int, help="of all ranks, in strong and none (default 65536)")
    args = p.parse_args(argv)
    for name, known in (("ops", every), ("cases", CASES), ("libraries", LIBRARIES)):
        if unknown := [x for x in getattr(args, name) if x not in known]:
            p.error(f"--{name} must be of {', '.join(known)}, got {', '.join(unknown)}")
    if args.ranks[0] < 1:
        p.error(f"--ranks must be 1 or more, got {args.ranks[0]}")
    args.world = max(args.ranks)
    return args


def main(argv: list[str]) -> int:
    args = parsed(argv)
    if args.device == "cuda" and torch.cuda.device_count() < args.world:
        return fail(f"{args.world} GPUs are wanted, torch sees {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (args, f"{folder}/meeting"), nprocs=args.world)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
