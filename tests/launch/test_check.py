"""`lockstep check`: what a launch would do with a command line, told without loading anything, and rightly."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmark.cost.devices import DatasheetDevice, capacity
from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import shape
from launch.commands import check as checking
from launch.commands import model_check
from launch.commands.check import examine, read_command
from launch.commands.findings import Findings, render
from launch.compatibility import docker, peers
from launch.compatibility.tgi import Fate
from launch.config import DEMO
from launch.errors import Refusal
from launch.flags import read_command_line
from launch.settings import read_settings
from server.checkpoint import hub
from tests.adapter_folders import adapter_folder
from tests.adapter_folders import weights as contents
from tests.launch.test_tgi import FLAGS, VARIABLES, WITHOUT_VARIABLE, given, setting_of
from tests.ports import free_port
from tests.router.doubles import tasks_in_process
from tests.running import ROOT, Server

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_process_aside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Chat templates are tried in this process, but for tests with the marker `aside`: in one of their priority."""
    is_aside = request.node.get_closest_marker("aside") is not None
    with patch("router.sandbox.pool.NICENESS", 0) if is_aside else tasks_in_process():
        yield


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a small model with rotary positions and no weights."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


def check(words: Sequence[str], environ: Mapping[str, str] | None = None) -> Findings:
    """What is found of a command line, on CPUs and with any free port where it names none."""
    return examine(read_command(words, {"DEVICE": "cpu", "PORT": "0", **(environ or {})}))


def row(findings: Findings, name: str) -> tuple[str, str]:
    """Value and reason."""
    return next((value, reason) for found, value, reason in findings.rows if found == name)


def notes_of(name: str, findings: Findings) -> list[str]:
    """The warnings that speak of a setting of TGI's."""
    return [note for note in findings.notes if note.endswith(f"changes nothing: {setting_of(name).reason}")]


def becomes(name: str, findings: Findings) -> None:
    """Hold what was found of one setting to what the table says of it."""
    setting = setting_of(name)
    refused = [problem for problem in findings.problems if problem.endswith(f"is refused: {setting.reason}")]
    assert (setting.fate is Fate.REFUSED) == bool(refused) and findings.problems == refused
    assert (setting.fate is Fate.IDLE) == (len(notes_of(name, findings)) == 1)


