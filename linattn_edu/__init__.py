"""Linear attention, from the recurrence to the kernels: the library of the book linattn_edu."""

from linattn_edu.ops.gdn import chunk_gated_delta_rule

__version__ = "0.1.0"
__all__ = ["chunk_gated_delta_rule"]
