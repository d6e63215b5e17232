"""What requests with grammars cost those without, on the shape of BLOOM-560m.

    python -m tests.system.grammar_cost [--free 4] [--others 4] [--tokens 96] [--rounds 3] [--model bloom-560m]

A server computes random weights; its tokenizer is trained on the texts of the installed packages and filled up to the
model's vocabulary. In each round, the same free requests run beside others twice: first these are free as well, then
they are held to a JSON schema, a regular expression and a Lark grammar in turn, new ones as often as some end. Compared
are the free requests' time per token, its longest gaps, and their tokens, which must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmark.cost import shapes
from tests.running import Server, body
from tests.system.test_grammars import GRAMMARS

TRAINED = 20_000  # tokens; the others are never written, but masks have a bit for each
TEXTS = 400  # files


def write_model(name: str, folder: Path) -> None:
    """The shape's config.json, and a tokenizer of its whole vocabulary."""
    found = shapes.find(name)
    config = dict(found.config)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(map(str, Path(json.__file__).parents[1].rglob("*.py")))[:TEXTS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train(files, trainer)
    trained = json.loads(tokenizer.to_str())
    vocab = trained["model"]["vocab"]
    for number in itertools.count():
        if len(vocab) == config["vocab_size"]:
            break
        vocab.setdefault(f"Ġw{number:x}", len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(trained))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@dataclass
class Seen:
    """What clients saw of some streams."""

    tokens: list[list[int]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between events with tokens, in seconds
    means: list[float] = field(default_factory=list)  # of each stream, for each token
    num_tokens: int = 0  # of streams that have not ended too


async def stream(http: httpx2.AsyncClient, url: str, request: dict[str, Any], seen: Seen) -> None:
    """Read one stream."""
    tokens: list[int] = []
    first = last = 0.0
    async with http.stream("POST", f"{url}/generate_stream", json=request) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                now = time.perf_counter()
                if tokens:
                    seen.gaps.append(now - last)
                first, last = first or now, now
                tokens.append(json.loads(line[5:])["token"]["id"])
                seen.num_tokens += 1
    seen.tokens.append(tokens)
    seen.means.append((last - first) / max(1, len(tokens) - 1))


def free(number: int, tokens: int) -> dict[str, Any]:
    """A request without a grammar, greedy and seeded in turn."""
    drawn = {"do_sample": True, "seed": number} if number % 2 else {}
    return body(f"def main_{number}(text):", max_new_tokens=tokens, ignore_eos=True, **drawn)


def constrained(number: int, tokens: int) -> dict[str, Any]:
    """One with a grammar."""
    grammar = GRAMMARS[number % len(GRAMMARS)]
    return body(f"def main_{number}(text):", max_new_tokens=tokens, do_sample=True, seed=number, grammar=grammar)


async def beside(url: str, requests: Sequence[dict[str, Any]], others: Sequence[Any]) -> tuple[Seen, Seen]:
    """The streams of `requests`, and of others, each of which is followed by the next of its kind."""
    mine, theirs = Seen(), Seen()
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as http:

        async def keep_on(kind: Any, first: int) -> None:
            for number in itertools.count(first, 100):
                await stream(http, url, kind(number), theirs)

        tasks = [asyncio.create_task(keep_on(kind, number)) for number, kind in enumerate(others)]
        await asyncio.sleep(1)
        await asyncio.gather(*(stream(http, url, request, mine) for request in requests))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    mine.tokens.sort()
    return mine, theirs


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def told(seen: Seen) -> dict[str, float]:
    """In milliseconds."""
    return {
        "per_token_ms": round(1000 * statistics.mean(seen.means), 2),
        "gap_p50_ms": round(1000 * percentile(seen.gaps, 0.5), 2),
        "gap_p99_ms": round(1000 * percentile(seen.gaps, 0.99), 2),
    }


async def compare(url: str, num_free: int, num_others: int, tokens: int, rounds: int) -> int:
    """All rounds. Returns the exit code."""
    requests = [free(number, tokens) for number in range(num_free)]
    await beside(url, requests[:1], [lambda n: constrained(n, tokens)])  # what is needed once is there then
    kinds = {"free": free, "grammars": constrained}
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    first: list[list[int]] = []
    for number in range(rounds):
        for kind, make in kinds.items():
            others = [lambda n, make=make: make(n, tokens)] * num_others
            mine, theirs = await beside(url, requests, others)
            first = first or mine.tokens
            assert first == mine.tokens, "tokens changed"
            seen[kind].append(told(mine))
            line = {"round": number, "others": kind, **told(mine), "their_tokens": theirs.num_tokens}
            if theirs.means:
                line["their_per_token_ms"] = told(theirs)["per_token_ms"]
            print(json.dumps(line), flush=True)
    ratio = statistics.median(
        after["per_token_ms"] / before["per_token_ms"] for before, after in zip(*seen.values(), strict=True)
    )
    print(json.dumps({"free": num_free, "others": num_others, "ratio": round(ratio, 3)}))
    return int(ratio > 1.05)


def main() -> int:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="tests.system.grammar_cost", description=__doc__)
    parser.add_argument("--model", default="bloom-560m", help="a shape that lockstep-bench knows")
    parser.add_argument("--free", type=int, default=4)
    parser.add_argument("--others", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(given.model, Path(folder))
        flags = ("--model-id", folder, "--random-weights", "--dtype", "bfloat16", "--max-total-tokens", "512")
        with Server(*flags) as server:
            return asyncio.run(compare(server.url, given.free, given.others, given.tokens, given.rounds))


if __name__ == "__main__":
    sys.exit(main())
