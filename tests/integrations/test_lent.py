"""What enable() lends: every name that public files of models import, and what it computes."""

import pytest
import torch
import torch.nn.functional as F
from integrations.test_transformers import run

import linattn_edu
from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.cp.context import get_cp_cu_seqlens
from linattn_edu.integrations import convolutions, naive, norms, padding
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

DELTA = "from fla.ops.gated_delta_rule import {}, {}".format(
    "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
)
KDA = "from fla.ops.kda import chunk_kda, fused_recurrent_kda"
GATE = "from fla.ops.kda.gate import fused_kda_gate"
UNPAD = "from fla.layers.utils import get_unpad_data, index_first_axis, pad_input"
MASKS = "from fla.ops.utils.index import prepare_cu_seqlens_from_mask, prepare_lens_from_mask"
GATED = "from fla.modules import FusedRMSNormGated, ShortConvolution"
SSD = "from mamba_ssm.ops.triton.ssd_combined import {}, {}".format(
    "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"
)
STEP = "from mamba_ssm.ops.triton.selective_state_update import selective_state_update"
CONV = "from causal_conv1d import causal_conv1d_fn, causal_conv1d_update"
VARLEN = "from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states"
MAMBA = (SSD, STEP, CONV)
# Public file -> what it imports from the three packages. Files of transformers from 5.15 on import
# nothing: test_enable runs them.
FILES = {
    "Kimi-Linear": (UNPAD, GATED, KDA, GATE),
    "Kimi-Linear, unpadding by itself": (
        GATED, KDA, GATE, MASKS, "from fla.utils import tensor_cache",
    ),
    "Nemotron-H": (*MAMBA, "from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn"),
    "Qwen3-Next, transformers 4.57": (CONV, DELTA, "from fla.modules import FusedRMSNormGated"),
    "Mamba-2, Bamba, Falcon-H1, Granite, Zamba2, transformers 4.57": MAMBA,
    "Mamba-2 of mamba_ssm": (
        *MAMBA, VARLEN,
        "from mamba_ssm.ops.triton.layernorm_gated import RMSNorm as RMSNormGated",
        "from mamba_ssm.ops.triton.layernorm_gated import LayerNorm, layernorm_fn",
    ),
    "GatedDeltaNet of fla": (
        UNPAD, DELTA, "from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution",
        "from fla.layers.utils import get_layer_cache, unpad_input, update_layer_cache",
    ),
    "GatedDeltaNet of NVlabs": (
        DELTA, "from fla.modules import FusedRMSNormSwishGate, RMSNorm, ShortConvolution",
        "from fla.modules.l2norm import l2norm",
    ),
    "GDN in Megatron": (
        DELTA, "from fla.modules.convolution import causal_conv1d",
        "from fla.modules.l2norm import l2norm", "from fla.ops.cp import build_cp_context",
        "from fla.ops.utils.index import prepare_chunk_indices, prepare_chunk_offsets",
    ),
    "GDN in OLMo-core": (
        UNPAD, DELTA, "from fla.modules.convolution import causal_conv1d, causal_conv1d_update",
    ),
    "layers of fla": (
        "from fla.layers import GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention",
        "from fla.layers.gated_deltanet import GatedDeltaNet",
        "from fla.layers.kda import KimiDeltaAttention",
        "from fla.layers.gdn2 import GatedDeltaNet2",
        "from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2",
        "from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule",
        "from fla.ops.gated_delta_product import chunk_gated_delta_product",
        "from fla.ops.simple_gla import fused_recurrent_simple_gla",
        "from fla.ops.lightning_attn import fused_recurrent_lightning_attn",
        "from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule",
        "from fla.ops.generalized_delta_rule.dplr.fused_recurrent import"
        " fused_recurrent_dplr_delta_rule",
        "from fla.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7",
        "from fla.ops.rwkv7.fused_recurrent import fused_mul_recurrent_rwkv7",
        "from fla.ops import chunk_gated_delta_product, chunk_rwkv7",
    ),
    "layer of mamba_ssm": ("from mamba_ssm.modules.mamba2 import Mamba2",),
    "tests of fla": (
        "from fla.ops.gated_delta_rule.gate import fused_gdn_gate, naive_gdn_gate",
        "from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule",
        "from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule",
        "from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda",
        "from fla.ops.delta_rule.naive import delta_rule_chunkwise, delta_rule_recurrence",
        "from fla.ops.gated_delta_product.chunk_ref import chunk_gated_delta_product_ref",
        "from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product",
        "from fla.ops.gdn2.naive import naive_recurrent_gdn2",
        "from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise, dplr_recurrence",
        "from fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla",
        "from fla.ops.simple_gla.naive import naive_recurrent_simple_gla",
        "from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate",
        "from fla.ops.utils import chunk_local_cumsum, chunk_global_cumsum, solve_tril",
        "from fla.ops.utils.solve_tril import solve_tril",
        "from fla.ops.cp import FLACPContext, get_cp_cu_seqlens",
        "from fla.modules import FusedLayerNormGated, FusedLayerNormSwishGateLinear",
        "from fla.modules import FusedRMSNormSwishGateLinear, L2Norm",
    ),
    "tests of causal_conv1d": (
        "from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update",
        VARLEN,
    ),
}  # fmt: skip


