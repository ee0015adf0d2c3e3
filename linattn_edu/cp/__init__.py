"""Context parallel: one sequence over several ranks."""

from linattn_edu.cp.context import CPContext, Part, build_cp_context, get_cp_cu_seqlens
from linattn_edu.cp.groups import simulate

__all__ = ["CPContext", "Part", "build_cp_context", "get_cp_cu_seqlens", "simulate"]
