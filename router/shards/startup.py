"""From shards that may still be loading to final limits, and the table that tells people what came of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from router.config import RouterConfig
from router.scheduling.limits import Limits, derive_lengths, max_sequences, resolve, useful_tokens
from router.scheduling.prefix_moves import TierContents
from router.shards.client import KvCache, ModelInfo, Shards

TABLE_LIMITS = (
    "max_concurrent_requests",
    "max_queue_tokens",
    "max_input_length",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "prefill_chunk",
    "max_inter_token_ms",
    "max_batch_total_tokens",
    "max_batch_size",
    "kv_admission",
    "speculate",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "max_best_of",
    "max_stop_sequences",
    "max_top_n_tokens",
)
WIDTH = 120  # columns of the table
MOST_VALUE = 50  # of them for a value; a longer one, such as a model's path, stands out of line
SHOWN_NAMES = 10  # of adapters
LEAST_NOTE = 40  # of them for a note behind such a value


@dataclass(frozen=True, slots=True)
class Started:
    """Shards that are ready to run steps."""

    model: ModelInfo
    cache: KvCache
    limits: Limits
    tiers: TierContents | None = None  # behind the device; None: there are none


async def start(config: RouterConfig, shards: Shards) -> Started:
    """Ask what was loaded, warm up, settle the limits. Raises ValueError for limits that cannot be, and ShardError."""
    model = await shards.info()
    if config.has_adapters and not model.adapter_rows:
        raise ValueError(model.no_adapters or "the shards were started without adapters")
    has_encoder = model.decoder_start is not None
    lengths = derive_lengths(config, model.max_positions, has_encoder=has_encoder)
    useful = useful_tokens(config, lengths, block_size=model.block_size, has_encoder=has_encoder)
    cache = await shards.warmup(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_total_tokens=lengths.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens or 0,
        useful_tokens=useful,
        max_top_n_tokens=config.max_top_n_tokens,
        max_sequences=max_sequences(config),
        may_be_shorter=config.max_total_tokens is None,
    )
    limits = resolve(
        config,
        cache.room(useful),
        max_positions=model.max_positions,
        has_encoder=has_encoder,
        vocab_size=model.vocab_size,
        max_batch_total_tokens=cache.max_batch_total_tokens,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        shares_prefixes=model.shares_prefixes,
        takes_drafts=model.takes_drafts,
        most_proposals=model.most_proposals,
        pads_chunks=cache.pads_chunks,
        num_states=cache.num_states,
        checkpoint_blocks=cache.checkpoint_blocks,
        window_blocks=cache.window_blocks,
        most_at_once=cache.most_at_once,
    )
    is_host = model.device == "cpu"  # whose memory is the device's
    limits = replace(
        limits,
        adapter_rows=model.adapter_rows,
        adapter_bytes=model.adapter_bytes,
        adapter_host_bytes=None if is_host else int(config.adapter_host_memory * 1e9),
    )
    return Started(model, cache, limits)


def table(config: RouterConfig, started: Started, address: str, more_facts: Iterable[tuple[str, str, str]] = ()) -> str:
    """What runs, with which limits, and where each limit came from. more_facts: rows of others, in front of limits."""
    model, cache, limits = started.model, started.cache, started.limits
    where, _, why = model.offloaded.partition("; ")
    weights = ", ".join(sorted({_size(num_bytes) for num_bytes in model.weight_bytes}))
    facts = [
        ("model", f"{config.model_id} ({model.model_type})", f"revision {config.revision}" if config.revision else ""),
        ("dtype", model.dtype, model.dtype_reason),
        ("weights", f"{weights} per shard", model.quantize),
        *([("off the device", where, why)] if where else []),
        *([("speculation", model.proposes, f"{limits.proposals} tokens at most")] if limits.proposals else []),
        ("shards", str(model.world_size), model.device),
        ("threads", f"{model.threads} per shard", model.threads_reason),
        ("backend", model.backend, model.backend_reason),
        ("KV cache", f"{cache.max_batch_total_tokens} tokens", f"{_size(cache.kv_bytes)} per shard"),
        (
            "KV cache dtype",
            model.kv_cache_dtype,
            f"{cache.bytes_per_token or model.kv_bytes_per_token} bytes for each token and shard",
        ),
        *_states(cache),
        ("KV blocks", str(cache.num_blocks), cache.offloaded or f"{cache.block_size} tokens each"),
        ("decode graphs", cache.captured, f"{_size(cache.graph_bytes)} per shard" if cache.graph_bytes else ""),
        *([("products", f"{len(cache.products)} measured", "all are in /info")] if cache.products else []),
        *([("clocks", cache.clocks, "while it decoded")] if cache.clocks else []),
        ("memory left", f"{_size(cache.free_bytes)} per shard", _largest_step(cache)),
        ("prefix cache", "on" if limits.prefix_caching else "off", _why_no_prefixes(config, started)),
        *_tiers(started.tiers),
        *_adapters(config, limits),
        *more_facts,
    ]
    shown = [name for name in TABLE_LIMITS if name not in _left_open(limits)]
    settings = [(name, _value(getattr(limits, name)), limits.sources.get(name, "default")) for name in shown]
    return _align([*facts, *settings, ("address", address, "")])


def _states(cache: KvCache) -> list[tuple[str, str, str]]:
    """What sequences take beside their tokens."""
    if not cache.num_states:
        return []
    size = f"{_size(cache.state_bytes)} per shard"
    if not cache.window_blocks:
        return [("states", f"{cache.num_states} sequences", size)]
    reach = cache.window_blocks * cache.block_size
    rings = f"{size}; windowed layers keep what {reach} tokens see, and {cache.most_at_once} that a step adds"
    return [("rings", f"{cache.num_states} sequences", rings)]


def _adapters(config: RouterConfig, limits: Limits) -> list[tuple[str, str, str]]:
    """Which adapters there are, and the room for them."""
    if not limits.adapter_rows:
        return []
    host = "" if limits.adapter_host_bytes is None else f", {_size(limits.adapter_host_bytes)} of the host behind"
    names, folder = [name for name, _ in config.adapters], config.adapter_dir
    count = f"{len(names) or 'none'} named" + ("" if folder is None else f", others in {folder}")
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    told = f"; {', '.join(names[:SHOWN_NAMES])}{more}" if names else ""
    room = f"{_size(limits.adapter_bytes)} per shard{host}, {limits.adapter_rows} at once"
    return [("adapters", count, room + told)]


def has_tiers(started: Started) -> bool:
    """Whether the prefix cache goes on behind the device."""
    return started.model.has_tiers and started.limits.prefix_caching


def _tiers(tiers: TierContents | None) -> list[tuple[str, str, str]]:
    """What is behind the device."""
    if tiers is None:
        return []
    sizes = tiers.sizes
    host, disk = (f"{_size(count * sizes.block_bytes)}" for count in (sizes.num_slots, sizes.num_places))
    rows = [("prefix cache on host", f"{sizes.num_slots} blocks", host)]
    if tiers.trouble:
        rows.append(("prefix cache on disk", "off", tiers.trouble))
    elif sizes.num_places:
        rows.append(
            ("prefix cache on disk", f"{sizes.num_places} blocks", f"{disk}, {len(tiers.stored)} there already")
        )
    return rows


def _largest_step(cache: KvCache) -> str:
    return f"the largest step takes {_size(cache.step_bytes)}" if cache.step_bytes else ""


def _why_no_prefixes(config: RouterConfig, started: Started) -> str:
    limits = started.limits
    if limits.prefix_caching and limits.window_blocks:
        return f"windows kept at ends and every {limits.checkpoint_tokens} tokens"
    if limits.prefix_caching and limits.checkpoint_tokens:
        return f"states kept every {limits.checkpoint_tokens} tokens, in {limits.checkpoint_blocks} blocks each"
    if limits.prefix_caching:
        return ""
    if config.disable_prefix_caching:
        return "disable_prefix_caching"
    return (
        "not every shard has KV blocks that could keep states"
        if started.cache.num_states
        else "not possible with this model"
    )


def _left_open(limits: Limits) -> set[str]:
    """Limits that are no number: without one, the chunk's own rule holds."""
    return {"max_inter_token_ms"} if limits.max_inter_token_ms is None else set()


def _value(value: float | str | None) -> str:
    return "no limit" if value is None else str(value)


def _size(num_bytes: int) -> str:
    """Decimal units, as on the box of a GPU."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 999.5:  # which three digits still show as such
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _align(rows: Iterable[tuple[str, str, str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows if len(row[column]) <= MOST_VALUE) for column in range(2)]
    heads = (f"{name:<{widths[0]}}  {value:<{widths[1]}}  " for name, value, _ in rows)
    return "\n".join(_with_note(head, note) for head, (_, _, note) in zip(heads, rows, strict=True))


def _with_note(head: str, note: str) -> str:
    """A row, with as many lines as its note needs."""
    room = max(WIDTH - len(head), LEAST_NOTE)
    first, *more = textwrap.wrap(note, room, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join([f"{head}{first}".rstrip(), *(" " * len(head) + line for line in more)])
