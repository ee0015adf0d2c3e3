"""chunk_kda as a whole: inputs and tolerances; gdn_checks has the rest."""

from functools import partial

import gdn_checks
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu import chunk_kda

GATE = ("A_log", "dt_bias")
GRADIENTS_OF_GATE = ("dA_log", "ddt_bias")
FLOOR = 150.0  # gate_cumsum holds a token's log2 decay above it


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Relative RMS against float64: o, ht, h; dg, dbeta, db; the other gradients.

    In float32 dA_log and ddt_bias are within the tolerance of dg, whose sums they are: of a head's
    single number the terms cancel up to ten times over.
    """
    of_gates = ("dg", "dbeta", "db") + GRADIENTS_OF_GATE * (dtype == torch.float32)
    kind = 0 if name in ("o", "ht", "h") else 2 if name in of_gates else 1
    return gdn_checks.TOLERANCES[dtype][kind]


def inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    norm: float = 1.0,
    mask: float = 0.0,
    shut: float = 0.0,
    safe: bool = False,
    raw_gate: bool = False,
    parameters: tuple[str, ...] = GATE,
    seed: int = 0,
    **kinds,
) -> dict[str, Tensor]:
    """Tensor arguments by name, the gates logsigmoid(normal) / norm: a share `mask` of them open,
    a share `shut` -1000, with `safe` none below -5. `kinds`: as in gdn_checks.inputs.
    """
    x = gdn_checks.inputs(B, T, H, HV, K, V, dtype, device, seed=seed, **kinds)
    generator = torch.Generator(device=device).manual_seed(seed + 2)
    options = {"generator": generator, "device": device, "dtype": x["g"].dtype}
    g = torch.randn(B, T, HV, K, **options)
    drawn = torch.rand(2, *g.shape, **options)
    if raw_gate:
        parts = {"A_log": torch.randn(HV, **options), "dt_bias": torch.randn(HV * K, **options)}
        return x | {"g": g} | {n: parts[n] for n in parameters}
    g = F.logsigmoid(g) / norm * (drawn[0] > mask)
    g = torch.where(drawn[1] < shut, -1000, g)
    return x | {"g": g.clamp(min=-5) if safe else g}


run = partial(gdn_checks.run, f=chunk_kda)
triton = partial(gdn_checks.triton, f=chunk_kda)
check = partial(gdn_checks.check, tolerance=tolerance)


def spacing(g: Tensor, chunk_size: int = 64) -> float:
    """How well float32 tells apart the decays of a chunk: they are differences of sums of g."""
    return gdn_checks.spacing(g.clamp(min=-FLOOR / 1.4426950408889634), chunk_size)
