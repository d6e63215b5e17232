"""OpenAI's `/v1/responses` and `/v1/responses/input_tokens`: bodies of requests, and how they are answered.

As strict and as lenient as those of chats (`router/apis/openai/requests.py`). Items of `input` with a meaning that is
not served are refused. Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import FastAPI, Request
from orjson import JSONEncodeError, dumps
from pydantic import Field
from starlette.responses import Response

from router.apis.document import add_post
from router.apis.openai.answers import ErrorAnswer
from router.apis.openai.logprobs import OF_RESPONSE, Scoring, candidates_of_response
from router.apis.openai.requests import ModelName, Objects, Texts, scored
from router.apis.openai.responses import answers
from router.apis.openai.responses.answers import Echoed
from router.apis.openai.responses.streams import ResponseEvent, ResponseFrames
from router.apis.openai.responses.tools import INPUT, Offered, left_out, offered, shown_name
from router.apis.serving import (
    Services,
    Turn,
    answer_turn,
    json_response,
    num_prompt_tokens,
    read,
    turn_of,
    values_of_conversations,
)
from router.chat.prompting import effort
from router.chat.transcript import Transcript, arguments_in, result_text_of, string_of, text_of
from router.errors import ValidationError
from router.requests.continuing import created_of
from router.requests.grammars import grammar_of_flat_format
from router.requests.schemas import (
    MOST_VALUES,
    GenerateParameters,
    Integer,
    Lenient,
    NotServed,
    drawn,
    refuse_excess_within,
)

T = TypeVar("T")
Word = Annotated[str, Field(max_length=64)]
STORED = (
    "needs responses that are stored, and none are stored here: leave it out, and send all items of the conversation "
    "as `input`"
)


class Reasoning(Lenient):
    """How the model thinks before it answers, where its chat template lets one choose."""

    effort: Word | None = Field(default=None, description="`none`, or what the template knows of `reasoning_effort`.")
    summary: Word | None = Field(default=None, description="Ignored: reasoning is shown whole.")


class TextConfig(Lenient):
    """How the text of the answer looks."""

    format: dict[str, Any] | None = Field(default=None, description="`text`, `json_object` or a `json_schema`.")


class InputRequest(Lenient):
    """The body of `/v1/responses/input_tokens`."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "previous_response_id": NotServed(sentence=STORED),
        "conversation": NotServed(sentence=STORED),
        "background": NotServed((None, False), STORED),
        "prompt": NotServed(),
        "context_management": NotServed((None, [])),
        "moderation": NotServed(),
        "image": NotServed(),
        "access_programs": NotServed((None, [])),
        "background_options": NotServed(),
    }

    input: str | Objects | None = Field(default=None, description="A text of the user, or items of a conversation.")
    instructions: str | None = Field(default=None, description="The system prompt.")
    model: ModelName | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: Objects | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Word | None = Field(default=None, description="An input that is too long is refused, also with `auto`.")

    def ignored(self) -> list[str]:
        """See `Lenient`; tools that the model does not get to see among them."""
        return super().ignored() + [f"tools.{kind}" for kind in left_out(self.tools or ())]


class ResponsesRequest(InputRequest):
    """The body of `/v1/responses`."""

    include: Texts | None = Field(
        default=None, description="`message.output_text.logprobs`: the log-probability of each token. Else ignored."
    )
    max_output_tokens: Integer | None = Field(default=None, description="Absent: as many as `max_total_tokens` leaves.")
    metadata: dict[str, str] | None = Field(default=None, description="The answer has it.")
    store: bool | None = Field(default=None, description="Nothing is stored, and the answer says so.")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_tool_calls: Integer | None = Field(
        default=None, description="Repeated in the answer: the server calls no tools."
    )
    safety_identifier: str | None = Field(default=None, description="The answer has it.")
    prompt_cache_key: str | None = Field(default=None, description="The answer has it.")
    speculate: Integer | None = Field(default=None, description="Not OpenAI's, as on TGI's routes.")
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    temperature: float | None = Field(default=None, description="0: the most likely tokens. Absent: 1.")
    top_logprobs: Integer | None = Field(default=None, description="Likeliest alternatives reported with each token.")
    top_p: float | None = None

    def ignored(self) -> list[str]:
        """See `Lenient`; `store` among them where it asks for what is not done."""
        return super().ignored() + (["store"] if self.store else [])


ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("text", "input_text", "output_text")
REASONING = ("text", "reasoning_text")
FORMATS = ("text", "json_object", "json_schema")
MOST_ECHOED = 16_384  # bytes of a field of the body that are told again
TOOL: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}  # which every function has then
MOST_METADATA, MOST_NAME, MOST_VALUE = 16, 64, 512  # OpenAI's: pairs, and their characters


