"""Messages as chat templates take them, from APIs that tell it in finer pieces: blocks of content, or items.

What one side says in a row becomes one message, because many templates want the sides to take turns.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from router.chat.streamed_values import NotThis, json_of
from router.chat.tools import MOST_DEPTH, is_deeper
from router.errors import ValidationError

BETWEEN = "\n"  # what separates texts that were sent apart


@dataclass(slots=True)
class _Message:
    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    of_call: dict[str, str] = field(default_factory=dict)  # which call a tool's message answers

    def for_template(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": self.role, "content": "".join(self.texts), **self.of_call}
        if self.reasoning:
            told["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            told["tool_calls"] = self.calls
        return told


class Transcript:
    """Collects a conversation, the oldest first."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._names: dict[str, str] = {}  # id of a call -> name of its tool

    @property
    def begun(self) -> str | None:
        """The text of a last message of the assistant, which the answer may continue; None where there is none."""
        last = self._messages[-1] if self._messages else None
        return "".join(last.texts) if last is not None and last.role == "assistant" and not last.calls else None

    def drop_empty_end(self) -> None:
        """Take back a last message of the assistant that says nothing, of which an answer is no continuation."""
        if self.begun is not None and not self.begun.strip() and not self._messages[-1].reasoning:
            self._messages.pop()

    def say(self, role: str, text: str, between: str = BETWEEN) -> None:
        """A text; between: what separates it from one of the same role right before."""
        texts = self._last(role).texts
        texts.extend((between, text) if texts else (text,))

    def think(self, text: str) -> None:
        """What the assistant thought."""
        self._last("assistant").reasoning.append(text)

    def call(self, where: str, id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """The assistant called a tool. where: the arguments are in the body. Raises ValidationError."""
        if is_deeper(arguments, MOST_DEPTH):
            raise ValidationError(f"`{where}` is nested deeper than {MOST_DEPTH}: flatten it")
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        self._last("assistant").calls.append({"id": id, "type": "function", "function": function})

    def answer_call(self, id: str, text: str) -> None:
        """What a tool said."""
        named = {"name": self._names[id]} if id in self._names else {}
        self._messages.append(_Message("tool", [text], of_call={"tool_call_id": id, **named}))

    def messages(self) -> list[dict[str, Any]]:
        """All of it. Raises ValidationError where there is no message but system ones."""
        if not any(message.role != "system" for message in self._messages):
            raise ValidationError("there is no message of the user: give at least one")
        return [message.for_template() for message in self._messages]

    def _last(self, role: str) -> _Message:
        """The message that this role is at."""
        if not self._messages or self._messages[-1].role != role:
            self._messages.append(_Message(role))
        return self._messages[-1]


def text_of(where: str, content: str | Sequence[Any] | None, kinds: Collection[str], between: str = BETWEEN) -> str:
    """The texts of a content's parts. Raises ValidationError for a part that is no text.

    where: of the content, in the body. kinds: the types that texts have.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(_text_of_part(f"{where}.{number}", part, kinds) for number, part in enumerate(content))


def result_text_of(
    where: str, content: str | Sequence[Any] | None, kinds: Collection[str], between: str = BETWEEN
) -> str:
    """As `text_of`, of what a tool said. A part that is no text, such as an image, is told by its kind.

    An agent sends it again with every turn: to refuse it would end the conversation. Raises ValidationError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            texts.append(f"[{kind[:40]} left out: this model reads text alone]")
        else:
            texts.append(_text_of_part(f"{where}.{number}", part, kinds))
    return between.join(texts)


def _text_of_part(where: str, part: Any, kinds: Collection[str]) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in kinds:
        raise ValidationError(f"`{where}` is of type {str(kind)[:40]}, and the model reads text alone: leave it out")
    return string_of(where, part, "text")


def arguments_in(text: str) -> dict[str, Any]:
    """The arguments of an earlier call. None where the text is no object of JSON.

    A model may have written it so, or been cut off within it: to refuse what it was told would end the conversation.
    """
    with suppress(NotThis, RecursionError):
        found = json_of(text)
        if isinstance(found, dict):
            # A model may have been cut off between the halves of a surrogate pair.
            return dict(json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace")))
    return {}


def string_of(where: str, part: Mapping[str, Any], name: str) -> str:
    """A field of a part that must be a string. Raises ValidationError."""
    value = part.get(name)
    if not isinstance(value, str):
        raise ValidationError(f"`{where}.{name}` must be a string")
    return value
