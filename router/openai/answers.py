"""The shapes of OpenAI's completions: whole answers, and chunks of streams.

Pure functions from answers and events to bytes and dicts. Chunks are written by hand, because there is one for every
token of every stream.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orjson import dumps

from router.entry import Entry, Event, Failed, Finished, Token
from router.errors import RouterError, TooLong
from router.generation import OpenRequest
from router.samples import Answer, one_per_prompt
from router.text import FinishReason
from router.tgi import frame
from router.version import version

DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n".encode()
FINGERPRINT = f"lockstep-{version()}"
REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
# TGI's names in sentences about what is wrong, and what the parameters are called here.
NAMES = {
    "`inputs` tokens": "prompt tokens",
    "`max_new_tokens`": "`max_tokens`",
    "`inputs`": "the prompt",
    "`top_n_tokens`": "`top_logprobs`",
    "`decoder_input_details`": "`echo` with `logprobs`",
}
NOT_HERE = re.compile(r", or set `truncate`( to \d+)?")  # a remedy that `/v1` does not have
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
Json = dict[str, Any]


class UsageWanted(NamedTuple):
    """Which chunks of a stream have counts of tokens: one more at its end, and each, as far as it has come."""

    at_end: bool = False
    in_every_chunk: bool = False


def now() -> int:
    """Seconds since 1970, as `created` has them."""
    return int(time.time())


@dataclass(frozen=True)
class Head:
    """What every piece of one answer says: whose it is, and when it was made."""

    id: str
    model: str
    created: int = field(default_factory=now)

    def fields(self, object: str) -> Json:
        """The fields before `choices`."""
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def renamed(sentence: str) -> str:
    """A sentence about parameters by the names that they have here."""
    for native, ours in NAMES.items():
        sentence = sentence.replace(native, ours)
    return NOT_HERE.sub("", sentence)


def context_sentence(error: TooLong) -> str:
    """OpenAI's words, by which clients know that a shorter prompt would do."""
    known = f"This model's maximum context length is {error.most} tokens"
    if error.num_new is not None:
        total = (error.num_prompt or 0) + error.num_new
        parts = f"{error.num_prompt} in the prompt, {error.num_new} in the completion"
        return f"{known}. However, you requested {total} tokens ({parts})."
    has = "more" if error.num_prompt is None else f"{error.num_prompt} tokens"
    return f"{known}, of which a prompt may have {error.most_prompt}. However, your prompt has {has}."


def usage(entries: Sequence[Entry], num_reasoning: int | None = None) -> Json:
    """Counts of tokens; the prompt of several answers counts once for each. num_reasoning: of a chat's answers."""
    prompts = one_per_prompt(entries)
    prompt = sum(entry.request.input_length for entry in prompts)
    generated = sum(entry.generated.num_tokens for entry in entries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(entry.num_cached for entry in prompts)},
        **({} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}),
    }


def chat_completion(head: Head, answers: Sequence[Answer], entries: Sequence[Entry]) -> Json:
    """The whole answer of `/v1/chat/completions`."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": answer.finished.generated_text},
            "logprobs": None,
            "finish_reason": REASONS[answer.finished.reason],
            **stop_reason(answer.finished),
        }
        for index, answer in enumerate(answers)
    ]
    return head.fields("chat.completion") | {"choices": choices, "usage": usage(entries, 0)}


def completion(head: Head, answers: Sequence[Answer], entries: Sequence[Entry], echoed: Sequence[str]) -> Json:
    """The whole answer of `/v1/completions`; each text begins with what is echoed of its prompt."""
    choices = [
        {
            "index": index,
            "text": echo + answer.finished.generated_text,
            "logprobs": None,
            "finish_reason": REASONS[answer.finished.reason],
            **stop_reason(answer.finished),
        }
        for index, (answer, echo) in enumerate(zip(answers, echoed, strict=True))
    ]
    return head.fields("text_completion") | {"choices": choices, "usage": usage(entries)}


def stop_reason(finished: Finished) -> Json:
    """Which of the request's stop sequences and tokens ended it, as vLLM calls it; nothing where none did."""
    return {} if finished.stopped_by is None else {"stop_reason": finished.stopped_by}


