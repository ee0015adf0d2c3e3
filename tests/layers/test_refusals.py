"""What a layer refuses, and that nothing has been written then."""

import math

import pytest
import torch
from layers.layer_checks import HIDDEN, MAIN, hidden, make

from linattn_edu.cp import build_cp_context
from linattn_edu.layers import (
    EMA,
    RWKV7,
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    RMSNormGated,
    ShortConvolution,
)

each_class = pytest.mark.parametrize("kind", MAIN)


def begun(kind, B=2):
    """A layer, hidden states, and a cache that holds tokens."""
    layer, x = make(kind), hidden(B, 6)
    with torch.no_grad():
        cache = layer.make_cache(B)
        layer(x, cache=cache)
    return layer, x, cache


def refused(layer, cache, error, match, /, *args, **kwargs):
    before = [state.clone() for state in cache.states]
    with pytest.raises(error, match=match), torch.no_grad():
        layer(*args, **kwargs)
    assert all(map(torch.equal, cache.states, before))


@each_class
def test_a_cache_that_does_not_fit(kind):
    layer, x, cache = begun(kind)
    other = make("ema" if kind == "gdn" else "gdn")
    refused(layer, cache, TypeError, "cache must come from", x, cache=cache.states)
    refused(layer, cache, ValueError, "of 3 sequences", hidden(3, 6), cache=cache)
    refused(layer, cache, ValueError, "of 1 seq", x[:1, :1], cache=cache)
    refused(other, cache, ValueError, f"cache must be of a {type(other).__name__}", x, cache=cache)
    single = make(kind, torch.float32)
    refused(single, cache, TypeError, "cache must have a state in torch.float32", x.float(),
            cache=cache)  # fmt: skip
    cu_seqlens = torch.tensor([0, 1, 3, 6])
    refused(layer, cache, ValueError, "of 3 sequences", x[:1], cache=cache, cu_seqlens=cu_seqlens)
    context = build_cp_context(torch.tensor([0, 6]))
    refused(layer, cache, ValueError, "None with cp_context", x, cache=cache, cp_context=context)


def test_a_cache_of_a_layer_of_other_sizes():
    _, x, cache = begun("gdn")
    wider = GatedDeltaNet(HIDDEN, head_dim=8, num_heads=2, num_v_heads=4, dtype=torch.float64)
    refused(wider, cache, ValueError, "of a layer of these sizes", x, cache=cache)
    bare = GatedDeltaNet(HIDDEN, head_dim=8, num_heads=2, use_short_conv=False, dtype=torch.float64)
    refused(bare, cache, ValueError, "must have 1 states, got 4", x, cache=cache)


@each_class
def test_boundaries_that_do_not_fit(kind):
    layer, x, cache = begun(kind)
    for bounds, match in (
        ([0, 2, 7], "end at T=6 or before"),
        ([1, 2, 6], "begin with 0"),
        ([0, 7, 6], "decr"),
    ):
        given = {"cu_seqlens": torch.tensor(bounds), "cache": cache}
        refused(layer, cache, ValueError, match, x[:1], **given)
    for mode in ("chunk", "fused_recurrent"):  # which does not take it
        layer.mode = mode
        bounds = {"cu_seqlens": torch.tensor([0, 2, 6]), "cu_seqlens_cpu": torch.tensor([0, 3, 6])}
        refused(
            layer, cache, ValueError, "cu_seqlens_cpu must be cu_s", x[:1], cache=cache, **bounds
        )
    refused(layer, cache, ValueError, "B = 1", x, cu_seqlens=torch.tensor([0, 2, 6]), cache=cache)


@each_class
def test_a_mask_that_is_not_left_padding(kind):
    layer, x, cache = begun(kind)
    right = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    refused(layer, cache, ValueError, "zero after a one in row 0", x, right)
    late = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    refused(layer, cache, ValueError, "row 1, whose cache holds", x, late, cache)
    refused(layer, cache, ValueError, "zeros and ones", x, 2 * late)
    refused(layer, cache, ValueError, r"shape \(2, 6\)", x, late[:, 1:])
    refused(layer, cache, TypeError, "attention_mask must be a tensor", x, late.tolist())
    bounds = torch.tensor([0, 6])
    for some in ({"cu_seqlens": bounds}, {"cp_context": build_cp_context(bounds)}):
        refused(layer, cache, ValueError, "must be ones alone with cu_seqlens or cp_context", x[:1],
                late[1:], **some)  # fmt: skip
        with torch.no_grad():
            assert torch.equal(layer(x[:1], late[:1] | 1, **some), layer(x[:1], **some))