def model_for(name: str, llama: Path) -> list[str]:
    """A model that a setting makes sense for."""
    if name == "model_id":
        return []
    return ["--model-id", str(llama), "--random-weights"] if name.startswith("rope") else ["--model-id", str(DEMO)]


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if OpenTelemetry were installed, and no adapter on a hub that is not there."""
    monkeypatch.setattr(checking, "package_version", lambda package: "1.40")
    monkeypatch.setattr(model_check, "parse_adapters", lambda texts: [])


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_of_tgi_starts_or_is_refused_as_the_table_says(name: str, llama: Path) -> None:
    becomes(name, check(["--", "text-generation-launcher", *model_for(name, llama), *given(name, FLAGS[name])]))


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("name", [*sorted(FLAGS.keys() - WITHOUT_VARIABLE), *VARIABLES])
def test_every_variable_of_tgi_starts_or_is_refused_as_the_table_says(name: str, llama: Path) -> None:
    value = (FLAGS | VARIABLES)[name]
    becomes(name, check(["--", *model_for(name, llama)], {setting_of(name).variable: value}))


# ------------------------------------------------------------------------------------------------------------- command


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launcher.py", "check", *words],
        cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_exit_code_says_whether_it_would_start() -> None:
    good = command("--", "--port", "0", "--device", "cpu")
    assert (0, "") == (good.returncode, good.stderr) and good.stdout.startswith("would start\n")
    bad = command("--", "--port", "0", "--num-shard", "3", MAX_BEST_OF="0")
    assert 1 == bad.returncode and bad.stdout.startswith(
        "would not start: 2 problems\n- --num-shard is 3: give one of auto, 1, 2, 4, 8\n- --max-best-of is 0"
    )


def test_neither_torch_nor_weights_are_loaded() -> None:
    code = (
        "import sys; from launch.commands.check import run;"
        "code = run(['--', '--port', '0', '--device', 'cpu'], {}, lambda text: None);"
        "print(code, {'torch', 'transformers', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "0 set()\n" == done.stdout


def test_a_command_line_that_cannot_be_read_has_no_table() -> None:
    found = check(["--", "--model-id"])
    assert (["--model-id: expected one argument"], []) == (found.problems, found.rows)
    assert ["everything else: the command line cannot be read"] == found.unchecked


def test_defaults_that_stand_for_wrong_settings_are_no_promise() -> None:
    found = check(["--num-shard", "3", "--max-batch-size", "no"])
    assert "what the wrong settings change" in found.unchecked[0]
    assert "max_batch_size" not in {name for name, _, _ in found.rows}


def test_help_is_of_the_command() -> None:
    assert command("--help").stdout.startswith("usage: lockstep check -- ARGUMENTS")


def test_all_problems_are_found_in_one_run(llama: Path) -> None:
    words = ["--quantize", "gptq", "--num-shard", "8", "--ngrok", "--max-total-tokens", "9000"]
    words += ["--lora-adapters", "/no/adapter", "--api-keys-file", "/no/file", "--colour", "red"]
    found = check(["--", "--model-id", str(llama), *words])
    expected = [
        "--colour is not an option",
        "--ngrok is refused",
        "--api-keys-file is /no/file, which is no file",
        "--lora-adapters adapter: the adapter /no/adapter is not a folder",
        "--quantize is gptq, but config.json has no `quantization_config`",
        "the model has 4 attention heads, which --num-shard 8 does not divide",
        "--max-total-tokens is 9000 but the model's longest sequence is 8192 tokens",
        f"{llama} has no weights",
    ]
    assert len(expected) == len(found.problems)
    assert all(problem.startswith(start) for problem, start in zip(found.problems, expected, strict=True))


def test_a_port_that_is_taken_is_no_problem_for_the_server_that_comes_after() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = check(["--port", str(port)])
    assert [] == found.problems
    assert render(found, 80).startswith(f"would start once port {port} is free, which is taken now\n")


@pytest.mark.parametrize(
    ("more", "longest", "why"),
    [
        ([], 8192, "the model's longest sequence"),
        (["--max-batch-total-tokens", "4096"], 4096, "--max-batch-total-tokens"),
    ],
)
def test_sequences_are_as_long_as_model_and_cache_allow(more: list[str], longest: int, why: str, llama: Path) -> None:
    found = check(["--model-id", str(llama), "--random-weights", *more])
    assert (str(longest), why) == row(found, "max_total_tokens")
    assert str(longest - 1) == row(found, "max_input_length")[0]


def test_a_default_that_is_another_than_tgis_is_shown_until_it_is_given() -> None:
    found = check([])
    assert ("127.0.0.1", "default; TGI: 0.0.0.0") == row(found, "hostname")
    assert not {"max_batch_size", "payload_limit", "api_key"} & {name for name, _, _ in found.rows}
    assert "no model is named" in found.notes[-1]
    assert ("5", "flag") == row(check(["--max-top-n-tokens", "5"]), "max_top_n_tokens")


def test_what_was_not_checked_is_part_of_the_verdict(llama: Path) -> None:
    (llama / "config.json").write_text('{"model_type": "codegen"}')
    assert render(check(["--model-id", str(llama), "--random-weights"]), 100).startswith(
        "would start, as far as this could be checked\n"
    )


def test_traces_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "package_version", lambda package: "not installed")
    (problem,) = check(["--otlp-endpoint", "http://127.0.0.1:4317"]).problems
    assert problem.startswith("--otlp-endpoint needs opentelemetry-sdk and ") and "pip install" in problem


def test_a_variable_that_names_a_gpu_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "has_gpu_driver", lambda: False)
    (problem,) = check([], {"DEVICE": "auto", "CUDA_VISIBLE_DEVICES": "0"}).problems
    assert problem.startswith("GPUs are chosen by a variable, but none is here")


def as_nothing(path: Path) -> None:
    path.unlink()


def as_part(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (as_nothing, "has no tokenizer.json"),
        (as_part, "is not JSON"),
        (as_pipe, "is not a regular file"),
        (as_folder, "is not a regular file"),
    ],
)
def test_a_spoilt_tokenizer_is_found(spoil: Callable[[Path], None], problem: str, llama: Path) -> None:
    spoil(llama / "tokenizer.json")
    (found,) = check(["--model-id", str(llama), "--random-weights"]).problems
    assert problem in found


@pytest.mark.parametrize("option", ["--tokenizer-config-path", "--api-keys-file"])
def test_a_file_that_is_no_json_is_found(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{")
    assert [True] == ["is not JSON" in problem for problem in check([option, str(tmp_path / "file")]).problems]


@pytest.mark.parametrize("option", ["--tokenizer-config-path", "--api-keys-file", "--chat-template"])
def test_a_pipe_is_no_file(option: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (problem,) = check([option, str(tmp_path / "pipe")]).problems
    assert problem.endswith("which is no file: check the path")


@pytest.mark.aside
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{% for", "a plain chat is refused, as the chat template is not valid"),
        ("{{ raise_exception('no chats') }}", "a plain chat is refused, as the chat template refuses the messages: no"),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_is_tried(text: str, told: str | None, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(text)
    found = check(["--chat-template", str(tmp_path / "template.jinja"), "--model-id", str(DEMO)])
    assert [] == found.problems and (told is not None) == len(found.notes)
    assert all(note.startswith(str(told)) for note in found.notes)


def test_a_template_in_the_home_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "template.jinja").write_text("{% for")
    (note,) = check(["--chat-template", "~/template.jinja", "--model-id", str(DEMO)]).notes
    assert note.startswith("a plain chat is refused, as the chat template is not valid")


def test_a_server_that_anyone_can_use_is_told_of(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "alice", "key": "secret"}]}')
    for more in ([], ["--api-key", "secret"], ["--api-keys-file", str(keys)]):
        told = [note for note in check(["--hostname", "0.0.0.0", *more]).notes if "other machines can reach" in note]
        assert bool(told) is (not more), more


def test_sockets_need_a_folder() -> None:
    (problem,) = check(["--shard-uds-path", "/no/folder/s"]).problems
    assert problem.startswith("--shard-uds-path /no/folder/s cannot be used: /no/folder is no folder")


def test_weights_of_fewer_layers_are_found(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    assert [] == check(["--model-id", str(folder)]).problems
    config = json.loads((folder / "config.json").read_text())
    name = next(name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in config)
    (folder / "config.json").write_text(json.dumps(config | {name: config[name] + 1}))
    (problem,) = check(["--model-id", str(folder)]).problems
    assert f"has weights of {config[name]} layers, but config.json says {config[name] + 1}" in problem


def test_what_proposes_tokens_is_looked_at(tmp_path: Path) -> None:
    assert "the layer that speculative_method mtp takes" in check(["--speculative-method", "mtp"]).unchecked[0]
    folder = shutil.copytree(DEMO, tmp_path / "draft")
    argv, weights = ["--speculative-model", str(folder)], folder / "model.safetensors"
    assert [] == check(argv).problems
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors is damaged or incomplete" in check(argv).problems[0]
    weights.rename(folder / "pytorch_model.bin")
    assert "has no *.safetensors, which a speculative model must have" in check(argv).problems[0]
    (folder / "pytorch_model.bin").rename(folder / "medusa_lm_head.pt")
    assert "has no weights, but medusa_lm_head.pt, and *.pt is not read" in check(argv).problems[0]


def test_adapters_are_looked_at(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "alice")
    argv, weights = ["--lora-adapters", str(folder)], folder / "adapter_model.safetensors"
    assert [] == check(argv).problems and "whether the adapters go with the model" in check(argv).unchecked[0]
    adapter_folder(folder, base_model_name_or_path="org/Other-7B")
    assert "the adapter alice was trained on 'org/Other-7B', and" in check(argv).notes[-1]
    named = check(["--lora-adapters", f"tgi={folder}"]).problems
    assert ["--lora-adapters: tgi is the model's own name: write NAME=ID with another one"] == named
    few = [*argv, "--adapter-memory", "0.001"]
    weights.write_bytes(contents("a", 3_000_000))
    assert "the adapter alice has 3.0 MB, and --adapter-memory has room for what" in check(few).problems[0]
    assert [] == check([*few, "--num-shard", "2"]).problems == check([*few, "--pipeline-parallel", "2"]).problems
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "is of an adapter of type 'IA3': only LORA is served" in check(argv).problems[0]
    adapter_folder(folder)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "adapter_model.safetensors is damaged or incomplete" in check(argv).problems[0]
    weights.rename(folder / "model.safetensors")
    assert "alice has no weights: adapter_model.safetensors or adapter_model.bin must" in check(argv).problems[0]


def test_the_table_fits_a_narrow_terminal() -> None:
    text = render(check(["--prometheus-port", "9090"]), 80)
    assert max(map(len, text.splitlines())) <= 80 and "\n- --prometheus-port 9090 changes nothing: " in text


# --------------------------------------------------------------------------------------------------------------- truth


def test_the_limits_are_those_of_the_start() -> None:
    """And weights and KV cache, in the start-up table of a server with the same flags."""
    words = ("--num-shard", "2", "--max-batch-size", "4", "--max-total-tokens", "600")
    found = check(["--", *words])
    with Server(*words) as server:
        started = dict(re.findall(r"^(\S[\w -]*?)  +(\S.*?)(?:  |$)", "".join(server.lines), re.MULTILINE))
    for name in (
        *("max_input_length", "max_total_tokens", "max_batch_total_tokens", "max_top_n_tokens"),
        *("dtype", "KV cache"),
    ):
        assert started[name] == row(found, name)[0], name
    assert "per shard, 4096 bytes each" in row(found, "KV cache")[1]
    weights = float(row(found, "weights")[0].split()[0])
    assert weights == pytest.approx(float(started["weights"].split()[0]), rel=0.02)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is the smaller one, and another program holds most of its memory."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n[ $1 = -L ] && printf 'GPU 0: L4\\nGPU 1: L4\\n' && exit\n"
        "printf '0, GPU-aa, NVIDIA L4, 20000, 0, 23034\\n1, GPU-bb, NVIDIA L4, 1000, 3000, 23034\\n'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "number", "usable_mib"),
    [
        ({}, 1, 4000),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, 20000),
        ({"NVIDIA_VISIBLE_DEVICES": "0"}, 0, 20000),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, 1, 4000),
    ],
)
def test_the_gpu_with_the_least_memory_counts(
    visible: dict[str, str], number: int, usable_mib: int, llama: Path
) -> None:
    """And its cache is what `lockstep-bench plan` computes for a device of that memory."""
    words = ["--model-id", str(llama), "--random-weights", "--max-concurrent-requests", "100000"]
    found = check(words, {"DEVICE": "auto"} | visible)
    assert [] == found.problems
    ranks = 1 if visible else 2
    assert f"of GPU {number}, NVIDIA L4" == row(found, "memory")[1]
    in_use = ["3.1 GB of GPU 1 are in use now, and must be free when the server starts"]
    assert (in_use if number == 1 else []) == [note for note in found.notes if "in use" in note]
    served = ServedModel(shape(str(llama)), "bfloat16")
    device = DatasheetDevice(1.0, 1.0, 1.0, usable_mib * 2**20)
    limits = Namespace(max_concurrent_requests=100_000, max_total_tokens=2048, max_batch_prefill_tokens=4096)
    planned = capacity(served, device, ranks, limits)
    assert str(planned.max_batch_total_tokens) == row(found, "max_batch_total_tokens")[0]


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_a_problem(llama: Path) -> None:
    words = ["--model-id", str(llama), "--random-weights"]
    (problem,) = check(words, {"DEVICE": "auto", "CUDA_VISIBLE_DEVICES": "7"}).problems
    assert problem.startswith("GPU 7 is chosen, but nvidia-smi has 2 GPUs")


def test_a_model_that_does_not_fit_is_refused_with_remedies(tmp_path: Path, llama: Path) -> None:
    config = LLAMA | {"num_hidden_layers": 10_000, "hidden_size": 8192, "intermediate_size": 32768}
    (llama / "config.json").write_text(json.dumps(config))
    (problem,) = check(["--model-id", str(llama), "--random-weights"]).problems
    assert re.fullmatch(
        r"[\d.]+ GB of weights a shard leave no room for a KV cache with 1 shards: use more shards, .*", problem
    )


# ----------------------------------------------------------------------------------------------------------------- hub


def cached(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The variables of a cache that has the description of `someone/llama` and nothing else."""
    model, sha = folder / "models--someone--llama", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(sha)
    (model / "snapshots" / sha).mkdir(parents=True)
    (model / "snapshots" / sha / "config.json").write_text(json.dumps(config))
    return {"MODEL_ID": "someone/llama", "HUGGINGFACE_HUB_CACHE": str(folder)}


