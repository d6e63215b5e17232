"""A draft model proposes what it would generate itself, and changes nothing of what the served one generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.backends.cpu import Kernels
from tests.server.checkpoints import Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import Asking, Prompt, generate, load_engine
from tests.server.stepping.test_drafts import SIZES, prompts, results

DRAFT: dict[str, Any] = {"speculate": 5, "speculative_method": "draft"}


def beside(folder: Path, **settings: Any) -> dict[str, Any]:
    return DRAFT | {"speculative_model": str(folder)} | settings


def free_prompts() -> list[Prompt]:
    """Those without a grammar, of which a draft model knows nothing."""
    return [p for p in prompts() if p.rule is None]


@pytest.mark.parametrize("case", ["embedded", "llama", "bloom", "gemma2", "mistral", "opt"])
def test_the_same_model_proposes_what_comes(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder = DEMO if case == "embedded" else checkpoints(case)[0]
    engine = load_engine(folder, kernels=kernels, speculative=beside(folder), **SIZES)
    expected = generate(engine, free_prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, free_prompts(), drafter))
    assert drafter.accepted > 50 and drafter.refused == 0


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_another_model_changes_nothing(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder, draft = checkpoints(case)[0], checkpoints("bloom")[0]
    plain = load_engine(folder, kernels=kernels, **SIZES)
    engine = load_engine(folder, kernels=kernels, speculative=beside(draft), **SIZES)
    expected = generate(plain, prompts())
    drafter = Asking([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, prompts(), drafter))
    assert drafter.refused > 10
