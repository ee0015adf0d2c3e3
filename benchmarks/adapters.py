"""One function a library and call. Each imports its library when it is first asked for.

inputs -> o, and for the decoding of a token inputs -> (o, final state). "fla_safe" and
"linattn_edu_safe" are the same libraries with the promise that no log decay is below SAFE_BOUND;
for the general delta rule, of which fla then takes longer chunks, below DPLR_BOUND.
The KDA of "attn_gym" and "cudnn" is always under such a promise: attention-gym's takes log decays
of -5.9 and more, cuDNN's is made for -5 and more.
"""

import os
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.cases import DPLR_BOUND, SAFE_BOUND, TRAINING, Case
from benchmarks.mamba import Average, Inputs, Token
from linattn_edu.testing import GDNInputs

# fla hands the work to flash_qla where that is installed; here it runs its own kernels. It may be
# imported by another library first, so this is set before any of them is.
os.environ["FLA_FLASH_QLA"] = "0"

Adapter = Callable[[GDNInputs | Inputs], Tensor | tuple[Tensor, Tensor]]


def linattn_edu(**options) -> Adapter:
    from linattn_edu import chunk_gated_delta_rule

    return lambda i: chunk_gated_delta_rule(
        i.q, i.k, i.v, i.g, i.beta, impl="triton", **options
    )[0]  # fmt: skip


def fla() -> Adapter:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda i: chunk_gated_delta_rule(i.q, i.k, i.v, i.g, i.beta)[0]


def flash_qla() -> Adapter:
    from flash_qla import chunk_gated_delta_rule

    return lambda i: chunk_gated_delta_rule(
        q=i.q, k=i.k, v=i.v, g=i.g, beta=i.beta,
        scale=None, initial_state=None, output_final_state=False,
    )[0]  # fmt: skip


