"""The engine on a GPU against the CPU, which defines correct. Run by `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmark.cost import shapes
from server.arch.footprint import LOGIT_ROWS
from server.backends.cuda.device import CudaDevice
from server.backends.reference import ReferenceBackend
from server.config import ShardConfig
from server.loading import load
from server.pb import generate_pb2 as pb
from server.stepping.warmup import ProfileRun, warm_up
from tests.gpu.gpu_backend import gpu_backend
from tests.gpu.selection import GPU, NEEDS_GPU
from tests.server.conftest import DEMO, save_tiny_bloom
from tests.server.driver import Prompt, all_logits, generate, load_engine
from tests.server.ranks.tensor_parallel import prompts
from tests.server.tiny import save_tiny

pytestmark = NEEDS_GPU
SIZES = {"total_tokens": 2048, "wanted_tokens": 0, "useful_tokens": 2**31, "top_n_tokens": 5, "sequences": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-bloom")
    save_tiny_bloom(folder)
    return folder


@pytest.mark.parametrize("is_reference", [True, False], ids=["reference", "chosen"])
def test_logits_equal_those_of_the_cpu(tiny: Path, is_reference: bool) -> None:
    token_ids = list(range(4, 100)) * 2
    cpu = all_logits(load_engine(tiny), token_ids)
    gpu = all_logits(
        load_engine(tiny, backend=ReferenceBackend(CudaDevice(0)) if is_reference else gpu_backend(torch.float32)),
        token_ids,
    ).cpu()
    torch.testing.assert_close(cpu, gpu, atol=2e-3, rtol=1e-3)


def test_tokens_equal_those_of_the_cpu() -> None:
    on_cpu, on_gpu = (
        generate(load_engine(DEMO, backend=b), prompts()) for b in (None, ReferenceBackend(CudaDevice(0)))
    )
    assert [p.tokens for p in on_cpu] == [p.tokens for p in on_gpu]


@pytest.mark.parametrize(
    ("case", "is_captured"),
    [
        *((case, True) for case in ("bloom", "llama", "qwen3", "gpt_neox", "phi3", "t5")),
        # Experts; compressed keys and values; the gated delta rule; Mamba-2 beside attention.
        *((case, False) for case in ("mixtral", "deepseek_v3", "qwen3_5", "nemotron_h")),
    ],
)
def test_a_model_on_the_chosen_backend_gives_the_tokens_of_the_reference(
    case: str, is_captured: bool, tmp_path: Path
) -> None:
    save_tiny(case, tmp_path)
    backend = gpu_backend(torch.float32)
    engines = load_engine(tmp_path), load_engine(tmp_path, backend=backend, captured=is_captured)
    expected, found = (generate(engine, prompts()) for engine in engines)
    assert [p.tokens for p in expected] == [p.tokens for p in found]


def test_bfloat16_agrees_with_float32_on_nearly_every_next_token() -> None:
    (story,) = generate(load_engine(DEMO), [Prompt([5, 6, 7, 8], max_new_tokens=200)])
    token_ids = [5, 6, 7, 8, *story.tokens]
    exact = all_logits(load_engine(DEMO, backend=ReferenceBackend(CudaDevice(0))), token_ids)
    backend = gpu_backend(torch.bfloat16)
    rounded = all_logits(load_engine(DEMO, dtype=torch.bfloat16, backend=backend), token_ids)
    agreement = (exact.argmax(dim=-1) == rounded.argmax(dim=-1)).float().mean()
    assert agreement >= 0.99


def test_the_warmup_leaves_the_memory_it_was_told_to(tmp_path: Path) -> None:
    config = ShardConfig(str(DEMO), str(DEMO), 0, 1, str(tmp_path / "s"), "", device="cuda", cuda_memory_fraction=0.5)
    engine, info = load(config)
    assert info.device == torch.cuda.get_device_name(0)
    warm_up(engine, prefill_tokens=4096, fraction=0.5, **SIZES)
    free, total = torch.cuda.mem_get_info(GPU)
    assert free >= 0.45 * total


def test_the_worst_steps_survive_a_cache_that_takes_all_memory(tmp_path: Path) -> None:
    shapes.make_model_folder(shapes.find("bloom-560m"), tmp_path)
    config = ShardConfig(
        str(tmp_path), str(tmp_path), 0, 1, str(tmp_path / "s"), "", device="cuda", random_weights=True
    )
    engine, _ = load(config)
    warmed = warm_up(engine, prefill_tokens=16384, fraction=1.0, **SIZES)
    # Blocks have room for two tokens more.
    run = ProfileRun.of(prefill_tokens=16384, total_tokens=2046, sampled=LOGIT_ROWS, has_encoder=False)
    worst = run.request(top_n_tokens=5)
    later = pb.StepRequest(decode=True, masks=worst.masks)
    steps = [engine.launch(request) for request in (worst, later, later)]
    for step in steps:
        assert step is not None
        step.finish()
    assert warmed.step_bytes > 0
    engine.launch(pb.StepRequest(retire=[new.id for new in worst.add]))
