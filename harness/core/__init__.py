"""Defines the plain data of a verification: cases, outcomes, expectations and settings."""