def parameters_of(body: ResponsesRequest) -> GenerateParameters:
    """How to generate. Raises ValidationError."""
    _check_metadata(body.metadata or {})
    return GenerateParameters(
        **drawn(body.temperature, top_p=body.top_p),
        max_new_tokens=body.max_output_tokens,
        speculate=body.speculate,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        grammar=grammar_of_flat_format("text.format", None if body.text is None else body.text.format, FORMATS),
    )


def candidates_of(body: ResponsesRequest, *, is_read: bool, most: int) -> int | None:
    """How many candidates are wanted with each token; None: no log-probabilities. Raises ValidationError.

    is_read: whether the answer is taken apart. Which of its tokens are the text's is not certain then.
    """
    candidates = candidates_of_response(body.include or (), body.top_logprobs, most)
    if is_read and candidates is not None:
        raise ValidationError(
            f"`include` has {OF_RESPONSE}, which answers that may have calls of tools or reasoning do not: leave it out"
        )
    return candidates


def _check_metadata(given: Mapping[str, str]) -> None:
    if len(given) > MOST_METADATA or any(len(n) > MOST_NAME or len(v) > MOST_VALUE for n, v in given.items()):
        raise ValidationError(
            f"`metadata` may have {MOST_METADATA} pairs of names of {MOST_NAME} and values of {MOST_VALUE} characters: "
            "shorten it"
        )


def variables_of(body: InputRequest) -> Mapping[str, Any]:
    """What `reasoning` means to a chat template."""
    return effort(body.reasoning.effort if body.reasoning is not None else None)


