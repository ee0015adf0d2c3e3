"""Calls recorded in a CUDA graph and replayed on other numbers of the same shapes."""

import pytest
import torch
import torch.nn.functional as F
from recurrent_cases import case, options

from linattn_edu import (
    causal_conv1d,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_local_cumsum,
    ema_scan,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    l2norm,
    mamba_chunk_scan_combined,
    solve_tril,
)

pytestmark = pytest.mark.gpu

ALL = ("norm", "gate", "sigmoid", "neg", "v_first")
BOUNDS = (0, 70, 70, 200)
OTHERS = (0, 100, 130, 200)  # as many chunks of 16, 32 and 64


def chunk(**arguments):
    return chunk_gated_delta_rule(**arguments, **options(ALL))


def kda(q, **arguments):
    """Raw gates of channels, made of those of the heads; twice: with all kept, and with little."""
    HV, K = arguments["v"].shape[2], q.shape[-1]
    channels = torch.linspace(0.1, 2, K, device=q.device)
    arguments["g"] = arguments["g"][..., None] * channels
    arguments["dt_bias"] = arguments["dt_bias"].repeat_interleave(K)
    arguments = {"q": q, **arguments, **options(ALL), "lower_bound": -5.0, "safe_gate": True}
    assert arguments["dt_bias"].shape == (HV * K,)
    return [y for keep in (False, True) for y in chunk_kda(**arguments, disable_recompute=keep)]


def recurrent(**arguments):
    return fused_recurrent_gated_delta_rule(**arguments, **options(ALL))


def mamba(q, k, v, g, initial_state, A_log, dt_bias, beta=None, **bounds):
    """Mamba-2 of these tensors; its state is rows of v and columns of k, as with state_v_first."""
    return mamba_chunk_scan_combined(
        v, g, -A_log.exp(), k, q, 64, D=A_log, z=v, dt_bias=dt_bias, initial_states=initial_state,
        dt_softplus=True, **{f"return_{'varlen' if bounds else 'final'}_states": True}, **bounds,
    )  # fmt: skip


def dplr(q, k, v, g, beta, initial_state, A_log, dt_bias, **bounds):
    """The general rule as in RWKV-7: a key of unit length is read, a part of each channel added."""
    q, k = (x.repeat_interleave(2, 2) for x in (q, k))
    c = F.normalize(k.float(), dim=-1)
    gk = -A_log.exp()[:, None] * F.softplus(g + dt_bias)[..., None] * c.abs()
    a, b = (-c).to(q.dtype), (beta.sigmoid()[..., None] * c).to(q.dtype)
    return chunk_dplr_delta_rule(q, k, v, a, b, gk, None, initial_state, True, **bounds)


def ema(v, g, initial_state, A_log, dt_bias, q=None, k=None, beta=None, **bounds):
    """Of v, its weights 1 less the decays."""
    g = -A_log.exp() * F.softplus(g + dt_bias)
    return ema_scan(v, g, None, initial_state[..., 0], True, **bounds)


def convolution(v, **bounds):
    x = v.flatten(2)
    weight = x[0, :4].detach().mT.contiguous()
    bounds = {n: t for n, t in bounds.items() if "seqs" in n or n.startswith("cu_seqlens")}
    return (causal_conv1d(x, weight, activation="silu", **bounds)[0],)


def helpers(g, v, q, **_):
    return chunk_local_cumsum(g, 64), solve_tril(v / 8), l2norm(q)


def inputs(seed, N=1, dtype=torch.bfloat16):
    x = case(200, (2, 4), 64, 64, N=N, device="cuda", dtype=dtype, flags=ALL, seed=seed)
    return {n: t for n, t in x.items() if t is not None}


def copy_into(leaves, x):
    with torch.no_grad():
        for n, t in leaves.items():
            t.copy_(x[n])


