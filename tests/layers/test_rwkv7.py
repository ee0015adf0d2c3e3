"""RWKV-7's layer where it is not as the others: v of the first layer, and the first numbers."""

import itertools
import math

import pytest
import torch
from layers.layer_checks import hidden, make, plain

from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.layers import RWKV7
from linattn_edu.testing import assert_close

T = 37


def of(layer, y, dy, *more):
    names = dict(layer.named_parameters())
    found = torch.autograd.grad(y, [*more, *names.values()], dy)
    return dict(zip([*map(str, range(len(more))), *names], found, strict=True))


def test_two_layers_are_plain_pytorch(device):
    """v of the first, and every gradient, which goes through it too."""
    first, second = make("rwkv7", device=device), make("rwkv7_later", device=device)
    x, dy = hidden(2, T, device=device).requires_grad_(), hidden(2, T, device=device, seed=2)
    stack, results = torch.nn.ModuleList([first, second]), []
    y, v = first(x, return_v_first=True)
    z, again = second(y, v_first=v, return_v_first=True)
    assert again is v and torch.equal(first(x), y)
    results.append({"y": z} | of(stack, z, dy, x))
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    v = (x + first.x_v * (before - x)) @ first.v_proj.weight.T
    z = plain(second, plain(first, x), v)
    results.append({"y": z} | of(stack, z, dy, x))
    ours, exact = results
    for name, want in exact.items():
        assert_close(name, ours[name], want, 1e-10)


def test_kernels_are_the_reference(device, poison):
    x, v, dy = (hidden(1, 18, torch.float32, device, seed) for seed in (1, 2, 3))
    found = []
    for impl in ("reference", "triton"):
        layer = make("rwkv7_later", torch.float32, device, impl)
        own = [y.clone().requires_grad_() for y in (x, v)]
        y = layer(own[0], v_first=own[1])
        found.append({"y": y} | of(layer, y, dy, *own))
    for name, want in found[0].items():
        assert_close(name, found[1][name], want, 1e-5)


def test_v_of_the_first_layer_at_padding_is_not_read(device):
    layer, x, v = (
        make("rwkv7_later", device=device),
        hidden(2, T, device=device),
        hidden(2, T, seed=3),
    )
    v, mask = v.to(device), torch.ones(2, T, device=device)
    mask[1, :7], x[1, :7], v[1, :7] = 0, torch.nan, torch.nan
    v.requires_grad_()
    y = layer(x, mask, v_first=v)
    found = of(layer, y, torch.ones_like(y), v)
    alone = [layer(x[:1], v_first=v[:1]), layer(x[1:, 7:], v_first=v[1:, 7:])]
    assert_close("long", y[:1], alone[0], 1e-12)
    assert_close("short", y[1:, 7:], alone[1], 1e-12)
    for name, want in of(layer, sum(y.sum() for y in alone), None, v).items():
        assert_close(name, found[name], want, 1e-10)


def test_pieces_and_packed_sequences(device):
    layer = make("rwkv7_later", device=device)
    x, v = (hidden(1, T, device=device, seed=seed) for seed in (1, 3))
    bounds = [0, 9, 9, 10, T]
    packed = layer(x, cu_seqlens=torch.tensor(bounds, device=device), v_first=v)
    with torch.no_grad():
        for a, b in itertools.pairwise(bounds):
            cache, want = layer.make_cache(1), layer(x[:, a:b], v_first=v[:, a:b])
            assert_close("packed", packed[:, a:b], want, 1e-12) if b > a else None
            cuts = [a, a + (b - a) // 2, *range(max(a, b - 2), b), b]
            pieces = [
                layer(x[:, i:j], cache=cache, v_first=v[:, i:j])
                for i, j in itertools.pairwise(sorted(cuts))
            ]
            assert_close("pieces", torch.cat(pieces, 1), want, 1e-12) if b > a else None


def test_a_later_layer_over_ranks():
    """v of the first layer is that of the rank's own tokens; token by token there are no ranks."""
    first, later, x = make("rwkv7"), make("rwkv7_later"), hidden(1, T)
    bounds = torch.tensor([0, 9, T])

    def stack(x, **given):
        y, v = first(x, return_v_first=True, **given)
        return later(y, v_first=v, **given)

    def one(group):
        context = build_cp_context(bounds, group)
        begin, end = context.parts[0].tokens
        return stack(x[:, begin:end], cp_context=context)

    assert_close("y", torch.cat(simulate(3, one), 1), stack(x, cu_seqlens=bounds), 1e-12)
    first.mode = "fused_recurrent"
    with pytest.raises(ValueError, match="cp_context is not supported"):
        first(x, cp_context=build_cp_context(bounds))


def test_autocast(device):
    layer, x = make("rwkv7_later", torch.float32, device), hidden(2, T, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x.bfloat16(), v_first=x.bfloat16())
        assert y.dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"v_first must be torch\.bfloat16"):
            layer(x, v_first=x)
    assert_close("y", y, layer(x, v_first=x), 2e-2)


