"""Grammars for calls, tried on texts by llguidance itself: what they let pass is read as the call that it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from router.chat.formats import CHANNELS, REASONING
from router.chat.grammars import schema_of
from router.chat.pieces import call_ids, whole
from router.chat.reading import AnswerFormats
from router.chat.template import ChatTemplate
from router.chat.tools import Offer, Tool, ToolChoice, offer
from router.errors import ValidationError
from router.requests.grammars import answer_grammar_of, renaming_errors
from router.requests.schemas import GenerateParameters, GrammarParameters, PromptRequest
from router.scheduling.grammar import Grammar, GrammarKind
from router.text.tokenizer import ModelTokenizer
from tests.router.doubles import EOS, byte_tokenizer

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = Tool("weather", parameters={**PLACE, "additionalProperties": False})
STRICT = Tool("weather", parameters={**PLACE, "additionalProperties": False}, strict=True)
TIME = Tool("time")
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>", "<｜tool▁sep｜>", "[THINK]", "[/THINK]")
TOKENS = ("<tool_call>", "</tool_call>", "</think>", "<think>")


@cache
def marked(*more: str) -> Tokenizer:
    plain = byte_tokenizer().tokenizer
    tokenizer = type(plain).from_str(plain.to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (*SPECIAL, *more)])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in TOKENS])
    return tokenizer


def formats(name: str, reasoning: str = "none", *more: str) -> AnswerFormats:
    tokenizer = ModelTokenizer.of(marked(*more), frozenset({EOS}))
    return AnswerFormats.of(name, reasoning, ChatTemplate({}, {}), tokenizer)


def held(its: AnswerFormats, offered: Offer, prompt_end: str = "") -> str | None:
    reading = its.reading(offered)
    assert reading is not None
    return reading.call_grammar(prompt_end)


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        (PLACE, True),
        (None, True),
        ({**PLACE, "additionalProperties": True}, False),
        ({**PLACE, "patternProperties": {"^x-": {"type": "string"}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": PLACE}}, False),
    ],
)
def test_arguments_that_a_function_does_not_declare_do_not_come(
    parameters: dict[str, Any] | None, is_closed: bool
) -> None:
    schema = schema_of(Tool("weather", parameters=parameters))
    assert is_closed is (schema.get("additionalProperties") is False)


MOST_CALLS = 10_000_000  # of functions: twice as many as half a megabyte of the smallest schemas takes


@contextmanager
def at_most(most: int) -> Iterator[None]:
    """What is done within calls no more functions than that, however busy the machine is."""
    num = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")
        assert num <= most, "it does not come to an end in time"

    sys.setprofile(count_call)
    try:
        yield
    finally:
        sys.setprofile(None)


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the text is all of an answer."""
    table = LLTokenizer(tokenizer.to_str(), n_vocab=300, eos_token=[EOS])
    matcher = LLMatcher(table, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALL = '{"name": "weather", "arguments": {"place": "Zürich"}}'
NONE = '{"name": "time", "arguments": {}}'
ACTION = '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"place": "Zürich"}}'
ON_ONE_LINE = "<function=weather>\n<parameter=place>Zürich</parameter>\n</function>"
FUNCTION = "<function=weather>\n<parameter=place>\nZürich\n</parameter>\n</function>"
KEYS = "<arg_key>place</arg_key>\n<arg_value>Zürich</arg_value>\n"
INVOKE = '<invoke name="weather">\n<parameter name="place">Zürich</parameter>\n</invoke>'
# format, special tokens beside the others, one call, two calls
WRITTEN = [
    ("hermes", (), f"<tool_call>\n{CALL}\n</tool_call>",
     f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NONE}\n</tool_call>"),
    ("llama3", (), CALL.replace("arguments", "parameters"), f"{CALL}; {NONE}".replace("arguments", "parameters")),
    ("mistral", (), f"[TOOL_CALLS][{CALL}]", f"[TOOL_CALLS][{CALL}, {NONE}]"),
    ("mistral", ("[ARGS]",), '[TOOL_CALLS]weather[ARGS]{"place": "Zürich"}',
     '[TOOL_CALLS]weather[ARGS]{"place": "Zürich"}[TOOL_CALLS]time[ARGS]{}'),
    ("deepseek", (), '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"place": "Zürich"}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"place": "Zürich"}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("deepseek_v3", (), "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
     '{"place": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
     '{"place": "Zürich"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("kimi", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
     "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{"place": "Zürich"}<|tool_call_end|><|tool_calls_section_end|>',
     "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{"place": "Zürich"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}'
     "<|tool_call_end|><|tool_calls_section_end|>"),
    ("lfm2", (), f"<|tool_call_start|>{CALL}<|tool_call_end|>",
     f"<|tool_call_start|>{CALL}<|tool_call_end|><|tool_call_start|>{NONE}<|tool_call_end|>"),
    ("qwen3_coder", (), f"<tool_call>\n{FUNCTION}\n</tool_call>",
     f"<tool_call>\n{FUNCTION}\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>"),
    ("seed", ("<seed:tool_call>",), f"<seed:tool_call>\n{ON_ONE_LINE}\n</seed:tool_call>",
     f"<seed:tool_call>\n{ON_ONE_LINE}\n</seed:tool_call>\n<seed:tool_call>\n<function=time>\n</function>\n"
     "</seed:tool_call>"),
    ("glm", ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), f"<tool_call>weather\n{KEYS}</tool_call>",
     f"<tool_call>weather\n{KEYS}</tool_call>\n<tool_call>time\n</tool_call>"),
    ("glm47", (), "<tool_call>weather<arg_key>place</arg_key><arg_value>Zürich</arg_value></tool_call>",
     "<tool_call>weather<arg_key>place</arg_key><arg_value>Zürich</arg_value></tool_call><tool_call>time</tool_call>"),
    ("minimax", (), f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
     f'<minimax:tool_call>\n{INVOKE}\n<invoke name="time">\n</invoke>\n</minimax:tool_call>'),
    ("gemma", (), f"<|tool_call>{CALL}<tool_call|>", f"<|tool_call>{CALL}<tool_call|><|tool_call>{NONE}<tool_call|>"),
    ("command", ("<|START_ACTION|>", "<|END_ACTION|>"), f"<|START_ACTION|>[\n    {ACTION}\n]<|END_ACTION|>",
     f'<|START_ACTION|>[\n    {ACTION},\n    {{"tool_call_id": "0", "tool_name": "time", "parameters": {{}}}}\n]'
     "<|END_ACTION|>"),
    ("hunyuan", (), f"<tool_calls>[{CALL}]</tool_calls>", f"<tool_calls>[{CALL}, {NONE}]</tool_calls>"),
    ("olmo3", (), f"<function_calls>[{CALL}]</function_calls>", f"<function_calls>[{CALL}, {NONE}]</function_calls>"),
    ("granite", (), f"<|tool_call|>[{CALL}]", f"<|tool_call|>[{CALL}, {NONE}]"),
    ("nemotron", (), f"<TOOLCALL>[{CALL}]</TOOLCALL>", f"<TOOLCALL>[{CALL}, {NONE}]</TOOLCALL>"),
    ("json", (), CALL, f"{CALL}\n{NONE}"),
    ("pythonic", (), CALL, f"{CALL}\n{NONE}"),
]  # fmt: skip
ONE, TWO = ("weather", '{"place": "Zürich"}'), ("time", "{}")


