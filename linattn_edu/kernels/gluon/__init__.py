"""Kernels in Gluon, for Hopper: what they share (blocks), where they run (support), and a stage a
file.
"""
