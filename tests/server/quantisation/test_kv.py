"""KV caches in fewer bytes: what a slot holds, and that models generate the same whatever stands beside a sequence.

Shapes: T tokens, K kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.backends.protocol import Scores
from server.backends.reference.attention import BatchedAttention, ReferenceAttention
from server.blocks import BLOCK_SIZE
from server.config import KV_CACHE_DTYPES
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, Float8E4M3, Int8, KvFormat
from server.stepping.cache import KVShape
from tests.server.backends.test_attention import SLOPES, STEPS, step_of
from tests.server.driver import Prompt, agreed, all_logits, generate, load_engine
from tests.server.tiny import save_tiny

QUANTISED = [name for name in KV_FORMATS if name != AS_COMPUTED.name]
NEAR = 0.01  # of two log-probabilities: one part in 10^7 of all sums has moved them by 0.006
SLOTS = torch.tensor([3, 4, 5, 40, 41, 79, 0])


def round_trip(format: KvFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What is read of k and v [7, K, H] behind their being written."""
    head_dim = k.shape[-1]
    kv = torch.zeros(2, 5, k.shape[1], BLOCK_SIZE, format.width(head_dim), dtype=format.stored(k.dtype))
    format.write(kv, k, v, SLOTS)
    read = [format.expand(blocks.flatten(2), head_dim, part) for part, blocks in enumerate(kv)]  # [B, K, P, H]
    keys, values = (blocks[SLOTS // BLOCK_SIZE, :, SLOTS % BLOCK_SIZE] for blocks in read)
    return keys, values


def test_every_format_is_a_setting() -> None:
    assert list(KV_CACHE_DTYPES) == list(KV_FORMATS)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", QUANTISED)
def test_twice_the_tokens_of_16_bits_fit(name: str, head_dim: int) -> None:
    dense, quantised = (KVShape(2, 4, head_dim, torch.bfloat16, format=KV_FORMATS[n]) for n in ("auto", name))
    assert dense.bytes_per_token / quantised.bytes_per_token >= 1.9


def test_int8_is_within_half_a_step_of_what_was_written() -> None:
    k, v = torch.randn(2, 7, 3, 64, generator=torch.Generator().manual_seed(0))
    k *= torch.logspace(-30, 30, 7).view(7, 1, 1)  # far outside of float16
    for written, read in zip((k, v), round_trip(Int8(), k, v), strict=True):
        step = written.abs().amax(dim=-1, keepdim=True) / 127
        assert ((written - read).abs() <= 0.501 * step * (1 + 2**-8)).all()


@pytest.mark.parametrize(("name", "bits", "largest"), [("fp8_e4m3", 3, 448.0), ("fp8_e5m2", 2, 57344.0)])
def test_float8_rounds_to_its_bits_and_saturates(name: str, bits: int, largest: float) -> None:
    k, v = torch.randn(2, 7, 3, 64, generator=torch.Generator().manual_seed(0)) * 3
    k[0, 0, :4] = torch.tensor([1e9, -1e9, float("inf"), float("nan")])
    keys, values = round_trip(KV_FORMATS[name], k, v)
    assert [largest, -largest, largest, 0.0] == keys[0, 0, :4].tolist()
    normal = v.abs() > 2.0**-6
    assert ((values - v).abs()[normal] <= v.abs()[normal] * 2.0 ** -(bits + 1)).all()


def test_a_row_of_zeros_or_without_a_number_stays_finite() -> None:
    k = torch.zeros(7, 3, 64)
    k[1] = float("nan")
    for name in QUANTISED:
        assert 0 == round_trip(KV_FORMATS[name], k, k)[0].abs().max()


def test_scales_of_a_checkpoint_move_what_float8_resolves() -> None:
    k, v = torch.randn(2, 7, 3, 64, generator=torch.Generator().manual_seed(0))
    k *= 4000
    plain, scaled = (round_trip(Float8E4M3(scales), k, v)[0] for scales in ((1.0, 1.0), (64.0, 1.0)))
    assert 448 == plain.max()
    assert (scaled - k).abs().max() <= 2**-4 * k.abs().max()


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("kv_heads", [8, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", QUANTISED)
def test_batched_equals_reference(lengths: list[tuple[int, int]], kv_heads: int, name: str) -> None:
    format, scores = KV_FORMATS[name], Scores(0.3, SLOPES)
    generator = torch.Generator().manual_seed(1)
    meta = step_of(lengths, 64, seed=3)
    before = step_of([(900, 900)], 64, seed=4)  # something in every slot
    q, k, v = (torch.randn(meta.query_starts[-1], h, 16, generator=generator) for h in (8, kv_heads, kv_heads))
    old_k, old_v = torch.randn(2, 900, kv_heads, 16, generator=generator)
    outputs = []
    for backend in (ReferenceAttention(scores, format), BatchedAttention(scores, format)):
        kv = torch.zeros(2, 64, kv_heads, BLOCK_SIZE, format.width(16), dtype=torch.uint8)
        backend.write(kv, old_k, old_v, before)
        backend.write(kv, k, v, meta)
        outputs.append(backend.attend(q, kv, meta, 20))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------- whole models

# ALiBi; shared kv heads and rotations; a window; an encoder; a learned bias comes with it.
FAMILIES = ["bloom", "llama", "mistral", "gemma2", "t5"]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_are_those_of_a_sequence_alone(case: str, name: str, tmp_path: Path) -> None:
    """Among neighbours, in chunks, and behind a prefix that another one computed.

    But for what differs by a last bit there, on some processors, and is then rounded the other way.
    """
    save_tiny(case, tmp_path)
    engine = load_engine(tmp_path, kv_cache=name)
    token_ids = [4 + i % 50 for i in range(40)]
    (alone,) = generate(engine, [Prompt(list(token_ids), top_n_tokens=2)])
    prompts = [Prompt([7, 8, 9], joins_at=2), Prompt(list(token_ids), chunk=7), Prompt(list(range(5, 30)), joins_at=1)]
    if engine.model.shares_prefixes:
        prompts.append(Prompt(list(token_ids), joins_at=8, cached=(1, 32)))
    else:
        prompts.append(Prompt(list(token_ids), joins_at=3))
    others = generate(load_engine(tmp_path, kv_cache=name), prompts)
    compared = [agreed(alone, found, 2 * NEAR) for found in (others[1], others[3])]
    for found, place in zip((others[1], others[3]), compared, strict=True):
        assert alone.logprobs[:place] == pytest.approx(found.logprobs[:place], abs=NEAR)
    assert sum(compared) > len(alone.tokens)  # of twice as many


@pytest.mark.parametrize(("name", "most"), [("int8", 0.015), ("fp8_e4m3", 0.1), ("fp8_e5m2", 0.18)])
@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_near_those_of_a_float32_cache(case: str, name: str, most: float, tmp_path: Path) -> None:
    save_tiny(case, tmp_path)
    token_ids = [4 + i % 50 for i in range(40)]
    expected, found = (all_logits(load_engine(tmp_path, kv_cache=kind), token_ids) for kind in ("auto", name))
    difference = (expected - found).norm() / expected.norm()
    assert 0 < difference <= most


@pytest.mark.parametrize("place", ["self_attn.{}_scale", "self_attn.{}_proj.output_scale"])
def test_scales_of_a_checkpoint_are_found_and_used(place: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    plain = load_engine(tmp_path, kv_cache="fp8_e4m3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    layers = {name.split(".")[2] for name in tensors if ".layers." in name}
    scales = {f"model.layers.{i}.{place.format(part)}": torch.tensor([0.01]) for i in layers for part in ("k", "v")}
    save_file(tensors | scales, file, {"format": "pt"})
    token_ids = [4 + i % 50 for i in range(40)]
    expected, found = all_logits(plain, token_ids), all_logits(load_engine(tmp_path, kv_cache="fp8_e4m3"), token_ids)
    assert not torch.equal(expected, found)


@pytest.mark.parametrize(("value", "told"), [([0.0], "is 0.0, but a scale is above 0"), ([1.0, 2.0], "only one scale")])
def test_scales_that_cannot_be_used_are_refused_with_a_remedy(value: list[float], told: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{part}_scale": torch.tensor(value) for part in ("k", "v")}
    save_file(load_file(file) | scales, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{told}.*--kv-cache-dtype int8"):
        load_engine(tmp_path, kv_cache="fp8_e4m3")
