"""The events of Anthropic's streams: their shapes, and what writes them.

Of a delta all but its text is written once for the block, because there is one for every token of every stream. The
first event says how many tokens the prompt has, and how many of them were cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from orjson import dumps
from typing_extensions import TypedDict

from router.apis.anthropic.answers import (
    Block,
    Head,
    MessageAnswer,
    MessageError,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ending,
    error_body,
    usage,
)
from router.chat.pieces import AnswerReader, CallArguments, CallBegun, Piece, PlainReader, Reasoning, Text
from router.http.responses import named_frame
from router.requests.generation import OpenRequest
from router.scheduling.request import Event, Failed, Finished, Token

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStart(TypedDict):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: MessageAnswer


class BlockStart(TypedDict):
    """A block begins, empty as yet."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """More of what the model thinks."""

    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(TypedDict):
    """More of the JSON of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


Delta = TextDelta | ThinkingDelta | InputDelta


class BlockDelta(TypedDict):
    """More of the block that is open."""

    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class BlockStop(TypedDict):
    """The block is complete."""

    type: Literal["content_block_stop"]
    index: int


class Ending(TypedDict):
    """Why a stream ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """What is known at the end."""

    type: Literal["message_delta"]
    delta: Ending
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event of a stream."""

    type: Literal["message_stop"]


class Ping(TypedDict):
    """A sign of life."""

    type: Literal["ping"]


# One event of a stream of `/v1/messages`.
MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping

# Blocks as they begin, and a piece of each kind.
TEXT: TextBlock = {"type": "text", "text": ""}
THINKING: ThinkingBlock = {"type": "thinking", "thinking": "", "signature": ""}
TEXT_DELTA: TextDelta = {"type": "text_delta", "text": "\0"}
THINKING_DELTA: ThinkingDelta = {"type": "thinking_delta", "thinking": "\0"}
CALL_DELTA: InputDelta = {"type": "input_json_delta", "partial_json": "\0"}


def frame(event: MessageEvent | MessageError) -> bytes:
    """One server-sent event."""
    return named_frame(event)


class MessageFrames:
    """Turns the events of one stream into Anthropic's."""

    def __init__(self, head: Head, opened: OpenRequest, reader: AnswerReader) -> None:
        self._head = head
        self._reader = reader
        self._is_plain = isinstance(reader, PlainReader)
        self._entry = opened.entries[0]
        self._has_begun = self._has_calls = False
        self._block = -1  # number of the block that is open, if any is
        self._kind = ""  # its type; empty where none is open
        self._before, self._after = b"", b""  # of a delta of it, all that comes before and after its text

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of the one sequence."""
        frames = [] if self._has_begun else [self._start()]
        for event in events:
            if isinstance(event, Token) and event.text:
                if self._is_plain and self._kind:  # so most tokens are
                    frames.append(self._before + dumps(event.text) + self._after)
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
                return self._show(TEXT, TEXT_DELTA, text)
            case Reasoning(text):
                return self._show(THINKING, THINKING_DELTA, text)
            case CallBegun(_, id, name):
                self._has_calls = True
                return self._open({"type": "tool_use", "id": id, "name": name, "input": {}}, CALL_DELTA)
            case CallArguments(_, text):
                return self._delta(text)

    def _show(self, empty: Block, delta: Delta, text: str) -> bytes:
        begin = b"" if empty["type"] == self._kind else self._open(empty, delta)
        return begin + self._delta(text)

    def _delta(self, text: str) -> bytes:
        return self._before + dumps(text) + self._after

    def _open(self, block: Block, delta: Delta) -> bytes:
        """What begins a block, behind the end of another. delta: one of its text, which is a null character."""
        closed = self._close()
        self._block += 1
        self._kind = block["type"]
        whole = frame({"type": "content_block_delta", "index": self._block, "delta": delta})
        self._before, self._after = whole.split(dumps("\0"))
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
            frames.append(self._open(TEXT, TEXT_DELTA))
        frames.append(self._close())
        reason, stop = ending(self._entry, finished.reason, is_call=self._has_calls and not self._reader.is_in_call)
        delta: Ending = {"stop_reason": reason, "stop_sequence": stop}
        told = usage(self._entry, finished.generated_tokens)
        frames.append(frame({"type": "message_delta", "delta": delta, "usage": told}))
        return b"".join([*frames, frame({"type": "message_stop"})])
