"""Expressions for names of layers: as `re` reads them, and in a time that has a bound whatever a config says."""

from __future__ import annotations

import random
import re
import time

import pytest

from server.quant import sizes
from server.quant.configs import FormatError, compiled
from server.quant.expressions import MOST_STEPS, Expression, ExpressionError, Steps
from server.quant.left_out import Names

ATOMS = ["a", "b", ".", r"\d", r"\.", "[ab]", "[^a]", r"[\w.-]", r"\w", "1", "[]a]", "{"]
REPEATS = ["*", "+", "?", "{1,2}", "{2}", "{,2}", "{1,}", "*?", "{0}"]


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
        return f"{chance.choice(['(?=', '(?!'])}{inside})"
    if kind < 0.74:
        return chance.choice(["^", "$", r"\b", r"\Z", r"\A"])
    return inside + written(chance, depth + 1)


def test_whatever_is_written_matches_as_re_does() -> None:
    chance = random.Random(3)
    answers = set()
    for _ in range(1500):
        text = written(chance)
        expected, found = re.compile(text), Expression(text, Steps())
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
    ],
)  # fmt: skip
def test_what_tools_write_is_understood(text: str) -> None:
    places = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.3.gate_proj")
    names = [f"model.layers.{layer}.{place}" for layer in (0, 1, 15, 40) for place in places]
    found = compiled([text])[0]
    assert [bool(re.match(text, name)) for name in names] == [found.match(name) for name in names]


# Some of these take `re` longer than anybody lives.
ENDLESS = [
    "(.+)+$x", "(((((((((.*)*)*)*)*)*)*)*)*)*!", ".*" * 400 + "x", "(?:.{1,99}){1,15}!", "((a|a)*|(.*b)*)*#" * 20,
    "(?=(.*.*)*x)" * 60 + "y",
]  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS)
def test_no_expression_takes_long(text: str) -> None:
    started = time.thread_time()
    found = Expression(text, steps := Steps())
    assert not any(found.match(f"model.layers.{layer}.self_attn.q_proj") for layer in range(100))
    assert time.thread_time() - started < 10
    assert MOST_STEPS - 5_000_000 < steps.left


def test_all_names_of_a_config_have_a_bound_together() -> None:
    steps = Steps(most=300)
    first, second = Expression(".*q_proj", steps), Expression(".*k_proj", steps)
    with pytest.raises(ExpressionError, match="take too long to compare with the names of all layers: take another"):
        for layer in range(100):
            first.match(f"layers.{layer}.v_proj")
            second.match(f"layers.{layer}.v_proj")


REFUSED = {
    "(": "a group is not closed", ")": "closes no group", "[a": "a class is not closed", "*a": "nothing to repeat",
    "a**": "behind another", r"(a)\1": r"`\\1` is not understood", "(?<=a)b": r"begins with `\(\?<` is not understood",
    "a*+": "gives nothing back", "(?i)a": r"begins with `\(\?i` is not", "[b-a]": "wrong order",
    "a{3,2}": "wrong order",
    "a\\": r"`\\` is not understood", "(?P<1>a)": "a name that is none", "(" * 40 + ")" * 40: "more than 30 groups",
    "(?:(?:(?:){999}){999}){999}": "more than 2000 parts", "(?:a{99}){99}": "more than 2000 parts",
    "(?P<a": "a name that is none", r"[\q]": r"`\\q` is not understood",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_understood_is_told(text: str) -> None:
    with pytest.raises(FormatError, match=r"must be a regular one\. Given: .*; download config\.json again$") as raised:
        Names((f"re:{text}",))
    assert re.search(REFUSED[text], str(raised.value))


def test_a_config_that_never_ends_is_refused_by_plans_as_by_the_reader() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+(": {}}}
    with pytest.raises(FormatError, match="a group is not closed"):
        sizes.of_config({"quantization_config": gptq})