def test_a_v_that_does_not_fit():
    first, later, x = make("rwkv7"), make("rwkv7_later"), hidden(2, 6)
    for layer, v, error, match in (
        (first, x, ValueError, "v_first must be None in layer 0"),
        (later, None, ValueError, "in the layer with layer_idx=1, got None"),
        (later, x[:1], ValueError, r"v_first must have shape \[B=2, T=6, value_dim=24\]"),
        (later, x[..., 1:], ValueError, "v_first must have shape"),
        (later, x.float(), TypeError, "v_first must be torch.float64"),
        (later, 1.0, TypeError, "v_first must be"),
        (later, x.to("meta"), ValueError, "v_first must be on cpu"),
    ):
        cache = layer.make_cache(2)
        with pytest.raises(error, match=match):
            layer(x, cache=cache, v_first=v)
        assert not any(state.any() for state in cache.states)
    with pytest.raises(TypeError, match="return_v_first"):
        first(x, return_v_first="yes")


def test_first_numbers():
    """Of each channel, with fla's constants; modules may be reset in any order."""
    D, K, L, at = 32, 8, 6, 1
    torch.manual_seed(0)
    layer = RWKV7(hidden_size=D, head_dim=K, layer_idx=at, num_hidden_layers=L, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    for module in (*layer.modules(), *reversed(list(layer.modules()))):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    p = layer.state_dict()
    for n in range(D):
        middle = n / (D - 1) - 0.5
        zig = (n % K - 3.5) / 3.5
        zig *= abs(zig)
        rise = 6 * (n / (D - 1)) ** (1 + (at / (L - 1)) ** 0.3)
        want = {
            "w_lora.lora.2.bias": rise - 6 + 0.5 + 2.5 * zig,
            "a_lora.lora.2.bias": -0.19 + 0.3 * zig + 0.4 * middle,
            "v_lora.lora.2.bias": 0.73 - 0.4 * middle,
            "k_k": 0.71 - 0.1 * middle, "k_a": 1.02, "g_norm.bias": 0,
            "g_norm.weight": (2 / L) ** 0.7,
        }  # fmt: skip
        for c, power in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            want[f"x_{c}"] = 1 - (n / D) ** (power * (1 - at / L))
        for name, number in want.items():
            assert math.isclose(p[name].flatten()[n], number, rel_tol=1e-12, abs_tol=1e-12), name
    assert (p["r_k"] == -0.04).all() and not p["o_proj.weight"].any()
    eye = torch.eye(D, dtype=torch.float64)
    for name, gain in {"r": 1.0, "k": 0.1, "v": 1.0}.items():
        weight = p[f"{name}_proj.weight"]
        assert_close(name, weight @ weight.T, gain**2 * eye, 1e-12)
    for name in "wavg":
        low, high = (p[f"{name}_lora.lora.{i}.weight"] for i in (0, 2))
        assert not low.any() and high.shape == (D, 32)
        assert_close(name, high @ high.T, 0.01 * eye, 1e-12)
    wide = RWKV7(hidden_size=D, head_dim=K, gate_low_rank_dim=128)
    high = wide.g_lora.lora[2].weight
    assert_close("more than it makes", high @ high.T, 0.04 * torch.eye(D), 1e-5)
    assert wide.depth == (0, 1) and hasattr(wide, "v_lora")
    assert not hasattr(RWKV7(hidden_size=D, head_dim=K, layer_idx=0), "v_lora")


@pytest.mark.parametrize(
    "D, K, ranks", [(768, 64, (64, 128, 64, 32)), (2560, 128, (256, 256, 256, 160))]
)
def test_ranks(D, K, ranks):
    with torch.device("meta"):
        layer = RWKV7(hidden_size=D, head_dim=K)
    names = ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
    assert tuple(getattr(layer, name) for name in names) == ranks
    assert layer.w_lora.lora[0].weight.shape == (ranks[0], D)
    assert layer.v_lora.lora[2].weight.shape == (D, ranks[3])
