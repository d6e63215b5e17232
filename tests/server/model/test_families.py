"""Parity, incremental and invariance for every family, float32 on a CPU; `test_tensor_parallel.py` has the fourth.

Families have the reference backend and the compiled kernels by turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.arch.families import FAMILIES, WRAPPERS
from server.arch.spec import validate
from server.stepping.engine import Engine
from tests.combinations import by_turns
from tests.server import published, tiny
from tests.server.checkpoints import CASES, Checkpoints, Oracle
from tests.server.driver import GREEDY, Prompt, all_logits, generate, load_engine, sampled

PROMPT = [int(i) for i in torch.randint(4, 103, (64,), generator=torch.Generator().manual_seed(0))]
NEW_TOKENS = 32
VISION_MODELS = (("qwen3_5", "qwen3_5"), ("qwen3_5_moe", "qwen3_5_moe"))  # `model_type`, and the case of its text
LoadCase = Callable[[str, str], tuple[Engine, Oracle]]
WAYS = ("reference", "kernels")
RECURRENT = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2",
    "granitemoehybrid",
    "lfm2_moe",
    "granitemoehybrid-dense",
    "nemotron_h",
    "mamba2",
    "falcon_h1",
    "falcon_h1-unnormed",
)  # whose states are of one sequence alone
LONG = ("qwen3_5", "lfm2", "granitemoehybrid")  # one of each kind of recurrence
ENCODER_DECODERS = ("t5", "t5-gated", "mt5")  # whose prompts are encoded whole and shared with no one


@pytest.fixture
def load_case(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> LoadCase:
    """A case's engine in one of the ways, and its oracle."""

    def load(case: str, way: str) -> tuple[Engine, Oracle]:
        folder, oracle = checkpoints(case)
        return load_engine(folder, kernels=request.getfixturevalue("kernels") if way == "kernels" else None), oracle

    return load


@pytest.mark.parametrize(("case", "way"), by_turns(CASES, WAYS))
@torch.inference_mode()
def test_logits_equal_the_oracle(load_case: LoadCase, case: str, way: str) -> None:
    engine, oracle = load_case(case, way)
    (done,) = generate(engine, [Prompt(PROMPT, max_new_tokens=NEW_TOKENS, chunk=23)])
    expected = oracle(PROMPT, done.tokens)
    atol = tolerance(engine)
    torch.testing.assert_close(expected, all_logits(engine, PROMPT, done.tokens), atol=atol, rtol=0)
    # And step by step: every token was the oracle's first choice, with the oracle's log-probability.
    decoded = expected[-NEW_TOKENS - 1 : -1].log_softmax(-1)
    assert decoded.argmax(-1).tolist() == done.tokens
    torch.testing.assert_close(decoded.max(-1).values, torch.tensor(done.logprobs), atol=atol, rtol=0)


def tolerance(engine: Engine) -> float:
    """A recurrence sums over all tokens, and the oracle in another order."""
    return 5e-4 if engine.model.spec.recurrences else 1e-4


@pytest.mark.parametrize(("case", "way"), [(case, way) for case in LONG for way in WAYS])
@torch.inference_mode()
def test_a_recurrence_is_the_oracles_over_thousands_of_tokens(load_case: LoadCase, case: str, way: str) -> None:
    engine, oracle = load_case(case, way)
    whole = [int(i) for i in torch.randint(4, 103, (2000,), generator=torch.Generator().manual_seed(1))]
    (done,) = generate(engine, [Prompt(whole, max_new_tokens=4, chunk=777)])
    logits = all_logits(engine, whole, done.tokens)
    torch.testing.assert_close(oracle(whole, done.tokens), logits, atol=tolerance(engine), rtol=0)


@pytest.mark.parametrize(("case", "way"), by_turns(CASES, WAYS[::-1]))
def test_chunks_and_neighbours_do_not_change_the_tokens(load_case: LoadCase, case: str, way: str) -> None:
    engine, _ = load_case(case, way)
    prompts = [
        Prompt(PROMPT[:length], max_new_tokens=12, joins_at=i % 5, chunk=(1000, 1, 7, 16)[i % 4],
               sampling=sampled(i) if i % 2 and engine.model.spec.vocab_size < 1000 else GREEDY)
        for i, length in enumerate([3, 9, 21, 30, 40, 14, 50, 63])
    ]  # fmt: skip
    together = generate(engine, prompts)
    for crowded in together[4:]:  # one of each chunk
        fresh = replace(crowded, joins_at=0, chunk=1000, tokens=[], logprobs=[], top_ids=[], prompt_values=[])
        assert generate(engine, [fresh])[0].tokens == crowded.tokens


@pytest.mark.parametrize(
    ("case", "way"), by_turns([case for case in CASES if case not in ENCODER_DECODERS + RECURRENT], WAYS)
)
def test_a_prefix_in_the_cache_is_as_good_as_computed(load_case: LoadCase, case: str, way: str) -> None:
    engine, _ = load_case(case, way)
    whole = PROMPT[:48] + PROMPT[:9]
    (expected,) = generate(engine, [Prompt(whole, max_new_tokens=12)])
    first, hit = Prompt(PROMPT, max_new_tokens=12), Prompt(whole, max_new_tokens=12, joins_at=3, cached=(0, 48))
    generate(engine, [first, hit])
    assert expected.tokens == hit.tokens
    torch.testing.assert_close(torch.tensor(expected.logprobs), torch.tensor(hit.logprobs), atol=1e-4, rtol=0)


def test_every_family_has_a_case() -> None:
    covered = {tiny.CASES[case][0] for case in tiny.CASES} | {
        published.CASES[c][0]["model_type"] for c in published.CASES
    }
    assert {*FAMILIES, *WRAPPERS} == covered | dict(VISION_MODELS).keys()


@pytest.mark.parametrize(("wrapper", "case"), VISION_MODELS)
def test_the_text_half_of_a_vision_model_is_found(
    checkpoints: Checkpoints, tmp_path: Path, wrapper: str, case: str
) -> None:
    folder, _ = checkpoints(case)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": wrapper, "text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"model.visual.patch_embed.proj.weight": torch.ones(2, 3), "mtp.fc.weight": torch.ones(4)}
    save_file(wrapped | others, tmp_path / "model.safetensors")
    alone, inside = (generate(load_engine(path), [Prompt(PROMPT)])[0] for path in (folder, tmp_path))
    assert alone.tokens == inside.tokens


@pytest.mark.parametrize(
    ("family", "heads", "possible"),
    [("falcon", 71, "1"), ("baichuan", 40, "1 or 2 or 4 or 8")],
    ids=["falcon-7b", "13b"],
)
def test_head_counts_of_real_models(family: str, heads: int, possible: str) -> None:
    sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads, "num_hidden_layers": 1, "vocab_size": 65024}
    falcon = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
              "alibi": False, "layer_norm_epsilon": 1e-5}  # fmt: skip
    baichuan = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "intermediate_size": 13696}
    spec = FAMILIES[family].spec(sizes | falcon | baichuan)
    with pytest.raises(ValueError, match=f"use --num-shard {possible}$"):
        validate(spec, 3)
