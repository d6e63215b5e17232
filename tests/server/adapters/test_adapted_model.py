"""What a sequence with an adapter gets is what the merged model gives it, whatever its neighbours have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.backends.cpu.kernels import Kernels
from server.stepping.engine import Engine
from tests.combinations import by_turns
from tests.server.adapters import made
from tests.server.checkpoints import Checkpoints
from tests.server.driver import GREEDY, Prompt, generate, load_engine, sampled

PROMPT = [int(i) for i in torch.randint(4, 103, (40,), generator=torch.Generator().manual_seed(1))]
CASES = (
    *("bloom", "opt", "gpt2", "gpt_neox", "falcon-7b", "llama", "mistral", "qwen3", "gemma3_text", "phi3", "t5-gated"),
    *("qwen3_5", "granitemoehybrid-dense"),
)
WAYS = ("reference", "kernels")
NAMES = ("one", "two")


def place(engine: Engine, folders: dict[int, tuple[bytes, Path]]) -> None:
    """Put adapters into rows."""
    assert engine.adapters is not None
    for row, (key, folder) in folders.items():
        engine.adapters.prepare(key, folder)
        engine.adapters.place(row, key)


def prompts() -> list[Prompt]:
    """Of several kinds of requests, which join one after the other."""
    ways = (GREEDY, sampled(3), sampled(4, top_k=20))
    return [Prompt(PROMPT[n:], max_new_tokens=12, sampling=way, joins_at=n, chunk=17) for n, way in enumerate(ways)]


@pytest.mark.parametrize(("case", "way"), by_turns(CASES, WAYS))
@torch.inference_mode()
def test_tokens_are_those_of_the_merged_models(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, case: str, way: str
) -> None:
    folder, _ = checkpoints(case)
    keys = {
        name: made.make(
            *(folder, tmp_path / name, tmp_path / f"{name}-merged"),
            seed=seed,
            rank=4 + 4 * seed,
            is_transposed=case == "gpt2",
        )
        for seed, name in enumerate(NAMES)
    }
    chosen = kernels if way == "kernels" else None
    engine = load_engine(folder, kernels=chosen, adapters=3)
    place(engine, {row: (keys[name], tmp_path / name) for row, name in ((1, "one"), (3, "two"))})
    rows = (3, 0, 1)
    together = generate(engine, [replace(p, adapter=row) for row, p in zip(rows, prompts(), strict=True)])
    others = {1: tmp_path / "one-merged", 3: tmp_path / "two-merged", 0: folder}
    for row, mine, alone in zip(rows, together, prompts(), strict=True):
        (expected,) = generate(load_engine(others[row], kernels=chosen), [replace(alone, joins_at=0)])
        assert mine.tokens == expected.tokens
        assert mine.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