def required(name: str | None = None, *, is_parallel: bool = True, tools: tuple[Tool, ...] = (WEATHER, TIME)) -> Offer:
    return offer(tools, ToolChoice("required", name, is_parallel))


@pytest.mark.parametrize(("name", "more", "one", "two"), WRITTEN)
def test_a_required_call_is_all_of_the_answer(name: str, more: tuple[str, ...], one: str, two: str) -> None:
    its = formats(name, "none", *more)
    tokenizer = marked(*more)
    grammar = held(its, required()) or ""
    assert accepts(tokenizer, grammar, one) and accepts(tokenizer, grammar, two)
    for other in ("", "No.", one[:-1], f"{one} So.", one.replace("weather", "whether"), one.replace("place", "plaice")):
        assert not accepts(tokenizer, grammar, other), other
    for offered in (required(is_parallel=False), required("weather"), required("weather", is_parallel=False)):
        single = held(its, offered) or ""
        assert accepts(tokenizer, single, one) and not accepts(tokenizer, single, two)
    reading = its.reading(required())
    assert reading is not None
    for text, expected in ((one, [ONE]), (two, [ONE, TWO])):
        reader = reading.reader("", "", call_ids())
        content = whole([*reader.feed(text), *reader.end()])
        assert (expected, "") == ([(call.name, call.arguments) for call in content.calls], content.text)


@pytest.mark.parametrize(("name", "more", "one", "two"), WRITTEN)
def test_a_strict_function_is_held_where_it_is_called(name: str, more: tuple[str, ...], one: str, two: str) -> None:
    its = formats(name, "none", *more)
    tokenizer = marked(*more)
    grammar = held(its, offer((STRICT, TIME), ToolChoice())) or ""
    for text in ("", "No.", "Both: 1 < 2 [3] {4}", one, two):
        assert accepts(tokenizer, grammar, text), text
    assert not accepts(tokenizer, grammar, one.replace("place", "plaice"))
    assert not accepts(tokenizer, grammar, one.replace("weather", "whether"))
    if not its.tools or not its.tools.is_bare:
        assert accepts(tokenizer, grammar, f"Let me see.\n{one}\nSo.")
        assert not accepts(tokenizer, grammar, f"Let me see. {one.replace('place', 'plaice')}")
    assert None is held(its, offer((WEATHER, TIME), ToolChoice()))
    assert None is its.reading(offer((STRICT,), ToolChoice("none")))


