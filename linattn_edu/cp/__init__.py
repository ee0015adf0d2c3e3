"""Context parallel: one sequence over several ranks."""

from linattn_edu.cp.context import CPContext, Part, build_cp_context, get_cp_cu_seqlens
from linattn_edu.cp.groups import simulate
from linattn_edu.cp.maps import state_and_map, state_and_number

__all__ = [
    "CPContext",
    "Part",
    "build_cp_context",
    "get_cp_cu_seqlens",
    "simulate",
    "state_and_map",
    "state_and_number",
]
