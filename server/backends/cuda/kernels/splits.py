# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""A sequence's keys in parts, for decodes: which keys a program owns, and how the parts are put together.

Few sequences have as many parts each, the third axis of the grid. Of many, each has as many as fit its length, or one
sequence of 32,000 keys would keep all others waiting, of which a captured step does not know the lengths: so a launch
divides them before the first layer, and programs look up what is theirs (`plan`).

The parts of some heads of a sequence are computed by as many programs, or by fewer, where the sequence is short: the
others have nothing to do. Each writes the normalised mean of its values and the logarithm of its sum, then counts
itself as arrived. The one that finds all others arrived combines the parts and sets the count back to zero for the next
launch: a launch of its own would cost a decode more than that work. Nobody waits for anybody, so programs may run in
any order, and one after the other.

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
from server.backends.protocol import StepMeta

KIB = 1024
# Of shared memory, that every program takes beside its own.
RESERVED_BYTES = KIB
# That a program can have on all GPUs since compute capability 8.0 (GeForce, L4, L40S), and on those with most (H100).
LEAST_PROGRAM_KIB, MOST_PROGRAM_KIB = 99, 227
# Programs wanted for each multiprocessor: several must be under way for some to load while others compute.
PROGRAMS_PER_PROCESSOR = 4
# Places where programs meet, for each multiprocessor: as many as are wanted are enough for decodes, and captured steps
# have places for chunks that they do not have.
MOST_MEETINGS = 16
# Sequences that would have fewer parts each are planned for.
LEAST_EQUAL_SPLITS = 8
# Keys that a sequence's length is counted in there, and how many fair shares it may have before it is split.
PLANNED_KEYS, WHOLE_SHARE = 64, 1.25
# What is planned of a part: its sequence, -1 for none; its number; the sequence's parts; the first of these among all;
# the place where they meet.
PLANNED = 5
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