@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("reasoning", ["think", "mistral", "granite", "seed"])
def test_reasoning_may_come_first(reasoning: str, mode: str) -> None:
    its, tokenizer, marks = formats("hermes", reasoning), marked(), REASONING[reasoning]
    offered = offer((STRICT,), ToolChoice("required" if mode == "required" else "auto"))
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    grammar = held(its, offered) or ""
    assert accepts(tokenizer, grammar, call)
    assert accepts(tokenizer, grammar, f"{marks.begin}\nWell, {{so}}\n{marks.end}\n\n{call}")
    within = held(its, offered, REASONING[reasoning].begin) or ""
    assert accepts(tokenizer, within, f"Well, so\n{marks.end}\n\n{call}")
    assert not accepts(tokenizer, within, f"Well, so\n{marks.end}\n\n{call.replace('place', 'plaice')}")
    assert not accepts(tokenizer, within, call) or mode == "auto"


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PLACE)), '{"place": "x"}', '{"plaice": "x"}'),
        (Grammar(GrammarKind.REGEX, r"a/b\/c[\n/]+"), "a/b/c/\n", "a/b/c"),
        (Grammar(GrammarKind.LARK, 'start: "a" one\none: "b"'), "ab", "a"),
    ],
)
@pytest.mark.parametrize("reasoning", ["think", "mistral"])
def test_a_client_s_grammar_holds_what_is_behind_reasoning(
    reasoning: str, wanted: Grammar, good: str, bad: str
) -> None:
    its, marks = formats("hermes", reasoning), REASONING[reasoning]
    reading = its.reading(Offer())
    assert reading is not None
    kind = "json" if wanted.kind is GrammarKind.JSON_SCHEMA else str(wanted.kind)
    given = GenerateParameters(grammar=GrammarParameters.model_validate({"type": kind, "value": wanted.text}))
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None
    before = asked.answer_grammar("<|im_start|>assistant\n") or ""
    for text in (good, f"{marks.begin}Well, so\n{marks.end}\n\n{good}"):
        assert accepts(marked(), before, text)
    assert not accepts(marked(), before, bad)
    grammar = asked.answer_grammar(f"assistant\n{marks.begin}\n") or ""
    assert accepts(marked(), grammar, f"Well, so\n{marks.end}\n\n{good}")
    for text in (good, f"Well{marks.end}{bad}", f"Well{marks.end}"):
        assert not accepts(marked(), grammar, text)


@pytest.mark.parametrize("reasoning", ["think", "none"])
@pytest.mark.parametrize(("tools", "more", "call", "_"), WRITTEN, ids=[f"{one[0]} {one[1]}" for one in WRITTEN])
def test_beside_tools_an_answer_is_calls_or_keeps_to_its_format(
    tools: str, more: tuple[str, ...], call: str, _: str, reasoning: str
) -> None:
    its, tokenizer = formats(tools, reasoning, *more), marked(*more)
    reading = its.reading(offer((WEATHER,), ToolChoice()))
    assert reading is not None
    given = GenerateParameters(
        grammar=GrammarParameters(type="json", value={"properties": {"kind": {"const": "x"}}, "required": ["kind"]})
    )
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None
    grammar = asked.answer_grammar("<|im_start|>assistant\n") or ""
    for text in (call, '{"kind": "x"}'):
        assert accepts(tokenizer, grammar, text), text
        reader = reading.reader("", "", call_ids())
        content = whole([*reader.feed(text), *reader.end()])
        assert (
            ("", 1) == (content.text, len(content.calls))
            if text == call
            else (text, 0) == (content.text, len(content.calls))
        )
    for text in (
        "It is sunny.",
        '{"kind": "y"}',
        '\n{"kind": "x"}',
        f'{{"kind": "x"}}{call}',
        call.replace("weather", "weather_"),
    ):
        assert not accepts(tokenizer, grammar, text), text


WRITTEN_CALLS = {
    "llama3": '{{"name": "go", "parameters": {{"at": {{"x": {}}}}}}}',
    "json": '{{"name": "go", "arguments": {{"at": {{"x": {}}}}}}}',
    "hermes": '<tool_call>\n{{"name": "go", "arguments": {{"at": {{"x": {}}}}}}}\n</tool_call>',
}
ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {"required": ["b"]}}


@pytest.mark.parametrize("tools", ["llama3", "json", "hermes"])
def test_beside_a_format_a_function_that_is_not_strict_may_have_any_schema(tools: str) -> None:
    its = formats(tools)
    reading = its.reading(offer((Tool("odd", parameters=ODD),), ToolChoice()))
    assert reading is not None
    given = GenerateParameters(grammar=GrammarParameters(type="json", value={"required": ["kind"]}))
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None
    assert accepts(marked(), asked.answer_grammar("") or "", '{"kind": 1}')


@pytest.mark.parametrize(
    ("lark", "good", "bad"),
    [
        ('start: "a" start | "b" // start', "aab", "a"),
        ('start: X "start"\nX: /start+/', "starttstart", "start"),
        ('start: "a"+ "b"', "aab", "aa"),
        ('start: <think> "b"', "<think>b", "b"),
    ],
)
def test_a_client_s_rules_keep_their_meaning_beside_ours(lark: str, good: str, bad: str) -> None:
    reading = formats("hermes").reading(offer((WEATHER,), ToolChoice()))
    assert reading is not None
    asked = reading.applied_to(
        PromptRequest("", GenerateParameters(grammar=GrammarParameters(type="lark", value=lark)))
    )
    assert asked.answer_grammar is not None
    grammar = asked.answer_grammar("") or ""
    assert accepts(marked(), grammar, good) and not accepts(marked(), grammar, bad)
    assert not accepts(marked(), grammar, f"{bad[:1]}<tool_call>\n{CALL}\n</tool_call>")


