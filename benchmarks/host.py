"""python -m benchmarks.host: what the host takes of a call, by three designs of what is repeated.

composed: every call runs its composition and Triton launches; handles: the composition runs, its
launches go past Triton's front; tape: the second call is written down, later ones run that. In
turns, so that what drifts meets all three. host_us: until the call returns, median. wall_us: a call
among CALLS, from the first one's begin until the GPU is done, median of the rounds; both with their
quartiles. same_bits: as composed.

With --device cpu nothing is computed: launches do nothing (`benchmarks.driverless`), and host_us is
the composition, PyTorch's part and Triton's.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from statistics import quantiles

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.adapters import makers
from benchmarks.cases import CASES, FUNCTIONS, TRAINING, Case
from benchmarks.measure import inputs, prepare
from benchmarks.progress import EXIT_USAGE

DESIGNS = ("composed", "handles", "tape")
CALLS, ROUNDS = 20, 15
WITHIN = 1.15
MIDDLE = Case("gdn_middle", "gdn", 1, 8192, 16, 16, 128, 128)
TOKEN, STEP = (replace(CASES[n], name=n) for n in ("gdn_decode", "ssd_decode"))
# case, call, whether the decision looks at it
MEASURED = (
    (CASES["gdn_long"], "forward", True),
    (CASES["gdn_long"], TRAINING, True),
    (MIDDLE, "forward", False),
    (MIDDLE, TRAINING, False),
    (CASES["gdn_train"], "forward", False),
    (CASES["gdn_train"], TRAINING, False),
    *((replace(TOKEN, name=f"gdn_token_{B}", B=B), "decode", True) for B in (1, 64)),
    *((replace(STEP, name=f"ssd_token_{B}", B=B), "decode_inplace", True) for B in (1, 64)),
)


class Call:
    """A call with its inputs; what it gives, with its gradients and states, as `results`."""

    def __init__(self, case: Case, what: str, device: str):
        self.training = what == TRAINING
        self.i = inputs(case, device)
        self.f = makers(case, what)["linattn_edu"]()
        self.call = prepare(what, self.i)

    def __call__(self) -> object:
        if self.training:
            return self.call(self.f)
        with torch.no_grad():
            return self.call(self.f)

    def results(self) -> list[Tensor]:
        """Of a call from the states of the inputs, which are as before after it."""
        state = self.i.initial_state if hasattr(self.i, "initial_state") else None
        kept = None if state is None else state.clone()
        out = self()
        out = [*out] if isinstance(out, tuple) else [out]
        if self.training:
            out += [x.grad for x in self.call.i.asdict().values() if x is not None]
        if state is not None:
            out.append(state.clone())
            state.copy_(kept)
        return [x.clone() for x in out if x is not None]


def timed(call: Call, calls: int, device: str) -> tuple[list[float], float]:
    """Microseconds of the host for each call, and of the whole for one.

    Without a GPU of this thread alone, whatever else the machine does.
    """
    done = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.thread_time
    done()
    begun, host = clock(), []
    for _ in range(calls):
        before = clock()
        call()
        host.append(1e6 * (clock() - before))
    done()
    return host, 1e6 * (clock() - begun) / calls


def rows_of(case: Case, what: str, device: str, calls: int, rounds: int) -> list[dict]:
    """A row for each design."""
    from benchmarks import handles
    from linattn_edu.kernels.host import plan

    under = {"composed": plan.off, "handles": handles.instead, "tape": nullcontext}
    call = Call(case, what, device)
    host, wall, same, expected = {}, {}, {}, None
    for design in DESIGNS:
        host[design], wall[design] = [], []
        for way in ("tape", design):  # the first compiles side by side
            with under[way]():
                for _ in range(4):  # compiled, written down, repeated
                    got = call.results()
        expected = expected or got
        pairs = zip(got, expected, strict=True)
        same[design] = device == "cpu" or all(torch.equal(a, b) for a, b in pairs)
    for _ in range(rounds):
        for design in DESIGNS:
            with under[design]():
                call()
                each, whole = timed(call, calls, device)
            host[design] += each
            wall[design].append(whole)
    rows = []
    for design in DESIGNS:
        row = {"case": case.name, "what": what, "design": design, "calls": calls * rounds}
        for name, times in (("host_us", host[design]), ("wall_us", wall[design])):
            low, middle, high = quantiles(times, n=4, method="inclusive")
            row |= {name: round(middle, 1), f"{name}_quartiles": [round(low, 1), round(high, 1)]}
        rows.append(row | {"same_bits": same[design]})
    return rows


def main(argv: list[str]) -> int:
    p = tables.parser("host", __doc__)
    p.add_argument("--calls", type=int, default=CALLS, help=f"one after the other ({CALLS})")
    p.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all designs ({ROUNDS})")
    p.add_argument("--cases", nargs="+", help="by name; default all")
    args = p.parse_args(argv)
    op = {case.name: case.op for case, *_ in MEASURED}
    ran = lambda row: (FUNCTIONS[op[row["case"]]],)
    if (table := tables.opened(args, "host", "case", "what", "design", ran=ran)) is None:
        return EXIT_USAGE
    if args.device == "cpu":
        from benchmarks import driverless

        driverless.install()
    within, lines = {"host_us": True, "wall_us": True}, []
    for case, what, decides in MEASURED:
        if args.cases and case.name not in args.cases:
            continue
        rows = rows_of(case, what, args.device, args.calls, args.rounds)
        for row in rows:
            table.add(row)
        by = {row["design"]: row for row in rows}
        for name in within:
            if decides and by["handles"][name] > WITHIN * by["tape"][name]:
                within[name] = False
        lines.append(_line(case, what, by, decides))
    print("\n".join([HEAD, *lines]))
    bits = all(row["same_bits"] for row in table.rows.values())
    print(f"all results have the same bits: {_yes(bits)}")
    print(f"by the host's time alone: {_yes(within['host_us'])}")
    name = "wall_us" if args.device == "cuda" else "host_us"
    print(f"handles within 15 % of the tape in each call marked *: {_yes(within[name])}")
    return 0 if bits else 1


HEAD = (
    f"{'us a call':32}{'host: ' + ' '.join(f'{d:>9}' for d in DESIGNS)}"
    f"{'  wall: ' + ' '.join(f'{d:>9}' for d in DESIGNS)}  handles / tape"
)


def _line(case: Case, what: str, by: dict, decides: bool) -> str:
    line = f"{case.name + ' ' + what + ' *' * decides:32}"
    for name, space in (("host_us", 6), ("wall_us", 8)):
        line += " " * space + " ".join(f"{by[d][name]:9.1f}" for d in DESIGNS)
    ratios = (by["handles"][n] / by["tape"][n] for n in ("host_us", "wall_us"))
    return line + "  host {:.2f}, wall {:.2f}".format(*ratios)


def _yes(x: bool) -> str:
    return "yes" if x else "no"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
