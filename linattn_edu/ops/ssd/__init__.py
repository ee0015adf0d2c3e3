"""Mamba-2 (SSD)."""

from linattn_edu.ops.ssd.step import selective_state_update

__all__ = ["selective_state_update"]
