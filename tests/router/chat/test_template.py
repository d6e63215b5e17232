"""Chat templates: what transformers makes of messages, byte for byte, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.chat.formats import tool_format_name
from router.chat.template import ChatTemplate, check_variables
from router.chat.tools import Tool
from router.errors import ValidationError
from router.sandbox.pool import Sandbox
from tests.router.chat.templates import LONG, SHORT, TEMPLATES, TOOL
from tests.running import ROOT

DEMO = ROOT / "server" / "demo"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def aside(runner: asyncio.Runner) -> Iterator[Sandbox]:
    pool = Sandbox(1)
    runner.run(pool.warm_up())
    yield pool
    runner.run(pool.close())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(DEMO))


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path, template: str | dict[str, str] | None) -> Path:
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("messages", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_the_prompt_is_that_of_transformers(
    tokenizer: PreTrainedTokenizerFast,
    runner: asyncio.Runner,
    aside: Sandbox,
    tmp_path: Path,
    family: str,
    messages: list[dict[str, Any]],
) -> None:
    template = ChatTemplate.load(saved(tokenizer, tmp_path, TEMPLATES[family]))
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [TOOL]},
    ):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert expected == runner.run(template.render(aside, messages, **options))
    answered = [*messages, {"role": "assistant", "content": "I am "}]
    expected = tokenizer.apply_chat_template(answered, tokenize=False, continue_final_message=True)
    assert expected == runner.run(template.render(aside, answered, continue_final_message=True))


def test_variables_reach_the_template(
    tokenizer: PreTrainedTokenizerFast, runner: asyncio.Runner, aside: Sandbox, tmp_path: Path
) -> None:
    template = ChatTemplate.load(saved(tokenizer, tmp_path, TEMPLATES["qwen3"]))
    for wanted in (True, False):
        variables = {"enable_thinking": wanted}
        expected = tokenizer.apply_chat_template(SHORT, tokenize=False, add_generation_prompt=True, **variables)
        assert expected == runner.run(template.render(aside, SHORT, variables=variables))
        assert ("<think>" in expected) != wanted


def test_the_documents_example_makes_what_the_document_says(
    runner: asyncio.Runner, aside: Sandbox, tmp_path: Path
) -> None:
    blocks = dict(re.findall(r"^```(jinja|text)\n(.*?)^```$", (ROOT / "docs" / "apis.md").read_text(), re.M | re.S))
    (tmp_path / "mine.jinja").write_text(blocks["jinja"])
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    template = ChatTemplate.load(tmp_path, template_path=str(tmp_path / "mine.jinja"))
    assert "hermes" == tool_format_name("auto", blocks["jinja"])
    call = {"type": "function", "id": "1", "function": {"name": "time", "arguments": {"place": "Ulm"}}}
    question = {"role": "user", "content": "How late is it in Ulm?"}
    told = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:30"},
    ]
    assert blocks["text"] == runner.run(template.render(aside, told, tools=[Tool("time").for_template()]))
    plain = "<s><|im_start|>user\nHow late is it in Ulm?<|im_end|>\n<|im_start|>assistant\n"
    assert plain == runner.run(template.render(aside, [question]))
    begun = [question, {"role": "assistant", "content": "It is"}]
    assert f"{plain}It is" == runner.run(template.render(aside, begun, continue_final_message=True))
    with pytest.raises(ValidationError, match="this model knows no role boss"):
        runner.run(template.render(aside, [{"role": "boss", "content": "x"}]))


def test_a_template_for_tools_is_taken_where_there_are_tools(
    tokenizer: PreTrainedTokenizerFast, runner: asyncio.Runner, aside: Sandbox, tmp_path: Path
) -> None:
    several = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    template = ChatTemplate.load(saved(tokenizer, tmp_path, several))
    assert ("plain", "weather") == (
        runner.run(template.render(aside, SHORT)),
        runner.run(template.render(aside, SHORT, tools=[TOOL])),
    )


def test_where_a_template_is_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config", "bos_token": {"content": "<s>"}, "eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "bos_token": "<old>"}')
    found = ChatTemplate.load(tmp_path)
    assert ("config", {"bos_token": "<s>", "unk_token": "<unk>"}) == (found.choose(False), found.special_tokens)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert "processor" == ChatTemplate.load(tmp_path).choose(False)
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert "jinja" == ChatTemplate.load(tmp_path).choose(False)
    other = tmp_path / "other.json"
    other.write_text('{"chat_template": [{"name": "default", "template": "other"}]}')
    assert "other" == ChatTemplate.load(tmp_path, template_path=str(other)).choose(False)
    assert "jinja" == ChatTemplate.load(tmp_path, tokenizer_config_path=str(other)).choose(False)
    (tmp_path / "mine.txt").write_text("mine")
    assert "mine" == ChatTemplate.load(tmp_path, template_path=str(tmp_path / "mine.txt")).choose(True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"chat_template": 5}', "`chat_template` is neither a text nor a list"),
        ('{"chat_template": [{"name": "default"}]}', "`chat_template` is neither a text nor a list"),
        ('{"other": 1}', "has no `chat_template`"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_is_no_template_is_refused_at_the_start(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "template.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        ChatTemplate.load(tmp_path, template_path=str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        ChatTemplate.load(tmp_path, template_path=str(tmp_path / "nothing"))


def test_a_model_without_a_template_says_what_to_do(runner: asyncio.Runner, aside: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="the model has no chat template: send a prompt to `/generate`"):
        runner.run(ChatTemplate.load(tmp_path).render(aside, SHORT))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag", "template": "x"}]}')
    with pytest.raises(ValidationError, match=r"no chat template \(it has some named rag\)"):
        runner.run(ChatTemplate.load(tmp_path).render(aside, SHORT))


def test_a_refusal_is_the_template_s_own(runner: asyncio.Runner, aside: Sandbox) -> None:
    template = ChatTemplate({"default": TEMPLATES["llama-2"]}, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ValidationError, match="refuses the messages: user and assistant take turns"):
        runner.run(template.render(aside, [*SHORT, *SHORT]))


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"chat_template": "x"},
        {"tokenize": True},
        {"bos_token": "x"},
        {"a b": 1},
        {"x": [1]},
        {"x": "a" * 1001},
        {"x": 10**300},
        {f"x{n}": 1 for n in range(17)},
    ],
)
def test_variables_that_no_template_needs_are_refused(variables: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="`chat_template_kwargs"):
        check_variables(variables)