def status_of(error: RouterError) -> int:
    """OpenAI knows no 422."""
    return 400 if error.status == 422 else error.status


def error_body(error: RouterError) -> Json:
    """OpenAI's shape, and beside it the `error_type` by which Hugging Face's client chooses its exception."""
    status = status_of(error)
    words = f"{context_sentence(error)} " if isinstance(error, TooLong) else ""
    told = {
        "message": words + renamed(str(error)),
        "type": ERROR_TYPES.get(status, "server_error"),
        "param": None,
        "code": "context_length_exceeded" if isinstance(error, TooLong) else CODES.get(status),
    }
    return {"error": told, "error_type": error.error_type}


class ChunkFrames:
    """Turns the events of one stream into OpenAI's chunks.

    echoed: what comes before each answer of a completion; None for a chat.
    """

    def __init__(
        self, head: Head, opened: OpenRequest, *, includes_usage: UsageWanted, echoed: Sequence[str] | None
    ) -> None:
        self._entries = entries = opened.entries
        self._echoed = echoed
        self._includes_usage = includes_usage.at_end
        self._is_counting = includes_usage.in_every_chunk
        self._is_chat = is_chat = echoed is None
        self._fields = head.fields("chat.completion.chunk" if is_chat else "text_completion")
        self._tail: Json = {"usage": None} if includes_usage.at_end else {}
        self._begun = [False for _ in entries]
        self._num_left = len(entries)
        # A piece of text of sequence 0, which is nearly every chunk: all but the text.
        whole = frame({**self._fields, "choices": [self._choice(0, "\0", None)], **self._tail})
        self._before, self._after = whole.split(dumps("\0"))

    def write(self, index: int, events: Sequence[Event]) -> bytes:
        """All frames for these events of one sequence."""
        frames = [] if self._begun[index] else self._first(index)
        frames += self._content(index, events)
        last = events[-1]
        if isinstance(last, Finished):
            frames.append(frame(self._ended(self._chunk(index, "", REASONS[last.reason]), last)))
            self._num_left -= 1
        elif isinstance(last, Failed):
            return b"".join(frames) + frame(error_body(last.error)) + DONE
        return b"".join(frames) + (self._end() if not self._num_left else b"")

    def _content(self, index: int, events: Sequence[Event]) -> list[bytes]:
        """The text that came with them."""
        return [self._text_frame(index, event.text) for event in events if isinstance(event, Token) and event.text]

    def _first(self, index: int) -> list[bytes]:
        """What comes before any token: who speaks, or the prompt."""
        self._begun[index] = True
        if self._echoed is None:
            return [frame(self._chunk(index, "", None, role="assistant"))]
        return [self._text_frame(index, self._echoed[index])] if self._echoed[index] else []

    def _ended(self, chunk: Json, last: Finished) -> Json:
        """The last chunk of an answer."""
        chunk["choices"][0] |= stop_reason(last)
        return chunk

    def _usage(self) -> Json:
        return usage(self._entries, 0 if self._is_chat else None)

    def _text_frame(self, index: int, text: str) -> bytes:
        if index == 0 and not self._is_counting:
            return self._before + dumps(text) + self._after
        return frame(self._chunk(index, text, None))

    def _chunk(self, index: int, text: str, reason: str | None, **delta: str) -> Json:
        return self._with([self._choice(index, text, reason, **delta)])

    def _choice(self, index: int, text: str, reason: str | None, **delta: str) -> Json:
        content: Json = {"delta": {**delta, "content": text}} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _with(self, choices: Sequence[Json]) -> Json:
        """A chunk of these choices, with what every chunk says."""
        tail = {"usage": self._usage()} if self._is_counting else self._tail
        return {**self._fields, "choices": choices, **tail}

    def _end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return frame({**self._fields, "choices": [], "usage": self._usage()}) + DONE
