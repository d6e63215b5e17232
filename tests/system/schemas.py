"""Random JSON schemas through a model: how many texts finish, and whether all that do are valid.

    python -m tests.system.schemas [--schemas 200] [--seeds 5] [--url URL]

A server of the embedded model is started, unless one is named. Schemas bound the lengths of what they describe, so that
a text that is drawn at random comes to its end. A finished text that is not valid is an error, and so is a share of
finished texts below 90 percent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import jsonschema

from tests.running import Server

MOST_TOKENS = 600
AT_ONCE = 32
WORDS = ("red", "green", "the little fox", "Zürich", 'say "hi"', "a\\b", "日本", "", "null", "1.5")
PATTERNS = ("^[A-Z]{2}-[0-9]{1,4}$", "^(yes|no|maybe)$", "^[a-f0-9]{8}$", "^\\d{3}( \\w{1,5})?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
Schema = dict[str, Any]


def random_schema(rng: random.Random) -> Schema:
    """An object whose text has at most some hundred tokens."""
    schema = _object(rng, depth=2)
    schema["$defs"] = {"small": _leaf(rng)}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    if depth and rng.random() < 0.45:
        return rng.choice([_object, _array, _choice])(rng, depth - 1)
    return {"$ref": "#/$defs/small"} if rng.random() < 0.1 else _leaf(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["name", "age", "a b", "x-1", "Größe", "tags", "size", "_id", '"q"', "at"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _leaf(rng: random.Random) -> Schema:
    least, most = rng.randint(0, 5), rng.randint(6, 15)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": most},
            {"type": "string", "maxLength": most},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "integer", "minimum": -(10**least), "maximum": 10**most},
            {"type": "integer", "exclusiveMinimum": least, "maximum": most},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"enum": rng.sample(WORDS, 3)},
            {"enum": [1, -2.5, None, True, ["a", 1], {"b": {}}]},
            {"const": rng.choice(WORDS)},
        ]
    )


@dataclass
class Outcome:
    """What became of all texts."""

    texts: int = 0
    finished: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of texts that have come to their end."""
        return self.finished / max(self.texts, 1)


async def draw(url: str, schemas: Sequence[Schema], seeds: Sequence[int], prompt: str = "Tell me more.") -> Outcome:
    """A text for each schema and seed; temperature 1."""
    outcome, places = Outcome(), asyncio.Semaphore(AT_ONCE)
    async with httpx2.AsyncClient(timeout=600) as http:

        async def one(schema: Schema, seed: int) -> None:
            grammar = {"type": "json", "value": schema}
            parameters = {"max_new_tokens": MOST_TOKENS, "do_sample": True, "seed": seed, "details": True}
            async with places:
                answer = await http.post(
                    f"{url}/generate", json={"inputs": prompt, "parameters": parameters | {"grammar": grammar}}
                )
            note(outcome, schema, answer)

        await asyncio.gather(*(one(schema, seed) for schema in schemas for seed in seeds))
    return outcome


def note(outcome: Outcome, schema: Schema, answer: httpx2.Response) -> None:
    """Look at one text."""
    outcome.texts += 1
    if answer.status_code != 200:
        outcome.failures.append(f"{answer.status_code} {answer.text} for {json.dumps(schema)}")
        return
    told = answer.json()
    outcome.tokens += told["details"]["generated_tokens"]
    if told["details"]["finish_reason"] == "length":
        return
    outcome.finished += 1
    try:
        jsonschema.validate(json.loads(told["generated_text"]), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        outcome.failures.append(f"{told['generated_text']!r} for {json.dumps(schema)}: {str(error)[:200]}")


def run(url: str, num_schemas: int, num_seeds: int) -> int:
    """Draw and tell. Returns the exit code."""
    schemas = [random_schema(random.Random(number)) for number in range(num_schemas)]
    began = time.monotonic()
    outcome = asyncio.run(draw(url, schemas, range(1, num_seeds + 1)))
    seconds = time.monotonic() - began
    for failure in outcome.failures[:20]:
        print(failure)
    told = {
        "texts": outcome.texts,
        "finished": outcome.finished,
        "failures": len(outcome.failures),
        "tokens": outcome.tokens,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(told))
    return int(bool(outcome.failures) or outcome.share < 0.9)


def main() -> int:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="tests.system.schemas", description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--url", help="of a server that runs")
    given = parser.parse_args()
    if given.url:
        return run(given.url, given.schemas, given.seeds)
    with Server("--max-total-tokens", "1024") as server:
        return run(server.url, given.schemas, given.seeds)


if __name__ == "__main__":
    sys.exit(main())
