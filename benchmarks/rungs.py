"""python -m benchmarks.rungs: every rung of the chapters' kernel ladders, beside what ships.

The kernels are read from the chapters (benchmarks.ladders). Each ladder and dtype has a process of
its own. All compile side by side, on few tokens; then one after the other is timed: medians, L2
emptied before each call. A result that is not that of the shipped kernel is refused, and so is a
rung that Triton refuses; its row says why. Rows are saved as they come.

Last come the stages of other libraries, where these are installed (benchmarks.ladder_peers); they
compile slowly. --warm compiles them and times nothing, --peers then times them and what ships.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks import ladder_peers, ladders, measure, tables
from benchmarks.ladders import LADDERS, Rung, Size, differences
from benchmarks.progress import EXIT_USAGE, fail
from benchmarks.rows import significant

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}  # relative RMS, against the shipped kernel
COMPILE_S, RUNG_S, INPUTS_S = 100.0, 30.0, 60.0  # what takes longer is given up
WARM = 12  # processes that compile peers side by side
SLOW_MS = 300.0  # of a call that is timed three times only
Key = tuple[str, str]  # chapter and dtype


def reason(error: BaseException) -> str:
    """What was wrong, on one line: of a chain of errors the first, which Triton wraps."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


def time_ms(call, device: str) -> float:
    """Milliseconds of a call that has been made before."""
    if device != "cuda":
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    measure.synchronize()
    if begin.elapsed_time(end) < SLOW_MS:
        return measure.time_ms(call)
    times = []
    for _ in range(3):
        begin.record()
        call()
        end.record()
        measure.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[1]


# ---- what a process does


def work(key: Key, device: str, skip: set[str], peers: list[str], line: Connection) -> None:
    """Compile the rungs of a ladder, say so, wait for leave, time them."""
    try:
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            _work(key, device, skip, peers, line, Path(folder))
    except BaseException as error:
        line.send(("lost", reason(error)))
        raise SystemExit(1) from None


def _work(
    key: Key, device: str, skip: set[str], peers: list[str], line: Connection, folder: Path
) -> None:
    (chapter, name), dtype = key, getattr(torch, key[1])
    ladder, refused = LADDERS[chapter], dict.fromkeys(skip, "")
    kinds = ("few", "full") if device == "cuda" else ("tiny",)
    if peers:
        ladder_peers.tune(once=True)

    def each(size: Size):
        line.send(("begin", "inputs"))
        for rung, made in ladder.rungs(size, folder, peers).items():
            if rung not in refused:
                line.send(("begin", rung))
                yield rung, made

    if device == "cuda":
        for rung, made in each(Size("few", dtype, device)):
            try:
                made.call()
                measure.synchronize()
            except Exception as error:
                measure.synchronize()  # raises if the GPU's context is gone
                refused[rung] = reason(error)
                line.send(("refused", rung, refused[rung]))
    line.send(("ready",))
    line.recv()
    size = Size(kinds[-1], dtype, device)
    for rung, made in each(size):
        if rung in peers:
            ladder_peers.tune(once=device != "cuda")
        try:
            row = _measured(made, device, TOLERANCE[name])
        except Exception as error:
            if device == "cuda":
                measure.synchronize()
                torch.cuda.empty_cache()
            line.send(("refused", rung, reason(error)))
        else:
            line.send(("row", rung, row, made.shape or size.shape))
    line.send(("done",))


class Wrong(ArithmeticError):
    """A rung's results are not those of the shipped kernel."""


