"""Arguments as callers of flash-linear-attention give them: what is accepted, and what it means."""

import inspect

import numpy as np
import pytest
import torch
from gdn_checks import inputs
from grids import parametrize
from ops.calls import CALLS, call
from recurrent_cases import TOLERANCE, case, check_all, cotangents, double, oracle, run

from linattn_edu import (
    chunk_gated_delta_rule,
    chunk_global_cumsum,
    chunk_kda,
    chunk_local_cumsum,
    fused_gdn_gate,
    fused_kda_gate,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    kda_decay,
    kernel_delta_attention,
    l2norm,
    rms_norm_gated,
    solve_tril,
)
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

IMPLS = ("reference", "triton")
GDN = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
KDA = (chunk_kda, fused_recurrent_kda)
FORMS = (*GDN, *KDA)
forms = pytest.mark.parametrize("f", FORMS, ids=lambda f: f.__name__)
impls = pytest.mark.parametrize("impl", IMPLS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAW = {"use_gate_in_kernel": True}


def arguments(f, T=5, H=1, HV=2, K=6, V=4, device=DEVICE, *, raw=False, **kinds):
    """Tensors of a call by name; raw: the parameters of a gate, too."""
    make = gdn_inputs if f in GDN else kda_inputs
    x = make(1, T, H, HV, K, V, device=device, initial_state=True, **kinds).asdict()
    if raw:
        generator = torch.Generator(device).manual_seed(3)
        x["A_log"] = torch.randn(HV, generator=generator, device=device)
        x["dt_bias"] = torch.randn(x["g"].shape[2:], generator=generator, device=device)
    return x


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


FLAGS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "transpose_state_layout",
    "inplace_final_state", "safe_gate", "disable_recompute", "return_intermediate_states",
)  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
@forms
def test_flags_may_be_written_as_numbers(f, flag):
    """None and 0 are False, 1 is True: fla's layers pass `use_cache: bool | None`."""
    if flag not in inspect.signature(f).parameters:
        return
    x = arguments(f, V=6, raw=flag == "use_gate_in_kernel")
    others = {"use_beta_sigmoid_in_kernel": True} if flag == "allow_neg_eigval" else {}
    results = {}
    for value in (False, True, None, 0, 1):
        given = x | {"initial_state": x["initial_state"].clone()}
        if flag == "use_gate_in_kernel" and not value:
            del given["A_log"], given["dt_bias"]
        if flag == "transpose_state_layout" and value is not None:
            with pytest.warns(DeprecationWarning):
                results[str(value)] = f(**given, **{flag: value}, impl="reference")
        else:
            results[str(value)] = f(**given, **others, **{flag: value}, impl="reference")
    for value, meaning in (("None", "False"), ("0", "False"), ("1", "True")):
        same(results[value], results[meaning])


def test_flags_of_the_other_functions():
    x = gdn_inputs(1, 5, 2, 2, 6, 4)
    given = (x.q, x.k, x.v, x.beta, x.g)
    for name in ("use_qk_l2norm", "use_chunked"):
        for values in ((False, None, 0), (True, 1)):
            first, *others = (kernel_delta_attention(*given, **{name: y}) for y in values)
            for other in others:
                same(other, first)
    for sums in (lambda r: chunk_local_cumsum(x.g, 4, r), lambda r: chunk_global_cumsum(x.g, r)):
        assert torch.equal(sums(None), sums(False)) and torch.equal(sums(1), sums(True))
        assert not torch.equal(sums(1), sums(0))


@forms
def test_the_default_values_of_fla_are_taken(f):
    x = arguments(f)
    given = {"cp_context": None}
    if f is chunk_kda:
        given |= {"use_graph": False, "max_num_seqs": None}
    same(f(**x, **given), f(**x))


SHAPES = ((1, 1, 2), (2, 6)), ((2, 1), (1, 1, 12)), ((1, 1, 2, 1), (12,)), ((2,), (3, 2, 2))


@parametrize(f=FORMS, impl=IMPLS, shapes=SHAPES)
def test_parameters_of_a_gate_in_any_shape(f, impl, shapes):
    """Results and gradients have the bits, and each gradient the shape of what was given."""
    x = arguments(f, raw=True)
    if f in GDN:
        shapes = (shapes[0], (1, *shapes[0]))
    reshaped = dict(zip(("A_log", "dt_bias"), shapes, strict=True))
    other = x | {n: x[n].reshape(shape) for n, shape in reshaped.items()}
    options = RAW | {"output_final_state": True, "impl": impl}
    with torch.no_grad():
        same(f(**other, **options), f(**x, **options))
    got, want = (run(f, y, **options) for y in (other, x))
    same(got[0], want[0])
    for n, dx in got[1].items():
        assert dx.shape == other[n].shape
        assert torch.equal(dx.reshape(want[1][n].shape), want[1][n]), n


