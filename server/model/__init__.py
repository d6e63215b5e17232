"""The decoder: one for all families, built from an `ArchSpec`, with its weights and KV blocks where settings say.

`load.py` builds the layers that a rank holds, `transformer.py` runs them on a flat row of tokens. What differs
between families is in the spec, what differs between devices in the backend; there is no branch on a family's name.

* **Encoder-decoders** are a decoder whose layers also attend to an encoder's output. The encoder reads a prompt
  whole, in the step that admits it, because it is bidirectional. Keys and values for each decoder layer go into the
  same paged cache, under a second run of blocks. Its tokens count in every limit as those of any prompt; the decoder
  then starts from one token of its own.
* **Streaming** (`streamed.py`, `offloaded_kv.py`): the layers or blocks that have no room on the device come for the
  time in which they are computed with. What a layer computes does not change, so tokens do not either.
"""
