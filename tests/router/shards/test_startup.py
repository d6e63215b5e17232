"""From a config with gaps to final limits, and the table about them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.config import RouterConfig
from router.scheduling.limits import Limits, Room, derive_lengths, prefill_tokens, useful_tokens
from router.shards import startup
from router.shards.client import KvCache
from router.shards.startup import start, table
from tests.router.fake_shards import FakeShardedClient


def make_config(**fields: Any) -> RouterConfig:
    return RouterConfig(model_id="a/model", model_path="/nowhere", shard_sockets=("/nowhere",), **fields)


def limits_of(config: RouterConfig, **shards: Any) -> Limits:
    return asyncio.run(start(config, FakeShardedClient(**shards))).limits


def test_gaps_are_filled_with_the_defaults() -> None:
    limits = limits_of(make_config(), max_batch_total_tokens=10_000)
    assert (limits.max_input_length, limits.max_total_tokens, limits.max_batch_total_tokens) == (4095, 4096, 10_000)
    assert limits.sources["max_total_tokens"] == "the default for a model without a longest sequence"
    assert limits.sources["max_batch_total_tokens"] == "what fits into memory"


def test_gaps_follow_a_short_model_and_a_small_cache() -> None:
    short = limits_of(make_config(), max_positions=512)
    assert (512, "the model's longest sequence") == (short.max_total_tokens, short.sources["max_total_tokens"])
    assert 8750 == limits_of(make_config(), max_positions=9000, max_batch_total_tokens=10_000).max_total_tokens
    alone = limits_of(make_config(max_batch_size=1), max_positions=512, max_batch_total_tokens=512)
    assert (512, "the model's longest sequence") == (alone.max_total_tokens, alone.sources["max_total_tokens"])
    small = limits_of(make_config(), max_batch_total_tokens=100, block_size=16)
    assert (small.max_input_length, small.max_total_tokens) == (87, 88)
    assert "the KV cache that fits into memory" == small.sources["max_total_tokens"]


def test_long_prompts_asked_for_make_room_for_themselves_and_an_answer() -> None:
    lengths = derive_lengths(make_config(max_input_length=4000), max_positions=0, has_encoder=False)
    assert (lengths.max_input_length, lengths.max_total_tokens) == (4000, 5024)
    assert "--max-input-length and 1024" == lengths.reasons["max_total_tokens"]
    short = derive_lengths(make_config(max_input_length=4000), max_positions=4096, has_encoder=False)
    assert (short.max_input_length, short.max_total_tokens) == (4000, 4096)


@pytest.mark.parametrize(
    ("fields", "max_positions", "sentence"),
    [
        (
            {"max_total_tokens": 4096},
            2048,
            "--max-total-tokens is 4096 but the model's longest sequence is 2048 tokens",
        ),
        ({"max_input_length": 2048}, 2048, "--max-input-length is 2048 but must be less than --max-total-tokens, 2048"),
    ],
)
def test_contradictions_are_refused_with_value_bound_and_remedy(
    fields: dict[str, int], max_positions: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        derive_lengths(make_config(**fields), max_positions, has_encoder=False)


@pytest.mark.parametrize(
    ("step", "token", "expected"),
    [(0, 0, 4096), (0.01, 1e-6, 4096), (0.01, 1e-3, 512), (0.1, 0.1, 256), (10, 5e-3, 1024)],
    ids=["not measured", "a GPU", "a CPU", "a large model on one", "weights that stream"],
)
def test_steps_that_nobody_asked_for_take_about_a_second(step: float, token: float, expected: int) -> None:
    room = Room(10_000, 10_000, step, token)
    config = make_config(sources={"max_batch_prefill_tokens": "default"})
    assert expected == prefill_tokens(config, room, has_encoder=False)
    assert (
        4096 == prefill_tokens(config, room, has_encoder=True) == prefill_tokens(make_config(), room, has_encoder=False)
    )


def test_explicit_length_that_does_not_fit_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-total-tokens is 3000 but the KV cache that fits into memory is 1600"):
        limits_of(make_config(max_total_tokens=3000), max_batch_total_tokens=1600)


def test_prompts_of_an_encoder_fit_into_one_step() -> None:
    lengths = derive_lengths(make_config(max_batch_prefill_tokens=100), 0, has_encoder=True)
    assert (lengths.max_input_length, lengths.max_total_tokens) == (100, 4096)
    with pytest.raises(
        ValueError, match=r"--max-input-length is 200 but --max-batch-prefill-tokens is 100, .* to 100 or"
    ):
        derive_lengths(make_config(max_batch_prefill_tokens=100, max_input_length=200), 0, has_encoder=True)


def test_useful_tokens_are_what_the_limits_can_fill() -> None:
    config = make_config(max_concurrent_requests=10, max_total_tokens=100)
    assert 1120 == useful_of(config)
    assert 1280 == useful_of(config, has_encoder=True)
    config = make_config(max_concurrent_requests=10, max_total_tokens=100, max_batch_size=4)
    assert 448 == useful_of(config)


def useful_of(config: RouterConfig, *, has_encoder: bool = False) -> int:
    lengths = derive_lengths(config, 0, has_encoder=has_encoder)
    return useful_tokens(config, lengths, block_size=16, has_encoder=has_encoder)


def test_table_says_what_takes_memory() -> None:
    cache = KvCache(4096, 16, 256, 2 * 10**9, 7 * 10**9, 5 * 10**8, 3 * 10**8, "24 batch sizes up to 256")
    cache = replace(cache, products=("one", "another"), clocks="SM 1980 of 1980 MHz")
    started = asyncio.run(start(make_config(), FakeShardedClient()))
    more = [("tool calls", "hermes", "the chat template")]
    text = table(make_config(), replace(started, cache=cache), "http://127.0.0.1:3000", more)
    assert "tool calls" in text and "hermes" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "KV cache 4096 tokens 2.00 GB per shard" in lines
    assert "decode graphs 24 batch sizes up to 256 300 MB per shard" in lines
    assert "products 2 measured all are in /info" in lines
    assert "clocks SM 1980 of 1980 MHz while it decoded" in lines
    assert "memory left 7.00 GB per shard the largest step takes 500 MB" in lines


def test_table_tells_the_names_of_adapters() -> None:
    started = asyncio.run(start(make_config(), FakeShardedClient()))
    started = replace(started, limits=replace(started.limits, adapter_rows=8, adapter_bytes=10**9))
    config = make_config(adapters=tuple((f"a/{number}", "/f") for number in range(12)), adapter_dir="/d")
    text = " ".join(table(config, started, "http://127.0.0.1:3000").split())
    assert "adapters 12 named, others in /d 1.00 GB per shard, 8 at once; a/0, a/1, " in text
    assert "a/9 and 2 more tool" in text.replace("max_concurrent", "tool")


def test_sizes_have_three_digits_and_no_exponent() -> None:
    assert ["999 B", "1 kB", "999 MB", "1.00 GB"] == [startup._size(n) for n in (999, 1000, 999 * 10**6, 999_900_000)]


def test_rows_fit_on_a_terminal_beside_a_model_of_any_name() -> None:
    started = asyncio.run(start(make_config(), FakeShardedClient()))
    where = "100 on the device, 190 in the host's memory (31.13 GB), 90 in --offload-dir (14.75 GB), through 0.20 GB"
    streams = "17 of 24 layers, 0.43 GB, stream through 0.05 GB; chosen for 16 sequences of 512 tokens in a KV cache"
    model, cache = replace(started.model, offloaded=streams), replace(started.cache, offloaded=where)
    for name in ("short", "/a/path/" * 10):
        config = replace(make_config(), model_id=name)
        rows = table(config, replace(started, model=model, cache=cache), "http://a").splitlines()
        assert max(len(row) for row in rows if "/a/path/" not in row) <= 120
        at = next(number for number, row in enumerate(rows) if row.startswith("KV blocks"))
        until = next(number for number, row in enumerate(rows) if number > at and not row.startswith(" "))
        assert " ".join(["KV", "blocks", str(cache.num_blocks), where]) == " ".join(" ".join(rows[at:until]).split())


@pytest.mark.parametrize("offloaded", ["", "9 of 24 layers", "9 of 24 layers; chosen for 4 sequences"])
def test_table_says_what_is_off_the_device_and_why(offloaded: str) -> None:
    started = asyncio.run(start(make_config(), FakeShardedClient()))
    started = replace(started, model=replace(started.model, offloaded=offloaded))
    text = table(make_config(), started, "http://127.0.0.1:3000")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith("off the device")]
    assert [f"off the device {offloaded.replace(';', '')}"] * bool(offloaded) == lines


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, {"prefill_chunk": "auto"}),
        ({"prefill_chunk": 128}, {"prefill_chunk": "128"}),
        ({"max_inter_token_ms": 300}, {"prefill_chunk": "auto", "max_inter_token_ms": "300"}),
    ],
)
def test_table_says_how_chunks_are_chosen(fields: dict[str, Any], shown: dict[str, str]) -> None:
    config = make_config(**fields)
    text = table(config, asyncio.run(start(config, FakeShardedClient())), "http://127.0.0.1:3000")
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines()}
    assert {name: rows[name] for name in rows if name in ("prefill_chunk", "max_inter_token_ms")} == shown


def test_table_names_limits_and_where_they_came_from() -> None:
    config = make_config(max_total_tokens=500, sources={"max_total_tokens": "flag"})
    text = table(config, asyncio.run(start(config, FakeShardedClient())), "http://127.0.0.1:3000")
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert lines["max_total_tokens"].split()[1:] == ["500", "flag"]
    assert lines["max_input_length"].split()[1:] == "499 --max-total-tokens less one".split()
    assert lines["address"].endswith("http://127.0.0.1:3000")


def test_an_inferred_cache_keeps_an_eighth_back_and_one_that_holds_more_takes_the_longest_sequence() -> None:
    assert 875 == Room(1000, 1000).longest(is_inferred=True)
    assert 1000 == Room(1000, 1000).longest(is_inferred=False) == Room(5000, 1000).longest(is_inferred=True)


def test_the_table_tells_what_windowed_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gpt-oss 20b's shape at 32k tokens."""
    each = 12 * 41 * 16 * 2_048

    async def warmup(shards: FakeShardedClient, **wanted: Any) -> KvCache:
        kv = {"kv_bytes": 32768 * 24_576, "bytes_per_token": 24_576, "free_bytes": 10**9}
        rings = {"num_states": 4, "state_bytes": 4 * each, "checkpoint_blocks": 1, "window_blocks": 8}
        return KvCache(32768, 16, 2048, **kv, **rings, most_at_once=512)

    monkeypatch.setattr(FakeShardedClient, "warmup", warmup)
    config = make_config(max_total_tokens=32768)
    started = asyncio.run(start(config, FakeShardedClient()))
    limits = started.limits
    assert (8, 512, 512, 1) == (
        limits.window_blocks,
        limits.most_at_once,
        limits.checkpoint_tokens,
        limits.checkpoint_blocks,
    )
    assert (4, "rings of windowed layers") == (limits.max_batch_size, limits.sources["max_batch_size"])
    lines = [" ".join(line.split()) for line in table(config, started, "address").splitlines()]
    assert "KV cache 32768 tokens 805 MB per shard" in lines
    assert "KV cache dtype float32 24576 bytes for each token and shard" in lines
    assert any(line.startswith("rings 4 sequences 64.5 MB per shard; windowed layers keep what 128") for line in lines)
    assert "prefix cache on windows kept at ends and every 512 tokens" in lines
    wider = replace(config, state_checkpoint_tokens=16)
    assert 128 == asyncio.run(start(wider, FakeShardedClient())).limits.checkpoint_tokens
