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
from transformers import AutoModelForCausalLM

from server.arch.families import FAMILIES, WRAPPERS
from server.arch.spec import validate
from server.stepping.engine import Engine
from tests.combinations import by_turns
from tests.server import published, tiny
from tests.server.checkpoints import CASES, Checkpoints, Oracle
from tests.server.driver import GREEDY, Prompt, all_logits, generate, load_engine, sampled

PROMPT = [int(i) for i in torch.randint(4, 103, (64,), generator=torch.Generator().manual_seed(0))]
NEW_TOKENS = 32
# `model_type`, that of its text, the case of that, how its tensors are renamed, and what its checkpoint has besides.
OF_QWEN, OF_GEMMA = ("model.visual.patch_embed.proj", "mtp.fc"), ("model.vision_tower.patch", "model.embed_audio.proj")
VISION_MODELS = (
    ("qwen3_5", "qwen3_5_text", "qwen3_5", ("model.", "model.language_model."), OF_QWEN),
    ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe", ("model.", "model.language_model."), OF_QWEN),
    ("kimi_k25", "kimi_k2", "deepseek_v3", ("", "language_model."), ("vision_tower.patch_embed.proj",)),
    ("mistral3", "mistral4", "mistral4", ("", "language_model."), ("vision_tower.patch_embed.proj",)),
    ("gemma4", "gemma4_text", "gemma4", ("model.", "model.language_model."), OF_GEMMA),
    ("gemma4_unified", "gemma4_unified_text", "gemma4_unified", ("model.", "model.language_model."), OF_GEMMA),
    (
        "llama4",
        "llama4_text",
        "llama4",
        ("", "language_model."),
        ("vision_model.patch_embedding.linear", "multi_modal_projector.linear_1"),
    ),
)
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


# What config.json says otherwise, or does not say (None) and transformers knows.
AS_READ: list[tuple[str, dict[str, object]]] = [
    ("smollm3", {"rope_parameters": None}),
    ("smollm3-windowed", {"use_sliding_window": False}),
    ("cohere2", {"rope_parameters": None}),
    ("phimoe", {"rope_parameters": None}),
    ("glm4_moe", {"norm_topk_prob": None}),
    ("gpt_oss", {"rope_parameters": None, "rope_scaling": tiny.ROPE_SCALINGS["yarn"]}),
    ("llama-yarn", {"original_max_position_embeddings": 32}),
    ("qwen3_5", {"rope_parameters": None, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("qwen2_moe", {"layer_types": None, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
]


@pytest.mark.parametrize(("case", "fields"), AS_READ, ids=[case for case, _ in AS_READ])
@torch.inference_mode()
def test_configs_are_read_as_transformers_reads_them(tmp_path: Path, case: str, fields: dict[str, object]) -> None:
    tiny.save_tiny(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    said = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(said))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    engine = load_engine(tmp_path, warms_up=False)
    expected = oracle(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(expected, all_logits(engine, PROMPT), atol=tolerance(engine), rtol=0)


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


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_neighbours_do_not_change_a_bit(load_case: LoadCase, case: str) -> None:
    engine, _ = load_case(case, "kernels")
    prompts = [
        Prompt(PROMPT[:length], max_new_tokens=12, joins_at=i % 5, chunk=(1000, 1, 7, 16)[i % 4],
               sampling=sampled(i) if i % 2 and engine.model.spec.vocab_size < 1000 else GREEDY)
        for i, length in enumerate([3, 9, 21, 30, 40, 14, 50, 63])
    ]  # fmt: skip
    together = generate(engine, prompts)
    for crowded in together[4:]:  # one of each chunk
        fresh = replace(crowded, joins_at=0, chunk=1000, tokens=[], logprobs=[], top_ids=[], prompt_values=[])
        (alone,) = generate(engine, [fresh])
        assert (alone.tokens, alone.logprobs) == (crowded.tokens, crowded.logprobs)


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
    assert {*FAMILIES, *WRAPPERS} == covered | {name for kinds in VISION_MODELS for name in kinds[:2]}


@pytest.mark.parametrize(("wrapper", "kind", "case", "renamed", "others"), VISION_MODELS)
def test_the_text_half_of_a_vision_model_is_found(
    checkpoints: Checkpoints,
    tmp_path: Path,
    wrapper: str,
    kind: str,
    case: str,
    renamed: tuple[str, str],
    others: tuple[str, ...],
) -> None:
    folder, _ = checkpoints(case)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": wrapper, "text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    wrapped = {name.replace(*renamed, 1): tensor for name, tensor in tensors.items()}
    save_file(wrapped | {f"{name}.weight": torch.ones(4) for name in others}, tmp_path / "model.safetensors")
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
