"""python -m benchmarks [CASE...]   measure;   python -m benchmarks plot   draw the figures."""

import argparse
import sys
from pathlib import Path

from benchmarks.cases import AWAITED, CASES, RATES, SCALING, select, work

EXIT_USAGE = 2


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time linattn_edu beside other libraries on the GPU of this machine.",
        epilog="'python -m benchmarks plot' draws the figures; "
        "'python -m benchmarks.tune' searches the tables of tile sizes.",
    )
    p.add_argument("cases", nargs="*", metavar="CASE", help="names or beginnings; all if none")
    p.add_argument("--list", action="store_true", help="print the cases and their floors, and end")
    p.add_argument("--libraries", help="comma-separated; all that import if not given")
    p.add_argument("--stages", action="store_true", help="time every stage too")
    p.add_argument("--scaling", action="store_true", help=f"time {SCALING}: length by length")
    p.add_argument("--first-call", action="store_true", help="time first calls in fresh processes")
    p.add_argument("--jobs", type=int, default=1, help="fresh processes at a time (default 1)")
    p.add_argument("--all", action="store_true", help="--stages --scaling --first-call")
    p.add_argument("--out", type=Path, help="file of results (chapters/data/gdn_<gpu>.json)")
    return p


def listing() -> str:
    """The cases with their shapes and floors on the GPU whose rates are known."""
    gpu, rates = next(iter(RATES.items()))
    lines = [f"{'case':11s} {'B T H HV K V':28s} floor ms on {gpu}"]
    for case in CASES.values():
        shape = " ".join(map(str, case.shape))
        floor = work(case, "forward").floor_ms(*rates)
        lines.append(f"{case.name:11s} {shape:28s} {floor:.3f}  {case.note}")
    lines.append(f"{SCALING:11s} with --scaling: 256 to 32768 tokens, three forms")
    lines += [f"{name:11s} waits for {function}" for name, function in AWAITED.items()]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> int:
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
    if reason := usable_gpu():
        return fail(f"benchmarks run on a CUDA GPU: {reason}")
    from benchmarks import results
    from benchmarks.run import run

    out = args.out or results.default_path(gpu_name())
    try:
        old = results.load(out)
    except ValueError as error:
        return fail(f"{out} is not JSON: {error}")
    if old and old["gpu"] != gpu_name():
        return fail(f"{out} was measured on {old['gpu']}, this is {gpu_name()}: give another --out")
    return run(
        cases, libraries, out, jobs=args.jobs, stages=args.stages or args.all,
        scaling=args.scaling or args.all, first_call=args.first_call or args.all,
    )  # fmt: skip


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plot"]:
        from benchmarks.plot import main as plot

        return plot(argv[1:])
    args = parser().parse_args(argv)
    if args.list:
        print(listing())
        return 0
    return measure(args)


if __name__ == "__main__":
    sys.exit(main())
