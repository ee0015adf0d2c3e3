"""GDN-2: the delta rule with a gate for each channel of what is erased and of what is written."""

from linattn_edu.ops.gdn2.chunk import chunk_gdn2
from linattn_edu.ops.gdn2.recurrent import fused_recurrent_gdn2

__all__ = ["chunk_gdn2", "fused_recurrent_gdn2"]
