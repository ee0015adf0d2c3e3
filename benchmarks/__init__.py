"""Benchmarks: one registry of cases, every library that imports, on one GPU in one run."""
