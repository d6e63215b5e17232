"""Families that are Llama but for a few values: multipliers, norms, wiring, layers without positions.

Those that others build on, and those of another build, are one folder up.
"""
