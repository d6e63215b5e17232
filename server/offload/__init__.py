"""Where weights and KV blocks wait that are not on the device, how they come, and how much should stay.

A *store* (`stores.py`, `disk_store.py`) keeps blocks of bytes: a file without a name that is read past the page
cache, or the memory of a GPU's host. Two things use it:

* **Weights.** The weights of a layer that does not stay become an *image*, one run of bytes. A *ring* (`ring.py`) of
  two slots brings the images of a pass in their order, one while the other is computed with. Each rank streams its
  own share. How much stays is what the settings say, or is found when the first layer is there (`auto.py`), by a
  model of what a step costs (`cost.py`). Ranks choose alike, because steps that stream are not captured.
  `lockstep-bench offline` plans its schedules with the same model.
* **KV blocks.** The router hands out ids as ever. The first ids are on the device in every layer; the others visit
  one of three staging areas for one layer's attention: one area is computed with, one is filled, one is emptied
  (`kv_blocks.py`). A step ends when all its writes are done, so that a failed write fails its own step, and ids can be
  given away as ever. Which bytes belong to a block the backend says (`Backend.block_parts`).

What link and layers did when is recorded in `cost.py`, and bounded. Who moves what is in `server/model/`.
"""
