"""Expressions for names of layers: as `re` reads them, and in a time that has a bound whatever a config says."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from server.checkpoint import formats
from server.checkpoint.formats.compressed import CompressedFormat
from server.quantisation import sizes
from server.quantisation.configs import Budget, Expression, ExpressionError, FormatError, compiled
from server.quantisation.exclusions import Names, Rules

ATOMS = ["a", "b", ".", r"\d", r"\.", "[ab]", "[^a]", r"[\w.-]", r"\w", "1", "[]a]", r"\{", r"[\[:]", "(?#a)"]
REPEATS = ["*", "+", "?", "{1,2}", "{2}", "{,2}", "{1,}", "*?", "{0}", "{0,3}?", "++", "?+"]
GROUPS = ["(?=", "(?!", "(?>"]


def written(chance: random.Random, depth: int = 0) -> str:
    """An expression of any shape."""
    kind = chance.random()
    if depth > 3 or kind < 0.35:
        return chance.choice(ATOMS)
    inside = written(chance, depth + 1)
    if kind < 0.5:
        return f"(?:{inside}){chance.choice(REPEATS)}"
    if kind < 0.6:
        return f"(?P<g{chance.randrange(10**9)}>{inside}|{written(chance, depth + 1)})"
    if kind < 0.68:
        return f"{chance.choice(GROUPS)}{inside})"
    if kind < 0.74:
        return chance.choice(["^", "$", r"\b", r"\Z", r"\A", r"(?<=a)", r"(?<![b.])"])
    return inside + written(chance, depth + 1)


def test_whatever_is_written_matches_as_re_does() -> None:
    chance = random.Random(3)
    answers = set()
    for _ in range(600):
        text = written(chance)
        expected, found = re.compile(text), Expression(text, Budget())
        for _ in range(10):
            name = "".join(chance.choice("ab1.") for _ in range(chance.randrange(1, 8)))
            answers.add(bool(expected.match(name)))
            assert bool(expected.match(name)) == found.match(name), (text, name)
    assert {True, False} == answers


@pytest.mark.parametrize(
    "text",
    [
        r".*self_attn.*", r"^(?!.*mlp\.experts).*", r"model\.layers\.(0|1|2)\..*", r".*\.(?:1[5-9]|[2-9]\d)\..*gate.*",
        r"^(?:(?!down).)*$", r".*q_proj", r"model\.layers\.\d{1,2}\.mlp\.(up|down)_proj$", r".*\bmlp\b.*",
        r".*lm_head", r".*(q|k|v)_proj$", r".*\.mlp\.gate.*", r"(\.?model)+\.layers\.([0-9]|1[0-9])\.(mlp|self_attn).*",
        r"(model)?\.?layers.*", r".*(?<!shared_)experts.*", r".*\.(\d)\.(?:.*\.)?\w+",
    ],
)  # fmt: skip
def test_what_tools_write_is_understood(text: str) -> None:
    places = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.3.gate_proj", "mlp.gate")
    names = [f"model.layers.{layer}.{place}" for layer in (0, 1, 15, 40) for place in places] + ["lm_head"]
    found = compiled([text], Budget())[0]
    assert [bool(re.match(text, name)) for name in names] == [found.match(name) for name in names]


# Some of these take `re` longer than anybody lives, or `regex` all memory to compile.
ENDLESS = [
    "(.+)+$x", "(?:a|aa)+x", "(?:a|aa)+[bx]", "((a+b?)+c?)+[x!]", "(((((((((.*)*)*)*)*)*)*)*)*)*[!#]",
    ".*" * 400 + "[xX]", "(?:.{1,99}){1,15}[!#]", "((a|a)*|(.*b)*)*[#!]" * 20, "(?=(.*.*)*[xX])" * 60 + "y",
    r"(.*)(.*)(.*)(.*)(.*)[xX]\1", "(" * 30 + "a" + ")*" * 30 + "[xX]", "(?:" * 50 + "a" + ")?" * 50 + "[xX]",
    "(?=" * 240 + "a" + ")" * 240, "(" * 490 + ")" * 490, "(" * 90 + "a" + ")+" * 90, "(" * 30 + "a+" + ")+" * 30,
    "a{99999999}", "(?:a?){4294967294}", "a{0,4294967294}", "((((((a{9}){9}){9}){9}){9}){9}){9}",
    "[ab]{9999999}[cd]", "(?:(?:(?:(?:(?:){999}){999}){999}){999}){999}", "a{" + "9" * 900 + "}",
    r"[\0-\U0010ffff]" * 60, "(?:" + "ab?" * 300 + "){99}", "(a|" * 200 + ")" * 200, "a|" * 499,
]  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS)
def test_no_expression_takes_long(text: str) -> None:
    started = time.thread_time()
    try:
        found = Expression(text, Budget(most_s=0.2))
        for name in [*(f"model.layers.{layer}.self_attn.q_proj" for layer in range(100)), "a" * 40, "a" * 3000]:
            found.match(name)
    except ExpressionError as error:
        assert re.search(r"take too long|too large|more than \d+ characters", str(error))
    assert time.thread_time() - started < 5


def test_all_names_of_a_config_have_a_bound_together() -> None:
    budget = Budget(most_s=0.01)
    first, second = Expression(".*q_proj", budget), Expression(".*k_proj", budget)
    with pytest.raises(ExpressionError, match="take too long to compare with the names of all layers: take another"):
        for layer in range(100_000):
            first.match(f"layers.{layer}.v_proj")
            second.match(f"layers.{layer}.v_proj")


def test_all_expressions_of_a_config_have_a_bound_together() -> None:
    with pytest.raises(FormatError, match="more than 1000000 characters, with what is repeated written out"):
        compiled([f"(?:layers{number}){{1,50}}" for number in range(2000)], Budget())


SLOW = ".*" * 12 + "[xX]"  # some 10 ms for the names below


def with_expressions(expression: str, count: int = 1) -> dict[str, Any]:
    """A config with so many expressions in each of its lists."""
    listed = [f"re:{expression}{number}" for number in range(count)]
    dynamic = {entry.replace("re:", "-:"): {} for entry in listed}
    lists = {"modules_to_not_convert": listed, "ignore": listed, "modules_in_block_to_quantize": listed}
    return {"quant_method": "gptq", "bits": 4, "dynamic": dynamic, **lists}


def test_all_lists_of_a_config_have_a_bound_together() -> None:
    budget = Budget(most_s=0.3)
    format = formats._make(with_expressions(SLOW), budget)
    of_lists = (format.exclusions.named.hold, format.exclusions.only.hold, format.exclusions.rules.place_of)
    started = time.thread_time()
    with pytest.raises(ExpressionError, match="take too long"):
        for number in range(100_000):
            of_lists[number % 3](f"layers.{number}.self_attn.q_proj")
    assert number >= 3 and time.thread_time() - started < 0.6


def test_all_lists_of_a_config_have_their_expressions_counted_together() -> None:
    formats._make(with_expressions("a", 1024))
    with pytest.raises(FormatError, match="has 4100 expressions for names of layers, and 4096 at most are served"):
        formats._make(with_expressions("a", 1025))


def test_each_layer_of_a_large_mixture_may_be_named() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(61) for expert in range(256) for part in ("gate", "up", "down")
    ]  # fmt: skip
    even, weights = names[::2], {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": names, "weights": weights}}
    dense = {name: {"bits": 16} for name in even}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": even}
    started = time.thread_time()
    for config in (
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": even},
        {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [even[:9], names[1::2]], "ignore": even},
        {"quant_method": "auto-round", "bits": 4, "extra_config": dense | {".*shared.*": {"bits": 8}}},
        packed,
    ):
        format = formats._make(config)
        storage = sizes.of_config({"quantization_config": config})
        assert storage is not None
        for reader in (format, storage):
            assert [True, False] * 2000 == [reader.leaves_out(name) for name in names[-4000:]]
    assert isinstance(format, CompressedFormat)
    assert all(format._targets.of(name) is not None for name in names[-4000:])
    assert format._targets.of("model.layers.61.mlp.experts.0.up_proj") is None
    assert time.thread_time() - started < 60  # each of 4,000 names against 46,848 takes minutes


def test_a_rule_for_one_name_keeps_its_place_among_expressions() -> None:
    rules = Rules({"-:a\\.b$": {}, "+:a.*": {}, "-:a\\.c$": {}, "+:a\\.b$": {}, "+:d\\\\e$": {}, "-:a.d$": {}})
    names = ("a.b", "a.c", "a.bb", "d\\e", "d", "a-d")
    assert [0, 1, 1, 4, None, 1] == [rules.place_of(name) for name in names]


REFUSED = {
    "(": "unterminated subpattern", ")": "unbalanced parenthesis", "[a": "unterminated character set",
    "*a": "nothing to repeat", "a**": "multiple repeat", r"(a)\2": "invalid group reference 2",
    "(?<=a*)b": "fixed-width", "(?i)a": "flags are not understood", "a(?s:b)": "flags are not", "(?-i:a)": "flags are",
    "[b-a]": "bad character range b-a", "a{3,2}": "min repeat greater", "a\\": "bad escape",
    "(?P<1>a)": r"\(bad character in group name\)", "(" * 400 + ")" * 400: "too deep in each other",
    "(?:(?:(?:){999}){999}){999}": "more than 1000000 characters", "(?P<a": r"\(missing >, unterminated name\)",
    r"[\q]": r"bad escape \\q", "[[a]]": "nested set", "(?R)": "flags are not", "(a)(?1)": "flags are not",
    "(?P>a)": r"unknown extension \?P>", "(?P<a>b)(?P<a>c)": r"\(redefinition of group name\)",
    "(?|a|b)": "flags are not",
    "(?:model){e<=2}": "begins no repeat", "(?:model){1<=e<=3}": "begins no repeat", "a{": "begins no repeat",
    r"[a[:alpha:]]": r"`\[:`, is not understood", r"\p{Lu}": "begins no repeat", r"\L<a>": r"bad escape \\L",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_understood_is_told(text: str) -> None:
    with pytest.raises(FormatError, match=r"must be a regular one\. Given: .*; download config\.json again$") as raised:
        Names((f"re:{text}",))
    assert re.search(REFUSED[text], str(raised.value))


def test_a_config_that_never_ends_is_refused_by_plans_as_by_the_reader() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+(": {}}}
    with pytest.raises(FormatError, match="unterminated subpattern"):
        sizes.of_config({"quantization_config": gptq})
