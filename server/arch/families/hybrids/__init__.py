"""Families most of whose layers have a state: short convolutions, Mamba-2 (`server/arch/recurrences.py`).

Those with a gated delta rule are Qwen's, and Granite 4-H is beside its dense kin in `variants/`.
"""
