"""Which formats a model has: by its template, or by the settings."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from router.chat.formats import AUTO, NONE, REASONING, SIGNS, TOOLS, reasoning_format_name, tool_format_name
from router.chat.pieces import call_ids, whole
from router.chat.reading import AnswerFormats
from router.chat.template import ChatTemplate
from router.chat.tools import Offer, Tool, ToolChoice, offer
from router.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from router.text.generated import Ends, GeneratedText
from router.text.tokenizer import ModelTokenizer
from tests.router.chat.templates import TEMPLATES, TOOL_TEMPLATES
from tests.router.doubles import EOS, byte_tokenizer


def test_the_settings_know_every_format() -> None:
    assert {AUTO, NONE, *TOOLS} == set(TOOL_CALL_PARSERS)
    assert {AUTO, NONE, *REASONING} == set(REASONING_PARSERS)
    assert set(SIGNS) < set(TOOLS)


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_a_template_with_tools_says_how_calls_are_written(family: str) -> None:
    assert family == tool_format_name("auto", TOOL_TEMPLATES[family])
    assert "llama3" == tool_format_name("llama3", TOOL_TEMPLATES[family])


@pytest.mark.parametrize(
    ("text", "tools", "reasoning"),
    [
        ("<|channel|>analysis<|message|> <|channel|>commentary", "harmony", "harmony"),
        ("<seed:tool_call><function= </seed:think>", "seed", "seed"),
        ("<|tool_call_begin|><|tool_call_argument_begin|>", "kimi", "none"),
        ("<|tool_call>call: <|channel>thought", "gemma", "gemma"),
        ("<|START_ACTION|> <|START_RESPONSE|>", "command", "command"),
        ("<|tool_call|> Here is my thought process:", "granite", "granite"),
        ("<|tool_call_start|>[", "lfm2", "none"),
        ("<arg_key>k</arg_key>\n<arg_value>", "glm", "none"),
        ("<arg_key>k</arg_key><arg_value>", "glm47", "none"),
        ("<tool_calls> <answer>", "hunyuan", "answer"),
        ("<function_calls>", "olmo3", "none"),
    ],
)
def test_marks_in_a_template_say_how_its_model_writes(text: str, tools: str, reasoning: str) -> None:
    assert (tools, reasoning) == (tool_format_name("auto", text), reasoning_format_name("auto", text))


@pytest.mark.parametrize(("family", "expected"), [("chatml", "json"), ("gemma", "json"), ("command-r", "json")])
def test_others_call_in_json(family: str, expected: str) -> None:
    assert expected == tool_format_name("auto", TEMPLATES[family])


def test_a_template_says_how_reasoning_is_marked() -> None:
    found = {family: reasoning_format_name("auto", template) for family, template in TEMPLATES.items()}
    assert {"qwen3"} == {family for family, name in found.items() if name != NONE}
    assert "think" == found["qwen3"] == reasoning_format_name("auto", TOOL_TEMPLATES["hermes"])
    assert ("none", "mistral") == (reasoning_format_name("none", "</think>"), reasoning_format_name("auto", "[THINK]"))


def marked() -> ModelTokenizer:
    plain = byte_tokenizer().tokenizer
    tokenizer = type(plain).from_str(plain.to_str())
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[INST]", special=True)])
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    return ModelTokenizer.of(tokenizer, frozenset({EOS}))


def test_marks_that_are_tokens_are_known_and_special_ones_shown() -> None:
    tokenizer = marked()
    its = AnswerFormats.of("mistral", "think", ChatTemplate({}, {}), tokenizer)
    assert {"[TOOL_CALLS]": EOS + 1, "</think>": EOS + 3} == its.token_ids
    assert {EOS + 1} == its.mark_ids
    plain = AnswerFormats.of("mistral", "none", ChatTemplate({}, {}), tokenizer)
    assert None is plain.reading(Offer())


def shown(ids: list[int], stop: str, shown_ids: frozenset[int]) -> list[tuple[str, str | None]]:
    text = GeneratedText(marked(), list(b"x"), [stop], 99, Ends(shows_stop=False, shown_ids=shown_ids))
    told = [text.push(id) for id in ids]
    assert text.text == "".join(piece for piece, _ in told)
    return told


def test_a_shown_special_token_is_text_in_its_place() -> None:
    ids = [ord("a"), EOS + 2, 0xC3, EOS + 1, ord("b")]
    marks = frozenset({EOS + 1})
    expected = [("a", None), ("", None), ("", None), ("\N{REPLACEMENT CHARACTER}[TOOL_CALLS]", None), ("b", None)]
    assert expected == shown(ids, "stop", marks)
    assert {"a", "b", "", "\N{REPLACEMENT CHARACTER}b"} >= {piece for piece, _ in shown(ids, "stop", frozenset())}
    assert [("a", None), ("", "stop_sequence")] == shown([ord("a"), EOS + 1], "[TOOL", marks)


def special(marks: list[str]) -> ModelTokenizer:
    """One whose marks are special tokens, which are no part of a text."""
    plain = byte_tokenizer().tokenizer
    tokenizer = type(plain).from_str(plain.to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return ModelTokenizer.of(tokenizer, frozenset({EOS}))


SAID = {
    "harmony": "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So",
    "gemma": "<|channel>thought\nWhy?<channel|>So",
    "command": "<|START_THINKING|>Why?<|END_THINKING|><|START_RESPONSE|>So<|END_RESPONSE|>",
    "answer": "<think>Why?</think><answer>So</answer>",
}


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", REASONING)
def test_marks_that_are_special_tokens_are_read_and_not_shown(name: str, with_tools: bool) -> None:
    its = REASONING[name]
    tools = name if name in TOOLS else "hermes"
    marks = [*its.marks, *TOOLS[tools].marks, "<|other|>"]
    tokenizer = special([mark for mark in dict.fromkeys(marks) if not mark.isspace()])
    formats = AnswerFormats.of(tools, name, ChatTemplate({}, {}), tokenizer)
    reading = formats.reading(offer([Tool("f")] if with_tools else [], ToolChoice()))
    assert reading is not None
    generated = GeneratedText(tokenizer, [1], [], 999, Ends(shows_stop=False, shown_ids=formats.mark_ids))
    reader = reading.reader("", "", call_ids())
    text = SAID.get(name, f"{its.begin}Why?{its.end}So")
    ids = tokenizer.tokenizer.encode(f"{text}<|other|>", add_special_tokens=False).ids
    assert len(ids) < len(text)  # of which the marks are one each
    found = whole([*(piece for id in ids for piece in reader.feed(generated.push(id)[0])), *reader.end()])
    assert ("Why?", "So") == (found.reasoning, found.text)
