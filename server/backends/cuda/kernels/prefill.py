# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Attend many queries per sequence to the paged cache: fresh prompts, later chunks, and prompts behind a cached prefix.

A program owns a tile of one sequence's queries and one head. It walks the keys from the first that its queries'
windows reach to the last that any of them sees, so a causal or windowed step never loads the tiles that nobody sees.
The keys of the step itself are read from the cache like all others: `write` was called before.

A few queries behind many keys, as of a guess that is verified or of an agent's next turn, are tiles of too few programs
to fill a GPU. Then as many programs share a tile's keys, and the last to arrive combines their parts, as in decodes
(`splits.py`).

Shapes: T tokens, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.cache import INT8, PLAIN, Stored, code_offsets, load_scales, numbers, scale_offsets
from server.backends.cuda.kernels.common import LOWEST, ScoreTerms, finish_scores, load_blocks, padded, with_sink
from server.backends.cuda.kernels.splits import LEAST_PROGRAM_KIB, Processors
from server.backends.protocol import StepMeta
from server.quantisation.kv import AS_COMPUTED, KvFormat

SHORT = 64  # queries of the sequences that have tiles of their own


@dataclass(frozen=True)
class Tiles:
    """How a program is cut out of the work."""

    queries: int
    keys: int
    warps: int
    stages: int  # of the compiler's pipeline
    kib: int = LEAST_PROGRAM_KIB  # of shared memory that a program must be able to have
    longest: int = 1 << 31  # queries of a sequence that it is for
    may_split: bool = True  # whether registers are left to put parts together


# By bytes of an element and the most features of a padded head: wide ones fill registers and shared memory. The first
# that fits is taken. The list of blocks takes every other stage of the pipeline, so that 5 of them load 2 tiles ahead,
# and 3 one. Exact float32 products leave the matrix units unused: those are small.
TILES = {
    (2, 128): (
        Tiles(queries=64, keys=64, warps=4, stages=5, kib=163, longest=SHORT),
        Tiles(queries=128, keys=64, warps=8, stages=5),
    ),
    (2, 256): (
        Tiles(queries=64, keys=32, warps=8, stages=3, longest=SHORT),
        Tiles(queries=128, keys=32, warps=8, stages=5, kib=163, may_split=False),
        Tiles(queries=64, keys=32, warps=8, stages=3),
    ),
    (2, 512): (
        Tiles(queries=64, keys=32, warps=8, stages=3, kib=163, may_split=False),
        Tiles(queries=32, keys=32, warps=8, stages=3),
    ),
    (4, 128): (Tiles(queries=16, keys=32, warps=4, stages=1),),
    (4, 512): (Tiles(queries=16, keys=16, warps=4, stages=1),),
}
# Programs that share a multiprocessor, where keys are split; keys that a part has at least, and parts at most.
PROGRAMS_PER_PROCESSOR = 2
LEAST_KEYS, MAX_SPLITS = 512, 32


def choose_tiles(element_size: int, head_dim: int, program_kib: int, longest: int) -> Tiles:
    """Those for so many queries of a sequence and so much shared memory of a program."""
    width = padded(head_dim)
    fitting = next(tiles for (size, most), tiles in TILES.items() if size == element_size and width <= most)
    return next(tiles for tiles in fitting if tiles.kib <= program_kib and longest <= tiles.longest)


