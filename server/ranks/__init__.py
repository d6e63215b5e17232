"""What ranks have in common: how they meet, what they sum and exchange, and the steps that rank 0 passes on.

Collectives are NCCL's, or gloo's on CPUs (`collectives.py`). Small sums on GPUs are one kernel that reads every GPU's
memory, where all ranks can (`symmetric.py`). Ranks that share a GPU meet in functions of the host (`host_sums.py`).
Errors keep their cause: only what the process group says of a peer is a lost peer, and a lost device ends its own
shard. A shard leaves in order: the last step, graphs, process group.
"""
