"""Answers of OpenAI's completions that tell the log-probabilities of their tokens, whole and as streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from router.entry import Event, Finished, PromptScores, Token
from router.generation import OpenRequest
from router.openai.answers import ChunkFrames, Head, UsageWanted
from router.openai.logprobs import (
    CompletionLogprobs,
    Json,
    ShownToken,
    ShownTokens,
    chat_logprobs,
    entries,
    prompt_tokens,
    shown_tokens,
)
from router.samples import Answer
from router.text import ModelTokenizer
from router.tgi import frame
from router.workers import Workers

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Scoring:
    """What an answer tells of its tokens."""

    count: int  # candidates of each token
    tokenizer: ModelTokenizer
    prompts: Sequence[Prompt] = ()  # what is echoed before each answer, with log-probabilities; none of a chat

    def entries(self, tokens: Iterable[ShownToken]) -> list[Json]:
        """What is told of each of these, in chats and responses."""
        return entries(tokens, self.count, self.tokenizer)


def add_to_chat(body: Json, answers: Sequence[Answer], scoring: Scoring) -> Json:
    """The same answer of `/v1/chat/completions` with the log-probabilities of its choices."""
    for choice, answer in zip(body["choices"], answers, strict=True):
        tokens = shown_tokens(answer, scoring.tokenizer)
        choice["logprobs"] = chat_logprobs(tokens, scoring.count, scoring.tokenizer)
    return body


def add_to_completion(
    body: Json, answers: Sequence[Answer], token_ids: Sequence[Sequence[int]], scoring: Scoring
) -> Json:
    """The same answer of `/v1/completions`. token_ids: of each answer's prompt."""
    for number, (choice, answer) in enumerate(zip(body["choices"], answers, strict=True)):
        tokens = shown_tokens(answer, scoring.tokenizer)
        if scoring.prompts:
            scores = answer.prompt_scores or PromptScores()
            tokens = prompt_tokens(scoring.prompts[number], token_ids[number], scores, scoring.tokenizer) + tokens
            choice["text"] = text_of(tokens)
        choice["logprobs"] = CompletionLogprobs(scoring.count, scoring.tokenizer).of(tokens)
    return body


def text_of(tokens: Iterable[ShownToken]) -> str:
    """What they are the tokens of."""
    return "".join(token.text for token in tokens)


class ChatScores:
    """The log-probabilities of one answer of a chat, as its tokens come."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._shown = ShownTokens(scoring.tokenizer)

    def of(self, events: Sequence[Event]) -> Json | None:
        """Those of the tokens that are shown with these events; None where there are none."""
        tokens = [one for event in events if isinstance(event, Token) for one in self._shown.push(event)]
        if isinstance(events[-1], Finished):
            tokens += self._shown.end()
        return chat_logprobs(tokens, self._scoring.count, self._scoring.tokenizer) if tokens else None


@dataclass
class _Choice:
    """How far one answer of a stream has come."""

    shown: ShownTokens
    shape: Callable[[Iterable[ShownToken]], Json]
    token_ids: Sequence[int]


class ScoredFrames(ChunkFrames):
    """Turns the events of one stream into chunks of whole tokens, each chunk with the log-probabilities of its own."""

    def __init__(
        self,
        head: Head,
        opened: OpenRequest,
        scoring: Scoring,
        workers: Workers,
        *,
        includes_usage: UsageWanted,
        is_chat: bool,
    ) -> None:
        echoed = None if is_chat else [""] * len(opened.entries)
        super().__init__(head, opened, includes_usage=includes_usage, echoed=echoed)
        self._scoring = scoring
        self._workers = workers
        self._owner = opened.entries[0].owner
        self._prompt_frames: dict[int, bytes] = {}
        self._choices = [
            _Choice(ShownTokens(scoring.tokenizer), self._shape(is_chat), entry.request.token_ids)
            for entry in opened.entries
        ]

    def _shape(self, is_chat: bool) -> Callable[[Iterable[ShownToken]], Json]:
        count, tokenizer = self._scoring.count, self._scoring.tokenizer
        if is_chat:
            return lambda tokens: chat_logprobs(tokens, count, tokenizer)
        return CompletionLogprobs(count, tokenizer).of

    def _content(self, index: int, events: Sequence[Event]) -> list[bytes]:
        choice, tokens = self._choices[index], []
        echoed = [self._prompt_frames.pop(index)] if index in self._prompt_frames else []
        for event in events:
            if isinstance(event, Token):
                tokens += choice.shown.push(event)
            elif isinstance(event, Finished):
                tokens += choice.shown.end()
        return [*echoed, self._scored_frame(index, tokens)] if tokens else echoed

    async def prepare(self, events: Iterable[tuple[int, Sequence[Event]]]) -> None:
        """Write the prompts whose log-probabilities have come, which takes long, in a thread: streams go on."""
        for index, some in events:
            for event in some:
                if isinstance(event, PromptScores):
                    work = partial(self._prompt_frame, index, event)
                    self._prompt_frames[index] = await self._workers.do(work, self._owner)

    def _prompt_frame(self, index: int, scores: PromptScores) -> bytes:
        scoring, token_ids = self._scoring, self._choices[index].token_ids
        return self._scored_frame(index, prompt_tokens(scoring.prompts[index], token_ids, scores, scoring.tokenizer))

    def _scored_frame(self, index: int, tokens: Sequence[ShownToken]) -> bytes:
        chunk = self._chunk(index, text_of(tokens), None)
        chunk["choices"][0]["logprobs"] = self._choices[index].shape(tokens)
        return frame(chunk)
