"""The one place that chooses which kernels a call runs, on the host, before it launches them.

`by_kind` knows a sequence and the GPU: what it decides may change the last bits of a result.
`by_load` knows also how many sequences there are and how many multiprocessors: what it decides must
not change a bit. Kernels ask; where nobody asks of both, a launcher has one kernel.
"""

from linattn_edu.kernels.routes import by_kind, by_load, limits
from linattn_edu.kernels.routes.by_load import scan_launch, widest_launch
from linattn_edu.kernels.routes.choosing import Kind, Load, forced, kind_of, load_of

__all__ = [
    "Kind", "Load", "by_kind", "by_load", "forced", "kind_of", "limits", "load_of", "scan_launch",
    "widest_launch",
]  # fmt: skip
