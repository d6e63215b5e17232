"""Whether each answer is its adapter's, while adapters come and go and shards die: `python -m tests.system.adapters`.

A first server of the embedded model is asked with every adapter in turn, and has room for all of them; three are
compared with servers of the merged models. Then a second one is asked the same at random, with few rows and little
memory, while others are loaded, asked for, unloaded and asked for in vain, and, with `--trouble kill stop leave`,
shards die and stand still and clients leave. It prints a JSON object, and ends with 1 if an answer was another one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.running import ROOT, Server
from tests.server.adapters import made
from tests.system.guesses import (
    FLAGS,
    KEY,
    KEYS,
    LEAVE,
    TROUBLES,
    Asked,
    Clients,
    Lost,
    answers_amid,
    ask,
    client_of,
    is_left,
    metrics_at_rest,
    text_of,
)
from tests.system.test_keys import keys_file

DEMO = ROOT / "server" / "demo"
BASE = "the base"  # an answer's adapter where it has none
ROWS, MEMORY = 6, 0.02  # of the second server; GB
MERGED = 3
NAMES = ("model", "adapter")  # of what an answer says of its model


def requests_of(count: int, adapters: Sequence[str], seed: int) -> list[tuple[str, Asked]]:
    """Requests of both APIs with these adapters, or none, at random."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        name = chance.choice((*adapters, BASE)) if number >= len(adapters) else adapters[number]
        text, tokens = text_of(chance), chance.randint(4, 24)
        settings: dict[str, Any] = {"seed": number, "temperature": chance.choice((0.7, 1.1))}
        if chance.random() < 0.3:
            settings = {"seed": number}
        if chance.random() < 0.5:
            own = {} if name == BASE else {"adapter_id": name}
            parameters = settings | own | {"max_new_tokens": tokens, "details": True}
            path = chance.choice(("/generate", "/generate_stream"))
            found.append((name, Asked(path, {"inputs": text, "parameters": parameters}, chance.choice(KEYS))))
        else:
            own = {} if name == BASE else {"model": name}
            body = (
                {"prompt": text, "max_tokens": tokens, "logprobs": 2, "stream": chance.random() < 0.5} | settings | own
            )
            found.append((name, Asked("/v1/completions", {"temperature": 0} | body, chance.choice(KEYS))))
    return found


@contextmanager
def server(*flags: str) -> Iterator[Server]:
    """One with both keys."""
    with tempfile.TemporaryDirectory() as folder:
        keys = ("--api-keys-file", str(keys_file(Path(folder), *KEYS)))
        with Server(*FLAGS, *keys, *flags) as started:
            yield started


async def all_of(url: str, requests: Sequence[Asked]) -> list[Any]:
    """Their answers."""
    return await Clients(url, 24).all_answers(requests)


def as_of_base(asked: Asked) -> Asked:
    """The same request without its adapter."""
    body = {key: value for key, value in asked.body.items() if key != "model"}
    if "parameters" in body:
        body["parameters"] = {key: value for key, value in body["parameters"].items() if key != "adapter_id"}
    return Asked(asked.path, body, asked.key)


def without_name(answer: Any) -> Any:
    """An answer that does not say what its model is called."""
    if isinstance(answer, dict):
        return {key: without_name(value) for key, value in answer.items() if key not in NAMES}
    return [without_name(one) for one in answer] if isinstance(answer, list) else answer


def unlike_merged(
    folder: Path, requests: Sequence[tuple[str, Asked]], answers: Sequence[Any], flags: Sequence[str]
) -> int:
    """Of some adapters, how many answers are not those of the merged model."""
    wrong = 0
    for name in [name for name, _ in requests[:MERGED]]:
        own = [(asked, answer) for (of, asked), answer in zip(requests, answers, strict=True) if of == name]
        with server("--model-id", str(folder / f"{name}-merged"), *flags) as merged:
            found = asyncio.run(all_of(merged.url, [as_of_base(asked) for asked, _ in own]))
        wrong += sum(tokens(mine) != tokens(other) for (_, mine), other in zip(own, found, strict=True))
    return wrong


def tokens(answer: Any) -> Any:
    """What an answer has but for names and numbers that are rounded."""
    if isinstance(answer, dict):
        return {key: tokens(value) for key, value in answer.items() if key not in NAMES}
    return (
        [tokens(one) for one in answer] if isinstance(answer, list) else None if isinstance(answer, float) else answer
    )


