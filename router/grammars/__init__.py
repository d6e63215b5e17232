"""Constrained generation: grammars that clients ask for, and the tokens that they allow next. See `follower.py`."""
