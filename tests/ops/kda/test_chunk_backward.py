"""Gradients of chunk_kda: against the float64 recurrence, and what a user relies on."""

import itertools

import pytest
import torch
from gdn_checks import DTYPES, cotangents, exact, same_bits
from kda_checks import check, inputs, run, spacing, tolerance, triton

from linattn_edu import chunk_kda
from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

GPU = torch.cuda.is_available()
IMPLS = ("reference", "triton")
# the rows of fla's test_chunk: B, T, H, HV, D, scale, norm of the gate, share of open gates,
# l2norm, gate of a layer, safe gate, disable_recompute, chunk_size
ROWS = (
    (1, 63, 1, 1, 64, 1, 1, 0, False, False, True, False, 64),
    (2, 500, 3, 3, 60, 1, 1, 0, False, False, True, True, 64),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, False, False, False, 64),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, False, True, 64),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, True, False, 64),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, False, False, True, False, 64),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True, False, False, False, 64),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, False, False, 64),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, True, True, 64),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False, True, True, False, 64),
    (2, 1024, 2, 4, 64, 1, 1, 0, False, False, True, False, 64),
    (2, 1024, 2, 8, 64, 0.1, 1, 0, True, True, False, False, 64),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False, True, True, False, 64),
    (2, 160, 2, 4, 64, 1, 1, 0, False, False, False, False, 32),
    (2, 160, 2, 4, 64, 1, 1, 0, True, True, True, True, 32),
    (2, 1024, 2, 8, 128, 0.1, 1, 0, False, True, False, False, 64),
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def turns(*values):
    """Every combination with every dtype on a GPU; the interpreter takes dtypes in turns."""
    every = list(itertools.product(*values))
    return [
        (*case, dtype)
        for n, case in enumerate(every)
        for dtype in (DTYPES if GPU else (DTYPES[n % len(DTYPES)],))
    ]


