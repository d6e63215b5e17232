"""Servers whose nodes have networks of their own: every family, cables that are pulled, packets that are lost.

Run by `make test-nodes`, as root.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.nodes.cluster import Cluster
from tests.nodes.load import FLOAT32, REQUESTS
from tests.nodes.machines import Namespace, Nodes, machines, why_not
from tests.running import Server, generate_all
from tests.server.checkpoints import CASES, Checkpoints
from tests.system.survival import Answer, answers_of, recoveries, recovery_after, survive

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.xdist_group("namespaces"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    with machines(2) as made:
        yield made


def with_tokenizer(folder: Path) -> Path:
    """Give a checkpoint a tokenizer whose words are numbers."""
    config = json.loads((folder / "config.json").read_text())
    size = config.get("vocab_size") or config["padded_vocab_size"]  # of ChatGLM
    tokenizer = Tokenizer(WordLevel({str(n): n for n in range(size)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tokens_of(server: Server) -> list[object]:
    """The tokens of some prompts of numbers."""
    rng = random.Random(3)
    requests = [
        {"inputs": " ".join(str(rng.randrange(3, 60)) for _ in range(length)),
         "parameters": {"max_new_tokens": 12, "details": True, **more}}
        for length in (1, 5, 17, 30)
        for more in ({}, {"do_sample": True, "seed": 4})
    ]  # fmt: skip
    answers = [answer.json() for answer in asyncio.run(generate_all(server, requests))]
    return [[token["id"] for token in answer["details"]["tokens"]] for answer in answers]


@pytest.mark.parametrize("case", CASES)
def test_every_family_on_two_nodes(case: str, checkpoints: Checkpoints, two: Nodes, tls_dir: str) -> None:
    folder = str(with_tokenizer(checkpoints(case)[0]))
    flags = ("--model-id", folder, *FLOAT32, "--max-total-tokens", "48", "--max-input-length", "32")
    with Server(*flags) as server:
        whole = tokens_of(server)
    with Cluster(two, *flags, "--num-shard", "2", "--pipeline-parallel", "2", "--tls-dir", tls_dir) as cluster:
        assert whole == tokens_of(cluster)


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-shard", "2", "--pipeline-parallel", "2"),  # one shard on each node: stages are split over two
        ("--num-shard", "2", "--pipeline-parallel", "4"),
        ("--num-shard", "4"),
    ],
)
def test_four_nodes(flags: Sequence[str], tls_dir: str, expected: list[Answer]) -> None:
    with (
        machines(4) as four,
        Cluster(four, *FLOAT32, *flags, "--tls-dir", tls_dir, "--trust-network") as cluster,
    ):
        answers = asyncio.run(answers_of(cluster, REQUESTS))
    assert all(answer.is_as(one) for answer, one in zip(answers, expected, strict=True))


def test_a_cable_that_is_pulled_for_five_seconds(two: Nodes, tls_dir: str, expected: list[Answer]) -> None:
    """The streams stop and go on, whether the router waits or has the shards started again."""

    async def disturb(server: Server) -> None:
        assert isinstance(two[1], Namespace)
        await asyncio.sleep(1)
        two[1].cut()
        await asyncio.sleep(5)
        two[1].plug()
        await asyncio.sleep(8)

    with Cluster(two, *FLOAT32, "--pipeline-parallel", "2", "--tls-dir", tls_dir) as cluster:
        tally = asyncio.run(survive(cluster, disturb, streams=8, requests=REQUESTS, expected=expected))
    assert not tally.failures
    assert 4 < max(tally.pauses)


def test_a_cable_that_is_pulled_for_long(two: Nodes, tls_dir: str, expected: list[Answer]) -> None:
    """The shards are given up, and streams go on with the next ones once the node is back."""

    async def disturb(server: Server) -> None:
        assert isinstance(two[1], Namespace)
        await asyncio.sleep(1)
        count = await recoveries(server)
        two[1].cut()
        await asyncio.sleep(20)
        two[1].plug()
        await recovery_after(server, count)

    with Cluster(two, *FLOAT32, "--pipeline-parallel", "2", "--tls-dir", tls_dir) as cluster:
        tally = asyncio.run(survive(cluster, disturb, streams=8, requests=REQUESTS, expected=expected))
    assert not tally.failures


def test_a_cable_that_is_pulled_for_good(two: Nodes, tls_dir: str) -> None:
    """Every stream ends with one sentence after the given time."""
    flags = (*FLOAT32, "--pipeline-parallel", "2", "--tls-dir", tls_dir, "--node-timeout", "5")
    try:
        with Cluster(two, *flags) as cluster:
            assert isinstance(two[1], Namespace)
            body = {"inputs": "the fox", "parameters": {"max_new_tokens": 2000}}
            with httpx2.stream("POST", f"{cluster.url}/generate_stream", json=body, timeout=60) as stream:
                lines = (line for line in stream.iter_lines() if line)
                next(lines)
                two[1].cut()
                last = list(lines)[-1]
            code, output = cluster.wait()
            assert 1 == cluster.agents[0].end()[0]
    finally:
        two[1].plug()  # type: ignore[attr-defined]
    assert 1 == code
    assert "error: node 1 (contact was lost: it was silent for 10 s) did not come within 5 s" in output
    assert "node 1 (contact was lost" in json.loads(last.removeprefix("data:"))["error"]


def test_lost_packets_change_no_token(tls_dir: str, expected: list[Answer]) -> None:
    flags = (*FLOAT32, "--pipeline-parallel", "2", "--tls-dir", tls_dir)
    with machines(2, delay_ms=0, loses_one_in=100) as bad, Cluster(bad, *flags) as cluster:
        answers = asyncio.run(answers_of(cluster, REQUESTS))
    assert all(answer.is_as(one) for answer, one in zip(answers, expected, strict=True))
