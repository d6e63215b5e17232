"""The events of OpenAI's streamed responses, numbered from 0: their shapes, and what writes them.

Of a delta all but its text and its number is written once for the item. With log-probabilities, which texts alone
have, a delta has whole tokens.

Left out: the shapes of responses and their items (`answers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from orjson import dumps
from typing_extensions import TypedDict

from router.apis.openai.logprobs import Scoring, ShownToken, ShownTokenLogprob, ShownTokens, text_of
from router.apis.openai.responses import answers
from router.apis.openai.responses.answers import Head, Item, OutputText, ReasoningText, ResponseAnswer, Status
from router.apis.openai.responses.tools import input_of
from router.chat.pieces import (
    AnswerReader,
    CallArguments,
    CallBegun,
    CountingReader,
    Kind,
    Part,
    Piece,
    Reasoning,
    Text,
)
from router.errors import RouterError
from router.http.responses import named_frame
from router.requests.generation import OpenRequest
from router.scheduling.request import Event, Failed, Finished, Token

ResponseType = Literal[
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
]  # fmt: skip


class Numbered(TypedDict):
    """What all events of a stream have."""

    sequence_number: int


class ResponseChanged(Numbered):
    """The response begins, or ends."""

    type: ResponseType
    response: ResponseAnswer


class ItemChanged(Numbered):
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class OfItem(TypedDict):
    """What concerns one item."""

    item_id: str
    output_index: int


class OfPart(OfItem):
    """What concerns the one part of a text or of reasoning."""

    content_index: int


class PartChanged(Numbered, OfPart):
    """The part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDelta(Numbered, OfPart):
    """More of a text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ShownTokenLogprob]


class ReasoningDelta(Numbered, OfPart):
    """More of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ArgumentsDelta(Numbered, OfItem):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class InputDelta(Numbered, OfItem):
    """The input of a call of a custom tool, at once."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class TextDone(Numbered, OfPart):
    """All of a text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ShownTokenLogprob]


class ReasoningDone(Numbered, OfPart):
    """All of reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDone(Numbered, OfItem):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDone(Numbered, OfItem):
    """All of a custom tool's input."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class FailureTold(Numbered):
    """Why the response fails, which the last event says too."""

    type: Literal["error"]
    code: str
    message: str
    param: None
    error_type: str


Delta = TextDelta | ReasoningDelta | ArgumentsDelta | InputDelta
Done = TextDone | ReasoningDone | ArgumentsDone | InputDone
# One event of a stream of `/v1/responses`.
ResponseEvent = ResponseChanged | ItemChanged | PartChanged | Delta | Done | FailureTold


class ResponseFrames:
    """Turns the events of one stream into OpenAI's."""

    def __init__(self, head: Head, scoring: Scoring | None, opened: OpenRequest, reader: AnswerReader) -> None:
        self._head = head
        self._reader = CountingReader(reader)
        self._is_plain = self._reader.is_plain
        self._entry = opened.entries[0]
        self._sequence = 0  # number of the next event
        self._output: list[Item] = []  # items that are complete
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
        begun = self._head.response("in_progress", [])
        return [self._changed("response.created", begun), self._changed("response.in_progress", begun)]

    def _changed(self, kind: ResponseType, response: ResponseAnswer) -> bytes:
        return self._frame({"type": kind, "response": response, "sequence_number": self._sequence})

    def _frame(self, event: ResponseEvent) -> bytes:
        self._sequence += 1
        return named_frame(event)

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
        if not self._item.is_custom:  # its JSON is no part of its input
            self._show_delta(text, frames)

    def _show_delta(self, text: str, frames: list[bytes]) -> None:
        assert self._item is not None
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
        frames.append(self._frame(self._item.text_delta(text, logprobs, self._sequence)))

    def _begin(self, part: Part, frames: list[bytes]) -> None:
        self._complete("completed", frames)
        item = self._item = _Item(part, self._head, len(self._output))
        frames.append(self._item_changed("response.output_item.added", item.told("in_progress")))
        self._show_part("response.content_part.added", item.shown(""), frames)

    def _complete(self, status: Status, frames: list[bytes]) -> None:
        """End the item that is being written, if one is."""
        if (item := self._item) is None:
            return
        text = item.part.text
        if item.is_custom:
            text = input_of(text)
            self._show_delta(text, frames)
        frames.append(self._frame(item.done(text, self._sequence)))
        self._show_part("response.content_part.done", item.shown(text), frames)
        self._item, told = None, item.told(status)
        frames.append(self._item_changed("response.output_item.done", told))
        self._output.append(told)

    def _item_changed(
        self, kind: Literal["response.output_item.added", "response.output_item.done"], told: Item
    ) -> bytes:
        at = len(self._output)
        return self._frame({"type": kind, "output_index": at, "item": told, "sequence_number": self._sequence})

    def _show_part(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        part: OutputText | ReasoningText | None,
        frames: list[bytes],
    ) -> None:
        """A call has none."""
        if part is not None and self._item is not None:
            place = self._item.part_place
            frames.append(self._frame({"type": kind, **place, "part": part, "sequence_number": self._sequence}))

    def _end(self, finished: Finished, frames: list[bytes]) -> None:
        if self._shown is not None:
            self._tell(self._shown.end(), frames)
        for piece in self._reader.end():
            self._add(piece, frames)
        if self._item is None and not self._output:
            self._begin(Part("text"), frames)  # clients read the text of the first message: there is always one
        status = answers.status_of(finished.reason)
        self._complete("incomplete" if self._reader.is_in_call else status, frames)
        usage = answers.usage(self._entry, finished.generated_tokens, self._reader.num_reasoning)
        kind: ResponseType = "response.completed" if status == "completed" else "response.incomplete"
        frames.append(self._changed(kind, self._head.response(status, self._output, usage)))

    def _fail(self, error: RouterError, frames: list[bytes]) -> None:
        body = answers.error_body(error)
        told: answers.ResponseFailure = {
            "code": body["error"]["code"] or "server_error",
            "message": body["error"]["message"],
        }
        last: FailureTold = {
            "type": "error",
            **told,
            "param": None,
            "error_type": body["error_type"],
            "sequence_number": self._sequence,
        }
        frames.append(self._frame(last))
        frames.append(self._changed("response.failed", self._head.response("failed", self._output, error=told)))