def test_gates_take_parameters_in_any_shape():
    g, A_log, dt_bias = torch.randn(2, 3, 2, 4), torch.randn(2), torch.randn(2, 4)
    want = fused_kda_gate(g, A_log, dt_bias)
    assert torch.equal(fused_kda_gate(g, A_log.view(1, 1, 2, 1), dt_bias.flatten()), want)
    want = fused_gdn_gate(g[..., 0], A_log, dt_bias[:, 0])
    assert torch.equal(fused_gdn_gate(g[..., 0], A_log[None], dt_bias[:, :1]), want)


@pytest.mark.parametrize(
    "scale", [np.float32(0.25), np.float64(0.25), np.int64(2), torch.tensor(0.25), 2], ids=repr
)
@forms
def test_scales(f, scale):
    x = arguments(f)
    same(f(**x, scale=scale), f(**x, scale=float(scale)))


@pytest.mark.parametrize("scale", [torch.ones(1), torch.tensor(1j), np.ones(2), "1"], ids=repr)
def test_scales_that_are_no_number(scale):
    with pytest.raises(TypeError, match="scale must be a number or None, got"):
        fused_recurrent_gated_delta_rule(**arguments(FORMS[1]), scale=scale)
    with pytest.raises(ValueError, match="scale must be finite, got inf"):
        fused_recurrent_gated_delta_rule(**arguments(FORMS[1]), scale=torch.tensor(torch.inf))


