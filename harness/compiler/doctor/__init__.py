"""Diagnoses this machine: its targets, and problems of its installation."""

from harness.compiler.doctor.diagnosis import Finding, diagnose

__all__ = ["Finding", "diagnose"]
