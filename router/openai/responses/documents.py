"""What `/v1/responses` answers, for the API's document alone: `answers.py` and `frames.py` write it by hand."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel

from router.openai.documents import ShownTokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The one part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ShownTokenLogprob]


class ReasoningText(BaseModel):
    """The one part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningItem(BaseModel):
    """What the model thought before."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(BaseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class InputDetails(BaseModel):
    """Of the prompt."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """Of the answer."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(BaseModel):
    """The whole answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | ReasoningItem | CallItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class InputTokens(BaseModel):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Numbered(BaseModel):
    """What all events of a stream have."""

    sequence_number: int


class ResponseChanged(Numbered):
    """The response begins, or ends."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class ItemChanged(Numbered):
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: MessageItem | ReasoningItem | CallItem


class OfItem(Numbered):
    """What concerns one item."""

    item_id: str
    output_index: int


class PartChanged(OfItem):
    """The part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class Delta(OfItem):
    """More of a text, of reasoning, or of a call's arguments."""

    type: Literal[
        "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"
    ]
    delta: str
    logprobs: list[ShownTokenLogprob] | None = None


class TextDone(OfItem):
    """All of a text or of reasoning."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    content_index: int
    text: str
    logprobs: list[ShownTokenLogprob] | None = None


class ArgumentsDone(OfItem):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class FailureTold(Numbered):
    """Why the response fails, which the last event says too."""

    type: Literal["error"]
    code: str
    message: str
    param: None
    error_type: str


class ResponseEvent(
    RootModel[ResponseChanged | ItemChanged | PartChanged | Delta | TextDone | ArgumentsDone | FailureTold],
):
    """One event of a stream of `/v1/responses`."""
