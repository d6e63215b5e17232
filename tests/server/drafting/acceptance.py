"""How many tokens a verification brings on held-out text: the engine itself, with a speculative model beside.

The router's own choice of how much to guess is left out: each step asks for the same number of guesses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine, StepResult
from tests.embedded_model import train
from tests.embedded_model.speculative.target import FOLDER
from tests.server.driver import GREEDY, Drafter, Prompt, generate, load_engine, sampled

SEED = 7
ANSWER = 96
PROMPT = 24
WAYS = ("greedy", "sampled")


@dataclass
class Steady(Drafter):
    """Asks for as many proposals in every step, and drafts all of them."""

    verifications: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.proposed: dict[int, Sequence[int]] = {}
        self.guessed: list[tuple[int, int, list[int]]] = []  # sequence, tokens that it had generated, guesses

    def ask(self, request: pb.StepRequest) -> None:
        self.proposed.clear()
        request.proposals = self.most
        request.proposed_ids.extend(range(len(self.answers)))

    def read(self, result: StepResult) -> None:
        self.proposed = {id: token_ids for id, token_ids, _ in result.proposals}

    def draft(self, request: pb.StepRequest, id: int, prompt: Prompt, first: int) -> pb.Extension:
        so_far = len(prompt.tokens)
        guesses = list(self.proposed.pop(id, ()))[: prompt.max_new_tokens - so_far - 1]
        self.guessed.append((id, so_far, guesses))
        came = self.came(id, prompt, first)
        token_ids = [prompt.tokens[-1], *guesses]
        draft = request.drafts.add(id=id, position=first + so_far - 1, token_ids=token_ids, came=came)
        if guesses:
            self._open[id] = draft
        return draft

    def judge(self, draft: pb.Extension, came: int) -> None:
        super().judge(draft, came)
        self.verifications += 1
        self.tokens += came

    @property
    def accepted_length(self) -> float:
        """Tokens of a verification."""
        return self.tokens / self.verifications


def beside(folder: Path, guesses: int) -> Engine:
    """The embedded model, with a speculative one beside it."""
    speculative = {"speculative_model": str(folder), "speculative_method": "auto", "speculate": guesses}
    return load_engine(FOLDER, tokens=32768, total_tokens=512, speculative=speculative)


def questions(count: int, way: str) -> list[Prompt]:
    """Beginnings of held-out documents."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = [tokenizer.encode(document.text).ids for document in train.held_out(SEED, count)]
    settings = [GREEDY if way == "greedy" else sampled(seed) for seed in range(count)]
    return [
        Prompt(ids[: min(PROMPT, len(ids) // 2)], max_new_tokens=ANSWER, sampling=sampling)
        for ids, sampling in zip(texts, settings, strict=True)
    ]


def answered(engine: Engine, count: int, way: str) -> list[Prompt]:
    """What the model generates behind them, up to its end mark."""
    found = generate(engine, questions(count, way))
    ends = [(*p.tokens, train.EOS_ID).index(train.EOS_ID) + 1 for p in found]
    return [p for p, end in zip(found, ends, strict=True) if _cut(p, end)]


def _cut(prompt: Prompt, end: int) -> bool:
    del prompt.tokens[end:]
    prompt.max_new_tokens = len(prompt.tokens)
    return len(prompt.tokens) > 1


def measured(engine: Engine, expected: Sequence[Prompt], guesses: int) -> Steady:
    """Generate all of it once more with guesses. Raises where a token is another one than without."""
    prompts = [Prompt(p.token_ids, p.max_new_tokens, p.sampling) for p in expected]
    drafter = Steady([p.tokens for p in expected], most=guesses)
    generate(engine, prompts, drafter)
    assert [p.tokens for p in expected] == [p.tokens for p in prompts]
    return drafter


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the accepted length of one speculative model, greedy and at temperature 1, as JSON."""
    parser = argparse.ArgumentParser(description="How many tokens a verification brings on held-out text.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--guesses", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    engine = beside(options.folder, options.guesses)
    facts: dict[str, Any] = {}
    for way in WAYS:
        found = measured(engine, answered(engine, options.documents, way), options.guesses)
        facts[way] = {"accepted_length": round(found.accepted_length, 3), "verifications": found.verifications}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