def warm(key: Key, device: str) -> dict[str, str]:
    """Compile the peers of a ladder; name -> seconds, or why not."""
    ladder, dtype, said = LADDERS[key[0]], getattr(torch, key[1]), {}
    ladder_peers.tune(once=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        size = Size("few" if device == "cuda" else "tiny", dtype, device)
        made = ladder.rungs(size, Path(folder), ladder.peers)
        for name in ladder.peers:
            begun = time.monotonic()
            try:
                made[name].call()
                if device == "cuda":
                    measure.synchronize()
            except Exception as error:
                said[name] = reason(error)
            else:
                said[name] = f"{time.monotonic() - begun:.1f} s"
    return said


def warm_all(keys: list[Key], device: str) -> int:
    """Compile the peers of all ladders, in processes of their own; how many failed."""
    context, failed = multiprocessing.get_context("forkserver"), 0
    workers = min(WARM, len(keys))
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        for (chapter, dtype), job in [(key, pool.submit(warm, key, device)) for key in keys]:
            try:
                said = job.result()
            except Exception as error:
                said = {"all": reason(error)}
            for name, told in said.items():
                print(f"{chapter} {dtype} {name}: {told}", flush=True)
                failed += not told.endswith(" s")
    return failed


def _measured(rung: Rung, device: str, tolerance: float) -> dict:
    row = {}
    results = rung.part((rung.first or rung.call)())
    if rung.like is not None:
        error = differences(results, rung.like())
        if not error <= tolerance:
            raise Wrong(f"relative RMS {error:.1e} from the shipped kernel")
        row["error"] = significant(error)
    else:
        differences(results, results)  # inf or NaN
    del results
    return {"ms": significant(time_ms(rung.call, device)), **row}


# ---- the processes


@dataclass
class Unit:
    """The process of a ladder and dtype, and what it said last."""

    key: Key
    process: multiprocessing.Process
    line: Connection
    at: str = "import"
    since: float = field(default_factory=time.monotonic)
    state: str = "compiling"  # then "ready", "done" or "lost"
    why: str = ""

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.line.close()


class Run:
    """All processes of a run, and the table that they fill."""

    def __init__(self, table: tables.Table, device: str, limit: float):
        self.table, self.device, self.added = table, device, set()
        self.ends = time.monotonic() + limit
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["benchmarks.ladders"])  # without a GPU's context

    def start(self, key: Key, skip: set[str]) -> Unit:
        ours, theirs = self.context.Pipe()
        peers = list(LADDERS[key[0]].peers)
        process = self.context.Process(target=work, args=(key, self.device, skip, peers, theirs))
        process.daemon = True
        process.start()
        theirs.close()
        return Unit(key, process, ours)

    def add(self, key: Key, rung: str, **more) -> None:
        chapter, dtype = key
        steps, peer = LADDERS[chapter].steps, LADDERS[chapter].peers.get(rung)
        of, beside = (peer.of, peer.columns()) if peer else (rung, {})
        row = {"chapter": chapter, "step": steps[of], "rung": rung, **beside, "dtype": dtype}
        self.added.add((key, rung))
        self.table.add(row | {"order": list(steps).index(of), **more})

    def known(self, key: Key) -> set[str]:
        """The rungs that have a row."""
        return {r["rung"] for r in self.table.rows.values() if _key(r) == key}

    def told(self, key: Key) -> set[str]:
        """The rungs that have a row of this run."""
        return {rung for one, rung in self.added if one == key}

    def listen(self, unit: Unit, until: str, limit: dict[str, float]) -> None:
        """What a process says, until it is in the state `until` or is given up."""
        while unit.state not in (until, "done", "lost"):
            allowed = limit.get(unit.at, limit[""])
            left = min(unit.since + allowed, self.ends) - time.monotonic()
            try:
                if not unit.line.poll(max(0.0, left)):
                    unit.state, unit.why = "lost", f"took more than {allowed:.3g} s"
                    if time.monotonic() >= self.ends:
                        unit.why = "not measured: the run's time was over"
                    break
                self.heard(unit, unit.line.recv())
            except (EOFError, OSError):
                unit.state, unit.why = "lost", "the process ended"

    def heard(self, unit: Unit, message: tuple) -> None:
        what, *rest = message
        unit.since = time.monotonic()
        if what == "begin":
            unit.at = rest[0]
        elif what == "row":
            rung, row, shape = rest
            ladder = LADDERS[unit.key[0]]
            ships = rung not in ladder.peers and ladder.ships(rung)
            self.add(unit.key, rung, ships=ships, **row, shape=shape)
        elif what == "refused":
            rung, why = rest
            self.add(unit.key, rung, refused=why)
        elif what == "lost":
            unit.state, unit.why = "lost", rest[0]
        else:
            unit.state = what

    def time(self, unit: Unit) -> None:
        """Let a process that is ready time its rungs."""
        if unit.state == "ready":
            unit.state, unit.at, unit.since = "timing", "inputs", time.monotonic()
            unit.line.send("go")
            self.listen(unit, "done", {"": RUNG_S, "inputs": INPUTS_S})

    def close(self, unit: Unit, fresh: set[str]) -> set[str] | None:
        """End a process. If it was lost, the rungs for another one to leave out, None if none."""
        unit.end()
        if unit.state != "lost":
            return None
        print(f"{unit.key} was lost at {unit.at}: {unit.why}", flush=True)
        ladder = LADDERS[unit.key[0]]
        if unit.at not in (*ladder.steps, *ladder.peers):
            return None if fresh else set()
        self.add(unit.key, unit.at, refused=unit.why)
        return self.told(unit.key)

    def all(self, keys: list[Key], skip: dict[Key, set[str]]) -> None:
        units = [self.start(key, skip.get(key, set())) for key in keys]
        compiled = time.monotonic() + COMPILE_S
        for unit in units:
            left = max(1.0, compiled - time.monotonic())
            unit.since = time.monotonic()
            self.listen(unit, "ready", {"": left})
        print(f"ready: {sum(u.state == 'ready' for u in units)} of {len(units)}", flush=True)
        again = {}
        for unit in units:
            self.time(unit)
            if (left_out := self.close(unit, set())) is not None:
                again[unit.key] = left_out
        for key, left_out in again.items():
            while left_out is not None and time.monotonic() < self.ends:
                left_out |= skip.get(key, set())
                if left_out >= {*LADDERS[key[0]].names(key[1]), *LADDERS[key[0]].peers}:
                    break
                unit = self.start(key, left_out)
                self.listen(unit, "ready", {"": RUNG_S, "import": INPUTS_S})
                self.time(unit)
                left_out = self.close(unit, left_out or {"inputs"})
        for key in keys:
            left = set(LADDERS[key[0]].names(key[1])) - self.known(key)
            for rung in left - skip.get(key, set()):
                self.add(key, rung, refused="not measured: the run ended before")


