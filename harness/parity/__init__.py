"""Parity: metrics, verdicts, expectations, the float64 oracle and the disk cache of reference results."""
