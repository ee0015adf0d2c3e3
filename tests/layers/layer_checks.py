"""Small layers of every kind, and what each computes, token by token in plain PyTorch."""

import torch
import torch.nn.functional as F

from linattn_edu.layers import EMA, GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention, Mamba2

HIDDEN = 24
KINDS = {
    "gdn": (
        GatedDeltaNet,
        {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5},
    ),
    "gdn_bare": (
        GatedDeltaNet,
        {
            "hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, "use_gate": False,
            "use_short_conv": False, "allow_neg_eigval": True, "mode": "fused_recurrent",
        },
    ),
    "gdn_bias": (
        GatedDeltaNet,
        {
            "hidden_size": HIDDEN, "head_dim": 8, "num_heads": 1, "conv_bias": True,
            "conv_size": 3, "output_gate_activation": "sigmoid",
        },
    ),
    "kda": (
        KimiDeltaAttention,
        {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 1, "num_v_heads": 2, "conv_bias": True},
    ),
    "kda_bound": (
        KimiDeltaAttention,
        {
            "hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, "safe_gate": True,
            "lower_bound": -5.0, "allow_neg_eigval": True,
        },
    ),
    "gdn2": (
        GatedDeltaNet2,
        {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5},
    ),
    "gdn2_bare": (
        GatedDeltaNet2,
        {
            "hidden_size": HIDDEN, "head_dim": 8, "num_heads": 1, "use_short_conv": False,
            "allow_neg_eigval": True, "mode": "fused_recurrent",
        },
    ),
    "mamba2": (Mamba2, {"d_model": HIDDEN, "d_state": 8, "headdim": 8, "chunk_size": 16}),
    "mamba2_wide": (
        Mamba2,
        {
            "d_model": HIDDEN, "d_state": 8, "headdim": 8, "ngroups": 2, "d_ssm": 32, "bias": True,
            "norm_before_gate": True, "D_has_hdim": True, "dt_limit": (0.01, 0.2),
            "chunk_size": 16,
        },
    ),
    "mamba2_bare": (
        Mamba2,
        {"d_model": HIDDEN, "d_state": 8, "headdim": 8, "rmsnorm": False, "conv_bias": False},
    ),
    "ema": (EMA, {"hidden_size": HIDDEN, "num_heads": 3}),
}  # fmt: skip
MAIN = ("gdn", "kda", "gdn2", "mamba2", "ema")  # one of each class


def make(kind, dtype=torch.float64, device="cpu", impl=None, seed=0):
    """A layer whose parameters are all away from their first values."""
    torch.manual_seed(seed)
    cls, arguments = KINDS[kind]
    if impl is None:
        impl = "reference" if torch.device(device).type == "cpu" else "auto"
    layer = cls(**arguments, impl=impl)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return layer.to(device, dtype)


def hidden(B, T, dtype=torch.float64, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, HIDDEN, generator=generator, dtype=torch.float64).to(device, dtype)


def plain(layer, x):
    """What a layer computes, from its parameters; x [B, T, HIDDEN]."""
    p = dict(layer.named_parameters())
    if isinstance(layer, GatedDeltaNet):
        return _delta(layer, p, x, x @ p["a_proj.weight"].T)
    if isinstance(layer, (KimiDeltaAttention, GatedDeltaNet2)):
        return _delta(layer, p, x, x @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T)
    return _mamba2(layer, p, x) if isinstance(layer, Mamba2) else _ema(layer, p, x)


def _convolution(p, name, x):
    w, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    padded = F.pad(x, (0, 0, w.shape[-1] - 1, 0))
    y = sum(padded[:, j : j + x.shape[1]] * w[:, 0, j] for j in range(w.shape[-1]))
    return F.silu(y if bias is None else y + bias)


