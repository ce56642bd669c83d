"""What this machine can compile and run, and what is wrong with its installation."""

from harness.doctor.diagnosis import Finding, diagnose

__all__ = ["Finding", "diagnose"]
