"""Provides the modules that the schedules of CPUs and GPUs share."""