def test_every_import_of_a_public_file():
    """One program for all; each name is ours, and so is each on another impl."""
    code = f"""
import functools
FILES = {FILES!r}
from linattn_edu.integrations.transformers import disable, enable
for impl in ("auto", "reference"):
    enable(impl=impl)
    for file, imports in FILES.items():
        found = {{}}
        for line in imports:
            exec(line, found)
        for name, x in found.items():
            function = x.func if isinstance(x, functools.partial) else x
            if name != "__builtins__":
                ours = function.__mro__ if isinstance(function, type) else (function,)
                assert any(o.__module__.startswith("linattn_edu.") for o in ours), (file, name)
    from fla.modules import FusedRMSNormGated, ShortConvolution
    for module in (FusedRMSNormGated(8), ShortConvolution(8, 4)):
        assert module.impl == impl and type(module).__name__ in ("FusedRMSNormGated",
                                                                "ShortConvolution")
    assert ShortConvolution(8, 4, impl="triton").impl == "triton"
    disable()
print(len(FILES))
"""
    assert int(run(code)) == len(FILES)


def norm_of(kind, x, w, b, z, eps, group=None, before=True, act=F.silu):
    """In PyTorch: kind "rms" or "layer"."""
    v = x if before or z is None else x * act(z)
    parts = v.unflatten(-1, (-1, group or v.shape[-1]))
    parts = parts - parts.mean(-1, keepdim=True) if kind == "layer" else parts
    y = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y * (1 if w is None else w) + (0 if b is None else b)
    return y * act(z) if before and z is not None else y


