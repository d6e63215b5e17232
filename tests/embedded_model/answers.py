"""What the embedded model knows about the server: its flags, its routes and a few basic ideas.

Every entry is a fact written down once in `answers.json`, with wordings for the question and the answer around it.
The questions that the model cannot answer are there too, so that it learns to say so politely.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_name("answers.json").read_text())


@dataclass(frozen=True)
class Flag:
    """One command line flag: what it does, its default and how people ask for its effect."""

    name: str
    does: str
    default: str
    example: str
    wishes: Sequence[str]


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str


FLAGS = tuple(Flag(**flag) for flag in _TEXTS["flags"])


def _flag_question(rng: random.Random, flag: Flag) -> str:
    return rng.choice(
        (
            f"What does {flag.name} do?",
            f"What does {flag.name} do?",
            f"What does {flag.name} mean?",
            f"What is {flag.name}?",
            f"What is {flag.name} for?",
            f"Explain {flag.name}.",
            f"Explain {flag.name}",
            f"Tell me about {flag.name}.",
            f"How do I use {flag.name}?",
            f"When do I need {flag.name}?",
            f"Can you explain {flag.name}?",
            f"What does the flag {flag.name} do?",
            f"What does {flag.name.removeprefix('--')} do?",
            f"what does {flag.name} do",
            f"what is {flag.name}",
            flag.name,
        )
    )


def _describe(rng: random.Random, flag: Flag) -> str:
    subject = rng.choice((flag.name, flag.name, f"The flag {flag.name}"))
    parts = [f"{subject} {flag.does}"]
    if flag.default:
        parts.append(flag.default)
    if rng.random() < 0.35 and flag.example != flag.name:
        parts.append(f"For example: {flag.example}")
    return " ".join(parts)


def _about_flag(rng: random.Random, flag: Flag) -> Exchange:
    roll = rng.random()
    if flag.default and roll < 0.25:
        question = rng.choice(
            (
                f"What is the default of {flag.name}?",
                f"What is the default value of {flag.name}?",
                f"What is the default for {flag.name}?",
            )
        )
        return Exchange(question, flag.default)
    if flag.wishes and roll < 0.55:
        wish = rng.choice(flag.wishes)
        question = rng.choice((f"How do I {wish}?", f"How can I {wish}?", f"I want to {wish}."))
        return Exchange(question, f"Use {flag.name}. It {flag.does}")
    return Exchange(_flag_question(rng, flag), _describe(rng, flag))


def _unknown(rng: random.Random) -> Exchange:
    if rng.random() < 0.6:
        form = rng.choice(_TEXTS["unknown_forms"])
        question = form.format(subject=rng.choice(_TEXTS["unknown_subjects"]))
    else:
        question = rng.choice(_TEXTS["unknown_questions"]).format(
            place=rng.choice(_TEXTS["countries"]),
            language=rng.choice(_TEXTS["languages"]),
            left=rng.randint(1, 99),
            right=rng.randint(1, 99),
        )
    return Exchange(question, rng.choice(_TEXTS["unknown_answers"]))


def make_exchange(rng: random.Random) -> Exchange:
    """One question about the server, about the model itself or about something unknown to it."""
    roll = rng.random()
    if roll < 0.58:
        return _about_flag(rng, rng.choice(FLAGS))
    if roll < 0.9:
        idea = rng.choice(_TEXTS["ideas"])
        return Exchange(rng.choice(idea["questions"]), rng.choice(idea["answers"]))
    return _unknown(rng)
