"""What a training code relies on, of the chunked operators; their own tests have the rest."""

from types import SimpleNamespace

import gdn_checks
import kda_checks
import pytest
import torch
from gdn_checks import cotangents, exact, same_bits
from torch.utils.checkpoint import checkpoint

from linattn_edu import chunk_gated_delta_rule, chunk_kda, mamba_chunk_scan_combined
from linattn_edu.testing import assert_close, ssd_inputs

pytestmark = pytest.mark.usefixtures("poison")

NAMES = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
C16 = {"chunk_size": 16}
FLAGS = (
    {},
    {"use_qk_l2norm_in_kernel": True},
    {"use_gate_in_kernel": True},
    {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"state_v_first": True},
)
BOUNDED = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
# function, its checks, a short sequence of more than a chunk, options
OPERATORS = {
    "gdn": (chunk_gated_delta_rule, gdn_checks, (1, 80, 1, 2, 24, 40), {}),
    "kda": (chunk_kda, kda_checks, (1, 20, 1, 2, 12, 8), C16),
    "kda, all kept": (
        chunk_kda,
        kda_checks,
        (1, 20, 1, 2, 12, 8),
        C16 | {"disable_recompute": True},
    ),
}
impls = pytest.mark.parametrize("impl", ["reference", "triton"])


@pytest.fixture(params=OPERATORS)
def op(request, device):
    f, checks, shape, options = OPERATORS[request.param]

    def small(dtype=torch.float32, **kinds):
        """(arguments, do, dht) of one short sequence."""
        x = checks.inputs(*shape, dtype, device, **kinds)
        return x, *cotangents(x)

    def run(x, do, dht, **others):
        return checks.run(x, do, dht, **options | others)

    return SimpleNamespace(f=f, checks=checks, options=options, small=small, run=run)


@pytest.mark.parametrize(
    ("name", "flags"),
    [*(("gdn", flags) for flags in FLAGS), *(("kda", flags) for flags in (*FLAGS, BOUNDED))],
    ids=str,
)
@pytest.mark.parametrize("C", [16, 64])
def test_reference_in_float64_equals_autograd_of_the_recurrence(C, name, flags):
    _, checks, *_ = OPERATORS[name]
    x = checks.inputs(
        2, 100, 2, 4, 12, 12, torch.float64,
        raw_qk="use_qk_l2norm_in_kernel" in flags, raw_gate="use_gate_in_kernel" in flags,
    )  # fmt: skip
    do, dht = cotangents(x)
    got = checks.run(x, do, dht, output_final_state=True, chunk_size=C, impl="reference", **flags)
    for result, want in exact(x, do, dht, **flags).items():
        assert_close(result, got[result], want, 1e-10)


@impls
def test_autocast_changes_nothing(impl, op, device):
    x, do, dht = op.small(raw_qk=True, raw_gate=True, raw_beta=True)
    options = dict.fromkeys((*NAMES, "output_final_state"), True) | {"impl": impl}
    want = op.run(x, do, dht, **options)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        same_bits(op.run(x, do, dht, **options), want)


@impls
@pytest.mark.parametrize("used", ["o", "ht"])
def test_only_one_output_is_used(used, impl, op):
    x, do, dht = op.small()
    zeros = (do, 0 * dht) if used == "o" else (0 * do, dht)
    given = (do, None) if used == "o" else (None, dht)
    got = op.run(x, *given, output_final_state=True, impl=impl)
    op.checks.check(got, exact(x, *zeros), torch.float32)


@impls
def test_without_a_state(impl, op):
    x, do, _ = op.small(state=False)
    got = op.run(x, do, None, impl=impl)
    assert "ht" not in got
    op.checks.check(got, exact(x, do, None), torch.float32)


@impls
@pytest.mark.parametrize("name", ["q", "initial_state", "A_log", "dt_bias"])
def test_one_tensor_alone_needs_a_gradient(name, impl, op):
    x, do, dht = op.small(raw_gate=True)
    options = {"output_final_state": True, "impl": impl, "use_gate_in_kernel": True}
    leaf = x[name].clone().requires_grad_()
    outputs = op.f(**x | {name: leaf}, **op.options, **options)
    (got,) = torch.autograd.grad(outputs, leaf, (do, dht))
    assert torch.equal(got, op.run(x, do, dht, **options)[f"d{name}"])


