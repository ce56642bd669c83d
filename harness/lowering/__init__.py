"""The way from a PyTorch module to a Relax module: frontend, RoPE strategy, precision."""
