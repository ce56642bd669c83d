"""Defines the torch operators of strategies, and their kernels."""
