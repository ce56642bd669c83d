"""Diagnoses this machine: its targets, and problems of its installation."""
