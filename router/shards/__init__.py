"""The router's side of the shards: the wire, their group, and what they report when they start.

A shard that dies, hangs or answers nonsense ends its group, because the ranks are no longer in step. The router holds
every stream meanwhile (`group.py`), warms the next group up to the same KV cache, or to what fits of it, and queues
what ran again, each sequence as its prompt and the tokens that it has got.
"""
