"""OpenAI's shapes of chats whose answers have reasoning and calls of tools: whole, and in chunks.

Their log-probabilities are those of all that the model wrote, marks and reasoning and calls: together they are its
text as it was before it was taken apart.

Left out: chats that are text alone (`answers.py`), which cost less.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.chat.pieces import AnswerReader, CallBegun, Content, Piece, Reasoning, Text, whole
from router.entry import Entry, Event, Failed, Finished, Token
from router.generation import OpenRequest
from router.openai.answers import DONE, REASONS, ChunkFrames, Head, Json, error_body, usage
from router.openai.scored import ChatScores, Scoring
from router.samples import Answer
from router.text import FinishReason
from router.tgi import frame


def chat_completion(
    head: Head, answers: Sequence[Answer], entries: Sequence[Entry], readers: Sequence[AnswerReader]
) -> Json:
    """The whole answer of `/v1/chat/completions`."""
    choices = [
        _choice(index, answer.finished, reader)
        for index, (answer, reader) in enumerate(zip(answers, readers, strict=True))
    ]
    return head.fields("chat.completion") | {"choices": choices, "usage": usage(entries)}


def _choice(index: int, finished: Finished, reader: AnswerReader) -> Json:
    content = whole([*reader.feed(finished.generated_text), *reader.end()])
    reason = finish_reason(finished.reason, reader, has_calls=bool(content.calls))
    return {"index": index, "message": _message(content), "logprobs": None, "finish_reason": reason}


def _message(content: Content) -> Json:
    """Without text beside its calls, its content is null; what there is none of is left out."""
    told: Json = {"role": "assistant", "content": content.text or (None if content.calls else "")}
    if content.reasoning:
        told["reasoning_content"] = content.reasoning
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
        readers: Sequence[AnswerReader],
        scoring: Scoring | None,
        *,
        includes_usage: bool,
    ) -> None:
        super().__init__(head, opened, includes_usage=includes_usage, echoed=None)
        self._readers = readers
        self._scores = [None if scoring is None else ChatScores(scoring) for _ in readers]
        self._has_calls = [False for _ in readers]

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of one sequence."""
        frames = [] if self._begun[index] else self._first(index)
        reader, last = self._readers[index], events[-1]
        pieces = reader.feed("".join([event.text for event in events if isinstance(event, Token)]))
        if isinstance(last, Finished):
            pieces += reader.end()
        scores = self._scores[index]
        if scores is None:
            frames += [self._piece_frame(index, piece) for piece in pieces]
        else:
            frames += self._scored_frames(index, pieces, scores.of(events))
        if isinstance(last, Failed):
            return b"".join(frames) + frame(error_body(last.error)) + DONE
        if isinstance(last, Finished):
            reason = finish_reason(last.reason, reader, has_calls=self._has_calls[index])
            frames.append(self._delta_frame(index, {}, reason))
            self._num_left -= 1
        return b"".join(frames) + (self._end() if not self._num_left else b"")

    def _scored_frames(self, index: int, pieces: Sequence[Piece], scores: Json | None) -> list[bytes]:
        """The same with log-probabilities in the first, which may have nothing else."""
        deltas = [self._delta(index, piece) for piece in pieces] or ([{}] if scores else [])
        return [self._delta_frame(index, told, None, None if at else scores) for at, told in enumerate(deltas)]

    def _piece_frame(self, index: int, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._text_frame(index, piece.text)
        return self._delta_frame(index, self._delta(index, piece))

    def _delta(self, index: int, piece: Piece) -> Json:
        self._has_calls[index] |= isinstance(piece, CallBegun)
        return delta(piece)

    def _delta_frame(self, index: int, told: Json, reason: str | None = None, scores: Json | None = None) -> bytes:
        choice = {"index": index, "delta": told, "logprobs": scores, "finish_reason": reason}
        return frame({**self._fields, "choices": [choice], **self._tail})


def delta(piece: Piece) -> Json:
    """What a chunk says of a piece."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, CallBegun):
        function = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
