"""What happens before a rank is ready: the profile run, the size of the KV cache, the graphs, and the first steps.

The profile run computes the largest step that can come, made up, so that what it takes is known before the KV cache
takes the rest. Where memory is not measured (on a CPU the cache's tensors take memory only when they are written, and a
share of the machine's memory, enough for a step, is kept back for everything else), a short prompt makes the libraries
allocate and plan.

Then one sequence of two tokens is generated as clients' will be, so that nothing is left for the first request to set
up: not the capture of a graph, not a library's first call. Where its log-probabilities are no finite numbers, the start
ends.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from server.arch.footprint import LOGIT_ROWS, num_spares
from server.arch.windows import ring_for
from server.blocks import BLOCK_SIZE, num_blocks
from server.pb import generate_pb2 as pb
from server.ranks.collectives import COLLECTIVE_TIMEOUT
from server.stepping import cache
from server.stepping.cache import KVShape
from server.stepping.engine import LEAST_SEQUENCES, Engine, StepResult

# Rows from which on products have other kernels at each power of two (`backends/cuda/kernels/`): for as many or fewer,
# or among whose programs the inputs are divided otherwise.
LEAST_ROWS = 16
# Likewise in steps with adapters: few rows, some, and so many that products are rounded.
ROWS_WITH_ADAPTERS = (8, 16, 512)
DECODING_S = 1.0  # in which a GPU's clocks are read
TIMED_PROMPTS = (16, 128)  # tokens of the prompts whose steps are timed


def worst_sampling(*, is_constrained: bool = False) -> pb.SamplingParameters:
    """Everything that a client can ask for in choosing tokens, but for a grammar if `is_constrained` is not set."""
    return pb.SamplingParameters(
        do_sample=True,
        temperature=0.9,
        top_k=10,
        top_p=0.9,
        typical_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        min_p=0.01,
        watermark=True,
        bias_ids=[0],
        biases=[-1],
        banned_word_ids=[0, 0],
        banned_word_lengths=[2],
        min_tokens=1,
        end_ids=[0],
        raw_logprobs=True,
        is_constrained=is_constrained,
    )


@dataclass(frozen=True)
class Warmed:
    """The KV cache's size, and the device memory that it leaves."""

    tokens: int  # of the KV cache
    total_tokens: int  # of the longest sequence
    step_bytes: int  # of the largest step, beside weights and cache; 0: not measured
    graph_bytes: int  # of the decode steps that are captured beforehand; 0: not measured
    captured: str  # which decode steps are captured, for people
    products: Sequence[str]  # which way each product is computed that was measured, for people
    clocks: str  # of the device while one sequence decoded, for people; empty: not known
    prompt_times: PromptTimes
    num_states: int = 0  # sequences that states or rings have room for; 0: no layer has either


@dataclass(frozen=True)
class PromptTimes:
    """What a step takes that computes one prompt, in seconds; zeros: not measured."""

    step: float = 0.0  # of any size
    token: float = 0.0  # for each of its tokens


@dataclass(frozen=True)
class ProfileRun:
    """Prompts of the largest step's size: as long as they can be, and as many as are sampled together."""

    lengths: list[int]
    has_encoder: bool

    @classmethod
    def of(cls, *, prefill_tokens: int, total_tokens: int, sampled: int, has_encoder: bool) -> ProfileRun:
        """prefill_tokens: of the largest step; total_tokens: of the longest sequence; sampled: rows at once."""
        short = min(sampled, prefill_tokens)
        whole, rest = divmod(max(prefill_tokens - short, 0), total_tokens)
        return cls([length for length in [total_tokens] * whole + [rest] + [1] * short if length], has_encoder)

    @property
    def kv_tokens(self) -> int:
        """Tokens of a KV cache that has room for it."""
        return sum(num_blocks(length) + self.has_encoder for length in self.lengths) * BLOCK_SIZE

    def request(self, top_n_tokens: int) -> pb.StepRequest:
        """One step that computes all prompts, with everything about them that a client can ask for."""
        request, blocks = pb.StepRequest(), itertools.count()
        for id, length in enumerate(self.lengths):
            decoded, encoded = ([0], [0] * length) if self.has_encoder else ([0] * length, [])
            request.add.add(
                id=id,
                token_ids=decoded,
                blocks=itertools.islice(blocks, num_blocks(len(decoded))),
                encoder_token_ids=encoded,
                encoder_blocks=itertools.islice(blocks, num_blocks(len(encoded))),
                sampling=worst_sampling(is_constrained=True),
                top_n_tokens=top_n_tokens,
                prompt_logprobs=True,
            )
            request.masks.add(ids=[id], bits=b"\xff")  # each its own
            request.chunk_ids.append(id)
            request.chunk_tokens.append(len(decoded))
        return request