def test_a_description_in_the_cache_is_enough(tmp_path: Path) -> None:
    found = check([], cached(tmp_path, LLAMA))
    assert [] == found.problems and "dense" == row(found, "parameters")[1]
    tokenizer, weights = found.unchecked
    assert "the tokenizer, which is not in the cache" == tokenizer
    assert re.fullmatch(r"the weights: the first start downloads about 0\.\d MB", weights)


def test_a_cache_that_cannot_be_made_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = cached(tmp_path, LLAMA)
    monkeypatch.setattr(hub.Repository, "cache", property(lambda repository: Path("/proc/nope/hub")))
    assert ["/proc/nope/hub cannot be made"] == [text.split(":")[0] for text in check([], environ).problems]


@pytest.mark.parametrize("home", ["/proc/nope", "/dev/null"])
def test_a_home_that_is_none_is_a_verdict(home: str) -> None:
    done = command("--", "--port", "0", "--model-id", "a/b", HF_HOME=home, HF_ENDPOINT="http://127.0.0.1:9")
    assert (1, "") == (done.returncode, done.stderr) and done.stdout.startswith("would not start: 1 problem\n")


def test_standard_output_may_be_closed_or_ascii(tmp_path: Path) -> None:
    words = ["--", "--port", "0", "--model-id", str(tmp_path / "señor"), "--device", "cpu"]
    assert "se?or" in command(*words, PYTHONIOENCODING="ascii").stdout
    line = [sys.executable, "launcher.py", "check", *words]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *line], cwd=ROOT, capture_output=True, text=True)
    assert (1, "") == (done.returncode, done.stderr)


