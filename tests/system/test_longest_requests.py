"""A server without limits takes the longest sequence that its model or its memory allows, and answers it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmark.cost.shapes import write_word_tokenizer
from tests.running import Server
from tests.server.tiny import COMMON, LLAMA_SIZES, save_tiny


def answered(server: Server, tokens: int) -> dict[str, Any]:
    """One token behind a prompt of so many."""
    asked = {"model": "it", "prompt": [7] * tokens, "max_tokens": 1}
    answer = httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=120)
    assert 200 == answer.status_code, answer.text
    found: dict[str, Any] = answer.json()["usage"]
    return found


@pytest.mark.parametrize(
    ("case", "flags", "longest"),
    [
        ("llama", (), LLAMA_SIZES["max_position_embeddings"]),
        ("bloom", (), 4096),
        ("bloom", ("--max-batch-total-tokens", "900"), 900),
    ],
)
def test_the_longest_request_is_answered_after_every_start(
    case: str, flags: tuple[str, ...], longest: int, tmp_path: Path
) -> None:
    save_tiny(case, tmp_path)
    write_word_tokenizer(COMMON["vocab_size"], tmp_path)
    with Server("--model-id", str(tmp_path), *flags) as server:
        info = httpx2.get(f"{server.url}/info", timeout=60).json()
        assert (longest, longest - 1) == (info["max_total_tokens"], info["max_input_tokens"])
        assert longest - 1 == answered(server, longest - 1)["prompt_tokens"]
        with ThreadPoolExecutor(8) as clients:
            assert [longest // 2] * 8 == [
                usage["prompt_tokens"] for usage in clients.map(lambda _: answered(server, longest // 2), range(8))
            ]
        assert 0 == server.metrics()["tgi_batch_current_size"]
