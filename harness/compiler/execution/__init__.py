"""Runs compiled code on this machine, on another one, or emulated."""
