"""Comparison and inputs shared by the tests, the chapters and the benchmarks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.tiles import repeat_heads


def relative_rms(x: Tensor, ref: Tensor) -> float:
    """||x - ref|| / ||ref|| in float64; inf if x holds a NaN or inf, ||x|| if ref is zero.

    NaN or inf in ref is a ValueError: nothing can be measured against it.
    """
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    if x.shape != ref.shape:
        raise ValueError(f"x must have ref's shape {tuple(ref.shape)}, got {tuple(x.shape)}")
    if not ref.isfinite().all():
        raise ValueError("ref must be finite")
    if not x.isfinite().all():
        return math.inf
    norm = ref.norm().item()
    return (x - ref).norm().item() / (norm or 1.0)


def assert_close(name: str, x: Tensor, ref: Tensor, tol: float) -> float:
    """Raise AssertionError with a report unless relative_rms(x, ref) <= tol; return the error."""
    error = relative_rms(x, ref)
    if not error <= tol:
        raise AssertionError(_report(name, x, ref, error, tol))
    return error


def _report(name: str, x: Tensor, ref: Tensor, error: float, tol: float) -> str:
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    diff = (x - ref).abs()
    bad = ~x.isfinite()
    worst = int(torch.where(bad, torch.inf, diff).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), x.shape))
    lines = [
        f"{name}: relative RMS error {error:.3e} exceeds {tol:.1e}",
        f"  shape {tuple(x.shape)}, not finite: {int(bad.sum())} of {x.numel()}",
        f"  worst at {where}: got {x[where].item():.6g}, expected {ref[where].item():.6g}",
        f"  rms of the reference {ref.square().mean().sqrt().item():.3e}",
    ]
    return "\n".join(lines)


def verdict(name: str, x: Tensor, ref: Tensor, tol: float) -> None:
    """assert_close, then one line without measured digits: the same text wherever it holds."""
    assert_close(name, x, ref, tol)
    print(f"{name:<32} OK  <= {tol:.0e}")


@dataclass
class GDNInputs:
    """Arguments of the gated delta rule, with q and k of unit length.

    With a gate for each channel, g is [B, T, HV, K]: Kimi Delta Attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None

    def asdict(self) -> dict[str, Tensor | None]:
        """The fields by name, to be passed on with ``**``."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def double(self) -> "GDNInputs":
        """The same values in float64."""
        return self._map(lambda x: x.double())

    def prefix(self, T: int) -> "GDNInputs":
        """The first T tokens."""
        out = {n: x[:, :T] for n, x in self.asdict().items() if n != "initial_state"}
        return GDNInputs(**out, initial_state=self.initial_state)

    def _map(self, f) -> "GDNInputs":
        return type(self)(**{n: x if x is None else f(x) for n, x in self.asdict().items()})


def gdn_inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    initial_state: bool = False,
    gate: str = "trained",
) -> GDNInputs:
    """Random inputs of the gated delta rule; the same seed gives the same inputs.

    q and k have unit length, v is normal, beta = sigmoid(normal). gate: "trained" draws
    g = -e^a softplus(normal - 4), mean about -0.05; "none" is g = 0; "reset" is "trained" with
    g = -1e4 at one token in eight; "closed" is g = -1e4 everywhere. g is float32 (float64 if
    dtype is), the others are of `dtype`, the initial state float32 or float64.
    """
    kinds = ("trained", "none", "reset", "closed")
    if gate not in kinds:
        raise ValueError(f"gate must be 'trained', 'none', 'reset' or 'closed', got {gate!r}")
    return _inputs((B, T, H, HV, K, V), (), dtype, device, seed, initial_state, gate)


def kda_inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    initial_state: bool = False,
    gate: str = "trained",
) -> GDNInputs:
    """As gdn_inputs with a gate for each channel, g [B, T, HV, K].

    gate: "reset" is g = -1e4 at one in eight of all tokens and channels; "safe" is
    g = -5 sigmoid(4 normal), between -5 and 0 and often near either.
    """
    kinds = ("trained", "none", "reset", "closed", "safe")
    if gate not in kinds:
        raise ValueError(f"gate must be one of {', '.join(map(repr, kinds))}, got {gate!r}")
    return _inputs((B, T, H, HV, K, V), (K,), dtype, device, seed, initial_state, gate)


def _inputs(
    shape: tuple[int, ...],
    channels: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    initial_state: bool,
    gate: str,
) -> GDNInputs:
    """Inputs whose g is [B, T, HV, *channels]."""
    B, T, H, HV, K, V = shape
    generator = torch.Generator(device=device).manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device, dtype=wide)

    q, k = (F.normalize(randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    v, beta = randn(B, T, HV, V).to(dtype), torch.sigmoid(randn(B, T, HV)).to(dtype)
    rate = torch.exp(rand(HV) * math.log(4.0)).view(HV, *(1 for _ in channels))
    x = randn(B, T, HV, *channels)
    g = -rate * F.softplus(x - 4)
    reset = rand(B, T, HV, *channels)
    if gate == "none":
        g = torch.zeros_like(g)
    elif gate == "closed":
        g = torch.full_like(g, -1e4)
    elif gate == "reset":
        g = torch.where(reset < 0.125, -1e4, g)
    elif gate == "safe":
        g = -5 * torch.sigmoid(4 * x)
    h0 = randn(B, HV, K, V) if initial_state else None
    return GDNInputs(q, k, v, g, beta, h0)


@dataclass
class SSDInputs:
    """Arguments of Mamba-2's scan; A and D as its layers have them."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    z: Tensor
    dt_bias: Tensor
    initial_states: Tensor
    seq_idx: Tensor

    def asdict(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def double(self) -> "SSDInputs":
        """The same values in float64."""
        return SSDInputs(
            **{n: x.double() if x.is_floating_point() else x for n, x in self.asdict().items()}
        )


def ssd_inputs(
    B: int,
    T: int,
    H: int,
    G: int,
    P: int,
    N: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    decay: str = "trained",
) -> SSDInputs:
    """Random inputs of Mamba-2's scan; the same seed gives the same inputs.

    x [B, T, H, P], B and C [B, T, G, N], D [H] and z like x are normal; dt + dt_bias with
    dt [B, T, H] and dt_bias [H] is normal - 2 before the softplus, A = -e^a with a in [0, log 16];
    initial_states [B, H, P, N]; seq_idx [B, T] changes at one token in thirty. decay: "trained";
    "none" is A = 0; "reset" is "trained" with dt = 1e4 at one token in eight; "closed" is
    A = -1e4. dt_bias, A, D and the states are float32 (float64 if dtype is), dt is of `dtype`.
    """
    kinds = ("trained", "none", "reset", "closed")
    if decay not in kinds:
        raise ValueError(f"decay must be 'trained', 'none', 'reset' or 'closed', got {decay!r}")
    generator = torch.Generator(device=device).manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device, dtype=wide)

    A = -torch.exp(rand(H) * math.log(16.0))
    A = {"none": torch.zeros_like(A), "closed": torch.full_like(A, -1e4)}.get(decay, A)
    dt = randn(B, T, H)
    if decay == "reset":
        dt = torch.where(rand(B, T, H) < 0.125, 1e4, dt)
    return SSDInputs(
        x=randn(B, T, H, P).to(dtype),
        dt=dt.to(dtype),
        A=A,
        B=randn(B, T, G, N).to(dtype),
        C=randn(B, T, G, N).to(dtype),
        D=randn(H),
        z=randn(B, T, H, P).to(dtype),
        dt_bias=0.1 * randn(H) - 2,
        initial_states=randn(B, H, P, N),
        seq_idx=(rand(B, T) < 1 / 30).int().cumsum(1).int(),
    )


