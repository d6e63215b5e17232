"""The prompts of `offline`: the lines of a file, or random token ids, and the tokenizer that they need.

Only the tokenizer and the numbers on the command line are looked at here; whether a prompt fits the limits of a server
is found out by starting one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.report import BenchError
from benchmark.shards import cached_file
from benchmark.steps import Detokenise, random_prompts
from router.text import Detokeniser, ModelTokenizer, TokenizerError


@dataclass(frozen=True)
class Prompt:
    """The tokens of one prompt, and how many to generate after it."""

    token_ids: Sequence[int]
    max_new_tokens: int


def load_tokenizer(location: str, *, with_eos: bool) -> ModelTokenizer:
    """The model's tokenizer, from its folder or where it was downloaded to; without end tokens unless asked for."""
    folder = Path(location).expanduser()
    if not folder.is_dir():
        cached = cached_file(location, "tokenizer.json")
        if cached is None:
            raise BenchError(f"{location} is not on this machine yet: give a folder, or start a server with it once")
        folder = cached.parent
    try:
        tokenizer = ModelTokenizer.load(str(folder))
    except ValueError as error:
        raise BenchError(str(error)) from None
    return tokenizer if with_eos else ModelTokenizer.of(tokenizer.tokenizer, frozenset())


def detokenising(location: str) -> Detokenise:
    """The model's tokenizer making text, as a server does for a stream."""
    tokenizer = load_tokenizer(location, with_eos=False)
    return lambda prompt: Detokeniser(tokenizer, prompt).push


def read_prompts(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Prompt]:
    """Read the prompts of `--prompts`. Raises BenchError that names the line."""
    try:
        lines = args.prompts.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --prompts {args.prompts}: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line), args.output_length, tokenizer))
            except (ValueError, TypeError, AttributeError, TokenizerError) as error:
                raise BenchError(f"{args.prompts}, line {number}: {error}") from None
    if not prompts:
        raise BenchError(f"{args.prompts} has no prompts: write one JSON object a line")
    return prompts


def _prompt(line: Any, default_length: int, tokenizer: ModelTokenizer) -> Prompt:
    if not isinstance(line, dict) or not ("prompt" in line or "token_ids" in line):
        raise ValueError('not an object with "prompt" or "token_ids"')
    ids = line["token_ids"] if "token_ids" in line else tokenizer.encode(line["prompt"])
    new = line.get("max_new_tokens", default_length)
    size = tokenizer.tokenizer.get_vocab_size()
    if not ids or not isinstance(ids, list) or any(type(id) is not int or not 0 <= id < size for id in ids):
        raise ValueError(f"token ids must be a list of whole numbers below {size}, and at least one")
    if type(new) is not int or new < 1:
        raise ValueError(f"max_new_tokens is {new}: give a whole number of at least 1")
    return Prompt(ids, new)


def synthetic_prompts(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Prompt]:
    """`--num-prompts` prompts of random token ids, the most of several; the same seed gives the same ids."""
    size = tokenizer.tokenizer.get_vocab_size()
    count = args.num_prompts if isinstance(args.num_prompts, int) else max(args.num_prompts)
    drawn = random_prompts(count, args.input_length, size, args.seed)
    return [Prompt(token_ids, args.output_length) for token_ids in drawn]


def warmup_prompt(prompts: Sequence[Prompt]) -> Prompt:
    """The shortest of the prompts, with one decode step if it has any."""
    shortest = min(prompts, key=lambda prompt: len(prompt.token_ids))
    return Prompt(shortest.token_ids, min(2, shortest.max_new_tokens))
