"""Messages and tools as templates get them: as transformers gives them, or in words where a template knows no tools."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.apis.openai.requests import ChatRequest, messages_of, offered
from router.chat.arguments import Arguments
from router.chat.formats import REASONING, TOOLS
from router.chat.pieces import call_ids, whole
from router.chat.prompting import INSTRUCTION, for_template, rendering
from router.chat.reader import Reader, ReadingRules
from router.chat.template import ChatTemplate
from router.chat.tools import Offer, Tool, ToolChoice, offer
from router.errors import ValidationError
from router.sandbox.tasks import tasks
from tests.router.chat.templates import TOOL, TOOL_TEMPLATES
from tests.router.chat.test_template import DEMO

ARGUMENTS = {"place": "Zürich & <b>", "days": [1, 2.5, None]}
CALL = {"id": "abcdefg12", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
# As transformers documents it.
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
    {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "abcdefg12", "name": "weather"},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And now?"},
]


class Here:
    """Renders in this process."""

    async def do(self, task: str, owner: str = "", **arguments: Any) -> Any:
        return tasks("")[task](**json.loads(json.dumps(arguments)))


def sent(history: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    """The same as OpenAI's clients send it: arguments as text, and null for no content."""
    history = copy.deepcopy(history)
    for message in history:
        message["content"] = message["content"] or None
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return ChatRequest.model_validate_json(json.dumps({"messages": history, **fields}))


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_the_prompt_is_that_of_transformers(family: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(DEMO))
    tokenizer.chat_template = TOOL_TEMPLATES[family]
    template = ChatTemplate({"default": TOOL_TEMPLATES[family]}, {"bos_token": "<s>", "eos_token": "</s>"})
    for history in (HISTORY, HISTORY[:4], HISTORY[1:2]):
        body = sent(history, tools=[TOOL])
        aside: Any = Here()
        render = rendering(template, aside, messages_of(body), offered(body), TOOLS[family])
        expected = tokenizer.apply_chat_template(history, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        assert expected == asyncio.run(render("")) and "weather" in expected


def test_ids_are_made_short_where_templates_insist() -> None:
    messages = copy.deepcopy(HISTORY)
    messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = "call_0123456789"
    its = TOOLS["mistral"]
    told, _ = for_template(messages, Offer(), its, knows_tools=True)
    id = told[3]["tool_call_id"]
    assert id == told[2]["tool_calls"][0]["id"] and len(id) == 9 and id.isalnum()
    assert told == for_template(messages, Offer(), its, knows_tools=True)[0]
    assert for_template(HISTORY, Offer(), its, knows_tools=True)[0] == HISTORY
    assert "call_0123456789" == for_template(messages, Offer(), TOOLS["hermes"], knows_tools=True)[0][3]["tool_call_id"]


def test_a_template_without_tools_gets_words() -> None:
    given = offer([Tool("weather", "The weather.")], ToolChoice())
    told, tools = for_template(HISTORY, given, TOOLS["json"], knows_tools=False)
    assert tools is None
    assert ["system", "user", "assistant", "user", "assistant", "user"] == [message["role"] for message in told]
    assert json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False) == told[2]["content"]
    assert 'The function weather returned: {"sky": "blue"}' == told[3]["content"]
    listed = json.dumps(given.for_template()[0])
    assert f"Be brief.\n---\n{listed}\n{INSTRUCTION}" == told[0]["content"]  # where the next turn has it too
    asked, _ = for_template(HISTORY, given, None, "Call it!", knows_tools=False)
    assert "Call it!" == asked[0]["content"].rpartition("\n")[2]
    assert "And now?" == for_template(HISTORY, Offer(), None, knows_tools=False)[0][5]["content"]


def test_results_in_a_row_are_one_message() -> None:
    result = {"role": "tool", "content": "1", "tool_call_id": "other"}
    call = {"role": "assistant", "content": "So:", "tool_calls": [CALL, CALL]}
    more = [HISTORY[1], call, result, HISTORY[3], {"role": "user", "content": "Go on."}]
    told, _ = for_template(more, Offer(), None, knows_tools=False)
    assert ["user", "assistant", "user"] == [message["role"] for message in told]
    expected = 'The function  returned: 1\nThe function weather returned: {"sky": "blue"}\nGo on.'
    assert expected == told[2]["content"]
    assert told[1]["content"].startswith('So:\n{"name": "weather"')


def test_instructions_are_added_where_a_template_has_its_own() -> None:
    given = offer([Tool("weather")], ToolChoice())
    told, tools = for_template(HISTORY[:2], given, TOOLS["hermes"], "Call it!", knows_tools=True)
    assert ("How is it in Zürich?\n---\nCall it!", given.for_template()) == (told[1]["content"], tools)
    with pytest.raises(ValidationError, match="nothing but answers"):
        for_template(HISTORY[4:5], given, None, knows_tools=False)


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_a_call_is_read_as_its_template_writes_it(family: str) -> None:
    """So that what the model learned from the template to write is understood."""
    template = ChatTemplate({"default": TOOL_TEMPLATES[family]}, {"bos_token": "<s>", "eos_token": "</s>"})
    aside: Any = Here()
    offered_tools = offered(sent(HISTORY, tools=[TOOL]))

    def prompt(messages: list[dict[str, Any]], **options: Any) -> str:
        return asyncio.run(rendering(template, aside, messages, offered_tools, TOOLS[family], **options)(""))

    asked = prompt(HISTORY[:2])
    written = prompt(HISTORY[:3], add_generation_prompt=False).removeprefix(asked)
    functions = {"weather": Arguments(TOOL["function"]["parameters"])}
    rules = ReadingRules(TOOLS[family], functions, reasoning=REASONING["think"])
    reader = Reader(rules, call_ids())
    [call] = whole([*reader.feed(written), *reader.end()]).calls
    assert ("weather", ARGUMENTS) == (call.name, json.loads(call.arguments))


def test_ids_of_calls_have_names_where_templates_want_them() -> None:
    messages = copy.deepcopy(HISTORY)
    messages += [{"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "x"}]}]
    messages += [{"role": "tool", "content": "?", "tool_call_id": "x"}]
    told, _ = for_template(messages, Offer(), TOOLS["kimi"], knows_tools=True)
    assert ["functions.weather:0", "functions.weather:1"] == [
        one["tool_calls"][0]["id"] for one in told if "tool_calls" in one
    ]
    assert ["functions.weather:0", "functions.weather:1"] == [
        one["tool_call_id"] for one in told if one["role"] == "tool"
    ]


def test_what_comes_before_a_call_is_thinking_in_messages_with_headers() -> None:
    messages = copy.deepcopy(HISTORY)
    messages[2]["content"] = "Let me see."
    messages[4]["reasoning_content"] = "Easy."
    told, _ = for_template(messages, Offer(), TOOLS["harmony"], knows_tools=True)
    assert ("I look.\n\nLet me see.", "") == (told[2]["thinking"], told[2]["content"])
    assert ("Easy.", "Blue.") == (told[4]["thinking"], told[4]["content"])
    assert told[1] == HISTORY[1]
