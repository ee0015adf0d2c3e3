"""python -m benchmarks [CASE...]   measure;   python -m benchmarks plot   draw the figures."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.cases import (
    ALL_CALLS,
    CALLS,
    CASES,
    OPERATORS,
    RATES,
    SCALING,
    select,
    work,
)
from benchmarks.progress import fail


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time linattn_edu beside other libraries on the GPU of this machine. Without "
        "any of --calls, --stages, --scaling, --first-call and --all it is --calls.",
        epilog="'python -m benchmarks plot' draws the figures; "
        "'python -m benchmarks.tune' searches the tables of tile sizes.",
    )
    p.add_argument("cases", nargs="*", metavar="CASE", help="names or beginnings; all if none")
    p.add_argument("--list", action="store_true", help="print the cases and their floors, and end")
    p.add_argument(
        "--stale", action="store_true",
        help="print which results are of older sources, on every card, and end",
    )  # fmt: skip
    p.add_argument("--libraries", help="comma-separated; all that import if not given")
    p.add_argument("--calls", action="store_true", help="time whole calls of every library")
    p.add_argument("--what", help=f"comma-separated calls, of {', '.join(ALL_CALLS)}; all if none")
    p.add_argument("--stages", action="store_true", help="time every stage")
    p.add_argument(
        "--scaling", action="store_true", help=f"time {SCALING}, length by length: with gdn cases"
    )
    p.add_argument("--first-call", action="store_true", help="time first calls in fresh processes")
    p.add_argument(
        "--jobs", type=int, default=1,
        help="fresh processes at a time (default 1); with more, they compile before what is timed",
    )  # fmt: skip
    p.add_argument(
        "--limit", type=int, default=300,
        help="seconds of such a process (default 300); what it does not compile is not timed",
    )  # fmt: skip
    p.add_argument("--all", action="store_true", help="all of these")
    p.add_argument(
        "--out", type=Path,
        help="file of results (chapters/data/<operator>_<gpu>.json, a file an operator)",
    )  # fmt: skip
    p.add_argument("--begun", type=json.loads, help=argparse.SUPPRESS)
    p.add_argument("--left", type=json.loads, help=argparse.SUPPRESS)
    return p


def listing() -> str:
    """The cases with their shapes and floors on the GPU whose rates are known."""
    gpu, rates = next(iter(RATES.items()))
    lines = [f"{'case':11s} {'B T H HV K V':24s} {'call':16s} floor ms on {gpu}"]
    for case in CASES.values():
        shape = " ".join(map(str, case.shape))
        for what in CALLS[case.op]:
            floor = work(case, what).floor_ms(*rates)
            lines.append(f"{case.name:11s} {shape:24s} {what:16s} {floor:.3f}  {case.note}")
    lines.append(f"{SCALING:11s} with --scaling: 256 to 32768 tokens, three forms")
    return "\n".join(lines)


def measure(args: argparse.Namespace, argv: list[str]) -> int:
    try:
        cases = select(args.cases)
    except ValueError as error:
        return fail(str(error))
    try:
        from benchmarks.adapters import NAMES
        from benchmarks.measure import gpu_name, usable_gpu
    except ImportError as error:
        return fail(f"benchmarks need torch and linattn_edu: {error}")
    libraries = args.libraries.split(",") if args.libraries else list(NAMES)
    if unknown := [name for name in libraries if name not in NAMES]:
        return fail(f"no library is called {unknown[0]!r}; there are {', '.join(NAMES)}")
    calls = tuple(args.what.split(",")) if args.what else ALL_CALLS
    if unknown := [name for name in calls if name not in ALL_CALLS]:
        return fail(f"no call is called {unknown[0]!r}; there are {', '.join(ALL_CALLS)}")
    if reason := usable_gpu():
        return fail(f"benchmarks run on a CUDA GPU: {reason}")
    from benchmarks import results, stale
    from benchmarks.run import PARTS, run

    if args.begun is None:
        print(stale.listing(results.DATA, gpu_name()))
    parts = tuple(name for name in PARTS if args.all or getattr(args, name)) or ("calls",)
    operators = [x for x in OPERATORS if any(case.operator == x for case in cases)]
    outs = {x: args.out or results.default_path(gpu_name(), x) for x in operators}
    for out in outs.values():
        try:
            old = results.load(out)
        except ValueError as error:
            return fail(f"{out} is not JSON: {error}")
        if old and old["gpu"] != gpu_name():
            here = f"{out} was measured on {old['gpu']}, this is {gpu_name()}"
            return fail(f"{here}: give another --out")
    if parts == ("scaling",) and "gdn" not in operators:
        return fail(f"{SCALING} is measured with cases of gdn only")
    begun = args.begun  # of the first operator that is left
    for operator in args.left or operators:
        left = operators[operators.index(operator) :]

        def again(begun: list, left: list[str] = left) -> int:
            going_on = ["--begun", json.dumps(begun), "--left", json.dumps(left)]
            return subprocess.call([sys.executable, "-m", "benchmarks", *argv, *going_on])

        code = run(
            [case for case in cases if case.operator == operator], libraries, outs[operator],
            parts=tuple(x for x in parts if x != "scaling" or operator == "gdn"),
            jobs=args.jobs, calls=calls, begun=begun, again=again, limit=args.limit,
        )  # fmt: skip
        begun = None
        if code:
            return code
    return 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plot"]:
        from benchmarks.plot import main as plot

        return plot(argv[1:])
    args = parser().parse_args(argv)
    if args.list:
        print(listing())
        return 0
    if args.stale:
        from benchmarks.results import DATA
        from benchmarks.stale import listing as stale

        print(stale(DATA))
        return 0
    return measure(args, argv)


if __name__ == "__main__":
    sys.exit(main())
