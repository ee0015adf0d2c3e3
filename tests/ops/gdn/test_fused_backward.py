"""chunk_gated_delta_rule with its backward pass in the fused stages, by autograd: packed sequences,
pieces, and sequences that go on from rank to rank.
"""

from itertools import pairwise

import pytest
import torch
from cp.cp_checks import compare, draw, on_one, on_rank
from gdn_checks import check, cotangents, exact, fused_backward, holds, inputs, run, same_bits

from linattn_edu.cp import simulate

pytestmark = pytest.mark.usefixtures("poison")
IMPLS = ("reference", "triton")
# shorter than a chunk, of one, of several, with a rest; and some without tokens
LENGTHS = (15, 0, 32, 1, 35, 0)
WHOLE = torch.float16 if torch.cuda.is_available() else torch.float32  # on a GPU of 16 bits alone
impls = pytest.mark.parametrize("impl", IMPLS)
# ranks against one in float64: every gradient, those of the gate are the worst
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def fused(*args, **options):
    """`run`, with the backward pass in the fused stages."""
    with fused_backward():
        return run(*args, **options)


def drawn(lengths, dtype, device, H=1, HV=2, **kinds):
    """(arguments, do, dht, cu_seqlens) of packed sequences with a state each."""
    N = len(lengths)
    x = inputs(1, sum(lengths), H, HV, 24, 40, dtype, device, N=N, **kinds)
    if x["q"].is_cuda and not holds(x["q"], x["v"]):
        pytest.skip("a GPU whose kernels these are not")
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    return x, *cotangents(x, N), bounds


def alone(x, n, tokens):
    """Sequence n of tensors by name: states by their first axis, others by their tokens."""
    names = ("ht", "initial_state", "dinitial_state")
    return {m: t[n : n + 1] if m in names else t[:, tokens] for m, t in x.items()}


@impls
@pytest.mark.parametrize(("H", "dtype"), [(1, WHOLE), (2, torch.bfloat16)], ids=str)
def test_packed_sequences(H, dtype, impl, device):
    """Against the recurrence in float64; and the same bits as each by itself."""
    x, do, dht, bounds = drawn(LENGTHS, dtype, device, H)
    options = {"output_final_state": True, "impl": impl, "chunk_size": 16}
    got = fused(x, do, dht, cu_seqlens=bounds, **options)
    # of so few tokens a sum that nearly cancels may be most of dg
    few = {} if dtype == torch.float32 else {"dg": 4e-2}
    check(got, exact(x, do, dht, cu_seqlens=bounds), dtype, **few)
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        if b > a:
            tokens, last = slice(a, b), dht[n : n + 1]
            want = fused(alone(x, n, tokens), do[:, tokens], last, **options)
            same_bits(alone(got, n, tokens), want)
        else:  # the gradient of the state goes through
            assert torch.equal(got["dinitial_state"][n], dht[n])


@impls
def test_without_states(impl, device):
    x, do, _, bounds = drawn((15, 0, 40), WHOLE, device, state=False)
    got = fused(x, do, None, cu_seqlens=bounds, impl=impl, chunk_size=16)
    check(got, exact(x, do, None, cu_seqlens=bounds), WHOLE)


@impls
def test_the_gate_of_a_layer(impl, device):
    """Its parameters have gradients of all sequences."""
    x, do, dht, bounds = drawn(LENGTHS, WHOLE, device, raw_gate=True)
    options = {"cu_seqlens": bounds, "use_gate_in_kernel": True}
    want = exact(x, do, dht, **options)
    options |= {"output_final_state": True, "chunk_size": 16}
    check(fused(x, do, dht, impl=impl, **options), want, WHOLE)


@pytest.mark.parametrize("lengths", [(64,), (15, 0, 70, 1)], ids=str)
def test_pieces(lengths, force, device):
    """Sequences of 64 tokens and more in pieces of 32."""
    force(LENGTH=32, LEAST=2, MULTIPROCESSORS=1)
    x, do, dht, bounds = drawn(lengths, WHOLE, device, norm=16)  # a state that is not forgotten
    options = {"output_final_state": True, "impl": "triton", "chunk_size": 16}
    options |= {"cu_seqlens": bounds} if len(lengths) > 1 else {}
    want = exact(x, do, dht, cu_seqlens=bounds)
    check(fused(x, do, dht, **options), want, WHOLE)


# one sequence; several, one without tokens, some shorter than a chunk, one over all cuts
BOUNDS = ([0, 100], [0, 10, 10, 37, 38, 90, 100], [0, 3, 97, 100])
layouts = pytest.mark.parametrize("layout", ["contiguous", "zigzag"])


def check_ranks(bounds, world, operator="gdn", B=1, **options):
    """Simulated ranks against one in float64, whose backward pass is in stages."""
    dtype, device = options.pop("dtype", torch.float64), options.pop("device", "cpu")
    f, *tensors = draw(operator, bounds, B, dtype=dtype, device=device)
    tokens, shared, *rest = tensors
    if tokens["q"].is_cuda and not holds(tokens["q"], tokens["v"]):
        pytest.skip("a GPU whose kernels these are not")
    with fused_backward():
        parts = simulate(world, lambda group: on_rank((f, *tensors), bounds, group, B, **options))
    wide = [{n: t.double() for n, t in x.items()} for x in (tokens, shared)]
    whole = on_one((f, *wide, *(x.double() for x in rest)), bounds, B, impl="reference")
    compare(whole, parts, shared, TOLERANCES[dtype])


@layouts
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks(world, layout):
    for bounds in BOUNDS:
        check_ranks(bounds, world, layout=layout)
    check_ranks(BOUNDS[1], world, "gdn_raw", layout=layout)
    check_ranks([0, 37], world, B=2, layout=layout)


@pytest.mark.parametrize(
    ("world", "layout", "dtype"), [(3, "contiguous", WHOLE), (2, "zigzag", torch.bfloat16)], ids=str
)
def test_ranks_with_kernels(world, layout, dtype, device):
    options = {"impl": "triton", "dtype": dtype, "device": device, "layout": layout}
    check_ranks([0, 10, 11, 70, 76, 80], world, **options)
