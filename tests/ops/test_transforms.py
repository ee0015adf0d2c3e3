"""Operators under PyTorch's tools: vmap, per-sample gradients, make_fx, flops, DTensors."""

import pytest
import torch
from gdn_checks import inputs
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from linattn_edu import (
    causal_conv1d,
    causal_conv1d_fn,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_global_cumsum,
    chunk_kda,
    chunk_local_cumsum,
    ema_scan,
    fused_gdn_gate,
    fused_kda_gate,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
    l2norm,
    mamba_chunk_scan_combined,
    rms_norm_gated,
    selective_state_update,
    solve_tril,
)
from linattn_edu.ops import gdn, kda, ssd
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.testing import assert_close, ssd_inputs

B, T, H, HV, K, V = 2, 9, 1, 2, 6, 4


def delta(f, channels=False, gates=False, **options):
    """f on x [B, T, 32], of which all its arguments are made; o and the final state as one."""

    def call(x, state=None, A_log=None, dt_bias=None):
        n = x.shape[0]
        q, k = (l2norm(y) for y in x[..., : 2 * K].view(n, T, 2, K).unbind(2))
        v = x[..., 12:20].view(n, T, HV, V)
        raw = x[..., :12].view(n, T, HV, K) if channels else x[..., 20:22]
        gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        g, gate = (raw, gate) if A_log is not None else (-raw.square(), {})
        strength = {"beta": x[..., 22:24].sigmoid()}
        if gates:
            b, w = x[..., 8:20].sigmoid(), x[..., 12:20].sigmoid()
            strength = {"b": b.view(n, T, HV, K), "w": w.view(n, T, HV, V)}
        o, S = f(
            q[:, :, None], k[:, :, None], v, g, **strength,
            initial_state=state, output_final_state=True, **gate, **options,
        )  # fmt: skip
        return torch.cat([o.flatten(1), S.flatten(1)], 1)

    return call