@torch.inference_mode()
def warm_up(
    engine: Engine,
    *,
    prefill_tokens: int,
    total_tokens: int,
    wanted_tokens: int,
    useful_tokens: int,
    top_n_tokens: int,
    sequences: int,
    fraction: float,
    host_bytes: int = 0,
    may_be_shorter: bool = False,
) -> Warmed:
    """Make the engine ready. Raises ValueError for a KV cache that does not fit.

    prefill_tokens: prompt tokens of the largest step; total_tokens: longest sequence; wanted_tokens: what the user
    asked for, 0 for as much as fits, at most useful_tokens; top_n_tokens: candidates reported with a token at most;
    sequences: most expected at once, 0 for LEAST_SEQUENCES; fraction: share of a GPU's memory that we may use.
    host_bytes: of the host's memory for the prefix cache, which the KV cache leaves where it is there too.
    may_be_shorter: whether a KV cache that does not hold total_tokens makes the longest sequence shorter.
    """
    shape = engine.kv_shape
    if engine.kv_placement.has_rings:
        shape = replace(shape, ring=ring_for(shape.window, prefill_tokens, total_tokens))
    sequences = _with_states(engine, shape, sequences or LEAST_SEQUENCES, prefill_tokens, fraction)
    step_bytes, expected_bytes = _profile(engine, prefill_tokens, total_tokens, top_n_tokens, sequences)
    engine.release()  # the profile run's cache is free again
    engine.kv_shape = shape  # that run's longest prompt would not have fitted into a ring
    free = engine.device.free_bytes(fraction=fraction, world_size=engine.shard.sharing)
    if engine.device.measures_memory:
        host_bytes = 0  # are not the device's
    else:
        free = max(0, min(free, _beside_a_step(engine, prefill_tokens, fraction)) - host_bytes)
    of_adapters = engine.adapters.budget if engine.adapters is not None else 0
    beside = shape.bytes_of_sequences(sequences) + of_adapters
    room = partial(_room, engine, free - step_bytes - expected_bytes - beside)
    if may_be_shorter:
        total_tokens = engine.neighbours.minimum(longest_that_fits(total_tokens, room, shape.bytes_per_block))
    fitting = cache.choose_tokens(
        wanted=wanted_tokens,
        useful=useful_tokens,
        free_bytes=room(num_blocks(total_tokens)),
        bytes_per_token=engine.kv_shape.bytes_per_token,
        where=engine.kv_placement.where,
        kept_back={"--adapter-memory": of_adapters, "--prefix-cache-host-gb": host_bytes},
    )
    tokens = engine.neighbours.minimum(fitting)
    engine.allocate(tokens, total_tokens, sequences)
    began = time.monotonic()
    taken_bytes = engine.device.taken_bytes(partial(_capture, engine))
    captured = _captured(engine, time.monotonic() - began)
    _take_first_steps(engine)
    if engine.device.measures_memory:
        _compile_kernels(engine, prefill_tokens, total_tokens, top_n_tokens, sequences)
    clocks = engine.device.clocks(partial(_decode_for, DECODING_S, engine, total_tokens)) if _has_clocks(engine) else ""
    times = PromptTimes() if engine.has_encoder else _prompt_times(engine, min(prefill_tokens, total_tokens, tokens))
    engine.shard.wait_at_most(COLLECTIVE_TIMEOUT)
    engine.neighbours.wait_at_most(COLLECTIVE_TIMEOUT)
    facts = (captured, engine.backend.measured_products(), clocks, times, sequences if shape.bytes_per_sequence else 0)
    return Warmed(tokens, total_tokens, step_bytes, taken_bytes, *facts)


