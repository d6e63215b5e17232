"""What OpenAI's routes answer, for the API's document alone: `answers.py` writes it by hand, several times faster."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(BaseModel):
    """Of the prompt."""

    cached_tokens: int


class ReasoningTokens(BaseModel):
    """Of a chat's answers."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Counts of tokens, of all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class Answered(BaseModel):
    """What whole answers and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CalledFunction(BaseModel):
    """A function that the model calls. arguments: JSON, as far as the model keeps to it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class TokenLogprob(BaseModel):
    """A token and what the model itself thought of it; `token` names the bytes of a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ShownTokenLogprob(TokenLogprob):
    """A token of the text, and its candidates."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """What `logprobs` of a chat asks for."""

    content: list[ShownTokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """What `logprobs` of a completion asks for. The first token of a prompt has none: nothing predicted it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatMessage(BaseModel):
    """What the model says. Without text beside its calls, its content is null."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason
    stop_reason: str | int | None = None


class ChatCompletion(Answered):
    """The whole answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason
    stop_reason: str | int | None = None


class TextCompletion(Answered):
    """The whole answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    """What a chunk adds to a call: with the first, its name."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """The call of this index. What its first chunk says besides, no later one does."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None
    stop_reason: str | int | None = None


class ChatChunk(Answered):
    """One event of a stream of `/v1/chat/completions`. After the last comes `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextChunkChoice(BaseModel):
    """A piece of one answer of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | None = None


class TextChunk(Answered):
    """One event of a stream of `/v1/completions`. After the last comes `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class ServedModel(BaseModel):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ServedModels(BaseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer of `/v1` that is not a success, and the last event of a stream that fails."""

    error: ErrorDetail
    error_type: str