def test_a_rule_whose_name_is_taken_is_refused_by_it() -> None:
    reading = formats("hermes").reading(offer((WEATHER,), ToolChoice()))
    assert reading is not None
    given = GenerateParameters(grammar=GrammarParameters(type="lark", value='start: answer\nanswer: "a"'))
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None
    with pytest.raises(ValidationError, match="has no rule of the name answer: rename it"):
        asked.answer_grammar("")


SPOT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Spot"}},
    "required": ["at"],
    "$defs": {"Spot": SPOT},
    "additionalProperties": False,
}


@pytest.mark.parametrize("tools", ["llama3", "json", "hermes"])
def test_beside_a_format_arguments_refer_to_their_own_definitions(tools: str) -> None:
    reading = formats(tools).reading(offer((Tool("go", parameters=NESTED, strict=True),), ToolChoice()))
    assert reading is not None
    style = {"x-guidance": {"whitespace_flexible": True}}
    wanted = {"properties": {"k": {"const": 1}}, "required": ["k"], **style}
    asked = reading.applied_to(
        PromptRequest("", GenerateParameters(grammar=GrammarParameters(type="json", value=wanted)))
    )
    assert asked.answer_grammar is not None
    grammar, call = asked.answer_grammar("") or "", WRITTEN_CALLS[tools]
    assert accepts(marked(), grammar, call.format(1)) and not accepts(marked(), grammar, call.format('"a"'))
    for text in ('{"k":1}', '{ "k" : 1 }'):  # as the schema itself asks for
        assert accepts(marked(), grammar, text)


def test_a_required_call_comes_instead_of_the_format_and_none_leaves_the_format() -> None:
    given = GenerateParameters(grammar=GrammarParameters(type="regex", value="a+"))
    its = formats("hermes", "none")
    reading = its.reading(required())
    assert reading is not None
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None and "weather" in (asked.answer_grammar("") or "")
    assert "a+" not in (asked.answer_grammar("") or "")
    assert its.reading(offer((WEATHER,), ToolChoice("none"))) is None  # which leaves the grammar as it is


def test_a_request_is_asked_for_with_what_its_reader_needs() -> None:
    its = formats("hermes", "mistral")
    for offered, is_held in ((required(), True), (offer((WEATHER,), ToolChoice()), False), (Offer(), False)):
        reading = its.reading(offered)
        assert reading is not None
        asked = reading.applied_to(PromptRequest("", GenerateParameters()))
        assert (its.mark_ids, is_held) == (asked.shown_marks, asked.answer_grammar is not None)
        assert its.mark_ids
    reading = its.reading(required())
    assert reading is not None
    with pytest.raises(ValidationError, match="`ignore_eos` is not served"):
        reading.applied_to(PromptRequest("", GenerateParameters(ignore_eos=True)))


def test_errors_speak_of_tools() -> None:
    with pytest.raises(ValidationError, match="make a grammar of more than 65536 bytes"):
        answer_grammar_of("x" * 70_000)
    assert None is answer_grammar_of(None)
    with pytest.raises(
        ValidationError, match=r"^Input validation error: an answer cannot be held to `tools`: leave `tool_choice`"
    ):
        with renaming_errors(is_held=True):
            raise ValidationError("grammar is not supported: leave `grammar` out")
    with pytest.raises(ValidationError, match="grammar is not valid"), renaming_errors(is_held=False):
        raise ValidationError("grammar is not valid")


ANALYSIS = "<|channel|>analysis<|message|>Well, so<|end|><|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"


def test_messages_with_headers_are_held_too() -> None:
    its, tokenizer = formats("harmony", "harmony", *CHANNELS), marked(*CHANNELS)
    call = f'{TO_WEATHER}{{"place": "Zürich"}}'
    wrong = call.replace("place", "plaice")
    required_call = held(its, required()) or ""
    strict = held(its, offer((STRICT, TIME), ToolChoice())) or ""
    for grammar in (required_call, strict):
        for text in (call, ANALYSIS + call):
            assert accepts(tokenizer, grammar, text), text
        for text in (wrong, ANALYSIS + wrong, ANALYSIS, f"{call}<|end|><|start|>assistant{call}"):
            assert not accepts(tokenizer, grammar, text), text
    assert accepts(tokenizer, strict, f"{ANALYSIS}{FINAL}No.") and not accepts(tokenizer, required_call, f"{FINAL}No.")
    within = held(its, required(), "<|channel|>analysis<|message|>") or ""
    thoughts = ANALYSIS.removeprefix("<|channel|>analysis<|message|>")
    assert accepts(tokenizer, within, thoughts + call) and not accepts(tokenizer, within, call)
    reader = (its.reading(required()) or pytest.fail()).reader("", "", call_ids())
    content = whole([*reader.feed(ANALYSIS + call), *reader.end()])
    assert ("Well, so", "", [ONE]) == (content.reasoning, content.text, [(c.name, c.arguments) for c in content.calls])