def echo_of(body: ResponsesRequest) -> Echoed:
    """What an answer repeats of its request."""
    reasoning, text = body.reasoning or Reasoning(), body.text or TextConfig()
    return {
        "frequency_penalty": body.frequency_penalty or 0.0,
        "instructions": _if_short(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "prompt_cache_key": _if_short(body.prompt_cache_key),
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": _if_short(body.safety_identifier),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _if_short(text.format or {}) or {"type": "text"}},
        "tool_choice": _if_short(body.tool_choice) or "auto",
        "tools": [{**TOOL, **tool} for tool in _if_short(body.tools) or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }


def _if_short(value: T) -> T | None:
    try:
        return value if len(dumps(value)) <= MOST_ECHOED else None
    except JSONEncodeError:  # it has a number of more than 64 bits
        return None


def transcript_of(body: InputRequest) -> Transcript:
    """The items, behind `instructions`. Raises ValidationError."""
    found = Transcript()
    if body.instructions:
        found.say("system", body.instructions)
    _check_arguments(body.input)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    for number, item in enumerate(items):
        _add(found, f"input.{number}", item)
    return found


def _add(transcript: Transcript, where: str, item: Mapping[str, Any]) -> None:
    match item.get("type") or "message":
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise ValidationError(f"`{where}.role` is {str(role)[:40]}: give one of {', '.join(ROLES)}")
            transcript.say(ROLES[role], _text(where, item, "content", TEXTS))
        case "function_call":
            transcript.call(f"{where}.arguments", *_called(where, item), _arguments(where, item))
        case "custom_tool_call":
            transcript.call(f"{where}.input", *_called(where, item), {INPUT: string_of(where, item, "input")})
        case "function_call_output" | "custom_tool_call_output":
            transcript.answer_call(string_of(where, item, "call_id"), _result(where, item))
        case "reasoning":
            transcript.think(_text(where, item, "content", REASONING))
        case "item_reference":
            raise ValidationError(
                f"`{where}` refers to an item that is stored, and none are stored here: send it whole"
            )
        case kind:
            raise ValidationError(
                f"`{where}` is of type {str(kind)[:40]}: the model reads message, function_call, custom_tool_call, "
                "their outputs and reasoning alone; leave it out"
            )


def _called(where: str, item: Mapping[str, Any]) -> tuple[str, str]:
    """The id of a call, and the name that the model sees."""
    name = shown_name(where, string_of(where, item, "name"), item.get("namespace"))
    return string_of(where, item, "call_id"), name


def _result(where: str, item: Mapping[str, Any]) -> str:
    return result_text_of(f"{where}.output", _content(where, item, "output"), TEXTS)


def _check_arguments(items: str | Sequence[Mapping[str, Any]] | None) -> None:
    """Raises ValidationError for more values within all arguments than a body may have, before any is built."""
    if items is None or isinstance(items, str):
        return
    arguments = (item.get("arguments") for item in items)
    refuse_excess_within((one.encode() for one in arguments if isinstance(one, str)), MOST_VALUES)


def _text(where: str, item: Mapping[str, Any], name: str, kinds: Sequence[str]) -> str:
    return text_of(f"{where}.{name}", _content(where, item, name), kinds)


def _content(where: str, item: Mapping[str, Any], name: str) -> str | list[Any] | None:
    content = item.get(name)
    if content is None or isinstance(content, str | list):
        return content
    raise ValidationError(f"`{where}.{name}` must be a text or a list of parts")


def _arguments(where: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    return arguments_in(string_of(where, item, "arguments"))


def offered_of(body: InputRequest) -> Offered:
    """The tools that the model gets to see. Raises ValidationError."""
    return offered(body.tools or (), body.tool_choice or "auto", is_parallel=body.parallel_tool_calls is not False)


def add_responses_routes(app: FastAPI, services: Services) -> None:
    """Serve what OpenAI's newer clients ask for."""

    async def responses(request: Request) -> Response:
        body = await read(request, services, ResponsesRequest, values_of_conversations(services))
        its_tools = offered_of(body)
        turn, given = turn_in(body, services, its_tools), parameters_of(body)
        most = services.config.max_top_n_tokens
        candidates = candidates_of(body, is_read=turn.reading is not None, most=most)
        wanted = scored(turn.prompt_request(given), candidates, of_prompt=False)
        scoring = None if candidates is None else Scoring(candidates, services.tokenizer)
        model = body.model or services.adapters.base
        head = answers.Head(request.state.request_id, model, echo_of(body), its_tools.named, created_of(request))
        frames, shape = partial(ResponseFrames, head, scoring), partial(answers.response, head, scoring)
        told: dict[str, Any] = {"is_stream": body.stream is True, "frames": frames, "shape": shape}
        return await answer_turn(request, services, turn, wanted, **told)

    async def input_tokens(request: Request) -> Response:
        body = await read(request, services, InputRequest, values_of_conversations(services))
        turn = turn_in(body, services, offered_of(body))
        count = await num_prompt_tokens(request, services, turn)
        told: answers.InputTokens = {"object": "response.input_tokens", "input_tokens": count}
        return json_response(told)

    path, errors = "/v1/responses", ErrorAnswer
    summary = "OpenAI's responses; server-sent events if `stream` is true"
    shapes = (ResponsesRequest, answers.ResponseAnswer)
    add_post(app, path, responses, summary, *shapes, events=ResponseEvent, errors=errors)
    summary = "How many tokens the prompt of a response has"
    add_post(app, f"{path}/input_tokens", input_tokens, summary, InputRequest, answers.InputTokens, errors=errors)


def turn_in(body: InputRequest, services: Services, its_tools: Offered) -> Turn:
    """What a body waits for. Raises ValidationError."""
    body.refuse_what_is_not_served()
    return turn_of(services, transcript_of(body), its_tools.offer, variables_of(body), model=body.model)
