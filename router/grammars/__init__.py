"""Text that is held to a grammar: what a client asks for, and what may come next. See `follower.py`."""
