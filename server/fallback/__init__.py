"""Architectures without a family, run by transformers' own models: batched wherever transformers allows it.

* **Batched** (`batched.py`): all tokens of a step in one row, keys and values in the paged cache, prefixes shared, its
  linear layers in a backend's formats and divided as the config's own plan says. For that, `attention.py` stands behind
  transformers' attention interface, and `asked.py` finds out what each layer asks of it.
* **One at a time** (`serial.py`): what keeps a state of its own, or goes around that interface.

`load.py` decides which, by no list of names: by what a model declares, by what its layers ask for, and by a made-up
prompt whose logits must be transformers' own (`probe.py`). Code from a model's repository is never run.
"""
