"""A prompt whose beginning was computed before the server was started again: it comes from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.running import Server

PROMPT = " ".join(f"The little fox number {number} walked along the river." for number in range(20))
DISK_HITS = 'tgi_prefix_tier_hit_tokens{tier="disk"}'


def answer(server: Server) -> Any:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    return httpx2.post(f"{server.url}/generate", json=body, timeout=60).json()["generated_text"]


def flip_a_bit(file: Path) -> None:
    """In the first block of a rank's file."""
    content = bytearray(file.read_bytes())
    content[100] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(("shards", "format"), [("1", "auto"), pytest.param("2", "int8", marks=pytest.mark.rest)])
def test_a_prefix_survives_the_server_and_a_flipped_bit_only_costs_its_computation(
    tmp_path: Path, shards: str, format: str
) -> None:
    folder = tmp_path / "cache"
    flags = ("--num-shard", shards, "--kv-cache-dtype", format)
    tiers = ("--prefix-cache-disk-gb", "0.1", "--prefix-cache-dir", str(folder))
    with Server(*flags, *tiers) as server:
        expected = answer(server)
        assert 0 == server.metrics()[DISK_HITS]
        server.stop()
        server.wait()
    with Server(*flags, *tiers) as server:
        assert any("there already" in line for line in server.lines)
        assert expected == answer(server)
        hits = server.metrics()[DISK_HITS]
        assert hits > 0 and 0 == server.metrics()["tgi_prefix_tier_damaged_blocks"]
        server.stop()
        server.wait()
    flip_a_bit(sorted(folder.glob("*.blocks"))[-1])  # of one rank alone
    with Server(*flags, *tiers) as server:
        assert expected == answer(server)
        assert server.metrics()[DISK_HITS] < hits
        assert server.metrics()["tgi_prefix_tier_damaged_blocks"] >= 1