def choose_splits(programs: int, processors: int, keys: int) -> int:
    """Into how many parts the keys of each tile of queries are split, where the longest sequence has so many.

    programs: that have queries, without a split.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    return max(min(wanted, keys // LEAST_KEYS, MAX_SPLITS), 1)


def prefill(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    meta: StepMeta,
    terms: ScoreTerms,
    processors: Processors,
    *,
    window: int,
    format: KvFormat = AS_COMPUTED,
) -> None:
    """Attend all rows of q [T, N, H] but the decodes' over kv [2, B, K, P, W] into those of out [T, N, H]."""
    heads, head_dim = q.shape[1:]
    stored = Stored.of(kv, format)
    assert q.stride()[1:] == (head_dim, 1) and meta.block_tables.stride(1) == 1
    tiles = choose_tiles(q.element_size(), head_dim, processors.program_kib, meta.longest)
    chunks = len(meta.block_tables) - meta.num_decodes
    query_tiles = triton.cdiv(meta.longest, tiles.queries)
    # Of the places that a captured step has for chunks, most are empty: programs with queries are fewer.
    tokens = len(q) - meta.num_decodes
    busy = triton.cdiv(tokens, tiles.queries) * heads
    splits = 1
    if tiles.may_split and query_tiles * heads * chunks <= len(processors.arrivals):
        splits = choose_splits(busy, processors.count, meta.block_tables.shape[1] * stored.block_size)
    parts = log_sums = None
    # How many keys there are does not decide which kernel is compiled: a request would wait for it.
    if tiles.may_split and (tiles.longest <= SHORT or busy <= processors.count):
        places = tokens * heads * splits if splits > 1 else 1
        parts = torch.empty(places, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(places, dtype=torch.float32, device=q.device)
    assert splits == 1 or parts is not None
    _prefill[(query_tiles * splits, heads, chunks)](
        q,
        stored.keys,
        stored.values,
        stored.key_scales,
        stored.value_scales,
        *format.scales,
        out,
        parts,
        log_sums,
        None if parts is None else processors.arrivals,
        splits,
        meta.starts,
        meta.positions,
        meta.visible,
        meta.block_tables,
        terms.slopes,
        terms.bias,
        terms.sinks,
        meta.num_decodes,
        q.stride(0),
        meta.block_tables.stride(0),
        GROUP=heads // stored.kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=padded(head_dim),
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        WINDOW=window,
        LEAST=max(LEAST_KEYS // tiles.keys, 1),
        **stored.constants,
        **terms.constants,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit(do_not_specialize=["splits", "num_decodes", "table_stride"])
def _prefill(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_divisor,
    v_divisor,
    out,
    parts,
    log_sums,
    arrivals,
    splits,
    query_starts,
    positions,
    visible,
    tables,
    slopes,
    bias,
    sinks,
    num_decodes,
    q_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One tile of one sequence's queries, one head, all keys or a part of them.

    The last tile first: it sees the most keys. LEAST: tiles of keys that a part has, unless it is the last.
    """
    sequence, head = num_decodes + tl.program_id(2), tl.program_id(1)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    if parts is not None:
        tile, tiles = tile // splits, tiles // splits
    stop = tl.load(query_starts + sequence + 1)
    begin = tl.load(query_starts + sequence) + (tiles - 1 - tile) * QUERIES
    if begin >= stop:
        return
    tokens = begin + tl.arange(0, QUERIES)
    asked = tokens < stop
    position = tl.load(positions + tokens, mask=asked, other=0).to(tl.int32)
    reach = tl.load(visible + tokens, mask=asked, other=0).to(tl.int32)
    features = tl.arange(0, HEAD_PAD)[None, :]
    real = features < HEAD_DIM
    asked_features = asked[:, None] & real
    row = tokens[:, None].to(tl.int64)
    queries = tl.load(q + row * q_stride + head * HEAD_DIM + features, mask=asked_features, other=0.0)
    first = 0
    if WINDOW or CHUNK:
        earliest = tl.min(tl.where(asked, position, 2147483647), axis=0)
        if WINDOW:
            first = tl.maximum(earliest + 1 - WINDOW, 0)
        if CHUNK:
            first = tl.maximum(first, earliest - earliest % CHUNK)
    last = tl.max(reach, axis=0)
    split, used = 0, 1
    if parts is not None:
        split = tl.program_id(0) % splits
        key_tiles = tl.cdiv(tl.maximum(last - first, 1), KEYS)
        each = tl.maximum(tl.cdiv(key_tiles, splits), LEAST)
        used = tl.cdiv(key_tiles, each)
        if split >= used:
            return
        first += split * each * KEYS
        last = tl.minimum(first + each * KEYS, last)
    table = tables + sequence.to(tl.int64) * table_stride
    best = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD_PAD], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < last
        blocks = load_blocks(table, keys, present, BLOCK_SIZE)
        rows = code_offsets(blocks, keys, head // GROUP, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
        offsets, loaded = rows[:, None] + features, present[:, None] & real
        k = tl.load(k_cache + offsets, mask=loaded, other=0)
        v = tl.load(v_cache + offsets, mask=loaded, other=0)
        if KIND != PLAIN:
            k, v = numbers(k, KIND).to(queries.dtype), numbers(v, KIND).to(queries.dtype)
        products = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if KIND == INT8:
            scales = scale_offsets(blocks, keys, head // GROUP, KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM)
            products *= load_scales(k_scales, scales, present)[None, :]
        elif KIND != PLAIN:
            products *= k_divisor
        distance = keys[None, :] - position[:, None]
        scores = finish_scores(products, distance, head, slopes, bias, SCALE, CAP, REACH)
        seen = keys[None, :] < reach[:, None]
        if WINDOW:
            seen = seen & (distance > -WINDOW)
        if CHUNK:
            seen = seen & (keys[None, :] >= (position - position % CHUNK)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        kept, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        if KIND == INT8:
            weights *= load_scales(v_scales, scales, present)[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        best = new_best
    if KIND != PLAIN:
        acc *= v_divisor
    place = row * (KV_HEADS * GROUP) + head
    if parts is None:
        _write(out, acc, total, best, sinks, head, place * HEAD_DIM + features, asked_features)
    elif used == 1:
        _write(out, acc, total, best, sinks, head, place * HEAD_DIM + features, asked_features)
    else:
        where = (place - num_decodes * (KV_HEADS * GROUP)) * splits
        weight = tl.maximum(total, 1.0)[:, None]
        tl.store(parts + (where + split) * HEAD_DIM + features, acc / weight, mask=asked_features)
        tl.store(log_sums + where + split, best[:, None] + tl.log2(weight), mask=asked[:, None])
        tl.debug_barrier()
        arrival = arrivals + (tl.program_id(2) * tl.num_programs(1) + head) * tiles + tile
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(arrival, 0)
            best_of_all = tl.full([QUERIES, 1], LOWEST, tl.float32)
            total_of_all = tl.zeros([QUERIES, 1], tl.float32)
            acc = tl.zeros([QUERIES, HEAD_PAD], tl.float32)
            for other in range(used):
                sums = tl.load(log_sums + where + other, mask=asked[:, None], other=LOWEST, cache_modifier=".cg")
                part = parts + (where + other) * HEAD_DIM + features
                values = tl.load(part, mask=asked_features, other=0.0, cache_modifier=".cg")
                larger = tl.maximum(best_of_all, sums)
                kept, weights = tl.exp2(best_of_all - larger), tl.exp2(sums - larger)
                total_of_all = total_of_all * kept + weights
                acc = acc * kept + weights * values
                best_of_all = larger
            total, best = tl.sum(total_of_all, axis=1), tl.max(best_of_all, axis=1)
            _write(out, acc, total, best, sinks, head, place * HEAD_DIM + features, asked_features)


@triton.jit
def _write(out, acc, total, best, sinks, head, target, kept):
    """Divide sums of values by those of their weights, of which the best counts 1: less means that there is none."""
    result = acc / with_sink(tl.maximum(total, 1.0), sinks, head, True, best)[:, None]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=kept)
