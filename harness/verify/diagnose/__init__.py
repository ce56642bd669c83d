"""Finds the kernel of a compiled program that is wrong, by comparing values with PyTorch and float64."""