@each_class
def test_other_arguments(kind):
    layer, x, cache = begun(kind)
    refused(layer, cache, ValueError, "x must have shape", x[..., 1:], cache=cache)
    refused(layer, cache, ValueError, "x must have 3 dimensions", x[0], cache=cache)
    refused(layer, cache, TypeError, "unexpected keyword", x, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="cache must be None in a transform"):
        torch.func.grad(lambda x: layer(x, cache=cache).sum())(x)
    for size, error in ((0, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="batch_size"):
            layer.make_cache(size)
    with pytest.raises(TypeError, match="dtype"):
        layer.make_cache(1, dtype=torch.int32)


@each_class
def test_a_state_dict_that_does_not_fit(kind):
    layer = make(kind)
    before = {n: x.clone() for n, x in layer.state_dict().items()}
    name = {"mamba2": "out_proj.weight"}.get(kind, "o_proj.weight")  # loaded last
    given = {n: x + 1 for n, x in before.items()}
    shorter = {n: x[:-1] if n == name else x for n, x in given.items()}
    missing = {n: x for n, x in given.items() if n != name}
    more = given | {"q_proj.bias": torch.zeros(3)}
    for state, match in (
        (shorter, f"{name} must have shape"), (missing, f"{name} is missing"),
        (more, "q_proj.bias is unknown"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            layer.load_state_dict(state)
        assert all(torch.equal(x, before[n]) for n, x in layer.state_dict().items())
    model = torch.nn.Sequential(layer)
    with pytest.raises(ValueError, match=f"0.{name} must have shape"):
        model.load_state_dict({f"0.{n}": x for n, x in shorter.items()}, strict=False)
    layer.load_state_dict(missing, strict=False)
    assert torch.equal(layer.state_dict()[name], before[name])
    assert all(torch.equal(layer.state_dict()[n], x) for n, x in missing.items())


@pytest.mark.parametrize(
    "cls, arguments, match",
    [
        (GatedDeltaNet, {"num_heads": 4, "num_v_heads": 6}, "num_v_heads must be a multiple"),
        (GatedDeltaNet, {"num_heads": 4, "num_v_heads": 2}, "num_v_heads must be a multiple"),
        (GatedDeltaNet, {"head_dim": 6, "expand_v": 1.3}, "expand_v must make"),
        (GatedDeltaNet, {"head_dim": 6.0}, "head_dim must be an integer"),
        (GatedDeltaNet, {"head_dim": 7, "expand_v": math.inf}, "expand_v must be finite"),
        (GatedDeltaNet, {"head_dim": 300}, "head_dim must be at most 256, got 300"),
        (GatedDeltaNet, {"head_dim": 256, "expand_v": 3}, "an integer from 1 to 512"),
        (GatedDeltaNet, {"conv_size": 9}, "conv_size must be at most 8, got 9"),
        (GatedDeltaNet, {"norm_eps": -1e-5}, "eps must be >= 0"),
        (GatedDeltaNet, {"mode": "parallel"}, "mode must be one of"),
        (GatedDeltaNet, {"impl": "cuda"}, "impl must be one of"),
        (GatedDeltaNet, {"output_gate_activation": "relu"}, "activation must be"),
        (KimiDeltaAttention, {"safe_gate": True}, "safe_gate needs lower_bound"),
        (KimiDeltaAttention, {"safe_gate": True, "lower_bound": -6.0}, "safe_gate needs"),
        (KimiDeltaAttention, {"lower_bound": 0.0}, "lower_bound must be < 0"),
        (Mamba2, {"d_model": 24, "headdim": 7}, "headdim must divide d_ssm=48"),
        (Mamba2, {"d_model": 24, "headdim": 8, "d_ssm": 56}, "d_ssm must be in 1 to"),
        (Mamba2, {"d_model": 24, "headdim": 8, "ngroups": 4}, "ngroups must divide the 6"),
        (Mamba2, {"d_model": 24, "headdim": 8, "A_init_range": (0, 1)}, "A_init_range must be"),
        (Mamba2, {"d_model": 24, "headdim": 0}, "headdim must be an integer >= 1, got 0"),
        (Mamba2, {"d_model": 24, "headdim": 8, "d_state": 300}, "d_state must be at most 256"),
        (Mamba2, {"d_model": 24, "headdim": 8, "chunk_size": 0}, "chunk_size must be at least 1"),
        (Mamba2, {"d_model": 24, "headdim": 8, "dt_limit": (1, 0)}, "dt_limit must be"),
        (Mamba2, {"d_model": 24, "headdim": 8, "dt_min": 0}, "dt_min must be > 0"),
        (Mamba2, {"d_model": 24, "headdim": 8, "dt_init_floor": -1}, "dt_init_floor must be >= 0"),
        (Mamba2, {"d_model": 24, "headdim": 8, "process_group": 1}, "process_group is not"),
        (RWKV7, {"hidden_size": 24, "head_dim": 7}, "head_dim must divide hidden_size=24, got 7"),
        (RWKV7, {"hidden_size": 1024, "head_dim": 1024}, "head_dim must be at most 512"),
        (RWKV7, {"head_dim": None}, "num_heads must be given where head_dim is None"),
        (RWKV7, {"head_dim": None, "num_heads": 5}, "num_heads must divide hidden_size=1024"),
        (RWKV7, {"num_heads": 8}, "num_heads must be 16 for head_dim=64, or None, got 8"),
        (RWKV7, {"value_dim": 1000}, "value_dim must be a multiple of the 16 heads"),
        (RWKV7, {"value_dim": 2**14}, "value_dim must be at most 8192"),
        (RWKV7, {"a_low_rank_dim": 0}, "a_low_rank_dim must be an integer >= 1"),
        (RWKV7, {"layer_idx": 3, "num_hidden_layers": 3}, "layer_idx must be below num_hidden"),
        (RWKV7, {"layer_idx": -1}, "layer_idx must be an integer >= 0 or None, got -1"),
        (RWKV7, {"norm_eps": -1.0}, "norm_eps must be >= 0"),
        (RWKV7, {"mode": "parallel"}, "mode must be one of"),
        (EMA, {"hidden_size": 9, "num_heads": 2}, "num_heads must divide"),
        (EMA, {"hidden_size": 8, "memory": (1.0, 4.0)}, "memory must be"),
        (EMA, {"hidden_size": -8, "num_heads": 2}, "hidden_size must be an integer >= 1"),
        (ShortConvolution, {"hidden_size": 8, "kernel_size": 9}, "kernel_size must be at most 8"),
        (
            ShortConvolution,
            {"hidden_size": 8, "kernel_size": 4, "activation": "relu"},
            "activation",
        ),
        (RMSNormGated, {"hidden_size": 8, "group_size": 3}, "group_size must divide"),
    ],
)
def test_sizes_that_do_not_fit(cls, arguments, match):
    with pytest.raises(ValueError, match=match), torch.device("meta"):
        cls(**arguments)


@pytest.mark.parametrize("wrong", [None, "4"])
def test_numbers_that_are_none(wrong):
    got = "None" if wrong is None else "str"
    with pytest.raises(TypeError, match=f"expand_v must be a number.*got {got}"):
        GatedDeltaNet(8, head_dim=4, num_heads=1, expand_v=wrong)
    with pytest.raises(TypeError, match=f"dt_init_floor must be a number.*got {got}"):
        Mamba2(24, headdim=8, dt_init_floor=wrong)


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="num_head"):
        GatedDeltaNet(8, head_dim=4, num_head=2)


def test_every_ratio_of_head_sizes_makes_a_layer():
    """Seven times 61 / 7 is less than 61."""
    layer = GatedDeltaNet(8, head_dim=7, expand_v=61 / 7, num_heads=1)
    assert layer.head_v_dim == 61


@each_class
def test_rows_that_are_not_the_cache_s(kind):
    _, _, cache = begun(kind)
    before = [state.clone() for state in cache.states]
    for rows, error, match in (
        ([0], ValueError, r"shape \[N=2\], got \(1,\)"), (0, ValueError, "shape"),
        ([0, 2], ValueError, "from 0 to 1"), ([0, -1], ValueError, "from 0 to 1"),
        ([0.0, 1.0], TypeError, "rows must be a tensor of int32"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            cache.reorder(torch.tensor(rows))
        assert all(map(torch.equal, cache.states, before))
    cache.reorder(torch.tensor([1, 0], dtype=torch.int32))
    assert all(torch.equal(x, y.flip(0)) for x, y in zip(cache.states, before, strict=True))


def test_a_cache_with_gaps_is_refused_before_a_state_is_written():
    layer, x, cache = begun("gdn", 4)
    cache.conv_states = tuple(state[::2] for state in cache.conv_states)
    cache.recurrent_state = cache.recurrent_state[::2]
    refused(layer, cache, ValueError, "contiguous", x[:2, :1], cache=cache)


def test_a_state_dict_of_buffers_and_of_no_tensors():
    layer = make("gdn")
    with pytest.raises(ValueError, match="A_log must be a tensor, got list"):
        layer.load_state_dict(layer.state_dict() | {"A_log": [0.0] * 4})
    layer.register_buffer("scale", torch.zeros(3))
    layer.load_state_dict(layer.state_dict() | {"scale": torch.ones(3)})
    assert layer.scale.sum() == 3


def test_the_mask_of_a_convolution():
    conv, x = ShortConvolution(HIDDEN, 4, impl="reference").double(), hidden(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    y, _ = conv(x.masked_fill(mask[..., None] == 0, torch.nan), mask=mask)
    assert torch.equal(y[:, 2:], conv(x[:, 2:])[0])
    for wrong in (mask[0], mask[:1], mask[:, 1:]):
        with pytest.raises(ValueError, match=r"mask must have shape \(2, 6\)"):
            conv(x, mask=wrong)
