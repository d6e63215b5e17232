"""From messages and tools to the rendering of a prompt, by the model's template and in its own format.

Templates get what transformers gives them: tools in OpenAI's shape, calls with their arguments as objects, results in
messages of the role `tool`. A template that knows no tools gets messages in plain text that say the same, and the model
is told to answer with a call in JSON; that is TGI's way for all models, and its `tool_prompt` is the sentence for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from router.chat import turns
from router.chat.formats import ToolFormat
from router.chat.template import ChatTemplate
from router.chat.tools import Offer
from router.errors import ValidationError
from router.requests.schemas import Rendering
from router.sandbox.pool import Sandbox

Message = dict[str, Any]
KNOWS_TOOLS = re.compile(r"\b(?:xml_)?tools\b")
NINE = re.compile(r"[A-Za-z0-9]{9}")
INSTRUCTION = (
    "You can call functions. To call one, answer with nothing but JSON in the format "
    '{"name": the name of the function, "arguments": an object with its arguments}. Where no function helps, answer in '
    "words."
)


def effort(given: str | None) -> Mapping[str, Any]:
    """What an effort of reasoning means to a chat template: `none`, or a word that it knows; None: nothing."""
    if given is None:
        return {}
    return thinking(given != "none") | ({} if given == "none" else {"reasoning_effort": given})


def thinking(is_on: bool) -> dict[str, Any]:
    """Whether the model thinks, in the variables of the families' templates."""
    return {"enable_thinking": is_on, "thinking": is_on, "reasoning": is_on} | ({} if is_on else {"thinking_budget": 0})


def rendering(
    template: ChatTemplate,
    aside: Sandbox,
    messages: Sequence[Message],
    offered: Offer,
    its: ToolFormat | None,
    *,
    instruction: str | None = None,
    **options: Any,
) -> Rendering:
    """How to make the prompt: `ChatTemplate.render` with these `options`. Raises ValidationError.

    messages: in the shape that templates take, with arguments as objects. its: the format in which the model calls
    tools. instruction: to use in place of ours; where the template says itself how tools are called, it is added.
    """
    if offered.tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        template.choose(bool(offered.tools))
        return partial(_with_tools, template, aside, messages, offered, its, instruction, options)
    return partial(template.render, aside, messages, **options)


async def _with_tools(
    template: ChatTemplate,
    aside: Sandbox,
    messages: Sequence[Message],
    offered: Offer,
    its: ToolFormat | None,
    instruction: str | None,
    options: Mapping[str, Any],
    owner: str,
) -> str:
    """The prompt of a conversation with tools. Raises ValidationError."""
    has_tools = bool(offered.tools)
    knows = knows_tools(template.choose(has_tools))
    if knows and has_tools:
        knows = (await template.taken(aside, has_tools=True)).tools != ""
    told, tools = for_template(messages, offered, its, instruction, knows_tools=knows)
    written = partial(_written, its) if its is not None else turns.in_json
    return await template.render(aside, told, owner, tools=tools, written=written, **options)


def knows_tools(template: str) -> bool:
    """Whether a template may have something to say of tools."""
    return KNOWS_TOOLS.search(template) is not None


def _written(its: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls in the model's own marks."""
    return f"{its.begin}{turns.in_json(calls)}{its.end}"


def for_template(
    messages: Sequence[Message],
    offered: Offer,
    its: ToolFormat | None,
    instruction: str | None = None,
    *,
    knows_tools: bool,
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """(messages, tools) to render a template with. Raises ValidationError. As for `rendering`."""
    tools = offered.for_template() or None
    if knows_tools:
        told = _as_expected(messages, its) if its else list(messages)
        return (_with_words(told, instruction) if tools and instruction else told), tools
    told = _in_words(messages)
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = _with_words(told, f"{listed}\n{instruction or INSTRUCTION}", at_first=True)
    return told, None


def call(id: str | None, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer, as templates take it in the `tool_calls` of a message."""
    told: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return told if id is None else {"id": id, **told}


def _with_words(messages: list[Message], words: str, *, at_first: bool = False) -> list[Message]:
    """The same with these words at the end of the last message that is not the model's own.

    at_first: of the first one, so that the prompt of the next turn begins alike.
    """
    order = range(len(messages)) if at_first else reversed(range(len(messages)))
    at = next((at for at in order if messages[at]["role"] != "assistant"), None)
    if at is None:
        raise ValidationError("`messages` has nothing but answers, so that no tools can be told: give a question first")
    told = {**messages[at], "content": f"{messages[at]['content']}\n---\n{words}"}
    return [*messages[:at], told, *messages[at + 1 :]]


def _as_expected(messages: Sequence[Message], its: ToolFormat) -> list[Message]:
    """Ids of calls and reasoning as templates of some families want them."""
    if its.ids_of_nine:
        return _with_ids(messages, lambda call, _: _short(call.get("id", "")))
    if its.ids_of_names:
        return _with_ids(messages, lambda call, number: f"functions.{call['function']['name']}:{number}")
    return [_with_thoughts(message) for message in messages] if its.channels else list(messages)


def _with_ids(messages: Sequence[Message], id_of: Callable[[Message, int], str]) -> list[Message]:
    """With other ids of calls, the same wherever they are. id_of: of a call, by its number in the conversation."""
    told: list[Message] = []
    renamed: dict[str, str] = {}
    number = 0
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = []
            for call in message["tool_calls"]:
                renamed[call.get("id", "")] = id = id_of(call, number)
                changed["tool_calls"].append({**call, "id": id})
                number += 1
        if (answered := message.get("tool_call_id")) is not None:
            changed["tool_call_id"] = renamed.get(answered) or id_of({"id": answered, "function": {"name": ""}}, number)
        told.append(changed)
    return told


def _with_thoughts(message: Message) -> Message:
    """What harmony's templates call `thinking`, which stands for all that is said before a call."""
    if not (thoughts := message.get("reasoning_content")):
        return message
    if "tool_calls" not in message:
        return {**message, "thinking": thoughts}
    return {**message, "thinking": "\n\n".join(filter(None, (thoughts, message["content"]))), "content": ""}


def _short(id: str) -> str:
    return id if NINE.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _in_words(messages: Sequence[Message]) -> list[Message]:
    """Calls and their results as texts of the assistant and of the user, who still take turns."""
    told: list[Message] = []
    words: list[list[str]] = []
    names: dict[str, str] = {}  # of the functions by the ids of their calls
    follows_result = False
    for message in messages:
        calls = [one["function"] for one in message.get("tool_calls", ())]
        names |= {one.get("id", ""): one["function"]["name"] for one in message.get("tool_calls", ())}
        is_result = message["role"] == "tool"
        said = [message["content"]] if message["content"] else []
        said += [json.dumps({"name": one["name"], "arguments": one["arguments"]}, ensure_ascii=False) for one in calls]
        if is_result:
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "")
            said = [f"The function {name} returned: {message['content']}"]
        if told and told[-1]["role"] == "user" and (is_result or (follows_result and message["role"] == "user")):
            words[-1] += said
        else:
            told.append({"role": "user"} if is_result else {k: v for k, v in message.items() if k != "tool_calls"})
            words.append(said)
        follows_result = is_result
    return [{**one, "content": "\n".join(said)} for one, said in zip(told, words, strict=True)]
