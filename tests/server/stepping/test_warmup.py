"""The step that is made up to find out what a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.adapters.adapters import Adapters
from server.backends.cpu import Kernels
from server.blocks import BLOCK_SIZE, ceil_divide, num_blocks
from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine, Launched
from server.stepping.pipeline import NoNeighbours
from server.stepping.warmup import (
    LEAST_ROWS,
    ProfileRun,
    _beside_a_step,
    _compile_kernels,
    _profile,
    graph_bytes,
    longest_that_fits,
    sizes_of_decodes,
)
from tests.server.checkpoints import Checkpoints
from tests.server.driver import load_engine


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize(
    ("prefill", "total", "sampled"), [(4096, 2048, 128), (4096, 5000, 128), (64, 64, 1), (1, 9, 4)]
)
def test_it_has_all_prompt_tokens_and_rows_that_a_step_may_have(
    prefill: int, total: int, sampled: int, has_encoder: bool
) -> None:
    run = ProfileRun.of(prefill_tokens=prefill, total_tokens=total, sampled=sampled, has_encoder=has_encoder)
    request = run.request(top_n_tokens=5)
    tokens = [len(new.encoder_token_ids) if has_encoder else len(new.token_ids) for new in request.add]
    assert sum(tokens) == prefill
    assert len(tokens) >= min(sampled, prefill)
    assert max(tokens) <= total
    blocks = [block for new in request.add for block in [*new.blocks, *new.encoder_blocks]]
    assert len(set(blocks)) == len(blocks) <= num_blocks(run.kv_tokens)
    assert max(blocks) < run.kv_tokens // BLOCK_SIZE
    assert all(new.prompt_logprobs and new.sampling.do_sample and new.top_n_tokens for new in request.add)
    assert all(new.sampling.is_constrained for new in request.add)
    assert [[new.id] for new in request.add] == [list(mask.ids) for mask in request.masks]


@pytest.mark.parametrize(
    ("kinds", "expected"), [([[]], 0), ([[500]], 500), ([[9, 5], [7, 3]], 24), ([[9, 5, 4, 4], []], 24)]
)
def test_memory_for_graphs_is_that_of_the_two_largest_of_each_kind(kinds: list[list[int]], expected: int) -> None:
    device = SimpleNamespace(measures_memory=True, taken_bytes=lambda taken: taken)
    engine = SimpleNamespace(graphs=SimpleNamespace(kinds=kinds), device=device)
    assert expected == graph_bytes(engine)  # type: ignore[arg-type]


@contextmanager
def watched(engine: Engine) -> Iterator[list[pb.StepRequest]]:
    """The steps that the engine takes in this block."""
    launched, launch_really = list[pb.StepRequest](), engine.launch

    def launch(request: pb.StepRequest) -> Launched | None:
        launched.append(request)
        return launch_really(request)

    with patch.object(engine, "launch", launch):
        yield launched


def test_each_kernel_for_products_of_some_rows_has_run_once() -> None:
    """Steps that are not captured would compile it for seconds, while requests wait."""
    linear = pytest.importorskip("server.backends.cuda.kernels.linear", reason="there is no Triton")

    def kernel(rows: int, features: int, inputs: int) -> tuple[int, int]:
        tiling = linear.tilings(rows, torch.bfloat16, is_gated=False)[0]
        tiles = ceil_divide(rows, tiling.rows) * ceil_divide(features, tiling.features)
        return tiling.rows, linear.choose_splits(tiles, ceil_divide(inputs, tiling.depth), 264)

    for size in product((64, 256, 1000, 4096), (512, 4096, 14336)):
        computed_before = {kernel(LEAST_ROWS << power, *size) for power in range(9)} | {kernel(1, *size)}
        assert {kernel(rows, *size) for rows in range(1, 4097)} <= computed_before
    computed: list[tuple[int, int]] = []

    def launch(request: pb.StepRequest) -> SimpleNamespace:
        computed.extend((tokens, request.add[0].adapter) for tokens in request.chunk_tokens)
        return SimpleNamespace(finish=lambda: None)

    for adapters in (None, Adapters(2, 0, lambda key, folder: [])):
        engine = SimpleNamespace(
            has_encoder=False,
            launch=launch,
            adapters=adapters,
            graphs=SimpleNamespace(decodes=SimpleNamespace(largest=256)),
            kv_shape=SimpleNamespace(ring=None),
            num_blocks=100,
            neighbours=NoNeighbours(),
        )
        _compile_kernels(engine, most=100, longest=100, top_n_tokens=2, sequences=9)  # type: ignore[arg-type]
    plain = [(16, 0), (32, 0), (64, 0), (1, 0), (1, 0)]
    assert [*plain, *plain, (8, 1), (16, 1)] == computed


@pytest.mark.parametrize("case", ["llama", "t5"])
def test_a_cache_that_is_full_is_no_obstacle(case: str, checkpoints: Checkpoints) -> None:
    engine = load_engine(checkpoints(case)[0], tokens=64, warms_up=False)
    with watched(engine) as launched:
        _compile_kernels(engine, most=128, longest=64, top_n_tokens=0, sequences=1)
    prompts = [new.encoder_token_ids or new.token_ids for request in launched for new in request.add]
    assert 64 == max(map(len, prompts))


def test_prompts_that_are_longer_than_a_ring_are_several(checkpoints: Checkpoints) -> None:
    engine = load_engine(checkpoints("gemma2")[0], tokens=4096, rings=True)
    assert engine.kv_shape.ring is not None
    most = engine.kv_shape.ring.most_at_once
    with watched(engine) as launched:
        _compile_kernels(engine, most=4096, longest=4096, top_n_tokens=0, sequences=4)
    computed = [list(request.chunk_tokens) for request in launched if request.chunk_tokens and not request.decode]
    assert [most] * 2 in computed and [most] * 4 in computed and [most] * 8 not in computed
    assert max(max(lengths) for lengths in computed) == most


def test_decodes_over_the_largest_captured_size_have_kernels_of_their_own() -> None:
    assert [[8, 9], [512, 600], [], []] == [
        sizes_of_decodes(*sizes) for sizes in ((4, 9), (256, 600), (256, 256), (256, 100))
    ]


@pytest.mark.parametrize(
    ("sequences", "expected"), [(9, [1, 2, 4, 8, 9]), (256, [1, 2, 4, 8, 16, 20]), (8, [1, 2, 4, 8]), (1, [1])]
)
@pytest.mark.parametrize("case", ["llama", "t5", "deepseek_v3", "qwen3_5", "nemotron_h"])
def test_decodes_of_each_power_of_two_are_computed_where_none_are_captured(
    case: str, sequences: int, expected: list[int], checkpoints: Checkpoints
) -> None:
    tokens = 20 * (1 + (case == "t5")) * BLOCK_SIZE
    engine = load_engine(checkpoints(case)[0], tokens=tokens, warms_up=False)
    with watched(engine) as launched:
        _compile_kernels(engine, most=1, longest=64, top_n_tokens=0, sequences=sequences)
    assert expected == [len(request.retire) for request in launched if request.retire]
    assert len(expected) == sum(request.decode for request in launched)


@pytest.mark.parametrize(
    ("blocks", "per_longest", "expected"),
    [(9, 0, 100), (5, 0, 80), (10, 1, 48), (0, 0, 16)],
    ids=["all fits", "five blocks", "an area and blocks", "none"],
)
def test_the_longest_sequence_is_what_the_cache_holds(blocks: int, per_longest: int, expected: int) -> None:
    """Where blocks are not on the device, an area for a longest sequence takes room of its own."""
    assert expected == longest_that_fits(100, lambda longest: 1000 * max(0, blocks - per_longest * longest), 1000)


def test_a_cache_leaves_room_for_a_step_where_memory_is_not_measured() -> None:
    device = SimpleNamespace(left_bytes=lambda **given: 1000 // given["world_size"] - given["kv_bytes"])
    model = SimpleNamespace(least_step_bytes=lambda tokens, dtype: tokens * dtype.itemsize)
    shape, shard = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(sharing=2)
    engine = SimpleNamespace(device=device, model=model, kv_shape=shape, shard=shard)
    assert 300 == _beside_a_step(engine, 100, fraction=1.0)  # type: ignore[arg-type]


def test_a_short_profile_run_makes_no_tables_for_the_longest_sequence() -> None:
    made: list[tuple[int, ...]] = []
    device = SimpleNamespace(measures_memory=False, peak_bytes=lambda step: 0)
    engine = SimpleNamespace(device=device, has_encoder=False, graphs=None, allocate=lambda *sizes: made.append(sizes))
    _profile(engine, 4096, 2**31 - 1, 5, 128)  # type: ignore[arg-type]
    assert [(80, 63, 128)] == made


def test_numbers_that_overflow_end_the_start(tiny_bloom: Path, tmp_path: Path, kernels: Kernels) -> None:
    tensors = load_file(tiny_bloom / "model.safetensors")
    tensors["transformer.h.1.mlp.dense_h_to_4h.weight"][:] = 1e38
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_bloom / "config.json").read_text())
    for backend in (None, kernels):
        with pytest.raises(ValueError, match="the model's logits are NaN or infinite: its numbers overflow float32"):
            load_engine(tmp_path, kernels=backend, captured=False)
