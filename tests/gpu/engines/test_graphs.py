"""CUDA graphs: the tokens of steps that are not captured, around every size that is."""

from __future__ import annotations

import random

import pytest
import torch

from server.backends.cuda.graph import SIZES, CudaGraphCapture
from server.backends.device import CaptureFailed
from server.stepping.engine import LEAST_SEQUENCES
from tests.gpu.gpu_backend import gpu_backend
from tests.gpu.selection import NEEDS_GPU
from tests.server.conftest import DEMO
from tests.server.driver import Prompt, generate, load_engine, sampled

pytestmark = NEEDS_GPU
ALL = pytest.param(SIZES, id="all", marks=pytest.mark.kernels)


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


@pytest.mark.parametrize("sizes", [pytest.param((*SIZES[::3], SIZES[-1]), id="some"), ALL])
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 0.999), (torch.bfloat16, 0.99)])
def test_captured_steps_choose_the_tokens_of_others(dtype: torch.dtype, least: float, sizes: tuple[int, ...]) -> None:
    """Of nearly all sequences: a captured batch is filled up, and cuBLAS may sum a larger product in another order."""
    backend = gpu_backend(dtype)  # one for both: what the captures measured decides for the other steps, too
    captured, plain = (
        load_engine(DEMO, dtype=dtype, backend=backend, tokens=65536, captured=wanted) for wanted in (True, False)
    )
    assert captured.graphs and not plain.graphs
    batches = sorted({min(size + more, LEAST_SEQUENCES) for size in sizes for more in (0, 1)})
    different = {}
    for batch in batches:
        ours, theirs = ([p.tokens for p in generate(engine, prompts(batch))] for engine in (captured, plain))
        different[batch] = sum(a != b for a, b in zip(ours, theirs, strict=True))
    share = 1 - sum(different.values()) / sum(batches)
    said = {batch: count for batch, count in different.items() if count}
    print(f"{dtype}: {share:.4%} of {sum(batches)} sequences have equal tokens; others by batch size: {said}")
    assert share >= least


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_plain_decodes_upload_nothing_and_wait_for_nothing() -> None:
    engine = load_engine(DEMO, backend=gpu_backend(torch.float32), tokens=65536)
    assert engine.graphs
    try:
        torch.cuda.set_sync_debug_mode("error")  # which warns, the first time, that it does not see everything
        generate(engine, [Prompt([5, 6, 7], max_new_tokens=20), Prompt([8, 9], max_new_tokens=20)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_gpu_goes_on_after_a_capture_that_failed() -> None:
    """As for want of memory: what raises is no call of CUDA, so the capture itself ends well."""
    x = torch.ones(1000, device="cuda")

    def compute() -> tuple[torch.Tensor, ...]:
        return (x * 2 + 1,)

    def fail() -> tuple[torch.Tensor, ...]:
        results = compute()
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return results

    caller, capture = torch.cuda.current_stream(), CudaGraphCapture(SIZES, torch.cuda.Stream())
    with pytest.raises(CaptureFailed, match="OutOfMemoryError"):
        capture(fail)
    assert caller == torch.cuda.current_stream()
    torch.cuda.empty_cache()
    replay = capture(compute)
    x.fill_(3.0)
    (result,) = replay()
    torch.cuda.synchronize()
    assert bool((result == 7).all())