# q and k, then v: the dtype they are computed in is the one that holds both
MIXTURES = (
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@impls
@pytest.mark.parametrize("f", (GDN[1], KDA[1]), ids=lambda f: f.__name__)
def test_q_and_k_of_another_dtype_than_v(f, impl, dtypes, device):
    """The rounding of o to v's dtype is all that is lost."""
    if impl == "triton" and torch.float64 in dtypes:
        return
    of_keys, of_values = dtypes
    gates = "gk" if f in KDA else "g"
    x = {n: t for n, t in case(5, device=device, gates=gates).items() if t is not None}
    x |= {n: x[n].to(of_keys) for n in ("q", "k")} | {"v": x["v"].to(of_values)}
    options = {"output_final_state": True, "impl": impl}
    want = run(oracle, double(x))
    if f in KDA:
        x["g"] = x.pop("gk")
        want[1]["g"] = want[1].pop("gk")
    got = run(f, x, cotangents(want[0]), **options)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    assert [y.dtype for y in got[0]] == [of_values, wide]
    assert all(dx.dtype == x[n].dtype for n, dx in got[1].items())
    check_all(got, want, next((t for t in dtypes if t.itemsize == 2), torch.float32))
    assert_close("final_state", got[0][1], want[0][1], 1e-5)
    with torch.no_grad():
        o, S = f(**x, **options)
    assert [o.dtype, S.dtype] == [of_values, wide]
    assert_close("o", o, want[0][0], TOLERANCE[of_values][0])
    assert_close("S", S, want[0][1], 1e-5)


@pytest.mark.parametrize("f", (GDN[1], KDA[1]), ids=lambda f: f.__name__)
@impls
def test_mixed_dtypes_in_place(f, impl):
    x = arguments(f)
    x["v"] = x["v"].half()
    want, S = f(**x, output_final_state=True, impl=impl)
    o, state = f(**x, inplace_final_state=True, impl=impl)
    assert state is x["initial_state"] and o.dtype == torch.float16
    assert torch.equal(o, want) and torch.equal(state, S)


WIDE = [(f, sizes) for f in FORMS for sizes in ((6, 300), (6, 512), (256, 20))]
WIDE += [(f, (512, 20)) for f in (GDN[1], KDA[1])]


@parametrize(1, case=WIDE, impl=IMPLS)
def test_wide_heads(case, impl, device):
    """fla's GatedDeltaNet and its models default to head_dim 256 and expand_v 2."""
    f, sizes = case
    x = arguments(f, 3, 1, 1, *sizes, device=device)
    tensors = {"gk" if f in KDA and n == "g" else n: t for n, t in x.items()}
    want = run(oracle, double(tensors))
    if f in KDA:
        want[1]["g"] = want[1].pop("gk")
    got = run(f, x, cotangents(want[0]), output_final_state=True, impl=impl)
    check_all(got, want, torch.float32)


@impls
@pytest.mark.parametrize("f", (GDN[1], KDA[1]), ids=lambda f: f.__name__)
def test_no_tokens_in_place(f, impl):
    x = arguments(f, 0)
    before = x["initial_state"].clone()
    o, S = f(**x, inplace_final_state=True, impl=impl)
    assert not o.numel() and S is x["initial_state"] and torch.equal(S, before)
    o, S = f(
        **x, inplace_final_state=True, impl=impl,
        ssm_state_indices=torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    assert not o.numel() and S is x["initial_state"] and torch.equal(S, before)


HELPERS = {
    "l2norm": (l2norm, (2, 0, 4)),
    "l2norm of no rows": (l2norm, (0, 4)),
    "rms_norm_gated": (lambda x, impl: rms_norm_gated(x, z=x, impl=impl), (2, 0, 4)),
    "solve_tril": (solve_tril, (1, 0, 2, 16)),
    "chunk_local_cumsum": (lambda x, impl: chunk_local_cumsum(x, 16, impl=impl), (1, 0, 2)),
    "chunk_global_cumsum": (lambda x, impl: chunk_global_cumsum(x, impl=impl), (1, 0, 2, 3)),
    "fused_gdn_gate": (lambda x, impl: fused_gdn_gate(x, x.new_zeros(2), impl=impl), (3, 0, 2)),
    "fused_kda_gate": (lambda x, impl: fused_kda_gate(x, x.new_zeros(2), impl=impl), (0, 2, 4)),
    "kda_decay": (lambda x, impl: kda_decay(x, x.new_zeros(2), x.new_zeros(2)), (1, 0, 2)),
}


@pytest.mark.parametrize("name", HELPERS)
@impls
def test_no_tokens_elsewhere(name, impl):
    f, shape = HELPERS[name]
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    y = f(x, impl=impl)
    assert y.shape == shape
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == shape


@pytest.mark.parametrize("chunked", [False, True])
def test_no_tokens_in_kernel_delta_attention(chunked):
    x = inputs(2, 0, 2, 2, 6, 4, torch.float32)
    o, S = kernel_delta_attention(
        x["q"], x["k"], x["v"], x["beta"], x["g"], initial_state=x["initial_state"],
        use_chunked=chunked,
    )  # fmt: skip
    assert o.shape == (2, 0, 2, 4) and torch.equal(S, x["initial_state"])


STRANGE = {
    "nested": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.strided),
    "jagged": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_that_are_not_dense_are_refused_by_name(name, kind):
    f, x, options = call(name)
    for n, t in x.items():
        if t.is_floating_point():
            with pytest.raises(TypeError, match=rf"^{n} must be a dense tensor, got"):
                f(**x | {n: STRANGE[kind](t.cpu())}, **options)  # of mkldnn: no others


@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_numbers_of_sequences_that_are_not_dense_are_refused_by_name(kind):
    x, bounds = arguments(chunk_kda), {"cu_seqlens": torch.tensor([0, 5], device=DEVICE)}
    for n, numbers in (
        ("cu_seqlens", [0, 5]),
        ("cu_seqlens_cpu", [0, 5]),
        ("chunk_indices", [[0, 0]]),
    ):
        device = "cpu" if n == "cu_seqlens_cpu" else DEVICE
        strange = {n: STRANGE[kind](torch.tensor(numbers, device=device))}
        with pytest.raises(TypeError, match=rf"^{n} must be a dense tensor, got"):
            chunk_kda(**x, **bounds | strange)
    slots = {"ssm_state_indices": [[0]], "num_accepted_tokens": [1]}
    slots = {n: torch.tensor(numbers, device=DEVICE) for n, numbers in slots.items()}
    for n, numbers in slots.items():
        strange = slots | {n: STRANGE[kind](numbers)}
        with pytest.raises(TypeError, match=rf"^{n} must be a dense tensor, got"):
            fused_recurrent_kda(**x, **strange, inplace_final_state=True)


@impls
@forms
def test_the_default_device_is_not_asked(f, impl):
    """What a function makes on its way lies where its tensors are."""
    x, bounds = arguments(f), torch.tensor([0, 2, 2, 5], device=DEVICE)
    x["initial_state"] = torch.randn(3, 2, 6, 4, device=DEVICE)
    options = {"cu_seqlens": bounds, "output_final_state": True, "impl": impl}
    want = run(f, x, **options)
    d_outputs = [torch.ones_like(y) for y in want[0]]
    want = run(f, x, d_outputs, **options)
    with torch.device("meta"):
        got = run(f, x, d_outputs, **options)
    same([*got[0], *got[1].values()], [*want[0], *want[1].values()])


@impls
def test_the_default_device_is_not_asked_elsewhere(impl):
    g, A = -torch.rand(1, 9, 2, device=DEVICE), torch.randn(1, 9, 2, 16, device=DEVICE) / 4
    bounds = torch.tensor([0, 4, 9], device=DEVICE)
    calls = (
        lambda: chunk_local_cumsum(g, 4, cu_seqlens=bounds, impl=impl),
        lambda: chunk_global_cumsum(g, cu_seqlens=bounds, impl=impl),
        lambda: solve_tril(A, cu_seqlens=bounds, impl=impl),
        lambda: l2norm(A, impl=impl),
        lambda: fused_gdn_gate(g, A[0, 0, :, 0], impl=impl),
    )
    for work in calls:
        want = work()
        with torch.device("meta"):
            assert torch.equal(work(), want)
