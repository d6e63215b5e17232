"""CUDA graphs: the tokens of steps that are not captured, around every size that is."""

from __future__ import annotations

import random

import pytest
import torch

from server.backends.cuda.graph import SIZES
from tests.gpu.gpu_backend import gpu_backend
from tests.server.conftest import DEMO
from tests.server.driver import Prompt, generate, load_engine, sampled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BATCHES = sorted({size + more for size in SIZES for more in (0, 1)})


def prompts(count: int) -> list[Prompt]:
    rng = random.Random(count)
    return [
        Prompt(
            [rng.randrange(2, 90) for _ in range(rng.randint(1, 30))],
            max_new_tokens=rng.randint(2, 8),
            sampling=sampled(i, top_p=0.9) if i % 7 == 3 else Prompt([]).sampling,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_choose_the_tokens_of_others(dtype: torch.dtype) -> None:
    backend = gpu_backend(dtype)  # one for both: what the captures measured decides for the other steps, too
    captured, plain = (
        load_engine(DEMO, dtype=dtype, backend=backend, tokens=65536, captured=wanted) for wanted in (True, False)
    )
    assert captured.graph_sizes and not plain.graph_sizes
    for batch in BATCHES:
        ours, theirs = ([p.tokens for p in generate(engine, prompts(batch))] for engine in (captured, plain))
        agreement = sum(a == b for a, b in zip(ours, theirs, strict=True)) / batch
        assert agreement == 1 if dtype == torch.float32 else agreement >= 0.99, f"batch of {batch}"


def test_plain_decodes_upload_nothing_and_wait_for_nothing() -> None:
    engine = load_engine(DEMO, backend=gpu_backend(torch.float32), tokens=65536)
    assert engine.graph_sizes
    torch.cuda.set_sync_debug_mode("error")
    try:
        generate(engine, [Prompt([5, 6, 7], max_new_tokens=20), Prompt([8, 9], max_new_tokens=20)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
