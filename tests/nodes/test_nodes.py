"""Two launchers on one machine: what they serve, what they survive, and what they refuse."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.nodes.cluster import Agent, Cluster, Loopback, certificates, child_named, node_flags
from tests.nodes.load import FLOAT32, REQUESTS
from tests.ports import free_port
from tests.running import Server
from tests.system.survival import SIGNALS, Answer, answers_of, recoveries, recovery_after, signals, survive  # fmt: skip

TWO = (Loopback(), Loopback())
STAGES = (*FLOAT32, "--pipeline-parallel", "2")


@pytest.mark.rest
def test_stages_on_two_nodes_survive_the_death_of_a_shard_of_a_link_and_of_a_node(
    tls_dir: str, expected: list[Answer]
) -> None:
    async def disturb(cluster: Server) -> None:
        assert isinstance(cluster, Cluster)
        await signals(SIGNALS["kill"], 1, random.Random(3), most_s=0.5)(cluster)
        for end in (lambda: os.kill(child_named(cluster.agents[0].launcher, "link"), signal.SIGKILL),
                    lambda: os.kill(child_named(cluster.process.pid, "link"), signal.SIGKILL),
                    cluster.agents[0].kill):  # fmt: skip
            count = await recoveries(cluster)
            end()
            if cluster.agents[0].process.poll() is not None:
                cluster.agents[0] = cluster.agent(1)
            await recovery_after(cluster, count)

    with Cluster(TWO, *STAGES, "--tls-dir", tls_dir) as cluster:
        tally = asyncio.run(survive(cluster, disturb, streams=12, requests=REQUESTS, expected=expected))
        cluster.stop()
        assert 0 == cluster.wait()[0]
        code, output = cluster.agents[0].end()
    assert not tally.failures
    assert tally.answers >= 12
    assert 0 == code and "node 0 ends the server: the server is stopped" in output


def test_shards_of_one_stage_on_two_nodes_answer_as_one_process(expected: list[Answer]) -> None:
    with Cluster(TWO, *FLOAT32, "--num-shard", "2") as cluster:
        answers = asyncio.run(answers_of(cluster, REQUESTS))
    assert all(answer.is_as(one) for answer, one in zip(answers, expected, strict=True))


@pytest.mark.rest
def test_a_node_that_leaves_for_good_ends_the_server_with_one_sentence() -> None:
    with Cluster(TWO, *STAGES, "--node-timeout", "6") as cluster:
        cluster.agents[0].process.send_signal(signal.SIGTERM)
        code, output = cluster.agents[0].end()
        assert 0 == code and "SIGTERM: this node leaves" in output
        code, output = cluster.wait()
    assert 1 == code
    assert "error: node 1 (SIGTERM) did not come within 6 s: start the launcher on every node" in output


@pytest.mark.rest
def test_a_failure_on_another_node_is_named_and_ends_all() -> None:
    with Cluster(TWO, *STAGES, "--max-deaths", "0") as cluster:
        os.kill(cluster.shards()[1], signal.SIGKILL)
        code, output = cluster.wait()
        assert (1, 1) == (code, cluster.agents[0].end()[0])
    assert "error: shard 1 on node 1 stopped: " in output
    assert "error: node 0 has ended: shard 1 on node 1 stopped: " in cluster.agents[0].output


@pytest.mark.rest
def test_a_node_0_that_is_gone_for_good_ends_the_others() -> None:
    with Cluster(TWO, *STAGES, "--node-timeout", "6") as cluster:
        os.kill(cluster.process.pid, signal.SIGKILL)
        code, output = cluster.agents[0].end()
    assert 1 == code
    assert "contact to node 0 is lost" in output
    assert f"error: node 0 at 127.0.0.1 port {cluster.node_flags[-1]} was not there for 6 s (" in output


def refused(*flags: str, first: tuple[str, ...] = STAGES, wants: str, within: str = "30") -> None:
    """Node 1 with these flags does not come to a node 0 with `first`, and says why."""
    common = node_flags(2, "127.0.0.1")
    node_0 = Agent(Loopback(), *first, *common, "--node-rank", "0", "--port", "0", "--hostname", "127.0.0.1")
    node_1 = Agent(Loopback(), *common, "--node-rank", "1", "--node-timeout", within, *flags)
    try:
        code, output = node_1.end()
        assert 1 == code
        assert wants in output.splitlines()[-1]
        node_0.wait_for("refused")
        assert node_0.process.poll() is None
        node_0.process.send_signal(signal.SIGTERM)
        assert 0 == node_0.end()[0]
    finally:
        node_0.close()
        node_1.close()


def test_nodes_that_disagree_do_not_meet(tls_dir: str, tmp_path: Path) -> None:
    refused(
        *STAGES, "--quantize", "int8", wants="its --quantize is int8 and that of node 0 None: start all nodes alike"
    )


def test_nodes_with_two_models_do_not_meet(tmp_path: Path) -> None:
    refused("--pipeline-parallel", "2", "--model-id", "null", wants="its model is null and that of node 0 ")


def test_certificates_of_two_authorities_do_not_meet(tls_dir: str, tmp_path: Path) -> None:
    with certificates(tmp_path / "others") as other:
        refused(
            *STAGES,
            "--tls-dir",
            other,
            first=(*STAGES, "--tls-dir", tls_dir),
            wants="and this node do not meet: its certificate and ours are not of one authority",
        )


@pytest.mark.rest
def test_a_node_without_certificates_is_refused(tls_dir: str) -> None:
    refused(
        *STAGES,
        first=(*STAGES, "--tls-dir", tls_dir),
        wants="as a node with --tls-dir does to one without",
        within="20",
    )


def test_a_node_that_never_comes_is_named() -> None:
    flags = (*STAGES, *node_flags(2, "127.0.0.1"), "--node-timeout", "1", "--port", "0")
    alone = Agent(Loopback(), *flags, "--node-rank", "0")
    try:
        code, output = alone.end()
    finally:
        alone.close()
    assert 1 == code
    assert "waits for node 1, 1 s at most" in output
    assert "error: node 1 did not come within 1 s: start the launcher on every node" in output


def test_a_node_0_that_never_comes_is_named() -> None:
    port = str(free_port())
    flags = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-timeout", "1")
    alone = Agent(Loopback(), *STAGES, *flags, "--node-rank", "1")
    try:
        code, output = alone.end()
    finally:
        alone.close()
    assert 1 == code
    assert f"node 0 at 127.0.0.1 port {port} was not there for 1 s (" in output.splitlines()[-1]
    assert "start it with the same flags and --node-rank 0" in output
