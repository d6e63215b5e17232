"""Streams of OpenAI's completions: the shapes of their chunks, and what writes them.

There is a chunk for every token of every stream. So of a plain one all but its text is written once for the stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired

import orjson
from orjson import dumps
from typing_extensions import TypedDict

from router.apis.openai.answers import (
    REASONS,
    Answered,
    ChatReason,
    Head,
    Reason,
    ReasoningField,
    ReasoningName,
    StopReason,
    Usage,
    add_reasoning,
    chat_reason,
    error_body,
    stop_reason,
    usage,
)
from router.apis.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    Scoring,
    ShownToken,
    ShownTokens,
    TextLogprobs,
    text_of,
)
from router.apis.openai.requests import ChatRequest
from router.chat.pieces import CallArguments, CallBegun, CountingReader, Piece, Reasoning, Text
from router.http.responses import Frames, frame
from router.requests.generation import OpenRequest
from router.sandbox.workers import Workers
from router.scheduling.request import Event, Failed, Finished, PromptScores, Token

DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n".encode()
NO_STOP: StopReason = {}
# What TGI's own client writes out, and what it reads of a call.
WRITTEN_OUT = frozenset({"repetition_penalty", "logit_bias", "top_logprobs", "n", "tools", "tool_choice"})
CALL = {"id": "", "type": "function"}
FUNCTION = {"name": None, "arguments": ""}


class Counts(TypedDict, total=False):
    """Counts of tokens, where the client wants them; null in all chunks but the last, where they come at the end."""

    usage: Usage | None


class FunctionDelta(TypedDict):
    """What a chunk adds to a call: with the first, its name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The call of this index. What its first chunk says besides, no later one does."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(ReasoningField):
    """What a chunk adds."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(StopReason):
    """A piece of one answer of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None


class ChatChunk(Answered, Counts):
    """One event of a stream of `/v1/chat/completions`. After the last comes `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChunkChoice(StopReason):
    """A piece of one answer of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason | None


