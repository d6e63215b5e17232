"""Decoding with adapters here and in llama.cpp, beside decoding without: `python -m tests.system.adapter_race`.

`--model FOLDER` and `--gguf FILE` are the same weights, such as `python -m benchmark.race.model qwen3-0.6b FOLDER` and
llama.cpp's converter make them; `--adapters FOLDER …` and `--loras FILE …` the same adapters, the latter converted.
Both servers have all adapters loaded and are asked for the same prompts in turn, by one client and by eight at once:
without an adapter, all with the same one, and each with another. Tokens a second are those of all answers together,
from the first of any to the last of any. It prints a JSON object for each round and one of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.running import Server
from tests.system.lookups import prompts

TOKENS, CLIENTS = 64, (1, 8)


async def stream(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[float]:
    """When each token came."""
    times = []
    async with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                times.append(time.perf_counter())
    return times


async def rate(client: httpx2.AsyncClient, path: str, bodies: Sequence[dict[str, Any]]) -> float:
    """Tokens a second, of all together, from the first token to the last."""
    found = await asyncio.gather(*(stream(client, path, body) for body in bodies))
    begun, end = min(times[0] for times in found), max(times[-1] for times in found)
    return (sum(map(len, found)) - 1) / (end - begun)


def ours(prompt: str, adapter: str | None) -> dict[str, Any]:
    """Of `/generate_stream`."""
    own = {} if adapter is None else {"adapter_id": adapter}
    return {"inputs": prompt, "parameters": own | {"max_new_tokens": TOKENS, "ignore_eos": True}}


def theirs(prompt: str, adapter: int | None, count: int) -> dict[str, Any]:
    """Of `/completion`, which has all adapters with a scale."""
    scales = [{"id": n, "scale": float(n == adapter)} for n in range(count)]
    body = {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    return body | {"cache_prompt": False, "lora": scales}


def kinds(clients: int, count: int) -> dict[str, list[int | None]]:
    """By name, the adapter of each client."""
    found: dict[str, list[int | None]] = {"none": [None] * clients, "one": [0] * clients}
    if clients > 1:
        found["each another"] = [n % count for n in range(clients)]
    return found


async def one_round(url: str, port: int, count: int, seed: int) -> dict[str, float]:
    """Tokens a second of each kind."""
    found = {}
    async with (
        httpx2.AsyncClient(base_url=url, timeout=900) as own,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=900) as other,
    ):
        for clients in CLIENTS:
            asked = [*prompts(seed), *prompts(seed + 1), *prompts(seed + 2)][:clients]
            for name, adapters in kinds(clients, count).items():
                pairs = list(zip(asked, adapters, strict=True))
                mine = [ours(text, None if one is None else f"adapter-{one}") for text, one in pairs]
                found[f"ours, {clients}, {name}"] = await rate(own, "/generate_stream", mine)
                bodies = [theirs(text, one, count) for text, one in pairs]
                found[f"llama.cpp, {clients}, {name}"] = await rate(other, "/completion", bodies)
    return found


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until it answers."""
    while True:
        assert process.poll() is None, "llama.cpp's server ended"
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    parser.add_argument("--loras", type=Path, nargs="+", required=True)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8812)
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = parser.parse_known_args()
    named = ",".join(f"adapter-{n}={folder}" for n, folder in enumerate(args.adapters))
    loras = [part for file in args.loras for part in ("--lora", str(file))]
    command = [str(args.llama_server), "-m", str(args.gguf), "-t", "2", "-c", "4096", "-np", str(max(CLIENTS))]
    command += ["--port", str(args.port), *loras]
    rounds = []
    with (
        Server("--model-id", str(args.model), "--lora-adapters", named, "--max-total-tokens", "512", *flags) as server,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            wait_for(f"http://127.0.0.1:{args.port}", process)
            for number in range(args.rounds):
                rounds.append(asyncio.run(one_round(server.url, args.port, len(args.adapters), 3 * number)))
                print(json.dumps({kind: round(value, 2) for kind, value in rounds[-1].items()}), flush=True)
        finally:
            process.terminate()
    print(json.dumps({kind: round(statistics.median(one[kind] for one in rounds), 2) for kind in rounds[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
