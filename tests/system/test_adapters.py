"""A whole server with more adapters than rows and memory, whose shards and router are killed: the null model's words.

With real models and many more requests: `python -m tests.system.adapters`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path

import httpx2

from server.adapters.identity import content_key
from server.null import word
from tests.adapter_folders import adapter_folder, weights
from tests.running import Server, body, tokens_of

NUM_ADAPTERS = 12
FLAGS = ("--model-id", "null", "--num-shard", "2", "--null-step-ms", "3", "--null-token-us", "20")
# Files of 400 kB: two rows are filled, and the third of these three never is.
ROOM = ("--max-adapters", "3", "--adapter-memory", "0.001")


def make(folder: Path, content: str) -> tuple[Path, bytes]:
    path = adapter_folder(folder / content, content)
    (path / "adapter_model.safetensors").write_bytes(weights(content, 400_000))
    return path, content_key(path)


async def ask(http: httpx2.AsyncClient, name: str | None, tokens: int) -> list[int]:
    """The tokens of an answer, which a router that was killed may have to give again."""
    own = {} if name is None else {"adapter_id": name}
    asked = body(f"Once upon a time {tokens}", max_new_tokens=tokens, details=True, **own)
    while True:
        try:
            answer = await http.post("/generate", json=asked)
        except httpx2.TransportError:
            await asyncio.sleep(0.2)
            continue
        if answer.status_code != 503:
            assert 200 == answer.status_code, answer.text
            return tokens_of(json.loads(answer.content))
        await asyncio.sleep(0.2)


async def ask_all(server: Server, keys: dict[str, bytes], count: int) -> None:
    """Many at once, while a shard dies, and then the router: each answer is its adapter's."""
    chance = random.Random(5)
    asked = [(chance.choice([None, *keys]), chance.randrange(20, 60)) for _ in range(count)]
    async with httpx2.AsyncClient(base_url=server.url, timeout=120) as http:
        asking = [asyncio.create_task(ask(http, name, tokens)) for name, tokens in asked]
        for victim in (server.shards, server.router):
            await asyncio.sleep(0.5)
            found = await asyncio.to_thread(victim)
            os.kill(found if isinstance(found, int) else chance.choice(found), signal.SIGKILL)
        got = await asyncio.gather(*asking)
        asked += (last := [(name, 20) for name in keys])
        got += [await ask(http, *one) for one in last]
    for (name, tokens), answer in zip(asked, got, strict=True):
        key = b"" if name is None else keys[name]
        assert [word(place, key) for place in range(tokens)] == answer, name


def test_each_answer_is_its_adapter_s_whatever_dies(tmp_path: Path) -> None:
    made = {f"adapter-{number}": make(tmp_path, f"content-{number}") for number in range(NUM_ADAPTERS)}
    named = ",".join(f"{name}={path}" for name, (path, _) in made.items())
    with Server(*FLAGS, *ROOM, "--lora-adapters", named) as server:
        asyncio.run(ask_all(server, {name: key for name, (_, key) in made.items()}, 100))
        metrics = server.metrics()
        assert 0 == metrics["tgi_adapter_waiting_requests"] == metrics["tgi_adapter_refusals"]
        assert metrics["tgi_adapter_rows_used"] <= 2 and metrics["tgi_adapter_evictions"] >= NUM_ADAPTERS - 4
        server.stop()
        code, output = server.wait()
    assert 0 == code, output
    assert "12 named" in output and "1 MB per shard, 3 at once" in output
