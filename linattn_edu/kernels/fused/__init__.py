"""Fused stages: an operator and a pass a file."""