def test_what_the_hub_was_not_asked_is_said(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    (problem,) = check([], cached(tmp_path / "1", LLAMA) | offline).problems
    assert "has no weights" in problem
    found = check([], {"MODEL_ID": "someone/else", "HUGGINGFACE_HUB_CACHE": str(tmp_path / "2")} | offline)
    assert found.problems[0].endswith("downloaded, as HF_HUB_OFFLINE is set: check the name, or unset HF_HUB_OFFLINE")
    assert ["the model: its shards, memory and longest sequence"] == found.unchecked


# --------------------------------------------------------------------------------------------------- others' commands


@pytest.mark.parametrize(
    ("line", "arguments", "environ"),
    [
        ("docker run --gpus all IMAGE", [], {}),
        (
            "sudo -E docker run --gpus all --shm-size 1g -p 80:80 -v /tmp/x:/data IMAGE --model-id a/b",
            ["--model-id", "a/b"],
            {},
        ),
        ("docker container run --rm -it --device=/dev/kfd --group-add video --net host IMAGE:3 -e", ["-e"], {}),
        (
            "/usr/bin/podman run --gpus all -d -eA=1 --env B=2=3 --env=C=4 -e TOKEN -dp 8080:80 -p8081:81 IMAGE",
            [],
            {"A": "1", "B": "2=3", "C": "4", "TOKEN": "t"},
        ),
    ],
)
def test_a_docker_command_line_is_read(line: str, arguments: list[str], environ: dict[str, str]) -> None:
    found = docker.read_run(line.split(), {"TOKEN": "t", "B": "of the shell"})
    assert found is not None and found.image.startswith("IMAGE")
    assert (arguments, environ, []) == (found.arguments, found.variables, found.unread)
    assert found.ports == ({"80": "8080", "81": "8081"} if "podman" in line else {"80": "80"} if "-p" in line else {})
    assert found.shares_network == ("--net host" in line)


def test_what_of_docker_is_not_looked_at_is_said() -> None:
    line = "docker run --gpus device=0 --entrypoint sh -v models:/data -p 80-90:80-90 --memory=2g --name x IMAGE"
    assert [
        "docker's --gpus device=0",
        "docker's --entrypoint sh",
        "docker's -v models:/data",
        "docker's -p 80-90:80-90",
        "docker's --memory 2g",
    ] == check(line.split()).unchecked[:5]
    assert "whether the container has GPUs: there is no --gpus" in check("docker run IMAGE".split()).unchecked
    asked = check("docker run --gpus all -e DEVICE=cpu IMAGE".split())
    assert ["GPUs: the container is given them, but none is seen here"] == asked.unchecked


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("docker run --rm -p 80:80", "names no image"),
        ("docker compose up", "only `docker run` can be read"),
        ("docker run --env-file /no/file IMAGE", "--env-file /no/file cannot be read"),
    ],
)
def test_a_docker_command_line_that_cannot_be_read_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence) as refusal:
        read_command(line.split(), {})
    assert 2 == refusal.value.code


