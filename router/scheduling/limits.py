"""The router's limits once the model is known: what the user set, what follows from it, and what the warmup found.

`RouterConfig` says what was asked for and may leave gaps; `Limits` has none. Pure functions: the shards' answers come
in as plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from router.config import (
    DEFAULT_GUESSES,
    ROOM_FOR_ANSWER,
    UNBOUNDED_TOTAL_TOKENS,
    RouterConfig,
    relation_problems,
)
from router.scheduling.queue import blocks_for

UINT32_MAX = 2**32 - 1  # what the wire carries for a number of tokens
KEPT_BACK = 8  # Of an inferred KV cache, one part in so many is no longest sequence's.
# Those that are what the settings of the same names say.
AS_SET = (
    *("max_concurrent_requests", "max_queue_tokens", "waiting_served_ratio", "max_waiting_tokens", "max_best_of"),
    *("max_stop_sequences", "max_top_n_tokens", "max_inter_token_ms", "num_lanes", "speculative_method"),
    "kv_admission",
)
# How long a step may take that only computes prompts: who comes meanwhile waits for its end.
PROMPT_STEP_S = 1.0
LEAST_PREFILL_TOKENS = 256  # With fewer, a step is mostly the reading of weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every limit that validation and admission apply, in the units of `RouterConfig`."""

    max_input_length: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_prefill_tokens: int
    block_size: int
    num_blocks: int
    max_concurrent_requests: int
    max_queue_tokens: int | None = None  # None: no limit
    max_batch_size: int | None  # None: no limit
    waiting_served_ratio: float
    max_waiting_tokens: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    vocab_size: int  # of the model: the tokenizer may know more ids
    # Prompt tokens of a step in which others decode, or how they are chosen; None: max_batch_prefill_tokens.
    prefill_chunk: int | Literal["auto"] | None = None
    # What such a step may take if the chunk is chosen; None: twice what it takes without prompts.
    max_inter_token_ms: int | None = None
    pads_chunks: bool = True  # whether the shards fill chunks up to a few sizes
    num_lanes: int = 1  # micro-batches that take turns, where there are pipeline stages
    prefix_caching: bool = False
    checkpoint_tokens: int = 0  # between two places at which a sequence's states are kept; 0: they are not
    checkpoint_blocks: int = 0  # that hold the states of one sequence, or one block of tokens of windowed layers
    window_blocks: int = 0  # blocks of tokens that windowed layers with rings see; 0: no layer has a ring
    most_at_once: int = 0  # tokens of one sequence in a step, so that they fit a ring; 0: any number
    speculate: int = 0  # tokens of a sequence that are guessed for a step, at most; 0: none are
    speculative_method: str = "auto"
    proposals: int = 0  # of those, tokens that a speculative model proposes at most; 0: there is none
    token_seconds: float = 0.0  # what each token of a prompt adds to a step; 0: not known
    kv_admission: str = "demand"  # whether KV blocks are given as sequences grow, or all at once
    adapter_rows: int = 0  # adapters that can be on the device at once; 0: none can be served
    adapter_bytes: int = 0  # memory for them on each shard's device
    adapter_host_bytes: int | None = 0  # for others in its host's memory; None: that is the device's
    prefill_logprobs: bool = True  # whether a request may ask for the log-probabilities of its prompt
    sources: dict[str, str] = field(default_factory=dict)  # limit -> flag, environment, default, derived or inferred


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """How long one request may be."""

    max_input_length: int
    max_total_tokens: int
    why: str  # that is the longest sequence, where none was given

    @property
    def reasons(self) -> dict[str, str]:
        """Why each is what it is, where it was not given."""
        is_one_less = self.max_input_length == self.max_total_tokens - 1
        prompt = "--max-total-tokens less one" if is_one_less else "--max-batch-prefill-tokens"
        return {"max_input_length": prompt, "max_total_tokens": self.why}


@dataclass(frozen=True, slots=True)
class Room:
    """What the warmup found: KV cache in tokens, and what a step with a prompt takes in seconds, 0 if not known."""

    cache_tokens: int
    sequence_tokens: int  # of the longest sequence that the cache has room for
    step_seconds: float = 0.0  # of any size
    token_seconds: float = 0.0  # for each of its tokens
    is_full: bool = False  # whether no load could fill a larger cache

    def longest(self, *, is_inferred: bool) -> int:
        """The longest sequence that nobody asked for. is_inferred: whether the cache is what fitted into memory.

        Shards that are started again may find less memory, and a limit that clients were told does not change.
        """
        kept_back = self.cache_tokens // KEPT_BACK if is_inferred and not self.is_full else 0
        return min(self.cache_tokens - kept_back, self.sequence_tokens)


