"""Small layers of every kind, and what each computes, token by token in plain PyTorch."""

import math

import torch
import torch.nn.functional as F

from linattn_edu.layers import EMA, RWKV7, GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention, Mamba2

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
    "rwkv7": (
        RWKV7,
        {
            "hidden_size": HIDDEN, "head_dim": 8, "layer_idx": 0, "decay_low_rank_dim": 4,
            "gate_low_rank_dim": 5, "norm_eps": 1e-2,
        },
    ),
    "rwkv7_wide": (
        RWKV7,
        {
            "hidden_size": HIDDEN, "head_dim": None, "num_heads": 2, "layer_idx": 0,
            "value_dim": 36, "elementwise_affine": False, "fuse_norm": True,
            "mode": "fused_recurrent",
        },
    ),
}  # fmt: skip
LATER = {"rwkv7_later": (RWKV7, KINDS["rwkv7"][1] | {"layer_idx": 1})}  # which need v_first
MAIN = ("gdn", "kda", "gdn2", "mamba2", "ema", "rwkv7")  # one of each class


def make(kind, dtype=torch.float64, device="cpu", impl=None, seed=0):
    """A layer whose parameters are all away from their first values."""
    torch.manual_seed(seed)
    cls, arguments = (KINDS | LATER)[kind]
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


def plain(layer, x, v_first=None):
    """What a layer computes, from its parameters; x [B, T, HIDDEN]."""
    p = dict(layer.named_parameters())
    if isinstance(layer, RWKV7):
        return _rwkv7(layer, p, x, v_first)
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


def _rwkv7(layer, p, x, v_first):
    """Every token on its own: the last one and the state are all that is kept."""
    B, T, D = x.shape
    H, eps = layer.num_heads, layer.norm_eps * layer.head_dim
    last, S, o = x.new_zeros(B, D), x.new_zeros(B, H, D // H, layer.value_dim // H), []

    def lora(name, y, act=lambda y: y):
        low = act(y @ p[f"{name}_lora.lora.0.weight"].T)
        return F.linear(low, p[f"{name}_lora.lora.2.weight"], p.get(f"{name}_lora.lora.2.bias"))

    for t in range(T):
        now = x[:, t]
        mixed = {c: (1 - m) * now + m * last for c in "rwkvag" for m in (p[f"x_{c}"][0, 0],)}
        r, k, v = (mixed[c] @ p[f"{c}_proj.weight"].T for c in "rkv")
        decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(lora("w", mixed["w"], torch.tanh)))
        rate = torch.sigmoid(lora("a", mixed["a"]))
        gate = lora("g", mixed["g"], torch.sigmoid)
        if v_first is not None:
            share = torch.sigmoid(lora("v", mixed["v"]))
            v = (1 - share) * v + share * v_first[:, t]
        z = (k * p["k_k"]).view(B, H, -1)
        z = _unit(z) if layer.fuse_norm else z / z.norm(dim=-1, keepdim=True)
        k = (k * (1 + (rate - 1) * p["k_a"])).view(B, H, -1)
        r, decay, rate, v = (y.view(B, H, -1) for y in (r, decay, rate, v))
        erased = torch.einsum("bhk,bhkv->bhv", z, S)
        S = decay[..., None] * S - (z * rate)[..., None] * erased[:, :, None]
        S = S + k[..., None] * v[:, :, None]
        y = torch.einsum("bhk,bhkv->bhv", r, S)
        y = y - y.mean(-1, keepdim=True)
        y = _rms(y, eps).flatten(1)
        if layer.g_norm.affine:
            y = y * p["g_norm.weight"] + p["g_norm.bias"]
        y = y + ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten(1)
        o.append((y * gate) @ p["o_proj.weight"].T)
        last = now
    return torch.stack(o, 1)
