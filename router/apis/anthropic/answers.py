"""The shapes of Anthropic's messages and errors, and whole answers in them.

The API's document is generated from the same shapes. Counts of the prompt's tokens leave cached ones out, as
Anthropic's do. Left out: events of streams (`streams.py`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from typing_extensions import TypedDict

from router.apis.openai.answers import renamed, status_of
from router.chat.pieces import AnswerReader, Part, parts_of
from router.chat.tools import MOST_DEPTH, is_deeper
from router.errors import RouterError, TooLong
from router.requests.generation import Answer
from router.scheduling.request import Entry
from router.text.generated import FinishReason

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
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
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
REASONS: dict[FinishReason, StopReason] = {FinishReason.LENGTH: "max_tokens", FinishReason.EOS_TOKEN: "end_turn"}


class TextBlock(TypedDict):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(TypedDict):
    """Counts of tokens; those of the prompt that were cached are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    """The whole answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageModel(TypedDict):
    """The model that is served."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class MessageModels(TypedDict):
    """The answer of `/v1/models` to a client of Anthropic's."""

    data: list[MessageModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class MessageErrorDetail(TypedDict):
    """What is wrong."""

    type: str
    message: str


class MessageError(TypedDict):
    """Every answer that is not a success, and the last event of a stream that fails."""

    type: Literal["error"]
    error: MessageErrorDetail
    error_type: str


@dataclass(frozen=True)
class Head:
    """What an answer says of itself."""

    id: str
    model: str

    def message(
        self, content: list[Block], reason: StopReason | None, stop: str | None, usage: MessageUsage
    ) -> MessageAnswer:
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


def usage(entry: Entry, num_generated: int) -> MessageUsage:
    """Counts of tokens."""
    return {
        "input_tokens": entry.request.input_length - entry.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": entry.num_cached,
        "output_tokens": num_generated,
    }


def ending(entry: Entry, reason: FinishReason, *, is_call: bool) -> tuple[StopReason, str | None]:
    """Why an answer ended, and the stop sequence that ended it. is_call: whether it calls tools, in full."""
    if reason is FinishReason.STOP_SEQUENCE and (stop := entry.generated.stop_sequence) is not None:
        return "stop_sequence", stop
    told = REASONS.get(reason, "end_turn")
    return ("tool_use" if is_call and told == "end_turn" else told), None


def message(head: Head, answer: Answer, entry: Entry, reader: AnswerReader) -> MessageAnswer:
    """The whole answer of `/v1/messages`."""
    parts = parts_of([*reader.feed(answer.finished.generated_text), *reader.end()])
    is_call = not reader.is_in_call and any(part.kind == "call" for part in parts)
    reason, stop = ending(entry, answer.finished.reason, is_call=is_call)
    return head.message(
        [block_of(part) for part in parts], reason, stop, usage(entry, answer.finished.generated_tokens)
    )


def block_of(part: Part) -> Block:
    """A part of an answer as a block of its message."""
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(part.text)}


def _arguments(written: str) -> Any:
    """What a call gives its tool, for orjson, as the model wrote it; empty where that is no object, or was cut off."""
    with suppress(orjson.JSONDecodeError):
        found = orjson.loads(written)
        if isinstance(found, dict) and not is_deeper(found, MOST_DEPTH):
            return orjson.Fragment(written)  # whose numbers may be beyond 64 bits
    return orjson.Fragment("{}")


def error_body(error: RouterError) -> MessageError:
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


def error_of(status: int, sentence: str, error_type: str) -> MessageError:
    """The same for an error that HTTP itself defines."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 424 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}, "error_type": error_type}