def _with_states(engine: Engine, shape: KVShape, sequences: int, prefill_tokens: int, fraction: float) -> int:
    """How many sequences there is room for at once: as many as are wanted, or half of the memory holds the states of,
    or the rings.

    Raises ValueError where it holds none.
    """
    each = shape.bytes_per_sequence
    if not each:
        return engine.neighbours.minimum(sequences)  # other stages may have some
    free = engine.device.free_bytes(fraction=fraction, world_size=engine.shard.sharing)
    if not engine.device.measures_memory:
        free = min(free, _beside_a_step(engine, prefill_tokens, fraction))
    kept = max(0, free // 2 // each - any(shape.states))
    fits = max(kept - num_spares(kept), kept // 2) if any(shape.states) else kept
    fits = _smallest(engine, fits)
    if not fits:
        raise ValueError(
            f"a sequence's states or rings take {each} bytes, and half of the free memory, {free // 2} bytes, is too "
            "little: use more shards or --quantize int8"
        )
    return min(sequences, fits)


def _beside_a_step(engine: Engine, prefill_tokens: int, fraction: float) -> int:
    """Bytes that a KV cache may take where a step's memory is estimated and not measured."""
    left = engine.device.left_bytes(fraction=fraction, world_size=engine.shard.sharing, kv_bytes=0)
    return left - engine.model.least_step_bytes(prefill_tokens, engine.kv_shape.dtype)


def _smallest(engine: Engine, value: int) -> int:
    """The smallest of all ranks of all stages."""
    return engine.neighbours.minimum(engine.shard.minimum(value, engine.device.torch_device))


def _room(engine: Engine, free_bytes: int, longest: int) -> int:
    """Bytes of KV cache that every rank has room for. free_bytes: of this one; longest: blocks of a sequence."""
    room = engine.kv_placement.room(engine.kv_shape, free_bytes, longest)
    return engine.shard.minimum(room, engine.device.torch_device)


def longest_that_fits(wanted: int, room: Callable[[int], int], block_bytes: int) -> int:
    """Tokens of the longest sequence: as many as are wanted, or as the cache holds.

    room: bytes of a cache for sequences of so many blocks, of which a longer one may leave less.
    """
    longest = num_blocks(wanted)
    while longest > 1 and (blocks := room(longest) // max(1, block_bytes)) < longest:
        longest = max(blocks, longest // 2)
    return min(wanted, longest * BLOCK_SIZE)


def _profile(
    engine: Engine, prefill_tokens: int, total_tokens: int, top_n_tokens: int, sequences: int
) -> tuple[int, int]:
    """Bytes of the largest step and of all graphs, over a cache of just the size that the step takes.

    The largest step has decodes beside the prompts; their tokens count here as the prompts' own.
    """
    measures = engine.device.measures_memory
    run = ProfileRun.of(
        prefill_tokens=prefill_tokens + sequences if measures else min(prefill_tokens, 4 * BLOCK_SIZE),
        total_tokens=total_tokens,
        sampled=LOGIT_ROWS if measures else 1,
        has_encoder=engine.has_encoder,
    )
    longest = total_tokens if measures else max(run.lengths)
    engine.allocate(run.kv_tokens, longest, max(sequences, len(run.lengths)))
    step_bytes = engine.device.peak_bytes(partial(_step, engine, run.request(top_n_tokens)))
    return step_bytes, graph_bytes(engine)


def graph_bytes(engine: Engine) -> int:
    """What all graphs will take: of each kind the largest, whose memory the others share, and what each has alone."""
    if not engine.device.measures_memory or engine.graphs is None:
        return 0
    total = 0
    for captures in engine.graphs.kinds:
        first_two = [engine.device.taken_bytes(capture) for capture in captures[:2]]
        total += sum(first_two) + sum(first_two[1:]) * max(len(captures) - 2, 0)
    return total


def _capture(engine: Engine) -> None:
    if engine.graphs is not None:
        for capture in itertools.chain(*engine.graphs.kinds):
            capture()


def _step(engine: Engine, request: pb.StepRequest) -> StepResult:
    launched = engine.launch(request)
    assert launched is not None
    return launched.finish()


def _take_first_steps(engine: Engine) -> None:
    """Generate two tokens of one sequence, once the most likely ones and once by sampling, and forget it.

    Raises ValueError for tokens without a probability.
    """
    for do_sample in (False, True):
        most = 0 if engine.proposer is None else engine.proposer.most
        decode = pb.StepRequest(decode=True, proposals=most, proposed_ids=[0])
        steps = (_prompt(engine, 1, do_sample=do_sample), decode)
        taken = [_step(engine, step) for step in steps]
        engine.launch(pb.StepRequest(retire=[0]))
        if most and not taken[-1].proposals:
            raise ValueError(
                "the speculative model proposes nothing: its logits are NaN or infinite, so its checkpoint is "
                "damaged: download it again, or leave it out"
            )
        if not all(math.isfinite(logprob) for step in taken for logprob in step.logprobs):
            dtype = str(engine.kv_shape.dtype).removeprefix("torch.")
            raise ValueError(
                f"the model's logits are NaN or infinite: its numbers overflow {dtype}, where --dtype float32 helps, "
                "or the checkpoint is damaged, where it does not"
            )


def _prompt(engine: Engine, tokens: int, *, do_sample: bool = False, sequences: int = 1) -> pb.StepRequest:
    """Sequences from 0 on with a prompt of so many, of which nothing but tokens is asked."""
    request = ProfileRun([tokens] * sequences, engine.has_encoder).request(top_n_tokens=0)
    sampling = pb.SamplingParameters(do_sample=do_sample, temperature=1, top_p=1, typical_p=1, repetition_penalty=1)
    for new in request.add:
        new.sampling.CopyFrom(sampling)
        new.prompt_logprobs = False
    request.ClearField("masks")
    return request


def _compile_kernels(engine: Engine, most: int, longest: int, top_n_tokens: int, sequences: int) -> None:
    """Compute prompts of as many tokens together, up to `most`, as products have kernels for, each up to `longest`.

    Then prompts with each number of candidates, up to `top_n_tokens`, and decodes of up to as many `sequences`, as far
    as none are captured: kernels are for each power of two, or fewer. What is not captured compiles kernels at its
    first use, for seconds, in which a request would wait.
    """
    ring = engine.kv_shape.ring
    longest = engine.neighbours.minimum(longest if ring is None else min(longest, ring.most_at_once))
    rows = LEAST_ROWS
    while rows <= most and _has_room(engine, run := _together(engine, rows, longest), sequences):
        _compute(engine, run)
        rows *= 2
    for candidates in range(1, top_n_tokens + 1):
        _compute(engine, _together(engine, 1, longest), top_n_tokens=candidates)
    captured = engine.neighbours.minimum(0 if engine.graphs is None else engine.graphs.decodes.largest)
    for decodes in sizes_of_decodes(captured, min(sequences, engine.num_blocks // (1 + engine.has_encoder))):
        _decode_together(engine, decodes)
    if engine.adapters is not None:
        with engine.adapters.rehearsing() as row:
            for run in (_together(engine, rows, longest) for rows in ROWS_WITH_ADAPTERS if rows <= most):
                if _has_room(engine, run, sequences):
                    _compute(engine, run, row)


def _together(engine: Engine, tokens: int, longest: int) -> ProfileRun:
    """As few prompts as have so many tokens together. longest: tokens of a prompt."""
    most = min(tokens, longest)
    return ProfileRun([min(most, tokens - start) for start in range(0, tokens, most)], engine.has_encoder)


def _has_room(engine: Engine, run: ProfileRun, sequences: int) -> bool:
    return len(run.lengths) <= sequences and run.kv_tokens <= engine.num_blocks * BLOCK_SIZE


def _compute(engine: Engine, run: ProfileRun, adapter: int = 0, top_n_tokens: int = 0) -> None:
    """Compute prompts, and forget them. adapter: their row."""
    request = run.request(top_n_tokens)
    for new in request.add:
        new.prompt_logprobs = False
        new.adapter = adapter
    _step(engine, request)
    engine.launch(pb.StepRequest(retire=range(len(run.lengths))))


def sizes_of_decodes(captured: int, most: int) -> list[int]:
    """Batch sizes that have kernels of their own, of up to `most` and over the largest that is captured, 0 for none."""
    return sorted({size for power in range(most.bit_length() + 1) if (size := min(1 << power, most)) > captured})


def _decode_together(engine: Engine, sequences: int) -> None:
    """Decode so many sequences of one token, and forget them."""
    _step(engine, _prompt(engine, 1, sequences=sequences))
    _step(engine, pb.StepRequest(decode=True))
    engine.launch(pb.StepRequest(retire=range(sequences)))


def _prompt_times(engine: Engine, most: int) -> PromptTimes:
    """Time the steps of two prompts, of at most `most` tokens: the shorter of two times each."""
    few, many = (min(tokens, most) for tokens in TIMED_PROMPTS)
    if few == many:
        return PromptTimes()
    short, long = (min(_prompt_seconds(engine, tokens) for _ in range(2)) for tokens in (few, many))
    of_token = max(0.0, long - short) / (many - few)
    return PromptTimes(max(0.0, short - few * of_token), of_token)


def _prompt_seconds(engine: Engine, tokens: int) -> float:
    began = time.monotonic()
    _step(engine, _prompt(engine, tokens))
    seconds = time.monotonic() - began
    engine.launch(pb.StepRequest(retire=[0]))
    return seconds


def _has_clocks(engine: Engine) -> bool:
    """Whether its device has clocks to tell of, and it alone decides how long it decodes."""
    return engine.device.measures_memory and engine.neighbours.stage.count == 1


def _decode_for(seconds: float, engine: Engine, total_tokens: int) -> None:
    """Decode one sequence for about so long, as far as it may reach, and forget it."""
    most = min(total_tokens, (engine.num_blocks - 1) * BLOCK_SIZE)
    request = _prompt(engine, 1)
    request.add[0].blocks.extend(range(2, 1 + num_blocks(most)))  # 1 is an encoder's
    _step(engine, request)
    began = time.monotonic()
    _step(engine, pb.StepRequest(decode=True))
    wanted = min(int(seconds / (time.monotonic() - began)), most - 2)
    for _ in range(engine.shard.minimum(max(wanted, 0), engine.device.torch_device)):  # all ranks as many
        _step(engine, pb.StepRequest(decode=True))
    engine.launch(pb.StepRequest(retire=[0]))


def _captured(engine: Engine, seconds: float) -> str:
    """Which steps were captured, for people, and how long that took."""
    if engine.graphs is None:
        return f"none: {engine.why_not_captured}"
    decodes, mixed, beside = engine.graphs.kinds
    if not decodes:
        return "each batch size at its first use"
    text = f"{len(decodes)} batch sizes up to {engine.graphs.decodes.largest}"
    if mixed and engine.graphs.mixed:
        sequences, tokens = engine.graphs.mixed.largest
        text += f", and {len(mixed)} of up to {sequences} with up to {tokens} tokens of prompts"
    if beside:
        text += f"; {len(beside)} of the speculative model"
    failed = engine.failed_captures
    without = f"; {len(failed)} captures failed, and their steps are computed without: {failed[0]}" if failed else ""
    return f"{text}, in {seconds:.1f} s{without}"
