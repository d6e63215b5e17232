"""The events of OpenAI's streamed responses, numbered from 0. Deltas of text are written by hand.

With log-probabilities, which texts alone have, a delta has whole tokens.

Left out: the shapes of responses and their items (`answers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orjson import dumps

from router.chat.parts import CountingReader, Kind, Part
from router.chat.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from router.entry import Event, Failed, Finished, Token
from router.errors import RouterError
from router.generation import OpenRequest
from router.openai.logprobs import ShownToken, ShownTokens
from router.openai.responses import answers
from router.openai.responses.answers import Head
from router.openai.scored import Scoring, text_of

Json = dict[str, Any]
# What the text of each kind of part is called in events.
NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class ResponseFrames:
    """Turns the events of one stream into OpenAI's."""

    def __init__(self, head: Head, reader: CountingReader, opened: OpenRequest, scoring: Scoring | None = None) -> None:
        self._head = head
        self._reader = reader
        self._is_plain = reader.is_plain
        self._entry = opened.entries[0]
        self._sequence = 0  # number of the next event
        self._output: list[Json] = []  # items that are complete
        self._item: _Item | None = None  # the one that is being written
        self._scoring = scoring
        self._shown = None if scoring is None else ShownTokens(scoring.tokenizer)

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of the one sequence."""
        frames = [] if self._sequence else self._start()
        for event in events:
            if not isinstance(event, Token):
                continue
            if self._shown is not None:
                self._tell(self._shown.push(event), frames)
            elif not self._is_plain:
                for piece in self._reader.feed(event.text):
                    self._add(piece, frames)
            elif event.text:  # so most are
                self._show("text", event.text, frames)
        last = events[-1]
        if isinstance(last, Finished):
            self._end(last, frames)
        elif isinstance(last, Failed):
            self._fail(last.error, frames)
        return b"".join(frames)

    def _start(self) -> list[bytes]:
        begun = self._head.response("in_progress", [], None)
        return [self._frame("response.created", response=begun), self._frame("response.in_progress", response=begun)]

    def _frame(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, **fields, "sequence_number": self._sequence}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps(event))

    def _add(self, piece: Piece, frames: list[bytes]) -> None:
        match piece:
            case Text(text):
                self._show("text", text, frames)
            case Reasoning(text):
                self._show("reasoning", text, frames)
            case CallBegun(_, call_id, name):
                self._begin(Part("call", [], call_id, name), frames)
            case CallArguments(_, text):
                self._show("call", text, frames)

    def _show(self, kind: Kind, text: str, frames: list[bytes]) -> None:
        if self._item is None or self._item.part.kind != kind:
            self._begin(Part(kind), frames)
        assert self._item is not None
        self._item.part.texts.append(text)
        frames.append(self._item.before % dumps(text) + self._item.after % self._sequence)
        self._sequence += 1

    def _tell(self, tokens: Sequence[ShownToken], frames: list[bytes]) -> None:
        """More of a text, with its log-probabilities."""
        if not tokens:
            return
        if self._item is None:
            self._begin(Part("text"), frames)
        assert self._item is not None and self._scoring is not None
        text, logprobs = text_of(tokens), self._scoring.entries(tokens)
        self._item.part.texts.append(text)
        self._item.logprobs += logprobs
        kind = f"response.{self._item.name}.delta"
        frames.append(self._frame(kind, **self._item.place, delta=text, logprobs=logprobs))

    def _begin(self, part: Part, frames: list[bytes]) -> None:
        self._complete("completed", frames)
        index = len(self._output)
        item = self._item = _Item(part, self._head.item_id(part.kind, index), index)
        told = answers.item_of(part, item.id, "in_progress")
        frames.append(self._frame("response.output_item.added", output_index=index, item=told))
        if part.kind != "call":
            frames.append(self._frame("response.content_part.added", **item.place, part=item.shown("")))

    def _complete(self, status: str, frames: list[bytes]) -> None:
        """End the item that is being written, if one is."""
        if (item := self._item) is None:
            return
        self._item, text = None, item.part.text
        frames.append(self._frame(f"response.{item.name}.done", **item.place, **item.ended(text)))
        if item.part.kind != "call":
            frames.append(self._frame("response.content_part.done", **item.place, part=item.shown(text)))
        told = answers.item_of(item.part, item.id, status, item.logprobs)
        frames.append(self._frame("response.output_item.done", output_index=len(self._output), item=told))
        self._output.append(told)

    def _end(self, finished: Finished, frames: list[bytes]) -> None:
        if self._shown is not None:
            self._tell(self._shown.end(), frames)
        for piece in self._reader.end():
            self._add(piece, frames)
        if self._item is None and not self._output:
            self._begin(Part("text"), frames)  # clients read the text of the first message: there is always one
        status, details = answers.ending(finished.reason)
        self._complete("incomplete" if self._reader.is_in_call else status, frames)
        usage = answers.usage(self._entry, finished.generated_tokens, self._reader.num_reasoning)
        whole = self._head.response(status, self._output, usage, **details)
        frames.append(self._frame(f"response.{status}", response=whole))

    def _fail(self, error: RouterError, frames: list[bytes]) -> None:
        body = answers.error_body(error)
        told = {"code": body["error"]["code"] or "server_error", "message": body["error"]["message"]}
        frames.append(self._frame("error", **told, param=None, error_type=body["error_type"]))
        failed = self._head.response("failed", self._output, None, error=told)
        frames.append(self._frame("response.failed", response=failed))


class _Item:
    """An item that is being written."""

    def __init__(self, part: Part, id: str, index: int) -> None:
        self.part = part
        self.id = id
        self.name = NAMES[part.kind]
        self.logprobs: list[Json] = []
        self.place: Json = {"item_id": id, "output_index": index}
        if part.kind != "call":
            self.place["content_index"] = 0
        # Of a delta, all but its text and its number. An id has neither a percent sign nor what JSON escapes.
        event = f"response.{self.name}.delta"
        place = dumps({"type": event, **self.place})[:-1]
        self.before = b'event: %b\ndata: %b,"delta":%%b' % (event.encode(), place)
        self.after = (b',"logprobs":[]' if part.kind == "text" else b"") + b',"sequence_number":%d}\n\n'

    def shown(self, text: str) -> Json:
        """The one part of its content."""
        return answers.text_part(text, self.logprobs) if self.part.kind == "text" else answers.reasoning_part(text)

    def ended(self, text: str) -> Json:
        """What the event behind its last delta says."""
        if self.part.kind == "call":
            return {"name": self.part.name, "arguments": text}
        return {"text": text, "logprobs": self.logprobs} if self.part.kind == "text" else {"text": text}
