"""Every kernel once on one small, ragged shape: what compute-sanitizer watches.

`sanitize.py DTYPE N` takes the N-th of SHAPES.
"""

import sys
from dataclasses import replace

import torch

from linattn_edu import (
    causal_conv1d,
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_local_cumsum,
    commit_ring,
    ema_scan,
    fused_recurrent_gated_delta_rule,
    l2norm,
    make_ring,
    mamba_chunk_scan_combined,
    replay_gated_delta_rule,
    replay_kda,
    replay_selective_state_update,
    rms_norm_gated,
    selective_state_update,
    solve_tril,
)
from linattn_edu.kernels.routes import limits
from linattn_edu.ops.gdn import forward, stages
from linattn_edu.testing import gdn_inputs, ssd_inputs

DTYPES = ("float32", "float16", "bfloat16")
SHAPES = ((70, 33, 65, 64), (37, 128, 16, 32), (17, 100, 128, 16))  # T, K, V, chunk_size
GATE = ("A_log", "dt_bias")
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "use_gate_in_kernel": True,
}


def differentiate(f, x, **flags):
    """f and its gradient by every tensor."""
    leaves = {n: t.clone().requires_grad_() for n, t in x.asdict().items()}
    if flags.get("use_gate_in_kernel"):
        sizes = zip(GATE, (x.g.shape[2], x.g[0, 0].numel()), strict=True)
        leaves |= {n: torch.zeros(size, device="cuda", requires_grad=True) for n, size in sizes}
    o, final_state = f(**leaves, output_final_state=True, **flags)
    (o.float().sum() + final_state.sum()).backward()


def averages(dtype, T, D, C):
    """ema_scan of a batch, and of packed sequences of which one has several pieces."""
    for N, bounds in ((2, None), (3, [0, 0, 5, 70 * C])):
        B, T = (2, T) if bounds is None else (1, bounds[-1])
        x = torch.randn(B, T, 2, D, device="cuda").to(dtype).requires_grad_()
        g, weight = -torch.rand(B, T, 2, device="cuda"), torch.rand(B, T, 2, device="cuda")
        state = torch.randn(N, 2, D, device="cuda", requires_grad=True)
        packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
        given = (g.requires_grad_(), weight.requires_grad_() if packed else None, state, True)
        y, final_state = ema_scan(x, *given, **packed, chunk_size=C)
        (y.float().sum() + final_state.sum()).backward()


def convolutions(dtype, T, D):
    """causal_conv1d of a batch with little, and of packed sequences with all that may be given."""
    for N, bounds in ((2, None), (3, [0, 0, 2, T])):
        x = torch.randn(2 if bounds is None else 1, T, D, device="cuda").to(dtype)
        given = [torch.randn(D, 4, device="cuda")]
        if bounds is not None:
            given += [torch.randn(D, device="cuda"), x.clone()]
            given.append(torch.randn(N, D, 4, device="cuda").to(dtype))
        packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
        leaves = [t.requires_grad_() for t in (x, *given)]
        options = {"output_final_state": True, "activation": "silu" if packed else None}
        y, final_state = causal_conv1d(*leaves, **options, **packed)
        (y.float().sum() + final_state.float().sum()).backward()
    numbers = torch.arange(T, device="cuda", dtype=torch.int32)[None].expand(2, -1) // 3
    x = torch.randn(2, T, D, device="cuda").to(dtype).mT.requires_grad_()
    weight = torch.randn(D, 4, device="cuda").requires_grad_()
    causal_conv1d_fn(x, weight, None, numbers - 1).float().sum().backward()
    with torch.no_grad():
        pool, slots = torch.randn(5, D, 6, device="cuda").to(dtype), numbers[:, -1] % 3 + 1
        slots = slots + torch.arange(2, device="cuda")
        for lengths in (None, slots):
            causal_conv1d_update(x[:, :, :3], pool, weight, None, "silu", lengths, slots)
    rms_norm_gated(x, None, None, x.detach()).float().sum().backward()
    gate, weight = torch.randn(T, 2 * D, device="cuda").to(dtype), weight.detach().flatten()
    leaf = weight[: 2 * D].requires_grad_()
    rms_norm_gated(gate, leaf, leaf, gate, 1e-6, D, False).float().sum().backward()


