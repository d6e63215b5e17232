"""What models look like, as data: the description of an architecture, the names in its checkpoint, its families.

`ArchSpec` (`spec.py`) describes a decoder, and an encoder where there is one; a family (`families/`) is a function
from config.json to a spec, and a map of names (`names.py`). `stages.py` cuts a model into pipeline stages. No torch
here, so that plans and the router's limits can be computed without it.
"""
