"""The compiled kernels over a KV cache of codes, against the reference: every format, tails, threads, chunks, graphs.

Shapes: T tokens, K kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.backends.cpu import Kernels
from server.backends.cpu.attention import KINDS, KernelAttention
from server.backends.protocol import Attention, Scores, StepMeta
from server.backends.reference.attention import ReferenceAttention
from server.blocks import BLOCK_SIZE
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, Float8E4M3, Int8, KvFormat
from tests.server.backends.cpu.test_kernels import (
    BLOCKS,
    DTYPES,
    SCORES,
    STEPS,
    assert_near,
    random,
    tensors_for,
    threads,
)
from tests.server.backends.test_attention import step_of
from tests.server.driver import Prompt, generate, load_engine, sampled
from tests.server.tiny import save_tiny

__all__ = ["threads"]

QUANTISED = [format for format in KV_FORMATS.values() if format != AS_COMPUTED]
FORMATS = pytest.mark.parametrize("format", [*QUANTISED, Float8E4M3((0.25, 3.0))], ids=lambda f: f"{f.name} {f.scales}")
MakeAttention = Callable[..., Attention]


def attended(
    make: MakeAttention,
    format: KvFormat,
    scores: Scores,
    meta: StepMeta,
    tensors: tuple[Tensor, Tensor, Tensor],
    window: int = 0,
) -> Tensor:
    """Over a cache in which what was never written holds no numbers: NaN, if it can, in codes and in scales."""
    q, k, v = tensors
    backend = make(scores, cache=format)
    tokens = [(s, p) for s, length in enumerate(meta.context_lengths) for p in range(length)]
    owners, positions = torch.tensor(tokens).t()
    width = format.width(k.shape[2])
    kv = torch.full((2, BLOCKS, k.shape[1], BLOCK_SIZE, width), 255, dtype=torch.uint8)
    backend.write(kv, k, v, replace(meta, owners=owners, positions=positions, visible=positions + 1))
    return backend.attend(q, kv, meta, window)


def test_every_format_has_a_number_in_the_kernels() -> None:
    assert list(KV_FORMATS) == [name for name in KV_FORMATS if name in KINDS]


@DTYPES
@FORMATS
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("kv_heads", "head_dim", "window"), [(8, 8, 0), (2, 64, 20), (8, 80, 0), (2, 300, 20)])
def test_kernels_equal_reference_for_every_shape(
    kernels: Kernels,
    lengths: list[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    window: int,
    format: KvFormat,
    dtype: torch.dtype,
) -> None:
    meta = step_of(lengths, BLOCKS, seed=3)
    tensors = tensors_for(meta, kv_heads, head_dim, dtype)
    expected, found = (
        attended(make, format, SCORES["alibi"], meta, tensors, window)
        for make in (ReferenceAttention, partial(KernelAttention, kernels))
    )
    assert_near(expected, found)


@DTYPES
@FORMATS
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
def test_kernels_equal_reference_for_every_way_of_scoring(
    kernels: Kernels, scores: Scores, format: KvFormat, dtype: torch.dtype
) -> None:
    meta = step_of(STEPS["decodes, a chunk and a fresh prompt"], BLOCKS, seed=3)
    tensors = tensors_for(meta, 8, 16, dtype)
    expected, found = (
        attended(make, format, scores, meta, tensors)
        for make in (ReferenceAttention, partial(KernelAttention, kernels))
    )
    assert_near(expected, found)


@DTYPES
@FORMATS
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_what_is_stored_is_to_the_bit_what_the_reference_stores(
    kernels: Kernels, head_dim: int, format: KvFormat, dtype: torch.dtype
) -> None:
    """A sequence of one token gives its value back: of all sizes, and of what is no number."""
    meta = step_of([(1, 1)] * 40, BLOCKS, seed=3)
    q, k, v = (random(40, 2, head_dim, dtype=dtype, seed=i) for i in range(3))
    v *= torch.logspace(-12, 6, 40).view(40, 1, 1)
    v[3], v[4, :, 3:6], v[5, 0, 0] = 0, float("nan"), float("-inf")
    v[6, :, :8] = torch.tensor([0.5, 1.5, 2.5, 3.5, -0.5, 127, -127, 4.5])  # ties, in int8 where nothing is larger
    expected, found = (
        attended(make, format, SCORES["plain"], meta, (q, k, v))
        for make in (ReferenceAttention, partial(KernelAttention, kernels))
    )
    assert expected.isfinite().all()
    assert torch.equal(expected, found)


@DTYPES
@FORMATS
@pytest.mark.parametrize("kv_heads", [8, 1], ids=["mha", "one kv head"])
def test_the_number_of_threads_changes_nothing(
    kernels: Kernels, kv_heads: int, format: KvFormat, dtype: torch.dtype, threads: int
) -> None:
    meta = step_of([(700, 1), (300, 1)], BLOCKS, seed=3)
    tensors = tensors_for(meta, kv_heads, 64, dtype)
    several = attended(partial(KernelAttention, kernels), format, SCORES["alibi"], meta, tensors)
    torch.set_num_threads(1)
    assert torch.equal(attended(partial(KernelAttention, kernels), format, SCORES["alibi"], meta, tensors), several)


@DTYPES
@FORMATS
def test_a_prompt_in_chunks_or_token_by_token_attends_as_at_once(
    kernels: Kernels, format: KvFormat, dtype: torch.dtype
) -> None:
    q, k, v = tensors_for(step_of([(290, 290)], BLOCKS, seed=3), 2, 64, dtype)

    def last(count: int) -> Tensor:
        meta = step_of([(290, count)], BLOCKS, seed=3)
        return attended(partial(KernelAttention, kernels), format, SCORES["alibi"], meta, (q[-count:], k, v))

    at_once = last(290)
    assert torch.equal(at_once[-77:], last(77))
    assert torch.equal(at_once[-1:], last(1))


@DTYPES
@FORMATS
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_tokens_written_together_or_one_by_one_are_the_same(
    kernels: Kernels, head_dim: int, format: KvFormat, dtype: torch.dtype, threads: int
) -> None:
    meta = step_of([(37, 32), (16, 16), (20, 3), (9, 1), (64, 64)], BLOCKS, seed=3)
    k, v = random(2, len(meta.slots), 2, head_dim, dtype=dtype)
    attention = KernelAttention(kernels, SCORES["plain"], format)
    shape = (2, 2, BLOCKS, 2, BLOCK_SIZE, format.width(head_dim))
    together, one_by_one = torch.full(shape, 77, dtype=torch.uint8)
    attention.write(together, k, v, meta)
    for i in range(len(k)):
        token = {name: getattr(meta, name)[i : i + 1] for name in ("owners", "positions", "visible")}
        attention.write(one_by_one, k[i : i + 1], v[i : i + 1], replace(meta, **token))
    assert torch.equal(together, one_by_one)
    untouched = torch.full(shape[1:], 77, dtype=torch.uint8)
    attention.write(untouched, k, v, replace(meta, visible=torch.zeros_like(meta.visible)))
    assert (untouched == 77).all()  # a row that no sequence fills goes nowhere


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 16), (torch.bfloat16, 15)])
def test_what_the_kernels_do_not_know_goes_to_stock_operators(
    kernels: Kernels, dtype: torch.dtype, head_dim: int
) -> None:
    meta = step_of([(5, 1)], BLOCKS, seed=3)
    k, v = random(2, 1, 8, head_dim, dtype=dtype)
    attention = KernelAttention(kernels, SCORES["plain"], Int8())
    found, expected = torch.zeros(2, 2, BLOCKS, 8, BLOCK_SIZE, head_dim + 2, dtype=torch.uint8)
    attention.write(found, k, v, meta)
    Int8().write(expected, k, v, meta.slots)
    assert torch.equal(expected, found)
    assert attention.attend(k, found, meta, 0).isfinite().all()


@DTYPES
@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("case", ["bloom", "llama", "t5"])
def test_captured_decodes_give_the_tokens_of_steps_that_are_not(
    kernels: Kernels, case: str, format: KvFormat, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(case, tmp_path)
    found = []
    for captured in (False, True):
        engine = load_engine(tmp_path, kernels=kernels, dtype=dtype, kv_cache=format.name, captured=captured)
        assert (engine.graphs is not None) == captured
        prompts = [Prompt(list(range(4, 24)), chunk=9), Prompt([40, 50], 6, sampled(3)), Prompt([7], joins_at=3)]
        found.append([(p.tokens, p.logprobs) for p in generate(engine, prompts)])
    assert found[0][0] == found[1][0]
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("case", ["bloom", "llama", "mistral", "gemma2", "t5"])
def test_a_model_on_the_kernels_gives_the_tokens_of_the_reference(
    kernels: Kernels, case: str, format: KvFormat, tmp_path: Path
) -> None:
    save_tiny(case, tmp_path)
    expected, found = (
        generate(
            load_engine(tmp_path, kernels=which, kv_cache=format.name),
            [Prompt(list(range(4, 34)), chunk=11), Prompt([40, 50], joins_at=2)],
        )
        for which in (None, kernels)
    )
    assert [p.tokens for p in expected] == [p.tokens for p in found]
    for reference, compiled in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.tensor(reference.logprobs), torch.tensor(compiled.logprobs), atol=2e-3, rtol=0)
