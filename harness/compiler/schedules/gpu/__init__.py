"""Schedules for GPUs: how Relax operators become careful kernels."""
