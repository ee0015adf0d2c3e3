"""What another library has in place of a ladder's shipped kernel, called on the same inputs.

A peer computes what one rung that ships does. Its function here gets that rung's `given`, imports
the library, brings the inputs into its form, and returns the call that is timed. What the call
returns is compared after `same`. Where no library has a stage, its ladder has no peer: around
output_bwd, wy_bwd, kda_intra, dplr_intra and chunk_scan_bwd_dc others cut the work in other places.
"""

import gc as garbage
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from triton import testing
from triton.runtime.autotuner import Autotuner

from benchmarks.adapters import mamba_ssm_module, version_of

Call = Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """of: the rung that it stands beside.  functions: those that the call is made of.  same: of its
    results, what `like` makes of the rung's; with the inputs.
    """

    library: str
    of: str
    functions: str
    make: Callable[..., Call]
    same: Callable[[object], object] = lambda results: results
    like: Callable[[object, tuple], object] = lambda results, given: results

    @property
    def name(self) -> str:
        return f"{self.library}: {self.of}"

    def call(self, given: tuple) -> Call:
        """The call; the library is imported and the inputs are adapted the first time."""
        made = cache(partial(self.make, *given))
        return lambda: made()()

    def columns(self) -> dict[str, str]:
        """What its row has beside that of a rung."""
        version = version_of(self.library)
        named = {"library": self.library, "version": version, "functions": self.functions}
        return named | {"of": self.of}


PEERS: dict[str, dict[str, Peer]] = {}  # chapter -> name -> peer


def peer(chapter: str, library: str, of: str, functions: str, **forms: Callable):
    """Declare a peer."""

    def declared(make):
        one = Peer(library, of, functions, make, **forms)
        PEERS.setdefault(chapter, {})[one.name] = one
        return make

    return declared


def here(chapter: str) -> dict[str, Peer]:
    """The peers of a ladder whose libraries are installed."""
    return {n: p for n, p in PEERS.get(chapter, {}).items() if version_of(p.library)}


def tune(*, once: bool) -> None:
    """Triton's tuners choose anew.

    once: Each configuration is compiled and called once, and the first is taken: for few tokens,
        beside other processes, where times say nothing.
    """
    bench = _once if once else partial(testing.do_bench, warmup=5, rep=20)
    Autotuner.do_bench = property(lambda self: bench)
    for x in garbage.get_objects():
        if issubclass(type(x), Autotuner):
            x.cache.clear()
            x.cache_results = False  # what another process has left on disk


