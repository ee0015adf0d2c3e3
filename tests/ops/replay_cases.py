"""Decoding from a checkpoint and a ring: each operator with its arguments and the recurrence."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from recurrent_cases import case, double, kda_case, kda_oracle, oracle

from linattn_edu import make_ring, replay_gated_delta_rule, replay_kda

SHARED = ("A_log", "dt_bias")  # of all sequences


@dataclass(frozen=True)
class Step:
    """`make(T, N, slots, device, dtype)` returns the tensors of N sequences by name and the states
    of all slots; `call(x, state, ring, **options)` the output; `oracle(x, state)` the output and
    the states of the recurrence, in float64.
    """

    name: str
    make: Callable
    call: Callable
    oracle: Callable
    ring: dict

    def __str__(self):
        return self.name

    def drawn(self, T, N, device, *, slots=None, dtype=torch.float32):
        x, states = self.make(T, N, slots or N, device, dtype)
        return {n: t for n, t in x.items() if t is not None}, states

    def empty(self, states, x, length=8, tokens=4, **kinds):
        """A ring whose entries are NaN until they are written."""
        kinds = {"dtype": x["k" if "k" in x else "B"].dtype, **self.ring, **kinds}
        ring = make_ring(states, 1, length=length, tokens=tokens, **kinds)
        for part in ring[:3]:
            part.fill_(float("nan"))
        return ring


def tokens(x, begin=None, end=None, n=slice(None)):
    """The arguments of some tokens, of some sequences."""
    cut = slice(begin, end)
    return {m: y if m in SHARED else y[n, cut] for m, y in x.items()}


FLAGS = ("norm", "sigmoid", "neg")
NAMED = {
    "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
}  # fmt: skip
RAW = {"use_gate_in_kernel": True}


def gdn(T, N, slots, device, dtype, *, flags=(*FLAGS, "gate")):
    x = case(T, B=N, N=slots, device=device, dtype=dtype, flags=flags)
    state = x.pop("initial_state")
    return {n: x.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}, state


def kda(T, N, slots, device, dtype):
    x, _ = kda_case(T, B=N, N=slots, device=device, dtype=dtype, flags=FLAGS, gate="bounded")
    return x, x.pop("initial_state")


def gdn_v_first(T, N, slots, device, dtype):
    return gdn(T, N, slots, device, dtype, flags=("v_first",))


def of_gdn(flags):
    return lambda x, S: oracle(**double(x), initial_state=S.double(), flags=flags)


def of_kda(x, S):
    f = kda_oracle(RAW | {"lower_bound": -5.0}, flags=FLAGS)
    return f(**double(x), initial_state=S.double())


STEPS = (
    Step(
        "gdn", gdn, lambda x, S, ring, **how: replay_gated_delta_rule(
            **x, state=S, ring=ring, **NAMED, **RAW, **how
        ), of_gdn((*FLAGS, "gate")), {},
    ),
    Step(
        "kda", kda, lambda x, S, ring, **how: replay_kda(
            **x, state=S, ring=ring, **NAMED, **RAW, lower_bound=-5.0, **how
        ), of_kda, {"channels": True},
    ),
    Step(
        "gdn v_first", gdn_v_first, lambda x, S, ring, **how: replay_gated_delta_rule(
            **x, state=S, ring=ring, **how
        ), of_gdn(("v_first",)), {"state_v_first": True},
    ),
)  # fmt: skip