def choose_splits(programs: int, processors: Processors, tiles: int, rows: int = 1) -> int:
    """Into how many parts each sequence's keys are split: a power of two.

    programs: as many as there are without a split; tiles: what the longest sequence could use; rows: heads that a
    program computes together.
    """
    wanted = min(PROGRAMS_PER_PROCESSOR * processors.count // programs, tiles, most_parts(rows))
    return 1 << (max(wanted, 1).bit_length() - 1)


def most_parts(rows: int) -> int:
    """Of a sequence, of which a program computes `rows` heads together."""
    return min(MAX_SPLITS, max(MAX_COMBINED_ROWS // rows, 1))


@dataclass(frozen=True)
class Division:
    """A launch for decodes: its grid, and what the kernel is given to find its part and to leave what it found."""

    grid: tuple[int, int, int]
    parts: Tensor | None = None  # float32 [parts, N, H]; None: each sequence is one part
    log_sums: Tensor | None = None  # float32 [parts, N]
    arrivals: Tensor | None = None
    plan: Tensor | None = None  # int32 [PLANNED, parts]; None: all sequences have as many


def divide(
    meta: StepMeta, processors: Processors, heads: int, width: int, *, programs: int, tiles: int, rows: int
) -> Division:
    """How the decodes of a step are computed. width: features that come out of each of the heads.

    programs: of a sequence that is not split; tiles: what the longest one could use; rows: heads that a program
    computes together. Whether there are a plan and parts does not depend on lengths: a request would wait for the
    compiler.
    """
    sequences = meta.num_decodes
    if sequences > 1 and choose_splits(sequences * programs, processors, MAX_SPLITS) < LEAST_EQUAL_SPLITS:
        plan = _planned(meta, max(PROGRAMS_PER_PROCESSOR * processors.count // programs, 1), most_parts(rows))
        places, splits = plan.shape[1], 1
    else:
        if choose_splits(sequences * programs, processors, MAX_SPLITS, rows) == 1:
            return Division((sequences, programs, 1))
        plan, splits = None, choose_splits(sequences * programs, processors, tiles, rows)
        assert sequences * programs <= len(processors.arrivals)
        places = sequences * splits
    parts = torch.empty(places, heads, width, dtype=torch.float32, device=meta.visible.device)
    log_sums = torch.empty(places, heads, dtype=torch.float32, device=meta.visible.device)
    return Division((places // splits, programs, splits), parts, log_sums, processors.arrivals, plan)


def _planned(meta: StepMeta, spare: int, most: int) -> Tensor:
    """The plan of a step, made once for all layers. spare: parts beside one for each sequence; most: of a sequence."""
    if (plan := meta.plans.get((spare, most))) is not None:
        return plan
    places = meta.num_decodes + spare
    plan = torch.empty(PLANNED, places, dtype=torch.int32, device=meta.visible.device)
    padded = triton.next_power_of_2(meta.num_decodes)  # which says how large both are, and so what is compiled
    sizes = {"SEQUENCES": padded, "PLACES": triton.next_power_of_2(padded + spare)}
    _plan[(1,)](plan, meta.visible, meta.num_decodes, places, WHOLE_SHARE / spare, most, KEYS=PLANNED_KEYS, **sizes)
    return meta.plans.setdefault((spare, most), plan)


def combined_at_once(members: int, head_pad: int) -> int:
    """How many parts are loaded together, of `members` heads each."""
    return min(max(COMBINED_ELEMENTS // (members * head_pad), 1), MAX_SPLITS)


@triton.jit(do_not_specialize=["sequences", "places", "most"], do_not_specialize_on_alignment=["visible"])
def _plan(
    plan, visible, sequences, places, share, most, KEYS: tl.constexpr, SEQUENCES: tl.constexpr, PLACES: tl.constexpr
):
    """Divide the sequences that decode into `places` parts at most, as their lengths are.

    share: of the keys of all sequences, those that one may have before it is split: there are places for one part of
    each, and for more than 1 / share others. most: parts of a sequence.
    """
    rows = tl.arange(0, SEQUENCES)
    known = rows < sequences
    seen = tl.load(visible + rows, mask=known, other=0).to(tl.int32)
    tiles = tl.where(known, tl.maximum(tl.cdiv(seen, KEYS), 1), 0)
    whole = tl.ceil(tl.sum(tiles, axis=0).to(tl.float32) * share).to(tl.int32)
    each = tl.maximum(tl.maximum(tl.cdiv(tiles, most), whole), 1)
    parts = tl.cdiv(tiles, each)
    ends = tl.cumsum(parts, axis=0)
    meetings = tl.cumsum((parts > 1).to(tl.int32), axis=0) - 1
    for part in range(tl.max(parts, axis=0)):
        place = plan + ends - parts + part
        kept = part < parts
        tl.store(place, rows, mask=kept)
        tl.store(place + places, tl.zeros([SEQUENCES], tl.int32) + part, mask=kept)
        tl.store(place + 2 * places, parts, mask=kept)
        tl.store(place + 3 * places, ends - parts, mask=kept)
        tl.store(place + 4 * places, meetings, mask=kept)
    others = tl.arange(0, PLACES)
    is_free = (others >= tl.sum(parts, axis=0)) & (others < places)
    tl.store(plan + others, tl.full([PLACES], -1, tl.int32), mask=is_free)


@triton.jit
def part_of_program(plan):
    """(sequence, the part's number, parts of the sequence). The sequence is -1 where there is nothing to do."""
    sequence, part, parts = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    if plan is not None:
        place, places = plan + tl.program_id(0), tl.num_programs(0)
        sequence = tl.load(place)
        part = tl.load(place + places)
        parts = tl.load(place + 2 * places)
    return sequence.to(tl.int64), part, parts


@triton.jit
def _others(plan):
    """(the first part of this program's sequence among all, where the sequence's programs meet)."""
    sequence = tl.program_id(0)
    first, meeting = sequence * tl.num_programs(2), sequence
    if plan is not None:
        place, places = plan + tl.program_id(0), tl.num_programs(0)
        first = tl.load(place + 3 * places)
        meeting = tl.load(place + 4 * places)
    return first, meeting


@triton.jit
def keys_of_part(position, visible, part, parts, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
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
    each = tl.maximum(tl.cdiv(tiles, parts), tl.sqrt(tiles.to(tl.float32)).to(tl.int32))
    first = begin + part * each * TILE
    return first, tl.minimum(first + each * TILE, visible), tl.cdiv(tiles, each)


@triton.jit
def finish_part(
    out,
    parts,
    log_sums,
    arrivals,
    plan,
    sinks,
    sequence,
    part,
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
    that have keys, as of `keys_of_part`.
    """
    heads = first_head + tl.arange(0, ROWS)[:, None]
    features = tl.arange(0, HEAD_PAD)[None, :]
    kept = (heads < end_head) & (features < HEAD_DIM)
    total = tl.maximum(total, 1.0)  # the best key counts 1, so that less means none
    target = out + (sequence * HEADS + heads) * HEAD_DIM + features
    if parts is None:
        _write(target, acc, with_sink(total, sinks, heads, heads < end_head, best), kept)
    elif used == 1:
        _write(target, acc, with_sink(total, sinks, heads, heads < end_head, best), kept & (part == 0))
    elif part < used:
        first_part, meeting = _others(plan)
        row = (first_part + part).to(tl.int64) * HEADS + heads
        tl.store(parts + row * HEAD_DIM + features, acc / total, mask=kept)
        tl.store(log_sums + row, best + tl.log2(total), mask=heads < end_head)
        tl.debug_barrier()
        arrival = arrivals + meeting * tl.num_programs(1) + tl.program_id(1)
        before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if before == used - 1:
            _combine(
                *(out, parts, log_sums, sinks, sequence, first_part, first_head, end_head, used),
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
    first_part,
    first_head,
    end_head,
    used,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Weigh `used` parts [parts, N, H] of some heads of one sequence by the sums of their softmaxes."""
    heads = first_head + tl.arange(0, MEMBERS)[None, :, None]
    features = tl.arange(0, HEAD_PAD)[None, None, :]
    is_head = heads < end_head
    best = tl.full([AT_ONCE, MEMBERS, 1], LOWEST, tl.float32)
    total = tl.zeros([AT_ONCE, MEMBERS, 1], tl.float32)
    acc = tl.zeros([AT_ONCE, MEMBERS, HEAD_PAD], tl.float32)
    for start in range(0, used, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)[:, None, None]
        known = is_head & (part < used)
        row = (first_part + part).to(tl.int64) * HEADS + heads
        sums = tl.load(log_sums + row, mask=known, other=LOWEST, cache_modifier=".cg")
        loaded = known & (features < HEAD_DIM)
        values = tl.load(parts + row * HEAD_DIM + features, mask=loaded, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, sums)
        kept, weights = tl.exp2(best - new_best), tl.exp2(sums - new_best)
        total = total * kept + weights
        acc = acc * kept + weights * values
        best = new_best
    best_of_all = tl.max(best, axis=0, keep_dims=True)
    share = tl.exp2(best - best_of_all)
    total_of_all = with_sink(tl.sum(total * share, axis=0, keep_dims=True), sinks, heads, is_head, best_of_all)
    target = out + (sequence * HEADS + heads) * HEAD_DIM + features
    _write(target, tl.sum(acc * share, axis=0, keep_dims=True), total_of_all, is_head & (features < HEAD_DIM))


@triton.jit
def _write(target, acc, total, kept):
    """Sums of values, divided by those of their weights."""
    tl.store(target, (acc / total).to(target.dtype.element_ty), mask=kept)
