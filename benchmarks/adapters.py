"""One function a library and call. Each imports its library when it is first asked for.

inputs -> o, and for the decoding of a token inputs -> (o, final state). "fla_safe" and
"linattn_edu_safe" are the same libraries with the promise that no log decay is below SAFE_BOUND.
"""

import os
from collections.abc import Callable

from torch import Tensor

from benchmarks.cases import SAFE_BOUND, TRAINING, Case
from linattn_edu.testing import GDNInputs

# fla hands the work to flash_qla where that is installed; here it runs its own kernels. It may be
# imported by another library first, so this is set before any of them is.
os.environ["FLA_FLASH_QLA"] = "0"

Adapter = Callable[[GDNInputs], Tensor | tuple[Tensor, Tensor]]


def linattn_edu() -> Adapter:
    from linattn_edu import chunk_gated_delta_rule

    return lambda i: chunk_gated_delta_rule(i.q, i.k, i.v, i.g, i.beta, impl="triton")[0]


def fla() -> Adapter:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda i: chunk_gated_delta_rule(i.q, i.k, i.v, i.g, i.beta)[0]


def flash_qla() -> Adapter:
    from flash_qla import chunk_gated_delta_rule

    return lambda i: chunk_gated_delta_rule(
        q=i.q, k=i.k, v=i.v, g=i.g, beta=i.beta,
        scale=None, initial_state=None, output_final_state=False,
    )[0]  # fmt: skip


def linattn_edu_decode() -> Adapter:
    from linattn_edu import fused_recurrent_gated_delta_rule

    return lambda i: fused_recurrent_gated_delta_rule(
        i.q, i.k, i.v, g=i.g, beta=i.beta, initial_state=i.initial_state, output_final_state=True
    )


def linattn_edu_decode_inplace() -> Adapter:
    from linattn_edu import fused_recurrent_gated_delta_rule

    return lambda i: fused_recurrent_gated_delta_rule(
        i.q, i.k, i.v, g=i.g, beta=i.beta, initial_state=i.initial_state, output_final_state=True,
        inplace_final_state=True,
    )  # fmt: skip


def fla_decode() -> Adapter:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return lambda i: fused_recurrent_gated_delta_rule(
        i.q, i.k, i.v, g=i.g, beta=i.beta, initial_state=i.initial_state, output_final_state=True
    )


def linattn_edu_kda() -> Adapter:
    from linattn_edu import chunk_kda

    return lambda i: chunk_kda(i.q, i.k, i.v, i.g, i.beta, impl="triton")[0]


def linattn_edu_kda_safe() -> Adapter:
    from linattn_edu import chunk_kda

    return lambda i: chunk_kda(
        i.q, i.k, i.v, i.g, i.beta, safe_gate=True, lower_bound=SAFE_BOUND, impl="triton"
    )[0]


def fla_kda() -> Adapter:
    from fla.ops.kda import chunk_kda

    return lambda i: chunk_kda(i.q, i.k, i.v, i.g, i.beta)[0]


def fla_kda_safe() -> Adapter:
    from fla.ops.kda import chunk_kda

    return lambda i: chunk_kda(
        i.q, i.k, i.v, i.g, i.beta, safe_gate=True, lower_bound=SAFE_BOUND
    )[0]  # fmt: skip


def linattn_edu_kda_decode() -> Adapter:
    from linattn_edu import fused_recurrent_kda

    return lambda i: fused_recurrent_kda(
        i.q, i.k, i.v, i.g, i.beta, initial_state=i.initial_state, output_final_state=True
    )


def linattn_edu_kda_decode_inplace() -> Adapter:
    from linattn_edu import fused_recurrent_kda

    return lambda i: fused_recurrent_kda(
        i.q, i.k, i.v, i.g, i.beta, initial_state=i.initial_state, output_final_state=True,
        inplace_final_state=True,
    )  # fmt: skip


def fla_kda_decode() -> Adapter:
    from fla.ops.kda import fused_recurrent_kda

    return lambda i: fused_recurrent_kda(
        i.q, i.k, i.v, i.g, i.beta, initial_state=i.initial_state, output_final_state=True
    )


_GDN = {"linattn_edu": linattn_edu, "fla": fla, "flash_qla": flash_qla}
_KDA = {
    "linattn_edu": linattn_edu_kda,
    "linattn_edu_safe": linattn_edu_kda_safe,
    "fla": fla_kda,
    "fla_safe": fla_kda_safe,
}
# op of a case -> call -> library -> maker of its adapter
LIBRARIES: dict[str, dict[str, dict[str, Callable[[], Adapter]]]] = {
    "gdn": {"forward": dict(_GDN), TRAINING: dict(_GDN)},
    "gdn_decode": {
        "decode": {"linattn_edu": linattn_edu_decode, "fla": fla_decode},
        "decode_inplace": {"linattn_edu": linattn_edu_decode_inplace},
    },
    "kda": {"forward": dict(_KDA), TRAINING: dict(_KDA)},
    "kda_decode": {
        "decode": {"linattn_edu": linattn_edu_kda_decode, "fla": fla_kda_decode},
        "decode_inplace": {"linattn_edu": linattn_edu_kda_decode_inplace},
    },
}
NAMES = ("linattn_edu", "linattn_edu_safe", "fla", "fla_safe", "flash_qla")


def makers(case: Case, what: str) -> dict[str, Callable[[], Adapter]]:
    """Library -> maker of its adapter, of those that have the call."""
    return LIBRARIES[case.op][what]


def refusal(case: Case, what: str, library: str) -> str | None:
    """Why a library cannot run a call of a case, or None: then a number that is not there was
    not measured.
    """
    if library not in makers(case, what):
        return "no such call"
    if library == "flash_qla" and (case.K, case.V) != (128, 128):
        return "K = V = 128 only"
    return None


# library -> distribution whose version is recorded
DISTRIBUTIONS = {"fla": "fla-core", "flash_qla": "flash-qla"}
