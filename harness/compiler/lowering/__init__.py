"""Lowers a PyTorch module to a Relax module by a frontend, a RoPE strategy and a precision."""
