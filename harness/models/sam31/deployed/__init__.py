"""Holds the entry points of the compiled SAM 3.1."""
