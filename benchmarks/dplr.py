"""The general delta rule: random inputs as a layer of RWKV-7 has them, and its recurrence."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import DPLR_BOUND, Case
from benchmarks.mamba import Inputs
from linattn_edu.reference.dplr.recurrent import dplr_recurrent, dplr_recurrent_bwd


@dataclass
class Rule(Inputs):
    """Of chunk_dplr_delta_rule."""

    sequences = ("q", "k", "v", "a", "b", "gk")
    scale: ClassVar[float | None] = None
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    a: Tensor  # [B, T, H, K]
    b: Tensor  # [B, T, H, K]
    gk: Tensor  # [B, T, H, K]

    def recurrence(self) -> tuple[Tensor, Tensor]:
        """o and the last state of the reference, token by token."""
        return dplr_recurrent(**self.asdict(), scale=self.scale)

    def gradients(self, do: Tensor) -> dict[str, Tensor]:
        """Of the recurrence, by the name of the input."""
        *found, _ = dplr_recurrent_bwd(**self.asdict(), do=do, scale=self.scale)
        return dict(zip(self.sequences, found, strict=True))


class Goose(Rule):
    """Of chunk_rwkv7, whose scale is 1."""

    scale = 1.0


def inputs(case: Case, dtype: torch.dtype, device: str) -> Rule:
    """The inputs of a case, the same in every run: a = -c, b = eta c, c of unit length, eta and the
    log decay over its bound the sigmoids of normals.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    (B, T, H, _, K, V) = case.shape
    q, k, c, eta, gate = (
        torch.randn(B, T, H, K, generator=generator, device=device) for _ in range(5)
    )
    v, c = torch.randn(B, T, H, V, generator=generator, device=device), F.normalize(c, dim=-1)
    tokens = q, F.normalize(k, dim=-1), v, -c, eta.sigmoid() * c
    kind = Goose if case.op == "rwkv7" else Rule
    return kind(*(x.to(dtype) for x in tokens), DPLR_BOUND * gate.sigmoid())
