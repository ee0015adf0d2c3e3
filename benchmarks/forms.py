"""What is timed beside whole libraries: single stages, and the three forms of GDN."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.cases import SAFE_BOUND, STAGES
from benchmarks.mamba import Scan
from benchmarks.measure import gradient
from linattn_edu.ops import gdn, kda, ssd
from linattn_edu.testing import GDNInputs

QUADRATIC_BYTES = 2**31  # of one [heads, T, T] matrix in fp32; heads are taken in groups to fit


def stage_function(name: str, impl: str) -> Callable:
    """A stage of any set, or the recurrence, of "reference" or "triton"."""
    fused = gdn.fused_stages(impl), kda.fused_stages(impl), ssd.fused_stages(impl)
    for stages in (*fused, gdn.stages(impl), kda.stages(impl), ssd.stages(impl)):
        if hasattr(stages, name):
            return getattr(stages, name)
    package = "kernels" if impl == "triton" else "reference"
    module = "recurrent" if name.startswith("recurrent") else name
    return getattr(import_module(f"linattn_edu.{package}.delta.{module}"), name)


class StageArguments(Mapping):
    """Stage -> (its arguments, its keyword arguments), made by the stages before it when asked for.

    So a stage that fails takes with it only those that need what it makes. With an initial state
    in `i`, the stages that carry the state start from it and return the last, and those of the
    backward pass start from a gradient of the final state.
    """

    names = STAGES["gdn"]
    in_place = ("wy_bwd",)  # whose kernel adds to some of its arguments

    def __init__(self, i: GDNInputs, chunk_size: int, impl: str = "triton"):
        self.i, self.impl, self._made = i, impl, {}
        self.options = {"chunk_size": chunk_size}
        self.scaled = {**self.options, "scale": i.q.shape[-1] ** -0.5}

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> tuple[tuple, dict]:
        if name not in self.names:
            raise KeyError(name)
        return getattr(self, f"_{name}")()

    def made(self, name: str) -> object:
        """What a stage makes of its arguments."""
        if name not in self._made:
            args, kwargs = self[name]
            if name in self.in_place:
                args = tuple(x.clone() for x in args)
            self._made[name] = stage_function(name, self.impl)(*args, **kwargs)
        return self._made[name]

    @cached_property
    def do(self) -> Tensor:
        return gradient(self.i.v)

    @cached_property
    def dht(self) -> Tensor | None:
        S = self.i.initial_state
        return None if S is None else gradient(S)

    def _gate_cumsum(self):
        return (self.i.g,), self.options

    def _solve(self):
        return (self.i.k, self.i.beta), self.options

    def _wy(self):
        i = self.i
        return (i.k, i.v, i.beta, self.made("gate_cumsum"), self.made("solve")), {}

    def _state(self):
        S = self.i.initial_state
        args = (self.i.k, *self.made("wy"), self.made("gate_cumsum"), S)
        return args, self.options | {"output_final_state": S is not None}

    def _output(self):
        h, v_new, _ = self.made("state")
        return (self.i.q, self.i.k, v_new, h, self.made("gate_cumsum")), self.scaled

    def _intra_chunk(self):
        return (self.i.q, self.i.k, self.i.beta, self.made("gate_cumsum")), self.options

    def _scan(self):
        i, (P, R, *_) = self.i, self.made("intra_chunk")
        kwargs = {"scale": self.scaled["scale"], "output_final_state": i.initial_state is not None}
        return (i.q, i.k, i.v, self.made("gate_cumsum"), P, R, i.initial_state), kwargs

    def _recurrent(self):
        i = self.i
        return (i.q, i.k, i.v, i.g, i.beta), {"initial_state": i.initial_state}

    def _output_bwd(self):
        args, kwargs = self._output()
        return (*args, self.do), kwargs

    def _state_bwd(self):
        w, _ = self.made("wy")
        _, _, dv_new, _ = self.made("output_bwd")
        gc = self.made("gate_cumsum")
        return (self.i.q, self.i.k, w, gc, self.do, dv_new, self.dht), self.scaled

    def _wy_bwd(self):
        args, _ = self._wy()
        h, v_new, _ = self.made("state")
        _, dk, _, dgc = self.made("output_bwd")
        dh, dv_new, _ = self.made("state_bwd")
        return (*args, h, v_new, dh, dv_new, dk, dgc), {}

    def _gate_bwd(self):
        dgc = self.made("wy_bwd")[-1]
        return (dgc, self.i.g), self.options

    def _recurrent_bwd(self):
        (*args,), kwargs = self._recurrent()
        return (*args, self.do, self.dht), kwargs


class KDAStageArguments(StageArguments):
    """The same for Kimi Delta Attention."""

    names = STAGES["kda"]
    in_place = ("kda_intra_bwd",)

    def _kda_intra(self):
        i = self.i
        return (i.q, i.k, i.beta, self.made("gate_cumsum")), self.options

    def _wy(self):
        i, (_, A) = self.i, self.made("kda_intra")
        return (i.k, i.v, i.beta, self.made("gate_cumsum"), A, i.q), {}

    def _state(self):
        S, (w, u, kg, _) = self.i.initial_state, self.made("wy")
        args = (kg, w, u, self.made("gate_cumsum"), S)
        return args, self.options | {"output_final_state": S is not None}

    def _output(self):
        (P, _), (h, v_new, _) = self.made("kda_intra"), self.made("state")
        qg = self.made("wy")[-1]
        return (qg, None, v_new, h, None, P), self.scaled  # k and gc are not used

    def _kda_scan(self):
        (P, _), (w, u, kg, qg) = self.made("kda_intra"), self.made("wy")
        args = (qg, kg, w, u, self.made("gate_cumsum"), P, self.i.initial_state)
        scale, last = self.scaled["scale"], self.i.initial_state is not None
        return args, {"scale": scale, "output_final_state": last}

    def _kda_scans(self):
        i, (P, _), (w, u, kg, qg) = self.i, self.made("kda_intra"), self.made("wy")
        args = (qg, kg, w, u, self.made("gate_cumsum"), P, self.do, i.initial_state, self.dht)
        return args, {"scale": self.scaled["scale"]}

    def _state_bwd(self):
        (P, _), (w, _, kg, qg) = self.made("kda_intra"), self.made("wy")
        gc = self.made("gate_cumsum")
        return (qg, kg, w, gc, self.do, None, self.dht, None, P), self.scaled

    def _kda_output_bwd(self):
        h, v_new, _ = self.made("state")
        return (v_new, h, self.do), self.scaled

    def _kda_wy_bwd(self):
        i, (_, A) = self.i, self.made("kda_intra")
        (h, v_new, _), (dh, dv_new, _) = self.made("state"), self.made("state_bwd")
        return (i.v, i.beta, A, h, v_new, dh, dv_new), {}

    def _kda_intra_bwd(self):
        i, (dqg, dP) = self.i, self.made("kda_output_bwd")
        dkb, dkg, _, dL, dbeta, dgl = self.made("kda_wy_bwd")
        gc = self.made("gate_cumsum")
        return (i.q, i.k, i.beta, gc, dP, dL, dqg, dkb, dkg, dgl, dbeta), {}

    def _gate_bwd(self):
        return (self.made("kda_intra_bwd")[-1], self.i.g), self.options

    def _kda_prepare(self):
        return self._kda_intra()

    def _kda_fused_scan(self):
        i, (P, A, kd, kg, qg) = self.i, self.made("kda_prepare")
        args = (qg, kg, kd, i.v, i.beta, self.made("gate_cumsum"), P, A, i.initial_state)
        scale, last = self.scaled["scale"], i.initial_state is not None
        return args, {"scale": scale, "output_final_state": last}

    def _kda_gates(self):
        return (self.i.q, self.i.k, self.i.g), self.options

    def _kda_fused_scans(self):
        i, (P, A, *_), (gc, kd, kg, qg) = self.i, self.made("kda_prepare"), self.made("kda_gates")
        args = (qg, kg, kd, i.v, i.beta, gc, P, A, self.do, i.initial_state, self.dht)
        return args, {"scale": self.scaled["scale"]}

    def _kda_fused_intra_bwd(self):
        i, (h, v_new, dh, Z, *_) = self.i, self.made("kda_fused_scans")
        gc = self.made("gate_cumsum")
        return (i.q, i.k, i.v, i.beta, gc, h, v_new, self.do, dh, Z), self.scaled


class SSDStageArguments(StageArguments):
    """The same for Mamba-2: its staged form, and the fused stages in chunks twice as long."""

    names = STAGES["ssd"]
    in_place = ()

    def __init__(self, i: Scan, chunk_size: int, impl: str = "triton"):
        self.i, self.impl, self._made = i, impl, {}
        self.options = {"chunk_size": chunk_size}
        self.longer = {"chunk_size": 2 * chunk_size}

    @cached_property
    def dy(self) -> Tensor:
        return gradient(self.i.x)

    def _chunk_cumsum(self):
        return (self.i.dt, self.i.A), self.options

    def _chunk_cumsum_log(self):
        return (self.i.dt, self.i.A), self.longer

    def _chunk_state(self):
        return (self.i.B, self.i.x, *self.made("chunk_cumsum")), self.options

    def _state_passing(self):
        _, gc = self.made("chunk_cumsum")
        return (self.made("chunk_state"), gc), self.options

    def _chunk_scan(self):
        i, (h, _) = self.i, self.made("state_passing")
        return (i.C, i.B, i.x, *self.made("chunk_cumsum"), h, i.D), self.options

    def _chunk_scan_bwd_dstates(self):
        _, gc = self.made("chunk_cumsum")
        return (self.i.C, gc, self.dy), self.options

    def _state_passing_bwd(self):
        (_, gc), (h, _) = self.made("chunk_cumsum"), self.made("state_passing")
        return (self.made("chunk_scan_bwd_dstates"), gc, h), self.options

    def _chunk_state_bwd_db(self):
        ds, *_ = self.made("state_passing_bwd")
        return (self.i.B, self.i.x, *self.made("chunk_cumsum"), ds), self.options

    def _chunk_scan_bwd_dc(self):
        i, (h, _) = self.i, self.made("state_passing")
        dB_state, *_ = self.made("chunk_state_bwd_db")
        return (i.C, i.B, i.x, *self.made("chunk_cumsum"), h, self.dy, dB_state), self.options

    def _chunk_scan_chunk_state_bwd_dx(self):
        i, (ds, *_) = self.i, self.made("state_passing_bwd")
        return (i.C, i.B, i.x, *self.made("chunk_cumsum"), ds, self.dy, i.D), self.options

    def _chunk_scan_bwd_da_cs(self):
        i = self.i
        return (i.C, i.B, i.x, *self.made("chunk_cumsum"), self.dy), self.options

    def _chunk_cumsum_bwd(self):
        dgc, (_, dlast, _) = self.made("chunk_scan_bwd_da_cs"), self.made("state_passing_bwd")
        _, dstep, _ = self.made("chunk_scan_chunk_state_bwd_dx")
        return (dgc, dlast, dstep, self.i.dt, self.i.A), self.options

    def _chunk_scores(self):
        return (self.i.C, self.i.B), self.longer

    def _ssd_states(self):
        return (self.i.B, self.i.x, *self.made("chunk_cumsum_log")), self.longer

    def _ssd_fwd(self):
        i = self.i
        return (
            i.C,
            i.B,
            self.made("chunk_scores"),
            i.x,
            *self.made("chunk_cumsum_log"),
            None,
            i.D,
        ), {}

    def _ssd_states_bwd(self):
        _, gc = self.made("chunk_cumsum_log")
        return (self.i.C, gc, self.dy), self.longer

    def _ssd_bwd_dc(self):
        (_, gc), h = self.made("chunk_cumsum_log"), self.made("ssd_states")
        dh, _ = self.made("ssd_states_bwd")
        return (self.i.C, gc, h, dh, self.dy), self.longer

    def _ssd_bwd_dx(self):
        i, (dh, _) = self.i, self.made("ssd_states_bwd")
        given = i.C, i.B, i.x, *self.made("chunk_cumsum_log")
        dC, dgc, _ = self.made("ssd_bwd_dc")
        return (*given, dh, self.dy, dC, dgc, i.D), self.longer


def stage_arguments(i: GDNInputs | Scan, chunk_size: int, impl: str = "triton") -> StageArguments:
    """The arguments of the stages of the operator whose inputs, or whose gate, `i` has."""
    if isinstance(i, Scan):
        return SSDStageArguments(i, chunk_size, impl)
    kind = StageArguments if i.g.ndim == 3 else KDAStageArguments
    return kind(i, chunk_size, impl)


def stage_call(arguments: StageArguments, name: str, *, safe: bool = False) -> Callable[[], object]:
    """A stage's kernel as a call on its own inputs, which are computed here once.

    safe: With the promise that no log decay is below SAFE_BOUND.
    """
    args, kwargs = arguments[name]
    if safe:
        kwargs = kwargs | {"lower_bound": SAFE_BOUND}
    f = stage_function(name, "triton")
    return lambda: f(*args, **kwargs)


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
