"""The shapes of OpenAI's responses: whole answers, and the items that they consist of.

The API's document is generated from the same shapes. What a body said is told again, as far as it is short: in a
stream it comes three times. Left out: events of streams (`streams.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from router.apis.openai import answers
from router.apis.openai.answers import ErrorAnswer
from router.apis.openai.logprobs import Scoring, ShownTokenLogprob, shown_tokens
from router.apis.openai.responses.tools import Named, input_of
from router.chat.pieces import AnswerReader, CountingReader, Kind, Part, parts_of
from router.errors import RouterError
from router.requests.generation import Answer
from router.scheduling.request import Entry
from router.text.generated import FinishReason

NOT_STORED = "responses are not stored here: keep what `/v1/responses` answers, and send its items with the next input"
PREFIXES: dict[Kind, str] = {"text": "msg", "reasoning": "rs", "call": "fc"}  # of ids, by the kind of an item's part
CUSTOM_PREFIX = "ctc"  # of calls of custom tools
# What parameters are called in OpenAI's other APIs, and here.
NAMES = {
    "`max_tokens`": "`max_output_tokens`",
    "`response_format`": "`text.format`",
    "`grammar.value`": "`text.format`",
}
Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal[Status, "failed"]


class OutputText(TypedDict):
    """The one part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ShownTokenLogprob]


class ReasoningText(TypedDict):
    """The one part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """What the model thought before."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomCallItem(TypedDict):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(TypedDict):
    """Of the prompt."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Of the answer."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class EchoedReasoning(TypedDict):
    """What a request says of reasoning."""

    effort: str | None
    summary: str | None


class EchoedText(TypedDict):
    """What a request says of the text."""

    format: dict[str, Any]


class Echoed(TypedDict):
    """What an answer repeats of its request."""

    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    temperature: float
    text: EchoedText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float


class ResponseAnswer(Echoed):
    """The whole answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: Sequence[Item]
    previous_response_id: None
    service_tier: Literal["default"]
    store: Literal[False]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class InputTokens(TypedDict):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@dataclass(frozen=True)
class Head:
    """What an answer says of itself, whatever comes of it.

    number: what all its ids have in common. named: tools by the names that the model sees, as in `Offered`.
    """

    number: str
    model: str
    echoed: Echoed
    named: Mapping[str, Named] = field(default_factory=dict)
    created: int = field(default_factory=answers.now)

    def response(
        self,
        status: ResponseStatus,
        output: Sequence[Item],
        usage: ResponseUsage | None = None,
        error: ResponseFailure | None = None,
    ) -> ResponseAnswer:
        """A whole response."""
        return {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "completed_at": answers.now() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": usage,
            **self.echoed,
        }

    def is_custom(self, part: Part) -> bool:
        """Whether a part is a call of a custom tool."""
        return part.kind == "call" and part.name in self.named and self.named[part.name].is_custom

    def name_of(self, part: Part) -> str:
        """What the API calls the tool that a part calls."""
        return self.named[part.name].name if part.name in self.named else part.name

    def item_id(self, part: Part, index: int) -> str:
        """Of an item of the output."""
        return f"{CUSTOM_PREFIX if self.is_custom(part) else PREFIXES[part.kind]}_{self.number}_{index}"

    def item(self, part: Part, id: str, status: Status, logprobs: list[ShownTokenLogprob]) -> Item:
        """An item of the output. While it is in progress, it has no text yet. logprobs: of a text."""
        is_empty = status == "in_progress"
        match part.kind:
            case "text":
                texts = [] if is_empty else [text_part(part.text, logprobs)]
                return {"id": id, "type": "message", "role": "assistant", "status": status, "content": texts}
            case "reasoning":
                thoughts = [] if is_empty else [reasoning_part(part.text)]
                return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": thoughts}
            case "call":
                return self._call(part, id, status)

    def _call(self, part: Part, id: str, status: Status) -> CallItem | CustomCallItem:
        named = self.named.get(part.name) or Named(part.name)
        told: CallItem | CustomCallItem
        if named.is_custom:
            told = {
                "id": id,
                "type": "custom_tool_call",
                "status": status,
                "call_id": part.id,
                "name": named.name,
                "input": "" if status == "in_progress" else input_of(part.text),
            }
        else:
            told = {
                "id": id,
                "type": "function_call",
                "status": status,
                "call_id": part.id,
                "name": named.name,
                "arguments": part.text,
            }
        if named.namespace is not None:
            told["namespace"] = named.namespace
        return told


def usage(entry: Entry, num_generated: int, num_reasoning: int) -> ResponseUsage:
    """Counts of tokens."""
    prompt = entry.request.input_length
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": entry.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": prompt + num_generated,
    }


def status_of(reason: FinishReason) -> Status:
    """Of a response that has ended."""
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def response(
    head: Head, scoring: Scoring | None, answer: Answer, entry: Entry, its_reader: AnswerReader
) -> ResponseAnswer:
    """The whole answer of `/v1/responses`. scoring: of one that is text alone."""
    reader = CountingReader(its_reader)
    pieces = [piece for token in answer.tokens for piece in reader.feed(token.text)]
    parts = parts_of([*pieces, *reader.end()])
    status = status_of(answer.finished.reason)
    logprobs = [] if scoring is None else scoring.entries(shown_tokens(answer, scoring.tokenizer))
    items = [head.item(part, head.item_id(part, at), "completed", logprobs) for at, part in enumerate(parts)]
    items[-1]["status"] = "incomplete" if reader.is_in_call else status
    return head.response(status, items, usage(entry, answer.finished.generated_tokens, reader.num_reasoning))


def text_part(text: str, logprobs: list[ShownTokenLogprob]) -> OutputText:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_part(text: str) -> ReasoningText:
    """The one part of reasoning."""
    return {"type": "reasoning_text", "text": text}


def error_body(error: RouterError) -> ErrorAnswer:
    """OpenAI's shape, with the names that parameters have in this API."""
    body = answers.error_body(error)
    for elsewhere, here in NAMES.items():
        body["error"]["message"] = body["error"]["message"].replace(elsewhere, here)
    return body
