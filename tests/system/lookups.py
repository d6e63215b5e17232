"""The same n-gram look-up here and in llama.cpp, beside plain decoding in each: `python -m tests.system.lookups`.

`--model FOLDER` and `--gguf FILE` are the same weights, such as `python -m benchmark.race.model qwen3-0.6b FOLDER` and
llama.cpp's converter make them, and `--llama-server` its server. Random weights soon repeat themselves, which is what
look-ups are about: no system has anything else to guess from. Both servers are asked for the same prompts in turn, one
answer at a time; those of llama.cpp are started for each kind anew, since look-ups are an option of the server. It
prints a JSON object for each round and one of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from benchmark.serving.workload import WORDS
from tests.running import Server

NUM_PROMPTS, PROMPT_WORDS, TOKENS, GUESSES = 3, 64, 200, 8
KINDS = {
    "plain": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}


def prompts(seed: int) -> list[str]:
    """Words, each of them a token."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=PROMPT_WORDS)) for _ in range(NUM_PROMPTS)]


async def rate(client: httpx2.AsyncClient, path: str, bodies: Sequence[dict[str, Any]]) -> float:
    """Tokens a second behind the first, of one answer after the other."""
    seconds = 0.0
    for body in bodies:
        times = []
        async with client.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    times.append(time.perf_counter())
        seconds += times[-1] - times[0]
    return len(bodies) * (TOKENS - 1) / seconds


@asynccontextmanager
async def llama(args: argparse.Namespace, flags: Sequence[str]) -> AsyncIterator[httpx2.AsyncClient]:
    """A server of llama.cpp."""
    command = [
        args.llama_server,
        "-m",
        args.gguf,
        "-t",
        "2",
        "-c",
        "1024",
        "-np",
        "1",
        "--port",
        str(args.port),
        *flags,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{args.port}", timeout=900) as client:
                while True:
                    assert process.poll() is None, f"it ended: {' '.join(map(str, command))}"
                    with suppress(httpx2.HTTPError):
                        if (await client.get("/health")).status_code == 200:
                            break
                    await asyncio.sleep(0.2)
                yield client
        finally:
            process.terminate()


def ours(prompt: str, speculate: int) -> dict[str, Any]:
    """Of `/generate_stream`."""
    return {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS, "ignore_eos": True, "speculate": speculate}}


def theirs(prompt: str) -> dict[str, Any]:
    """Of `/completion`."""
    return {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}


async def one_round(args: argparse.Namespace, server: Server, seed: int) -> dict[str, float]:
    """Tokens a second of each kind."""
    found, asked = {}, prompts(seed)
    async with httpx2.AsyncClient(base_url=server.url, timeout=900) as client:
        for name, speculate in (("plain", 0), ("ngram", GUESSES)):
            found[f"ours, {name}"] = await rate(client, "/generate_stream", [ours(one, speculate) for one in asked])
    for name, flags in KINDS.items():
        async with llama(args, flags) as client:
            found[f"llama.cpp, {name}"] = await rate(client, "/completion", [theirs(one) for one in asked])
    return found


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8811)
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = parser.parse_known_args()
    guessing = ("--speculate", str(GUESSES), "--speculative-method", "ngram", "--max-total-tokens", "512")
    with Server("--model-id", str(args.model), *guessing, *flags) as server:
        rounds = []
        for number in range(args.rounds):
            rounds.append(asyncio.run(one_round(args, server, number)))
            print(json.dumps({kind: round(value, 2) for kind, value in rounds[-1].items()}), flush=True)
    medians = {kind: statistics.median(one[kind] for one in rounds) for kind in rounds[0]}
    gains = {kind: round(value / medians[f"{kind.split(',')[0]}, plain"], 3) for kind, value in medians.items()}
    print(json.dumps({"tokens/s": {kind: round(value, 2) for kind, value in medians.items()}, "beside plain": gains}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
