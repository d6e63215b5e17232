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
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}


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


def is_plain(messages: Messages) -> bool:
    """Whether a conversation has nothing that must be tried: no system message, and no result of a tool."""
    return not any(one["role"] in ("system", "tool") for one in messages)


async def tried(write: Callable[[Messages], Awaitable[str | None]]) -> Taken:
    """What a template takes. write: gives a conversation's prompt; None: the template refuses it.

    Of what goes wrong without it too, nothing is known: it is taken then, so that the client learns why.
    """

    async def shows(messages: Messages, *words: str) -> bool:
        prompt = await write(messages)
        places = [-1] if prompt is None else [prompt.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    user = _said("user", FIRST)
    system = later = after = several = objects = True
    if await shows([user], FIRST):
        system = await write([_said("system", SECOND), user]) is not None
        later = system and await shows(
            [
                *(_said("system", SECOND), user, _said("system", THIRD)),
                *(_said("assistant", "Yes."), _said("user", FOURTH), _said("system", LAST)),
            ],
            *(FIRST, THIRD, FOURTH, LAST),
        )
    asked = [user, _calling(SECOND), _result(0, THIRD)]
    both = [user, _calling(SECOND, LAST), _result(0, THIRD), _result(1, FOURTH)]
    if not await shows(asked, FIRST, THIRD):
        objects = not await shows(_with_arguments_as_text(asked), FIRST, THIRD)
    if not objects:
        asked, both = _with_arguments_as_text(asked), _with_arguments_as_text(both)
    if await shows(asked, FIRST, THIRD):
        after = await shows([*asked, _said("user", FOURTH)], FIRST, THIRD, FOURTH)
    if await shows(asked, FIRST, SECOND, THIRD):
        several = await shows(both, FIRST, SECOND, LAST, THIRD, FOURTH)
    return Taken(system, later, after, several, objects)


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calling(*words: str) -> Message:
    calls = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": {"at": word}}}
        for id, word in zip(IDS, words, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": IDS[number], "name": "look"}


def fitted(messages: Messages, taken: Taken) -> list[Message]:
    """The same conversation in turns that the template takes."""
    found = list(messages)
    if not taken.several_calls:
        found = _one_call_each(found)
    if not taken.later_system:
        found = _without_later_system(found, taken.system)
    if not taken.user_after_result:
        found = _words_in_results(found)
    if not taken.arguments_as_objects:
        found = _with_arguments_as_text(found)
    return found


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
    found: list[Message] = []
    was_system = False  # the last one of `found`, before it became the user's
    for message in messages:
        is_system = message["role"] == "system"
        if is_system and is_first_taken and all(one["role"] == "system" for one in found):
            found = [_joined(found[0], message) if found else message]
            continue
        last = found[-1]["role"] if found else ""
        if last == "user" and (is_system or (was_system and message["role"] == "user")):
            found[-1] = _joined(found[-1], message)
        else:
            found.append({**message, "role": "user"} if is_system else message)
        was_system = is_system
    return found


def _words_in_results(messages: Messages) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == "tool" and message["role"] == "user":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(message: Message, other: Message) -> Message:
    return {**message, "content": BETWEEN.join(filter(None, (message["content"], other["content"])))}


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
    found: list[Message] = []
    left = list(results)
    for number, call in enumerate(message["tool_calls"]):
        said = message if number == 0 else {"role": message["role"], "content": ""}
        its = [one for one in left if "id" in call and one.get("tool_call_id") == call["id"]]
        left = [one for one in left if one not in its]
        found += [{**said, "tool_calls": [call]}, *its]
    return [*found, *left]
