"""Bodies that are nearly right: valid ones, mutated by structure and by bytes. A pure function of a generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Json = dict[str, Any]

NUMBERS = [
    0, 1, -1, 2, 7, 0.5, 1.0, -0.0, 1e-46, 1.2e-38, 1e-7, 1e39, 1e308, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 10**30,
]  # fmt: skip
TEXTS = [
    "",
    "a",
    "\0",
    "é🙂",
    "\ufffd",
    "\ud800",
    "</s>",
    "\u202e",
    "\r\n\r\n",
    "data: {}\n\n",
    "%s{}",
    "x" * 40,
    "x" * 3000,
]
OTHERS = [None, True, False, [], {}, [[]], [None], {"a": 1}, "1", "true", [1] * 50, {"inputs": "a"}]
OTHERS += [float("nan"), float("inf")]
# Written as they stand, where a number or a word of JSON would be.
RAW = ["1e999", "-1e999", "9" * 400, "01", "0x10", "1.", ".5", "+1", "NaN", "-Infinity", "'a'", "tru", '"\\x41"']
RAW += ["[" * 300, "[" * 300 + "]" * 300, '{"a":' * 200 + "1" + "}" * 200, "//", '"a" "b"', "1,", '"\t"', "nul\0"]
RAW += ['"\\ud83d"']
MARK = "\u2603"  # stands for one of RAW until the body is text

VALID: dict[str, Callable[[Random], Any]] = {
    "best_of": lambda r: r.choice([1, 2]),
    "temperature": lambda r: r.choice([0.1, 1.0, 1.2e-38, 3e38]),
    "repetition_penalty": lambda r: r.uniform(0.5, 2),
    "frequency_penalty": lambda r: r.uniform(-2, 2),
    "presence_penalty": lambda r: r.uniform(-2, 2),
    "min_p": lambda r: r.uniform(0, 1),
    "logit_bias": lambda r: {str(r.randint(0, 255)): r.uniform(-100, 100) for _ in range(r.randint(0, 3))},
    "bad_words": lambda r: r.choices(["a", "bc", "é", "🙂"], k=r.randint(0, 3)),
    "stop_token_ids": lambda r: r.choices(range(256), k=r.randint(0, 3)),
    "ignore_eos": lambda r: r.random() < 0.5,
    "min_tokens": lambda r: r.randint(0, 2),
    "top_k": lambda r: r.randint(1, 300),
    "top_p": lambda r: r.uniform(0.01, 1),
    "typical_p": lambda r: r.uniform(0.01, 1),
    "do_sample": lambda r: r.random() < 0.5,
    "max_new_tokens": lambda r: r.randint(1, 12),
    "return_full_text": lambda r: r.random() < 0.5,
    "stop": lambda r: r.choices(["a", "bc", "é", "🙂"], k=r.randint(0, 3)),
    "truncate": lambda r: r.randint(1, 16),
    "watermark": lambda r: r.random() < 0.5,
    "details": lambda r: r.random() < 0.5,
    "decoder_input_details": lambda r: r.random() < 0.5,
    "seed": lambda r: r.choice([0, 1, 2**64 - 1]),
    "top_n_tokens": lambda r: r.randint(0, 5),
    "grammar": lambda r: _grammar(r),
    "adapter_id": lambda r: None,
}


GRAMMARS: list[Json] = [
    {"type": "json", "value": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"type": "json", "value": '{"enum": ["a", 1, null]}'},
    {"type": "json_object", "value": {"type": "array", "items": {"type": "boolean"}, "minItems": 2}},
    {"type": "json_schema", "value": {"name": "n", "schema": {"type": "null"}}},
    {"type": "regex", "value": "[ab]{2,5}|é+"},
    {"type": "lark", "value": 'start: "a" other\nother: /[0-9]{1,3}/'},
]
FORMATS: list[Json] = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "maxLength": 3}}},
]
SCHEMAS = ["string", "integer", "boolean", "null", "array", "object", "other", 1, None]
# What regular expressions and grammars are made of, right or wrong.
PIECES = [*'ab()[]{}|*+?.^$-,:/"\\é\n', "{2}", "{,9}", "(?i:", "\\d", "\\p{L}", "start: ", "%json {}", "(?=", "\\1"]


def _grammar(random: Random) -> Any:
    """One that is right, or of random content."""
    if random.random() < 0.4:
        return random.choice(GRAMMARS)
    kind = random.choice(["json", "regex", "lark", "json_schema"])
    if kind in ("regex", "lark"):
        start = "start: " if kind == "lark" else ""
        return {"type": kind, "value": start + "".join(random.choices(PIECES, k=random.randint(1, 8)))}
    schema = _schema(random, 3)
    return {"type": kind, "value": schema if kind == "json" else {"name": "n", "schema": schema}}


def _schema(random: Random, depth: int) -> Any:
    schema: Json = {"type": random.choice(SCHEMAS)}
    if depth and random.random() < 0.6:
        schema["properties"] = {name: _schema(random, depth - 1) for name in random.sample("abc", 2)}
        schema["required"] = random.sample("abcd", random.randint(0, 2))
    if depth and random.random() < 0.3:
        schema[random.choice(["items", "anyOf", "allOf", "not", "$ref"])] = _schema(random, depth - 1)
    if random.random() < 0.3:
        name = random.choice(["maxLength", "minItems", "pattern", "enum", "const", "minimum", "multipleOf", "format"])
        schema[name] = random.choice([0, 3, -1, "a+", "(", "date", ["a", 1], 1e308, None])
    return schema


def fuzzed_body(random: Random) -> bytes:
    """A body that is right (one in eight), or wrong in one way or several."""
    value = _valid(random)
    kind = random.randrange(8)
    if kind in (1, 2, 3, 4):
        for _ in range(random.randint(1, 3)):
            value = _mutated(value, random)
    body = _written(value, random)
    if kind >= 4:
        for _ in range(random.randint(1, 3)):
            body = random.choice(BYTEWISE)(body, random)
    return body


def _valid(random: Random) -> Json:
    """A body of TGI's routes, or of a completion, which `/invocations` takes too."""
    if random.random() < 0.15:
        held = random.choice([*GRAMMARS, *FORMATS, _grammar(random)])
        return {"prompt": "ab", "max_tokens": random.randint(1, 12), "response_format": held, "stream": True}
    names = random.sample(sorted(VALID), random.randint(0, 4))
    parameters = {name: VALID[name](random) for name in names}
    body: Json = {"inputs": "".join(random.choices("ab 🙂é\n", k=random.randint(1, 8)))}
    if parameters or random.random() < 0.5:
        body["parameters"] = parameters
    if random.random() < 0.4:
        body["stream"] = random.random() < 0.5
    return body


