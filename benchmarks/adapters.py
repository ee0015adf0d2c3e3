"""One function a library: inputs -> o. Each imports its library when it is first asked for."""

import os
from collections.abc import Callable

from torch import Tensor

from linattn_edu.testing import GDNInputs

# fla hands the work to flash_qla where that is installed; here it runs its own kernels. It may be
# imported by another library first, so this is set before any of them is.
os.environ["FLA_FLASH_QLA"] = "0"

Adapter = Callable[[GDNInputs], Tensor]


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


# op -> library -> maker of its adapter
LIBRARIES: dict[str, dict[str, Callable[[], Adapter]]] = {
    "gdn": {"linattn_edu": linattn_edu, "fla": fla, "flash_qla": flash_qla},
}
NAMES = tuple(dict.fromkeys(name for makers in LIBRARIES.values() for name in makers))
# library -> distribution whose version is recorded
DISTRIBUTIONS = {"fla": "fla-core", "flash_qla": "flash-qla"}
