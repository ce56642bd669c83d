"""What this CPU runs in place of what it lacks: a GPU's kernels, from their source, and AMX, by instruction."""
