"""The speculative models of the embedded one guess as much as is said of them, and learn what they are meant to."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.embedded_model import train
from tests.embedded_model.speculative import make
from tests.embedded_model.speculative.target import Target
from tests.running import ROOT
from tests.server.drafting import acceptance

NOTES = ROOT / "tests" / "embedded_model"
KINDS = sorted(make.KINDS)
MOST_BYTES = 2_000_000
FEW = 6  # documents
GUESSES = 4


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads((NOTES / "SPECULATIVE.json").read_text())


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


def files(kind: str) -> list[Path]:
    return sorted((NOTES / kind).iterdir())


def test_together_they_are_small() -> None:
    assert [["config.json", make.FILES.get(kind, "model.safetensors")] for kind in KINDS] == [
        [path.name for path in files(kind)] for kind in KINDS
    ]
    assert sum(path.stat().st_size for kind in KINDS for path in files(kind)) < MOST_BYTES


@pytest.mark.parametrize("way", acceptance.WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_what_is_said(facts: dict[str, Any], kind: str, way: str) -> None:
    engine = acceptance.beside(NOTES / kind, GUESSES)
    found = acceptance.measured(engine, acceptance.answered(engine, FEW, way), GUESSES)
    assert found.accepted_length == pytest.approx(facts[kind][way][str(FEW)], abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_guesses_what_the_trainer_does(target: Target, kind: str) -> None:
    student = make.made(kind, target, seed=0)
    make.read(NOTES / kind, student)
    engine = acceptance.beside(NOTES / kind, GUESSES)
    prompts = acceptance.answered(engine, FEW, "greedy")
    texts = [p.token_ids + p.tokens for p in prompts]
    seen = [target.sees(*train.with_targets([text])) for text in texts]
    same = [
        guesses == student.guesses(seen[id], len(prompts[id].token_ids) + so_far - 2, len(guesses))
        for id, so_far, guesses in acceptance.measured(engine, prompts, GUESSES).guessed
        if guesses
    ]
    assert len(same) > 100 and sum(same) >= 0.98 * len(same)


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_every_weight(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 256)
    student, fresh = (make.made(kind, target, seed=3) for _ in range(2))
    ids, targets = next(target.texts(3))
    make.take_step(student, make.optimizers_of(student), target.sees(ids, targets), 1.0)
    same = [name for name, weight in student.trained.items() if torch.equal(weight, fresh.trained[name])]
    assert [] == same


def test_what_they_learn_from_is_not_what_they_are_judged_by(target: Target) -> None:
    seen = {tuple(row) for ids, _ in islice(target.texts(acceptance.SEED + make.TEXTS), 20) for row in ids.tolist()}
    held_out = [target.tokenizer.encode(d.text).ids for d in train.held_out(acceptance.SEED) if d.kind == "story"]
    assert len(seen) > 100 and not any(row[: len(ids)] == tuple(ids) for ids in held_out for row in seen)
