"""What the bodies of Anthropic's API ask for, in the words of the rest of the router, and what of them is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.anthropic.schemas import CountRequest, Message, MessagesRequest
from router.chat.tools import Offer, Tool, ToolChoice, offer, tool_in
from router.chat.transcript import BETWEEN, Transcript, string_of, text_of
from router.errors import ValidationError
from router.schemas import GenerateParameters, GrammarParameters

# What messages may consist of, for each role.
ROLES: Mapping[str, Sequence[str]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
TEXT = ("text",)
# A variable that templates of models which may think have, for each type of `thinking`.
THINKING: Mapping[str, Mapping[str, bool]] = {
    "enabled": {"enable_thinking": True},
    "adaptive": {"enable_thinking": True},
    "between_tools": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
}


def parameters_of(body: MessagesRequest) -> GenerateParameters:
    """How to generate. Raises ValidationError."""
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise ValidationError(f"`temperature` must be >= 0 and <= 1. Given: {body.temperature}")
    if body.top_k is not None and body.top_k < 0:
        raise ValidationError(f"`top_k` must be >= 0. Given: {body.top_k}")
    is_greedy = body.temperature == 0
    return GenerateParameters(
        temperature=None if is_greedy else body.temperature,
        do_sample=not is_greedy,
        top_p=None if is_greedy else body.top_p,
        top_k=None if is_greedy else body.top_k or None,
        stop=body.stop_sequences,
        max_new_tokens=body.max_tokens,
        grammar=_grammar(body.output_config.format if body.output_config is not None else None),
    )


def _grammar(given: Mapping[str, Any] | None) -> GrammarParameters | None:
    """Constraint on the text. Raises ValidationError."""
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise ValidationError(f"`output_config.format.type` is {str(given.get('type'))[:40]}: give json_schema")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise ValidationError("`output_config.format.schema` must be a JSON schema, an object")
    return GrammarParameters(type="json", value=schema)


def variables_of(body: CountRequest) -> Mapping[str, bool]:
    """What `thinking` means to a chat template. Raises ValidationError."""
    if body.thinking is None:
        return {}
    if body.thinking.type not in THINKING:
        raise ValidationError(f"`thinking.type` is {body.thinking.type[:40]}: give one of {', '.join(THINKING)}")
    return THINKING[body.thinking.type]


def transcript_of(body: CountRequest) -> Transcript:
    """The messages, behind `system`. Raises ValidationError."""
    found = Transcript()
    if body.system:
        found.say("system", text_of("system", body.system, TEXT))
    for number, message in enumerate(body.messages):
        _add(found, f"messages.{number}", message)
    return found


def _add(transcript: Transcript, where: str, message: Message) -> None:
    if message.role not in ROLES:
        raise ValidationError(f"`{where}.role` is {message.role[:40]}: give one of {', '.join(ROLES)}")
    if isinstance(message.content, str):
        transcript.say(message.role, message.content)
        return
    between = BETWEEN  # but for the assistant's blocks, which are one text
    for number, block in enumerate(message.content):
        _add_block(transcript, f"{where}.content.{number}", message.role, block, between)
        between = "" if message.role == "assistant" else BETWEEN


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
    text = text_of(f"{where}.content", content, TEXT)
    # Templates know no results that are errors: the model has to read it.
    transcript.answer_call(
        string_of(where, block, "tool_use_id"), f"Error: {text}" if block.get("is_error") is True else text
    )


def offer_of(body: CountRequest) -> Offer:
    """The tools that the model gets to see. Raises ValidationError."""
    tools = [_tool(f"tools.{number}", tool) for number, tool in enumerate(body.tools or [])]
    return offer(tools, _choice(body.tool_choice or {"type": "auto"}))


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
