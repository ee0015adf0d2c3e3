"""What is timed beside whole libraries: single stages, and the three forms of GDN."""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from linattn_edu.ops import gdn
from linattn_edu.testing import GDNInputs

QUADRATIC_BYTES = 2**31  # of one [heads, T, T] matrix in fp32; heads are taken in groups to fit


def stage_function(name: str, impl: str) -> Callable:
    """A stage of either set, or the recurrence, of "reference" or "triton"."""
    if name == "recurrent":
        package = "kernels" if impl == "triton" else "reference"
        return import_module(f"linattn_edu.{package}.delta.recurrent").recurrent
    fused = gdn.fused_stages(impl)
    return getattr(fused if hasattr(fused, name) else gdn.stages(impl), name)


def stage_arguments(i: GDNInputs, chunk_size: int, impl: str = "triton") -> dict[str, tuple]:
    """Stage -> (its arguments, its keyword arguments), each made by the stages before it.

    With an initial state in `i`, the stages that carry the state start from it and return the last.
    """
    staged, fused = gdn.stages(impl), gdn.fused_stages(impl)
    options = {"chunk_size": chunk_size}
    scaled = {**options, "scale": i.q.shape[-1] ** -0.5}
    S = i.initial_state
    last = {"output_final_state": S is not None}
    gc = staged.gate_cumsum(i.g, **options)
    A = staged.solve(i.k, i.beta, **options)
    w, u = staged.wy(i.k, i.v, i.beta, gc, A)
    h, v_new, _ = staged.state(i.k, w, u, gc, S, **options)
    P, R = fused.intra(i.q, i.k, i.beta, gc, **options)
    return {
        "gate_cumsum": ((i.g,), options),
        "solve": ((i.k, i.beta), options),
        "wy": ((i.k, i.v, i.beta, gc, A), {}),
        "state": ((i.k, w, u, gc, S), options | last),
        "output": ((i.q, i.k, v_new, h, gc), scaled),
        "intra": ((i.q, i.k, i.beta, gc), options),
        "scan": ((i.q, i.k, i.v, gc, P, R, S), {"scale": scaled["scale"], **last}),
        "recurrent": ((i.q, i.k, i.v, i.g, i.beta), {"initial_state": S}),
    }


def stage_calls(i: GDNInputs, chunk_size: int) -> dict[str, Callable[[], object]]:
    """Every stage's kernel as a call on its own inputs, which are computed here once."""

    def call(name: str, args: tuple, kwargs: dict) -> Callable[[], object]:
        f = stage_function(name, "triton")
        return lambda: f(*args, **kwargs)

    arguments = stage_arguments(i, chunk_size)
    return {name: call(name, args, kwargs) for name, (args, kwargs) in arguments.items()}


def recurrent(i: GDNInputs) -> tuple[Tensor, Tensor]:
    """The recurrence, one kernel that goes through the tokens one at a time."""
    from linattn_edu.kernels.delta.recurrent import recurrent

    return recurrent(i.q, i.k, i.v, i.g, i.beta)


def chunked(i: GDNInputs) -> Tensor:
    """The public function on the kernels."""
    return gdn.chunk_gated_delta_rule(i.q, i.k, i.v, i.g, i.beta, impl="triton")[0]


def quadratic(i: GDNInputs) -> Tensor:
    """The whole sequence as a single chunk, in fp32:

        o = scale (Q K^T * G) (I + diag(beta) tril(K K^T * G, -1))^-1 diag(beta) V

    T x T numbers a head, so the heads are taken in groups.
    """
    B, T, HV, _ = i.v.shape
    group = HV // i.q.shape[2]
    n = min(HV, max(1, QUADRATIC_BYTES // (4 * T * T)))
    o = torch.empty_like(i.v)
    for b in range(B):
        for first in range(0, HV, n):
            heads = torch.arange(first, min(first + n, HV), device=i.q.device)
            q, k = (x[b, :, heads // group].float().transpose(0, 1) for x in (i.q, i.k))
            v, g, beta = (x[b, :, heads].float().transpose(0, 1) for x in (i.v, i.g, i.beta))
            o[b, :, heads] = _quadratic(q, k, v, g, beta).transpose(0, 1).to(o.dtype)
    return o


def _quadratic(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [heads, T, K], v [heads, T, V], g, beta [heads, T] -> o [heads, T, V]."""
    gc = g.cumsum(-1)
    G = (gc[:, :, None] - gc[:, None, :]).tril_().exp_().tril_()
    L = (k @ k.mT).mul_(G).mul_(beta[:, :, None])
    # unitriangular: the diagonal and what is above it are not read
    v_new = torch.linalg.solve_triangular(L, beta[:, :, None] * v, upper=False, unitriangular=True)
    del L
    P = (q @ k.mT).mul_(G).mul_(q.shape[-1] ** -0.5)
    return P @ v_new


FORMS: dict[str, Callable[[GDNInputs], Tensor]] = {
    "chunked": chunked,
    "recurrent": lambda i: recurrent(i)[0],
    "quadratic": quadratic,
}