def fit(B, T, H, HV, D):
    """The shape itself on a GPU; in the interpreter one q/k head, two chunks, narrow heads."""
    return (B, T, H, HV, D) if GPU else (1, 17 + T % 13, 1, min(2, HV // H), D // 4 - 1)


def check_row(shape, dtype, device, *, scale=None, flags=None, at_least=0.0, kinds=None, **options):
    """Both passes against float64; flags mean something to the recurrence, options do not."""
    x = inputs(*shape, dtype, device, **(kinds or {}))
    do, dht = cotangents(x)
    flags = flags or {}
    want = exact(x, do, dht, scale=scale, **flags)
    options |= flags | {"chunk_size": options.get("chunk_size", 64 if GPU else 16)}
    got = triton(x, do, dht, scale=scale, **options)
    raw = flags.get("use_gate_in_kernel")
    dg = 0 if raw else spacing(x["g"], options["chunk_size"])
    check(got, want, dtype, at_least, dg=dg)


@pytest.mark.parametrize(("row", "dtype"), turns(ROWS), ids=str)
def test_fla_s_grid(row, dtype, device):
    *shape, scale, norm, mask, l2norm, gate, safe, keep, C = row
    *shape, D = fit(*shape)
    flags = {"use_qk_l2norm_in_kernel": l2norm, "use_gate_in_kernel": gate, "safe_gate": safe}
    if gate and safe:
        flags["lower_bound"] = -5.0
    check_row(
        (*shape, D, D), dtype, device, scale=scale, flags=flags,
        kinds={"norm": norm, "mask": mask, "raw_qk": l2norm, "raw_gate": gate, "safe": safe},
        disable_recompute=keep, chunk_size=C if GPU else min(C, 32),
    )  # fmt: skip


@pytest.mark.parametrize(("shut", "dtype"), turns((0.1, 0.5, 0.9)), ids=str)
def test_gates_shut_here_and_there(shut, dtype, device):
    """g = -1000 for some tokens and channels. A shut gate costs the later decays of its chunk the
    digits of the sum that it adds 150 to: in float32 that is the error, of every result.
    """
    shape, C = ((2, 1000, 4, 4, 64, 64), 64) if GPU else ((1, 40, 1, 1, 20, 24), 32)
    x = inputs(*shape, dtype, device, shut=shut)
    at_least = spacing(x["g"], C)
    assert at_least < 5e-4
    check_row(shape, dtype, device, kinds={"shut": shut}, at_least=at_least, chunk_size=C)


@pytest.mark.parametrize(
    ("T", "D", "dtype"),
    [
        (T, D, dtype)
        for T in (1, 63, 500, 1024, 1500)
        for D in (60, 64, 100, 128, 256)
        for dtype in DTYPES
    ]
    + [(8192, 128, dtype) for dtype in DTYPES]
    if GPU
    else [(1, 60, DTYPES[1]), (9, 256, DTYPES[0]), (9, 128, DTYPES[2]), (17, 64, DTYPES[0])],
    ids=str,
)
@pytest.mark.parametrize("safe", [False, True] if GPU else [True])
def test_sizes(T, D, dtype, safe, device):
    heads = (1, 2) if T > 1500 else (2, 4) if GPU else (1, 1)
    shape = (1 if T > 1500 or not GPU else 2, T, *heads, D, D)
    check_row(shape, dtype, device, kinds={"safe": safe}, flags={"safe_gate": safe})


@pytest.mark.parametrize(("K", "V", "dtype"), turns((2, 33), (3, 40)), ids=str)
def test_head_sizes_that_differ(K, V, dtype, device):
    shape = (2, 300, 2, 4, K, V) if GPU else (1, 20, 1, 2, K, V)
    check_row(shape, dtype, device)


KINDS = (
    (("A_log", "dt_bias"), None),
    (("A_log",), None),
    (("A_log", "dt_bias"), -5.0),
    (("dt_bias",), -1.0),
    ((), -8.0),
)


@pytest.mark.parametrize(("kind", "dtype"), turns(KINDS), ids=str)
def test_the_gate_of_a_layer(kind, dtype, device):
    """With heads enough for an error of A_log, which has one number each."""
    parameters, bound = kind
    shape = (2, 500, 4, 8, 64, 64) if GPU else (1, 17, 1, 3, 8, 8)
    safe = bound is not None and bound >= -5
    flags = {"use_gate_in_kernel": True, "lower_bound": bound, "safe_gate": safe}
    check_row(shape, dtype, device, flags=flags, kinds={"raw_gate": True, "parameters": parameters})


@pytest.mark.parametrize(("C", "dtype"), turns((16, 32, 64)), ids=str)
def test_chunk_sizes(C, dtype, device):
    shape = (4, 1000, 2, 4, 32, 32) if GPU else (1, C + 3, 1, 1, 16, 16)
    check_row(shape, dtype, device, chunk_size=C)


@pytest.mark.parametrize(("negative", "dtype"), turns((False, True)), ids=str)
def test_beta_before_its_sigmoid(negative, dtype, device):
    flags = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
    shape = (2, 1000, 2, 4, 64, 64) if GPU else (1, 20, 1, 2, 12, 8)
    check_row(shape, dtype, device, kinds={"raw_beta": True}, flags=flags)


def small(dtype, device, **kinds):
    """(arguments, do, dht) of one short sequence: two chunks of 16."""
    x = inputs(1, 20, 1, 2 if GPU else 1, 12, 8, dtype, device, **kinds)
    return x, *cotangents(x)


C16 = {"chunk_size": 16}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[::2], ids=str)
def test_what_is_kept_changes_no_bit(dtype, impl, device, force):
    x, do, dht = small(dtype, device, raw_gate=True)
    options = {"use_gate_in_kernel": True, "output_final_state": True, "impl": impl, **C16}
    got, want = (run(x, do, dht, disable_recompute=keep, **options) for keep in (True, False))
    if impl == "triton" and dtype != torch.float32:  # fused stages, which keep nothing else
        for name, y in got.items():
            assert_close(name, y, want[name].double(), tolerance(name, dtype))
        force(kda_forward_stages="staged", kda_backward_stages="staged")
        want = run(x, do, dht, **options)
        # either backward pass follows the fused forward pass, which leaves the same P and A
        force(kda_forward_stages="fused", kda_backward_stages="staged")
        same_bits(run(x, do, dht, **options), want, "o", "ht")
    # o is made by another stage, of the same products only in the kernels and in 16 bit
    o = ("o",) if impl == "reference" or dtype == torch.float32 else ()
    same_bits(got, want, *o)
    assert_close("o", got["o"], want["o"].double(), tolerance("o", dtype))


@dtypes
def test_the_promise_changes_no_bit_in_fp16(dtype, device):
    """In bf16 and fp32 other products for the rows that decay beyond 2^-80 in their block; the
    gradients are within the tolerance (fla's grid).
    """
    x, do, dht = small(dtype, device, safe=True)
    x["g"][..., ::2] = -5
    got, want = (triton(x, do, dht, safe_gate=safe, **C16) for safe in (True, False))
    if dtype == torch.float16:
        same_bits(got, want)
    else:
        assert not torch.equal(got["o"], want["o"])


@pytest.mark.parametrize("shut", [0.1, 0.9])
def test_reference_with_shut_gates(shut):
    x = inputs(1, 70, 1, 2, 12, 8, torch.float64, shut=shut)
    do, dht = cotangents(x)
    got = run(x, do, dht, output_final_state=True, impl="reference")
    for name, want in exact(x, do, dht).items():
        assert_close(name, got[name], want, 1e-10)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("raw", [None, "softplus", "bounded"])
def test_gradcheck(raw, keep):
    flags = dict.fromkeys(("raw_qk", "raw_beta", "raw_gate"), raw is not None)
    x = inputs(1, 18, 1, 2, 2, 2, torch.float64, **flags)
    names = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
    options = {"output_final_state": True, "chunk_size": 16, "impl": "reference"}
    options |= dict.fromkeys(names, raw is not None) | {"disable_recompute": keep}
    if raw == "bounded":
        options["lower_bound"] = -5.0

    def f(*tensors):
        return chunk_kda(**dict(zip(x, tensors, strict=True)), **options)

    leaves = [t.requires_grad_() for t in x.values()]
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_gradient_through_the_intermediate_states(impl, device):
    x, _, _ = small(torch.float32, device)
    for keep in (False, True):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        options = {"return_intermediate_states": True, "disable_recompute": keep}
        o, _, h = chunk_kda(**leaves, **options, impl=impl, **C16)
        assert o.requires_grad and not h.requires_grad
