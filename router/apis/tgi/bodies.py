"""The shapes of TGI's own routes: bodies of requests and answers, and response headers.

The API's document is generated from the same shapes; nothing checks answers while the server runs. Left out: events of
streams (`routes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NotRequired

from orjson import dumps
from pydantic import Field
from typing_extensions import TypedDict

from router.apis.serving import ADAPTER_HEADER, adapter_header
from router.requests.generation import Answer, OpenRequest, likeliest_first, one_per_prompt
from router.requests.schemas import GenerateParameters, Lenient, Misplaced, PromptRequest, Strict, Unserved
from router.scheduling.request import Finished, Token
from router.text.generated import FinishReason


class GenerateRequest(Lenient):
    """The body of `/generate`, `/generate_stream`, `/` and `/tokenize`."""

    inputs: str = Field(description="The prompt.")
    parameters: GenerateParameters | None = None
    stream: bool | None = Field(default=None, description="On `/` alone: answer with server-sent events.")
    adapter_id: Misplaced = None
    prompt_embeds: Unserved = None
    input_embeds: Unserved = None

    @property
    def given(self) -> GenerateParameters:
        """The parameters; an absent object means what an empty one does."""
        return self.parameters or GenerateParameters()


class DetokenizeRequest(Strict):
    """The body of `/detokenize`."""

    ids: Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)] = Field(
        description="Token ids, at most `max_total_tokens`."
    )
    skip_special_tokens: bool | None = Field(default=None, description="Leave special tokens out. Absent: true.")


def prompt_request_of(request: GenerateRequest) -> PromptRequest:
    """What a body asks for."""
    return PromptRequest(request.inputs, request.given)


# What `response_headers` gives, for pages of other origins to read.
COUNT_HEADERS = (
    "x-compute-type", "x-compute-characters", "x-prompt-tokens", "x-generated-tokens", "x-compute-time", "x-total-time",
    "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token", ADAPTER_HEADER,
)  # fmt: skip


class TokenBody(TypedDict):
    """One generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool
    guessed: NotRequired[Annotated[bool, Field(description="Guessed ahead; absent: not.")]]


class PromptTokenBody(TypedDict):
    """One token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Details(TypedDict):
    """What `details` asks for, of each sample."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PromptTokenBody]
    tokens: list[TokenBody]
    top_tokens: NotRequired[list[list[TokenBody]]]


class SequenceBody(Details):
    """A sample of `best_of` that is not the best."""

    generated_text: str


class OtherSamples(TypedDict, total=False):
    """The samples that are not the best, where there is more than one."""

    best_of_sequences: list[SequenceBody]


class DetailsBody(Details, OtherSamples):
    """What `details` asks for."""


class GenerateResponse(TypedDict):
    """The whole answer."""

    generated_text: str
    details: NotRequired[DetailsBody]


class TokenizedBody(TypedDict):
    """One token of a text, with its place in bytes."""

    id: int
    text: str
    start: Annotated[int, Field(description="First byte in `inputs`.")]
    stop: Annotated[int, Field(description="The byte after the last.")]


class ChatTokenizedBody(TypedDict):
    """A chat's prompt and its tokens."""

    tokenize_response: list[TokenizedBody]
    templated_text: str


class DetokenizedBody(TypedDict):
    """The text of token ids."""

    text: str


def response_body(request: GenerateRequest, answers: list[Answer]) -> GenerateResponse:
    """The answer of `/generate`."""
    given = request.given
    best, *others = likeliest_first(answers)
    body: GenerateResponse = {"generated_text": visible_text(request, best.finished.generated_text)}
    if given.details or given.decoder_input_details:
        body["details"] = {**_details(best, given), **_other_samples(request, others)}
    return body


def _other_samples(request: GenerateRequest, answers: Sequence[Answer]) -> OtherSamples:
    told: list[SequenceBody] = [
        {"generated_text": visible_text(request, answer.finished.generated_text), **_details(answer, request.given)}
        for answer in answers
    ]
    return {"best_of_sequences": told} if told else {}


def visible_text(request: GenerateRequest, generated: str) -> str:
    """With the prompt, where it is wanted."""
    return request.inputs + generated if request.given.return_full_text else generated


def _details(answer: Answer, given: GenerateParameters) -> Details:
    details: Details = {
        "finish_reason": answer.finished.reason,
        "generated_tokens": answer.finished.generated_tokens,
        "seed": answer.seed,
        "prefill": [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in answer.prompt],
        "tokens": [token_body(token) for token in answer.tokens],
    }
    if given.top_n_tokens:
        details["top_tokens"] = [[token_body(top) for top in token.top_tokens] for token in answer.tokens]
    return details


def token_body(token: Token) -> TokenBody:
    """A token of an answer."""
    body: TokenBody = {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
    if token.guessed:
        body["guessed"] = True
    return body


def response_headers(
    num_characters: int | None, opened: OpenRequest, finished: Sequence[Finished], compute_type: str
) -> dict[str, str]:
    """Counts of all answers that are given, and times in whole milliseconds of the one that took longest.

    num_characters: of the prompts; None where a client has not written them itself.
    """
    times = max((one.timings for one in finished), key=lambda timings: timings.finished)
    inference = times.finished - times.admitted
    generated = sum(one.generated_tokens for one in finished)
    seconds = {
        "x-compute-time": times.finished - opened.received_at,
        "x-total-time": times.finished - opened.received_at,
        "x-validation-time": times.queued - opened.received_at,
        "x-queue-time": times.admitted - times.queued,
        "x-inference-time": inference,
        "x-time-per-token": inference / max(generated, 1),
    }
    return {
        "x-compute-type": compute_type,
        **adapter_header(opened),
        **({} if num_characters is None else {"x-compute-characters": str(num_characters)}),
        "x-prompt-tokens": str(sum(entry.request.input_length for entry in one_per_prompt(opened.entries))),
        "x-generated-tokens": str(generated),
        **{name: str(round(value * 1000)) for name, value in seconds.items()},
    }


def tokenized_body(text: str, tokens: Sequence[tuple[int, tuple[int, int]]]) -> bytes:
    """The answer of `/tokenize`."""
    return dumps(_tokens_in(text, tokens))


def chat_tokenized_body(text: str, tokens: Sequence[tuple[int, tuple[int, int]]]) -> bytes:
    """The answer of `/chat_tokenize`."""
    told: ChatTokenizedBody = {"tokenize_response": _tokens_in(text, tokens), "templated_text": text}
    return dumps(told)


def _tokens_in(text: str, tokens: Sequence[tuple[int, tuple[int, int]]]) -> list[TokenizedBody]:
    """Character offsets become byte offsets, as TGI's are."""
    byte_at = _byte_offsets(text, {offset for _, span in tokens for offset in span})
    return [
        {"id": id, "text": text[start:stop], "start": byte_at[start], "stop": byte_at[stop]}
        for id, (start, stop) in tokens
    ]


def _byte_offsets(text: str, offsets: Iterable[int]) -> dict[int, int]:
    """Character offset -> byte offset."""
    found, last, num_bytes = {}, 0, 0
    for offset in sorted(offsets):
        num_bytes += len(text[last:offset].encode())
        found[offset], last = num_bytes, offset
    return found