def _once(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
    call()
    return [1.0 for _ in quantiles]


# ---- fla


@peer("01_recurrent", "fla", "recurrent", "fused_recurrent_gated_delta_rule")
def recurrent(q, k, v, g, beta) -> Call:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as f

    return lambda: f(q, k, v, g=g, beta=beta)[0]


@peer("02_gate_cumsum", "fla", "gate_cumsum", "chunk_local_cumsum")
def gate_cumsum(g, C) -> Call:
    from fla.ops.utils import chunk_local_cumsum

    return lambda: chunk_local_cumsum(g, C, scale=1 / math.log(2))


@peer("03_solve", "fla", "solve", "chunk_scaled_dot_kkt_fwd, solve_tril")
def solve(k, beta, C) -> Call:
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from fla.ops.utils.solve_tril import solve_tril

    return lambda: solve_tril(
        chunk_scaled_dot_kkt_fwd(k, beta=beta, chunk_size=C), output_dtype=k.dtype
    )


@peer("04_wy", "fla", "wy", "recompute_w_u_fwd")
def wy(k, v, beta, gc, A) -> Call:
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

    C = A.shape[-1]
    rows = gc.unflatten(1, (-1, C)).transpose(2, 3)  # [B, NT, HV, C]
    decay = torch.exp2((rows[..., :, None] - rows[..., None, :]).clamp(max=0))
    A = (A * decay.transpose(2, 3).flatten(1, 2)).to(A)  # its inverse has the decay in it
    return lambda: recompute_w_u_fwd(k, v, beta, A, gc)


@peer("05_state", "fla", "state", "chunk_gated_delta_rule_fwd_h", same=lambda out: out[:2])
def state(k, w, u, gc, C) -> Call:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    return lambda: chunk_gated_delta_rule_fwd_h(k, w, u, gc, chunk_size=C)


@peer("06_output", "fla", "output", "chunk_fwd_o")
def output(q, k, v_new, h, gc, scale, C) -> Call:
    from fla.ops.common.chunk_o import chunk_fwd_o

    return lambda: chunk_fwd_o(q, k, v_new, h, gc, scale=scale, chunk_size=C)


@peer(
    "09_state_bwd", "fla", "state_bwd", "chunk_gated_delta_rule_bwd_dhu",
    same=lambda out: (out[0], out[2]),
)  # fmt: skip
def state_bwd(q, k, w, gc, do, dv_new, scale, C) -> Call:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu as f

    return lambda: f(q, k, w, do, dv_new, gc, scale=scale, chunk_size=C)


@peer("11_kda_intra_bwd", "fla", "kda_intra_bwd", "chunk_kda_bwd_intra")
def kda_intra_bwd(q, k, beta, gc, dP, dL, dqg, dkb, dkg, dgl, dbeta) -> Call:
    from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra as f

    # fp32, as its own pass makes them; all that the ladder adds to is 0
    given = [x.float() for x in (dP, dL, dqg, dkb, dbeta, torch.zeros_like(gc))]
    return lambda: f(q, k, gc, beta, *given, chunk_size=dP.shape[-1])


@peer("12_gate_bwd", "fla", "gate_bwd without a raw gate", "chunk_local_cumsum")
def gate_bwd(dgc, C) -> Call:
    from fla.ops.utils import chunk_local_cumsum

    return lambda: chunk_local_cumsum(dgc, C, reverse=True)


@peer("12_gate_bwd", "fla", "gate_bwd", "chunk_local_cumsum, gdn_gate_bwd")
def gate_bwd_raw(dgc, raw, A_log, bias, C) -> Call:
    from fla.ops.gated_delta_rule.gate import gdn_gate_bwd
    from fla.ops.utils import chunk_local_cumsum

    return lambda: gdn_gate_bwd(raw, A_log, bias, chunk_local_cumsum(dgc, C, reverse=True))


@peer("23_cp_conv", "fla", "causal_conv1d", "causal_conv1d_fwd", same=lambda out: [out[0]])
def causal_conv1d(x, w, b) -> Call:
    from fla.modules.causal_conv1d import causal_conv1d_fwd

    return lambda: causal_conv1d_fwd(x, w, b, None, activation="silu")


@peer("23_cp_conv", "fla", "causal_conv1d_bwd", "causal_conv1d_bwd", same=lambda out: list(out[:3]))
def causal_conv1d_bwd(x, w, b, dy) -> Call:
    from fla.modules.causal_conv1d import causal_conv1d_bwd as f

    return lambda: f(x, dy, None, w, b, activation="silu")


@peer("26_decoding", "fla", "recurrent", "fused_recurrent_gated_delta_rule")
def decoding(q, k, v, g, beta, S) -> Call:
    """The state that it returns is another one: it does not write in place."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as f

    return lambda: f(q, k, v, g=g, beta=beta, initial_state=S, output_final_state=True)


@peer(
    "27_model_end_to_end", "fla", "rms_norm_gated", "layer_norm_gated_fwd",
    same=lambda out: [out[0][:, None]],
)  # fmt: skip
def norm(x, gate, w, eps) -> Call:
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd as f

    x, gate = x[:, 0], gate[:, 0]
    return lambda: f(x, gate, w[0], None, "swish", eps, is_rms_norm=True)


# ---- mamba_ssm, whose decays are natural logarithms and whose states are [P, N]


def by_chunks(C: int, *tensors: Tensor) -> list[Tensor]:
    """[B, T, H] -> [B, H, NT, C]"""
    return [x.unflatten(1, (-1, C)).permute(0, 3, 1, 2).contiguous() for x in tensors]


def by_tokens(x: Tensor) -> Tensor:
    """[B, H, NT, C] -> [B, T, H]"""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def natural(gc: Tensor, C: int) -> Tensor:
    return by_chunks(C, gc * math.log(2))[0]


def turned(states: Tensor, dtype: torch.dtype) -> Tensor:
    """States as its kernels read them, in the inputs' dtype as in its own passes."""
    return states.mT.to(dtype).contiguous()


@peer(
    "13_ssd", "mamba_ssm", "chunk_scan", "_bmm_chunk_fwd, _chunk_scan_fwd",
    same=lambda out: [out[0]],
)  # fmt: skip
def chunk_scan(C, B, x, step, gc, h, L) -> Call:
    scores = mamba_ssm_module("ssd_bmm")._bmm_chunk_fwd
    scan = mamba_ssm_module("ssd_chunk_scan")._chunk_scan_fwd
    (step,), gc, h = by_chunks(L, step), natural(gc, L), turned(h, x.dtype)
    return lambda: scan(scores(C, B, L, output_dtype=torch.float32), x, step, gc, C, h)


@peer(
    "14_chunk_scan_bwd_dstates", "mamba_ssm", "chunk_scan_bwd_dstates", "_chunk_scan_bwd_dstates",
    same=lambda out: [out.mT],
)  # fmt: skip
def dstates(C, gc, dy, L) -> Call:
    f, gc = mamba_ssm_module("ssd_chunk_scan")._chunk_scan_bwd_dstates, natural(gc, L)
    return lambda: f(C, gc, dy, dtype=torch.float32)


@peer(
    "15_state_passing_bwd", "mamba_ssm", "state_passing_bwd", "_state_passing_bwd",
    same=lambda out: (out[0], out[1].transpose(1, 2), out[2]),
    like=lambda out, _: (out[0].flatten(3), out[1], out[2].flatten(2)),
)  # fmt: skip
def state_passing_bwd(dh, gc, h, dht, L) -> Call:
    f, last = mamba_ssm_module("ssd_state_passing")._state_passing_bwd, natural(gc, L)[..., -1]
    dh, h, dht = dh.flatten(3), h.flatten(3), dht.flatten(2)
    return lambda: f(h, last, dh, dfinal_states=dht, has_initial_states=True)


def without_last(out: tuple[Tensor, Tensor], given: tuple) -> tuple[Tensor, Tensor]:
    """What a chunk's last token says of gc is 0 together with dlast: a sum from 0 leaves it out."""
    (dB, dgc), L = out, given[-1]
    dgc = dgc.clone()
    dgc[:, L - 1 :: L] = 0
    return dB, dgc


@peer(
    "16_chunk_state_bwd_db", "mamba_ssm", "chunk_state_bwd_db", "_chunk_state_bwd_db",
    same=lambda out: (out[0], by_tokens(-out[1].diff(append=out[1][..., -1:]))),
    like=without_last,
)  # fmt: skip
def db(B, x, step, gc, ds, L) -> Call:
    f, ds = mamba_ssm_module("ssd_chunk_state")._chunk_state_bwd_db, turned(ds, x.dtype)
    (step,), gc = by_chunks(L, step), natural(gc, L)
    return lambda: f(x, step, gc, ds, B=B, ngroups=B.shape[2])


@peer(
    "18_chunk_scan_chunk_state_bwd_dx", "mamba_ssm", "chunk_scan_chunk_state_bwd_dx",
    "_bmm_chunk_fwd, _chunk_scan_chunk_state_bwd_dx",
    same=lambda out: (out[0], by_tokens(out[1])),
)  # fmt: skip
def dx(C, B, x, step, gc, ds, dy, L) -> Call:
    scores = mamba_ssm_module("ssd_bmm")._bmm_chunk_fwd
    f = mamba_ssm_module("ssd_combined")._chunk_scan_chunk_state_bwd_dx
    (step,), gc, ds = by_chunks(L, step), natural(gc, L), turned(ds, x.dtype)
    return lambda: f(x, step, gc, B, scores(C, B, L, output_dtype=torch.float32), dy, ds)


def differences(out: Tensor) -> list[Tensor]:
    """dgc of its sums from each token to the end of the chunk."""
    return [by_tokens(-out.diff(append=torch.zeros_like(out[..., :1])))]


@peer(
    "19_chunk_scan_bwd_da_cs", "mamba_ssm", "chunk_scan_bwd_da_cs",
    "_bmm_chunk_fwd, _chunk_scan_bwd_ddAcs_stable", same=differences,
)  # fmt: skip
def da_cs(C, B, x, step, gc, dy, L) -> Call:
    scores = mamba_ssm_module("ssd_bmm")._bmm_chunk_fwd
    f = mamba_ssm_module("ssd_chunk_scan")._chunk_scan_bwd_ddAcs_stable
    (step,), gc = by_chunks(L, step), natural(gc, L)
    return lambda: f(x, step, gc, dy, scores(C, B, L, output_dtype=torch.float32))
