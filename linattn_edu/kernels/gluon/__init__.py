"""Kernels in Gluon, for Hopper: a stage a file."""
