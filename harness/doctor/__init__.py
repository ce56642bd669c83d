"""The diagnosis of this machine: its targets, and what is wrong with its installation."""

from harness.doctor.diagnosis import Finding, diagnose

__all__ = ["Finding", "diagnose"]
