"""Attention in Triton, reading and writing the paged cache in place.

These kernels do what `server/backends/reference/attention.py` does: `cache.py` scatters keys and values into the
blocks, `rotate.py` also rotates queries and keys before, `decode.py` does both for one query per sequence and attends,
`prefill.py` attends many, and `latent.py` does both over compressed keys and values. A step of decodes is one launch a
layer: keys that are split over programs are put together by the last of them (`splits.py`). They are the online softmax
of FlashAttention-2 (Dao 2023, arXiv 2307.08691) over the block tables of PagedAttention (Kwon et al. 2023, arXiv
2309.06180); decodes are split over the keys as in Flash-Decoding (Dao et al. 2023), so that a few long sequences still
fill the GPU.

What is true of all of them:

* Lengths, positions and tables are read from the device, and grids depend on shapes alone, never on a sequence's
  length: decodes can be captured in a CUDA graph and replayed while sequences grow.
* Scores, softmax and sums are float32; a product of two tiles takes its operands in the queries' dtype.
* A cache may hold a byte for each number (`cache.py`): rows are made codes where they are stored, and codes numbers in
  registers. Scales of int8 are left to the scores and to the weights.
* Head dims that are no power of two are padded with masked lanes, because a tile's sides are powers of two.
* Tile sizes are fixed by head dim and dtype. Tuning at run time would stall the first requests of a server.

Left out: splitting a prompt's keys, the copy engine (TMA) and warp specialisation.

Not yet run on a GPU: the tests run the kernels in Triton's interpreter and compile them for compute capability 9.0.
The tile sizes were chosen by registers, spills and shared memory of that compilation, not by a clock (`python -m
benchmark kernels` shows them).
"""
