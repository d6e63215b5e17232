"""Parity: our decoder and transformers' own model give the same logits. Float32 on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.conftest import DEMO, save_tiny_bloom
from tests.server.driver import all_logits, load_engine


@torch.inference_mode()
def largest_difference(folder: Path, *, reference: bool, length: int = 150) -> float:
    oracle = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    token_ids = torch.randint(4, oracle.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    ours = all_logits(load_engine(folder, reference=reference), token_ids.tolist())
    return float((oracle(token_ids.unsqueeze(0)).logits[0] - ours).abs().max())


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "padded"])
def test_tiny_bloom_equals_transformers(tiny_bloom: Path, reference: bool) -> None:
    assert largest_difference(tiny_bloom, reference=reference) < 1e-4


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "padded"])
def test_embedded_model_equals_transformers(reference: bool) -> None:
    assert largest_difference(DEMO, reference=reference) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"apply_residual_connection_post_layernorm": True},
        {"n_head": 12, "hidden_size": 96},
        {"layer_norm_epsilon": 0.1},
    ],
    ids=["normed residual", "heads no power of two", "large epsilon"],
)
def test_variants_of_bloom_equal_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    save_tiny_bloom(tmp_path, **changes)
    assert largest_difference(tmp_path, reference=False) < 1e-4
