"""Reading answers: calls in every format, reasoning, and whatever models write in their place."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest

from router.chat.arguments import Arguments
from router.chat.formats import REASONING, TOOLS
from router.chat.pieces import Call, CallArguments, CallBegun, Content, Piece, Text, whole
from router.chat.reader import Reader, ReadingRules

SCHEMAS: dict[str, Any] = {
    "f": {
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"$ref": "#/$defs/o"},
            "n": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
            "e": {"enum": [1, 2.5, None]},
        },
        "$defs": {"o": {"type": ["object", "array"]}},
    },
    "get_weather": {},
}
PLACE = '{"place": "Zürich </tool_call> [TOOL_CALLS] }\\" {", "n": [1, {"a": null}]}'
END = "<｜tool▁call▁end｜>"


def reader(
    tools: str | None = None,
    reasoning: str | None = None,
    *,
    inside: bool = False,
    one: bool = False,
    is_held: bool = False,
) -> Reader:
    ids = map("id{}".format, itertools.count())
    its, thoughts = TOOLS[tools] if tools else None, REASONING[reasoning] if reasoning else None
    functions = {name: Arguments(schema) for name, schema in SCHEMAS.items()}
    rules = ReadingRules(its, functions, not one, is_held, thoughts)
    return Reader(rules, ids.__next__, is_reasoning=inside)


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
    ("hermes", f'<tool_call>{{"name": "f", "{"x" * 129}": 1}}', content('": 1}', ("f", ""))),
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
    ("pythonic", "[f(a={'x': null}, b=true)]", content("", ("f", '{"a": {"x": null}, "b": true}'))),
    ("pythonic", "[1] and (2)", content("[1] and (2)")),
    ("pythonic", "[print(1)]", content("[print(1)]")),
    ("pythonic", CALL, content("", F)),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```" + END
     + "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + PLACE + "\n```" + END
     + "<｜tool▁calls▁end｜>",
     content("", F, WEATHER)),
    ("kimi", "So.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}"
     "<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>" + PLACE
     + "<|tool_call_end|><|tool_calls_section_end|>", content("So.", F, WEATHER)),
    ("lfm2", "<|tool_call_start|>[f(a=1), f(s='x')]<|tool_call_end|>Wait.",
     content("Wait.", F, ("f", '{"s": "x"}'))),
    ("lfm2", f"<|tool_call_start|>{CALL}<|tool_call_end|>", content("", F)),
    # values between tags, by what the schema says of them
    ("qwen3_coder", "I look.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
     content("I look.", F)),
    ("qwen3_coder", '<tool_call>\n<function=f>\n<parameter=s>\n\n a "b"\n<x>\n\n</parameter>\n<parameter=o>\n{"x": [1]}'
     "\n</parameter>\n<parameter=n>\nnull\n</parameter>\n<parameter=e>\n2.5\n</parameter>\n</function>\n</tool_call>",
     content("", ("f", '{"s": "\\n a \\"b\\"\\n<x>\\n", "o": {"x": [1]}, "n": null, "e": 2.5}'))),
    ("qwen3_coder", "<function=f><parameter=a>True</parameter><parameter=n>5</parameter><parameter=o>no</parameter>"
     "<parameter=x>[1]</parameter><parameter=y>1</parameter></function>",
     content("", ("f", '{"a": true, "n": "5", "o": "no", "x": [1], "y": "1"}'))),
    ("qwen3_coder", "<tool_call><function=f></function><function=get_weather>\n</function></tool_call> Done.",
     content("Done.", ("f", "{}"), ("get_weather", "{}"))),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>\n<tool_call><function=f>"
     "</function></tool_call>", content("", F, ("f", "{}"))),
    ("qwen3_coder", HERMES, content("", F)),
    # closing tags that the model forgot, and what looks like them
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=a>\n1\n</function>\n</tool_call>Done.",
     content("Done.", ("f", '{"s": "x", "a": 1}'))),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</function>", content("", ("f", '{"s": "x"}'))),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n<function=g>\n<parameter=k>\n</function>\nx"
     "\n</parameter>\n</function>\n</tool_call>",
     content("", ("f", '{"s": "<function=g>\\n<parameter=k>\\n</function>\\nx"}'))),
    ("qwen3_coder", '<tool_call>\n<function=f>\n<parameter=o>\n["a, "b"]\n</parameter>\n<parameter=s>\nx\n'
     "</parameter>\n</function>\n</tool_call>\nand text",
     content("and text", ("f", '{"o": "[\\"a, \\"b\\"]", "s": "x"}'))),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nuse\n<parameter=\n</parameter>\n</parameter>\n"
     "</function>\n</tool_call>", content("", ("f", '{"s": "use\\n<parameter="}'))),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nuse\n<parameter=foo",
     content("", ("f", '{"s": "use\\n<parameter=foo'))),
    ("qwen3_coder", "Use `<function=f>` for that.", content("Use `<function=f>` for that.")),
    ("qwen3_coder", '<function=f>{"a": 1}</function>', content('<function=f>{"a": 1}</function>')),
    ("qwen3_coder", "<function=f>\n<parameter=o>\n['\\ud800']\n</parameter>\n</function>",
     content("", ("f", '{"o": ["\ufffd"]}'))),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|><|tool_call_begin|>"
     'functions.f:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', content("", ("f", "{}"), F)),
    ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", content("", ("f", "{}"))),
    ("gemma", '<|tool_call>call:f{s:<|"|>x<|"|>,a:<tool_call|><|tool_call>call:f{a:1}<tool_call|>',
     content("", ("f", '{"s": "x", "a": null'), F)),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nab", content("", ("f", '{"s": "ab'))),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", content("", ("f", '{"a": '))),
    ("qwen3_coder", "<tool_call><function=no></function>", content("<tool_call><function=no></function>")),
    ("qwen3_coder", "<tool_call>no", content("<tool_call>no")),
    ("qwen3_coder", "<function=f", content("<function=f")),
    ("qwen3_coder", f"<function={'x' * 300}", content(f"<function={'x' * 300}")),
    ("qwen3_coder", f"<function=f><parameter={'x' * 300}>", content("", ("f", f'{{"{"x" * 300}": '))),
    ("qwen3_coder", "<function=f><parameter=a>NaN</parameter></function>", content("", ("f", '{"a": "NaN"}'))),
    ("seed", "<seed:tool_call><function=f><parameter=o>{'x': [1, None, True], 'y': 'é'}</parameter></function>"
     "</seed:tool_call>",
     content("", ("f", '{"o": {"x": [1, null, true], "y": "é"}}'))),
    ("seed", "<seed:tool_call><function=f><parameter=o>{'x': set()}</parameter></function></seed:tool_call>",
     content("", ("f", '{"o": "{\'x\': set()}"}'))),
    ("seed", "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
     content("", F)),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", content("", F)),
    ("glm", "Yes.<tool_call>f<arg_key>s</arg_key><arg_value>\nx\n</arg_value><arg_key>a</arg_key><arg_value>1"
     "</arg_value></tool_call>\n<tool_call>get_weather</tool_call>",
     content("Yes.", ("f", '{"s": "\\nx\\n", "a": 1}'), ("get_weather", "{}"))),
    ("glm", "<tool_call>no\n</tool_call>", content("<tool_call>no\n</tool_call>")),
    ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", content("", F)),
    ("minimax", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
     '<invoke name="f"><parameter name="s">x</parameter></invoke>\n</minimax:tool_call>',
     content("", F, ("f", '{"s": "x"}'))),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', content("", F)),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
     ' json<|message|>{"a": 1}', content("I look.", F)),
    ("harmony", ' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|end|><|start|>assistant<|channel|>commentary '
     "to=f<|message|>{}<|call|>", content("", F, ("f", "{}"))),
    ("harmony", "<|channel|>final<|message|>Well.<|return|>", content("Well.")),
    ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", content("a\n\nb")),
    ("harmony", "<|channel|>commentary to=browser.search<|message|>{}<|call|>", content("{}")),
    ("harmony", " no header, to=x", content(" no header, to=x")),
    ("harmony", "<|channel|>fin", content("")),
    ("harmony", "to=ulm is the way", content("to=ulm is the way")),
    ("harmony", f"<|channel|>{'x' * 500}<|message|>", content(f"<|channel|>{'x' * 500}<|message|>")),
    ("gemma", "<|tool_call>call:f{a:1}<tool_call|>", content("", F)),
    ("gemma", 'So.<|tool_call>call:get_weather{place:<|"|>Zürich, "x" {}\n<|"|>,n:[1,None,{deep:<|"|><|"|>,t:true}],'
     "o:{},w:as is}<tool_call|><|tool_call>call:f{}<tool_call|>",
     content("So.", ("get_weather", '{"place": "Zürich, \\"x\\" {}\\n", "n": [1, null, {"deep": "", "t": true}], '
                     '"o": {}, "w": "as is"}'), ("f", "{}"))),
    ("gemma", '<|tool_call>call:f{<|"|>a b<|"|>:-1.5e3,s:NaN}', content("", ("f", '{"a b": -1.5e3, "s": "NaN"}'))),
    ("gemma", '<|tool_call>call:f{s:<|"|>ab', content("", ("f", '{"s": "ab'))),
    ("gemma", "<|tool_call>call:no{}<tool_call|>", content("<|tool_call>call:no{}<tool_call|>")),
    ("gemma", f"<|tool_call>{CALL}<tool_call|>", content("", F)),
    ("command", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
     content("", F)),
    ("granite", f"[{CALL}]", content("", F)),
    ("hunyuan", f"<tool_calls>[{CALL}]</tool_calls>", content("", F)),
    ("olmo3", "<function_calls>f(a=1)\nget_weather()</function_calls>", content("", F, ("get_weather", "{}"))),
    ("olmo3", "<function_calls>\nf(a=1)\nno()\n</function_calls>", content("no()\n</function_calls>", F)),
    ("lfm2", "<|tool_call_start|>f(a=1)<|tool_call_end|>.", content(".", F)),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', content("", F)),
    ("gemma", '<|tool_call>call: f {s:"a, \\"b",a:1}<tool_call|>', content("", ("f", '{"s": "a, \\"b", "a": 1}'))),
    ("granite", f"<|tool_call|>[{CALL}, {CALL}]", content("", F, F)),
    ("nemotron", f"<TOOLCALL>[{CALL}]</TOOLCALL>", content("", F)),
    ("json", CALL, content("", F)),
    ("json", f"```json\n{CALL}\n```\n", content("", F)),
    ("json", f"```\n[{CALL}]\n``` So.", content("So.", F)),
    ("json", "```json\n{}\n```", content("```json\n{}\n```")),
    ("json", "```python\nf()\n```", content("```python\nf()\n```")),
    ("pythonic", f"{CALL}\n{CALL}", content("", F, F)),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=o>\n['it\"s', null]\n</parameter>\n</function>\n"
     "</tool_call>", content("", ("f", '{"o": ["it\\"s", null]}'))),
    ("gemma", '<|tool_call>call:f{"s":"x", "a b" : 1}<tool_call|>', content("", ("f", '{"s": "x", "a b": 1}'))),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final'
     "<|message|>I think so, really.<|end|>", content("I think so, really.", F)),
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
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So",
        content("So", reasoning="Why?"),
    ),
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>Why?\n<|end|><|start|>assistant<|channel|>analysis<|message|>How?<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        content("", F, reasoning="Why?\n\nHow?"),
    ),
    ("harmony", False, "<|channel|>analysis<|message|>Why", content(reasoning="Why")),
    ("gemma", False, "<|channel>thought\nWhy?\n<channel|>So", content("So", reasoning="Why?")),
    ("gemma", False, "<|channel>Why?<channel|>So", content("So", reasoning="Why?")),
    ("gemma", True, "Why?\n<channel|>So", content("So", reasoning="Why?")),
    (
        "command",
        False,
        "<|START_THINKING|>Why?<|END_THINKING|>\n<|START_RESPONSE|>\nSo<|END_RESPONSE|>",
        content("So", reasoning="Why?"),
    ),
    ("command", False, "<|START_RESPONSE|>So<|END_RESPONSE|>\n", content("So")),
    ("answer", False, "<think>\nWhy?\n</think>\n<answer>\nSo\n</answer>", content("So", reasoning="Why?")),
    ("response", True, "Why?\n</think>\n\n<response>\nSo < 5\n</response>\n", content("So < 5", reasoning="Why?")),
    (
        "answer",
        False,
        "<think>\n</think>\nIn XML:\n<answer>\n1\n</answer>\nDone.",
        content("In XML:\n<answer>\n1\n</answer>\nDone."),
    ),
    ("response", False, "<response>\n<response>1</response>\n</response> \n", content("<response>1</response>")),
    ("response", False, f"<response>So.</response>\n{HERMES}", content("So.", F)),
    ("response", False, "<response>So.</response>\n<tool", content("So.</response>\n<tool")),
    (
        "harmony",
        False,
        '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>analysis'
        "<|message|>I think so, really.<|end|>",
        content("", F, reasoning="I think so, really."),
    ),
    (
        "harmony",
        True,
        "I think.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        content("Hi", reasoning="I think."),
    ),
    ("granite", False, "Here is my thought process: Why? Here is my response: So", content("So", reasoning="Why?")),
]


@pytest.mark.parametrize(("name", "inside", "text", "expected"), THOUGHT)
def test_reasoning_is_read_the_same_however_it_is_split(name: str, inside: bool, text: str, expected: Content) -> None:
    for step in (1, 2, 3, 5, 7, 1000):
        parts = [text[start : start + step] for start in range(0, len(text), step)]
        assert expected == whole(pieces(reader("hermes", name, inside=inside), *parts))
    assert expected.reasoning == whole(pieces(reader(None, name, inside=inside), text)).reasoning


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thoughts_that_end_in_a_call_and_not_otherwise_are_left_by_it(step: int) -> None:
    def read(text: str) -> Content:
        parts = [text[start : start + step] for start in range(0, len(text), step)]
        return whole(pieces(reader("hermes", "think", inside=True), *parts))

    assert content("", F, F, reasoning="Why?") == read(f"Why?\n{HERMES}\n{HERMES}\n")
    assert content("So.", reasoning=f"Why?\n{HERMES} No.") == read(f"Why?\n{HERMES} No.</think>So.")
    assert content("", reasoning="Why?\n<tool_call>no") == read("Why?\n<tool_call>no")
    assert content("", ("f", '{"a": '), reasoning="Why?") == read('Why?<tool_call>{"name": "f", "arguments": {"a": ')


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
    ("deepseek_v3", "<｜tool▁call▁begin｜>function"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"),
    ("qwen3_coder", "<function=f>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>"),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter>"),
    ("qwen3_coder", "\n</"),
    ("glm", "<tool_call>f<arg_key>"),
    ("glm", "<tool_call>"),
    ("minimax", '<invoke name="'),
    ("gemma", "<|tool_call>call:"),
    ("gemma", "<|tool_call>call:f{a:"),
    ("gemma", "<|tool_call>call:f{a:[{b:"),
    ("harmony", "<|channel|>"),
    ("harmony", "<|start|>"),
    ("harmony", "<|channel|>analysis<|message|>"),
    ("harmony", " to=functions.f<|message|>{"),
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
    *("<function=f>", "<parameter=", ">", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *(
        "</arg_value>",
        '<invoke name="f">',
        "</invoke>",
        '<parameter name="s">',
        "<|channel|>",
        "<|message|>",
        "<|end|>",
    ),
    *(
        "<|start|>assistant",
        "analysis",
        " to=functions.f",
        "<|tool_call_begin|>functions.f:0",
        "```json",
        "<seed:tool_call>",
    ),
    *("<|tool_call_argument_begin|>", "<minimax:tool_call>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f", "="),
    *(
        "<|tool_call>call:f",
        '<|"|>',
        "a:",
        "<tool_call|>",
        "<|START_ACTION|>",
        "<|tool_call|>",
        "<TOOLCALL>",
        '"tool_name"',
    ),
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
        if not told.calls and not told.reasoning and reasoning is None and not TOOLS[name].channels:
            kept = text
            for mark in TOOLS[name].around:
                kept = kept.replace(mark, "")
            assert kept == told.text
