"""Decoding from a checkpoint and a ring: each operator with its arguments and the recurrence."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from recurrent_cases import case, double, kda_case, kda_oracle, oracle

from linattn_edu import (
    make_ring,
    replay_gated_delta_rule,
    replay_kda,
    replay_selective_state_update,
)
from linattn_edu.reference.ssd.selective_state_update import selective_state_update
from linattn_edu.testing import ssd_inputs

SHARED = ("A_log", "dt_bias", "A", "D")  # of all sequences


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
        key = x["k" if "k" in x else "B"]
        kinds = {"dtype": key.dtype, **self.ring, **kinds}
        ring = make_ring(states, key.shape[2], length=length, tokens=tokens, **kinds)
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


def ssd(T, N, slots, device, dtype):
    x = ssd_inputs(N, T, 4, 2, 20, 24, dtype=dtype, device=device).asdict()
    state = torch.randn(slots, 4, 20, 24, dtype=x["initial_states"].dtype).to(device)
    return {n: x[n] for n in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")}, state


def of_ssd(x, S):
    x, S, out = double(x), S.double().clone(), []
    whole = {"A": x["A"][:, None, None], "D": x["D"][:, None], "dt_bias": x["dt_bias"][:, None]}
    for t in range(x["x"].shape[1]):
        one = {n: x[n][:, t] for n in ("x", "B", "C", "z")} | {"dt": x["dt"][:, t, :, None]}
        out.append(selective_state_update(S, **one, **whole, softplus=True))
    return torch.stack(out, 1), S


def call_ssd(x, S, ring, ssm_state_indices=None, **how):
    return replay_selective_state_update(
        S, ring, **x, dt_softplus=True, state_batch_indices=ssm_state_indices, **how
    )


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
    Step("ssd", ssd, call_ssd, of_ssd, {"state_v_first": True}),
)  # fmt: skip
