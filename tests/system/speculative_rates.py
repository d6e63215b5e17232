"""Tokens a second of the embedded model with each speculative model against without, on an idle machine.

Each has a server of its own, which chooses how much is guessed. In each round the same beginnings of held-out documents
are asked of all of them in turn, which answer with the same tokens. It prints a JSON object of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import httpx2
from tokenizers import Tokenizer

from tests.embedded_model.speculative.make import KINDS
from tests.embedded_model.speculative.target import FOLDER
from tests.running import ROOT, Server, body
from tests.server.drafting import acceptance

PLAIN = "plain"
SAMPLED = {"do_sample": True, "temperature": 1.0}
WARM = 4  # times that a first batch is asked: costs are measured


def beginnings(count: int) -> list[str]:
    """Of held-out documents."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    prompts = acceptance.questions(count, "greedy")
    return [str(tokenizer.decode(prompt.token_ids, skip_special_tokens=False)) for prompt in prompts]


async def answer(client: httpx2.AsyncClient, texts: Sequence[str], **parameters: Any) -> list[list[int]]:
    """The tokens of each, one after another."""
    found = []
    for seed, text in enumerate(texts):
        settings = {"max_new_tokens": acceptance.ANSWER, "details": True, "seed": seed} | parameters
        reply = await client.post("/generate", json=body(text, **settings))
        found.append([token["id"] for token in reply.raise_for_status().json()["details"]["tokens"]])
    return found


async def rate(
    client: httpx2.AsyncClient, texts: Sequence[str], batch: int, **parameters: Any
) -> tuple[float, list[list[int]]]:
    """Tokens a second while so many clients ask, and the tokens."""
    began = time.perf_counter()
    parts = await asyncio.gather(*(answer(client, texts[i::batch], **parameters) for i in range(batch)))
    found = [tokens for part in parts for tokens in part]
    return sum(map(len, found)) / (time.perf_counter() - began), found


async def measure(urls: Mapping[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Of all rounds, the median rates, and the medians of what each is against plain."""
    parameters = SAMPLED if args.sampled else {}
    texts, rounds, chance = beginnings(args.documents), list[dict[str, float]](), random.Random(args.seed)
    clients = {kind: httpx2.AsyncClient(timeout=900, base_url=url) for kind, url in urls.items()}
    for client in clients.values():
        for _ in range(WARM):
            await rate(client, texts[: 2 * args.batch], args.batch, **parameters)
    for _ in range(args.rounds):
        found = {}
        for kind in chance.sample(list(clients), len(clients)):
            found[kind] = await rate(clients[kind], texts, args.batch, **parameters)
        assert all(tokens == found[PLAIN][1] for _, tokens in found.values()), "answers differ"
        rounds.append({kind: value for kind, (value, _) in found.items()})
    for client in clients.values():
        await client.aclose()
    return {
        "way": "sampled" if args.sampled else "greedy",
        "batch": args.batch,
        "tokens/s": {kind: round(statistics.median(own[kind] for own in rounds), 1) for kind in urls},
        "against plain": {kind: round(statistics.median(own[kind] / own[PLAIN] for own in rounds), 3) for kind in urls},
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    with ExitStack() as stack:
        urls = {PLAIN: stack.enter_context(Server(*flags)).url}
        for kind in args.kinds:
            path = str(ROOT / "tests" / "embedded_model" / kind)
            urls[kind] = stack.enter_context(Server("--speculative-model", path, *flags)).url
        print(json.dumps(asyncio.run(measure(urls, args))))


if __name__ == "__main__":
    main()
