"""The benchmark documents that `lockstep-bench reproduce` runs again: their figures as data, sweeps, limits, tables.

What the documents leave out, and how it is read here:

* **Load.** Those that measured servers name none. If a row's throughput and latency are of one run, their product is
  the number of requests under way (Little's law): 2.4 to 40. But their latencies hardly depend on lengths, as those
  of single requests would. So there are two tables: throughputs with `--concurrency` streams (256) and latencies with
  one, and both figures of one run with as many streams as that product, rounded. The limit of a throughput is that of
  as many sequences as were sent at once, or as fit into memory at their mean length, for all bytes and operations of
  prompts and decodes.
* **TGI's tool** sends a step when the one before is answered, and TGI's shards detokenise within the step. Ours are
  measured alike (`latency --like-tgi`); by itself `latency` has two steps under way and makes no text, as in the
  server. The tool prints its tokenizer as "Model" (mt0-xxl-mt) where bloomz-7b1-mt was measured, which is what runs
  here. Its p90 and p99 below p50 come from samples that it did not sort. Its prefill throughput counts prompts; the
  report multiplies by their tokens. Nothing is sampled, there or here.
* **Short answers.** A server that ends answers early has more requests per second. The report says which, and how
  short: compare output tokens per second there.
* **GPUs that are not named** (tgi-bloomz) are taken to be A100 40G. On a machine with one GPU ours stands beside the
  document's two.
* **FlexGen.** Its sizes are not named; 8 sequences of 512 + 32 tokens fit its figures, which it calls projected. Its
  diagonal order leaves two batches out of its prefill, so that only totals compare; here it runs over four blocks,
  because one alone only fills and empties. By the cost model of `--schedule auto` an A6000 does 2,521 token/s in
  either order at n = 32 (the document: 386 and 623), with peaks of 28.45 and 27.55 GB (28.99 and 27.75). The level
  block saves 2 % of the cache and holds no batch more, so the document's gain is not from a larger block: its decode
  takes 16.2 ms per batch and token in one order and 8.4 ms in the other, where reading everything takes that GPU 4.5
  ms.

The figures, and where in a document they stand, are in the JSON files of this folder.
"""
