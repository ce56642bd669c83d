"""Searches better schedules for the kernels of a component."""
