"""Triton kernels of the general delta rule, a stage a file."""