def _nasty(random: Random) -> Any:
    return random.choice([random.choice(NUMBERS), random.choice(TEXTS), random.choice(OTHERS), MARK])


def _mutated(value: Any, random: Random) -> Any:
    """The body with one place of it changed, at any depth."""
    if isinstance(value, list) and value and random.random() < 0.6:
        place = random.randrange(len(value))
        return [*value[:place], _mutated(value[place], random), *value[place + 1 :]]
    if not isinstance(value, dict) or random.random() < 0.05:
        return _nasty(random)
    keys = list(value)
    deed = random.randrange(5)
    if not keys or deed == 0:
        return {**value, random.choice([*VALID, "inputs", "parameters", "stream", "", "é", "x" * 500]): _nasty(random)}
    key = random.choice(keys)
    rest = {name: one for name, one in value.items() if name != key}
    if deed == 1:
        return rest
    if deed == 2:
        return {**rest, random.choice([key.upper(), key + "\0", key[:-1], "\ud83d"]): value[key]}
    return {**value, key: _mutated(value[key], random)}


def _written(value: Any, random: Random) -> bytes:
    text = json.dumps(value, ensure_ascii=random.random() < 0.5 or "\\ud" in json.dumps(value))
    for mark in (json.dumps(MARK), f'"{MARK}"'):
        while mark in text:
            text = text.replace(mark, random.choice(RAW), 1)
    return text.encode()


def _with(random: Random, body: bytes, middle: bytes, removed: int = 0) -> bytes:
    at = random.randint(0, len(body))
    return body[:at] + middle + body[at + removed :]


def _flip(body: bytes, random: Random) -> bytes:
    at = random.randrange(len(body)) if body else 0
    return body[:at] + bytes([body[at] ^ 1 << random.randrange(8)]) + body[at + 1 :] if body else b"\0"


def _repeat(body: bytes, random: Random) -> bytes:
    start = random.randint(0, len(body))
    piece = body[start : start + random.randint(1, 30)]
    return body[:start] + piece * random.choice([2, 3, 50]) + body[start:]


# Each takes a body and gives another.
BYTEWISE: list[Callable[[bytes, Random], bytes]] = [
    _flip,
    _repeat,
    lambda body, random: body[: random.randint(0, len(body))],
    lambda body, random: _with(random, body, b"", removed=random.randint(1, 10)),
    lambda body, random: _with(random, body, random.randbytes(random.randint(1, 6))),
    lambda body, random: _with(random, body, random.choice(b'{}[]",:\\0e-'.decode()).encode()),
    lambda body, random: _with(random, body, random.choice(RAW).encode(errors="surrogatepass")),
    lambda body, random: random.choice([b"\xef\xbb\xbf", b" \n\t", b"\0", b"\xff\xfe"]) + body,
    lambda body, random: body + random.choice([b" ", b"\0", b"\n", b",", body]),
    lambda body, random: body.decode(errors="replace").encode(
        random.choice(["utf-16", "utf-32", "latin-1"]), "replace"
    ),
    lambda body, random: b" " * random.choice([100, 10_000]) + body,
]
