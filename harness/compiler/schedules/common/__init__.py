"""Modules that the schedules of CPUs and GPUs share."""
