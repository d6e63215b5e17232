"""Attention by the compiled kernels, over a KV cache as computed and in every format of codes, against the reference.

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

from server.arch.spec import Alibi
from server.backends.cpu import Kernels
from server.backends.cpu.attention import KINDS, KernelAttention
from server.backends.protocol import Attention, Scores, StepMeta
from server.backends.reference.attention import BatchedAttention, ReferenceAttention
from server.blocks import BLOCK_SIZE
from server.layers.position import alibi_slopes
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, Float8E4M3, Int8, KvFormat
from tests.combinations import all_pairs, by_turns
from tests.server.backends.cpu.test_kernels import DTYPES, EACH, assert_near, random, threads
from tests.server.backends.test_attention import step_of
from tests.server.driver import Prompt, agreed, generate, load_engine, sampled
from tests.server.tiny import save_tiny

__all__ = ["threads"]

BLOCKS = 80
NEAR = 0.01  # of two log-probabilities: one part in 10^7 of all sums has moved them by 0.006
QUANTISED = [format for format in KV_FORMATS.values() if format != AS_COMPUTED]
FORMATS = [AS_COMPUTED, *QUANTISED, Float8E4M3((0.25, 3.0))]
SLOPES = tuple(alibi_slopes(8, Alibi()))
SCORES = {
    "plain": Scores(0.3),
    "alibi": Scores(0.3, SLOPES),
    "cap": Scores(0.3, cap=2.0),
    "bias": Scores(0.3, bias=random(8, 41)),
    "sinks": Scores(0.3, sinks=torch.tensor([-200.0, -3.0, 0.0, 1.0, 2.0, 5.0, 20.0, 200.0])),
    "alibi and cap": Scores(0.3, SLOPES, 2.0),
    "chunks": Scores(0.3, chunk=72),
}
STEPS = {
    "one decode": [(1, 1)],
    "decodes of ragged lengths": [(1, 1), (16, 1), (17, 1), (700, 1), (64, 1)],
    "fresh prompts": [(5, 5), (33, 33), (300, 300)],
    "a later chunk": [(290, 40)],
    "decodes, a chunk and a fresh prompt": [(3, 1), (120, 1), (60, 20), (31, 31)],
}
Tensors = tuple[Tensor, Tensor, Tensor]


def named(value: object) -> str | None:
    """What a case is called."""
    return f"{value.name} {value.scales}" if hasattr(value, "scales") else None


def tensors_for(meta: StepMeta, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensors:
    """Queries of the step, keys and values of all contexts."""
    q = random(meta.query_starts[-1], 8, head_dim, dtype=dtype)
    k, v = random(2, sum(meta.context_lengths), kv_heads, head_dim, dtype=dtype, seed=1)
    return q / head_dim**0.25, k / head_dim**0.25, v


def empty_cache(format: KvFormat, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """In which what was never written holds no numbers: NaN, if it can, in codes and in scales."""
    width, stored = format.width(head_dim), format.stored(dtype)
    return torch.full((2, BLOCKS, kv_heads, BLOCK_SIZE, width), 255 if stored == torch.uint8 else torch.nan).to(stored)


def attended(backend: Attention, format: KvFormat, meta: StepMeta, tensors: Tensors, window: int = 0) -> Tensor:
    """What the step's queries find among the keys and values of all contexts."""
    q, k, v = tensors
    tokens = [(s, p) for s, length in enumerate(meta.context_lengths) for p in range(length)]
    owners, positions = torch.tensor(tokens).t()
    kv = empty_cache(format, k.shape[1], k.shape[2], k.dtype)
    backend.write(kv, k, v, replace(meta, owners=owners, positions=positions, visible=positions + 1))
    return backend.attend(q, kv, meta, window)


def both(
    kernels: Kernels, scores: Scores, format: KvFormat, meta: StepMeta, tensors: Tensors, window: int = 0
) -> list[Tensor]:
    """By the reference and by the kernels."""
    backends = ReferenceAttention(scores, format), KernelAttention(kernels, scores, format)
    return [attended(backend, format, meta, tensors, window) for backend in backends]


def test_every_format_has_a_number_in_the_kernels() -> None:
    assert list(KV_FORMATS) == [name for name in KV_FORMATS if name in KINDS]


