"""Compares outputs: metrics, verdicts, the float64 oracle, and the disk cache of reference results."""
