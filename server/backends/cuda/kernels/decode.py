# mypy: disable-error-code="import-untyped, import-not-found"
"""Attend one query per sequence, split over the keys (Flash-Decoding), and store its key and value on the way.

A program owns one sequence, one kv head and one part of the sequence's keys (`splits.py`). Where the step's own keys
and values are given, that of the first part rotates the new key, stores it with its value and takes both from its
registers: what one program stores, no other reads in the same launch, so none has to wait.

Heads that share a kv head are computed together by matrix products, padded to 16 rows, the least that the GPU's matrix
units take. A head of its own would waste 15 of them: there, products are summed elementwise, which a decode can afford
because it waits for memory. In that kernel every row of the tile keeps a softmax of its own (a split within the split),
so that nothing is exchanged between warps before the end.

Where a tile of keys lies is read from the table one tile ahead: otherwise every tile would wait for its blocks first.

Shapes: T tokens, S sequences that decode, N local heads, K local kv heads, H head dim, B blocks, P tokens per block, r
rotated features of a head.
"""

from __future__ import annotations

import triton
from torch import Tensor

from server.backends.cuda.kernels.cache import Stored
from server.backends.cuda.kernels.common import ScoreTerms, padded
from server.backends.cuda.kernels.decode_group import decode_group
from server.backends.cuda.kernels.decode_head import decode_head
from server.backends.cuda.kernels.splits import Processors, combined_at_once, divide
from server.backends.protocol import Rotation, StepMeta
from server.quantisation.kv import AS_COMPUTED, KvFormat

# Bytes of a tile of keys, and as many of values. Elementwise, every row of a tile has its own sums in registers: half
# as large a tile keeps 4 programs of 4 warps on a multiprocessor, with 128 KiB under way.
HEAD_TILE_BYTES, GROUP_TILE_BYTES = 8192, 16384
# Below the 128 threads of a program: a longer list of blocks would be spread over them, and exchanged in every turn.
MAX_TILE = 64
STAGES = 3  # of the compiler's pipeline: two tiles are loaded ahead
# Rows of a tile of queries where heads share a kv head: no fewer fill the matrix units, more take too many registers.
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 64


def decode(
    qkv: Tensor,
    kv: Tensor,
    out: Tensor,
    meta: StepMeta,
    terms: ScoreTerms,
    processors: Processors,
    *,
    window: int,
    rotation: Rotation | None = None,
    format: KvFormat = AS_COMPUTED,
) -> None:
    """Attend the first `meta.num_decodes` rows of qkv over kv [2, B, K, P, W] into those of out [T, N, H].

    qkv: the queries [T, N, H], attending to what is stored; or with the step's keys and values [T, N + 2 K, H], which
    are stored, queries and keys rotated as `rotation` says. What nothing is visible to is not stored: the padding of a
    captured batch.
    """
    stored = Stored.of(kv, format)
    kv_heads, head_dim = stored.kv_heads, out.shape[2]
    heads, group = out.shape[1], out.shape[1] // kv_heads
    is_new = qkv.shape[1] > heads
    assert qkv.stride()[1:] == (head_dim, 1) and meta.block_tables.stride(1) == 1
    assert qkv.shape[1] == heads + 2 * kv_heads * is_new
    rows = 1 if group == 1 else min(max(triton.next_power_of_2(group), MIN_GROUP_ROWS), MAX_GROUP_ROWS)
    tile_bytes = HEAD_TILE_BYTES if group == 1 else GROUP_TILE_BYTES
    tile = min(tile_bytes // (padded(head_dim) * qkv.element_size()), MAX_TILE)
    tile = tile if group == 1 else max(tile, MIN_GROUP_ROWS)  # no fewer keys fill the matrix units either
    programs = kv_heads * triton.cdiv(group, rows)
    longest = meta.block_tables.shape[1] * stored.block_size
    tiles = triton.cdiv(longest, tile)
    division = divide(meta, processors, heads, head_dim, programs=programs, tiles=tiles, rows=rows)
    members = min(triton.next_power_of_2(group), rows)
    kernel, options = (decode_head, {}) if group == 1 else (decode_group, {"GROUP": group, "ROWS": rows})
    kernel[division.grid](
        qkv,
        stored.keys,
        stored.values,
        stored.key_scales,
        stored.value_scales,
        *format.scales,
        out,
        division.parts,
        division.log_sums,
        division.arrivals,
        division.plan,
        meta.positions,
        meta.visible,
        meta.block_tables,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        terms.slopes,
        terms.bias,
        terms.sinks,
        qkv.stride(0),
        meta.block_tables.stride(0),
        HEAD_DIM=head_dim,
        HEAD_PAD=padded(head_dim),
        IS_NEW=is_new,
        HALF=0 if rotation is None else rotation.cos.shape[-1],
        IS_INTERLEAVED=rotation is not None and rotation.interleaved,
        TILE=tile,
        WINDOW=window,
        STAGES=STAGES,
        MEMBERS=members,
        AT_ONCE=combined_at_once(members, padded(head_dim)),
        **options,
        **stored.constants,
        **terms.constants,
    )
