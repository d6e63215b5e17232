"""What an ingress reads of a request before it passes it on: its model, its prefix, and about how many tokens it needs.

Pure functions of the path and the body. Whether a body is valid, the replica says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import orjson

from lockstep_ray.streams import Stream

PREFIX_CHARACTERS = 256  # of a prompt, by which its replica is chosen
LEAST_CHARACTERS = 32  # a shorter prompt has no prefix
CHARACTERS_PER_TOKEN = 4
DEFAULT_TOKENS = 100  # of an answer, where the request does not say
POST_PATHS = frozenset({
    "/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize", "/detokenize", "/invocations", "/vertex",
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens",
})  # fmt: skip
GET_PATHS = frozenset({"/", "/health", "/ping", "/info", "/docs", "/openapi.json", "/api-doc/openapi.json"})
MOST_TOKENS = ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """One request on its way to a replica. headers: that are passed on; prefix: a hash of how the prompt begins.

    avoid: names of replicas that had it already. only: the one that must have it, whatever its load. known: what the
    replica has to know of a stream that it continues.
    """

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    tokens: int
    prefix: int | None
    avoid: frozenset[str] = frozenset()
    only: str | None = None
    known: bytes = field(default=b"", repr=False)

    def again(self, avoid: frozenset[str], stream: Stream) -> RelayedRequest:
        """The same for another replica, which continues where the client is."""
        return replace(self, avoid=avoid, known=stream.known())


def is_served(method: str, path: str) -> bool:
    """Whether any replica can answer. Not so for what is one replica's own, such as its metrics."""
    if method in ("GET", "HEAD"):
        return path in GET_PATHS or path.startswith(("/docs/", "/playground/", "/v1/models"))
    return (method == "POST" and path in POST_PATHS) or method == "OPTIONS"


def read_body(body: bytes) -> dict[str, Any]:
    """The body if it is a JSON object, else an empty one."""
    try:
        found = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def model_of(found: Mapping[str, Any]) -> str | None:
    """The model that a body names."""
    model = found.get("model")
    return model if isinstance(model, str) else None


def adapter_of(found: Mapping[str, Any], adapters: Collection[str]) -> str:
    """The adapter that a body names, of those that are known, or as TGI's do; empty where it names none."""
    if (named := model_of(found)) in adapters and named is not None:
        return named
    parameters = found.get("parameters")
    given = parameters.get("adapter_id") if isinstance(parameters, dict) else None
    return given if isinstance(given, str) else ""


def size_of(found: Mapping[str, Any], adapter: str = "") -> tuple[int, int | None]:
    """About how many tokens the request needs, and a hash of how its prompt begins; None if it is short.

    adapter: that it names, without which the beginning is another.
    """
    parameters = found.get("parameters")
    places = [found, parameters] if isinstance(parameters, dict) else [found]
    asked = [place[name] for place in places for name in MOST_TOKENS if isinstance(place.get(name), int)]
    count, beginning = 0, ""
    for text in _texts(found):
        count += len(text)
        if len(beginning) < PREFIX_CHARACTERS:
            beginning += text[: PREFIX_CHARACTERS - len(beginning)]
    tokens = count // CHARACTERS_PER_TOKEN + max(0, asked[0] if asked else DEFAULT_TOKENS)
    if len(beginning) < LEAST_CHARACTERS:
        return tokens, None
    known = f"{adapter}\0{beginning}" if adapter else beginning
    return tokens, int.from_bytes(blake2b(known.encode(errors="surrogatepass"), digest_size=8).digest())


def _texts(found: Mapping[str, Any]) -> Iterator[str]:
    """The prompt in its order: a system's, messages or items, a text, or token ids as words."""
    for name in ("system", "instructions", "messages", "input", "inputs", "prompt"):
        yield from _within(found.get(name))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int):
        yield f"{value} "
    elif isinstance(value, list):
        for one in value:
            yield from _within(one)
    elif isinstance(value, dict):
        for name in ("role", "content", "text"):
            yield from _within(value.get(name))
