"""The shapes of OpenAI's completions and their errors, and whole answers in them.

The API's document is generated from the same shapes; nothing checks answers while the server runs. Left out: chunks of
streams (`streams.py`), log-probabilities (`logprobs.py`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from host.version import version
from router.apis.openai.logprobs import ChatLogprobs, CompletionLogprobs, Scoring, TextLogprobs, shown_tokens, text_of
from router.chat.pieces import AnswerReader, Content, CountingReader, whole
from router.errors import RouterError, TooLong, UnknownModel
from router.requests.generation import Answer, one_per_prompt
from router.scheduling.request import Entry, Finished, PromptScores
from router.text.generated import FinishReason

FINGERPRINT = f"lockstep-{version()}"
Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]
ReasoningName = Literal["reasoning_content", "reasoning"]
REASONS: dict[FinishReason, Reason] = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
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
KINDS = {TooLong: ("context_length_exceeded", None), UnknownModel: ("model_not_found", "model")}  # code and parameter


class CachedTokens(TypedDict):
    """Of the prompt."""

    cached_tokens: int


class CompletionTokens(TypedDict):
    """What answers' tokens were, or were not: reasoning of a chat, and guesses where the server makes some."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    """Counts of tokens, of all answers together, and whose they are where it is an adapter's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionTokens]
    adapter: NotRequired[str]


class Answered(TypedDict):
    """What whole answers and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CalledFunction(TypedDict):
    """A function that the model calls. arguments: JSON, as far as the model keeps to it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ReasoningField(TypedDict, total=False):
    """What the model thought before, by one of the names that clients know; null where it thought nothing."""

    reasoning_content: str | None
    reasoning: str | None


class ChatMessage(ReasoningField):
    """What the model says. Without text beside its calls, its content is null."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class StopReason(TypedDict, total=False):
    """Which of the request's stop sequences and tokens ended an answer, as vLLM calls it; absent where none did."""

    stop_reason: str | int


class ChatChoice(StopReason):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason


class ChatCompletion(Answered):
    """The whole answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(StopReason):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason


class TextCompletion(Answered):
    """The whole answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class ServedModel(TypedDict):
    """The model, or an adapter, whose parent is the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: NotRequired[str]
    max_model_len: int


class ServedModels(TypedDict):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class ErrorDetail(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every answer of `/v1` that is not a success, and the last event of a stream that fails."""

    error: ErrorDetail
    error_type: str


def now() -> int:
    """Seconds since 1970, as `created` has them."""
    return int(time.time())


@dataclass(frozen=True)
class Head:
    """What every piece of one answer says: whose it is, and when it was made."""

    id: str
    model: str
    created: int = field(default_factory=now)

    def fields(self) -> Answered:
        """What it says."""
        return {
            "id": self.id,
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


def usage(entries: Sequence[Entry], num_reasoning: int | None = None) -> Usage:
    """Counts of tokens; the prompt of several answers counts once for each. num_reasoning: of a chat's answers."""
    prompts = one_per_prompt(entries)
    prompt = sum(entry.request.input_length for entry in prompts)
    generated = sum(entry.generated.num_tokens for entry in entries)
    told: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(entry.num_cached for entry in prompts)},
    }
    details: CompletionTokens = {}
    if num_reasoning is not None:
        details["reasoning_tokens"] = num_reasoning
    if any(entry.drafting is not None for entry in entries):
        right, made = (sum(entry.num_right for entry in entries), sum(entry.num_guessed for entry in entries))
        details |= {"accepted_prediction_tokens": right, "rejected_prediction_tokens": made - right}
    if details:
        told["completion_tokens_details"] = details
    if (adapter := entries[0].request.adapter) is not None:
        told["adapter"] = adapter.name
    return told


def chat_completion(
    head: Head,
    answers: Sequence[Answer],
    entries: Sequence[Entry],
    readers: Sequence[CountingReader] | None = None,
    reasoning: ReasoningName | None = None,
) -> ChatCompletion:
    """The whole answer of `/v1/chat/completions`.

    readers: find reasoning and calls of tools; None: it is text alone. reasoning: what it is called; None: not shown.
    """
    none: list[CountingReader | None] = [None] * len(answers)
    each = zip(answers, readers or none, strict=True)
    choices = [_choice(index, answer, reader, reasoning) for index, (answer, reader) in enumerate(each)]
    counts = usage(entries, sum(reader.num_reasoning for reader in readers or ()))
    return {"object": "chat.completion", **head.fields(), "choices": choices, "usage": counts}


