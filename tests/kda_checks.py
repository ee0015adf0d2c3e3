"""chunk_kda as a whole: inputs, gradients by autograd and in float64, tolerances."""

from itertools import pairwise

import gdn_checks
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu import chunk_kda
from linattn_edu.reference.delta.recurrent import recurrent, recurrent_bwd
from linattn_edu.testing import assert_close

GATE = ("A_log", "dt_bias")
GRADIENTS_OF_GATE = ("dA_log", "ddt_bias")
FLOOR = 150.0  # gate_cumsum holds a token's log2 decay above it


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Relative RMS against float64: o, ht, h; dg, dbeta; the other gradients.

    In float32 dA_log and ddt_bias are within the tolerance of dg, whose sums they are: of a head's
    single number the terms cancel up to ten times over.
    """
    of_gates = ("dg", "dbeta") + GRADIENTS_OF_GATE * (dtype == torch.float32)
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


def run(x: dict[str, Tensor], do: Tensor | None, dht: Tensor | None, f=chunk_kda, **options):
    """gdn_checks.run of chunk_kda."""
    return gdn_checks.run(x, do, dht, f=f, **options)


def triton(x: dict[str, Tensor], do: Tensor | None, dht: Tensor | None, **options):
    """`run` with the kernels, returning the final state."""
    return run(x, do, dht, output_final_state=True, impl="triton", **options)


def log_decay(x: dict[str, Tensor], lower_bound: float | None) -> Tensor:
    """The gates of fla-core 0.6.0, by their formulas."""
    a = x["g"] + x["dt_bias"].view(x["g"].shape[2:]) if "dt_bias" in x else x["g"]
    rate = x["A_log"].exp()[:, None] if "A_log" in x else 1
    if lower_bound is None:
        return -rate * torch.logaddexp(a, torch.zeros_like(a))
    return lower_bound * torch.sigmoid(rate * a)


def exact(
    x: dict[str, Tensor],
    do: Tensor,
    dht: Tensor | None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    **flags: bool,
) -> dict[str, Tensor]:
    """What `run` should give, in float64: the recurrence, its adjoint, autograd of the flags."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    q, k, v, g, beta, state = gdn_checks.recurrence_arguments(leaves, **flags)
    if use_gate_in_kernel:
        g = log_decay(leaves, lower_bound)
    arguments = [q, k, v, g, beta, state]
    v_first = flags.get("state_v_first")
    dht = dht if dht is None else dht.double().mT if v_first else dht.double()
    given = [y if y is None else y.detach() for y in arguments]
    o, ht, *gradients = _packed(given, do.double(), dht, scale, cu_seqlens)
    pairs = [(y, dy) for y, dy in zip(arguments, gradients, strict=True) if y is not None]
    values, gradients = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(values, leaves.values(), gradients)
    want = {"o": o, "ht": ht.mT if v_first else ht}
    return want | {f"d{n}": dx for n, dx in zip(leaves, gradients, strict=True)}


def _packed(arguments, do, dht, scale, cu_seqlens) -> list[Tensor]:
    """o, the final state, dq, dk, dv, dg, dbeta, dh0 of the sequences, each by itself."""
    if cu_seqlens is None:
        return _alone(arguments, do, dht, scale)
    *tokens, state = arguments
    parts = []
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        one = [y[:, a:b] for y in tokens] + [None if state is None else state[n : n + 1]]
        parts.append(_alone(one, do[:, a:b], None if dht is None else dht[n : n + 1], scale))
    sequence_axis = (1, 0, 1, 1, 1, 1, 1, 0)
    return [torch.cat(p, d) for p, d in zip(zip(*parts, strict=True), sequence_axis, strict=True)]


def _alone(arguments, do, dht, scale) -> list[Tensor]:
    q, k, v, g, beta, state = arguments
    if not q.shape[1]:
        zero = v.new_zeros(1, v.shape[2], q.shape[-1], v.shape[-1])
        ht, dh0 = (zero if y is None else y for y in (state, dht))
        return [do, ht, q, k, v, g, beta, dh0]  # no tokens: empty, and the state goes through
    options = {"gk": g, "scale": scale, "initial_state": state}
    o, ht = recurrent(q, k, v, None, beta, **options)
    dq, dk, dv, _, dbeta, dg, _, dh0 = recurrent_bwd(q, k, v, None, beta, do, dht, **options)
    return [o, ht, dq, dk, dv, dg, dbeta, dh0]


def check(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    dtype: torch.dtype,
    every: float = 0.0,
    **at_least: float,
) -> None:
    """Compare every output and gradient by name; all errors are in the one report.

    every, at_least: what the tolerance is at least, of all and of the named ones. What is smaller
    than TINY in rms is compared as if it were of that size: see gdn_checks.check.
    """
    failed, tiny = [], gdn_checks.TINY
    for name, y in got.items():
        tol = max(tolerance(name, dtype), every, at_least.get(name, 0))
        rms = want[name].square().mean().sqrt().item() if want[name].numel() else 0
        shift = tiny if rms < tiny else 0
        try:
            assert_close(name, y + shift, want[name] + shift, tol)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n" + "\n".join(failed)


def spacing(g: Tensor, chunk_size: int = 64) -> float:
    """How well float32 tells apart the decays of a chunk: they are differences of sums of g."""
    return gdn_checks.spacing(g.clamp(min=-FLOOR / 1.4426950408889634), chunk_size)
