"""A request from what any API asks for to its answer: checked, accounted for, generated.

All APIs become one kind of request (`schemas.py`), so limits, keys, deadlines, metrics and the log are
the same for all. `generation.py` is its way through the router. `continuing.py` lets another server go on with a
stream.
"""