async def come_and_go(url: str, churn: Sequence[tuple[str, Asked, Any]], counts: Counter[str]) -> None:
    """Load each under another name, ask for it, unload it, and ask in vain."""
    async with client_of(url) as client:

        async def post(path: str, **body: str) -> int:
            while True:
                try:
                    answer = await client.post(path, json=body, headers=KEY)
                except httpx2.HTTPError:
                    await asyncio.sleep(1)
                    continue
                if answer.status_code not in (502, 503):
                    return answer.status_code
                await asyncio.sleep(1)

        for name, asked, expected in churn:
            other = f"loaded-{name}"
            counts["loaded"] += await post("/v1/load_lora_adapter", lora_name=other, lora_path=name) == 200
            renamed = Asked(
                asked.path, json.loads(json.dumps(asked.body).replace(f'"{name}"', f'"{other}"')), asked.key
            )
            while True:
                try:
                    found = await ask(client, renamed)
                    break
                except (httpx2.HTTPError, Lost):
                    await asyncio.sleep(1)
            counts["other answers of loaded ones"] += without_name(found) != without_name(expected)
            counts["unloaded"] += await post("/v1/unload_lora_adapter", lora_name=other) == 200
            gone = await ask(client, renamed)
            counts["answers of unloaded ones"] += "error" not in gone
            await asyncio.sleep(0.2)


async def amid(
    started: Server, requests: Sequence[Asked], churn: Sequence[tuple[str, Asked, Any]], args: argparse.Namespace
) -> tuple[list[Any], Counter[str]]:
    """The answers of the second server, and what else happened."""
    counts = Counter[str]()
    going = asyncio.create_task(come_and_go(started.url, churn, counts))
    answers, others = await answers_amid(started, requests, args.trouble, args.at_once, args.seed)
    await going
    return answers, counts + others


def make(folder: Path, names: Sequence[str], num_merged: int) -> None:
    """Adapters of different ranks; of the first ones the merged models too."""
    for seed, name in enumerate(names):
        merged = folder / f"{name}-merged" if seed < num_merged else None
        made.make(DEMO, folder / name, merged, rank=2 + 2 * (seed % 4), seed=seed, size=0.3)


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--trouble", nargs="*", choices=(*TROUBLES, LEAVE), default=[])
    args, flags = parser.parse_known_args()
    flags = ["--dtype", "float32", *flags]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names, others = ([f"{kind}-{i}" for i in range(n)] for kind, n in (("a", args.adapters), ("c", args.loads)))
        make(folder, names, min(MERGED, args.adapters))
        make(folder, others, 0)
        requests = requests_of(args.requests, names, args.seed)
        of_others = requests_of(len(others), others, args.seed + 1)
        on = ("--adapter-dir", name, "--allow-adapter-changes")
        with server(*on, "--max-adapters", "1024", *flags) as first:
            expected = asyncio.run(all_of(first.url, [asked for _, asked in requests]))
            of_churn = asyncio.run(all_of(first.url, [asked for _, asked in of_others]))
            of_base = asyncio.run(all_of(first.url, [as_of_base(asked) for _, asked in requests[: args.adapters]]))
        result = {
            "requests": len(expected),
            "errors": sum("error" in answer for answer in [*expected, *of_churn]),
            "as the base": sum(tokens(a) == tokens(b) for a, b in zip(expected, of_base, strict=False)),
            "unlike the merged model": unlike_merged(folder, requests, expected, flags),
        }
        print(json.dumps(result), flush=True)
        churn = [(name, asked, answer) for (name, asked), answer in zip(of_others, of_churn, strict=True)]
        began = time.monotonic()
        few = ("--max-adapters", str(ROWS), "--adapter-memory", str(MEMORY))
        with server(*on, *few, *flags) as second:
            answers, counts = asyncio.run(amid(second, [asked for _, asked in requests], churn, args))
            metrics = metrics_at_rest(second)
        wrong = [n for n, (one, other) in enumerate(zip(expected, answers, strict=True)) if one != other]
        told = {key.removeprefix("tgi_"): metrics[key] for key in ("tgi_adapter_loads", "tgi_adapter_evictions")}
        result = {"other answers": len(wrong), "the first": wrong[:9], **told, **counts, "left": is_left(metrics)}
        print(json.dumps(result | {"seconds": round(time.monotonic() - began)}))
    bad = counts["other answers of loaded ones"] + counts["answers of unloaded ones"]
    return bool(wrong or bad or is_left(metrics))


if __name__ == "__main__":
    sys.exit(main())