def _choice(index: int, answer: Answer, reader: CountingReader | None, reasoning: ReasoningName | None) -> ChatChoice:
    finished = answer.finished
    content = Content(finished.generated_text)
    reason: ChatReason = REASONS[finished.reason]
    if reader is not None:
        pieces = [piece for token in answer.tokens for piece in reader.feed(token.text)]
        content = whole([*pieces, *reader.end()])
        reason = chat_reason(finished.reason, reader, has_calls=bool(content.calls))
    return {
        "index": index,
        "message": _message(content, reasoning),
        "logprobs": None,
        "finish_reason": reason,
        **stop_reason(finished),
    }


def _message(content: Content, reasoning: ReasoningName | None) -> ChatMessage:
    """Without text beside its calls, its content is null; calls are left out where there are none."""
    told: ChatMessage = {
        "role": "assistant",
        "content": content.text or (None if content.calls else ""),
    }
    add_reasoning(told, reasoning, content.reasoning)
    if content.calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in content.calls
        ]
    return told


def completion(
    head: Head, answers: Sequence[Answer], entries: Sequence[Entry], echoed: Sequence[str]
) -> TextCompletion:
    """The whole answer of `/v1/completions`; each text begins with what is echoed of its prompt."""
    choices: list[TextChoice] = [
        {
            "index": index,
            "text": echo + answer.finished.generated_text,
            "logprobs": None,
            "finish_reason": REASONS[answer.finished.reason],
            **stop_reason(answer.finished),
        }
        for index, (answer, echo) in enumerate(zip(answers, echoed, strict=True))
    ]
    return {"object": "text_completion", **head.fields(), "choices": choices, "usage": usage(entries)}


def add_to_chat(body: ChatCompletion, answers: Sequence[Answer], scoring: Scoring) -> ChatCompletion:
    """The same with the log-probabilities of its choices."""
    for choice, answer in zip(body["choices"], answers, strict=True):
        choice["logprobs"] = scoring.of_chat(shown_tokens(answer, scoring.tokenizer))
    return body


def add_to_completion(
    body: TextCompletion, answers: Sequence[Answer], token_ids: Sequence[Sequence[int]], scoring: Scoring
) -> TextCompletion:
    """The same with the log-probabilities of its choices. token_ids: of each answer's prompt."""
    for number, (choice, answer) in enumerate(zip(body["choices"], answers, strict=True)):
        tokens = shown_tokens(answer, scoring.tokenizer)
        if scoring.prompts:
            tokens = scoring.prompt(number, token_ids[number], answer.prompt_scores or PromptScores()) + tokens
            choice["text"] = text_of(tokens)
        choice["logprobs"] = CompletionLogprobs(scoring).of(tokens)
    return body


def stop_reason(finished: Finished) -> StopReason:
    """What of the request ended an answer."""
    return {} if finished.stopped_by is None else {"stop_reason": finished.stopped_by}


def add_reasoning(told: ReasoningField, name: ReasoningName | None, text: str) -> None:
    """Tell reasoning in a message or in a piece of one: null where there is none, nothing where no name is given."""
    if name is not None:
        told[name] = text or None


def chat_reason(reason: FinishReason, reader: AnswerReader, *, has_calls: bool) -> ChatReason:
    """In OpenAI's words: `tool_calls` only where all calls are complete and nothing was cut."""
    calls = has_calls and not reader.is_in_call and reason is not FinishReason.LENGTH
    return "tool_calls" if calls else REASONS[reason]


def status_of(error: RouterError) -> int:
    """OpenAI knows no 422."""
    return 400 if error.status == 422 else error.status


def error_body(error: RouterError) -> ErrorAnswer:
    """OpenAI's shape, and beside it the `error_type` by which Hugging Face's client chooses its exception."""
    status = status_of(error)
    words = f"{context_sentence(error)} " if isinstance(error, TooLong) else ""
    code, parameter = KINDS.get(type(error), (CODES.get(status), None))
    told: ErrorDetail = {
        "message": words + renamed(str(error)),
        "type": ERROR_TYPES.get(status, "server_error"),
        "param": parameter,
        "code": code,
    }
    return {"error": told, "error_type": error.error_type}