def derive_lengths(
    config: RouterConfig, max_positions: int, *, has_encoder: bool, room: Room | None = None
) -> LengthLimits:
    """Fill the gaps of the two length limits. Raises ValueError that names value, bound and remedy.

    max_positions: of the model, 0 for none. has_encoder: prompts are read whole, in one step. room: None before the
    warmup.
    """
    bounds = _bounds(config, max_positions, room)
    wanted = min(bounds, key=lambda name: bounds[name][0])
    total, why = (config.max_total_tokens, "") if config.max_total_tokens else (bounds[wanted][0], wanted)
    problems = [
        f"--max-total-tokens is {total} but {name} is {bound} tokens: lower --max-total-tokens to {bound} or less"
        for name, (_, bound) in bounds.items()
        if bound is not None and total > bound
    ]
    step = config.max_batch_prefill_tokens if has_encoder else total
    input_length = config.max_input_length or max(1, min(total - 1, step))
    if has_encoder and input_length > step:
        problems.append(
            f"--max-input-length is {input_length} but --max-batch-prefill-tokens is {step}, and the encoder of this "
            f"model reads a prompt in one step: lower --max-input-length to {step} or raise --max-batch-prefill-tokens"
        )
    problems += relation_problems(
        max_input_length=input_length,
        max_total_tokens=total,
        max_batch_total_tokens=None,
        waiting_served_ratio=config.waiting_served_ratio,
    )
    if problems:
        raise ValueError("; ".join(problems))
    return LengthLimits(input_length, total, why)


def _bounds(config: RouterConfig, max_positions: int, room: Room | None) -> dict[str, tuple[int, int | None]]:
    """What bounds the longest sequence: how long one is that nobody asked for, and at most; None: as is asked for."""
    if max_positions:
        bounds: dict[str, tuple[int, int | None]] = {"the model's longest sequence": (max_positions, max_positions)}
    else:
        bounds = {"the default for a model without a longest sequence": (UNBOUNDED_TOTAL_TOKENS, None)}
        if (asked := (config.max_input_length or 0) + ROOM_FOR_ANSWER) > UNBOUNDED_TOTAL_TOKENS:
            bounds = {f"--max-input-length and {ROOM_FOR_ANSWER}": (asked, None)}
    if (given := config.max_batch_total_tokens) is not None:
        bounds["--max-batch-total-tokens"] = (given, given)
    if room is not None:
        longest = room.longest(is_inferred=given is None)
        bounds["the KV cache that fits into memory"] = (longest, min(room.cache_tokens, room.sequence_tokens))
    return bounds


def prefill_tokens(config: RouterConfig, room: Room, *, has_encoder: bool) -> int:
    """Prompt tokens of the largest step: as given, or what takes about PROMPT_STEP_S, in a power of two.

    Where any step takes long, as where weights stream, half of its time at least goes into tokens.
    """
    most = config.max_batch_prefill_tokens
    is_given = config.sources.get("max_batch_prefill_tokens") != "default"
    if is_given or has_encoder or not room.token_seconds:
        return most
    seconds = max(PROMPT_STEP_S - room.step_seconds, room.step_seconds)
    worth = max(LEAST_PREFILL_TOKENS, int(seconds / room.token_seconds))
    return min(most, 1 << worth.bit_length() - 1)


def max_sequences(config: RouterConfig) -> int:
    """How many sequences can run at once."""
    return min(config.max_concurrent_requests, config.max_batch_size or config.max_concurrent_requests)


def useful_tokens(config: RouterConfig, lengths: LengthLimits, *, block_size: int, has_encoder: bool) -> int:
    """How many tokens of KV cache the largest load that is admitted could fill; more would never be used.

    A sequence has whole blocks, and what an encoder has read has blocks of its own.
    """
    blocks = blocks_for(lengths.max_total_tokens, block_size) + has_encoder
    return min(max_sequences(config) * blocks * block_size, UINT32_MAX)


