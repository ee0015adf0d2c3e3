"""mamba_split_conv1d_scan_combined: against the layer written out in float64, forms, refusals."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from grids import FULL, parametrize
from refusals import refuses

from linattn_edu import mamba_split_conv1d_scan_combined
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
# relative RMS of the outputs, and of the gradients
TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}
B, T, H, P, N, W, E = 2, 18, 4, 6, 5, 4, 7
LENGTHS = (4, 1, 13)  # of the sequences of every row, where there are several
OPTIONAL = ("conv1d_bias", "dt_bias", "initial_states", "outproj_bias")
# in bfloat16 of more heads: a relative RMS of four sums of roundings is anything
MANY = 64 if FULL else 16


def layer(G=2, M=0, per_entry=False, dtype=torch.float32, device="cpu", without=(), H=H):
    """The tensors by name, parameters in float32 but the last projection."""
    generator = torch.Generator().manual_seed(G + M)
    inner, channels = H * P, H * P + 2 * G * N

    def randn(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # uniform, of variance 1: products of normal numbers have one that is most of the sum of squares
    tokens = torch.rand(B, T, 2 * M + inner + channels + H, generator=generator)
    x = {
        "zxbcdt": ((2 * tokens - 1) * 3**0.5).to(device, dtype),
        "conv1d_weight": randn(channels, W) / 2,
        "conv1d_bias": randn(channels) / 2,
        "dt_bias": randn(H) - 1,
        "A": -randn(H).exp(),
        "D": randn(*((H, P) if per_entry else (H,))),
        "initial_states": randn(B, H, P, N),
        "rmsnorm_weight": randn(inner),
        "outproj_weight": randn(E, M + inner, dtype=dtype) * inner**-0.5,
        "outproj_bias": randn(E, dtype=dtype),
    }
    return {n: t for n, t in x.items() if n not in without}


def plain(
    zxbcdt, conv1d_weight, A, D, conv1d_bias=None, dt_bias=None, initial_states=None,
    rmsnorm_weight=None, outproj_weight=None, outproj_bias=None, *, G, M, eps, norm_before_gate,
    lengths, activation, dt_limit, dtype=torch.float64,
):  # fmt: skip
    """out and the last states, a token after the other.

    What one of the operators gives to the next is rounded to dtype, and so is its gradient.
    """
    H = len(A)
    inner = H * P
    mlp, z, xBC, dt = zxbcdt.split([2 * M, inner, inner + 2 * G * N, H], -1)
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias).clamp(*dt_limit)
    D = D if D.ndim == 2 else D[:, None]
    S = zxbcdt.new_zeros(B, H, P, N) if initial_states is None else initial_states
    outs, bounds = [], torch.tensor([0, *lengths]).cumsum(0).tolist()
    for n, (begin, end) in enumerate(pairwise(bounds)):
        u = F.pad(xBC[:, begin:end].mT, (W - 1, 0))
        u = F.conv1d(u, conv1d_weight[:, None], conv1d_bias, groups=len(conv1d_weight)).mT
        u = (F.silu(u) if activation else u).to(dtype).to(u)
        x, b, c = u.split([inner, G * N, G * N], -1)
        x = x.unflatten(-1, (H, P))
        b, c = (t.unflatten(-1, (G, N)).repeat_interleave(H // G, 2) for t in (b, c))
        S = S if n == 0 else torch.zeros_like(S)
        for t in range(end - begin):
            step = dt[:, begin + t, :, None, None]
            S = (step * A[:, None, None]).exp() * S + step * x[:, t, ..., None] * b[:, t, :, None]
            outs.append(((S * c[:, t, :, None]).sum(-1) + D * x[:, t]).flatten(1))
    y = torch.stack(outs, 1)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        y = y.to(dtype).to(y)
        v = y if norm_before_gate else y * F.silu(z)
        groups = v.unflatten(-1, (G, -1))
        v = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
        y = v * rmsnorm_weight
        y = y * F.silu(z) if norm_before_gate else y
    first, second = mlp.chunk(2, -1)
    y = torch.cat([F.silu(first) * second, y], -1).to(dtype).to(y)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias), S


def run(x, f, **options):
    """out, the states, and the gradients of every tensor by fixed cotangents."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    outputs = f(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    dy = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, leaves.values(), dy)
    got = {"out": outputs[0].detach(), "states": outputs[1].detach()}
    return got | {f"d{n}": t for n, t in zip(leaves, gradients, strict=True)}


@parametrize(
    G=(1, 2), M=(0, 3), per_entry=(False, True), packed=(False, True),
    norm=(None, True, False), project=(True, False), without=((), OPTIONAL, ("conv1d_bias",)),
    activation=("silu", None), dtype=TOLERANCES, impl=IMPLS,
)  # fmt: skip
def test_both_passes(
    G, M, per_entry, packed, norm, project, without, activation, dtype, impl, device
):
    without = (*without, *(("rmsnorm_weight",) if norm is None else ()))
    without = (*without, *(() if project else ("outproj_weight", "outproj_bias")))
    x = layer(G, M, per_entry, dtype, device, without, MANY if dtype == torch.bfloat16 else H)
    options = {"norm_before_gate": bool(norm), "activation": activation, "dt_limit": (0.01, 1.5)}
    given = {"conv1d_bias": None, "dt_bias": None} | options
    if packed:
        rows = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(LENGTHS)]
        given["seq_idx"] = torch.cat(rows).expand(B, -1).to(device)
    kinds = {"chunk_size": 16, "ngroups": G, "headdim": None if per_entry else P}

    def ours(impl, **tensors):
        return mamba_split_conv1d_scan_combined(
            **given | tensors, **kinds, rmsnorm_eps=1e-3, return_final_states=True, impl=impl
        )

    got = run(x, partial(ours, impl))
    wide = {n: t.double() for n, t in x.items()}
    lengths = LENGTHS if packed else (T,)
    want = run(wide, plain, G=G, M=M, eps=1e-3, lengths=lengths, dtype=dtype, **options)
    assert got["out"].dtype == dtype
    for n, t in want.items():
        assert_close(n, got[n], t, TOLERANCES[dtype][n[0] == "d"])


