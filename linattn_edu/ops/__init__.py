"""Public operators: validation, autograd and the composition of stages."""