@pytest.mark.parametrize(
    ("dtype", "format", "step", "scores", "kv_heads", "head_dim", "window"),
    all_pairs(EACH, FORMATS, STEPS, SCORES, (8, 2), (8, 16, 64, 80, 300), (0, 20)),
    ids=named,
)
def test_kernels_equal_the_reference(
    kernels: Kernels,
    dtype: torch.dtype,
    format: KvFormat,
    step: str,
    scores: str,
    kv_heads: int,
    head_dim: int,
    window: int,
) -> None:
    meta = step_of(STEPS[step], BLOCKS, seed=3)
    tensors = tensors_for(meta, kv_heads, head_dim, dtype)
    assert_near(*both(kernels, SCORES[scores], format, meta, tensors, window))


@DTYPES
def test_tokens_that_see_their_whole_context_see_what_comes_after_them(kernels: Kernels, dtype: torch.dtype) -> None:
    meta = step_of([(33, 33), (20, 20)], BLOCKS, seed=3)
    meta = replace(meta, visible=torch.tensor([33] * 33 + [20] * 20))
    assert_near(*both(kernels, SCORES["bias"], AS_COMPUTED, meta, tensors_for(meta, 8, 16, dtype)))


@pytest.mark.parametrize(("dtype", "format", "head_dim"), all_pairs(EACH, FORMATS, (8, 64, 80)), ids=named)
def test_what_is_stored_is_to_the_bit_what_the_reference_stores(
    kernels: Kernels, dtype: torch.dtype, format: KvFormat, head_dim: int
) -> None:
    """A sequence of one token gives its value back: of all sizes, and of what is no number."""
    meta = step_of([(1, 1)] * 40, BLOCKS, seed=3)
    q, k, v = (random(40, 2, head_dim, dtype=dtype, seed=i) for i in range(3))
    v *= torch.logspace(-12, 6, 40).view(40, 1, 1)
    v[3], v[6, :, :8] = 0, torch.tensor([0.5, 1.5, 2.5, 3.5, -0.5, 127, -127, 4.5])  # ties in int8
    if format != AS_COMPUTED:
        v[4, :, 3:6], v[5, 0, 0] = float("nan"), float("-inf")
    expected, found = both(kernels, SCORES["plain"], format, meta, (q, k, v))
    assert expected.isfinite().all()
    assert torch.equal(expected, found)


@pytest.mark.parametrize(("dtype", "format", "kv_heads"), all_pairs(EACH, FORMATS, (8, 1)), ids=named)
def test_the_number_of_threads_changes_nothing(
    kernels: Kernels, dtype: torch.dtype, format: KvFormat, kv_heads: int, threads: int
) -> None:
    meta = step_of([(700, 1), (300, 1)], BLOCKS, seed=3)
    attend = partial(attended, KernelAttention(kernels, SCORES["alibi"], format), format, meta)
    several = attend(tensors := tensors_for(meta, kv_heads, 64, dtype))
    torch.set_num_threads(1)
    assert torch.equal(attend(tensors), several)


@pytest.mark.parametrize(("dtype", "format"), by_turns(EACH * 2, FORMATS), ids=named)
def test_a_prompt_in_chunks_or_token_by_token_attends_as_at_once(
    kernels: Kernels, dtype: torch.dtype, format: KvFormat
) -> None:
    q, k, v = tensors_for(step_of([(290, 290)], BLOCKS, seed=3), 2, 64, dtype)

    def last(count: int) -> Tensor:
        meta = step_of([(290, count)], BLOCKS, seed=3)
        return attended(KernelAttention(kernels, SCORES["alibi"], format), format, meta, (q[-count:], k, v))

    at_once = last(290)
    assert torch.equal(at_once[-77:], last(77))
    assert torch.equal(at_once[-1:], last(1))


def test_queries_may_be_slices_of_a_projection(kernels: Kernels) -> None:
    meta = step_of([(5, 1), (9, 9)], BLOCKS, seed=3)
    q, k, v = random(10, 3 * 8, 16).split(8, dim=1)
    outputs = []
    for backend in (BatchedAttention(SCORES["plain"]), KernelAttention(kernels, SCORES["plain"])):
        kv = torch.zeros(2, BLOCKS, 8, BLOCK_SIZE, 16)
        backend.write(kv, k, v, meta)
        outputs.append(backend.attend(q, kv, meta, 0))
    assert_near(*outputs)


