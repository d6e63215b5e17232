"""Conversations of agents, in templates that refuse, move or leave out a part of what agents send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from router.chat import turns
from router.chat.prompting import INSTRUCTION, rendering
from router.chat.template import ChatTemplate
from router.chat.tools import Tool, ToolChoice, offer
from router.chat.turns import Taken
from router.errors import Unavailable, ValidationError
from tests.router.chat.templates import END, LOOP, TOOL, TOOL_TEMPLATES
from tests.router.chat.test_prompting import Here

WRITTEN = "<{{ message.role }}>{{ message.content }}"
CALLS = (
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}"
)
REFUSE_LATER_SYSTEM = (
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
)
# Of the messages behind a first system one, those of the user and the answers that are no calls take turns.
TAKE_TURNS = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% set ns = namespace(n=0) %}"
    "{% for m in rest if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) or m.role == 'system' %}{{ raise_exception('take turns') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ALONE = {
    "anything": (LOOP + WRITTEN + CALLS + END, Taken()),
    "system first": (LOOP + REFUSE_LATER_SYSTEM + WRITTEN + CALLS + END, Taken(later_system=False)),
    "system moved": (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for message in messages if message.role != 'system' %}" + WRITTEN + CALLS + END,
        Taken(later_system=False),
    ),
    "system lost": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for message in messages if message.role != 'system' %}" + WRITTEN + CALLS + END,
        Taken(later_system=False),
    ),
    "no system": (
        LOOP + "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + WRITTEN + CALLS + END,
        Taken(system=False, later_system=False),
    ),
    "taking turns": (TAKE_TURNS + LOOP + WRITTEN + CALLS + END, Taken(later_system=False, user_after_result=False)),
    "one call": (TOOL_TEMPLATES["llama3"], Taken(several_calls=False)),
    "text": (
        LOOP + WRITTEN + "{% for call in message.tool_calls or [] %}{{ '[' + call.function.arguments + ']' }}"
        "{% endfor %}" + END,
        Taken(arguments_as_objects=False),
    ),
    "no calls": (LOOP + WRITTEN + END, Taken(calls=False)),
    "words behind calls": (
        LOOP + "{% if message.tool_calls %}" + CALLS + "{% endif %}" + WRITTEN + END,
        Taken(words_beside_calls=False),
    ),
    "system for the user alone": (
        "{% for message in messages if message.role != 'system' %}{% if loop.last and message.role == 'user' and "
        "messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + WRITTEN + CALLS + END,
        Taken(system=False, later_system=False),
    ),
    "first call alone": (
        LOOP + WRITTEN + "{% if message.tool_calls %}{{ message.tool_calls[0].function.arguments }}{% endif %}" + END,
        Taken(several_calls=False),
    ),
}  # fmt: skip
TEMPLATES = {name: (TOOLS + text, taken) for name, (text, taken) in ALONE.items()}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def calling(*words: str) -> dict[str, Any]:
    calls = [
        {"id": f"id{word}", "type": "function", "function": {"name": "weather", "arguments": {"place": word}}}
        for word in words
    ]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls}


def result(word: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"id{word}", "name": "weather"}


# Results in another order than calls, words of the user and of the system right behind them.
AGENT = [
    *(said("system", "Be-brief"), said("user", "Question"), said("system", "Reminder")),
    *(calling("Ulm", "Bonn"), result("Ulm", "rain"), result("Bonn", "sun"), said("user", "Hurry")),
    *(said("system", "Another"), said("assistant", "Wet-or-dry"), said("user", "Thanks"), said("system", "Last")),
]
WORDS = "Be-brief Question Reminder Ulm Bonn rain sun Hurry Another Wet-or-dry Thanks Last".split()


def prompt_of(template: ChatTemplate, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    aside: Any = Here()
    return asyncio.run(template.render(aside, messages, tools=[TOOL], **options))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_has_all_that_an_agent_sends(name: str) -> None:
    text, taken = TEMPLATES[name]
    template = ChatTemplate({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"})
    prompt = prompt_of(template, AGENT)
    places = [prompt.index(word) for word in WORDS]
    if taken.several_calls:
        assert sorted(places) == places
    else:  # each call is followed by its result
        assert prompt.index("Ulm") < prompt.index("rain") < prompt.index("Bonn") < prompt.index("sun")
    assert [taken] == [found.result() for found in template._taken.values()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_begins_as_that_of_the_turn_before(name: str) -> None:
    """So that it is found in the prefix cache, whatever was said otherwise."""
    template = ChatTemplate({"default": TEMPLATES[name][0]}, {"bos_token": "<s>", "eos_token": "</s>"})
    asked = prompt_of(template, AGENT[:3], add_generation_prompt=False)
    answered = prompt_of(template, AGENT[:8], add_generation_prompt=False)
    whole = prompt_of(template, AGENT, add_generation_prompt=False)
    assert asked == answered[: len(asked)] and answered == whole[: len(answered)]


def test_what_every_template_takes_is_not_tried() -> None:
    template = ChatTemplate({"default": LOOP + WRITTEN + END}, {})
    aside: Any = Here()
    assert "<user>x" == asyncio.run(template.render(aside, [said("user", "x")])) and not template._taken


def test_several_system_messages_at_the_start_become_one() -> None:
    template = ChatTemplate({"default": TEMPLATES["system first"][0]}, {})
    told = prompt_of(template, [said("system", "a"), said("system", "b"), said("user", "c")])
    assert told.endswith("<system>a\nb<user>c")


def test_without_system_messages_the_user_says_it_all() -> None:
    template = ChatTemplate({"default": TEMPLATES["no system"][0]}, {})
    told = prompt_of(template, [said("system", "a"), said("system", "b"), said("user", "c"), said("user", "d")])
    assert told.endswith("<user>a\nb\nc<user>d")  # what was two messages of the user stays two


def test_what_no_change_makes_fit_is_refused_in_the_template_s_words() -> None:
    template = ChatTemplate({"default": TEMPLATES["taking turns"][0]}, {})
    with pytest.raises(ValidationError, match="take turns"):
        prompt_of(template, [said("system", "a"), said("user", "b"), said("user", "c")])
    with pytest.raises(ValidationError, match="nobody speaks"):
        prompt_of(ChatTemplate({"default": "{{ raise_exception('nobody speaks') }}"}, {}), AGENT)


def test_results_stay_with_their_calls() -> None:
    """Also where they come in another order, twice, or name no call."""
    conversation = [calling("a", "b", "c"), result("c", "3"), result("a", "1"), result("a", "2"), result("x", "?")]
    told = turns.fitted(conversation, Taken(several_calls=False), turns.in_json)
    seen = [[call["id"] for call in one["tool_calls"]] if "tool_calls" in one else one["content"] for one in told]
    assert [["ida"], "1", "2", ["idb"], ["idc"], "3", "?"] == seen
    assert ["I look.", "", ""] == [one["content"] for one in told if one["role"] == "assistant"]


def test_tools_are_shown_from_another_variable_or_in_words() -> None:
    offered = offer([Tool("weather", "Of a place")], ToolChoice())
    written = "{% for one in {0} or [] %}{{ one.function.name }}{% endfor %}"
    aside: Any = Here()

    def prompt(template: str) -> str:
        render = rendering(ChatTemplate({"default": template}, {}), aside, [said("user", "x")], offered, None)
        return asyncio.run(render(""))

    assert "weather<user>x" == prompt(written.replace("{0}", "xml_tools") + LOOP + WRITTEN + END)
    of_message = "{% if message['tools'] %}{{ message['tools'] }}{% endif %}"
    assert INSTRUCTION in prompt(LOOP + of_message + WRITTEN + END)
    assert INSTRUCTION not in prompt(TOOLS + LOOP + WRITTEN + END)


def test_what_a_busy_machine_does_not_render_is_not_remembered() -> None:
    template = ChatTemplate({"default": TEMPLATES["anything"][0]}, {})

    class Away:
        async def do(self, *_: Any, **__: Any) -> Any:
            raise Unavailable("no process for it")

    away: Any = Away()
    with pytest.raises(Unavailable):
        asyncio.run(template.render(away, AGENT, tools=[TOOL]))
    assert not template._taken and "Reminder" in prompt_of(template, AGENT)
