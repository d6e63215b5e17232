"""What docs/deploying.md says of Ray Serve: its commands are typed as they stand, but for what one machine lacks."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.pages import section
from tests.ports import free_port
from tests.ray.place import Place, running, trial
from tests.running import ROOT

PAGE = section("deploying.md", "Ray Serve")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [
    re.sub(r"\s+#.*", "", line).strip()
    for block in BLOCKS
    for line in re.sub(r"\\\n\s*", "", block).splitlines()
    if re.match(r"(RAY_\S+ )?\.venv/bin/|curl ", line)
]
INSTALL, RUN, STREAM, MODELS, STATUS, HEAD, NODE, DEPLOY, STATUS_TOO, SHUTDOWN, JOB = COMMANDS
# The environment of `make test-ray` stands for what INSTALL makes; every other command is typed by a test below.
TYPED = [RUN, STREAM, MODELS, STATUS, HEAD, NODE, DEPLOY, STATUS_TOO, SHUTDOWN, JOB]
READY = "Lockstep is ready at "
SENTENCE_OF_PORTS = "Failed to bind to address '127.0.0.1:3000'"
# Sentences of "Problems with Ray", and where they come from: a file, or a test below that provokes them.
SENTENCES = {
    "No module named 'lockstep_ray'": "test_without_the_extra",
    "the server ended with code … before it was ready:": "test_several_machines",
    "Failed to update the deployments": "test_several_machines",
    "AuthenticationError": "test_the_first_one",
    "Authentication token is missing or incorrect": "Ray: what a job says, after some 20 s",
    "… after 6 tries: send the request again later": "deploy/ray/lockstep_ray/relay.py",
    "this Host is none of the `hosts` in app.yaml": "test_the_first_one",
    SENTENCE_OF_PORTS: "test_a_port_that_somebody_has",
    "Found multiple active Ray instances": "Ray: it needs clusters that see each other, which those of tests must not",
}


def test_every_command_is_typed_by_a_test() -> None:
    lines = sum(len(re.findall(r"(?:^| )(?:\.venv/bin/|curl )", block, re.MULTILINE)) for block in BLOCKS)
    assert lines == len(COMMANDS) == len(TYPED) + 1
    assert INSTALL.endswith("--editable '.[ray]'") and STATUS.endswith(STATUS_TOO)


def test_every_sentence_of_what_goes_wrong_is_known() -> None:
    rows = PAGE.partition("### Problems with Ray")[2]
    firsts = [line.split(" | ")[0] for line in rows.splitlines() if line.startswith("| ")]
    quoted = {two or one for first in firsts for two, one in re.findall(r"``(.+?)``(?!`)|`([^`]+)`", first)}
    sentences = {one for one in quoted if (" " in one and not one.startswith("serve ")) or one.endswith("Error")}
    assert sentences == set(SENTENCES)


def test_a_topology_is_drawn() -> None:
    assert "──▶ proxy" in BLOCKS[0] and BLOCKS[0].count("──▶ launcher") + BLOCKS[0].count("─▶ launcher") >= 1


def test_what_lockstep_says_is_what_its_source_says() -> None:
    assert f"`{READY}http://127.0.0.1:" in PAGE and READY in (ROOT / "launcher.py").read_text()
    assert "tries: send the request again later" in (ROOT / "deploy/ray/lockstep_ray/relay.py").read_text()


@pytest.mark.ray
def test_the_first_one() -> None:
    with trial() as place, running(place, RUN) as serve:
        log = serve.wait_for(READY + r"http://127\.0\.0\.1:\d+ after [\d.]+ s")
        assert "Submitted deploy config successfully." in log
        [dashboard] = re.findall(r"dashboard at \S*?(http://[\d.:]+)", log)
        place.env["RAY_DASHBOARD_ADDRESS"] = dashboard  # 8265, unless somebody has it
        shown = place.until_status(STATUS, r"lockstep:\n\s+status: RUNNING")
        assert 2 == len(re.findall(r"(?:lockstep-demo|ingress):\n\s+status: HEALTHY", shown)), shown
        assert (place.folder / ".ray" / "auth_token").is_file()
        assert '"generated_text":' in place.type(STREAM)
        assert "lockstep-demo" == json.loads(place.type(MODELS.replace("curl", "curl -s")))["data"][0]["id"]
        assert "AuthenticationError" in place.type(STATUS_TOO, code=1)
        there = f"curl -s -H 'host: other.example' 127.0.0.1:{place.port}/v1/models"
        assert "this Host is none of the `hosts` in app.yaml" in place.type(there)
        for path in ("/v1/files", "/v1/batches", "/metrics"):
            assert "not_found" in place.type(f"curl -s 127.0.0.1:{place.port}{path}")


@contextmanager
def first_node(place: Place) -> Iterator[int]:
    """A cluster of its own, by its port. `ray stop` would end all of this machine: --block ends it with Ctrl-C."""
    port, dashboard = free_port(), free_port()
    mine = f"--port {port} --dashboard-port {dashboard} --ray-client-server-port {free_port()} --block"
    place.env |= {"RAY_AUTH_MODE": "token", "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    place.env["RAY_ADDRESS"] = f"127.0.0.1:{port}"
    place.type(".venv/bin/ray get-auth-token --generate")
    with running(place, HEAD, {"--port 6379": mine}) as head:
        head.wait_for("Ray runtime started")
        yield port


@pytest.mark.ray
def test_several_machines() -> None:
    with trial() as place, first_node(place) as port:
        with running(place, NODE, {"FIRST:6379": f"127.0.0.1:{port} --block"}) as node:
            node.wait_for("Ray runtime started")
            place.type(DEPLOY)
            place.until_status(STATUS_TOO, r"lockstep:\n\s+status: RUNNING")
            place.app.write_text(place.yaml.replace("flags: []", 'flags: [--num-shard, "0"]'))
            place.type(DEPLOY)
            said = place.until_status(STATUS_TOO, "status: DEPLOY_FAILED")
            assert re.search(r"the server ended with code\s+2\s+before it was\s+ready", said), said
            place.type(SHUTDOWN)
            assert "lockstep:" not in place.type(STATUS_TOO)


@pytest.mark.ray
def test_a_port_that_somebody_has() -> None:
    with trial() as place, socket.create_server(("127.0.0.1", place.port)), running(place, RUN) as serve:
        serve.wait_for(SENTENCE_OF_PORTS.replace("3000", str(place.port)))


@pytest.mark.ray
def test_a_job() -> None:
    with trial() as place, first_node(place):
        inputs, output = place.folder / "prompts.jsonl", place.folder / "out.jsonl"
        body = {"model": "lockstep-demo", "prompt": "Once upon", "max_tokens": 2}
        lines = [{"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(4)]
        inputs.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON\n")
        said = place.type(
            JOB,
            {
                "prompts.jsonl": str(inputs),
                "out.jsonl": str(output),
                "--workers 4 --num-gpus 1": "--workers 2 --num-gpus 0 --shard-lines 3",
                "-- --model-id bigscience/bloomz-7b1-mt": "--",
            },
        )
        assert "2 of 2 shards are answered" in said
        assert f"{output} is complete: 5 lines, 1 failed" in said
        assert 5 == len(output.read_text().splitlines())


@pytest.mark.ray
def test_without_the_extra() -> None:
    with trial() as place:
        place.env["PYTHONPATH"] = str(ROOT)
        with running(place, RUN) as serve:
            serve.wait_for("No module named 'lockstep_ray'")