def test_variables_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("# ours\n\nA=1\nB=2\nTOKEN\n")
    found = docker.read_run(f"docker run -e B=3 --env-file {tmp_path}/env IMAGE".split(), {"TOKEN": "t"})
    assert found is not None and {"A": "1", "B": "3", "TOKEN": "t"} == found.variables


def test_sagemakers_command_line_is_read_as_the_image_does(llama: Path) -> None:
    """With the port of SageMaker among several."""
    port = free_port()
    line = (
        f"docker run --gpus all -e HF_MODEL_ID=/m -e SM_NUM_GPUS=1 -p 80:80 -p {port}:8080 "
        f"--mount type=bind,src={llama},dst=/m IMAGE serve --random-weights"
    )
    found = check(line.split())
    assert ([], str(llama)) == (found.problems, row(found, "model")[0])
    assert ("8080", str(port)) == (row(found, "port")[0], row(found, "published port")[0])


def test_serving_on_sagemaker_needs_a_model() -> None:
    (problem,) = check("docker run --gpus all -p 8080:8080 IMAGE serve".split()).problems
    assert problem.startswith("`serve` needs a model: set HF_MODEL_ID")


def test_a_container_on_the_hosts_network_has_its_own_port() -> None:
    shared = check("docker run --gpus all --network host -e PORT=0 IMAGE".split())
    assert not [note for note in shared.notes if "published" in note]
    alone = check("docker run --gpus all IMAGE".split())
    assert "port 80 of the container is not published: give -p 8080:80" in alone.notes


