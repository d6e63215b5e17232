"""Adapters merged into their models: `.venv/bin/lockstep merge`.

`tensors.py` says what each tensor of a checkpoint becomes, `command.py` runs through them. Left out: quantised models,
of which the one that they were made from is merged.
"""
