"""python -m benchmarks.replay: decoding with states that are written, and with rings beside them.

ms: of a call with one new token a sequence, and of one with 4 guesses of which 2 are right, in a
CUDA graph of CALLS calls: folds of full rings are in it. Few sequences have several layers' states,
which are called in turn, so that no call finds its own in the L2. how: "written", today's way, or
"ring 16", "ring 8", the entries of a ring; with " half", its writes in 16 bit.
"""

import sys
import time
from collections.abc import Callable

import torch

from benchmarks import measure, tables
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import EXIT_USAGE
from linattn_edu import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    make_ring,
    replay_gated_delta_rule,
    replay_kda,
    replay_selective_state_update,
    selective_state_update,
)
from linattn_edu.testing import gdn_inputs, kda_inputs, ssd_inputs

# heads of q and k, of v; K, V
SHAPE = {"cuda": (32, 32, 128, 128), "cpu": (1, 2, 16, 16)}
SEQUENCES = (1, 8, 32, 128)
# a multiple of those from one full ring to the next: 16 and 8, and with guesses 7 and 3
CALLS = {1: 48, 4: 42}
RIGHT = {1: 1, 4: 2}
LAYERS = 32
STATES = 128  # sequences, of all layers
HOW = ("written", "ring 16", "ring 8", "ring 16 half")
OF = {
    "gdn": ("gdn_decode", gdn_inputs, fused_recurrent_gated_delta_rule, replay_gated_delta_rule),
    "kda": ("kda_decode", kda_inputs, fused_recurrent_kda, replay_kda),
    "ssd": ("ssd_decode", ssd_inputs, selective_state_update, replay_selective_state_update),
}


def inputs(op: str, N: int, T: int, device: torch.device):
    """T tokens of N sequences; of Mamba-2 with one group, and states of K columns and V rows."""
    H, HV, K, V = SHAPE[device.type]
    sizes = (HV, 1, V, K) if op == "ssd" else (H, HV, K, V)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return OF[op][1](N, T, *sizes, dtype=dtype, device=device)


def written(op: str, x, right: torch.Tensor, device: torch.device) -> Callable[[], object]:
    """Today's call in place: with several tokens, a slot for the state after each."""
    N, f, (_, HV, K, V) = len(right), OF[op][2], SHAPE[device.type]
    T = (x.x if op == "ssd" else x.q).shape[1]
    slots = torch.randperm(N * T, device=device).view(N, T)
    pool = torch.zeros(N * T, HV, *((V, K) if op == "ssd" else (K, V)), device=device)
    if op != "ssd":
        return lambda: f(
            x.q, x.k, x.v, g=x.g, beta=x.beta, initial_state=pool, inplace_final_state=True,
            ssm_state_indices=slots, num_accepted_tokens=right,
        )  # fmt: skip
    inner, B, C = (y.flatten(0, 1) for y in (x.x, x.B, x.C))
    dt = x.dt.flatten(0, 1)[..., None].expand_as(inner)
    A, bias = x.A[:, None, None].expand(HV, V, K), x.dt_bias[:, None].expand(HV, V)
    more = {"num_accepted_tokens": right, "cu_seqlens": T * torch.arange(N + 1, device=device)}
    more, slots = ({}, slots[:, 0]) if T == 1 else (more, slots)
    return lambda: f(
        pool, inner, dt, A, B, C, dt_bias=bias, dt_softplus=True, state_batch_indices=slots, **more
    )


def ringed(op: str, x, right: torch.Tensor, device: torch.device, how: str) -> Callable[[], object]:
    """The call with a ring, whose length `how` says."""
    N, (_, HV, K, V) = len(right), SHAPE[device.type]
    T, key = (x.x.shape[1], x.B) if op == "ssd" else (x.q.shape[1], x.k)
    slots = torch.randperm(N, device=device)
    pool = torch.zeros(N, HV, *((V, K) if op == "ssd" else (K, V)), device=device)
    _, length, *half = how.split()
    ring = make_ring(
        pool, key.shape[2], length=int(length), tokens=T, channels=op == "kda", dtype=key.dtype,
        writes_dtype=torch.float16 if half else None, state_v_first=op == "ssd",
    )  # fmt: skip
    if op == "ssd":
        return lambda: OF[op][3](
            pool, ring, x.x, x.dt, x.A, x.B, x.C, dt_bias=x.dt_bias, dt_softplus=True,
            state_batch_indices=slots, num_accepted_tokens=right,
        )  # fmt: skip
    return lambda: OF[op][3](
        x.q, x.k, x.v, x.g, x.beta, pool, ring, ssm_state_indices=slots, num_accepted_tokens=right
    )


@torch.no_grad()
def ms_of(op: str, N: int, T: int, how: str, device: torch.device) -> float:
    """Milliseconds of a call."""
    cuda = device.type == "cuda"
    x = inputs(op, N, T, device)
    right = torch.full((N,), RIGHT[T], dtype=torch.int32, device=device)
    layers = min(LAYERS, max(1, STATES // N)) if cuda else 1
    given = () if how == "written" else (how,)
    make = ringed if given else written
    called = [make(op, x, right, device, *given) for _ in range(layers)]
    calls = CALLS[T] if cuda else 1

    def all_calls():
        for _ in range(calls):
            for call in called:
                call()

    if not cuda:
        begun = time.perf_counter()
        all_calls()
        return 1e3 * (time.perf_counter() - begun)
    all_calls()  # compiled, and the rings as full as they will be
    return measure.time_ms(measure.captured(all_calls)) / (calls * layers)


def main(argv: list[str]) -> int:
    p = tables.parser("replay", __doc__, sequences=SEQUENCES, tokens=tuple(CALLS))
    p.add_argument("--cases", nargs="+", default=[*OF], choices=[*OF], help="default all")
    p.add_argument("--how", nargs="+", default=HOW, choices=HOW, help="default all")
    args = p.parse_args(argv)
    functions = {op: (FUNCTIONS[of[0]], of[3].__name__) for op, of in OF.items()}
    key = "op", "sequences", "tokens", "how"
    table = tables.opened(args, "replay", *key, ran=lambda row: functions[row["op"]])
    if table is None:
        return EXIT_USAGE
    for op in args.cases:
        for N in args.sequences:
            for T in args.tokens:
                for how in args.how:
                    row = {"op": op, "sequences": N, "tokens": T, "right": RIGHT[T], "how": how}
                    table.add(row | {"ms": round(ms_of(op, N, T, how, table.device), 5)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
