# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""A sequence's keys in parts, for decodes: which keys a program owns, and how the parts are put together.

The parts of some heads of a sequence are computed by as many programs, the third axis of the grid, or by fewer, where
the sequence is short: the others have nothing to do. Each writes the normalised mean of its values and the logarithm of
its sum, then counts itself as arrived. The one that finds all others arrived combines the parts and sets the count back
to zero for the next launch: a launch of its own would cost a decode more than that work. Nobody waits for anybody, so
programs may run in any order, and one after the other.

What the last program reads, the others wrote: the barrier puts the writes of all threads of a program before its count,
which releases them, and the last count acquires them. The loads pass by the first-level cache, which is not coherent.

Shapes: S sequences that decode, N local heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.kernels.common import LOWEST, with_sink

KIB = 1024
# Of shared memory, that every program takes beside its own.
RESERVED_BYTES = KIB
# That a program can have on all GPUs since compute capability 8.0 (GeForce, L4, L40S), and on those with most (H100).
LEAST_PROGRAM_KIB, MOST_PROGRAM_KIB = 99, 227
# Programs wanted for each multiprocessor: several must be under way for some to load while others compute.
PROGRAMS_PER_PROCESSOR = 4
# Places where programs meet, for each multiprocessor. With more programs than half of what is wanted, decodes are not
# split; captured steps have places for chunks that they do not have.
MOST_MEETINGS = 16
# More parts than this cost more to combine than they gain.
MAX_SPLITS = 64
# As many rows (parts times heads) as one program combines: of 128 features, 512 KiB that it reads alone.
MAX_COMBINED_ROWS = 1024
# Elements of the parts that a program combines at a time: 16 for each thread of 4 warps.
COMBINED_ELEMENTS = 2048


@dataclass(frozen=True)
class Processors:
    """The multiprocessors that decodes are to fill, and how many programs of each split sequence have arrived.

    The counts are zero between launches, so one after the other may use them, but not two at the same time.
    """

    count: int
    program_kib: int  # of shared memory that a program can have
    arrivals: Tensor  # int32, one for each split sequence and each program's share of its heads


def processors_of(device: torch.device, count: int | None, program_kib: int | None) -> Processors:
    """Fresh counts on `device`, of whose multiprocessors `count` are to be filled; None for what the device has."""
    count = count or torch.cuda.get_device_properties(device).multi_processor_count
    program_kib = program_kib or _program_kib(device)
    arrivals = torch.zeros(MOST_MEETINGS * count, dtype=torch.int32, device=device)
    return Processors(count, program_kib, arrivals)


def _program_kib(device: torch.device) -> int:
    if device.type != "cuda":
        return MOST_PROGRAM_KIB  # kernels are interpreted, or only compiled
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - RESERVED_BYTES) // KIB


def choose_splits(programs: int, processors: int, tiles: int, rows: int = 1) -> int:
    """Into how many parts each sequence's keys are split: a power of two.

    programs: as many as there are without a split; processors: multiprocessors of the GPU; tiles: what the longest
    sequence could use; rows: heads that a program computes together.
    """
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // programs, tiles, MAX_SPLITS, max(MAX_COMBINED_ROWS // rows, 1))
    return 1 << (max(wanted, 1).bit_length() - 1)


def combined_at_once(members: int, head_pad: int) -> int:
    """How many parts are loaded together, of `members` heads each."""
    return min(max(COMBINED_ELEMENTS // (members * head_pad), 1), MAX_SPLITS)


@triton.jit
def keys_of_split(position, visible, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Half-open range of this program's keys, whole tiles but for the sequence's last, and how many programs have any.

    At least one has, though it were none. A part takes about as long to combine as a tile to compute, so that there are
    no more parts than each has tiles where that is enough: both follow each other.
    """
    begin = 0
    if WINDOW:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    if CHUNK:
        begin = tl.maximum(begin, position - position % CHUNK)
    tiles = tl.maximum(tl.cdiv(visible - begin, TILE), 1)
    each = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), tl.sqrt(tiles.to(tl.float32)).to(tl.int32))
    first = begin + tl.program_id(2) * each * TILE
    return first, tl.minimum(first + each * TILE, visible), tl.cdiv(tiles, each)


@triton.jit
def finish_split(
    out,
    parts,
    log_sums,
    arrivals,
    sinks,
    first_head,
    end_head,
    acc,
    best,
    total,
    used,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write what this program found for the heads `first_head` … `end_head` - 1, of ROWS at most.

    acc: [ROWS, HEAD_PAD], best and total: [ROWS, 1]. Without a key, that is 0 with a weight of nothing. used: programs
    that have keys, as of `keys_of_split`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    heads = first_head + tl.arange(0, ROWS)[:, None]
    features = tl.arange(0, HEAD_PAD)[None, :]
    kept = (heads < end_head) & (features < HEAD_DIM)
    total = tl.maximum(total, 1.0)  # the best key counts 1, so that less means none
    if parts is None:
        target = out + (sequence * HEADS + heads) * HEAD_DIM + features
        whole = with_sink(total, sinks, heads, heads < end_head, best)
        tl.store(target, (acc / whole).to(out.dtype.element_ty), mask=kept)
    elif tl.program_id(2) < used:
        row = (sequence * HEADS + heads) * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts + row * HEAD_DIM + features, acc / total, mask=kept)
        tl.store(log_sums + row, best + tl.log2(total), mask=heads < end_head)
        tl.debug_barrier()
        arrival = arrivals + sequence * tl.num_programs(1) + tl.program_id(1)
        before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if before == used - 1:
            _combine(
                *(out, parts, log_sums, sinks, sequence, first_head, end_head, used),
                *(HEADS, HEAD_DIM, HEAD_PAD, MEMBERS, AT_ONCE),
            )
            tl.store(arrival, 0)


@triton.jit
def _combine(
    out,
    parts,
    log_sums,
    sinks,
    sequence,
    first_head,
    end_head,
    used,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Weigh the first `used` parts [S, N, splits, H] of some heads of one sequence by the sums of their softmaxes."""
    splits = tl.num_programs(2)
    heads = first_head + tl.arange(0, MEMBERS)[None, :, None]
    features = tl.arange(0, HEAD_PAD)[None, None, :]
    is_head = heads < end_head
    row = sequence * HEADS + heads
    best = tl.full([AT_ONCE, MEMBERS, 1], LOWEST, tl.float32)
    total = tl.zeros([AT_ONCE, MEMBERS, 1], tl.float32)
    acc = tl.zeros([AT_ONCE, MEMBERS, HEAD_PAD], tl.float32)
    for start in range(0, used, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)[:, None, None]
        known = is_head & (split < used)
        part = row * splits + split
        sums = tl.load(log_sums + part, mask=known, other=LOWEST, cache_modifier=".cg")
        loaded = known & (features < HEAD_DIM)
        values = tl.load(parts + part * HEAD_DIM + features, mask=loaded, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, sums)
        kept, weights = tl.exp2(best - new_best), tl.exp2(sums - new_best)
        total = total * kept + weights
        acc = acc * kept + weights * values
        best = new_best
    best_of_all = tl.max(best, axis=0, keep_dims=True)
    share = tl.exp2(best - best_of_all)
    total_of_all = with_sink(tl.sum(total * share, axis=0, keep_dims=True), sinks, heads, is_head, best_of_all)
    mean = tl.sum(acc * share, axis=0, keep_dims=True) / total_of_all
    target = out + row * HEAD_DIM + features
    tl.store(target, mean.to(out.dtype.element_ty), mask=is_head & (features < HEAD_DIM))
