"""Streams of chats as TGI's own Python client reads them, `text-generation` 0.7.0.

It was written for chunks that no server sends any more: every one must name a role and have a `tool_calls`, which is
one call and not a list, and it takes `[DONE]` for JSON that is broken. So it gets what it reads. Nobody else writes out
every field of a request that is not set, for a model that is called tgi.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from router.entry import Event
from router.event_stream import Frames
from router.openai.answers import DONE
from router.openai.schemas import ChatRequest
from router.tgi import frame

WRITTEN_OUT = frozenset({"repetition_penalty", "logit_bias", "top_logprobs", "n", "tools", "tool_choice"})
CALL = {"id": "", "type": "function"}
FUNCTION = {"name": None, "arguments": ""}


def asks(body: ChatRequest) -> bool:
    """Whether a body comes from this client."""
    return body.model == "tgi" and body.model_fields_set >= WRITTEN_OUT


class TgiClientFrames:
    """What other frames write, as this client reads it."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of one sequence."""
        written = self._frames.write(index, list(events)).removesuffix(DONE)
        return b"".join(map(_told, written.split(b"\n\n")))


def _told(written: bytes) -> bytes:
    if not written:
        return b""
    chunk: dict[str, Any] = orjson.loads(written.removeprefix(b"data: "))
    for choice in chunk.get("choices", ()):
        calls = choice["delta"].get("tool_calls")
        choice["delta"] |= {"role": "assistant", "tool_calls": _one_call(calls[0]) if calls else None}
    return frame(chunk)


def _one_call(call: dict[str, Any]) -> dict[str, Any]:
    return {**CALL, **call, "function": {**FUNCTION, **call["function"]}}