@pytest.mark.parametrize("program", ["/usr/local/bin/text-generation-launcher", "-- text-generation-launcher --"])
def test_a_program_may_have_a_path_and_dashes(program: str) -> None:
    assert ["--port", "0"] == read_command(["--", *program.split(), "--port", "0"], {}).arguments


@pytest.mark.parametrize(
    "line",
    [
        ["MODEL_ID=a/b", "PORT=0", "text-generation-launcher", "--json-output"],
        ["nohup", "env", "MODEL_ID=a/b", "PORT=0", "text-generation-launcher", "--json-output"],
        ["/bin/sh", "-c", "exec text-generation-launcher --json-output --model-id 'a/b' -p 0"],
        ["bash", "-lc", "export MODEL_ID=a/b PORT=0 && exec text-generation-launcher --json-output"],
        ["python3", "-m", "sglang.launch_server", "--json-output", "--model-id=a/b", "-p=0"],
        ["--json-output", "--model_id", "a/b", "--port", "0"],
    ],
)
def test_a_line_for_a_shell_is_read(line: list[str]) -> None:
    launch = read_command(["--", *line], {"MODEL_ID": "of/the-shell"})
    flags, problems = read_command_line(launch.arguments)
    settings, wrong = read_settings(flags, launch.variables)
    assert ([], []) == (problems, wrong)
    assert ("a/b", 0, True) == tuple(settings.values[name] for name in ("model_id", "port", "json_output"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["text-generation-server", "serve", "a/b"], "of text-generation-server, nothing can be read"),
        (["kubectl", "apply", "-f", "server.yaml"], "of kubectl, nothing can be read"),
        (["sh", "-c", "text-generation-launcher 'a"], "of sh -c, nothing can be read: No closing quotation"),
    ],
)
def test_what_starts_no_server_is_refused(line: list[str], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence) as refusal:
        read_command(line, {})
    assert 2 == refusal.value.code