def record(work):
    """Run work on a side stream until everything is compiled, then record it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def forward_and_backward(f, leaves, cotangents):
    outputs = f(**leaves)
    used = [x for x in leaves.values() if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, used, cotangents, allow_unused=True)]


def check_replay(f, N=1):
    """Forward and backward of two other sets of inputs: the bits of eager mode."""
    leaves = {n: t.requires_grad_() for n, t in inputs(0, N).items()}
    cotangents = [torch.randn_like(x) for x in f(**leaves)]
    graph, results = record(lambda: forward_and_backward(f, leaves, cotangents))
    for seed in (1, 2):
        copy_into(leaves, inputs(seed, N))
        for d in cotangents:
            d.normal_()
        graph.replay()
        got = [x if x is None else x.clone() for x in results]
        want = forward_and_backward(f, leaves, cotangents)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("f", [chunk, kda, recurrent, mamba, dplr, ema, helpers])
def test_replay(f):
    check_replay(f)


@pytest.mark.parametrize("f", [chunk, kda, recurrent, mamba, dplr, ema])
def test_replay_of_packed_sequences(f):
    """The chunked forms are told the lengths, so that they do not wait for the device."""
    known = torch.tensor(BOUNDS)
    bounds = {"cu_seqlens": known.cuda()}
    if f is not recurrent:
        bounds["cu_seqlens_cpu"] = known
    check_replay(lambda **x: f(**x, **bounds), N=3)


@pytest.mark.parametrize("f", [chunk, kda, recurrent, mamba, dplr, ema, convolution])
def test_replay_after_other_boundaries(f):
    """Megatron #6796, fla #1155, torchtitan #3709: others of as many sequences and chunks, written
    to the same tensor, are followed in both passes; those of the recording would be wrong.
    """
    known, others = torch.tensor(BOUNDS), torch.tensor(OTHERS)

    def bounded(cu_seqlens, cu_seqlens_cpu):
        told = {} if f is recurrent else {"cu_seqlens_cpu": cu_seqlens_cpu}
        return lambda **x: f(**x, cu_seqlens=cu_seqlens, **told)

    bounds = known.cuda()
    g = bounded(bounds, known)
    leaves = {n: t.requires_grad_() for n, t in inputs(0, 3).items()}
    cotangents = [torch.randn_like(x) for x in g(**leaves)]
    graph, results = record(lambda: forward_and_backward(g, leaves, cotangents))
    before = None
    for now in (known, others, known):
        bounds.copy_(now)
        graph.replay()
        got = [x if x is None else x.clone() for x in results]
        want = forward_and_backward(bounded(now.cuda(), now), leaves, cotangents)
        for a, b in zip(got, want, strict=True):
            assert a is b is None or torch.equal(a, b)
        assert before is None or not torch.equal(got[0], before)
        before = got[0]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("f", [chunk, kda, mamba, dplr, ema, convolution])
def test_replay_after_any_boundaries(f, gradients):
    """With max_num_seqs other numbers of chunks too, ends before T and no tokens at all."""
    bounds = torch.tensor(BOUNDS, device="cuda")
    leaves = {n: t.requires_grad_(gradients) for n, t in inputs(0, 3).items()}
    cotangents = [torch.randn_like(x) for x in f(**leaves, cu_seqlens=bounds, max_num_seqs=3)]

    def work(cu_seqlens, **more):
        g = lambda **x: f(**x, cu_seqlens=cu_seqlens, **more)
        return forward_and_backward(g, leaves, cotangents) if gradients else g(**leaves)

    graph, results = record(lambda: work(bounds, max_num_seqs=3))
    for now in (BOUNDS, (0, 1, 2, 3), (0, 64, 128, 180), (0, 0, 0, 0), (0, 0, 200, 200)):
        bounds.copy_(torch.tensor(now))
        graph.replay()
        got = [x if x is None else x.clone() for x in results]
        want = work(torch.tensor(now, device="cuda"), max_num_seqs=3)
        for a, b in zip(got, want, strict=True):
            assert a is b is None or torch.equal(a, b)
        known = work(torch.tensor(now, device="cuda"), cu_seqlens_cpu=torch.tensor(now))
        assert torch.equal(got[0], known[0])


@pytest.mark.parametrize("name", ["cumsum", "solve_tril"])
def test_replay_of_packed_helpers(name):
    known = torch.tensor(BOUNDS)
    bounds = {"cu_seqlens": known.cuda(), "cu_seqlens_cpu": known}
    f = {
        "cumsum": lambda g, **_: (chunk_local_cumsum(g, 64, **bounds),),
        "solve_tril": lambda v, **_: (solve_tril(v / 8, **bounds),),
    }[name]
    check_replay(f)


def test_replay_of_decoding():
    """A recorded step advances the state in place, as many times as it is replayed."""
    x = case(1, (2, 4), 64, 64, B=3, device="cuda", dtype=torch.bfloat16, flags=ALL)
    x = {n: t for n, t in x.items() if t is not None}
    state = x.pop("initial_state")
    start = state.clone()

    def step():
        return fused_recurrent_gated_delta_rule(
            **x, **options(ALL), initial_state=state, inplace_final_state=True
        )[0]

    with torch.no_grad():
        graph, o = record(step)
        state.copy_(start)
        got = []
        for _ in range(5):
            graph.replay()
            got.append(o.clone())
        last = state.clone()
        state.copy_(start)
        for replayed in got:
            assert torch.equal(replayed, step())
        assert torch.equal(state, last)


def test_replay_of_decoding_over_a_pool():
    """A recorded step of drafts follows the slots and the accepted tokens that it finds."""
    x = case(3, (2, 4), 64, 64, B=4, N=40, device="cuda", dtype=torch.bfloat16, gates="gk")
    pool = x["initial_state"]
    start = pool.clone()
    slots = torch.arange(12, device="cuda", dtype=torch.int32).view(4, 3)
    accepted = torch.ones(4, device="cuda", dtype=torch.int32)

    def step():
        return fused_recurrent_kda(
            x["q"], x["k"], x["v"], x["gk"], x["beta"], initial_state=pool,
            inplace_final_state=True, use_gate_in_kernel=True, lower_bound=-5.0,
            use_qk_l2norm_in_kernel=True, ssm_state_indices=slots, num_accepted_tokens=accepted,
        )[0]  # fmt: skip

    def draft(i):
        """Other slots, padding among them, other tokens."""
        generator = torch.Generator(device="cuda").manual_seed(i)
        order = torch.randperm(40, device="cuda", generator=generator)[:12].view(4, 3)
        order[i % 4] = -1
        slots.copy_(order)
        accepted.random_(1, 4, generator=generator)
        x["v"].normal_(generator=generator)

    with torch.no_grad():
        graph, o = record(step)
        pool.copy_(start)
        got = []
        for i in range(5):
            draft(i)
            graph.replay()
            got.append(o.clone())
        last = pool.clone()
        pool.copy_(start)
        for i, replayed in enumerate(got):
            draft(i)
            assert torch.equal(replayed, step())
        assert torch.equal(pool, last)