def passes(f, *tensors):
    """The output and gradients of tensors that are given."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = f(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
    return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("group", (None, 6))
@pytest.mark.parametrize("before", (True, False))
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_gated_norms_of_mamba(kind, before, group, dtype):
    f = {"rms": norms.rmsnorm_fn, "layer": norms.layernorm_fn}[kind]
    draw = torch.Generator().manual_seed(0)
    x, z = (torch.randn(3, 12, generator=draw).to(dtype) for _ in range(2))
    w, b = (torch.randn(12, generator=draw) for _ in range(2))
    for given in ((x + 3, w, b, z), (x, w, None, None)):
        got = passes(lambda *t: f(*t, 1e-3, group, before), *given)
        double = [t if t is None else t.double() for t in given]
        want = passes(lambda *t: norm_of(kind, *t, 1e-3, group, before), *double)
        assert got[0].dtype == dtype
        for y, exact in zip(got, want, strict=True):
            assert_close("norm", y, exact, 2e-6 if dtype == torch.float32 else 1e-2)
    module = (norms.RMSNorm if kind == "rms" else norms.LayerNorm)(12, 1e-3, group, before)
    assert sorted(module.state_dict()) == ["bias"] * (kind == "layer") + ["weight"]
    want = norm_of(kind, x.double(), 1, None, z.double(), 1e-3, group, before)
    assert_close("module", module(x.float(), z.float()), want, 1e-5)


@pytest.mark.parametrize("activation", ("swish", "sigmoid"))
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_gated_norms_of_fla(kind, activation):
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    draw = torch.Generator().manual_seed(0)
    x, g, r = (torch.randn(3, 12, generator=draw) for _ in range(3))
    norm = (norms.FusedRMSNormGated if kind == "rms" else norms.FusedLayerNormGated)(
        12, activation=activation, eps=1e-3
    )
    torch.nn.init.normal_(norm.weight)
    w = norm.weight.detach().double()
    want = norm_of(kind, x + r.double(), w, None, g, 1e-3, act=act)
    y, total = norm(x, g, residual=r, prenorm=True)
    assert_close("y", y, want, 1e-5)
    assert torch.equal(total, x + r) and torch.equal(norm(x, g=g, residual=r), y)
    assert norm(x.half(), g.half(), None, True, True)[1].dtype == torch.float32
    with pytest.raises(ValueError, match="residual must have x's shape"):
        norm(x, g, r[0])
    linear = norms.FusedRMSNormSwishGateLinear if kind == "rms" else (
        norms.FusedLayerNormSwishGateLinear
    )  # fmt: skip
    module, matrix, bias = linear(12, eps=1e-3), torch.randn(5, 12), torch.randn(5)
    want = F.linear(norm_of(kind, x + r.double(), 1, None, g, 1e-3), matrix.double(), bias.double())
    out, total = module(x, g, matrix, bias, r, True)
    assert_close("linear", out, want, 1e-5)
    assert torch.equal(total, x + r)


def test_norm_of_fla_without_a_gate():
    x, norm = torch.randn(3, 12), norms.FlaRMSNorm(12, bias=True, eps=1e-3)
    torch.nn.init.normal_(norm.bias)
    want = norm_of("rms", x.double(), 1, norm.bias.detach(), None, 1e-3)
    assert_close("y", norm(x), want, 1e-5)
    assert sorted(norm.state_dict()) == ["bias", "weight"]


@pytest.mark.parametrize("shape", ((3, 6), (3, 1, 6), (1, 3, 6), (3, 1, 2, 3)))
def test_one_token_as_fla_has_it(shape):
    draw = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=draw) for _ in range(2))
    cache, weight = torch.randn(3, 6, 4, generator=draw), torch.randn(6, 4, generator=draw)
    other = cache.clone()
    bias, w = torch.randn(6), weight.requires_grad_()
    y, same = convolutions.causal_conv1d_update(x, cache, residual, w, bias, "swish")
    with torch.no_grad():
        want = linattn_edu.causal_conv1d_update(x.reshape(3, 6), other, w, bias, "swish")
    assert same is cache and torch.equal(cache, other)
    assert_close("y", y, want.view(shape) + residual, 1e-6)
    for changes, error, match in (
        ({"weight": None}, TypeError, "weight must be a torch.Tensor"),
        ({"residual": residual[:1, ..., :1]}, ValueError, "residual must have x's shape"),
        ({"x": x[..., :2].contiguous(), "residual": None}, ValueError, "channels like weight|have"),
    ):
        given = {"x": x, "cache": cache, "residual": residual, "weight": w} | changes
        with pytest.raises(error, match=match):
            convolutions.causal_conv1d_update(**given)


def test_convolution_as_fla_is_called():
    """Heads and channels apart, a backend of its own, keywords that nobody knows."""
    x, weight = torch.randn(2, 9, 2, 3), torch.randn(6, 4)
    y, state = convolutions.causal_conv1d(
        x, weight, residual=x, output_final_state=True, activation="silu", backend="cuda", extra=1
    )
    want, last = linattn_edu.causal_conv1d(
        x.flatten(2), weight, residual=x.flatten(2), output_final_state=True, activation="silu"
    )
    assert torch.equal(y, want.view(x.shape)) and torch.equal(state, last)


def test_what_the_tests_of_fla_compare_with():
    """By position, in the order of theirs; in PyTorch."""
    x, k = gdn_inputs(1, 40, 2, 2, 8, 6), kda_inputs(1, 40, 2, 2, 8, 6)
    state = torch.randn(1, 2, 8, 6)
    for i, f, own, order in (
        (x, naive.naive_chunk_gated_delta_rule, linattn_edu.chunk_gated_delta_rule,
         (32, 0.5, state, True)),
        (k, naive.naive_chunk_kda, linattn_edu.chunk_kda, (0.5, state, True, 32)),
    ):  # fmt: skip
        got = f(i.q, i.k, i.v, i.g, i.beta, *order)
        want = own(i.q, i.k, i.v, i.g, i.beta, 0.5, state, True, chunk_size=32, impl="reference")
        assert all(map(torch.equal, got, want))
    g, A_log, bias = torch.randn(2, 3, 4), torch.randn(4), torch.randn(4)
    want = -A_log.double().exp() * F.softplus(g.double() + bias)
    assert_close("gdn", naive.naive_gdn_gate(g, A_log, bias), want, 1e-6)
    a = A_log[:3, None].double().exp() * (g.double() + bias)
    got = naive.naive_kda_lowerbound_gate(g, A_log[:3], bias.repeat(3))
    assert_close("kda", got, -5 * torch.sigmoid(a), 1e-6)


def test_states_of_packed_sequences():
    x, bounds = torch.randn(9, 3), torch.tensor([0, 1, 1, 7, 9], dtype=torch.int32)
    for length in (1, 3, 4):
        states = convolutions.causal_conv1d_varlen_states(x, bounds, length)
        for n, (a, b) in enumerate(((0, 1), (1, 1), (1, 7), (7, 9))):
            want = F.pad(x[a:b].mT, (length, 0))[:, -length:]
            assert torch.equal(states[n], want)
    empty = convolutions.causal_conv1d_varlen_states(x[:0], 0 * bounds, 3)
    assert empty.shape == (4, 3, 3) and not empty.any()


def test_padding_is_taken_out_and_put_back():
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    indices, bounds, longest = padding.get_unpad_data(mask)
    assert bounds.tolist() == [0, 3, 8, 9] and bounds.dtype == torch.int32 and longest == 5
    rows = padding.index_first_axis(x.flatten(0, 1), indices)
    assert torch.equal(rows, x[mask.bool()])
    back = padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand_as(x).float())
    q, (k,), at, _, most = padding.unpad_input(x, (x,), mask, 5, keepdim=True)
    assert torch.equal(at, indices)
    assert torch.equal(q[0], rows) and torch.equal(k, q) and most == (5, 5)
    q, _, _, both, most = padding.unpad_input(x[:, -1:], (x,), mask, 1)
    assert torch.equal(q, x[:, -1]) and both[0].tolist() == [0, 1, 2, 3] and most == (1, 5)
    with pytest.raises(ValueError, match="q_len must be 1 or 5, got 2"):
        padding.unpad_input(x[:, :2], (x,), mask, 2)
    assert padding.prepare_sequence_ids(bounds).tolist() == [0] * 3 + [1] * 5 + [2]
    assert padding.prepare_position_ids(bounds).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert padding.prepare_chunk_offsets(bounds, 4).tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_what_any_rank_would_hold(layout):
    bounds = torch.tensor([0, 5, 5, 29])
    of_ranks = simulate(3, lambda group: build_cp_context(bounds, group, 4, layout=layout))
    for rank, want in enumerate(of_ranks):
        got = get_cp_cu_seqlens(bounds, None, 3, rank, None, 4, True, layout)
        assert (got.parts, got.documents, got.first) == (want.parts, want.documents, want.first)
        assert torch.equal(got.cu_seqlens, want.cu_seqlens) and got.num_seqs == want.num_seqs
        assert got.pre_num_conv_tokens == want.pre_num_conv_tokens
        x = {n: torch.zeros(1, got.tokens, 3) for n in "x"}
        with pytest.raises(ValueError, match=f"rank {rank} of 3 must have a group"):
            linattn_edu.causal_conv1d(**x, weight=torch.zeros(3, 4), cp_context=got)
    for world, rank, match in ((3, None, "together"), (3, 3, "from 0 to 2"), (0, 0, "world_size")):
        with pytest.raises(ValueError, match=match):
            get_cp_cu_seqlens(bounds, None, world, rank)
    with pytest.raises(ValueError, match="use_tf32x3_affine_chain is not supported"):
        get_cp_cu_seqlens(bounds, None, 3, 0, use_tf32x3_affine_chain=False)
    with pytest.raises(ValueError, match="cu_seqlens_cpu must be cu_seqlens"):
        build_cp_context(bounds, cu_seqlens_cpu=torch.tensor([0, 6, 6, 29]))
