"""Tuning: the search for better schedules of a component's kernels."""