@impls
def test_gradients_that_are_not_contiguous(impl, op):
    """As sum().backward() and a transposed output give them."""
    x, do, dht = op.small()
    do = torch.ones((), device=do.device).expand(do.shape)
    dht = dht.mT.contiguous().mT
    options = {"output_final_state": True, "impl": impl}
    want = op.run(x, do.contiguous(), dht.contiguous(), **options)
    same_bits(op.run(x, do, dht, **options), want)


@impls
def test_arguments_and_their_gradients_are_left_alone(impl, op):
    x, do, dht = op.small(raw_gate=True)
    kept = {n: t.clone() for n, t in (x | {"do": do, "dht": dht}).items()}
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    options = {"output_final_state": True, "impl": impl, "use_gate_in_kernel": True}
    outputs = op.f(**leaves, **op.options, **options)
    torch.autograd.grad(outputs, list(leaves.values()), (do, dht))
    same_bits(x | {"do": do, "dht": dht}, kept)


@pytest.mark.parametrize("wide", ["g", "beta", "initial_state"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_the_dtypes_of_their_tensors(wide, dtype, op):
    x, do, dht = op.small(dtype)
    for name in ("g", "beta", "initial_state"):
        x[name] = x[name].to(torch.float32 if name == wide else dtype)
    got = op.run(x, do, dht, output_final_state=True, impl="triton")
    assert {n: got[f"d{n}"].dtype for n in x} == {n: t.dtype for n, t in x.items()}
    assert got["ht"].dtype == torch.float32
    op.checks.check(got, exact(x, do, dht), dtype)


@impls
def test_activation_checkpointing(impl, op):
    x, do, dht = op.small()

    def f(**arguments):
        return checkpoint(op.f, **arguments, use_reentrant=False)

    options = {"output_final_state": True, "impl": impl}
    same_bits(op.run(x, do, dht, f=f, **options), op.run(x, do, dht, **options))


@impls
def test_a_second_backward_pass_needs_retain_graph(impl, op):
    """The backward pass leaves what it reads as it was: dbeta is added to in place."""
    x, do, _ = op.small()
    leaves = [x[name].requires_grad_() for name in ("k", "beta")]
    o, _ = op.f(**x, impl=impl, **op.options)
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(o, leaves, do), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, leaves, do)


@impls
def test_gradients_of_gradients_are_refused(impl, op):
    x, do, _ = op.small()
    leaf = x["k"].requires_grad_()
    o, _ = op.f(**x, impl=impl, **op.options)
    (dk,) = torch.autograd.grad(o, leaf, do, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(dk.sum(), leaf)


def scan(dtype, device, impl):
    """(arguments that have gradients, Mamba-2 of them) of one short sequence with documents."""
    x = ssd_inputs(1, 40, 2, 1, 12, 8, dtype=dtype, device=device).asdict()
    seq_idx = x.pop("seq_idx")
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    options = {"chunk_size": 16, "dt_softplus": True, "return_final_states": True, "impl": impl}
    return leaves, lambda: mamba_chunk_scan_combined(**leaves, seq_idx=seq_idx, **options)


def both(f, leaves):
    """The outputs and the gradients of all arguments, from both outputs."""
    outputs = f()
    given = [torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y) for y in outputs]
    given = [d.to(y.dtype) for d, y in zip(given, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves.values(), given)]


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ssd_in_training(dtype, impl, device):
    """Autocast and activation checkpointing change nothing; a second gradient is refused."""
    leaves, f = scan(dtype, device, impl)
    want = both(f, leaves)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = both(f, leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got = both(lambda: checkpoint(f, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    (dx,) = torch.autograd.grad(f()[0].sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


@impls
def test_each_tensor_of_ssd_alone(impl, device):
    """Only one needs a gradient: the same bits as when all do."""
    leaves, f = scan(torch.float32, device, impl)
    want = dict(zip(leaves, both(f, leaves)[2:], strict=True))
    for name in ("x", "dt", "A", "D", "z", "dt_bias", "initial_states"):
        for n, t in leaves.items():
            t.requires_grad_(n == name)
        *_, got = both(f, {name: leaves[name]})
        assert torch.equal(got, want[name]), name


def test_ssd_keeps_its_arguments_alone(device):
    """Between the passes: no states, no scores."""
    leaves, f = scan(torch.bfloat16, device, "triton")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        f()
    own = {t.untyped_storage().data_ptr() for t in leaves.values()}
    others = [t for t in kept if t.untyped_storage().data_ptr() not in own]
    small = leaves["initial_states"].numel() * 4
    assert all(t.numel() * t.element_size() <= small for t in others)