def flashinfer() -> Adapter:
    """Sequences one after the other; the factors e^g, not their logarithms; forward only."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def f(i: GDNInputs) -> Tensor:
        offsets = _offsets(*i.q.shape[:2], i.q.device)
        q, k, v, alpha, beta = (x.flatten(0, 1) for x in (i.q, i.k, i.v, i.g.exp(), i.beta.float()))
        T = i.q.shape[1]
        o = chunk_gated_delta_rule(q, k, v, alpha, beta, cu_seqlens=offsets, max_seqlen=T)
        return o.view(i.v.shape)

    return f


def attn_gym() -> Adapter:
    from attn_gym.linear import chunk_gdn

    return lambda i: chunk_gdn(i.q, i.k, i.v, i.g, i.beta, impl="fused")[0]


@cache
def _offsets(B: int, T: int, device: torch.device) -> Tensor:
    """Where each of B sequences of T tokens begins, and the end: made once, as a model would."""
    return torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=device)


def linattn_edu_kda(**options) -> Adapter:
    from linattn_edu import chunk_kda

    return lambda i: chunk_kda(i.q, i.k, i.v, i.g, i.beta, impl="triton", **options)[0]


def linattn_edu_kda_safe(**options) -> Adapter:
    return linattn_edu_kda(safe_gate=True, lower_bound=SAFE_BOUND, **options)


def fla_kda() -> Adapter:
    from fla.ops.kda import chunk_kda

    return lambda i: chunk_kda(i.q, i.k, i.v, i.g, i.beta)[0]


def fla_kda_safe() -> Adapter:
    from fla.ops.kda import chunk_kda

    return lambda i: chunk_kda(
        i.q, i.k, i.v, i.g, i.beta, safe_gate=True, lower_bound=SAFE_BOUND
    )[0]  # fmt: skip


def attn_gym_kda() -> Adapter:
    from attn_gym.linear import chunk_kda

    return lambda i: chunk_kda(i.q, i.k, i.v, i.g, i.beta, impl="fused")[0]


def cudnn_kda() -> Adapter:
    """Sequences one after the other, beta in float32."""
    from cudnn.linear_attention import kimi_delta_attention

    def f(i: GDNInputs) -> Tensor:
        offsets = _offsets(*i.q.shape[:2], i.q.device)
        flat = (x.flatten(0, 1) for x in (i.q, i.k, i.v, i.g, i.beta.float()))
        return kimi_delta_attention(*flat, offsets)[0].view(i.v.shape)

    return f


def linattn_edu_gdn2(**options) -> Adapter:
    from linattn_edu import chunk_gdn2

    return lambda i: chunk_gdn2(i.q, i.k, i.v, i.g, i.beta, i.write, impl="triton", **options)[0]


def fla_gdn2() -> Adapter:
    from fla.ops.gdn2 import chunk_gdn2

    return lambda i: chunk_gdn2(i.q, i.k, i.v, i.g, i.beta, i.write)[0]


def decodes(module: str, name: str, **options) -> Callable[[], Adapter]:
    """The maker of what a function of a token by token recurrence gives for one token."""

    def maker() -> Adapter:
        f = getattr(import_module(module), name)

        def call(i: GDNInputs) -> tuple[Tensor, Tensor]:
            gates = {"b": i.beta, "w": i.write} if hasattr(i, "write") else {"beta": i.beta}
            return f(i.q, i.k, i.v, g=i.g, **gates, initial_state=i.initial_state,
                     output_final_state=True, **options)  # fmt: skip

        return call

    return maker


def linattn_edu_dplr() -> Adapter:
    from linattn_edu import chunk_dplr_delta_rule

    return lambda i: chunk_dplr_delta_rule(i.q, i.k, i.v, i.a, i.b, i.gk, impl="triton")[0]


def fla_dplr() -> Adapter:
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    return lambda i: chunk_dplr_delta_rule(i.q, i.k, i.v, i.a, i.b, i.gk)[0]


def fla_dplr_safe() -> Adapter:
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    promise = {"safe_gate": True, "lower_bound": DPLR_BOUND}
    return lambda i: chunk_dplr_delta_rule(i.q, i.k, i.v, i.a, i.b, i.gk, **promise)[0]


def linattn_edu_rwkv7() -> Adapter:
    from linattn_edu import chunk_rwkv7

    return lambda i: chunk_rwkv7(i.q, i.gk, i.k, i.v, i.a, i.b, impl="triton")[0]


def fla_rwkv7() -> Adapter:
    from fla.ops.rwkv7 import chunk_rwkv7

    return lambda i: chunk_rwkv7(i.q, i.gk, i.k, i.v, i.a, i.b)[0]


def fla_rwkv7_safe() -> Adapter:
    from fla.ops.rwkv7 import chunk_rwkv7

    promise = {"safe_gate": True, "lower_bound": DPLR_BOUND}
    return lambda i: chunk_rwkv7(i.q, i.gk, i.k, i.v, i.a, i.b, **promise)[0]


def linattn_edu_ssd() -> Adapter:
    from linattn_edu import mamba_chunk_scan_combined

    return lambda i: mamba_chunk_scan_combined(
        i.x, i.dt, i.A, i.B, i.C, SSD_CHUNK, D=i.D, impl="triton"
    )


def mamba_ssm_ssd() -> Adapter:
    scan = mamba_ssm_module("ssd_combined").mamba_chunk_scan_combined
    return lambda i: scan(i.x, i.dt, i.A, i.B, i.C, SSD_CHUNK, D=i.D)


def linattn_edu_ssd_decode() -> Adapter:
    from linattn_edu import selective_state_update

    return _token(selective_state_update)


def mamba_ssm_decode() -> Adapter:
    return _token(mamba_ssm_module("selective_state_update").selective_state_update)


def _token(update: Callable) -> Adapter:
    """A token by selective_state_update, whose arguments are the same in both libraries."""

    def f(i: Token) -> tuple[Tensor, Tensor]:
        dt, A, D, bias = i.expanded()
        out = update(i.initial_state, i.x, dt, A, i.B, i.C, D, dt_bias=bias, dt_softplus=True)
        return out[:, None], i.initial_state

    return f


def linattn_edu_ema() -> Adapter:
    from linattn_edu import ema_scan

    return lambda i: ema_scan(i.x, i.g, impl="triton")[0]


def mamba_ssm_ema() -> Adapter:
    scan = mamba_ssm_module("ssd_combined").mamba_chunk_scan_combined
    return lambda i: scan(*average_as_scan(i)).reshape(i.x.shape)


def average_as_scan(i: Average) -> tuple[Tensor, ...]:
    """x, dt, A, B, C and chunk_size of Mamba-2's scan that is the average, as H-Net calls it.

    Heads of 64 channels, a state of one row: dt = -g, A = -1, B = 1 - e^g, C = 1 and x / dt.
    """
    (batch, T, _, channels), p = i.x.shape, 64
    heads, dt = -(-channels // p), -i.g
    x = (i.x / dt[..., None]).to(i.x.dtype).view(batch, T, heads, channels // heads)
    b = -torch.expm1(i.g)[..., None].to(i.x.dtype)  # [B, T, 1, 1]
    A = torch.full((heads,), -1.0, device=dt.device)
    return x, dt.expand(-1, -1, heads), A, b, torch.ones_like(b), SSD_CHUNK


def mamba_ssm_module(name: str) -> ModuleType:
    """A module of mamba_ssm.ops.triton.

    The root of the package imports a CUDA extension which these do not need: a module without
    contents stands for it, with the folder of its sources.
    """
    if "mamba_ssm" not in sys.modules:
        folder = _mamba_ssm_folder()
        if folder is None:
            raise ModuleNotFoundError(
                "No module named 'mamba_ssm', and MAMBA_SRC names no folder with its sources"
            )
        root = ModuleType("mamba_ssm")
        root.__path__ = [str(folder)]
        sys.modules["mamba_ssm"] = root
    return import_module(f"mamba_ssm.ops.triton.{name}")


def _mamba_ssm_folder() -> Path | None:
    """Of the sources that MAMBA_SRC names, or of the package that is installed."""
    named = Path(os.environ.get("MAMBA_SRC", ""), "mamba_ssm")
    if os.environ.get("MAMBA_SRC"):
        return named if named.is_dir() else None
    spec = None if "mamba_ssm" in sys.modules else find_spec("mamba_ssm")
    return Path(spec.submodule_search_locations[0]) if spec is not None else None


def _decoded(name: str, of_fla: str) -> dict[str, dict]:
    """Of LIBRARIES: a token, the state returned or, by ours, written where it was."""
    ours = partial(decodes, "linattn_edu", name)
    return {
        "decode": {"linattn_edu": ours(), "fla": decodes(of_fla, name)},
        "decode_inplace": {"linattn_edu": ours(inplace_final_state=True)},
    }


def _beyond(calls: dict[str, dict]) -> dict[str, dict]:
    """Of LIBRARIES: these calls with beta up to 2: ours is told so, others take it as it is."""
    declared = {"allow_neg_eigval": True}
    return {
        what: {x: partial(f, **declared) if x.startswith("linattn_edu") else f
               for x, f in made.items()}
        for what, made in calls.items()
    }  # fmt: skip


SSD_CHUNK = 256  # as Mamba-2's layers call it; ours takes shorter ones

_GDN = {"linattn_edu": linattn_edu, "fla": fla, "flash_qla": flash_qla, "attn_gym": attn_gym}
_KDA = {
    "linattn_edu": linattn_edu_kda,
    "linattn_edu_safe": linattn_edu_kda_safe,
    "fla": fla_kda,
    "fla_safe": fla_kda_safe,
    "attn_gym": attn_gym_kda,
    "cudnn": cudnn_kda,
}
_DPLR = {"linattn_edu": linattn_edu_dplr, "fla": fla_dplr, "fla_safe": fla_dplr_safe}
_RWKV7 = {"linattn_edu": linattn_edu_rwkv7, "fla": fla_rwkv7, "fla_safe": fla_rwkv7_safe}
_GDN2 = {"linattn_edu": linattn_edu_gdn2, "fla": fla_gdn2}
_SSD = {"linattn_edu": linattn_edu_ssd, "mamba_ssm": mamba_ssm_ssd}
_SSD_DECODE = {"linattn_edu": linattn_edu_ssd_decode, "mamba_ssm": mamba_ssm_decode}
_EMA = {"linattn_edu": linattn_edu_ema, "mamba_ssm": mamba_ssm_ema}
_GDN_CALLS = {"forward": {**_GDN, "flashinfer": flashinfer}, TRAINING: dict(_GDN)}
_KDA_CALLS, _GDN2_CALLS = (
    {what: dict(made) for what in ("forward", TRAINING)} for made in (_KDA, _GDN2)
)
# op of a case -> call -> library -> maker of its adapter
LIBRARIES: dict[str, dict[str, dict[str, Callable[[], Adapter]]]] = {
    "gdn": _GDN_CALLS,
    "gdn_beta2": _beyond(_GDN_CALLS),
    "gdn_decode": _decoded("fused_recurrent_gated_delta_rule", "fla.ops.gated_delta_rule"),
    "kda": _KDA_CALLS,
    "kda_beta2": _beyond(_KDA_CALLS),
    "gdn2": _GDN2_CALLS,
    "gdn2_beta2": _beyond(_GDN2_CALLS),
    "kda_decode": _decoded("fused_recurrent_kda", "fla.ops.kda"),
    "gdn2_decode": _decoded("fused_recurrent_gdn2", "fla.ops.gdn2"),
    "dplr": {"forward": dict(_DPLR), TRAINING: dict(_DPLR)},
    "rwkv7": {"forward": dict(_RWKV7), TRAINING: dict(_RWKV7)},
    "ssd": {"forward": dict(_SSD), TRAINING: dict(_SSD)},
    "ssd_decode": {"decode_inplace": dict(_SSD_DECODE), "decode_graph": dict(_SSD_DECODE)},
    "ema": {"forward": dict(_EMA), TRAINING: dict(_EMA)},
}
NAMES = (
    "linattn_edu", "linattn_edu_safe", "fla", "fla_safe", "flash_qla", "flashinfer", "attn_gym",
    "cudnn", "mamba_ssm",
)  # fmt: skip
# called where they are installed, which they need not be where the committed results are measured
OPTIONAL = ("flashinfer", "attn_gym", "cudnn")
# whose beta is up to 2 -> who is called; what others take does not follow from beta
UP_TO_2 = {
    "gdn_beta2": ("linattn_edu", "fla"),
    "kda_beta2": ("linattn_edu", "linattn_edu_safe"),
    "gdn2_beta2": ("linattn_edu",),
}
# sides of a head's state, K = V, of the libraries that do not take every one
SIDES = {"flash_qla": (128,), "flashinfer": (128,), "cudnn": (128,), "attn_gym": (64, 128)}

# (library, case, call) -> what came out in place of numbers, on an H200 with Triton 3.6.0 and
# attn_gym 0.0.17: with another version to be taken out, and tried
FAILED = {
    ("attn_gym", case, what): "NaN or inf"
    for case, what in (
        ("gdn_train", TRAINING), ("gdn_gva", "forward"), ("gdn_gva", TRAINING),
        ("gdn_long", "forward"), ("gdn_long", TRAINING),
    )
}  # fmt: skip


def makers(case: Case, what: str) -> dict[str, Callable[[], Adapter]]:
    """Library -> maker of its adapter, of those that have the call."""
    return LIBRARIES[case.op][what]


def refusal(case: Case, what: str, library: str) -> str | None:
    """Why a library cannot run a call of a case, or None: then a number that is not there was
    not measured.
    """
    if library not in makers(case, what):
        return "no such call"
    if library not in UP_TO_2.get(case.op, NAMES):
        return "not tried with beta up to 2"
    sides = SIDES.get(library, ())
    if (library, case.operator) == ("attn_gym", "kda"):
        sides = (128,)
    if sides and (case.K != case.V or case.K not in sides):
        return f"K = V = {' or '.join(map(str, sides))} only"
    return FAILED.get((library, case.name, what))


# library -> distribution whose version is recorded
DISTRIBUTIONS = {
    "fla": "fla-core",
    "flash_qla": "flash-qla",
    "flashinfer": "flashinfer-python",
    "attn_gym": "attn_gym",
    "cudnn": "nvidia-cudnn-frontend",
    "mamba_ssm": "mamba-ssm",
}


def version_of(library: str) -> str | None:
    """The version of another library, None if it is not there."""
    if library == "mamba_ssm" and os.environ.get("MAMBA_SRC"):
        folder = _mamba_ssm_folder()
        text = (folder / "__init__.py").read_text(encoding="utf-8") if folder else ""
        found = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
        return found[1] if found else None
    try:
        return version(DISTRIBUTIONS[library])
    except PackageNotFoundError:
        return None
