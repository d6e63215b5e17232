"""Conversations in the turns that a model's chat template takes.

Templates are written for one system message and two sides that take turns. Agents send more: system messages between
turns, words of the user right behind a tool's result, several calls in one message. Some templates refuse that, and
others move a part of it or leave it out without a word. What a template takes is found by trying it on short
conversations; what it does not take is said otherwise, where it stood, so that a prompt still begins as the one of the
turn before:

* a system message as words of the user; several at the start as one
* words of the user behind a result as the end of that result
* several calls as one message each, followed by its result
* arguments of calls as text of JSON
* calls that it would leave out as words of the assistant, as the model writes them
* words beside a call that it would put behind it not at all
* tools by the name of another variable (`xml_tools`)

Left out: a conversation that no such change makes fit. The template's refusal is the client's answer then.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Messages = Sequence[Message]
BETWEEN = "\n"  # what separates texts that become one

# Words of the conversations that are tried, none of which any template has.
FIRST, SECOND, THIRD, FOURTH, LAST = (f"zq{word}" for word in ("amber", "birch", "cedar", "dahlia", "elder"))
IDS = ("call00001", "call00002")  # of nine characters, as some templates want them
TOOL_NAME = "zqlook"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "Where"}}}
TOOL = {"type": "function", "function": {"name": TOOL_NAME, "description": "Looks", "parameters": PARAMETERS}}
VARIABLES = ("tools", "xml_tools")  # from which templates show tools


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


USER = _said("user", FIRST)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a template writes into the prompt where it stands.

    A system message at the start is taken unless it is refused: a template that leaves it out does so for everybody.
    """

    system: bool = True
    later_system: bool = True
    user_after_result: bool = True
    several_calls: bool = True
    arguments_as_objects: bool = True
    calls: bool = True
    words_beside_calls: bool = True
    tools: str = "tools"  # the variable that tools are shown from; empty: they are not shown


def is_plain(messages: Messages) -> bool:
    """Whether a conversation has nothing that must be tried: no system message, and no result of a tool."""
    return not any(one["role"] in ("system", "tool") for one in messages)


Write = Callable[..., Awaitable[str | None]]


async def tried(write: Write, *, has_tools: bool) -> Taken:
    """What a template takes. write: gives a conversation's prompt; None: the template refuses it.

    has_tools: whether tools are offered; else they are not asked about. write: also gets the variable for them.
    Of what goes wrong without it too, nothing is known: it is taken then, so that the client learns why.
    """
    trial = _Trial(write, await _tools(write) if has_tools else VARIABLES[0])
    objects = await trial.takes_objects()
    asked = trial.conversation(objects)
    system = await trial.takes_system(asked)
    is_shown = await trial.shows(asked, FIRST, SECOND, THIRD)
    takes_results = await trial.shows(asked, FIRST, THIRD)
    return Taken(
        system=system,
        later_system=system and await trial.takes_later_system(),
        user_after_result=not takes_results or await trial.takes_words_behind(asked),
        several_calls=not is_shown or await trial.takes_several_calls(objects),
        arguments_as_objects=objects,
        calls=is_shown or not takes_results,
        words_beside_calls=not is_shown or await trial.takes_words_beside_calls(asked),
        tools=trial.tools,
    )


