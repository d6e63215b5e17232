"""The null model: it keeps the wire contract, writes ordinary words without end, and loads nothing."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.scheduling.adapters import Placed
from router.scheduling.request import ValidRequest
from router.shards.client import Prepared, ShardedClient, ShardError, ShardHealth
from router.shards.wire import new_sequence, step_request
from router.text.tokenizer import ModelTokenizer
from server.adapters.identity import content_key
from server.config import ShardConfig
from server.null import LOGPROB, SENTENCE, NullEngine, Pace, serving, word
from server.pb import generate_pb2 as pb
from tests.running import ROOT, Server, body, events_of, tokens_of

DEMO = ROOT / "server" / "demo"
TEXT = " The little fox walked along the river in the morning sun and found a red ball under the old tree."


def sequence(id: int, prompt_length: int, **fields: Any) -> pb.NewSequence:
    return new_sequence(id, ValidRequest(list(range(prompt_length)), 9, **fields), [id], block_size=16)


def tokens(reply: pb.StepReply) -> dict[int, int]:
    return dict(zip(reply.ids, reply.token_ids, strict=True))


def test_the_sentence_is_words_of_the_embedded_model_and_no_end_token() -> None:
    tokenizer = ModelTokenizer.load(str(DEMO))
    assert TEXT == tokenizer.decode(SENTENCE)
    assert not tokenizer.special_ids & set(SENTENCE)


def test_prompts_advance_by_chunks_and_the_last_chunk_yields_the_first_token() -> None:
    engine = NullEngine()
    first = engine.step(step_request(1, add=[sequence(1, 5), sequence(2, 1)], chunks=[(1, 3), (2, 1)]))
    assert {2: SENTENCE[0]} == tokens(first)
    second = engine.step(step_request(2, chunks=[(1, 2)], decode=True))
    assert {1: SENTENCE[0], 2: SENTENCE[1]} == tokens(second)
    third = engine.step(step_request(3, chunks=[], decode=False))
    assert {} == tokens(third)


def test_a_retired_sequence_gets_no_more_tokens() -> None:
    engine = NullEngine()
    engine.step(step_request(1, add=[sequence(1, 1), sequence(2, 1)], chunks=[(1, 1), (2, 1)]))
    assert {2: SENTENCE[1]} == tokens(engine.step(step_request(2, retire=[1], decode=True)))


def test_computed_tokens_of_a_prompt_are_not_asked_for_again() -> None:
    engine, cached = NullEngine(), sequence(1, 40)
    cached.computed = 32
    assert {1: SENTENCE[0]} == tokens(engine.step(step_request(1, add=[cached], chunks=[(1, 8)])))


def test_the_sentence_begins_again_when_it_ends() -> None:
    engine = NullEngine()
    engine.step(step_request(1, add=[sequence(1, 1)], chunks=[(1, 1)]))
    later = [tokens(engine.step(step_request(step, decode=True)))[1] for step in range(2, 2 + len(SENTENCE))]
    assert [*SENTENCE[1:], SENTENCE[0]] == later


def test_candidates_and_prompt_log_probabilities_come_for_who_asked() -> None:
    engine = NullEngine()
    new = [sequence(1, 5, top_n_tokens=2, prompt_logprobs=True), sequence(2, 1)]
    first = engine.step(step_request(1, add=new, chunks=[(1, 2), (2, 1)]))
    second = engine.step(step_request(2, chunks=[(1, 3)], decode=True))
    assert [2, 2] == [len(reply.prompt[0].logprobs) for reply in (first, second)]  # four in all: not the first token
    assert [2, 1] == list(second.ids)
    assert [0, 2] == list(second.top_counts)
    assert [SENTENCE[0], SENTENCE[1]] == list(second.top_ids)
    assert [LOGPROB, LOGPROB - 1] == list(second.top_logprobs)


def test_an_adapter_s_answer_is_its_own() -> None:
    keys = [b"", b"first adapter...", b"other adapter..."]
    engine = NullEngine()
    rows = [Placed(row, key) for row, key in enumerate(keys) if row]
    new = [sequence(1 + row, 1) for row in range(3)]
    for row, one in enumerate(new):
        one.adapter = row
    got = [tokens(engine.step(step_request(1, adapters=rows, add=new, chunks=[(1, 1), (2, 1), (3, 1)])))]
    got += [tokens(engine.step(step_request(step, decode=True))) for step in range(2, 9)]
    answers = [tuple(one[1 + row] for one in got) for row in range(3)]
    assert [tuple(word(place, key) for place in range(8)) for key in keys] == answers and 3 == len({*answers})
    again = sequence(4, 1)
    again.adapter = 2
    changed = step_request(9, retire=[3], adapters=[Placed(2, keys[1])], add=[again], chunks=[(4, 1)])
    assert {4: word(0, keys[1])} == tokens(engine.step(changed))


# ------------------------------------------------------------------------------------------------------- the wire


@asynccontextmanager
async def served(folder: Path, num_ranks: int, **settings: float) -> AsyncIterator[ShardedClient]:
    paths = [str(folder / f"rank-{rank}") for rank in range(num_ranks)]
    steps = tuple(str(folder / f"steps-{rank}") for rank in range(1, num_ranks))
    given: dict[str, Any] = settings | {
        "model_path": str(DEMO),
        "weights_path": str(DEMO),
        "world_size": num_ranks,
        "rendezvous": "file:///none",
    }
    async with AsyncExitStack() as stack:
        for rank, path in enumerate(paths):
            config = ShardConfig(rank=rank, socket_path=path, step_sockets=steps, **given)
            await stack.enter_async_context(serving(config))
        client = ShardedClient(paths)
        stack.push_async_callback(client.close)
        await client.wait_ready(timeout=300)
        yield client


async def health_after(shards: ShardedClient, num_steps: int) -> ShardHealth:
    """What the ranks say once all have finished so many steps: rank 0 replies to one before the others are done."""
    async with asyncio.timeout(60):  # a bound of liveness
        while (health := await shards.health()).steps_finished < num_steps:
            await asyncio.sleep(0.01)
    return health


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_the_wire_contract(num_ranks: int, tmp_path: Path) -> None:
    async with served(tmp_path, num_ranks) as shards:
        info = await shards.info()
        assert ("null", num_ranks, 2048, "cpu") == (info.model_type, info.world_size, info.vocab_size, info.device)
        wanted = dict.fromkeys(("max_batch_prefill_tokens", "max_total_tokens", "max_top_n_tokens"), 8)
        cache = await shards.warmup(max_batch_total_tokens=0, useful_tokens=1000, **wanted)
        assert (1000, 16, 63) == (cache.max_batch_total_tokens, cache.block_size, cache.num_blocks)
        cache = await shards.warmup(max_batch_total_tokens=160, useful_tokens=1000, **wanted)
        assert (160, 10) == (cache.max_batch_total_tokens, cache.num_blocks)
        shards.send(step_request(1, add=[sequence(1, 1)], chunks=[(1, 1)]))
        shards.send(step_request(2, decode=True))
        replies = [await shards.receive(), await shards.receive()]
        assert [(1, {1: SENTENCE[0]}), (2, {1: SENTENCE[1]})] == [(reply.step, tokens(reply)) for reply in replies]
        health = await health_after(shards, 2)
        assert (2, 2, 0) == (health.steps_received, health.steps_finished, health.oldest_step_ms)
        with pytest.raises(ValueError, match="the null model computes nothing"):
            await shards.start_profile()


async def test_an_adapter_takes_what_its_files_do(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(98))
    async with served(tmp_path, 2, has_adapters=True, max_adapters=3, adapter_memory=1e-6) as shards:
        info, key = await shards.info(), content_key(folder)
        assert (3, 1000) == (info.adapter_rows, info.adapter_bytes)
        assert Prepared(100) == await shards.prepare_adapter(key, str(folder))
        assert Prepared(0) == await shards.prepare_adapter(key, "")
        missing = await shards.prepare_adapter(key, str(tmp_path / "missing"))
        assert "its files cannot be read: No such file or directory" == missing.problem


def test_steps_with_a_pace_end_one_after_the_other() -> None:
    pace = Pace(0.010, 0.001)
    prompt = step_request(1, add=[sequence(1, 5)], chunks=[(1, 5)])
    decode, goodbye = step_request(2, decode=True), step_request(3, retire=[1])
    ends = [pace.ends_at(now, step) for now, step in ((1.0, prompt), (1.001, decode), (1.002, goodbye), (2.0, decode))]
    assert pytest.approx([1.015, 1.025, 1.025, 2.010]) == ends


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_pace_delays_the_replies_and_keeps_their_order(num_ranks: int, tmp_path: Path) -> None:
    async with served(tmp_path, num_ranks, null_step_ms=20.0, null_token_us=1000.0) as shards:
        loop = asyncio.get_running_loop()
        started = loop.time()
        shards.send(step_request(1, add=[sequence(1, 10)], chunks=[(1, 10)]))
        shards.send(step_request(2, decode=True))
        replies = [await shards.receive(), await shards.receive()]
        assert loop.time() - started >= 0.050
        assert [(1, {1: SENTENCE[0]}), (2, {1: SENTENCE[1]})] == [(reply.step, tokens(reply)) for reply in replies]
        health = await health_after(shards, 2)
        assert (2, 2) == (health.steps_received, health.steps_finished)


@pytest.mark.parametrize("token_us", [0.0, 50.0])
async def test_prefixes_are_shared_where_computing_them_takes_time(token_us: float, tmp_path: Path) -> None:
    async with served(tmp_path, 1, null_step_ms=1.0, null_token_us=token_us) as shards:
        assert (token_us > 0) == (await shards.info()).shares_prefixes


async def test_other_ranks_refuse_the_router_s_steps(tmp_path: Path) -> None:
    async with served(tmp_path, 2):
        second = ShardedClient([str(tmp_path / "rank-1")])
        try:
            await second.wait_ready(timeout=300)
            second.send(step_request(1))
            with pytest.raises(ShardError, match="steps reach rank 1 through rank 0"):
                await second.receive()
        finally:
            await second.close()


def test_it_imports_no_torch() -> None:
    code = "import sys, server.__main__, server.null; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "False" == result.stdout.strip()


# ------------------------------------------------------------------------------------------------- a whole server


def test_a_server_without_a_model_answers_as_any_other() -> None:
    with Server("--model-id", "null", "--num-shard", "2") as server:
        asked = body("Once upon a time", max_new_tokens=30, details=True, decoder_input_details=True, top_n_tokens=2)
        answer = httpx2.post(f"{server.url}/generate", json=asked, timeout=60).json()
        streamed = body("Once upon a time", max_new_tokens=30, stop=["river"], details=True)
        with httpx2.stream("POST", f"{server.url}/generate_stream", json=streamed, timeout=60) as stream:
            events = events_of(list(stream.iter_lines()))
        info = httpx2.get(f"{server.url}/info", timeout=30).json()
    assert answer["generated_text"].startswith(TEXT)
    assert ([*SENTENCE, *SENTENCE][:30], "length") == (tokens_of(answer), answer["details"]["finish_reason"])
    assert None is answer["details"]["prefill"][0]["logprob"]
    assert {LOGPROB} == {token["logprob"] for token in answer["details"]["prefill"][1:]}
    assert {2} == {len(candidates) for candidates in answer["details"]["top_tokens"]}
    assert (TEXT[: TEXT.index("river") + 5], "stop_sequence") == (
        events[-1]["generated_text"],
        events[-1]["details"]["finish_reason"],
    )
    assert "null" == info["model_id"]


def test_eight_ranks_end_without_a_word_when_they_are_told_to() -> None:
    with Server("--model-id", "null", "--num-shard", "8") as server:
        answer = httpx2.post(f"{server.url}/generate", json=body("Once", max_new_tokens=30), timeout=60)
        assert 200 == answer.status_code
        server.stop(signal.SIGTERM)
        code, output = server.wait()
    assert 0 == code, output
    assert not re.search("ERROR|WARN|CRITICAL|lost|ended by itself|Traceback", output), output
