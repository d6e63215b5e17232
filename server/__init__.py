"""One rank: its share of a model's weights, the KV cache, and the steps that compute on both.

A shard process reads its settings (`config.py`), loads its slices of the checkpoint (`loading.py`) and answers the
one stream of steps (`service.py`). Shards are forks of one process that has imported torch (`fork_server.py`).
`null.py` is a model of fixed words, to measure the router alone.

The same bytes lead every rank to the same decisions. Noise is a function of seed, position and token id, and no
generator has a state, so that a sequence can be rebuilt from its tokens. Token ids come and go, never text.

Only `ranks` speaks to the other ranks; only `backends`, `loading.py` and `ranks/collectives.py` name a device; only
`config.py` reads the environment.
"""