class _Trial:
    """Short conversations, and whether a template takes each. tools: the variable that tools are shown from."""

    def __init__(self, write: Write, tools: str) -> None:
        self._write, self.tools = write, tools

    async def shows(self, messages: Messages, *words: str) -> bool:
        """Whether the prompt has these words, in this order."""
        prompt = await self._write(messages, self.tools)
        places = [-1] if prompt is None else [prompt.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    @staticmethod
    def conversation(
        objects: bool, calls: Sequence[str] = (SECOND,), results: Sequence[str] = (THIRD,)
    ) -> list[Message]:
        """A question, calls, and their results. objects: whether arguments are such."""
        found = [USER, _calling(*calls), *(_result(number, text) for number, text in enumerate(results))]
        return found if objects else _with_arguments_as_text(found)

    async def takes_objects(self) -> bool:
        """Unless it takes text alone."""
        if await self.shows(self.conversation(True), FIRST, THIRD):
            return True
        return not await self.shows(self.conversation(False), FIRST, THIRD)

    async def takes_system(self, asked: Messages) -> bool:
        """Some show it only where the user speaks last."""
        if not await self.shows([USER], FIRST):
            return True
        begun = [_said("system", LAST), USER]
        if await self._write(begun, self.tools) is None:
            return False
        if not await self.shows(begun, LAST, FIRST) or not await self.shows(asked, FIRST, THIRD):
            return True
        return await self.shows([_said("system", LAST), *asked], LAST, FIRST, THIRD)

    async def takes_later_system(self) -> bool:
        begun = [_said("system", SECOND), USER, _said("system", THIRD), _said("assistant", "Yes.")]
        more = [*begun, _said("user", FOURTH), _said("system", LAST)]
        return not await self.shows([USER], FIRST) or await self.shows(more, FIRST, THIRD, FOURTH, LAST)

    async def takes_words_behind(self, asked: Messages) -> bool:
        return await self.shows([*asked, _said("user", FOURTH)], FIRST, THIRD, FOURTH)

    async def takes_several_calls(self, objects: bool) -> bool:
        both = self.conversation(objects, (SECOND, LAST), (THIRD, FOURTH))
        return await self.shows(both, FIRST, SECOND, LAST, THIRD, FOURTH)

    async def takes_words_beside_calls(self, asked: Messages) -> bool:
        """Those that it leaves out do no harm."""
        said = [asked[0], {**asked[1], "content": FOURTH}, *asked[2:]]
        return not await self.shows(said, FIRST, SECOND, FOURTH)


async def _tools(write: Write) -> str:
    """The variable that a template shows tools from; empty: it shows none."""
    if FIRST not in (await write([USER], "") or ""):
        return VARIABLES[0]  # nothing is known
    for name in VARIABLES:
        if TOOL_NAME in (await write([USER], name) or ""):
            return name
    return ""


def _calling(*words: str) -> Message:
    calls = [
        {"id": id, "type": "function", "function": {"name": TOOL_NAME, "arguments": {"at": word}}}
        for id, word in zip(IDS, words, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": IDS[number], "name": TOOL_NAME}


def fitted(messages: Messages, taken: Taken, written: Callable[[Sequence[Message]], str]) -> list[Message]:
    """The same conversation in turns that the template takes. written: calls as the model writes them."""
    found = list(messages)
    if not taken.words_beside_calls:
        found = [{**one, "content": ""} if one.get("tool_calls") else one for one in found]
    if not taken.calls:
        found = [_in_words(one, written) for one in found]
    if not taken.several_calls:
        found = _one_call_each(found)
    if not taken.later_system:
        found = _without_later_system(found, taken.system)
    if not taken.user_after_result:
        found = _words_in_results(found)
    if not taken.arguments_as_objects:
        found = _with_arguments_as_text(found)
    return found


def _in_words(message: Message, written: Callable[[Sequence[Message]], str]) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    said = BETWEEN.join(filter(None, (message["content"], written([call["function"] for call in calls]))))
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": said}


def in_json(calls: Sequence[Message]) -> str:
    """Calls as a list in JSON."""
    told = [{"name": one["name"], "arguments": one["arguments"]} for one in calls]
    return json.dumps(told, ensure_ascii=False)


def _with_arguments_as_text(messages: Messages) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _without_later_system(messages: Messages, is_first_taken: bool) -> list[Message]:
    """System messages as words of the user, who still takes turns; at the start as one message, if there may be one."""
    found = _Gathered()
    is_start, was_system = True, False  # whether the last one was a system message before it became the user's
    for message in messages:
        is_system = message["role"] == "system"
        is_start = is_start and is_system
        if is_start and is_first_taken:
            found.join(message) if found.role else found.add(message)
            continue
        if found.role == "user" and (is_system or (was_system and message["role"] == "user")):
            found.join(message)
        else:
            found.add({**message, "role": "user"} if is_system else message)
        was_system = is_system
    return found.messages()


def _words_in_results(messages: Messages) -> list[Message]:
    found = _Gathered()
    for message in messages:
        if found.role == "tool" and message["role"] == "user":
            found.join(message)
        else:
            found.add(message)
    return found.messages()


class _Gathered:
    """Messages, of which some become more of the one before."""

    def __init__(self) -> None:
        self._found: list[tuple[Message, list[str]]] = []

    @property
    def role(self) -> str:
        """Of the last one; empty: there is none."""
        return str(self._found[-1][0]["role"]) if self._found else ""

    def add(self, message: Message) -> None:
        self._found.append((message, [message["content"]]))

    def join(self, message: Message) -> None:
        """More of the last one."""
        self._found[-1][1].append(message["content"])

    def messages(self) -> list[Message]:
        return [
            one if len(texts) == 1 else {**one, "content": BETWEEN.join(filter(None, texts))}
            for one, texts in self._found
        ]


def _one_call_each(messages: Messages) -> list[Message]:
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        found += _apart(message, results)
    return found


def _apart(message: Message, results: Messages) -> list[Message]:
    """A message for each call, with the results of that call. A result that names none of them stands at the end."""
    its: dict[object, list[Message]] = {}
    for one in results:
        its.setdefault(one.get("tool_call_id"), []).append(one)
    found: list[Message] = []
    for number, call in enumerate(message["tool_calls"]):
        said = message if number == 0 else {"role": message["role"], "content": ""}
        found += [{**said, "tool_calls": [call]}, *(its.pop(call["id"], ()) if "id" in call else ())]
    return [*found, *(one for left in its.values() for one in left)]
