"""The prefix cache behind a device: blocks of keys and values in the host's memory and on disk, on one rank.

The router owns slots and places as it owns blocks and finds them by the same keys
(`router/scheduling/prefix_index.py`). Blocks are copied to the host within steps, soon after they were computed, and
from there to a file by threads beside the steps. What all ranks confirm can come back; everything else is computed.
"""
