"""OpenAI's shapes of chats whose answers have reasoning and calls of tools: whole, and in chunks.

Their log-probabilities are those of all that the model wrote, marks and reasoning and calls: together they are its
text as it was before it was taken apart.

Left out: chats that are text alone (`answers.py`), which cost less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.chat.parts import CountingReader
from router.chat.pieces import AnswerReader, CallBegun, Content, Piece, Reasoning, Text, whole
from router.entry import Entry, Event, Failed, Finished, Token
from router.generation import OpenRequest
from router.openai.answers import DONE, REASONS, ChunkFrames, Head, Json, UsageWanted, error_body, stop_reason, usage
from router.openai.scored import ChatScores, Scoring
from router.samples import Answer
from router.text import FinishReason
from router.tgi import frame

NOTHING: Json = {}


@dataclass(frozen=True, slots=True)
class Shown:
    """How reasoning is shown: under this name, null where there is none; None: not at all.

    is_given: whether the client wants it; the model's may be left out of an answer.
    """

    name: str | None
    is_given: bool = True

    def told(self, text: str) -> Json:
        """The field for it."""
        return {} if self.name is None or not self.is_given else {self.name: text or None}


def chat_completion(
    head: Head, answers: Sequence[Answer], entries: Sequence[Entry], readers: Sequence[CountingReader], shown: Shown
) -> Json:
    """The whole answer of `/v1/chat/completions`."""
    each = enumerate(zip(answers, readers, strict=True))
    choices = [_choice(index, answer, reader, shown) for index, (answer, reader) in each]
    counts = usage(entries, sum(reader.num_reasoning for reader in readers))
    return head.fields("chat.completion") | {"choices": choices, "usage": counts}


def _choice(index: int, answer: Answer, reader: CountingReader, shown: Shown) -> Json:
    pieces = [piece for token in answer.tokens for piece in reader.feed(token.text)]
    content, finished = whole([*pieces, *reader.end()]), answer.finished
    reason = finish_reason(finished.reason, reader, has_calls=bool(content.calls))
    ending = {"finish_reason": reason, **stop_reason(finished)}
    return {"index": index, "message": _message(content, shown), "logprobs": None, **ending}


def _message(content: Content, shown: Shown) -> Json:
    """Without text beside its calls, its content is null; calls are left out where there are none."""
    told: Json = {"role": "assistant", "content": content.text or (None if content.calls else "")}
    told |= shown.told(content.reasoning)
    if content.calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in content.calls
        ]
    return told


def finish_reason(reason: FinishReason, reader: AnswerReader, *, has_calls: bool) -> str:
    """In OpenAI's words: `tool_calls` only where all calls are complete and nothing was cut."""
    calls = has_calls and not reader.is_in_call and reason is not FinishReason.LENGTH
    return "tool_calls" if calls else REASONS[reason]


class ReadChunkFrames(ChunkFrames):
    """Turns the events of one stream into OpenAI's chunks, as the readers of its answers take them apart."""

    def __init__(
        self,
        head: Head,
        opened: OpenRequest,
        readers: Sequence[CountingReader],
        scoring: Scoring | None,
        shown: Shown,
        *,
        includes_usage: UsageWanted,
    ) -> None:
        super().__init__(head, opened, includes_usage=includes_usage, echoed=None)
        self._readers = readers
        self._shown = shown
        self._scores = [None if scoring is None else ChatScores(scoring) for _ in readers]
        self._has_calls = [False for _ in readers]

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of one sequence."""
        frames = [] if self._begun[index] else self._first(index)
        reader, last = self._readers[index], events[-1]
        pieces = [piece for event in events if isinstance(event, Token) for piece in reader.feed(event.text)]
        if isinstance(last, Finished):
            pieces += reader.end()
        pieces = joined(pieces)
        scores = self._scores[index]
        if scores is None:
            frames += [self._piece_frame(index, piece) for piece in pieces]
        else:
            frames += self._scored_frames(index, pieces, scores.of(events))
        if isinstance(last, Failed):
            return b"".join(frames) + frame(error_body(last.error)) + DONE
        if isinstance(last, Finished):
            reason = finish_reason(last.reason, reader, has_calls=self._has_calls[index])
            frames.append(self._delta_frame(index, {}, reason, ending=stop_reason(last)))
            self._num_left -= 1
        return b"".join(frames) + (self._end() if not self._num_left else b"")

    def _scored_frames(self, index: int, pieces: Sequence[Piece], scores: Json | None) -> list[bytes]:
        """The same with log-probabilities in the first, which may have nothing else."""
        deltas = [told for piece in pieces if (told := self._delta(index, piece))] or ([{}] if scores else [])
        return [self._delta_frame(index, told, None, None if at else scores) for at, told in enumerate(deltas)]

    def _piece_frame(self, index: int, piece: Piece) -> bytes:
        if isinstance(piece, Text) and self._shown.name is None:
            return self._text_frame(index, piece.text)
        told = self._delta(index, piece)
        return self._delta_frame(index, told) if told else b""

    def _delta(self, index: int, piece: Piece) -> Json:
        self._has_calls[index] |= isinstance(piece, CallBegun)
        return delta(piece, self._shown)

    def _usage(self) -> Json:
        return usage(self._entries, sum(reader.num_reasoning for reader in self._readers))

    def _delta_frame(
        self,
        index: int,
        told: Json,
        reason: str | None = None,
        scores: Json | None = None,
        ending: Json = NOTHING,
    ) -> bytes:
        choice = {"index": index, "delta": told, "logprobs": scores, "finish_reason": reason, **ending}
        return frame(self._with([choice]))


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with what follows itself in one: several tokens may come at once."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Text | Reasoning) and found and type(found[-1]) is type(piece):
            found[-1] = type(piece)(found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def delta(piece: Piece, shown: Shown) -> Json:
    """What a chunk says of a piece; nothing of reasoning that is not shown."""
    if isinstance(piece, Text):
        return {"content": piece.text, **shown.told("")}
    if isinstance(piece, Reasoning):
        return shown.told(piece.text)
    if isinstance(piece, CallBegun):
        function = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
