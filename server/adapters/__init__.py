"""Adapters: PEFT's LoRA folders, and what they change of the layers that a rank has.

An adapter is known by its content (`identity.py`), not by its name or its folder: what was computed with one is
never taken for what another would give. Left out: which adapters are where and when, which is the router's business,
and how a changed layer is computed (`AdaptedLinear` of the backends).
"""
