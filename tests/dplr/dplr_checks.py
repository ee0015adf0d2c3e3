"""The general delta rule as it is written, inputs as a layer of RWKV-7 has them, the comparison."""

from itertools import pairwise
from types import SimpleNamespace

import gdn_checks
import torch
import torch.nn.functional as F
from fused.kda_checks import SCALE
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.dplr.intra import dplr_intra
from linattn_edu.reference.dplr.intra_bwd import dplr_rows_bwd
from linattn_edu.reference.dplr.scan import dplr_states
from linattn_edu.reference.dplr.scan_bwd import dplr_scan_bwd

NAMES = ("q", "k", "v", "a", "b", "gk")


def inputs(
    B, T, H, K, V, dtype, device="cpu", *, N=None, strong=False, steep=False, state=True, seed=0,
    alike=0.0,
):  # fmt: skip
    """Tensors by name: a = -c, b = eta c for each channel, c of unit length.

    strong: some gates are shut. steep: one channel of three fades by 2^80 in 14 tokens.
    alike: how much of one direction all c have. N: states, if not B.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    q, k, eta, gate, c = (randn(B, T, H, K) for _ in range(5))
    c = F.normalize(alike * randn(1, 1, H, K) + c, dim=-1)
    gk = -0.6 * gate.sigmoid()
    if strong:
        gk = torch.where(gate > 1, -1000.0, torch.where(gate < -1, 0.0, gk))
    if steep:
        gk[..., ::3] = -4.0
    x = {"q": q, "k": F.normalize(k, dim=-1), "v": randn(B, T, H, V), "a": -c}
    x = {n: t.to(dtype) for n, t in (x | {"b": eta.sigmoid() * c}).items()} | {"gk": gk}
    h0 = randn(N or B, H, K, V)
    return x | {"initial_state": h0} if state else x


def rule(q, k, v, a, b, gk, initial_state=None, *, scale=None, reverse=False):
    """S <- (diag(e^gk) + b^T a) S + k^T v, with the matrix written out."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o, scale = [None] * T, K**-0.5 if scale is None else scale
    for t in reversed(range(T)) if reverse else range(T):
        matrix = gk[:, t].exp().diag_embed() + b[:, t, :, :, None] * a[:, t, :, None]
        S = matrix @ S + k[:, t, :, :, None] * v[:, t, :, None]
        o[t] = scale * (q[:, t, :, None] @ S).squeeze(-2)
    return torch.stack(o, 1) if T else v, S


def exact(
    x: dict[str, Tensor], do: Tensor, dht: Tensor | None, *, cu_seqlens=None, **options
) -> dict[str, Tensor]:
    """What gdn_checks.run should give, in float64: autograd of the rule, sequence by sequence."""

    def f(initial_state=None, **tokens):
        if cu_seqlens is None:
            return rule(**tokens, initial_state=initial_state, **options)
        parts = [
            rule(
                **{n: t[:, first:last] for n, t in tokens.items()}, **options,
                initial_state=None if initial_state is None else initial_state[i : i + 1],
            )
            for i, (first, last) in enumerate(pairwise(cu_seqlens.tolist()))
        ]  # fmt: skip
        o, S = zip(*parts, strict=True)
        return torch.cat(o, 1), torch.cat(S)

    do, dht = (y if y is None else y.double() for y in (do, dht))
    return gdn_checks.run({n: t.double() for n, t in x.items()}, do, dht, f)


def tolerance(name, dtype):
    kind = 0 if name in ("o", "ht") else 2 if name == "dgk" else 1
    return gdn_checks.TOLERANCES[dtype][kind]


def parts(T, K, V, C, dtype, device, **kinds):
    """What the stages read: two sequences of two heads, gradients of both outputs."""
    x = inputs(2, T, 2, K, V, dtype, device, seed=T + K, **kinds)
    do, dht = gdn_checks.cotangents(x)
    r = SimpleNamespace(**x, do=do, dht=dht, chunks={"chunk_size": C})
    r.gc = gate_cumsum(x["gk"], chunk_size=C)
    r.M, r.ak, r.qb, r.qk, r.qg, r.kg, r.ag, r.bg = dplr_intra(
        r.q, r.k, r.a, r.b, r.gc, chunk_size=C
    )
    r.h, r.e = dplr_states(r.kg, r.ag, r.bg, r.v, r.gc, r.M, r.ak, r.initial_state)
    r.dh, r.dx, _, _ = dplr_scan_bwd(
        r.qg, r.kg, r.ag, r.bg, r.gc, r.M, r.ak, r.qb, r.qk, do, dht, scale=SCALE
    )
    names = ["dab", "dak", "dqb", "dqk", "dqg", "dkg", "dag", "dbg", "dgl"]
    rows = dplr_rows_bwd(r.v, r.e, do, r.dx, r.h, r.dh, scale=SCALE, chunk_size=C)
    vars(r).update(zip(names, rows, strict=True))
    return r
