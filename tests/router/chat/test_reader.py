"""Reading answers: calls in every format, reasoning, and whatever models write in their place."""

from __future__ import annotations

import itertools
import random

import pytest

from router.chat.formats import REASONING, TOOLS
from router.chat.pieces import Call, Content, Piece, whole
from router.chat.reader import Manner, Reader

NAMES = ("f", "get_weather")
PLACE = '{"place": "Zürich </tool_call> [TOOL_CALLS] }\\" {", "n": [1, {"a": null}]}'
END = "<｜tool▁call▁end｜>"


def reader(
    tools: str | None = None, reasoning: str | None = None, *, inside: bool = False, one: bool = False
) -> Reader:
    ids = map("id{}".format, itertools.count())
    manner = Manner(TOOLS[tools] if tools else None, NAMES, not one, REASONING[reasoning] if reasoning else None)
    return Reader(manner, inside, ids.__next__)


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