@pytest.mark.parametrize("tools", [(), (WEATHER,)])
def test_a_client_s_grammar_holds_the_last_message(tools: tuple[Tool, ...]) -> None:
    reading = formats("harmony", "harmony", *CHANNELS).reading(offer(tools, ToolChoice()))
    assert reading is not None
    given = GenerateParameters(grammar=GrammarParameters(type="regex", value="yes|no"))
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None
    grammar = asked.answer_grammar("<|start|>assistant") or ""
    for text in (f"{FINAL}yes", f"{ANALYSIS}{FINAL}no"):
        assert accepts(marked(*CHANNELS), grammar, text), text
    for text in ("yes", f"{FINAL}maybe", f"{ANALYSIS}yes", ANALYSIS):
        assert not accepts(marked(*CHANNELS), grammar, text), text


def test_arguments_between_tags_keep_to_their_schema() -> None:
    properties = {
        "mode": {"type": "string", "enum": ["r", "w"]},
        "count": {"type": "integer"},
        "text": {"type": "string"},
        "any": {},
        "each": {"type": "array", "items": {"$ref": "#/$defs/each"}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["mode", "each"]}
    tool = Tool("f", parameters={**parameters, "$defs": {"each": {"enum": ["a"]}}}, strict=True)
    grammar = held(formats("qwen3_coder"), required(tools=(tool,))) or ""

    def written(**values: str) -> str:
        each = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function=f>\n{each}</function>\n</tool_call>"

    for text in (
        written(mode="r", each="[]"),
        written(mode="w", count="5", text="<x>\n</y>", any="what [ever", each='["a", "a"]'),
    ):
        assert accepts(marked(), grammar, text), text
    for text in (
        written(mode="r"),
        written(mode="x", each="[]"),
        written(mode="r", count="five", each="[]"),
        written(mode="r", each='["b"]'),
        written(mode="r", each="[]", other="x"),
    ):
        assert not accepts(marked(), grammar, text), text


PLAIN = ("qwen3_coder", "seed", "glm", "minimax")


def argument(name: str, value: str, key: str = "k") -> str:
    """A call of the function f with one argument, as the format writes it."""
    begin, end = f"<function=f>\n<parameter={key}>", "</parameter>\n</function>"
    return {
        "qwen3_coder": f"<tool_call>\n{begin}\n{value}\n{end}\n</tool_call>",
        "seed": f"<seed:tool_call>\n{begin}{value}{end}\n</seed:tool_call>",
        "glm": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{value}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }[name]


COLOR = {"$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}}}
# What a schema says of an argument, beside what stands in its root; what a model may write, what that is, and what not.
ARGUMENT_CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, COLOR, {"red": "red", "null": None}, ("green", '"red"')),
    ({"type": "string", "enum": ["a", None]}, {}, {"a": "a"}, ("b", "null")),
    ({"type": ["string", "null"], "enum": ["a", None]}, {}, {"a": "a", "null": None}, ("b",)),
    ({"const": 5}, {}, {"5": 5}, ("6", "five")),
    ({"enum": ['"q"\n</x>%', ""]}, {}, {'"q"\n</x>%': '"q"\n</x>%', "": ""}, ("q",)),
    (
        {"type": "array", "items": {"$ref": "#/properties/other"}},
        {"other": {"type": "integer"}},
        {"[1]": [1]},
        ('["a"]',),
    ),
    ({"type": "object", "properties": {"a/b": {"type": "integer"}}}, {}, {'{"a/b": 1}': {"a/b": 1}}, ("[]", "{1}")),
    ({"type": 5}, {}, {"anything": "anything"}, ()),
    ({"enum": ["a", "</parameter>", "</arg_value>"]}, {}, {"a": "a"}, ("b",)),
    ({"anyOf": [{"type": True}]}, {}, {"anything": "anything"}, ()),
    ({"type": "string", "enum": 5}, {}, {"anything": "anything"}, ()),
    ({"type": "string", "enum": [1, 2]}, {}, {"1": "1"}, ("3",)),
    ({"type": "integer", "enum": ["1"]}, {}, {"1": 1}, ("5",)),
    ({"type": "integer", "enum": [1.0, 2]}, {}, {"1.0": 1.0, "2": 2}, ("3",)),
    ({"$ref": "#/properties/other/anyOf/0"}, {"other": {"anyOf": [{"type": "integer"}]}}, {"5": 5}, ("x",)),
    ({"$ref": "#/$defs/My%20Int"}, {"$defs": {"My Int": {"type": "integer"}}}, {"5": 5}, ("x",)),
    (
        {"type": "array", "items": {"$ref": "#/$defs/My%20Int"}},
        {"$defs": {"My Int": {"type": "integer"}}},
        {"[5]": [5]},
        ("[true]",),
    ),
    (
        {"type": "array"},
        {},
        {
            '["</parameter>", "</arg_value>\\"", {"</function>": 1}]': [
                "</parameter>",
                '</arg_value>"',
                {"</function>": 1},
            ]
        },
        ("[",),
    ),
]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("schema", "beside", "good", "bad"), ARGUMENT_CASES)
def test_an_argument_between_tags_is_held_and_read_as_its_schema_says(
    name: str, schema: dict[str, Any], beside: dict[str, Any], good: dict[str, Any], bad: tuple[str, ...]
) -> None:
    root = {name: value for name, value in beside.items() if name == "$defs"}
    others = {name: value for name, value in beside.items() if name != "$defs"}
    parameters = {"type": "object", "properties": {"k": schema, **others}, "required": ["k"], **root}
    its, offered = formats(name), required(tools=(Tool("f", parameters=parameters),))
    grammar = held(its, offered) or ""
    reading = its.reading(offered)
    assert reading is not None
    for text, value in good.items():
        written = argument(name, text)
        assert accepts(marked(), grammar, written), text
        reader = reading.reader("", "", call_ids())
        [call] = whole([*reader.feed(written), *reader.end()]).calls
        assert {"k": value} == json.loads(call.arguments)
    for text in bad:
        assert not accepts(marked(), grammar, argument(name, text)), text


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("key", [" k", "k ", "", 'a</arg_key>b">c'])
def test_a_name_that_no_tag_can_have_is_refused(name: str, key: str) -> None:
    with pytest.raises(ValidationError, match="the function f has an argument of the name"):
        held(formats(name), required(tools=(Tool("f", parameters={"properties": {key: {}}}),)))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"additionalProperties": {"type": "integer"}}, {"5": 5}, "x"),
        ({"additionalProperties": True}, {"5": "5", "[1]": [1]}, None),
        ({"allOf": [{"properties": {"k": {"type": "integer"}}, "required": ["k"]}]}, {"5": 5}, "x"),
        ({"oneOf": [{"properties": {"k": {"type": "integer"}}}, {"properties": {"j": {}}}]}, {"5": 5}, "x"),
    ],
)
def test_arguments_that_are_not_named_in_properties_are_told_and_read(
    name: str, parameters: dict[str, Any], good: dict[str, Any], bad: str | None
) -> None:
    its, offered = formats(name), required(tools=(Tool("f", parameters={"type": "object", **parameters}),))
    grammar, reading = held(its, offered) or "", its.reading(offered)
    assert reading is not None
    for text, value in good.items():
        written = argument(name, text)
        assert accepts(marked(), grammar, written)
        reader = reading.reader("", "", call_ids())
        assert {"k": value} == json.loads(whole([*reader.feed(written), *reader.end()]).calls[0].arguments)
    assert bad is None or not accepts(marked(), grammar, argument(name, bad))