def ran(row: dict) -> tuple[str, ...]:
    """What a rung is the time of: the chapter's functions, a puzzle's solution or a stage."""
    chapter, rung = row["chapter"], row["rung"]
    if "library" in row:
        return ()
    if rung.startswith("puzzle"):
        return (rung,)
    ladder, words = LADDERS[chapter], rung.split()
    if ladder.ships(rung):
        return (f"kernels.{words[0]}",)
    return tuple(f"{chapter}.{name}" for name in words if name in ladder.kernels)


def summary(rows: list[dict]) -> str:
    """The rows as a short table."""
    lines = []
    place = lambda r: (r["chapter"], r["dtype"], r["order"], r.get("library", ""))
    for row in sorted(rows, key=place):
        told = f"{row['ms']:10.4f} ms" if "ms" in row else f"-- {row['refused']}"
        error = f"  {row['error']:.0e}" if "error" in row else ""
        name = f"{row['chapter'][:2]} {row['step']} {row['rung']}"
        lines.append(f"{name:40.40s} {row['dtype'][:4]} {told}{error}"[:110])
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    p = tables.parser("rungs", __doc__)
    p.add_argument("--chapters", nargs="+", default=[""], help="beginnings of their names")
    p.add_argument("--missing", action="store_true", help="only what has no time in the file")
    p.add_argument("--peers", action="store_true", help="only other libraries and what ships")
    p.add_argument("--warm", action="store_true", help="compile other libraries, time nothing")
    p.add_argument("--limit", type=float, default=240.0, help="seconds of the whole run")
    args = p.parse_args(argv)
    keys = [key for key in ladders.units() if key[0].startswith(tuple(args.chapters))]
    if not keys:
        return fail(f"no chapter with a ladder begins with {' or '.join(args.chapters)}")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        keys = [key for key in keys if key[1] == "float32"]  # the interpreter's bf16 is wrong
    if args.peers or args.warm:
        keys = [key for key in keys if LADDERS[key[0]].peers]
        if not keys:
            return fail("no other library that has a stage of these ladders is installed")
    if args.warm:
        return min(1, warm_all(keys, args.device))
    if (table := tables.opened(args, "rungs", "chapter", "rung", "dtype", ran=ran)) is None:
        return EXIT_USAGE
    every = ladder_peers.PEERS
    named = {(c, r) for c, it in LADDERS.items() for r in (*it.steps, *every.get(c, ()))}
    table.rows = {k: r for k, r in table.rows.items() if k[:2] in named}
    skip, run = {}, Run(table, args.device, args.limit)
    if args.missing:
        rows = [r for r in table.rows.values() if "ms" in r]
        timed = {k: {r["rung"] for r in rows if _key(r) == k} for k in keys}
        wanted = {k: {*LADDERS[k[0]].names(k[1]), *LADDERS[k[0]].peers} for k in keys}
        keys = [k for k in keys if wanted[k] - timed[k]]
        skip = {k: timed[k] for k in keys}
    if args.peers:
        ladder_of = lambda key: LADDERS[key[0]]
        beside = {k: {p.of for p in ladder_of(k).peers.values()} for k in keys}
        others = {k: set(ladder_of(k).steps) - beside[k] for k in keys}
        skip = {k: skip.get(k, set()) | others[k] for k in keys}
    begun = time.monotonic()
    run.all(keys, skip)
    print(summary([r for r in table.rows.values() if _key(r) in keys]))
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


def _key(row: dict) -> Key:
    return row["chapter"], row["dtype"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
