"""Weights and KV rows in fewer bits: what they stand for, how numbers are rounded to them, and what they take.

Three parts do not know each other. A *format* (`server/checkpoint/formats/`) reads what a rank wants of a layer,
however its tensors are packed. A *quantiser* (`rounding.py`) makes the same of a dense weight while it is loaded. A
*backend* stores it as its kernels want it (`Backend.linear`). Between them is the one plain form (`stored.py`): a
code for each weight, what codes stand for, a scale and a zero for each row of each group of inputs, and how inputs
are rounded, if they are. The reference backend computes with it and so defines what it means
(`server/backends/reference/quantised.py`).

* Codes stay in the checkpoint's words (`packing.py`) until somebody asks for them.
* The group of an input is data, so a split that cuts a group needs no special case. Scales come from whole rows, and
  those of rounded inputs from all ranks, so that the number of ranks changes no token.
* What a checkpoint's config says is untrusted: `configs.py` checks values and expressions. `translation.py` puts
  configs of tools that write another tool's layout in that tool's terms, `config_keys.py` knows which keys change what
  codes mean, and refuses what is not served, `exclusions.py` tells which layers are dense; `quark.py` and `torchao.py`
  read what is special to these tools.
* `sizes.py` says once how many bits everything takes, without torch, for people and for plans.
* `kv.py` does for rows of the KV cache what the others do for weights.
"""