def mamba(dtype, T, N, P, C):
    """Both passes of Mamba-2's scan with all that may be given, packed with little, and a token.

    The first heads are those of the fused stages where dtype and GPU have them, the others not.
    """
    limits.SSD_PIECE = 128  # so that there are several
    T += limits.SSD_PIECE
    few = min(P, 64)
    # a short last chunk, none, and heads that the fused stages do not hold
    for P_, C_, T_ in ((few, 2 * C, T), (few, 2 * C, 256), (max(P, 65), C, T)):
        x = ssd_inputs(1, T_, 4, 2, P_, N, dtype=dtype, device="cuda")
        given = {n: y.requires_grad_(y.is_floating_point()) for n, y in x.asdict().items()}
        names = ("x", "dt", "A", "B", "C")
        out, states = mamba_chunk_scan_combined(
            *(given.pop(n) for n in names), C_, **given, dt_softplus=True, return_final_states=True
        )
        (out.float().sum() + states.sum()).backward()
        cu_seqlens = torch.tensor([0, 0, 5, T_], device="cuda")
        leaves = (getattr(x, n).detach().requires_grad_() for n in names)
        out = mamba_chunk_scan_combined(*leaves, C_, cu_seqlens=cu_seqlens, dt_softplus=True)
        out.float().sum().backward()
        with torch.no_grad():
            head = (4, P_)
            A, dt = x.A[:, None, None].expand(*head, N), x.dt[:, 0, :, None].expand(1, *head)
            D, bias = (y[:, None].expand(head) for y in (x.D, x.dt_bias))
            token = (x.x[:, 0], dt, A, x.B[:, 0], x.C[:, 0], D, x.z[:, 0], bias, True)
            selective_state_update(x.initial_states.contiguous(), *token)


@torch.no_grad()
def rings(dtype, K, V):
    """Calls of one token and of three, which fold now and then: all heads of a group read its keys
    while one writes new ones.
    """
    for T, channels in ((1, False), (3, True)):
        x = gdn_inputs(3, 9, 1, 2, K, V, dtype=dtype, device="cuda")
        x.g = x.g[..., None].repeat(1, 1, 1, K) if channels else x.g
        state = torch.randn(3, 2, K, V, device="cuda")
        ring = make_ring(state, 1, length=4, tokens=T, channels=channels, dtype=dtype)
        m = ssd_inputs(3, 9, 4, 2, V, K, dtype=dtype, device="cuda")
        states = torch.randn(3, 4, V, K, device="cuda")
        inputs = make_ring(states, 2, length=4, tokens=T, dtype=dtype, state_v_first=True)
        for t in range(0, 9, T):
            q, k, v, g, beta = (y[:, t : t + T] for y in (x.q, x.k, x.v, x.g, x.beta))
            f = replay_kda if channels else replay_gated_delta_rule
            f(q, k, v, g, beta, state, ring, use_qk_l2norm_in_kernel=True)
            u, dt, B, C = (y[:, t : t + T] for y in (m.x, m.dt, m.B, m.C))
            replay_selective_state_update(states, inputs, u, dt, m.A, B, C, m.D, u, m.dt_bias, True)
        commit_ring(state, ring), commit_ring(states, inputs)


def main(dtype, T, K, V, C):
    x = gdn_inputs(1, T, 1, 2, K, V, dtype=dtype, device="cuda", initial_state=True)
    options = {"scale": 0.3, "output_final_state": True, "chunk_size": C}
    forward(stages("triton"), **x.asdict(), **options)
    differentiate(chunk_gated_delta_rule, x, chunk_size=C)
    cu_seqlens = torch.tensor([0, 0, 5, T], device="cuda")
    packed = gdn_inputs(1, T, 2, 2, K, V, dtype=dtype, device="cuda")
    packed.initial_state = torch.randn(3, 2, K, V, device="cuda")
    differentiate(chunk_gated_delta_rule, packed, chunk_size=C, cu_seqlens=cu_seqlens, **FLAGS)
    for y in (x, packed):  # a gate for each channel
        y.g = y.g[..., None] * torch.linspace(0.1, 2, K, device="cuda")
    x.g[:, T // 2 :, 0] = -9.0  # rows far from their block's first, beside near ones
    differentiate(chunk_kda, x, chunk_size=C)
    for gate in ({}, {"lower_bound": -5.0, "safe_gate": True}):
        differentiate(chunk_kda, packed, chunk_size=C, cu_seqlens=cu_seqlens, **FLAGS, **gate)
    x.g = x.g[..., 0].contiguous()
    short = x.prefix(5)
    differentiate(fused_recurrent_gated_delta_rule, short)
    fused_recurrent_gated_delta_rule(**short.asdict(), output_final_state=True)
    limits.LENGTH, limits.LEAST = C, 1  # now they are cut
    channels = x.g[..., None].repeat(1, 1, 1, K)
    for f, g in ((chunk_gated_delta_rule, x.g), (chunk_kda, channels)):
        differentiate(f, replace(x, g=g), chunk_size=C)
    differentiate(chunk_kda, packed, chunk_size=C, cu_seqlens=cu_seqlens, **FLAGS)
    averages(dtype, T, V, C)
    convolutions(dtype, T, V)
    mamba(dtype, T, K, V, C)
    rings(dtype, K, V)
    A = solve_tril(torch.randn(1, T, 2, C, device="cuda", dtype=dtype), cu_seqlens)
    chunk_local_cumsum(l2norm(A), C, reverse=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), *SHAPES[int(sys.argv[2])])
