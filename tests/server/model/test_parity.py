"""Parity: our decoder and transformers' own model give the same logits. Float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from server.backends import Backend, Device
from server.backends.cpu import OneDnnBackend
from server.backends.cpu.device import CpuDevice
from server.backends.protocol import Attention, Scores
from server.backends.reference import ReferenceBackend
from server.backends.reference.attention import ReferenceAttention
from server.quantisation.kv import AS_COMPUTED, KvFormat
from tests.server.conftest import DEMO, save_tiny_bloom
from tests.server.driver import PACKED, all_logits, load_engine
from tests.server.tiny import save_tiny

STORY = """Once upon a time there was a little fox who lived in the forest. One day the fox went to the river and found
a red ball under an old tree. "Whose ball is this?" said the fox. A small bird came down and said, "It is mine. I lost
it yesterday." The fox gave the ball to the bird. "Thank you," said the bird, and they played together until the sun
went down. Then the fox went home and told his mother what had happened. She was very happy and made a cake for him."""
CLEAR = 0.25  # between two logits, so that bfloat16 does not exchange them: it has moved two by 0.2


class PaperBackend(ReferenceBackend):
    """Attention as one would write it on paper."""

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        return ReferenceAttention(scores, cache)


BACKENDS = pytest.mark.parametrize("make", [PaperBackend, ReferenceBackend], ids=["paper", "reference"])
MakeBackend = Callable[[Device], Backend]


@torch.inference_mode()
def largest_difference(folder: Path, make: MakeBackend = ReferenceBackend, length: int = 150) -> float:
    oracle = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    token_ids = torch.randint(4, oracle.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    ours = all_logits(load_engine(folder, backend=make(CpuDevice())), token_ids.tolist())
    return float((oracle(token_ids.unsqueeze(0)).logits[0] - ours).abs().max())


@BACKENDS
def test_tiny_bloom_equals_transformers(tiny_bloom: Path, make: MakeBackend) -> None:
    assert largest_difference(tiny_bloom, make) < 1e-4


@BACKENDS
def test_embedded_model_equals_transformers(make: MakeBackend) -> None:
    assert largest_difference(DEMO, make) < 1e-4


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
    assert largest_difference(tmp_path) < 1e-4


@pytest.mark.parametrize("case", ["bloom", "gpt2", "mpt", "gemma", "lfm2", "opt"])
@torch.inference_mode()
def test_a_head_beside_a_table_that_it_should_be_is_served(tmp_path: Path, case: str) -> None:
    """As by transformers: config.json says that it is tied, and the checkpoint has another one."""
    table = save_tiny(case, tmp_path).get_input_embeddings().weight
    tensors, tokens, found = load_file(tmp_path / "model.safetensors"), list(range(4, 40)), []
    for head in (table, torch.cat([table[:50], table[50:].flip(0)])):
        tensors["lm_head.weight"] = head.detach().clone()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        oracle = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype=torch.float32).eval()
        assert oracle.config.tie_word_embeddings
        found.append(all_logits(load_engine(tmp_path), tokens))
        torch.testing.assert_close(oracle(torch.tensor([tokens])).logits[0], found[-1], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(*found, atol=1e-2)


@pytest.mark.parametrize("backend", [None, pytest.param(OneDnnBackend([]), marks=PACKED)], ids=["dense", "packed"])
@torch.inference_mode()
def test_bfloat16_agrees_with_float32(backend: Backend | None) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype=torch.float32).eval()
    token_ids = torch.tensor(Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(STORY).ids)
    engine = load_engine(DEMO, dtype=torch.bfloat16, backend=backend)
    expected, found = oracle(token_ids.unsqueeze(0)).logits[0], all_logits(engine, token_ids.tolist())
    assert len(token_ids) > 100
    assert (expected - found).norm() < 0.02 * expected.norm()
    best, second = expected.topk(2).values.unbind(-1)
    is_clear = best - second > CLEAR
    assert is_clear.float().mean() > 0.85
    assert torch.equal(expected.argmax(-1)[is_clear], found.argmax(-1)[is_clear])
