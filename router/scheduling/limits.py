"""The router's limits once the model is known: what the user set, what follows from it, and what the warmup found.

`RouterConfig` says what was asked for and may leave gaps; `Limits` has none. Pure functions: the shards' answers come
in as plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from router.config import DEFAULT_MAX_INPUT_LENGTH, DEFAULT_MAX_TOTAL_TOKENS, RouterConfig, relation_problems
from router.scheduling.queue import blocks_for

UINT32_MAX = 2**32 - 1  # what the wire carries for a number of tokens


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
    kv_admission: str = "reserve"  # whether KV blocks are given as sequences grow, or all at once
    prefill_logprobs: bool = True  # whether a request may ask for the log-probabilities of its prompt
    sources: dict[str, str] = field(default_factory=dict)  # limit -> flag, environment, default, derived or inferred


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """How long one request may be, known before the warmup."""

    max_input_length: int
    max_total_tokens: int


def derive_lengths(
    config: RouterConfig, max_positions: int, *, has_encoder: bool, fitting_tokens: int | None = None
) -> LengthLimits:
    """Fill the gaps of the two length limits. Raises ValueError that names value, bound and remedy.

    max_positions: of the model, 0 for none. has_encoder: prompts are read whole, in one step. fitting_tokens: the KV
    cache that the warmup found room for.
    """
    bounds = {
        "the model's longest sequence": max_positions or None,
        "max_batch_total_tokens": config.max_batch_total_tokens,
        "the KV cache that fits into memory": fitting_tokens,
    }
    known = {name: value for name, value in bounds.items() if value is not None}
    room = DEFAULT_MAX_TOTAL_TOKENS - DEFAULT_MAX_INPUT_LENGTH  # for an answer
    wanted = (config.max_input_length or DEFAULT_MAX_INPUT_LENGTH) + room
    total = config.max_total_tokens or min([max(wanted, DEFAULT_MAX_TOTAL_TOKENS), *known.values()])
    problems = [
        f"max_total_tokens is {total} but {name} is {bound} tokens: lower max_total_tokens to {bound} or less"
        for name, bound in known.items()
        if total > bound
    ]
    step = config.max_batch_prefill_tokens if has_encoder else total
    input_length = config.max_input_length or max(1, min(DEFAULT_MAX_INPUT_LENGTH, total - 1, step))
    if has_encoder and input_length > step:
        problems.append(
            f"max_input_length is {input_length} but max_batch_prefill_tokens is {step}, and the encoder of this model "
            f"reads a prompt in one step: lower max_input_length to {step} or raise max_batch_prefill_tokens"
        )
    problems += relation_problems(
        max_input_length=input_length,
        max_total_tokens=total,
        max_batch_total_tokens=None,
        waiting_served_ratio=config.waiting_served_ratio,
    )
    if problems:
        raise ValueError("; ".join(problems))
    return LengthLimits(input_length, total)


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
    *,
    max_positions: int,
    has_encoder: bool,
    vocab_size: int,
    max_batch_total_tokens: int,
    block_size: int,
    num_blocks: int,
    shares_prefixes: bool,
    pads_chunks: bool,
) -> Limits:
    """The final limits after the warmup. Raises ValueError when the longest request could never run."""
    fitting_tokens = min(max_batch_total_tokens, block_size * num_blocks)
    lengths = derive_lengths(config, max_positions, has_encoder=has_encoder, fitting_tokens=fitting_tokens)
    return Limits(
        max_input_length=lengths.max_input_length,
        max_total_tokens=lengths.max_total_tokens,
        max_batch_total_tokens=max_batch_total_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_concurrent_requests=config.max_concurrent_requests,
        max_queue_tokens=config.max_queue_tokens,
        max_batch_size=config.max_batch_size,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        vocab_size=vocab_size,
        prefill_chunk=None if has_encoder else config.prefill_chunk,  # an encoder takes prompts whole
        max_inter_token_ms=config.max_inter_token_ms,
        pads_chunks=pads_chunks,
        num_lanes=config.num_lanes,
        prefix_caching=shares_prefixes and not config.disable_prefix_caching,
        kv_admission=config.kv_admission,
        prefill_logprobs=config.enable_prefill_logprobs,
        sources=_sources(config),
    )


def _sources(config: RouterConfig) -> dict[str, str]:
    filled_in = {
        "max_input_length": "derived",
        "max_total_tokens": "derived",
        "max_batch_total_tokens": "inferred",
    }
    gaps = {name: word for name, word in filled_in.items() if getattr(config, name) is None}
    return {**config.sources, **gaps}