def test_variables_of_the_image_are_not_of_the_launcher() -> None:
    assert "HF_MODEL_ID is read by the image alone: set MODEL_ID" in check([], {"HF_MODEL_ID": "a/b"}).notes


def test_mounted_folders_are_found_on_the_host(llama: Path) -> None:
    line = f"docker run -p 127.0.0.1:{free_port()}:80 -v {llama.parent}:/data IMAGE --model-id /data/llama"
    found = check([*line.split(), "--random-weights"])
    assert ([], str(llama)) == (found.problems, row(found, "model")[0])
    assert row(found, "port")[0] in line


def test_downloads_in_a_mounted_folder_are_found(tmp_path: Path) -> None:
    cached(tmp_path / "hub", LLAMA)
    line = f"docker run -e MODEL_ID=someone/llama -e HF_HUB_OFFLINE=1 -v {tmp_path}:/data IMAGE"
    assert ["dense"] == [reason for name, _, reason in check(line.split()).rows if name == "parameters"]
    other = f"docker run -e MODEL_ID=someone/llama -e HF_HOME=/cache -v {tmp_path}:/cache IMAGE"
    assert ["dense"] == [reason for name, _, reason in check(other.split()).rows if name == "parameters"]


def test_an_option_of_another_server_is_told_by_its_name_here() -> None:
    found = check(["vllm", "serve", "--tensor-parallel-size", "2", "--enforce-eager", "-tp", "2", "--swap-space", "4"])
    assert [
        "--tensor-parallel-size is not an option: here it is --num-shard",
        "--enforce-eager is not an option: here it is --cuda-graphs 0",
        "-tp is not an option: here it is --num-shard",
        "--swap-space is not an option: the server chooses: leave it out",
    ] == found.problems


def test_what_stands_for_another_servers_option_is_one_of_ours() -> None:
    from launch.flags import build_parser
    from launch.settings import public_settings

    ours = build_parser(public_settings())._option_string_actions
    for spellings, here in peers.OPTIONS.items():
        assert not {*spellings.split()} & {*ours}, spellings
        if here.startswith("--"):
            assert re.split(r"[ ,]", here)[0] in ours
    variables = {setting.variable(name) for setting in public_settings().values() for name in setting.names}
    assert {here.split(",")[0] for here in peers.VARIABLES.values()} <= variables


def test_a_variable_of_another_server_is_told_by_its_name_here() -> None:
    found = check([], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": "hunter2", "VLLM_PLUGINS": ""})
    assert [] == found.problems and [
        "VLLM_API_KEY changes nothing: here it is API_KEY",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING changes nothing: here it is ALLOW_ADAPTER_CHANGES",
    ] == [note for note in found.notes if note.startswith("VLLM")]