class TextChunk(Answered, Counts):
    """One event of a stream of `/v1/completions`. After the last comes `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class UsageWanted(NamedTuple):
    """Which chunks of a stream have counts of tokens: one more at its end, and each, as far as it has come."""

    at_end: bool = False
    in_every_chunk: bool = False


class ChunkFrames(ABC):
    """Turns the events of one stream into OpenAI's chunks. Subclasses know whether it is a chat's or a completion's."""

    kind: ClassVar[str]

    def __init__(self, head: Head, opened: OpenRequest, usage_wanted: UsageWanted) -> None:
        self._fields: Answered = head.fields()
        self._entries = entries = opened.entries
        self._includes_usage, self._is_counting = usage_wanted
        self._begun = [False for _ in entries]
        self._num_left = len(entries)
        # A piece of text of sequence 0, which is nearly every chunk: all but the text, behind what a client has named.
        self._before, self._after = frame(self._chunk(0, "\0", None)).rsplit(dumps("\0"), 1)

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of one sequence."""
        frames = [] if self._begun[index] else self._first(index)
        frames += self._content(index, events)
        last = events[-1]
        if isinstance(last, Failed):
            return b"".join(frames) + frame(error_body(last.error)) + DONE
        if isinstance(last, Finished):
            frames.append(frame(self._last(index, last)))
            self._num_left -= 1
        return b"".join(frames) + (self._end() if not self._num_left else b"")

    def _content(self, index: int, events: Sequence[Event]) -> list[bytes]:
        """What came with them."""
        return [self._text_frame(index, event.text) for event in events if isinstance(event, Token) and event.text]

    @abstractmethod
    def _first(self, index: int) -> list[bytes]:
        """What comes before any token."""

    def _last(self, index: int, finished: Finished) -> ChatChunk | TextChunk:
        """How an answer ended."""
        return self._chunk(index, "", REASONS[finished.reason], stop_reason(finished))

    @abstractmethod
    def _chunk(
        self, index: int, text: str, reason: Reason | None, ending: StopReason = NO_STOP
    ) -> ChatChunk | TextChunk:
        """A piece of one answer."""

    def _wrapped(self, choices: Sequence[Any], counts: Counts) -> Any:
        """A chunk of the kind that the subclass knows, with these choices."""
        return {"object": self.kind, **self._fields, "choices": choices, **counts}

    def _usage(self) -> Usage:
        return usage(self._entries)

    def _text_frame(self, index: int, text: str) -> bytes:
        if index == 0 and not self._is_counting:
            return self._before + dumps(text) + self._after
        return frame(self._chunk(index, text, None))

    def _counts(self) -> Counts:
        """Of a chunk with a piece of an answer."""
        if self._is_counting:
            return {"usage": self._usage()}
        return {"usage": None} if self._includes_usage else {}

    def _end(self) -> bytes:
        return frame(self._wrapped([], {"usage": self._usage()})) + DONE if self._includes_usage else DONE


class TextFrames(ChunkFrames):
    """Of a completion. echoed: what comes before each answer."""

    kind = "text_completion"

    def __init__(self, head: Head, opened: OpenRequest, usage_wanted: UsageWanted, echoed: Sequence[str]) -> None:
        super().__init__(head, opened, usage_wanted)
        self._echoed = echoed

    def _first(self, index: int) -> list[bytes]:
        self._begun[index] = True
        return [self._text_frame(index, self._echoed[index])] if self._echoed[index] else []

    def _chunk(
        self,
        index: int,
        text: str,
        reason: Reason | None,
        ending: StopReason = NO_STOP,
        logprobs: TextLogprobs | None = None,
    ) -> TextChunk:
        choice: TextChunkChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **ending,
        }
        chunk: TextChunk = self._wrapped([choice], self._counts())
        return chunk


class ScoredTextFrames(TextFrames):
    """Of a completion: chunks of whole tokens, each with their log-probabilities."""

    def __init__(
        self, head: Head, opened: OpenRequest, usage_wanted: UsageWanted, scoring: Scoring, workers: Workers
    ) -> None:
        super().__init__(head, opened, usage_wanted, [""] * len(opened.entries))
        self._scoring = scoring
        self._workers = workers
        self._prompt_frames: dict[int, bytes] = {}
        self._shown = [ShownTokens(scoring.tokenizer) for _ in opened.entries]
        self._logprobs = [CompletionLogprobs(scoring) for _ in opened.entries]

    def _content(self, index: int, events: Sequence[Event]) -> list[bytes]:
        echoed = [self._prompt_frames.pop(index)] if index in self._prompt_frames else []
        tokens = self._shown[index].of(events)
        return [*echoed, self._scored_frame(index, tokens)] if tokens else echoed

    async def prepare(self, events: Iterable[tuple[int, Sequence[Event]]]) -> None:
        """Write the prompts whose log-probabilities have come, which takes long, in a thread: streams go on."""
        for index, some in events:
            for event in some:
                if isinstance(event, PromptScores):
                    work = partial(self._prompt_frame, index, event)
                    self._prompt_frames[index] = await self._workers.do(work, self._entries[0].owner)

    def _prompt_frame(self, index: int, scores: PromptScores) -> bytes:
        token_ids = self._entries[index].request.token_ids
        return self._scored_frame(index, self._scoring.prompt(index, token_ids, scores))

    def _scored_frame(self, index: int, tokens: Sequence[ShownToken]) -> bytes:
        return frame(self._chunk(index, text_of(tokens), None, logprobs=self._logprobs[index].of(tokens)))


class ChatFrames(ChunkFrames):
    """Of a chat."""

    kind = "chat.completion.chunk"

    def _first(self, index: int) -> list[bytes]:
        self._begun[index] = True
        return [frame(self._delta_chunk(index, {"role": "assistant", "content": ""}))]

    def _chunk(self, index: int, text: str, reason: Reason | None, ending: StopReason = NO_STOP) -> ChatChunk:
        return self._delta_chunk(index, {"content": text}, reason, ending)

    def _delta_chunk(
        self,
        index: int,
        delta: Delta,
        reason: ChatReason | None = None,
        ending: StopReason = NO_STOP,
        logprobs: ChatLogprobs | None = None,
    ) -> ChatChunk:
        told: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
            **ending,
        }
        chunk: ChatChunk = self._wrapped([told], self._counts())
        return chunk

    def _usage(self) -> Usage:
        return usage(self._entries, 0)


class ScoredChatFrames(ChatFrames):
    """Of a chat: chunks of whole tokens, each with their log-probabilities."""

    def __init__(self, head: Head, opened: OpenRequest, usage_wanted: UsageWanted, scoring: Scoring) -> None:
        super().__init__(head, opened, usage_wanted)
        self._scoring = scoring
        self._shown = [ShownTokens(scoring.tokenizer) for _ in opened.entries]

    def _content(self, index: int, events: Sequence[Event]) -> list[bytes]:
        tokens = self._shown[index].of(events)
        if not tokens:
            return []
        logprobs = self._scoring.of_chat(tokens)
        return [frame(self._delta_chunk(index, {"content": text_of(tokens)}, logprobs=logprobs))]


class ReadChatFrames(ChatFrames):
    """Of a chat whose readers take its answers apart: into text, reasoning and calls of tools.

    Its log-probabilities are those of all that the model wrote, marks and reasoning and calls: together they are its
    text as it was before it was taken apart.
    """

    def __init__(
        self,
        head: Head,
        opened: OpenRequest,
        usage_wanted: UsageWanted,
        readers: Sequence[CountingReader],
        reasoning: ReasoningName | None,
        scoring: Scoring | None,
    ) -> None:
        self._readers = readers  # which count tokens too
        super().__init__(head, opened, usage_wanted)
        self._reasoning = reasoning
        self._scoring = scoring
        self._shown = [] if scoring is None else [ShownTokens(scoring.tokenizer) for _ in readers]
        self._has_calls = [False for _ in readers]

    def _content(self, index: int, events: Sequence[Event]) -> list[bytes]:
        reader = self._readers[index]
        pieces = [piece for event in events if isinstance(event, Token) for piece in reader.feed(event.text)]
        if isinstance(events[-1], Finished):
            pieces += reader.end()
        pieces = joined(pieces)
        if self._scoring is None:
            return [self._piece_frame(index, piece) for piece in pieces]
        tokens = self._shown[index].of(events)
        return self._scored_frames(index, pieces, self._scoring.of_chat(tokens) if tokens else None)

    def _scored_frames(self, index: int, pieces: Sequence[Piece], scores: ChatLogprobs | None) -> list[bytes]:
        """The same with log-probabilities in the first, which may have nothing else."""
        nothing: Delta = {}
        deltas = [told for piece in pieces if (told := self._delta(index, piece))] or ([nothing] if scores else [])
        chunks = [self._delta_chunk(index, told, logprobs=None if at else scores) for at, told in enumerate(deltas)]
        return [frame(chunk) for chunk in chunks]

    def _piece_frame(self, index: int, piece: Piece) -> bytes:
        if isinstance(piece, Text) and self._reasoning is None:
            return self._text_frame(index, piece.text)
        told = self._delta(index, piece)
        return frame(self._delta_chunk(index, told)) if told else b""

    def _delta(self, index: int, piece: Piece) -> Delta:
        self._has_calls[index] |= isinstance(piece, CallBegun)
        return delta_of(piece, self._reasoning)

    def _last(self, index: int, finished: Finished) -> ChatChunk:
        reason = chat_reason(finished.reason, self._readers[index], has_calls=self._has_calls[index])
        return self._delta_chunk(index, {}, reason, stop_reason(finished))

    def _usage(self) -> Usage:
        return usage(self._entries, sum(reader.num_reasoning for reader in self._readers))


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with what follows itself in one: several tokens may come at once."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Text | Reasoning) and found and type(found[-1]) is type(piece):
            found[-1] = type(piece)(found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def delta_of(piece: Piece, reasoning: ReasoningName | None) -> Delta:
    """What a chunk says of a piece; nothing of reasoning that is not shown."""
    if isinstance(piece, CallBegun):
        function: FunctionDelta = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    is_text = isinstance(piece, Text)
    told: Delta = {"content": piece.text} if is_text else {}
    add_reasoning(told, reasoning, "" if is_text else piece.text)
    return told


class TgiClientFrames:
    """What other frames write, as TGI's own Python client reads it, `text-generation` 0.7.0.

    It was written for chunks that no server sends any more: every one must name a role and have a `tool_calls`, which
    is one call and not a list, and it takes `[DONE]` for JSON that is broken. So it gets what it reads.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of one sequence."""
        written = self._frames.write(index, list(events)).removesuffix(DONE)
        return b"".join(map(_as_of_tgi, written.split(b"\n\n")))


def is_of_tgi_client(body: ChatRequest) -> bool:
    """No other client writes out every field of a request that is not set, for a model that is called tgi."""
    return body.model == "tgi" and body.model_fields_set >= WRITTEN_OUT


def _as_of_tgi(written: bytes) -> bytes:
    if not written:
        return b""
    chunk: dict[str, Any] = orjson.loads(written.removeprefix(b"data: "))
    for choice in chunk.get("choices", ()):
        calls = choice["delta"].get("tool_calls")
        choice["delta"] |= {"role": "assistant", "tool_calls": _one_call(calls[0]) if calls else None}
    return frame(chunk)


def _one_call(call: dict[str, Any]) -> dict[str, Any]:
    return {**CALL, **call, "function": {**FUNCTION, **call["function"]}}