@pytest.mark.parametrize(("dtype", "format", "head_dim"), all_pairs(EACH, FORMATS, (8, 64, 80)), ids=named)
def test_tokens_written_together_or_one_by_one_are_the_same(
    kernels: Kernels, dtype: torch.dtype, format: KvFormat, head_dim: int, threads: int
) -> None:
    meta = step_of([(37, 32), (16, 16), (20, 3), (9, 1), (64, 64)], BLOCKS, seed=3)
    k, v = random(2, len(meta.slots), 2, head_dim, dtype=dtype)
    attention = KernelAttention(kernels, SCORES["plain"], format)
    together, one_by_one, untouched = empty_cache(format, 2, head_dim, dtype).fill_(77).repeat(3, 1, 1, 1, 1, 1)
    attention.write(together, k, v, meta)
    for i in range(len(k)):
        token = {name: getattr(meta, name)[i : i + 1] for name in ("owners", "positions", "visible")}
        attention.write(one_by_one, k[i : i + 1], v[i : i + 1], replace(meta, **token))
    assert torch.equal(together, one_by_one)
    if format.name != Int8.name:  # whose scales lie behind the codes of all blocks
        others = sorted({*range(BLOCKS)} - {int(slot) // BLOCK_SIZE for slot in meta.slots})
        assert others and (together[:, others] == 77).all()
    attention.write(untouched, k, v, replace(meta, visible=torch.zeros_like(meta.visible)))
    assert (untouched == 77).all()  # a row that no sequence fills goes nowhere


@pytest.mark.parametrize("format", [AS_COMPUTED, Int8()], ids=named)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 16), (torch.bfloat16, 15)])
def test_what_the_kernels_do_not_know_goes_to_stock_operators(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, format: KvFormat
) -> None:
    meta = step_of([(5, 1)], BLOCKS, seed=3)
    q, k, v = (random(1, 8, head_dim, dtype=dtype, seed=i) for i in range(3))
    outputs = []
    for make in (BatchedAttention, partial(KernelAttention, kernels)):
        backend: Attention = make(SCORES["plain"], format)  # type: ignore[operator]
        kv = empty_cache(format, 8, head_dim, dtype).zero_()
        backend.write(kv, k, v, meta)
        outputs.append((kv, backend.attend(q, kv, meta, 0)))
    assert all(map(torch.equal, *outputs))


Answers = Callable[..., list[tuple[list[int], list[float]]]]


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    """Tokens and their log-probabilities of a tiny model, with what an engine is loaded with."""

    def generated(case: str, prompts: list[Prompt], **how: object) -> list[tuple[list[int], list[float]]]:
        if not (tmp_path / "config.json").exists():
            save_tiny(case, tmp_path)
        fresh = [replace(p, tokens=[], logprobs=[], top_ids=[], prompt_values=[]) for p in prompts]
        return [(p.tokens, p.logprobs) for p in generate(load_engine(tmp_path, **how), fresh)]  # type: ignore[arg-type]

    return generated


@pytest.mark.parametrize(("case", "format", "dtype"), by_turns(("bloom", "llama", "t5"), QUANTISED, EACH), ids=named)
def test_captured_decodes_give_the_tokens_of_steps_that_are_not(
    kernels: Kernels, case: str, format: KvFormat, dtype: torch.dtype, answers: Answers
) -> None:
    prompts = [Prompt(list(range(4, 24)), chunk=9), Prompt([40, 50], 6, sampled(3)), Prompt([7], joins_at=3)]
    plain, captured = (
        answers(case, prompts, kernels=kernels, dtype=dtype, kv_cache=format.name, captured=captured)
        for captured in (False, True)
    )
    assert plain == captured


@pytest.mark.parametrize(("case", "format"), by_turns(("bloom", "llama", "mistral", "gemma2", "t5"), QUANTISED))
def test_a_model_on_the_kernels_gives_the_tokens_of_the_reference(
    kernels: Kernels, case: str, format: KvFormat, tmp_path: Path
) -> None:
    """But for what differs by a last bit, on some processors, and is then stored as another code."""
    save_tiny(case, tmp_path)
    prompts = [Prompt(list(range(4, 34)), chunk=11), Prompt([40, 50], joins_at=2)]
    candidates = [Prompt(list(range(4, 34)), chunk=11, top_n_tokens=2), Prompt([40, 50], joins_at=2, top_n_tokens=2)]
    expected = generate(load_engine(tmp_path, kv_cache=format.name), candidates)
    found = generate(load_engine(tmp_path, kernels=kernels, kv_cache=format.name), prompts)
    compared = [agreed(*both, 2 * NEAR) for both in zip(expected, found, strict=True)]
    for one, other, place in zip(expected, found, compared, strict=True):
        assert one.logprobs[:place] == pytest.approx(other.logprobs[:place], abs=NEAR)
    assert sum(compared) > len(found[0].tokens)  # of twice as many
