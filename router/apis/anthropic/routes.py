"""Anthropic's routes, `/v1/messages` and `/v1/messages/count_tokens`: bodies of requests, and how they are answered.

As strict and as lenient as the other APIs' bodies: no value is taken for another, null means absent, and unknown
fields are ignored. Fields and blocks with a meaning that is not served are refused, but for tools that Anthropic's
servers would run: the model does not get to see those. More lenient than Anthropic's own API: `max_tokens` may be
absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from router.apis.anthropic import answers
from router.apis.anthropic.streams import PING, MessageEvent, MessageFrames
from router.apis.document import add_post
from router.apis.openai.requests import ModelName
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
from router.chat.prompting import thinking
from router.chat.tools import Offer, Tool, ToolChoice, offer, tool_in
from router.chat.transcript import BETWEEN, Transcript, result_text_of, string_of, text_of
from router.errors import ValidationError
from router.requests.grammars import grammar_of_flat_format
from router.requests.schemas import GenerateParameters, Integer, Lenient, NotServed, drawn

Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Message(Lenient):
    """One turn of a conversation."""

    role: str = Field(description="`user`, `assistant` or `system`.")
    content: str | Blocks = Field(description="A text, or blocks: `text`, `tool_use`, `tool_result`, `thinking`.")


class Thinking(Lenient):
    """Whether the model thinks before it answers, where its chat template lets one choose."""

    type: str = Field(description="`enabled`, `adaptive` or `disabled`.")
    budget_tokens: Integer | None = Field(default=None, description="Ignored: `max_tokens` bounds everything.")


class ContextManagement(Lenient):
    """What is left out of a long conversation."""

    edits: Blocks | None = Field(default=None, description="`clear_thinking_20251015` alone.")


class OutputConfig(Lenient):
    """How the answer looks."""

    format: dict[str, Any] | None = Field(default=None, description="A `json_schema` that the answer keeps to.")
    effort: str | None = Field(default=None, description="How long to think, where the chat template asks for it.")


class CountRequest(Lenient):
    """The body of `/v1/messages/count_tokens`."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "container": NotServed(),
        "mcp_servers": NotServed((None, [])),
        "output_format": NotServed(),
        "inference_geo": NotServed(sentence="is not served: one server is where it is; leave it out"),
    }

    messages: Annotated[list[Message], Field(fail_fast=True)]
    model: ModelName | None = None
    system: str | Blocks | None = Field(default=None, description="The system prompt.")
    thinking: Thinking | None = None
    tools: Blocks | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: dict[str, Any] | None = Field(default=None, description="`auto`, `any`, `tool` or `none`.")
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = Field(default=None, description="Earlier thinking may be left out.")

    def ignored(self) -> list[str]:
        """See `Lenient`; tools that the model does not get to see among them."""
        left_out = (str(tool.get("type")) for tool in self.tools or () if _is_run_elsewhere(tool))
        return super().ignored() + [f"tools.{kind}" for kind in dict.fromkeys(left_out)]


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`."""

    max_tokens: Integer | None = Field(default=None, description="Absent: as many as `max_total_tokens` leaves.")
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        default=None, description="End before the first of these."
    )
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    temperature: float | None = Field(default=None, description="0 to 1; 0: the most likely tokens. Absent: 1.")
    top_p: float | None = None
    top_k: Integer | None = Field(default=None, description="Keep the k likeliest tokens; 0: all.")
    metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
    speculate: Integer | None = Field(default=None, description="Not Anthropic's, as on TGI's routes.")


# What messages may consist of, for each role.
ROLES: Mapping[str, Sequence[str]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
TEXT = ("text",)
# A variable that templates of models which may think have, for each type of `thinking`.
THINKING: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("enabled", "adaptive", "between_tools"), thinking(True)),
    "disabled": thinking(False),
}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}  # for templates

# What Claude Code's system prompt begins with. The rest of the line may change with each request, and so the prefix.
BILLING = "x-anthropic-billing-header:"
CLEAR_THINKING = "clear_thinking_20251015"
# Tools that Anthropic's servers would run, without the date of their version.
RUN_ELSEWHERE = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")


def parameters_of(body: MessagesRequest) -> GenerateParameters:
    """How to generate. Raises ValidationError."""
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise ValidationError(f"`temperature` must be >= 0 and <= 1. Given: {body.temperature}")
    if body.top_k is not None and body.top_k < 0:
        raise ValidationError(f"`top_k` must be >= 0. Given: {body.top_k}")
    wanted = body.output_config.format if body.output_config is not None else None
    return GenerateParameters(
        **drawn(body.temperature, top_p=body.top_p, top_k=body.top_k or None),
        stop=body.stop_sequences,
        max_new_tokens=body.max_tokens,
        speculate=body.speculate,
        grammar=grammar_of_flat_format("output_config.format", wanted, ("json_schema",)),
    )


def variables_of(body: CountRequest) -> Mapping[str, Any]:
    """What `thinking` and an effort mean to a chat template. Raises ValidationError."""
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None and effort not in EFFORTS:
        raise ValidationError(f"`output_config.effort` is {effort[:40]}: give one of {', '.join(EFFORTS)}")
    told = {} if effort is None else {"reasoning_effort": EFFORTS[effort]}
    if body.thinking is None:
        return told
    if body.thinking.type not in THINKING:
        raise ValidationError(f"`thinking.type` is {body.thinking.type[:40]}: give one of {', '.join(THINKING)}")
    return {**told, **THINKING[body.thinking.type]}


def transcript_of(body: CountRequest) -> Transcript:
    """The messages, behind `system`. Raises ValidationError."""
    found = Transcript()
    if system := _system_of(body):
        found.say("system", system)
    first_thought = _first_thought(body)
    for number, message in enumerate(body.messages):
        _add(found, f"messages.{number}", message, forgets=number < first_thought)
    return found


def _system_of(body: CountRequest) -> str:
    """The system prompt without what is for Anthropic's bills. Raises ValidationError."""
    if isinstance(body.system, str):
        return _without_billing(body.system)
    text_of("system", body.system, TEXT)  # which tells what is no text
    texts = (_without_billing(block["text"]) for block in body.system or ())
    return BETWEEN.join(filter(None, texts))


def _without_billing(text: str) -> str:
    line, _, rest = text.partition("\n")
    return rest if line.startswith(BILLING) else text


def _first_thought(body: CountRequest) -> int:
    """The first message whose thinking is kept, by `context_management`. Raises ValidationError."""
    kept: Any = "all"
    for number, edit in enumerate((body.context_management and body.context_management.edits) or ()):
        where = f"context_management.edits.{number}"
        if edit.get("type") != CLEAR_THINKING:
            raise ValidationError(
                f"`{where}` is of type {str(edit.get('type'))[:40]}, and {CLEAR_THINKING} alone is served: leave it "
                "out, and shorten the conversation before it is sent"
            )
        given = {"value": 1} if edit.get("keep") is None else edit["keep"]
        is_all = given == "all" or (isinstance(given, dict) and given.get("type") == "all")
        kept = "all" if is_all else given.get("value") if isinstance(given, dict) else given
        if not is_all and (type(kept) is not int or kept < 1):
            raise ValidationError(f"`{where}.keep` must be all, or thinking_turns with a `value` of 1 or more")
    turns = [number for number, message in enumerate(body.messages) if _is_question(message)]
    if turns and not any(map(_has_thinking, body.messages[turns[-1] :])):
        turns.pop()  # a question without an answer is no turn yet
    return 0 if kept == "all" or len(turns) <= kept else turns[-kept]


def _has_thinking(message: Message) -> bool:
    blocks = message.content if message.role == "assistant" and not isinstance(message.content, str) else ()
    return any(block.get("type") == "thinking" for block in blocks)


def _is_question(message: Message) -> bool:
    """Whether a turn of the model follows, and not more of the one that has called tools."""
    is_text = isinstance(message.content, str) or any(one.get("type", "text") == "text" for one in message.content)
    return message.role == "user" and is_text


def _add(transcript: Transcript, where: str, message: Message, *, forgets: bool) -> None:
    """forgets: whether its thinking is left out."""
    if message.role not in ROLES:
        raise ValidationError(f"`{where}.role` is {message.role[:40]}: give one of {', '.join(ROLES)}")
    if isinstance(message.content, str):
        transcript.say(message.role, message.content)
        return
    between = BETWEEN  # but for the assistant's blocks, which are one text
    for number, block in enumerate(message.content):
        if not (forgets and block.get("type") == "thinking"):
            _add_block(transcript, f"{where}.content.{number}", message.role, block, between)
        if message.role == "assistant" and block.get("type", "text") == "text":
            between = ""


def _add_block(transcript: Transcript, where: str, role: str, block: Mapping[str, Any], between: str) -> None:
    match (role, block.get("type", "text")):
        case (_, "text"):
            transcript.say(role, string_of(where, block, "text"), between)
        case ("assistant", "thinking"):
            transcript.think(string_of(where, block, "thinking"))
        case ("assistant", "redacted_thinking"):
            pass  # of another server, which alone can read it
        case ("assistant", "tool_use"):
            _add_call(transcript, where, block)
        case ("user", "tool_result"):
            _add_result(transcript, where, block)
        case (_, kind):
            raise ValidationError(
                f"`{where}` is of type {str(kind)[:40]}: of the role {role}, the model reads "
                f"{' and '.join(ROLES[role])} alone; leave it out"
            )


def _add_call(transcript: Transcript, where: str, block: Mapping[str, Any]) -> None:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise ValidationError(f"`{where}.input` must be an object")
    id, name = string_of(where, block, "id"), string_of(where, block, "name")
    transcript.call(f"{where}.input", id, name, arguments)


def _add_result(transcript: Transcript, where: str, block: Mapping[str, Any]) -> None:
    content = block.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise ValidationError(f"`{where}.content` must be a text or a list of blocks")
    text = result_text_of(f"{where}.content", content, TEXT)
    # Templates know no results that are errors: the model has to read it.
    transcript.answer_call(
        string_of(where, block, "tool_use_id"), f"Error: {text}" if block.get("is_error") is True else text
    )


def offer_of(body: CountRequest) -> Offer:
    """The tools that the model gets to see. Raises ValidationError."""
    tools = [
        _tool(f"tools.{number}", tool) for number, tool in enumerate(body.tools or []) if not _is_run_elsewhere(tool)
    ]
    return offer(tools, _choice(body.tool_choice or {"type": "auto"}))


def _is_run_elsewhere(tool: Mapping[str, Any]) -> bool:
    return str(tool.get("type")).startswith(RUN_ELSEWHERE)


def _tool(where: str, given: Mapping[str, Any]) -> Tool:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise ValidationError(
            f"`{where}` is of type {str(kind)[:40]}, and only tools of the client's own are served: leave it out, or "
            "give a tool with an `input_schema`"
        )
    tool = tool_in(where, given, "input_schema")
    if tool.parameters is None:
        raise ValidationError(f"`{where}.input_schema` must be a JSON schema of the type object")
    return tool


def _choice(given: Mapping[str, Any]) -> ToolChoice:
    is_parallel = given.get("disable_parallel_tool_use") is not True
    match given.get("type"):
        case "auto":
            return ToolChoice("auto", is_parallel=is_parallel)
        case "any":
            return ToolChoice("required", is_parallel=is_parallel)
        case "tool":
            return ToolChoice("required", string_of("tool_choice", given, "name"), is_parallel=False)
        case "none":
            return ToolChoice("none")
        case kind:
            raise ValidationError(f"`tool_choice.type` is {str(kind)[:40]}: give auto, any, tool or none")


def add_anthropic_routes(app: FastAPI, services: Services) -> None:
    """Serve what Anthropic's clients ask for."""

    async def messages(request: Request) -> Response:
        body = await read(request, services, MessagesRequest, values_of_conversations(services))
        turn, given = turn_in(body, services), parameters_of(body)
        head = answers.Head(f"msg_{request.state.request_id}", body.model or services.adapters.base)
        frames, shape = partial(MessageFrames, head), partial(answers.message, head)
        told: dict[str, Any] = {"is_stream": body.stream is True, "frames": frames, "shape": shape, "ping": PING}
        return await answer_turn(request, services, turn, turn.prompt_request(given), **told)

    async def count_tokens(request: Request) -> Response:
        turn = turn_in(await read(request, services, CountRequest, values_of_conversations(services)), services)
        told: answers.TokenCount = {"input_tokens": await num_prompt_tokens(request, services, turn)}
        return json_response(told)

    path, errors = "/v1/messages", answers.MessageError
    summary = "Anthropic's messages; server-sent events if `stream` is true"
    shapes = (MessagesRequest, answers.MessageAnswer)
    add_post(app, path, messages, summary, *shapes, events=MessageEvent, errors=errors)
    summary = "How many tokens the prompt of such a message has"
    add_post(app, f"{path}/count_tokens", count_tokens, summary, CountRequest, answers.TokenCount, errors=errors)


def turn_in(body: CountRequest, services: Services) -> Turn:
    """What a body waits for. Raises ValidationError."""
    body.refuse_what_is_not_served()
    transcript, offered = transcript_of(body), offer_of(body)
    return turn_of(services, transcript, offered, variables_of(body), model=body.model, continues=True)
