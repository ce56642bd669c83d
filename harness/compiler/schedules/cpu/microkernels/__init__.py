"""Multiplies panels of packed operands: a micro-kernel for each family of instructions, as plain data.

Another instruction is a module with its value, and a line in `choice.py`, the only module that reads a target's
features.
"""
