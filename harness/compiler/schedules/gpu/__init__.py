"""Schedules Relax operators for GPUs as accurate kernels."""