def test_a_text_ends_where_readers_say_that_it_does() -> None:
    grammar = held(formats("qwen3_coder"), required()) or ""
    assert accepts(marked(), grammar, f"<tool_call>\n{ON_ONE_LINE}\n</tool_call>".replace("place>", "place>\n"))


def test_a_schema_takes_as_much_of_a_grammar_as_it_is_long() -> None:
    kinds = ("integer", "boolean")
    properties = {f"option_{at}": {"type": kinds[at % 2], "description": "x" * 110} for at in range(25)}
    tool = Tool("f", parameters={"properties": properties, "$defs": {"unused": {"description": "x" * 9000}}})
    assert 9000 > len(held(formats("qwen3_coder"), required(tools=(tool,))) or pytest.fail())
    many = {f"a{at}": {"$ref": "#/$defs/large"} for at in range(2000)}
    tool = Tool("f", parameters={"properties": many, "$defs": {"large": {"type": "array", "description": "x" * 9000}}})
    with pytest.raises(ValidationError, match="make a grammar of more than 65536 bytes"), at_most(MOST_CALLS):
        held(formats("qwen3_coder"), required(tools=(tool,)))


def test_unions_of_unions_cost_what_they_are_long() -> None:
    """Each level refers twelve times to the one below."""
    levels: dict[str, Any] = {"d0": {"type": "integer"}}
    for at in range(1, 9):
        levels[f"d{at}"] = {"anyOf": [{"$ref": f"#/$defs/d{at - 1}"}] * 12}
    tool = Tool("f", parameters={"properties": {"k": {"$ref": "#/$defs/d8"}}, "required": ["k"], "$defs": levels})
    its, offered = formats("seed"), required(tools=(tool,))
    with at_most(MOST_CALLS):
        grammar, reading = held(its, offered) or "", its.reading(offered)
        assert accepts(marked(), grammar, argument("seed", "5")) and not accepts(
            marked(), grammar, argument("seed", "x")
        )
        reader = (reading or pytest.fail()).reader("", "", call_ids())
        content = whole([*reader.feed(argument("seed", "5")), *reader.end()])
        assert '{"k": 5}' == content.calls[0].arguments
        many = {f"a{at}": {"anyOf": [{"$ref": "#/$defs/d8"}]} for at in range(400)}
        levels["d0"] = {"type": "string"}
        parameters = {"properties": many, "$defs": levels}
        held(its, required(tools=(Tool("f", parameters=parameters),)))
        with pytest.raises(ValidationError, match="the strict function f has more than 5000 schemas and values"):
            held(its, required(tools=(Tool("f", parameters=parameters, strict=True),)))