def _unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _delta(layer, p, x, raw):
    """Gated DeltaNet, KDA and GDN-2: raw, the gate before its bias, [B, T, HV] or [B, T, HV K], of
    GDN-2 [B, T, H K].
    """
    B, T, _ = x.shape
    H, HV, K = layer.num_heads, layer.num_v_heads, layer.head_dim
    q, k, v = (x @ p[f"{n}_proj.weight"].T for n in "qkv")
    if layer.use_short_conv:
        q, k, v = (_convolution(p, f"{n}_conv1d", y) for n, y in zip("qkv", (q, k, v), strict=True))
    else:
        q, k, v = map(F.silu, (q, k, v))
    q, k = (_unit(y.view(B, T, H, K)).repeat_interleave(HV // H, 2) for y in (q, k))
    v = v.view(B, T, HV, -1)
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (1 + layer.allow_neg_eigval)
    rate = p["A_log"].exp()[:, None]
    heads = len(rate)  # of gates: HV, of GDN-2 H
    raw = (raw + p["dt_bias"]).view(B, T, heads, -1)  # the last axis: 1, or K
    beta = beta.view(B, T, heads, -1).repeat_interleave(HV // heads, 2)
    write = beta
    if isinstance(layer, GatedDeltaNet2):
        write = torch.sigmoid(x @ p["w_proj.weight"].T).view_as(v)
    bound = getattr(layer, "lower_bound", None)
    g = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
    g = g.repeat_interleave(HV // heads, 2)
    S, o = x.new_zeros(B, HV, K, v.shape[-1]), []
    for t in range(T):
        S = g[:, t].exp()[..., None] * S
        erased = torch.einsum("bhk,bhkv->bhv", (beta * k)[:, t], S)
        new = (write * v)[:, t] - erased
        S = S + k[:, t, :, :, None] * new[:, :, None]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    o = _rms(torch.stack(o, 1), 1e-5) * p["o_norm.weight"]
    if not isinstance(layer, GatedDeltaNet):
        z = x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]
        o = o * torch.sigmoid(z.view_as(o))
    elif layer.use_gate:
        act = torch.sigmoid if layer.o_norm.activation == "sigmoid" else F.silu
        o = o * act((x @ p["g_proj.weight"].T).view_as(o))
    return o.flatten(-2) @ p["o_proj.weight"].T


def _mamba2(layer, p, x):
    B, T, _ = x.shape
    H, P, N, G = layer.nheads, layer.headdim, layer.d_state, layer.ngroups
    mlp = layer.d_inner - layer.d_ssm
    y = F.linear(x, p["in_proj.weight"], p.get("in_proj.bias"))
    z0, x0, z, xBC, dt = y.split((mlp, mlp, H * P, H * P + 2 * G * N, H), -1)
    xBC = _convolution(p, "conv1d", xBC)
    v, b, c = xBC.split((H * P, G * N, G * N), -1)
    v = v.view(B, T, H, P)
    b, c = (y.view(B, T, G, N).repeat_interleave(H // G, 2) for y in (b, c))
    dt = F.softplus(dt + p["dt_bias"]).clamp(*layer.dt_limit)
    S, o = x.new_zeros(B, H, P, N), []
    for t in range(T):
        decay = torch.exp(-dt[:, t] * p["A_log"].exp())[..., None, None]
        S = decay * S + (dt[:, t, :, None] * v[:, t])[..., None] * b[:, t, :, None]
        o.append(torch.einsum("bhpn,bhn->bhp", S, c[:, t]))
    skip = p["D"].view(H, P) if layer.D_has_hdim else p["D"][:, None]
    o = (torch.stack(o, 1) + skip * v).flatten(-2)
    if not layer.rmsnorm or not layer.norm_before_gate:
        o = o * F.silu(z)
    if layer.rmsnorm:
        o = _rms(o.unflatten(-1, (G, -1)), 1e-5).flatten(-2) * p["norm.weight"]
        o = o * F.silu(z) if layer.norm_before_gate else o
    o = torch.cat([F.silu(z0) * x0, o], -1)
    return F.linear(o, p["out_proj.weight"], p.get("out_proj.bias"))


def _ema(layer, p, x):
    share = torch.sigmoid(x @ p["a_proj.weight"].T + p["a_proj.bias"])
    v = (x @ p["v_proj.weight"].T).unflatten(-1, (layer.num_heads, -1))
    h, o = torch.zeros_like(v[:, 0]), []
    for t in range(x.shape[1]):
        h = h + share[:, t, :, None] * (v[:, t] - h)
        o.append(h)
    return torch.stack(o, 1).flatten(-2) @ p["o_proj.weight"].T
