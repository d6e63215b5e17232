"""What Anthropic's routes answer, for the API's document alone: `answers.py` writes it by hand."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(BaseModel):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Counts of tokens; those of the prompt that were cached are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    """The whole answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageModel(BaseModel):
    """The model that is served."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class MessageModels(BaseModel):
    """The answer of `/v1/models` to a client of Anthropic's."""

    data: list[MessageModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


class MessageStart(BaseModel):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: MessageAnswer


class BlockStart(BaseModel):
    """A block begins, empty as yet."""

    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(BaseModel):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    """More of what the model thinks."""

    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(BaseModel):
    """More of the JSON of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(BaseModel):
    """More of the block that is open."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(BaseModel):
    """The block is complete."""

    type: Literal["content_block_stop"]
    index: int


class Ending(BaseModel):
    """Why a stream ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """What is known at the end."""

    type: Literal["message_delta"]
    delta: Ending
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event of a stream."""

    type: Literal["message_stop"]


class Ping(BaseModel):
    """A sign of life."""

    type: Literal["ping"]


class MessageEvent(
    RootModel[MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping],
):
    """One event of a stream of `/v1/messages`."""


class MessageErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class MessageError(BaseModel):
    """Every answer that is not a success, and the last event of a stream that fails."""

    type: Literal["error"]
    error: MessageErrorDetail
    error_type: str