def ssd_recurrence(
    C: Tensor, B: Tensor, rows: Tensor, g: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba-2's memory token by token: S_t = e^(g_t) S_(t-1) + B_t^T rows_t, and what reads it.

    Args:
        C, B: [B, T, G, N].  rows: What is written, step x, [B, T, H, P].
        g: Natural log decay, [B, T, H]; -inf empties the memory.  h0: [B, H, N, P].
    Returns:
        C_t S_t [B, T, H, P] and the last state [B, H, N, P].
    """
    S, read = h0, []
    C, B = (repeat_heads(y, rows.shape[2]) for y in (C, B))
    for t in range(rows.shape[1]):
        S = g[:, t].exp()[..., None, None] * S + B[:, t, :, :, None] * rows[:, t, :, None]
        read.append((C[:, t, :, None] @ S)[:, :, 0])
    return torch.stack(read, 1), S


def ssd_passes(
    x: SSDInputs,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
    limit: tuple[float, float] = (0.0, math.inf),
    dy: Tensor | None = None,
    dht: Tensor | None = None,
) -> SimpleNamespace:
    """Every tensor of both passes of Mamba-2, each made by the reference stage that makes it.

    Args:
        limit: Of the step, after the softplus.  dy, dht: Gradients of y = C S + D x and of the
            final state, in front of the gate; normal unless given.
    Returns:
        The inputs; h0, dy, dht; step, gc, s, h, final; dh_out; ds, dlast_passing, dh0; dB_state,
        dgc_state, dlast_state; dC, dB, dgc_inter; dx, dstep, dD; dgc_scores: names as in the
        book's table of Part IV, a decay's gradient with the place that it is from.
    """
    from linattn_edu.ops.ssd.chunk import stages

    r, run, options = SimpleNamespace(**x.asdict()), stages("reference"), {"chunk_size": chunk_size}
    r.seq_idx, r.h0 = seq_idx, x.initial_states.mT.contiguous()
    r.dy = torch.randn_like(x.x) if dy is None else dy
    r.dht = torch.randn_like(r.h0) if dht is None else dht
    raw = x.dt, x.A, x.dt_bias
    r.step, r.gc = run.chunk_cumsum(*raw, softplus=True, limit=limit, **options)
    r.s = run.chunk_state(x.B, x.x, r.step, r.gc, seq_idx, **options)
    end = {"output_final_state": True, **options}
    r.h, r.final = run.state_passing(r.s, r.gc, r.h0, seq_idx, **end)
    r.dh_out = run.chunk_scan_bwd_dstates(x.C, r.gc, r.dy, seq_idx, **options)
    given = r.dh_out, r.gc, r.h, r.dht, seq_idx
    r.ds, r.dlast_passing, r.dh0 = run.state_passing_bwd(*given, **options)
    given = x.B, x.x, r.step, r.gc, r.ds, seq_idx
    r.dB_state, r.dgc_state, r.dlast_state = run.chunk_state_bwd_db(*given, **options)
    given = x.C, x.B, x.x, r.step, r.gc
    reads = *given, r.h, r.dy, r.dB_state, seq_idx
    r.dC, r.dB, r.dgc_inter = run.chunk_scan_bwd_dc(*reads, **options)
    reads = *given, r.ds, r.dy, x.D, seq_idx
    r.dx, r.dstep, r.dD = run.chunk_scan_chunk_state_bwd_dx(*reads, **options)
    r.dgc_scores = run.chunk_scan_bwd_da_cs(*given, r.dy, seq_idx, **options)
    return r


@contextmanager
def poison() -> Iterator[None]:
    """Make torch.empty, torch.empty_like and Tensor.new_empty return NaN.

    An output element that a kernel leaves unwritten then fails every comparison.
    """
    owners = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
    originals = [getattr(owner, name) for owner, name in owners]

    def filled(f):
        def wrapper(*args, **kwargs):
            x = f(*args, **kwargs)
            with torch.no_grad():  # a leaf that requires a gradient may be filled too
                return x.fill_(torch.nan) if x.is_floating_point() else x

        return wrapper

    try:
        for (owner, name), original in zip(owners, originals, strict=True):
            setattr(owner, name, filled(original))
        yield
    finally:
        for (owner, name), original in zip(owners, originals, strict=True):
            setattr(owner, name, original)
