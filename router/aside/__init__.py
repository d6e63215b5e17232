"""Work that a client's text can make expensive, done beside the router: see `pool.py`."""


class TaskError(Exception):
    """A task cannot be done; the sentence is for whoever asked."""
