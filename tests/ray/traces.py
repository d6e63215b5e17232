"""Requests that begin alike, for fleets: what is asked, and a trace of it that `lockstep-bench simulate` reads."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_PREFIXES = 60
ANSWER_TOKENS = 8
WORDS = "the a fox bear tree house river little old green red night day sun moon and then said went saw".split()


def trace(window: int, seed: int) -> list[dict[str, Any]]:
    """60 prefixes with four requests each, those of `window` prefixes at a time in any order."""
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    for first in range(0, NUM_PREFIXES, window):
        some = []
        for number in range(first, min(first + window, NUM_PREFIXES)):
            prefix = f"{seed} {window} {number}: " + " ".join(draw.choice(WORDS) for _ in range(170))
            some += [{"inputs": f"{prefix} {n}", "parameters": {"max_new_tokens": ANSWER_TOKENS}} for n in range(4)]
        draw.shuffle(some)
        made += some
    return made


@dataclass(frozen=True)
class Arrived:
    """A request as it was sent. at_s: since the first one; prefix: the number by which the deployed policy knows it."""

    at_s: float
    num_tokens: int
    prefix: int


def keep(path: Path, arrived: Sequence[Arrived]) -> None:
    """Write them as Mooncake does. A prompt of less than 512 tokens has one hash, for all of its full blocks.

    So prompts must differ behind their last full block alone, as those of `trace` do.
    """
    lines = [
        {
            "timestamp": round(1000 * one.at_s),
            "input_length": one.num_tokens,
            "output_length": ANSWER_TOKENS,
            "hash_ids": [one.prefix],
        }
        for one in arrived
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
