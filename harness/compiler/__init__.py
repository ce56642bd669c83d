"""Compiles a model: strategies and importers, schedules, targets, tuned schedules, compiled folders, execution."""
