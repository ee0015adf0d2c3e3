"""The specification: every stage in plain PyTorch, without Triton."""
