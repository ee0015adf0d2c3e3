"""One function a library and call. Each imports its library when it is first asked for.

inputs -> o, and for the decoding of a token inputs -> (o, final state).
"""

import os
from collections.abc import Callable

from torch import Tensor

from benchmarks.cases import TRAINING
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


_CHUNKED = {"linattn_edu": linattn_edu, "fla": fla, "flash_qla": flash_qla}
# call -> library -> maker of its adapter
LIBRARIES: dict[str, dict[str, Callable[[], Adapter]]] = {
    "forward": dict(_CHUNKED),
    TRAINING: dict(_CHUNKED),
    "decode": {"linattn_edu": linattn_edu_decode, "fla": fla_decode},
    "decode_inplace": {"linattn_edu": linattn_edu_decode_inplace},
}
NAMES = tuple(dict.fromkeys(name for makers in LIBRARIES.values() for name in makers))
# library -> distribution whose version is recorded
DISTRIBUTIONS = {"fla": "fla-core", "flash_qla": "flash-qla"}
