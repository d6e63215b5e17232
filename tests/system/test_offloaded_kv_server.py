"""A server most of whose KV blocks are on the disk gives the answers of one that has them in memory."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.running import Server, body

LONG = "Once upon a time there was a little fox who lived in a wood. " * 8
REQUESTS = [body(LONG[: 60 * (n % 7 + 1)] + str(n % 3), max_new_tokens=12 + n) for n in range(10)]
SIZE = ("--dtype", "float32", "--device", "cpu", "--max-total-tokens", "512", "--max-batch-total-tokens", "2048")


def answers(*flags: str) -> tuple[list[str], str]:
    """The texts of requests that come together, and the start-up table."""
    with Server(*SIZE, *flags) as server, ThreadPoolExecutor(len(REQUESTS)) as clients:
        replies = clients.map(lambda r: httpx2.post(f"{server.url}/generate", json=r, timeout=120), REQUESTS)
        return [reply.raise_for_status().json()["generated_text"] for reply in replies], "".join(server.lines)


@pytest.mark.offload
def test_blocks_on_the_disk_change_no_answer(tmp_path: Path) -> None:
    expected, _ = answers()
    for flags in ((), ("--num-shard", "2"), ("--weights-on-device", "0%"), ("--kv-cache-dtype", "int8")):
        found, table = answers("--kv-on-device", "10%", "--offload-dir", str(tmp_path), *flags)
        table = " ".join(table.split())  # lines end elsewhere where a number is shorter
        assert re.search(r"KV blocks 128 12 on the device, 116 in --offload-dir \([\d.]+ [kMG]?B\), through", table), (
            table
        )
        assert "decode graphs none" in table
        if "int8" not in flags:
            assert expected == found, flags
