"""python -m benchmarks.tritons: whole calls with the Triton of this process.

A file a card, a row a call and Triton; run once with each Triton that is to be compared.
"""

import sys
from functools import partial

import torch

from benchmarks import measure, tables
from benchmarks.adapters import makers
from benchmarks.cases import CASES, FUNCTIONS, TRAINING, Case
from benchmarks.progress import EXIT_USAGE, fail
from benchmarks.rows import OURS, significant

NAMES = "gdn_train", "gdn_gva", "gdn_d64", "kda_train", "kda_kimi", "ssd_2.7b"
WHATS = "forward", TRAINING


def assembler() -> str:
    """The version of ptxas that Triton calls for this GPU."""
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = torch.cuda.get_device_capability()
    return get_ptxas(10 * major + minor).version


def time_ms(case: Case, what: str) -> float:
    """The time of one call; what it compiles is not timed."""
    call = measure.prepare(what, measure.inputs(case))
    once = partial(call, makers(case, what)[OURS]())
    with torch.no_grad():
        once()
        return significant(measure.time_ms(once))


def ran(row: dict) -> tuple[str, ...]:
    return (FUNCTIONS[CASES[row["case"]].op],)


def main(argv: list[str]) -> int:
    parser = tables.parser("tritons", __doc__)
    parser.add_argument("--cases", nargs="+", default=NAMES, metavar="CASE")
    args = parser.parse_args(argv)
    if unknown := [x for x in args.cases if x not in CASES]:
        return fail(f"there is no case {unknown[0]!r}")
    if args.device == "cpu":
        return fail("it is about what Triton compiles for a GPU")
    key = "case", "what", "triton"
    if (table := tables.opened(args, "tritons", *key, ran=ran, apart=("triton",))) is None:
        return EXIT_USAGE
    import triton

    for name in args.cases:
        for what in WHATS:
            row = {"case": name, "what": what, "triton": triton.__version__, "ptxas": assembler()}
            table.add(row | {"ms": time_ms(CASES[name], what)})
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
