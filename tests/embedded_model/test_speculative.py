"""What makes speculative models of the embedded one teaches all of their weights, and not from what judges them."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from tests.embedded_model import train
from tests.embedded_model.speculative import make
from tests.embedded_model.speculative.target import Target
from tests.server.drafting import acceptance

KINDS = sorted(make.KINDS)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_every_weight(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 256)
    student, fresh = (make.made(kind, target, seed=3) for _ in range(2))
    ids, targets = next(target.texts(3))
    make.take_step(student, make.optimizers_of(student), target.sees(ids, targets), 1.0)
    same = [name for name, weight in student.trained.items() if torch.equal(weight, fresh.trained[name])]
    assert [] == same


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_ones_are_right_as_often_as_is_said(kind: str) -> None:
    said = json.loads((make.FOLDER / "SPECULATIVE.json").read_text())[kind]
    engine = acceptance.beside(make.FOLDER / kind, make.GUESSES)
    found = acceptance.measured(engine, acceptance.answered(engine, 5, "greedy"), make.GUESSES)
    assert found.accepted_length > 0.85 * said["accepted_length"]


def test_the_shipped_ones_are_small() -> None:
    files = [path for kind in KINDS for path in (make.FOLDER / kind).iterdir()]
    assert sum(path.stat().st_size for path in files) < 2_000_000


def test_what_they_learn_from_is_not_what_they_are_judged_by(target: Target) -> None:
    seen = {tuple(row) for ids, _ in islice(target.texts(acceptance.SEED + make.TEXTS), 20) for row in ids.tolist()}
    held_out = [target.tokenizer.encode(d.text).ids for d in train.held_out(acceptance.SEED) if d.kind == "story"]
    assert len(seen) > 100 and not any(row[: len(ids)] == tuple(ids) for ids in held_out for row in seen)
