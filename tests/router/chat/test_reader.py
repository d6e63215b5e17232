"""Reading answers: calls in every format, reasoning, and whatever models write in their place."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from router.chat.formats import REASONING, TOOLS
from router.chat.pieces import Call, CallArguments, CallBegun, Content, Piece, Text, whole
from router.chat.reader import Reader, ReadingRules

NAMES = ("f", "get_weather")
PLACE = '{"place": "Zürich </tool_call> [TOOL_CALLS] }\\" {", "n": [1, {"a": null}]}'
END = "<｜tool▁call▁end｜>"


def reader(
    tools: str | None = None, reasoning: str | None = None, *, inside: bool = False, one: bool = False
) -> Reader:
    ids = map("id{}".format, itertools.count())
    rules = ReadingRules(TOOLS[tools] if tools else None, NAMES, not one, REASONING[reasoning] if reasoning else None)
    return Reader(rules, inside, ids.__next__)


def pieces(it: Reader, *parts: str) -> list[Piece]:
    return [*(piece for part in parts for piece in it.feed(part)), *it.end()]


def content(text: str = "", *calls: tuple[str, str], reasoning: str = "") -> Content:
    return Content(text, reasoning, [Call(f"id{n}", name, told) for n, (name, told) in enumerate(calls)])


F = ("f", '{"a": 1}')
WEATHER = ("get_weather", PLACE)
CALL = '{"name": "f", "arguments": {"a": 1}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"

# format, what a model writes, what that is
WRITTEN: list[tuple[str, str, Content]] = [
    ("hermes", HERMES, content("", F)),
    ("hermes", f"\n\n{HERMES}\n", content("", F)),
    ("hermes", f"Let me see.\n\n{HERMES}\nDone.\n", content("Let me see.\nDone.\n", F)),
    ("hermes", f"{HERMES}\n<tool_call>{{\"name\":\"get_weather\",\"arguments\":{PLACE}}}</tool_call>",
     content("", F, WEATHER)),
    ("hermes", f'<tool_call>{{"arguments": {PLACE}, "name": "get_weather"}}</tool_call>', content("", WEATHER)),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', content("", ("f", "{}"))),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', content("", ("f", "{}"))),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', content("", F)),
    ("hermes", '<tool_call>{"type": "function", "name": "f", "parameters": {"a": 1}, "x": [1]}</tool_call>',
     content("", F)),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", content("", F, F)),
    # brackets too few or too many, and no end
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', content("x", F)),
    ("hermes", f"<tool_call>{CALL}}}}}\n</tool_call>", content("", F)),
    ("hermes", f"<tool_call>{CALL}", content("", F)),
    ("hermes", f"<tool_call>{CALL}\n</tool_", content("", F)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>.', content(".", ("f", '{"a": [1'))),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', content("", ("f", '{"a": "x'))),
    ("hermes", '<tool_call>{"name": "f", "argu', content("", ("f", ""))),
    # what is no call is text
    ("hermes", "a < b", content("a < b")),
    ("hermes", "a <tool_c", content("a <tool_c")),
    ("hermes", " <tool_call>no</tool_call> ", content(" <tool_call>no</tool_call> ")),
    ("hermes", "<tool_call>\n{'name': 'f'}", content("<tool_call>\n{'name': 'f'}")),
    ("hermes", '<tool_call>{"name": "no", "arguments": {}}', content('<tool_call>{"name": "no", "arguments": {}}')),
    ("hermes", '<tool_call>{"name": 5}', content('<tool_call>{"name": 5}')),
    ("hermes", '<tool_call>{"other": 5, "name": "f"}', content('<tool_call>{"other": 5, "name": "f"}')),
    ("hermes", f'<tool_call>{{"{"x" * 99}": 1}}', content(f'<tool_call>{{"{"x" * 99}": 1}}')),
    ("hermes", '<tool_call>{"na', content('<tool_call>{"na')),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}.', content('<tool_call>{"arguments": {"a": 1}}.')),
    ("hermes", f"<tool_call>{{<tool_call>{CALL}", content("<tool_call>{", F)),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', content("", F)),
    ("llama3", ' {"type": "function", "name": "f", "parameters": {"a": 1}}', content("", F)),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}',
     content("", F, F)),
    ("llama3", '{"name": "f", "parameters": {"a": 1}};\n', content("", F)),
    ("llama3", '{"name": "f", "age": 3}', content('{"name": "f", "age": 3}')),
    ("llama3", '{"type": [1], "name": "f"}', content('{"type": [1], "name": "f"}')),
    ("llama3", '{"name": "f"}', content('{"name": "f"}')),
    ("llama3", '{"items": [1, 2]} are', content('{"items": [1, 2]} are')),
    ("llama3", '[1] says {"name": "f", "parameters": {}}', content('[1] says {"name": "f", "parameters": {}}')),
    ("llama3", "<|python_tag|>print(1)", content("<|python_tag|>print(1)")),
    ("llama3", "Hello.", content("Hello.")),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", content("", F)),
    ("mistral", f'[TOOL_CALLS][{CALL}, {{"name": "get_weather", "arguments": {PLACE}, "id": "abcdefghi"}}]',
     content("", F, WEATHER)),
    ("mistral", f"[TOOL_CALLS][{CALL}, {{", content("{", F)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', content("", F)),
    ("mistral", f'A.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{{"a": 1}}[TOOL_CALLS]get_weather{PLACE}',
     content("A.", F, WEATHER)),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]{}", content("[TOOL_CALLS]nothing[ARGS]{}")),
    ("mistral", f"[TOOL_CALLS]{'f' * 300}", content(f"[TOOL_CALLS]{'f' * 300}")),
    ("mistral", '[TOOL_CALLS]x[TOOL_CALLS]f[ARGS]{"a": 1}', content("[TOOL_CALLS]x", F)),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}" + END
     + "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + PLACE + END + "<｜tool▁calls▁end｜>",
     content("", F, WEATHER)),
    ("pythonic", "[f(a=1)]", content("", F)),
    ("pythonic", " [ f( a = 1 , ) , get_weather(place = 'Zürich', n=[1, (2,), {'x': None}, -.5e1, True,])]\n",
     content("", F, ("get_weather", '{"place": "Zürich", "n": [1, [2], {"x": null}, -5.0, true]}'))),
    ("pythonic", "So:<|python_start|>[f()]<|python_end|>.", content("So:.", ("f", "{}"))),
    ("pythonic", r"""[f(a='it\'s "\u00fc\x41\n\q\ud800', b="')")]""",
     content("", ("f", '{"a": "it\'s \\"üA\\n\\\\q\ufffd", "b": "\')"}'))),
    ("pythonic", "[f(a=1), f(a=", content("", F, ("f", '{"a": '))),
    ("pythonic", "[f(a=g())]", content("g())]", ("f", '{"a": '))),
    ("pythonic", "[f(1)]", content("1)]", ("f", "{"))),
    ("pythonic", f"[f(a={'[' * 3000}", content("", ("f", '{"a": ' + "[" * 3000))),
    ("pythonic", "[1] and (2)", content("[1] and (2)")),
    ("pythonic", "[print(1)]", content("[print(1)]")),
    ("pythonic", CALL, content("", F)),
    ("json", CALL, content("", F)),
    ("json", f"[{CALL}, {CALL}]", content("", F, F)),
    ("json", "none", content("none")),
    ("json", "", content("")),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "expected"), WRITTEN)
def test_an_answer_is_read_the_same_however_it_is_split(tools: str, text: str, expected: Content) -> None:
    assert expected == whole(pieces(reader(tools), text))
    assert expected == whole(pieces(reader(tools), *text))
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(8)))
        parts = [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]
        assert expected == whole(pieces(reader(tools), *parts))


# reasoning format, whether the answer begins within it, what the model writes, what that is
THOUGHT: list[tuple[str, bool, str, Content]] = [
    ("think", False, "<think>\nWhy?\n\n</think>\n\nSo.\n", content("So.\n", reasoning="Why?")),
    ("think", False, "\n<think>Why? </thin </think>So", content("So", reasoning="Why? </thin")),
    ("think", False, "So <think>no</think>", content("So <think>no</think>")),
    ("think", False, " So</think>", content(" So</think>")),
    ("think", False, "<thin", content("<thin")),
    ("think", False, "<think>Why", content(reasoning="Why")),
    ("think", False, "<think>Why</thi", content(reasoning="Why</thi")),
    ("think", False, "<think></think>So", content("So")),
    ("think", False, "", content()),
    ("think", True, "\nWhy?\n</think>\nSo", content("So", reasoning="Why?")),
    ("think", True, "</think>\n\nSo", content("So")),
    ("think", True, f"{HERMES}</think>{HERMES}", content("", F, reasoning=HERMES)),
    ("mistral", False, "[THINK]Why?[/THINK]So", content("So", reasoning="Why?")),
    ("granite", False, "Here is my thought process: Why? Here is my response: So", content("So", reasoning="Why?")),
]


@pytest.mark.parametrize(("name", "inside", "text", "expected"), THOUGHT)
def test_reasoning_is_read_the_same_however_it_is_split(name: str, inside: bool, text: str, expected: Content) -> None:
    for step in (1, 2, 3, 5, 7, 1000):
        parts = [text[start : start + step] for start in range(0, len(text), step)]
        assert expected == whole(pieces(reader("hermes", name, inside=inside), *parts))
    assert expected.reasoning == whole(pieces(reader(None, name, inside=inside), text)).reasoning


def test_arguments_come_as_they_are_written() -> None:
    it = reader("hermes")
    assert [] == it.feed(' <tool_call>{"name": "f')
    assert [CallBegun(0, "id0", "f")] == it.feed('"')
    assert not it.feed(', "argum') and it.is_in_call
    assert [CallArguments(0, '{"a": "</to')] == it.feed('ents": {"a": "</to')
    assert [CallArguments(0, "ol_call> ü")] == it.feed("ol_call> ü")
    assert [CallArguments(0, '"}')] == it.feed('"}} ')
    assert [CallBegun(1, "id1", "f"), CallArguments(1, "{")] == it.feed(
        '</tool_call><tool_call>{"name": "f", "arguments": {'
    )
    assert it.is_in_call
    assert [CallArguments(1, "}")] == it.feed("}}</tool_call>")
    assert ([Text("x")], [], [Text(" ")]) == (it.feed("x"), it.feed(" "), it.end())
    assert not it.is_in_call


def test_text_is_not_held_back_longer_than_it_must() -> None:
    it = reader("hermes", "think")
    shown = [[piece.text for piece in it.feed(part) if isinstance(piece, Text)] for part in "Hi <toy <x"]
    assert [["H"], ["i"], [], [], [], [], [" <toy"], [], [], [" <x"]] == shown


def test_with_one_call_at_most_later_ones_are_dropped() -> None:
    text = f"{HERMES}\n{HERMES} So {HERMES}."
    assert content("So.", F) == whole(pieces(reader("hermes", one=True), text))
    assert content("So.", F) == whole(pieces(reader("hermes", one=True), *text))


def test_a_text_in_place_of_arguments_is_one_that_can_be_sent() -> None:
    text = '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>'
    assert '"\\ud800"' == whole(pieces(reader("hermes"), text)).calls[0].arguments


HOSTILE = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>{"),
    ("hermes", '<tool_call>{"type": '),
    ("hermes", '<tool_call>{"name": "f", "arguments": {'),
    ("hermes", f"{HERMES}"),
    ("hermes", " "),
    ("hermes", "<"),
    ("llama3", '{"type": {'),
    ("llama3", CALL),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]f"),
    ("mistral", "[TOOL_CALLS][{"),
    ("json", '[{"arguments": "'),
    ("pythonic", "[f(a=1),"),
    ("pythonic", "[f(a=[[{'"),
    ("pythonic", "[f"),
]


@pytest.mark.parametrize(("tools", "unit"), HOSTILE)
@pytest.mark.parametrize("step", [3, 10**9])
def test_reading_costs_what_the_answer_is_long(tools: str, unit: str, step: int) -> None:
    def calls(count: int) -> tuple[int, int]:
        it, text, most = reader(tools, "think"), unit * count, 0
        num = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal num
            num += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            for start in range(0, len(text), step):
                it.feed(text[start : start + step])
                most = max(most, len(it._source._text) - it._source._at)
            it.end()
        finally:
            sys.setprofile(None)
        return num, most

    few, many = calls(300), calls(600)
    assert many[0] < 2.5 * few[0] + 500
    assert max(few[1], many[1]) < 40  # what waits unread is shorter than a mark


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "[f(a=", ")]"),
    *('{"name": "f", "arguments": ', '"name"', '"arguments"', ": ", ", ", "{", "}", "[", "]", '"', "\\", "f", "(", ")"),
    *("'", "1", "None", "-", "é", "\n", " ", ";", "x" * 70, '{"a": 1}', "<", "\\u00", "<｜tool▁sep｜>"),
]


@pytest.mark.parametrize("name", TOOLS)
def test_whatever_a_model_writes_is_read_the_same_however_it_is_split(name: str) -> None:
    draw = random.Random(name)
    for _ in range(300):
        parts = draw.choices(FRAGMENTS, k=draw.randrange(1, 25))
        text, reasoning = "".join(parts), draw.choice(["think", None])
        told = whole(pieces(reader(name, reasoning), text))
        assert told == whole(pieces(reader(name, reasoning), *parts))
        assert told == whole(pieces(reader(name, reasoning), *text))
        if not told.calls and not told.reasoning and reasoning is None:
            kept = text
            for mark in TOOLS[name].around:
                kept = kept.replace(mark, "")
            assert kept == told.text
