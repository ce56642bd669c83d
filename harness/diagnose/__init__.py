"""Which kernel of a compiled program is wrong: every boundary between kernels, compared with PyTorch and float64."""