@pytest.mark.parametrize(
    "parameters",
    [
        {
            "properties": {f"a{at}": {"$ref": "#/$defs/x"} for at in range(300)},
            "$defs": {"x": {"$ref": "#" + "/a" * 120_000}},
        },
        {
            "properties": {f"a{at}": {"$ref": "#/$defs/x"} for at in range(100)},
            "$defs": {"x": {"anyOf": [{"enum": ["v"] * 60_000}, {"type": "string"}]}},
        },
        {"properties": {"a0": {}}, "anyOf": [{}] * 100_000},
    ],
    ids=["reference", "values", "union"],
)
def test_reading_a_large_schema_costs_what_it_is_long(parameters: dict[str, Any]) -> None:
    its, offered = formats("seed"), required(tools=(Tool("f", parameters=parameters),))
    each = "".join(f"<parameter=a{at}>x</parameter>\n" for at in range(100))
    text = f"<seed:tool_call>\n<function=f>\n{each}</function>\n</seed:tool_call>"
    reader = (its.reading(offered) or pytest.fail()).reader("", "", call_ids())
    with at_most(MOST_CALLS), suppress(ValidationError):
        held(its, offered)
    with at_most(MOST_CALLS):
        [*(reader.feed(text) for _ in range(20)), *reader.end()]


def test_references_lead_anywhere_within_the_schema() -> None:
    groups = {"components": {"schemas": {"A": {"$ref": "#/components/schemas/B"}, "B": {"type": "integer"}}}}
    defined = {"$defs": {"g": {"h": {"items": {"$ref": "#/$defs/k"}, "type": "array"}}, "k": {"type": "integer"}}}
    properties = {"k": {"type": "array", "items": {"$ref": "#/components/schemas/A"}}, "l": {"$ref": "#/$defs/g/h"}}
    tool = Tool("f", parameters={"properties": properties, "required": ["k"], **groups, **defined})
    grammar = held(formats("seed"), required(tools=(tool,))) or ""
    both = argument("seed", "[1]").replace("</parameter>\n", "</parameter>\n<parameter=l>[2]</parameter>\n")
    assert accepts(marked(), grammar, argument("seed", "[1]")) and accepts(marked(), grammar, both)
    for wrong in (argument("seed", '["x"]'), both.replace("[2]", "[true]")):
        assert not accepts(marked(), grammar, wrong)


def test_a_reference_to_nothing_is_told_as_it_was_written() -> None:
    array = {"type": "array", "items": {"$ref": "#/$defs/nothing"}}
    tool = Tool("f", parameters={"properties": {"k": array, "l": {"$ref": "#/$defs/l"}}, "$defs": {"l": array}})
    grammar = held(formats("seed"), required(tools=(tool,))) or ""
    table = LLTokenizer(marked().to_str(), n_vocab=300, eos_token=[EOS])
    matcher = LLMatcher(table, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert "/$defs/nothing" in matcher.get_error()


def test_a_strict_call_is_read_as_the_grammar_has_it() -> None:
    """What looks like a forgotten tag is part of a text, and what looks like a tag part of a string of JSON."""
    properties = {"i": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}
    tool = Tool("f", parameters={"properties": properties, "required": ["i", "s", "l"]}, strict=True)
    its, offered = formats("seed"), required(tools=(tool,))
    values = {
        "i": 1,
        "s": "see\n<parameter=i>\n5\n</function>\n</seed:tool_call>.",
        "l": ["</parameter>", "\\", '"\n</parameter>'],
    }
    each = (value if isinstance(value, str) else json.dumps(value) for value in values.values())
    written = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in zip(values, each, strict=True))
    text = f"<seed:tool_call>\n<function=f>\n{written}</function>\n</seed:tool_call>"
    assert accepts(marked(), held(its, offered) or "", text)
    for parts in ([text], text):
        reader = (its.reading(offered) or pytest.fail()).reader("", "", call_ids())
        content = whole([*(piece for part in parts for piece in reader.feed(part)), *reader.end()])
        assert [values] == [json.loads(call.arguments) for call in content.calls] and not content.text


def test_a_strict_call_in_a_block_of_code_is_none() -> None:
    text = f"```json\n{CALL}\n```"
    for tools, num_calls in (((STRICT,), 0), ((WEATHER,), 1)):
        reader = (formats("json").reading(offer(tools, ToolChoice())) or pytest.fail()).reader("", "", call_ids())
        assert num_calls == len(whole([*reader.feed(text), *reader.end()]).calls)


@pytest.mark.parametrize("expression", ["https?://x", "//", r"a\//b/", r"\\//", "/", "a\\\nb", "a\nb"])
def test_slashes_of_an_expression_are_its_own(expression: str) -> None:
    reading = formats("hermes", "think").reading(Offer())
    given = GenerateParameters(grammar=GrammarParameters(type="regex", value=expression))
    asked = (reading or pytest.fail()).applied_to(PromptRequest("", given))
    written = {"https?://x": "http://x", r"a\//b/": "a//b/", r"\\//": "\\//", "a\\\nb": "a\nb"}
    text = written.get(expression, expression)
    assert asked.answer_grammar is not None
    grammar = asked.answer_grammar("") or ""
    assert accepts(marked(), grammar, text) and not accepts(marked(), grammar, text[1:])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", '{"name": "weather", "arguments": {"plaice": 1}}'),
        ("granite", '[{"name": "weather", "arguments": {"plaice": 1}}]'),
        ("pythonic", "So <|python_start|>[weather(plaice=1)]<|python_end|>"),
        ("llama3", 'So <|python_tag|>{"name": "weather", "parameters": {"plaice": 1}}'),
    ],
)
def test_what_a_strict_grammar_does_not_hold_is_read_as_no_call(name: str, text: str) -> None:
    for tools, num_calls in (((STRICT,), 0), ((WEATHER,), 1)):
        reading = formats(name).reading(offer(tools, ToolChoice())) or pytest.fail()
        reader = reading.reader("", "", call_ids())
        content = whole([*reader.feed(text), *reader.end()])
        assert num_calls == len(content.calls)
        assert num_calls or text == content.text


