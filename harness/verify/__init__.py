"""Runs cases through their stages, each in a separate process."""
