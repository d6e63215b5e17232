"""The shapes of Anthropic's messages: whole answers, and events of streams.

Pure functions from answers and events to bytes and dicts. Deltas are written by hand, because there is one for every
token of every stream. The first event of a stream says how many tokens the prompt has, and how many of them were
cached; the counts there leave cached ones out, as Anthropic's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from orjson import dumps

from router.chat.parts import Part, PlainReader, parts_of
from router.chat.pieces import AnswerReader, CallArguments, CallBegun, Piece, Reasoning, Text
from router.entry import Entry, Event, Failed, Finished, Token
from router.errors import RouterError, TooLong
from router.generation import OpenRequest
from router.openai.answers import renamed, status_of
from router.samples import Answer
from router.text import FinishReason

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.EOS_TOKEN: "end_turn"}
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Of sentences about what is wrong: what parameters are called elsewhere, and here.
NAMES = {
    "`stop`": "`stop_sequences`",
    "`response_format`": "`output_config.format`",
    "`grammar.value`": "`output_config.format`",
    "`Authorization: Bearer KEY`": "`x-api-key: KEY` or `Authorization: Bearer KEY`",
}
AFTER_TEXT = b"}}\n\n"
Json = dict[str, Any]
EMPTY: dict[str, Json] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
# What a piece of each kind of block is called.
DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


@dataclass(frozen=True)
class Head:
    """What an answer says of itself."""

    id: str
    model: str

    def message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        """A whole message, or the beginning of a streamed one."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def usage(entry: Entry, num_generated: int) -> Json:
    """Counts of tokens."""
    return {
        "input_tokens": entry.request.input_length - entry.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": entry.num_cached,
        "output_tokens": num_generated,
    }


def ending(entry: Entry, reason: FinishReason, *, is_call: bool) -> tuple[str, str | None]:
    """Why an answer ended, and the stop sequence that ended it. is_call: whether it calls tools, in full."""
    if reason is FinishReason.STOP_SEQUENCE and (stop := entry.generated.stop_sequence) is not None:
        return "stop_sequence", stop
    told = REASONS.get(reason, "end_turn")
    return ("tool_use" if is_call and told == "end_turn" else told), None


def message(head: Head, answer: Answer, entry: Entry, reader: AnswerReader) -> Json:
    """The whole answer of `/v1/messages`."""
    parts = parts_of([*reader.feed(answer.finished.generated_text), *reader.end()])
    is_call = not reader.is_in_call and any(part.kind == "call" for part in parts)
    reason, stop = ending(entry, answer.finished.reason, is_call=is_call)
    return head.message([_block(part) for part in parts], reason, stop, usage(entry, answer.finished.generated_tokens))


def _block(part: Part) -> Json:
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(part.text)}


def _arguments(written: str) -> Json:
    """What a call gives its tool; empty where the model wrote no object, or was cut off."""
    try:
        found = orjson.loads(written or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def error_body(error: RouterError) -> Json:
    """Anthropic's shape, and beside it the `error_type` that every error has here."""
    words = f"{_context_sentence(error)}. " if isinstance(error, TooLong) else ""
    sentence = words + renamed(str(error))
    for elsewhere, here in NAMES.items():
        sentence = sentence.replace(elsewhere, here)
    return error_of(status_of(error), sentence, error.error_type)


def _context_sentence(error: TooLong) -> str:
    """Anthropic's words, by which clients know that a shorter prompt would do."""
    num_prompt, num_new = error.num_prompt, error.num_new
    if num_prompt is not None and num_prompt <= error.most_prompt:
        return f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_new} > {error.most}"
    return f"prompt is too long: {num_prompt or 'too many'} tokens > {error.most_prompt} maximum"


def error_of(status: int, sentence: str, error_type: str) -> Json:
    """The same for an error that HTTP itself defines."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 424 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}, "error_type": error_type}


def frame(event: Json) -> bytes:
    """One server-sent event, named after its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(event))


class MessageFrames:
    """Turns the events of one stream into Anthropic's."""

    def __init__(self, head: Head, reader: AnswerReader, opened: OpenRequest) -> None:
        self._head = head
        self._reader = reader
        self._is_plain = isinstance(reader, PlainReader)
        self._entry = opened.entries[0]
        self._has_begun = self._has_calls = False
        self._block = -1  # number of the block that is open, if any is
        self._kind = ""  # its type; empty where none is open
        self._before_text = b""  # of a delta of its text, all that comes before the text

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of the one sequence."""
        frames = [] if self._has_begun else [self._start()]
        for event in events:
            if isinstance(event, Token) and event.text:
                if self._is_plain and self._kind:  # so most tokens are
                    frames.append(self._before_text + dumps(event.text) + AFTER_TEXT)
                else:
                    frames.extend([self._piece(piece) for piece in self._reader.feed(event.text)])
        last = events[-1]
        if isinstance(last, Finished):
            frames.append(self._end(last))
        elif isinstance(last, Failed):
            frames.append(frame(error_body(last.error)))
        return b"".join(frames)

    def _start(self) -> bytes:
        self._has_begun = True
        return frame({"type": "message_start", "message": self._head.message([], None, None, usage(self._entry, 0))})

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):
                return self._show("text", text)
            case Reasoning(text):
                return self._show("thinking", text)
            case CallBegun(_, id, name):
                self._has_calls = True
                block = {"type": "tool_use", "id": id, "name": name, "input": {}}
                return self._open("tool_use", block)
            case CallArguments(_, text):
                return self._delta(text)

    def _show(self, kind: str, text: str) -> bytes:
        begin = b"" if kind == self._kind else self._open(kind, EMPTY[kind])
        return begin + self._delta(text)

    def _delta(self, text: str) -> bytes:
        return self._before_text + dumps(text) + AFTER_TEXT

    def _open(self, kind: str, block: Json) -> bytes:
        """What begins a block of this kind, behind the end of another."""
        closed = self._close()
        self._block += 1
        self._kind = kind
        delta, field = DELTAS[kind]
        self._before_text = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._block, delta, field)
        )
        return closed + frame({"type": "content_block_start", "index": self._block, "content_block": block})

    def _close(self) -> bytes:
        """What ends the open block, if one is open."""
        if not self._kind:
            return b""
        self._kind = ""
        return frame({"type": "content_block_stop", "index": self._block})

    def _end(self, finished: Finished) -> bytes:
        frames = [self._piece(piece) for piece in self._reader.end()]
        if self._block < 0:
            frames.append(self._open("text", EMPTY["text"]))
        frames.append(self._close())
        reason, stop = ending(self._entry, finished.reason, is_call=self._has_calls and not self._reader.is_in_call)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        told = usage(self._entry, finished.generated_tokens)
        frames.append(frame({"type": "message_delta", "delta": delta, "usage": told}))
        return b"".join([*frames, frame({"type": "message_stop"})])