def mamba(x, state=None, A_log=None, dt_bias=None):
    """The same of Mamba-2, with the documents 0 and 1 in each row."""
    A = x.new_zeros(HV) if A_log is None else A_log
    tokens = (x[..., :12].unflatten(-1, (HV, K)), x[..., 20:22], -A.exp())
    B, C = x[..., 12:20].unflatten(-1, (2, 1, V)).unbind(-3)
    documents = (torch.arange(T, device=x.device) > 4).int().repeat(len(x), 1)
    out, S = mamba_chunk_scan_combined(
        *tokens, B, C, 16, D=A, z=x[..., 10:22].unflatten(-1, (HV, K)), dt_bias=dt_bias,
        initial_states=state, seq_idx=documents, dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    return torch.cat([out.flatten(1), S.flatten(1)], 1)


FORMS = {
    "chunk_gated_delta_rule": delta(chunk_gated_delta_rule),
    "chunk_kda": delta(chunk_kda, channels=True),
    "chunk_gdn2": delta(chunk_gdn2, channels=True, gates=True),
    "fused_recurrent_gdn2": delta(fused_recurrent_gdn2, channels=True, gates=True),
    "fused_recurrent_gated_delta_rule": delta(fused_recurrent_gated_delta_rule),
    "fused_recurrent_kda": delta(fused_recurrent_kda, channels=True),
    "mamba_chunk_scan_combined": mamba,
}
OTHERS = {
    "causal_conv1d": lambda x: causal_conv1d(
        x[..., 4:], x[0, :4, 4:].mT, x[0, 0, 4:], activation="silu"
    )[0],
    "ema_scan": lambda x: ema_scan(x.unflatten(-1, (2, 16)), -x[..., :2].abs(), x[..., 2:4])[0],
    "causal_conv1d_fn": lambda x: causal_conv1d_fn(
        x.mT, x[0, :4].mT, None, (x[..., 0] > 0).int(), activation="silu"
    ),
    "fused_recurrent_dplr_delta_rule": lambda x: fused_recurrent_dplr_delta_rule(
        *x.view(*x.shape[:2], 4, 1, 8)[:, :, [0, 1, 1, 2, 3]].tanh().unbind(2),
        -x[..., None, :8].square(),
    )[0],
    "chunk_dplr_delta_rule": lambda x: chunk_dplr_delta_rule(
        *x.view(*x.shape[:2], 4, 1, 8)[:, :, [0, 1, 1, 2, 3]].tanh().unbind(2),
        -x[..., None, :8].square(),
    )[0],
    "l2norm": l2norm,
    "rms_norm_gated": lambda x: rms_norm_gated(x, x[0, 0], x[0, 1], x + 1, group_size=8),
    "chunk_local_cumsum": lambda x: chunk_local_cumsum(x, 4),
    "chunk_global_cumsum": chunk_global_cumsum,
    "solve_tril": lambda x: solve_tril(x[..., :16].unflatten(-1, (1, 16)) / 8),
    "fused_gdn_gate": lambda x: fused_gdn_gate(x, x.new_zeros(32)),
    "fused_kda_gate": lambda x: fused_kda_gate(x.unflatten(-1, (4, 8)), x.new_zeros(4)),
}


def draw(*shape, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device)


def one_by_one(f, *stacked):
    return torch.stack([f(*one) for one in zip(*stacked, strict=True)])


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_vmap(name, device):
    f = (FORMS | OTHERS)[name]
    x = draw(2, B, T, 32, device=device)
    want = one_by_one(f, x)
    assert_close("y", vmap(f)(x), want, 1e-6)
    inner = x.movedim(0, 2)  # mapped along an axis within, and twice
    assert_close("within", vmap(f, in_dims=2)(inner), want, 1e-6)
    twice = vmap(vmap(f))(torch.stack([x, x.flip(0)]))
    assert_close("twice", twice, torch.stack([want, want.flip(0)]), 1e-6)


ROWS = {
    "l2norm": l2norm,
    "rms_norm_gated": lambda x: rms_norm_gated(x, z=x),
    "fused_gdn_gate": lambda x: fused_gdn_gate(x, x.new_zeros(4)),
    "fused_kda_gate": lambda x: fused_kda_gate(x.view(2, 2), x.new_zeros(2)),
}


@pytest.mark.parametrize("name", ROWS)
def test_vmap_of_a_single_row(name, device):
    """What is mapped may be all the batch there is; so may what is saved for the gradient."""
    f, x, weight = ROWS[name], draw(3, 4, device=device), draw(4, device=device, seed=1)
    loss = lambda x: (f(x).square().flatten() * weight).sum()
    assert_close("y", vmap(f)(x), one_by_one(f, x), 1e-6)
    leaves = [row.clone().requires_grad_() for row in x]
    want = torch.stack([torch.autograd.grad(loss(row), row)[0] for row in leaves])
    assert_close("grad of each", vmap(grad(loss))(x), want, 1e-6)
    leaf = x.clone().requires_grad_()
    assert_close("grad of all", torch.autograd.grad(vmap(loss)(leaf).sum(), leaf)[0], want, 1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_vmap_of_some_arguments(name, device):
    """States are mapped, tokens and the gate's parameters are not; and the reverse."""
    f = FORMS[name]
    x, state = draw(B, T, 32, device=device), draw(2, B, HV, K, V, device=device)
    A_log = draw(2, HV, device=device)
    got = vmap(lambda s: f(x, s))(state)
    assert_close("states", got, torch.stack([f(x, s) for s in state]), 1e-6)
    got = vmap(lambda a: f(x, state[0], a))(A_log)
    assert_close("A_log", got, torch.stack([f(x, state[0], a) for a in A_log]), 1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_each_sample(name, device):
    """Of a parameter that the samples share: as torch.func's own example takes them."""
    f = FORMS[name]
    x, A_log = draw(3, 1, T, 32, device=device), draw(HV, device=device, seed=1)

    def loss(A_log, x):
        return f(x, None, A_log).square().sum()

    got = vmap(grad(loss), in_dims=(None, 0))(A_log, x)
    want = []
    for sample in x:
        leaf = A_log.clone().requires_grad_()
        want += torch.autograd.grad(loss(leaf, sample), leaf)
    assert_close("dA_log", got, torch.stack(want), 3e-6)


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_jacobians(name, device):
    """jacrev, and autograd with a batch of gradients."""
    f = (FORMS | OTHERS)[name]
    x = draw(1, T, 32, device=device).requires_grad_()
    rows = f(x).flatten()[:2]
    want = torch.stack([torch.autograd.grad(y, x, retain_graph=True)[0] for y in rows])
    got = jacrev(lambda x: f(x).flatten()[:2])(x.detach())
    assert_close("jacrev", got, want, 3e-6)
    (got,) = torch.autograd.grad(rows, x, torch.eye(2, device=device), is_grads_batched=True)
    assert_close("batch of gradients", got, want, 3e-6)


def test_a_module_of_several_weights(device):
    """An ensemble: the layer's parameters are mapped, the input is shared."""
    layers = [torch.nn.Linear(8, 32, device=device) for _ in range(3)]
    given = [dict(m.named_parameters()) for m in layers]
    weights = {n: torch.stack([one[n] for one in given]) for n in ("weight", "bias")}
    x, f = draw(B, T, 8, device=device), FORMS["chunk_gated_delta_rule"]

    def call(weights):
        return f(functional_call(layers[0], weights, (x,)))

    want = torch.stack([f(m(x)) for m in layers])
    assert_close("y", vmap(call)(weights), want, 1e-5)


def test_packed_sequences_under_vmap(device):
    x = {n: draw(3, *t.shape, seed=i) for i, (n, t) in enumerate(packed_inputs().items())}
    x["g"], x["beta"] = -x["g"].abs(), x["beta"].sigmoid()
    x = {n: t.to(device) for n, t in x.items()}
    cu_seqlens = torch.tensor([0, 4, 4, T], device=device)

    def f(*given):
        given = dict(zip(x, given, strict=True))
        return chunk_gated_delta_rule(**given, cu_seqlens=cu_seqlens)[0]

    assert torch.equal(vmap(f)(*x.values()), one_by_one(f, *x.values()))


def packed_inputs():
    return inputs(1, T, H, HV, K, V, torch.float32, state=False)


def test_who_traces_takes_a_step_in_place_whole(device):
    """make_fx sees one operator, which writes the state."""
    state, x = draw(2, 4, 16, 8, device=device), draw(2, 4, 16, device=device)
    A, B = -torch.ones(4, 16, 8, device=device), draw(2, 1, 8, device=device)
    f = lambda state, x: selective_state_update(state, x, x, A, B, B, dt_softplus=True)
    graph = make_fx(f)(state.clone(), x)
    ours = [n for n in graph.graph.nodes if "selective_state_update" in str(n.target)]
    assert len(ours) == 1
    other = state.clone()
    assert torch.equal(graph(state, 2 * x), f(other, 2 * x)) and torch.equal(state, other)


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_make_fx_takes_an_operator_whole(name, device):
    f = (FORMS | OTHERS)[name]
    x = draw(B, T, 32, device=device)
    graph = make_fx(lambda x: f(x))(x)
    ours = [n for n in graph.graph.nodes if str(n.target).startswith("linattn_edu")]
    assert ours
    assert torch.equal(graph(2 * x), f(2 * x))


def operations(f):
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_flop_counts()["Global"]


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_flops(name, device):
    """Those of the products in the reference stages, but for the inverse, which wastes most of its
    own, and with those of KDA that stand there as sums over pairs of tokens.
    """
    x = inputs(2, 128, 1, 2, 32, 48, torch.float32, device, state=False)
    channels, C = name == "chunk_kda", 64
    if channels:
        x["g"] = x["g"][..., None].expand(*x["g"].shape, 32).contiguous()
    f, room = (chunk_kda, kda) if channels else (chunk_gated_delta_rule, gdn)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    forward = operations(lambda: f(**x))
    both = operations(lambda: torch.autograd.grad(f(**leaves)[0].sum(), leaves.values()))
    names = {getattr(torch.ops.linattn_edu, n) for n in (name, f"{name}_backward")}
    assert forward.keys() < both.keys() == names

    stages = room.stages("reference")
    o, _, kept = room.forward(stages, **x, scale=1.0, keep=("P" if channels else "gc", "A"))
    staged = operations(lambda: room.forward(stages, **x, scale=1.0))
    staged_backward = operations(
        lambda: room.backward(stages, **x, residuals=kept, do=o, scale=1.0)
    )
    inverse = operations(lambda: unit_lower_inverse(torch.zeros(8, C, C, device=device)))
    pairs = 2 * 2 * 128 * 2 * C * 32 if channels else 0  # of one product of rows of keys
    count, *_ = forward.values()
    assert count == sum(staged.values()) - sum(inverse.values()) + 2 * pairs
    assert sum(both.values()) - count == sum(staged_backward.values()) + 4 * pairs


def test_flops_of_ssd(device):
    """Those of the products in the fused reference stages, which make three of them once a head,
    the kernels once a group.
    """
    B, T, H, G, P, N, C = 2, 128, 4, 2, 16, 24, 64
    x = {n: t for n, t in ssd_inputs(B, T, H, G, P, N, device=device).asdict().items()
         if n in ("x", "dt", "A", "B", "C")}  # fmt: skip
    x["dt"] = x["dt"].exp()
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    f = lambda x: mamba_chunk_scan_combined(**x, chunk_size=C, impl="reference")
    forward = operations(lambda: f(x))
    both = operations(lambda: torch.autograd.grad(f(leaves).sum(), leaves.values()))
    names = ("mamba_chunk_scan_combined", "mamba_chunk_scan_combined_backward")
    assert forward.keys() < both.keys() == {getattr(torch.ops.linattn_edu, n) for n in names}

    stages = ssd.fused_stages("reference")
    staged = operations(lambda: ssd.forward(stages, **x, chunk_size=C))
    dout = torch.ones_like(x["x"])
    staged_backward = operations(lambda: ssd.backward(stages, **x, dout=dout, chunk_size=C))
    heads = 3 * 2 * B * T * (H - G) * C * N  # C B^T, dscores B and dscores^T C
    count, *_ = forward.values()
    assert count == sum(staged.values())
    assert sum(both.values()) - count == sum(staged_backward.values()) - heads
