"""Decoding with fused_recurrent_gated_delta_rule: token by token, in place, for a long time."""

import pytest
import torch
from grids import FULL
from recurrent_cases import case, options
from refusals import refuses

from linattn_edu import fused_recurrent_gated_delta_rule
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs

ALL = ("norm", "gate", "sigmoid", "neg", "v_first")
CUDA = torch.cuda.is_available()
STEPS = 10_000 if CUDA or FULL else 2_000


def tokens(x, part):
    """The arguments of some tokens, without the state."""
    whole = ("A_log", "dt_bias")
    kept = {n: t if t is None or n in whole else t[:, part] for n, t in x.items()}
    return {n: t for n, t in kept.items() if n != "initial_state"}


def decode(x, state, length=1, **options):
    """Outputs of calls of `length` tokens each, the state written in place."""
    outputs = []
    with torch.no_grad():
        for t in range(0, x["q"].shape[1], length):
            o, same = fused_recurrent_gated_delta_rule(
                **tokens(x, slice(t, t + length)), initial_state=state, inplace_final_state=True,
                **options,
            )  # fmt: skip
            assert same is state
            outputs.append(o)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("impl", ["triton", "reference", "float64"])
def test_in_place_is_out_of_place(impl, packed, device):
    """The same tensor comes back, with the bits that would have come in a new one; of a pool
    test_decode_pool has it.
    """
    dtype, impl = (torch.float64, "auto") if impl == "float64" else (torch.float32, impl)
    x = case(5, N=3, B=1 if packed else 3, device=device, dtype=dtype, flags=ALL)
    rest = options(ALL) | {"impl": impl}
    rest["cu_seqlens"] = torch.tensor([0, 2, 2, 5], device=device) if packed else None
    want = fused_recurrent_gated_delta_rule(**x, **rest)
    got = fused_recurrent_gated_delta_rule(**x, **rest, inplace_final_state=True)
    assert got[1] is x["initial_state"] and all(map(torch.equal, got, want))


# beside what test_contract_in_place has of all steps
REFUSED = {
    "no state": ({"initial_state": None}, "initial_state must be given with inplace"),
    "gaps": (
        {"initial_state": torch.zeros(1, 2, 12, 16).mT},
        "initial_state must be contiguous with inplace_final_state=True",
    ),
    "dtype": (
        {"initial_state": torch.zeros(1, 2, 16, 12).double(), "impl": "reference"},
        TypeError,
        "initial_state must be torch.float32, torch.float16 or torch.bfloat16 with inplace_final_",
    ),
    "too wide": (
        {"initial_state": torch.zeros(1, 2, 12, 16).double()},
        r"initial_state must have shape \[N=1, HV=2, K=16, V=12\]",
    ),
    "no flag": ({"inplace_final_state": "yes"}, TypeError, "inplace_final_state must be True or"),
}


def valid():
    return {"inplace_final_state": True} | case(3)


test_in_place_is_refused = refuses(fused_recurrent_gated_delta_rule, valid, REFUSED)


def long_case(device, heads, K, V):
    x = gdn_inputs(1, STEPS, *heads, K, V, dtype=torch.bfloat16, device=device, initial_state=True)
    with torch.no_grad():
        want, last = recurrent(**x.double().asdict())
    x.initial_state = x.initial_state.float()
    return x.asdict(), want, last


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton"])
def test_a_state_is_held_for_10000_steps(impl):
    """Calls of one token, bfloat16 inputs, the state in place: no drift."""
    x, want, last = long_case("cuda", (2, 4), 64, 64)
    state = x["initial_state"].clone()
    got = decode(x, state, impl=impl)
    assert_close("o", got, want, 1e-2)
    assert_close("o at the end", got[:, -100:], want[:, -100:], 1e-2)
    assert_close("state", state, last, 1e-5)


@pytest.mark.long
@pytest.mark.skipif(CUDA, reason="there every step runs in the kernel")
def test_a_state_is_held_without_a_gpu():
    """The reference takes all steps of one token; the kernel the last 500 again.

    bfloat16 inputs, one head of 8 x 8, the state in place. The interpreter needs 5 ms a token, so
    the kernel starts from the state that the reference has held until then, and takes 20 tokens a
    call.
    """
    x, want, last = long_case("cpu", (1, 1), 8, 8)
    state, cut = x["initial_state"].clone(), STEPS - 500
    got = [decode(tokens(x, slice(0, cut)), state, impl="reference")]
    held = state.clone()
    got.append(decode(tokens(x, slice(cut, STEPS)), state, impl="reference"))
    assert_close("o", torch.cat(got, 1), want, 1e-2)
    assert_close("state", state, last, 1e-5)
    kernel = decode(tokens(x, slice(cut, STEPS)), held, 20, impl="triton")
    assert_close("o of the kernel", kernel, want[:, cut:], 1e-2)
    assert_close("state of the kernel", held, last, 1e-5)
