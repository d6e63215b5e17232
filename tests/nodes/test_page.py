"""What docs/deploying.md says of several nodes: its commands are run as they stand, but for what one machine lacks."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.nodes.cluster import Agent, Loopback
from tests.pages import section
from tests.ports import free_port
from tests.running import ROOT, body

PAGE = section("deploying.md", "Several nodes")
BLOCKS = [block for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if ".venv" in block]
TLS, NODES, TRIAL, PLAN = (shlex.split(block.replace("\\\n", " ")) for block in BLOCKS)
# What this machine lacks: the model and its GPUs, and a network.
IN_PLACE_OF = {"--model-id bigscience/bloom-7b1 ": "", "--num-shard 4": "--num-shard 1", "10.0.0.1": "127.0.0.1"}


COMMANDS = {".venv/bin/lockstep": ["launcher.py"], ".venv/bin/lockstep-bench": ["-m", "benchmark"]}


def output_of(argv: list[str]) -> str:
    """What a command of the page prints, if it ends well."""
    command = [sys.executable, *COMMANDS[argv[0]], *argv[1:]]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout


def launcher(argv: list[str], *more: str) -> Agent:
    """Start a launcher as the page says. A flag that is given again in `more` counts."""
    assert ".venv/bin/lockstep" == argv[0]
    return Agent(Loopback(), *argv[1:], *more)


def see(node_0: Agent, node_1: Agent) -> None:
    """What one sees, by the page, and an answer; then the end of both."""
    try:
        node_0.wait_for("waits for node 1, 300 s at most")
        node_0.wait_for("node 1 is here")
        node_1.wait_for("node 1 is let in by node 0")
        said = node_0.wait_for("Lockstep is ready at ")
        url = re.findall(r"Lockstep is ready at (\S+)", said)[0].replace("0.0.0.0", "127.0.0.1")
        answer = httpx2.post(f"{url}/generate", json=body("Once upon", max_new_tokens=3), timeout=300)
        assert 200 == answer.status_code and answer.json()["generated_text"]
        os.kill(node_0.launcher, signal.SIGTERM)
        assert (0, 0) == (node_0.end()[0], node_1.end()[0])  # the others end with node 0, with exit code 0
    finally:
        node_0.close()
        node_1.close()


@pytest.mark.rest
def test_certificates_and_two_nodes(tmp_path: Path) -> None:
    folder = str(tmp_path / "made")
    words = [folder if word == "~/lockstep-tls" else word for word in TLS]
    assert "copy it to every node" in output_of(words)
    line = shlex.join(NODES)
    for what, instead in IN_PLACE_OF.items():
        assert what in line, f"the page has no {what} any more"
        line = line.replace(what, instead)
    argv = [folder if word == "~/lockstep-tls" else word for word in shlex.split(line)]
    argv += ["--master-port", str(free_port())]
    see(launcher(argv, "--port", "0"), launcher(argv, "--node-rank", "1"))


@pytest.mark.rest
def test_the_trial_on_one_machine() -> None:
    assert ["--port", "3000"] == TRIAL[-2:]  # which somebody else may have
    argv = [*TRIAL[:-2], "--master-port", str(free_port())]
    see(launcher(argv, "--port", "0"), launcher(argv, "--node-rank", "1"))


def test_the_plan() -> None:
    printed = output_of(PLAN)
    assert "| Links" in printed and "2 pipeline stages, each on its own devices, for 4 micro-batches" in printed


def test_what_the_page_quotes_is_what_launchers_say() -> None:
    """Sentences that the page has in quotes are looked for above; the others are here, with where they are tested."""
    said = {"waits for node 1, 300 s at most", "node 1 is here", "node 1 is let in by node 0"}
    elsewhere = {"node 0 at … was not there for 300 s"}  # test_nodes.py
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    quoted = {text for text in re.findall(r"`([^`]+)`", prose) if re.match(r"(waits|node \d) ", text)}
    assert quoted == said | elsewhere