def test_in_float64():
    """To 1e-10, as transformers calls it."""
    x = layer()
    x = {n: t.double() for n, t in x.items() if n != "initial_states"}
    kinds = {"chunk_size": 16, "ngroups": 2, "headdim": P}
    options = {"norm_before_gate": False, "activation": "silu", "dt_limit": (0.0, float("inf"))}

    def ours(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, **rest):
        return mamba_split_conv1d_scan_combined(
            zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D=D, **rest, **kinds, **options,
            rmsnorm_eps=1e-5, return_final_states=True, seq_idx=None,
        )  # fmt: skip

    want = run(x, plain, G=2, M=0, eps=1e-5, lengths=(T,), **options)
    for n, t in run(x, ours).items():
        assert_close(n, t, want[n], 1e-10)
    order = (*list(x)[:5], "D")
    y = mamba_split_conv1d_scan_combined(
        *(x[n] for n in order), 16, headdim=P, ngroups=2, activation="swish"
    )
    assert isinstance(y, torch.Tensor) and y.shape == (B, T, H * P)


def test_under_autocast(device):
    """The last projection's weight may then be wider."""
    x = layer(device=device, dtype=torch.bfloat16, without=("initial_states", "outproj_bias"))
    x["outproj_weight"] = x["outproj_weight"].float()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = mamba_split_conv1d_scan_combined(**x, chunk_size=16, headdim=P, ngroups=2)
    assert y.dtype == torch.bfloat16 and y.shape == (B, T, E)


new = torch.zeros
REFUSED = {
    "zxbcdt": ({"zxbcdt": new(B, 9)}, r"zxbcdt must have 3 dimensions \[B, T, L\]"),
    "numbers": (
        {"zxbcdt": new(B, T, 71)}, "zxbcdt must have .* = 72 numbers .*got 71"
    ),
    "odd": ({"zxbcdt": new(B, T, 73)}, "or an even number more, got 73"),
    "channels": (
        {"conv1d_weight": new(43, 4)}, "conv1d_weight must have H P .*got 43"
    ),
    "wide": ({"conv1d_weight": new(44, 9)}, "must have W from 1 to 8, got W=9"),
    "bias": ({"conv1d_bias": new(40)}, r"conv1d_bias must have shape \[channels=44\]"),
    "dt_bias": ({"dt_bias": new(3)}, r"dt_bias must have shape \[H=4\], got \(3,\)"),
    "no A": ({"A": None}, TypeError, "A must be a torch.Tensor"),
    "A > 0": ({"A": new(H) + 1}, "A must be a log decay"),
    "no D": ({"D": None}, TypeError, "D must be a torch.Tensor"),
    "no headdim": ({"headdim": None}, "headdim must be given where D has"),
    "large": ({"headdim": 257}, "must have H >= 1 and P from 1 to 256, got 4, 257"),
    "headdim": ({"D": new(H, P), "headdim": 5}, "headdim must be D's P=6, got 5"),
    "type": ({"headdim": 6.0}, TypeError, "headdim must be an integer, got 6.0"),
    "groups": ({"ngroups": 3}, "ngroups must divide H=4, got 3"),
    "chunk": ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    "limit": ({"dt_limit": (2.0, 1.0)}, "dt_limit must be"),
    "eps": ({"rmsnorm_eps": -1}, "rmsnorm_eps must be >= 0"),
    "norm": ({"rmsnorm_weight": new(5)}, r"rmsnorm_weight must have shape \[H P=24\]"),
    "out": ({"outproj_weight": new(7, 23)}, r"outproj_weight must have shape \[E=7, M"),
    "out dtype": (
        {"outproj_weight": new(7, 24).half()}, TypeError, "outproj_weight must be torch.float32"
    ),
    "out bias": ({"outproj_weight": None}, "outproj_bias needs outproj_weight"),
    "seq_idx": ({"seq_idx": new(B, 3).int()}, r"seq_idx must have shape \[B, T\]"),
    "activation": ({"activation": "gelu"}, "activation must be None, 'silu'"),
    "flag": ({"norm_before_gate": None, "return_final_states": 5}, TypeError, "return_final"),
    "device": ({"D": new(H, device="meta")}, "D must be on cpu like zxbcdt"),
    "float64": ({"A": -new(H).double(), "impl": "triton"}, "impl='triton' cannot run"),
    "impl": ({"impl": "cuda"}, "impl must be one of"),
    "unknown": ({"cu_seqlens": None}, TypeError, "unexpected keyword argument 'cu_seqlens'"),
}  # fmt: skip


def valid():
    return layer() | {"chunk_size": 16, "headdim": P, "ngroups": 2}


test_refused_before_any_kernel = refuses(mamba_split_conv1d_scan_combined, valid, REFUSED)
