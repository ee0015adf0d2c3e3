"""The speed: every stage as a Triton kernel, under the name and signature of its reference."""
