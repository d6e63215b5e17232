"""Weights in fewer bits: what they stand for, and how a dense weight is made into one."""
