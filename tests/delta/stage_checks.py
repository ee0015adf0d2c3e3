"""The grid and the tolerances every stage of the delta rule is held to."""

import itertools
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from grids import FULL, name, usual
from torch.overrides import TorchFunctionMode

from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.output_bwd import output_bwd
from linattn_edu.reference.delta.solve import solve
from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.reference.delta.wy import wy
from linattn_edu.testing import assert_close, gdn_inputs, relative_rms

INTERPRETED = (1, 15, 63, 64, 65, 100, 129)  # the last: two chunks of 64 and a token
COMPILED = (1, 15, 63, 64, 65, 100, 257)  # so many that loads are ahead of their products
TOKENS = COMPILED if FULL or torch.cuda.is_available() else INTERPRETED
DIMS = (16, 33, 64, 100, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNKS = (64, 32, 16)
# T, K, V, C, dtype of values wider than any tile that holds a head whole
WIDE = (
    (20, 33, 300, 16, torch.float32),
    (40, 64, 512, 32, torch.bfloat16),
    (18, 16, 512, 16, torch.float16),
)


def _grid():
    """Every T, K and dtype, on a GPU with two V each; or `grids.usual`, of V and C too."""
    if not FULL:
        return usual(T=TOKENS, K=DIMS, V=DIMS, C=CHUNKS, dtype=DTYPES)
    cases = itertools.product(enumerate(TOKENS), enumerate(DIMS), DTYPES, (0, 2))
    return [
        (T, K, DIMS[(a + b + c) % len(DIMS)], CHUNKS[(a + 2 * b + c) % len(CHUNKS)], dtype)
        for (a, T), (b, K), dtype, c in cases
        if c == 0 or torch.cuda.is_available()
    ]


SIZES = ("T", "K", "V", "C", "dtype")
grid = pytest.mark.parametrize(SIZES, [*_grid(), *WIDE], ids=name)


def inputs(T, K, V, dtype, device, **kwargs):
    """Two value heads on each q/k head, with an initial state; a new draw for every shape.

    Short sequences come in a batch, with two q/k heads: the rounding error of a handful of numbers
    is no yardstick.
    """
    seed = hash((T, K, V)) % 2**31
    H = 2 if T < 16 else 1
    return gdn_inputs(
        max(1, (256 if torch.cuda.is_available() else 4) // (H * T)),
        T,
        H,
        2 * H,
        K,
        V,
        dtype=dtype,
        device=device,
        seed=seed,
        initial_state=True,
        **kwargs,
    )


def backward_inputs(T, K, V, C, dtype, device, H=1):
    """(inputs, everything the stages of the backward pass read), by the reference stages."""
    x = inputs(T, K, V, dtype, device) if H == 1 else gdn_inputs(
        2, T, H, H, K, V, dtype=dtype, device=device, initial_state=True
    )  # fmt: skip
    options = {"chunk_size": C}
    r = SimpleNamespace(do=torch.randn_like(x.v), dht=torch.randn_like(x.initial_state))
    r.gc, r.A = gate_cumsum(x.g, **options), solve(x.k, x.beta, **options)
    r.w, r.u = wy(x.k, x.v, x.beta, r.gc, r.A)
    r.h, r.v_new, _ = state(x.k, r.w, r.u, r.gc, x.initial_state, **options)
    options["scale"] = 0.3
    _, r.dk_out, r.dv_out, r.dgc_out = output_bwd(x.q, x.k, r.v_new, r.h, r.gc, r.do, **options)
    r.dh, r.dv_new, _ = state_bwd(x.q, x.k, r.w, r.gc, r.do, r.dv_out, r.dht, **options)
    return x, r


def check_stage(kernel, reference, args, rounds=False, **options):
    """Kernel against reference on the same arguments.

    fp32: relative RMS <= 5e-6. fp16 and bf16: error against float64 at most twice the rounding
    error of the reference run in that dtype, the largest over the stage's outputs, since an fp32
    output of rounded operands cannot be closer than these; or, where a kernel `rounds` the operands
    of its products, half the dtype's epsilon.
    """
    wide = [x.double() if is_real(x) else x for x in args]
    got, low = outputs(kernel(*args, **options)), outputs(reference(*args, **options))
    exact = outputs(reference(*wide, **options))
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in low]
    half = next((x.dtype for x in args if is_real(x) and x.element_size() == 2), None)
    budget = 2 * max(relative_rms(x, ref) for x, ref in zip(low, exact, strict=True))
    if rounds and half:
        budget = max(budget, torch.finfo(half).eps / 2)
    for i, (x, y, ref) in enumerate(zip(got, low, exact, strict=True)):
        if half:
            assert_close(f"output {i}", x, ref, budget)
        else:
            assert_close(f"output {i}", x, y, 5e-6)


BOUNDS = (0, 40, 40, 41, 150)  # of packed sequences: one is empty, one ends inside a chunk of 16


def of_sequences(f, *tokens):
    """f of each packed sequence by itself, one after the other."""
    own = [slice(a, b) for a, b in pairwise(BOUNDS) if a < b]
    return torch.cat([f(*(t[:1, i] for t in tokens)) for i in own], 1)


def check_packed(run, tokens, chunks=(), states=()):
    """Packed sequences have the bits that they have alone, each with states of its own.

    run(tokens, chunks, states, **packed) -> three tuples, of tokens, chunks and states. tokens
    [B, 150, ...]; chunks [1, NT, ...] of all sequences; states [B, ...]: of each the first.
    """
    tokens = [t[:1] for t in tokens]
    states = [torch.cat([n * t[:1] for n in range(1, len(BOUNDS))]) for t in states]
    packing = pack(torch.tensor(BOUNDS, device=tokens[0].device), 16)
    together, first = run(tokens, chunks, states, packing=packing), 0
    for n, (a, b) in enumerate(pairwise(BOUNDS)):
        if a == b:  # what comes in goes through
            assert all(torch.equal(x[n], states[-1][n]) for x in together[2])
            continue
        of = slice(first, first := first - (a - b) // 16)
        own = [t[:, a:b].contiguous() for t in tokens], [t[:, of].contiguous() for t in chunks]
        alone = run(*own, [t[n : n + 1] for t in states])
        found = [t[:, a:b] for t in together[0]], [t[:, of] for t in together[1]]
        for got, want in zip((*found, [t[n : n + 1] for t in together[2]]), alone, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), n


def is_real(x):
    """Whether x is a tensor of numbers that may be rounded, not of counts."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


class RoundedOperands(TorchFunctionMode):
    """Meanwhile each matrix product rounds its operands, as it must for tensor cores of `dtype`."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = [x.to(self.dtype).to(x.dtype) for x in args]
        return func(*args, **(kwargs or {}))


def check_rounded(kernel, reference, args, factor, **options):
    """As check_stage where outputs are fp32, which the reference, in 16 bits, does not round, or
    where operands are rounded one after the other.

    The error against float64 is at most `factor` times that of the reference in float64 whose
    products round their operands, its outputs rounded as the kernel's: a kernel can do without none
    of these roundings, and rounds nothing else but the order of its sums.
    """
    wide = [x.double() if is_real(x) else x for x in args]
    exact = outputs(reference(*wide, **options))
    dtypes = [x.dtype for x in outputs(reference(*args, **options))]
    with RoundedOperands(args[0].dtype):
        rounded = outputs(reference(*wide, **options))
    found = outputs(kernel(*args, **options))
    assert [x.dtype for x in found] == dtypes
    for i, (got, low, ref) in enumerate(zip(found, rounded, exact, strict=True)):
        half, low = args[0].dtype != torch.float32, low.to(got.dtype)
        assert_close(f"output {i}", got, ref, factor * relative_rms(low, ref) if half else 5e-6)


def outputs(result):
    return tuple(x for x in (result if isinstance(result, tuple) else (result,)) if x is not None)
