"""What the bodies of OpenAI's Responses API ask for, in the words of the rest of the router, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.chat.prompting import effort
from router.chat.tools import Offer, Tool, ToolChoice, allowed_of, offer, tool_in
from router.chat.transcript import Transcript, string_of, text_of
from router.errors import ValidationError
from router.openai.logprobs import OF_RESPONSE, candidates_of_response
from router.openai.response_format import grammar_of_format
from router.openai.responses.schemas import InputRequest, ResponsesRequest
from router.schemas import MOST_VALUES, GenerateParameters, GrammarParameters, refuse_excess_within

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("text", "input_text", "output_text")
REASONING = ("text", "reasoning_text")
FORMATS = ("text", "json_object", "json_schema")
MOST_METADATA, MOST_NAME, MOST_VALUE = 16, 64, 512  # OpenAI's: pairs, and their characters


def parameters_of(body: ResponsesRequest) -> GenerateParameters:
    """How to generate. Raises ValidationError."""
    _check_metadata(body.metadata or {})
    is_greedy = body.temperature == 0
    return GenerateParameters(
        temperature=None if is_greedy else body.temperature,
        do_sample=not is_greedy,
        top_p=None if is_greedy else body.top_p,
        max_new_tokens=body.max_output_tokens,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        grammar=_grammar(body.text.format if body.text is not None else None),
    )


def candidates_of(body: ResponsesRequest, *, is_read: bool, most: int) -> int | None:
    """How many candidates are wanted with each token; None: no log-probabilities. Raises ValidationError.

    is_read: whether the answer is taken apart. Which of its tokens are the text's, nobody could say for sure then.
    """
    candidates = candidates_of_response(body.include or (), body.top_logprobs, most)
    if is_read and candidates is not None:
        raise ValidationError(
            f"`include` has {OF_RESPONSE}, which answers that may have calls of tools or reasoning do not: leave it out"
        )
    return candidates


def _grammar(given: Mapping[str, Any] | None) -> GrammarParameters | None:
    """Constraint on the text. Raises ValidationError."""
    if given is None:
        return None
    kind, schema = given.get("type"), given.get("schema")
    if kind not in FORMATS:
        raise ValidationError(f"`text.format.type` is {str(kind)[:40]}: give one of {', '.join(FORMATS)}")
    if kind != "json_schema":
        return grammar_of_format({"type": kind})
    if not isinstance(schema, dict):
        raise ValidationError("`text.format.schema` must be a JSON schema, an object")
    return GrammarParameters(type="json", value=schema)


def _check_metadata(given: Mapping[str, str]) -> None:
    if len(given) > MOST_METADATA or any(len(n) > MOST_NAME or len(v) > MOST_VALUE for n, v in given.items()):
        raise ValidationError(
            f"`metadata` may have {MOST_METADATA} pairs of names of {MOST_NAME} and values of {MOST_VALUE} characters: "
            "shorten it"
        )


def variables_of(body: InputRequest) -> Mapping[str, bool | str]:
    """What `reasoning` means to a chat template."""
    return effort(body.reasoning.effort if body.reasoning is not None else None)


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
            name, call_id = string_of(where, item, "name"), string_of(where, item, "call_id")
            transcript.call(f"{where}.arguments", call_id, name, _arguments(where, item))
        case "function_call_output":
            transcript.answer_call(string_of(where, item, "call_id"), _text(where, item, "output", TEXTS))
        case "reasoning":
            transcript.think(_text(where, item, "content", REASONING))
        case "item_reference":
            raise ValidationError(
                f"`{where}` refers to an item that is stored, and none are stored here: send it whole"
            )
        case kind:
            raise ValidationError(
                f"`{where}` is of type {str(kind)[:40]}: the model reads message, function_call, function_call_output "
                "and reasoning alone; leave it out"
            )


def _check_arguments(items: str | Sequence[Mapping[str, Any]] | None) -> None:
    """Raises ValidationError for more values within all arguments than a body may have, before any is built."""
    if items is None or isinstance(items, str):
        return
    arguments = (item.get("arguments") for item in items)
    refuse_excess_within((one.encode() for one in arguments if isinstance(one, str)), MOST_VALUES)


def _text(where: str, item: Mapping[str, Any], name: str, kinds: Sequence[str]) -> str:
    content = item.get(name)
    if not (content is None or isinstance(content, str | list)):
        raise ValidationError(f"`{where}.{name}` must be a text or a list of parts")
    return text_of(f"{where}.{name}", content, kinds)


def _arguments(where: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        found = orjson.loads(string_of(where, item, "arguments") or "{}")
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValidationError(f"`{where}.arguments` must be a JSON object, as a string")
    return found


def offer_of(body: InputRequest) -> Offer:
    """The tools that the model gets to see. Raises ValidationError."""
    tools = [_tool(f"tools.{number}", tool) for number, tool in enumerate(body.tools or [])]
    choice = body.tool_choice or "auto"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice)
    return offer(tools, _choice(choice, body.parallel_tool_calls is not False))


def _allowed(tools: Sequence[Tool], given: Mapping[str, Any]) -> tuple[list[Tool], str]:
    """Some of the tools, and the mode. Raises ValidationError."""
    listed, mode = given.get("tools"), given.get("mode")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise ValidationError("`tool_choice` of allowed_tools needs a `mode`, auto or required, and a list of `tools`")
    return allowed_of(tools, [one.get("name") if isinstance(one, Mapping) else one for one in listed]), mode


def _tool(where: str, given: Mapping[str, Any]) -> Tool:
    if given.get("type") != "function":
        raise ValidationError(
            f"`{where}` is of type {str(given.get('type'))[:40]}, and only functions are served: leave it out"
        )
    return tool_in(where, given)


def _choice(given: str | Mapping[str, Any], is_parallel: bool) -> ToolChoice:
    if isinstance(given, Mapping) and given.get("type") == "function":
        return ToolChoice("required", string_of("tool_choice", given, "name"), is_parallel=False)
    match given:
        case "auto" | "none" | "required":
            return ToolChoice(given, is_parallel=is_parallel)
    kind = given if isinstance(given, str) else str(given.get("type"))
    raise ValidationError(f"`tool_choice` is {kind[:40]}: give auto, none, required, or one function by its name")