def test_a_model_that_is_told_of_tools_in_words_calls_in_json_whatever_its_format() -> None:
    its = replace(formats("qwen3_coder"), told_in_words=True)
    assert accepts(marked(), held(its, required()) or "", CALL)


def test_a_delete_character_is_one_of_a_text_too() -> None:
    parameters = {"properties": {"k": {"enum": ["a\x7f"]}}, "required": ["k"]}
    grammar = held(formats("seed"), required(tools=(Tool("f", parameters=parameters),))) or ""
    assert accepts(marked(), grammar, argument("seed", "a\x7f"))


def test_an_argument_may_have_any_name_that_its_tag_can_hold() -> None:
    parameters = {"type": "object", "properties": {"a b/~é": {"type": "integer"}}, "required": ["a b/~é"]}
    grammar = held(formats("qwen3_coder"), required(tools=(Tool("f", parameters=parameters),))) or ""
    assert accepts(marked(), grammar, argument("qwen3_coder", "5", "a b/~é"))
    assert not accepts(marked(), grammar, argument("qwen3_coder", "x", "a b/~é"))


def test_a_schema_behind_a_reference_has_its_arguments() -> None:
    node = {"type": "object", "properties": {"k": {"type": "array", "items": {"$ref": "#/$defs/N"}}}, "required": ["k"]}
    tool = Tool("f", parameters={"$ref": "#/$defs/N", "$defs": {"N": node}})
    grammar = held(formats("qwen3_coder"), required(tools=(tool,))) or ""
    assert accepts(marked(), grammar, argument("qwen3_coder", '[{"k": []}]'))
    assert not accepts(marked(), grammar, argument("qwen3_coder", "[1]"))


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        (
            {"properties": {"k": {"type": "string", "pattern": "a+"}}},
            "argument k with `pattern`, to which a text between",
        ),
        (
            {"properties": {"k": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}},
            "argument k with `maxLength`",
        ),
        ({"properties": {"k": {"$ref": "#/$defs/no"}}}, "argument k whose schema is not there"),
        ({"properties": {"k": {}}, "anyOf": [{"required": ["k"]}]}, "has `anyOf` beside its `properties`"),
        ({"properties": {"k": {}}, "additionalProperties": {"type": "string"}}, "might repeat others: set `additional"),
        ({"properties": {"k": {}}, "required": ["other"]}, "requires other, which is not in `properties`"),
    ],
)
def test_what_a_strict_function_cannot_be_held_to_between_tags_is_said(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        held(formats("qwen3_coder"), offer((Tool("f", parameters=parameters, strict=True),), ToolChoice()))
    assert held(formats("qwen3_coder"), required(tools=(Tool("f", parameters=parameters),)))


@pytest.mark.parametrize("odd", [[1], "x", 5])
def test_odd_schemas_are_no_reason_to_fail(odd: Any) -> None:
    for parameters in ({"properties": odd}, {"properties": {"k": {}}, "required": odd}):
        held(formats("qwen3_coder"), required(tools=(Tool("f", parameters=parameters),)))


def test_a_strict_call_begins_with_the_mark_that_holds_it() -> None:
    written = "<function=weather>\n<parameter=place>\nUlm\n</parameter>\n</function>"
    for tools, num_calls in (((STRICT,), 0), ((WEATHER,), 1)):
        reading = formats("qwen3_coder").reading(offer(tools, ToolChoice()))
        assert reading is not None
        reader = reading.reader("", "", call_ids())
        assert num_calls == len(whole([*reader.feed(written), *reader.end()]).calls)


def test_a_mark_in_letters_ends_thoughts_as_its_token_does() -> None:
    """A reader takes it for one, and what is behind it must keep to the client's grammar."""
    reading = formats("hermes", "mistral").reading(Offer())
    assert reading is not None
    given = GenerateParameters(grammar=GrammarParameters(type="regex", value="yes|no"))
    asked = reading.applied_to(PromptRequest("", given))
    assert asked.answer_grammar is not None
    grammar = asked.answer_grammar("[THINK]") or ""
    table = LLTokenizer(marked().to_str(), n_vocab=300, eos_token=[EOS])
    for text, is_held in (("hm[/THINK]yes", True), ("hm[/THINK]words", False)):
        matcher = LLMatcher(table, LLMatcher.grammar_from_lark(grammar), log_level=0)
        ids = list(text.encode())  # bytes are tokens here
        assert is_held is (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
