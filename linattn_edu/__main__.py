"""``python -m linattn_edu doctor``, ``... route``, ``... train`` and ``... puzzle``."""

import argparse
import os
import sys

from linattn_edu import __version__, dry_run, puzzles, train


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m linattn_edu")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="say what runs on this machine, and how")
    dry_run.add_arguments(
        commands.add_parser("route", help="say which kernels a call would run, and why")
    )
    train.add_arguments(
        commands.add_parser("train", help="train a small language model of these layers")
    )
    puzzles.add_arguments(commands.add_parser("puzzle", help="check a puzzle of the book"))
    args = parser.parse_args(argv)
    if args.command == "route":
        return dry_run.main(args)
    if args.command == "train":
        return train.main(args)
    if args.command == "puzzle":
        return puzzles.main(args)
    from linattn_edu.doctor import main as doctor

    return doctor()


def program() -> int:
    """`main` for a shell; 1 where the reader of its output has gone, as ``| head`` has."""
    try:
        code = main()
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        # what is left in the buffer would be written, and fail, at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(program())
