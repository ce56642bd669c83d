"""Emulates hardware that this machine lacks: a GPU's kernels from their source, and AMX by instruction."""
