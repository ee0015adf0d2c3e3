"""Gradients of the public function: against the float64 recurrence, and what a user relies on."""

import pytest
import torch
from gdn_checks import DTYPES, check, cotangents, exact, inputs, spacing, triton

from linattn_edu import chunk_gated_delta_rule

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
# the rows of fla's test_chunk: B, T, H, HV, D, scale, norm of the gate, share of open gates, l2norm
ROWS = (
    (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False),
    (2, 75, 4, 4, 64, 1, 0.01, 0, False),
    (2, 500, 3, 3, 60, 1, 1, 0, False),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False),
    (2, 256, 2, 4, 64, 1, 1, 0, False),
    (2, 512, 2, 8, 64, 1, 0.1, 0, True),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
)
# B, T, H, HV, D; heads enough for an error of A_log and dt_bias, which have one number each
GATE_ROWS = (
    (1, 63, 1, 6, 24),
    (2, 500, 6, 6, 60),
    (2, 1000, 3, 6, 64),
    (3, 1024, 8, 8, 100),
    (4, 1024, 4, 8, 128),
    (4, 2048, 2, 8, 64),
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def fit(B, T, H, HV):
    """The shape itself on a GPU; in the interpreter one q/k head and as much of T as two chunks."""
    if GPU:
        return B, T, H, HV
    return 1, T if T < 100 else 64 + (T % 64 or 20), 1, min(2, HV // H)


def check_row(shape, dtype, device, *, scale=None, chunk_size=64, flags=None, **kinds):
    x = inputs(*shape, dtype, device, **kinds)
    do, dht = cotangents(x)
    flags = flags or {}
    want = exact(x, do, dht, scale=scale, **flags)
    got = triton(x, do, dht, scale=scale, chunk_size=chunk_size, **flags)
    check(got, want, dtype, dg=0 if flags.get("use_gate_in_kernel") else spacing(x["g"]))


@dtypes
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_fla_s_grid(row, dtype, device):
    B, T, H, HV, D, scale, norm, mask, l2norm = row
    check_row(
        (*fit(B, T, H, HV), D, D), dtype, device, scale=scale, norm=norm, mask=mask, raw_qk=l2norm,
        flags={"use_qk_l2norm_in_kernel": l2norm},
    )  # fmt: skip


@dtypes
@pytest.mark.parametrize("row", GATE_ROWS if GPU else GATE_ROWS[:1], ids=str)
def test_the_gate_of_a_layer(row, dtype, device):
    *shape, D = row
    flags = {"use_gate_in_kernel": True}
    check_row((*shape, D, D), dtype, device, raw_gate=True, flags=flags)


@dtypes
@pytest.mark.parametrize("C", [16, 32, 64])
def test_chunk_sizes(C, dtype, device):
    shape = (4, 1000, 2, 4, 32, 32) if GPU else (1, C + 6, 1, 2, 32, 32)
    check_row(shape, dtype, device, chunk_size=C)


@dtypes
@pytest.mark.parametrize(
    ("T", "K", "V"), [(70, 256, 256), (65, 16, 100), (100, 128, 33), (70, 24, 40), (9, 3, 2)]
)
def test_head_sizes(T, K, V, dtype, device):
    shape = (2, 10 * T, 2, 4) if GPU else (1, T, 1, 1 if K > 100 else 2)
    check_row((*shape, K, V), dtype, device)


@dtypes
@pytest.mark.parametrize("negative", [False, True])
def test_beta_before_its_sigmoid(negative, dtype, device):
    flags = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
    shape = (2, 1000, 2, 4, 64, 64) if GPU else (1, 40, 1, 2, 24, 40)
    check_row(shape, dtype, device, raw_beta=True, flags=flags)


@pytest.mark.parametrize("raw", [False, True], ids=["plain", "flags"])
def test_gradcheck(raw):
    x = inputs(1, 18, 1, 2, 2, 2, torch.float64, raw_qk=raw, raw_beta=raw, raw_gate=raw)
    names = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
    options = {"output_final_state": True, "chunk_size": 16, "impl": "reference"}
    options |= dict.fromkeys(names, raw)

    def f(*tensors):
        return chunk_gated_delta_rule(**dict(zip(x, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in x.values()], fast_mode=raw)