class _Item:
    """An item that is being written."""

    def __init__(self, part: Part, head: Head, index: int) -> None:
        self.part = part
        self.id = id = head.item_id(part, index)
        self.is_custom = head.is_custom(part)
        self._head = head
        self.logprobs: list[ShownTokenLogprob] = []
        self.place: OfItem = {"item_id": id, "output_index": index}
        self.part_place: OfPart = {**self.place, "content_index": 0}
        # Of a delta, all but its text and its number. An id has neither a percent sign nor what JSON escapes.
        delta = self._delta()
        before, after = dumps(delta).split(dumps("\0"))
        self.before = b"event: %b\ndata: %b%%b" % (delta["type"].encode(), before)
        self.after = after.removesuffix(b"0}") + b"%d}\n\n"

    def _delta(self) -> Delta:
        match self.part.kind:
            case "text":
                return self.text_delta("\0", [], 0)
            case "reasoning":
                kind: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
                return {"type": kind, **self.part_place, "delta": "\0", "sequence_number": 0}
            case "call" if self.is_custom:
                return {
                    "type": "response.custom_tool_call_input.delta",
                    **self.place,
                    "delta": "\0",
                    "sequence_number": 0,
                }
            case "call":
                name: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
                return {"type": name, **self.place, "delta": "\0", "sequence_number": 0}

    def text_delta(self, text: str, logprobs: list[ShownTokenLogprob], number: int) -> TextDelta:
        """More of a text."""
        return {
            "type": "response.output_text.delta",
            **self.part_place,
            "delta": text,
            "logprobs": logprobs,
            "sequence_number": number,
        }

    def shown(self, text: str) -> OutputText | ReasoningText | None:
        """The one part of its content; a call has none."""
        match self.part.kind:
            case "text":
                return answers.text_part(text, self.logprobs)
            case "reasoning":
                return answers.reasoning_part(text)
            case "call":
                return None

    def told(self, status: Status) -> Item:
        """All of it."""
        return self._head.item(self.part, self.id, status, self.logprobs)

    def done(self, text: str, number: int) -> Done:
        """What the event behind its last delta says."""
        match self.part.kind:
            case "text":
                return {
                    "type": "response.output_text.done",
                    **self.part_place,
                    "text": text,
                    "logprobs": self.logprobs,
                    "sequence_number": number,
                }
            case "reasoning":
                return {
                    "type": "response.reasoning_text.done",
                    **self.part_place,
                    "text": text,
                    "sequence_number": number,
                }
            case "call" if self.is_custom:
                return {
                    "type": "response.custom_tool_call_input.done",
                    **self.place,
                    "input": text,
                    "sequence_number": number,
                }
            case "call":
                return {
                    "type": "response.function_call_arguments.done",
                    **self.place,
                    "name": self._head.name_of(self.part),
                    "arguments": text,
                    "sequence_number": number,
                }