def resolve(
    config: RouterConfig,
    room: Room,
    *,
    max_positions: int,
    has_encoder: bool,
    vocab_size: int,
    max_batch_total_tokens: int,
    block_size: int,
    num_blocks: int,
    shares_prefixes: bool,
    takes_drafts: bool,
    pads_chunks: bool,
    most_proposals: int = 0,
    num_states: int = 0,
    checkpoint_blocks: int = 0,
    window_blocks: int = 0,
    most_at_once: int = 0,
) -> Limits:
    """The final limits after the warmup. Raises ValueError when the longest request could never run.

    most_proposals: tokens that a speculative model proposes for a sequence at most; 0: there is none.
    num_states: sequences that states or rings have room for; 0: no layer has either. checkpoint_blocks: that hold the
    states of one sequence, or one block of tokens of windowed layers; 0: they cannot be kept. window_blocks,
    most_at_once: see `Limits`.
    """
    distance = max(blocks_for(config.state_checkpoint_tokens, block_size), window_blocks)
    lengths = derive_lengths(config, max_positions, has_encoder=has_encoder, room=room)
    prefill = prefill_tokens(config, room, has_encoder=has_encoder)
    useful = useful_tokens(config, lengths, block_size=block_size, has_encoder=has_encoder)
    speculate = guesses(config, most_proposals) if takes_drafts else 0
    return Limits(
        **{name: getattr(config, name) for name in AS_SET},
        max_input_length=lengths.max_input_length,
        max_total_tokens=lengths.max_total_tokens,
        max_batch_total_tokens=max_batch_total_tokens,
        max_batch_prefill_tokens=prefill,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batch_size=batch_size(config.max_batch_size, num_states),
        vocab_size=vocab_size,
        prefill_chunk=None if has_encoder else config.prefill_chunk,  # an encoder takes prompts whole
        pads_chunks=pads_chunks,
        prefix_caching=shares_prefixes
        and not config.disable_prefix_caching
        and bool(checkpoint_blocks or not num_states),
        checkpoint_tokens=distance * block_size if num_states else 0,
        checkpoint_blocks=checkpoint_blocks,
        window_blocks=window_blocks,
        most_at_once=most_at_once,
        speculate=speculate,
        proposals=min(speculate, most_proposals),
        token_seconds=room.token_seconds,
        prefill_logprobs=config.enable_prefill_logprobs,
        sources=_sources(config, lengths, prefill, is_full_size=max_batch_total_tokens >= useful)
        | _of_guesses(config, takes_drafts=takes_drafts, has_proposals=most_proposals > 0)
        | _of_states(config, num_states, "rings of windowed layers" if window_blocks else "states of recurrent layers"),
    )


def guesses(config: RouterConfig, most_proposals: int) -> int:
    """Tokens that may be guessed of a sequence for a step. Raises ValueError for more than the model proposes."""
    if config.speculate is None:
        return min(DEFAULT_GUESSES, most_proposals)
    if 0 < most_proposals < config.speculate:
        raise ValueError(
            f"speculate is {config.speculate} but the speculative model proposes {most_proposals} tokens at most: "
            f"lower speculate to {most_proposals} or leave it out"
        )
    return config.speculate


def _of_guesses(config: RouterConfig, *, takes_drafts: bool, has_proposals: bool) -> dict[str, str]:
    """Where `speculate` came from, if not from its setting."""
    if not takes_drafts:
        return {"speculate": "not possible with this model"}
    return {"speculate": "of the speculative model"} if config.speculate is None and has_proposals else {}


def batch_size(wanted: int | None, num_states: int) -> int | None:
    """Sequences at once: as many as are wanted (None: any number), or as `num_states` (0: no layer has any)."""
    return wanted if not num_states else min(wanted or num_states, num_states)


def _of_states(config: RouterConfig, num_states: int, source: str) -> dict[str, str]:
    """Where `max_batch_size` came from, if states or rings bound it."""
    if batch_size(config.max_batch_size, num_states) == config.max_batch_size:
        return {}
    return {"max_batch_size": source}


def _sources(config: RouterConfig, lengths: LengthLimits, prefill: int, *, is_full_size: bool) -> dict[str, str]:
    """Where each limit came from, for people. is_full_size: whether no load could use a larger KV cache."""
    tokens = "the largest load" if is_full_size else "what fits into memory"
    reasons = lengths.reasons | {"max_batch_total_tokens": tokens}
    gaps = {name: reason for name, reason in reasons.items() if getattr(config, name) is None}
    if prefill < config.max_batch_prefill_tokens:
        gaps["max_batch_prefill_tokens"] = "what takes about a second"
    return {**config.sources, **gaps}
