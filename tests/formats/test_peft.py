"""Adapters that PEFT wrote, in an environment of its own: `make test-formats`.

Every option of its LoRA on every kind of family: a sequence with the adapter gets PEFT's logits, one without gets the
model's, to the last bit. So it is with the model that an adapter was merged into, whose weights are PEFT's too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from server.adapters.config import AdapterError
from server.adapters.identity import content_key
from server.checkpoint.convert import convert_once
from server.checkpoint.weights import Checkpoint
from server.merge import command
from server.merge.job import Job
from server.stepping.engine import Engine
from tests.formats.peft_cases import CASES, GENERATED, PROMPT
from tests.formats.test_libraries import HERE, interpreter
from tests.running import ROOT
from tests.server import published
from tests.server.driver import all_logits, load_engine

APART = 1e-4  # absolutely, and of each logit
ROUGH = {"qwen3_next": 1e-3}  # whose rounding grows so much that PEFT's own merged model is as far away
ENCODING = ("t5", "t5-gated", "mt5")
SHARED = "is of the table that encoder and decoder share, with which peft computes nothing"
NO_LAYER = "is of no layer that adapters can change in this model"
MULTIPLIED = "is of a layer whose inputs or outputs the model multiplies"
# What is refused, and the words in which it is: whole options, and options of cases.
REFUSED = {
    ("*", "larger"): "is of 110 tokens, and the model is served with 103",
    **{(case, option): SHARED for case in ENCODING for option in ("embedding", "embedding-dora", "saved-table")},
    # Matrices of compressed keys and values are taken apart, and convolutions compute with other numbers.
    **{("deepseek_v3", option): NO_LAYER for option in ("plain", "patterns", "rank-stabilised", "exclude", "smaller")},
    **{(case, "bias-all"): NO_LAYER for case in ("granitemoehybrid", "nemotron_h", "falcon_h1")},
    ("falcon_h1", "lora-bias"): MULTIPLIED,
}
TIED_HEAD = "and the model scales what a head gets that is tied to its table"
UNMERGED = {
    **{(case, option): SHARED for case in ENCODING for option in ("embedding", "embedding-dora", "saved-table")},
    **{(case, "saved"): TIED_HEAD for case in ENCODING},
}
# What PEFT's own merged model has wrongly where a head is tied: it changes the table and with it the head.
TABLES = ("embed_tokens", "wte", "word_embeddings", "shared", "lm_head", "embed_in", "embed_out")

pytestmark = pytest.mark.formats


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what PEFT wrote."""
    folder = tmp_path_factory.mktemp("peft")
    command = (interpreter("peft"), HERE / "make_peft.py", folder)
    given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=3600)
    assert found.returncode == 0, found.stderr[-4000:]
    assert not (failed := sorted(folder.glob("*/*.txt"))), failed[0].read_text()
    return folder


def adapters(folder: Path) -> Iterator[tuple[Path, Tensor]]:
    """Each adapter of a model, with PEFT's logits."""
    for path in sorted(folder.glob("*/oracle.logits")):
        if path.parent.name == "pickle":
            convert_once("adapter", path.parent, folder / "converted")
            yield folder / "converted", load_file(path)["logits"]
        else:
            yield path.parent, load_file(path)["logits"]


def logits_of(engine: Engine, adapter: int = 0) -> Tensor:
    return all_logits(engine, PROMPT, GENERATED if engine.has_encoder else (), adapter=adapter)


def check(which: str, found: Tensor, expected: Tensor) -> None:
    apart = ROUGH.get(which.split()[0], APART)
    torch.testing.assert_close(found, expected, atol=apart, rtol=apart, msg=lambda told: f"{which}: {told}")


@pytest.mark.parametrize("case", [*CASES, *published.CASES])
@torch.inference_mode()
def test_logits_are_those_of_peft(made: Path, case: str) -> None:
    engine = load_engine(made / case / "model", adapters=2)
    assert engine.adapters is not None
    alone, count = logits_of(engine), 0
    for folder, expected in adapters(made / case):
        key, option = content_key(folder), folder.name
        if refusal := REFUSED.get((case, option)) or REFUSED.get(("*", option)):
            with pytest.raises(AdapterError, match=refusal):
                engine.adapters.prepare(key, folder)
            continue
        engine.adapters.prepare(key, folder)
        engine.adapters.place([(2, key)])
        found, known = logits_of(engine, 2), expected.shape[1]
        check(f"{case} {option}", found[:, :known], expected)
        assert found[:, known:].eq(float("-inf")).all(), option  # tokens that the adapter does not know
        assert torch.equal(alone, logits_of(engine)), option
        assert not torch.allclose(alone[:, :known], expected, atol=1e-2), option
        engine.adapters.place([(2, b"")])
        engine.adapters.forget(key)
        count += 1
    assert count >= 3


@pytest.mark.parametrize("case", [*CASES, *published.CASES])
@torch.inference_mode()
def test_merged_models_compute_what_peft_does(made: Path, tmp_path: Path, case: str) -> None:
    for folder, expected in adapters(made / case):
        option, merged = folder.name, tmp_path / folder.name
        job = Job(str(made / case / "model"), str(made / case / "model"), str(folder), str(merged), ())
        refusal = UNMERGED.get((case, option))
        if option == "lora-bias" and not all_biases_have_a_place(made / case):
            refusal = "is of a layer that has no bias in the model"
        if refusal:
            with pytest.raises(AdapterError, match=refusal):
                command.run(job)
            assert not merged.exists()
            continue
        command.run(job)
        found = logits_of(load_engine(merged))
        check(f"{case} {option}", found, expected)


def all_biases_have_a_place(folder: Path) -> bool:
    """Whether every layer that the adapter changes has a bias in the model."""
    names = [name.removesuffix(".lora_B.bias") for name in Checkpoint(folder / "lora-bias").names() if "bias" in name]
    biased = {name.removesuffix(".bias") for name in Checkpoint(folder / "model").names() if name.endswith(".bias")}
    return all(any(name.endswith(f".{one}") for one in biased) for name in names)


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(made: Path, tmp_path: Path, case: str) -> None:
    count = 0
    for theirs in sorted((made / case).glob("*.merged")):
        option = theirs.name.removesuffix(".merged")
        if (case, option) in UNMERGED:
            continue
        job = Job(*([str(made / case / "model")] * 2), str(made / case / option), str(tmp_path / option), ())
        command.run(job)
        expected, found = Checkpoint(theirs), Checkpoint(tmp_path / option)
        for name in {*expected.names()} & {*found.names()}:
            if name.split(".")[-2] in TABLES:
                continue
            weights = [c.read(name, c.shape_of(name)) for c in (expected, found)]
            torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=1e-4, msg=f"{option}: {name}")
        count += 1
    assert count >= 5
