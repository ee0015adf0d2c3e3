"""Mamba-2's operators: random inputs, and the recurrences they are compared with in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import Case
from linattn_edu.reference.ssd.selective_state_update import selective_state_update

PIECE = 64  # tokens whose states are held at a time where a recurrence is differentiated


@dataclass
class Inputs:
    """Arguments of an operator by name."""

    sequences: ClassVar[tuple[str, ...]]  # those that begin with axes for sequences and tokens

    def asdict(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def double(self) -> Self:
        """The same values in float64."""
        return type(self)(**{n: x.double() for n, x in self.asdict().items()})

    def first(self, T: int) -> Self:
        """The first T tokens of the first sequence."""
        parts = {n: x[:1, :T] if n in self.sequences else x for n, x in self.asdict().items()}
        return type(self)(**parts)

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        """Gradients of the recurrence by the name of the input, by autograd."""
        leaves = {n: x.detach().clone().requires_grad_() for n, x in self.asdict().items()}
        with torch.enable_grad():
            y, _ = type(self)(**leaves).recurrence()
            found = torch.autograd.grad(y, list(leaves.values()), dy)
        return dict(zip(leaves, found, strict=True))


@dataclass
class Scan(Inputs):
    """Of mamba_chunk_scan_combined; dt is the step itself."""

    sequences = ("x", "dt", "B", "C")
    x: Tensor  # [B, T, H, P]
    dt: Tensor  # [B, T, H]
    A: Tensor  # [H]
    B: Tensor  # [B, T, G, N]
    C: Tensor  # [B, T, G, N]
    D: Tensor  # [H]

    def recurrence(self) -> tuple[Tensor, None]:
        """S_t = exp(dt_t A) S_(t-1) + dt_t B_t^T x_t,   y_t = C_t S_t + D x_t."""
        (_, _, H, P), N = self.x.shape, self.B.shape[3]
        B, C = (y.repeat_interleave(H // y.shape[2], 2) for y in (self.B, self.C))
        tokens = (self.x, self.dt, torch.exp(self.dt * self.A), B, C)

        def step(S: Tensor, x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor):
            S = a[..., None, None] * S + (dt[..., None] * B)[..., None] * x[..., None, :]
            return (C[..., None, :] @ S)[..., 0, :], S

        y = _through(step, self.x.new_zeros(len(self.x), H, N, P), tokens)
        return y + self.D[:, None] * self.x, None


@dataclass
class Average(Inputs):
    """Of ema_scan."""

    sequences = ("x", "g")
    x: Tensor  # [B, T, H, D]
    g: Tensor  # [B, T, H]

    def recurrence(self) -> tuple[Tensor, None]:
        """h_t = e^g_t h_(t-1) + (1 - e^g_t) x_t,   y_t = h_t."""
        tokens = (self.x, self.g.exp()[..., None], -torch.expm1(self.g)[..., None])

        def step(h: Tensor, x: Tensor, a: Tensor, w: Tensor):
            h = a * h + w * x
            return h, h

        return _through(step, torch.zeros_like(self.x[:, 0]), tokens), None


@dataclass
class Token(Inputs):
    """Of selective_state_update; what has one number a head, not expanded."""

    sequences = ("initial_state", "x", "dt", "B", "C")
    initial_state: Tensor  # [B, H, P, N], overwritten by the operators
    x: Tensor  # [B, H, P]
    dt: Tensor  # [B, H], before dt_bias and the softplus
    A: Tensor  # [H]
    B: Tensor  # [B, G, N]
    C: Tensor  # [B, G, N]
    D: Tensor  # [H]
    dt_bias: Tensor  # [H]

    def first(self, T: int) -> Self:
        """The first sequence; each has one token."""
        return type(self)(
            **{n: x[:1] if n in self.sequences else x for n, x in self.asdict().items()}
        )

    def expanded(self) -> tuple[Tensor, ...]:
        """dt [B, H, P], A [H, P, N], D and dt_bias [H, P], with strides of 0 as in a layer."""
        (H, P), N = self.x.shape[1:], self.B.shape[2]
        dt, A = self.dt[..., None].expand(-1, -1, P), self.A[:, None, None].expand(H, P, N)
        return dt, A, *(y[:, None].expand(H, P) for y in (self.D, self.dt_bias))

    def recurrence(self) -> tuple[Tensor, Tensor]:
        """out [B, 1, H, P] and the state after the token."""
        state, (dt, A, D, bias) = self.initial_state.clone(), self.expanded()
        out = selective_state_update(
            state, self.x, dt, A, self.B, self.C, D, None, bias, softplus=True
        )
        return out[:, None], state


def _through(step: Callable, S: Tensor, tokens: tuple[Tensor, ...]) -> Tensor:
    """y_t of y_t, S = step(S, *tokens at t), [B, T, ...]; each y_t is [B, ...]."""

    def piece(S: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
        ys = []
        for at in zip(*(y.unbind(1) for y in tokens), strict=True):
            y, S = step(S, *at)
            ys.append(y)
        return torch.stack(ys, 1), S

    out = []
    for part in zip(*(y.split(PIECE, 1) for y in tokens), strict=True):
        y, S = checkpoint(piece, S, *part, use_reentrant=False)
        out.append(y)
    return torch.cat(out, 1)


def inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """The inputs of a case, the same in every run; H are the groups of B and C, HV the heads."""
    generator = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    B, T, G, H, N, P = case.shape
    if case.op == "ema":  # 1 - e^g is the sigmoid of a normal
        return Average(x=randn(B, T, H, P).to(dtype), g=-F.softplus(randn(B, T, H)))
    tokens = () if case.op.endswith("_decode") else (T,)
    x, dt = randn(B, *tokens, H, P).to(dtype), randn(B, *tokens, H)
    A = -torch.exp(torch.rand(H, generator=generator, device=device) * math.log(16.0))
    b, c = (randn(B, *tokens, G, N).to(dtype) for _ in "BC")
    D = randn(H)
    if tokens:
        return Scan(x=x, dt=F.softplus(dt - 4), A=A, B=b, C=c, D=D)
    state, bias = 0.1 * randn(B, H, P, N), torch.full_like(D, -4.0)
    return Token(initial_state=state, x=x, dt=dt.to(dtype), A=A, B=b, C=c, D=D, dt_bias=bias)
