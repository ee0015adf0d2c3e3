"""PyTorch stages of the general delta rule: what is erased and what is written are apart."""
