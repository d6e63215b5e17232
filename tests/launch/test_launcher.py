"""The launch before a process starts: configs of each process, the model, and the command line as a user sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import launcher
from host.output import Output
from host.version import version
from launch.errors import Refusal
from launch.flags import refuse_misspelt, render_settings
from launch.logs import Log
from launch.machine import bind
from launch.models import resolve_adapters, resolve_speculative_model
from launch.nodes import Layout
from launch.router_process import RouterCommand
from launch.shards import ShardCommands
from router.config import RouterConfig
from server.checkpoint.hub import ResolvedModel
from server.config import ShardConfig
from tests.adapter_folders import adapter_folder
from tests.launch.test_settings import read
from tests.running import ROOT


def written_configs(tmp_path: Path, *argv: str) -> tuple[RouterConfig, list[ShardConfig]]:
    model = ResolvedModel(tmp_path / "m", tmp_path / "w", tmp_path / "t", "abc")
    with bind("127.0.0.1", 0) as listener:
        settings = read(["--port", "0", *argv])
        layout = Layout(2)
        _, sockets = ShardCommands(tmp_path, settings, "cpu", layout, model).group(1)
        router = RouterCommand(settings, layout, model, listener).router_config(1, sockets)
        assert listener.getsockname()[1] == router.port
    return router, [ShardConfig.load(tmp_path / "group-1" / f"shard-{rank}.json") for rank in range(2)]


def test_configs_hold_what_each_process_needs(tmp_path: Path) -> None:
    router, shard_configs = written_configs(tmp_path, "--api-key", "key", "--dtype", "bfloat16", "--log-level", "warn")
    assert ("server/demo", "key") == (router.model_id, router.api_key)
    assert tuple(shard.socket_path for shard in shard_configs) == router.shard_sockets
    assert (str(tmp_path / "t"), "flag") == (router.tokenizer_path, router.sources["api_key"])
    assert [0, 1] == [shard.rank for shard in shard_configs]
    assert {"warn"} == {router.log_level, *(shard.log_level for shard in shard_configs)}
    assert {(2, "cpu", "bfloat16", None)} == {(s.world_size, s.device, s.dtype, s.threads) for s in shard_configs}
    assert {f"file://{tmp_path}/group-1/rendezvous-0"} == {shard.rendezvous for shard in shard_configs}
    assert {(f"{tmp_path}/group-1/steps-1.sock",)} == {shard.step_sockets for shard in shard_configs}
    assert ("127.0.0.1", True) == (router.hostname, router.is_on_loopback)
    assert [0o600] * 2 == [path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*.json")]


def test_shards_know_the_limits_that_their_memory_is_for(tmp_path: Path) -> None:
    given = ("--max-concurrent-requests", "9", "--max-batch-size", "4", "--max-batch-total-tokens", "640")
    _, shard_configs = written_configs(tmp_path, *given, "--weights-on-device", "auto")
    assert {("auto", 4, 640, 0, 4096)} == {
        (s.weights_on_device, s.max_sequences, s.max_batch_total_tokens, s.max_total_tokens, s.max_batch_prefill_tokens)
        for s in shard_configs
    }


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], (None, "auto", 0)),
        (["--speculate", "6"], (None, "auto", 6)),
        (["--speculative-method", "mtp"], (None, "mtp", 4)),
        (["--speculative-model", "x", "--speculative-method", "eagle3"], ("/models/x", "eagle3", 4)),
        (["--speculative-model", "x", "--speculate", "2"], ("/models/x", "auto", 2)),
    ],
)
def test_shards_are_told_what_proposes_tokens(tmp_path: Path, argv: list[str], told: tuple[Any, ...]) -> None:
    model = ResolvedModel(tmp_path, tmp_path, tmp_path, "abc")
    folder = Path("/models/x") if "x" in argv else None
    ShardCommands(tmp_path, read(argv), "cpu", Layout(2), model, speculative_model=folder).group(1)
    shard = ShardConfig.load(tmp_path / "group-1" / "shard-0.json")
    assert told == (shard.speculative_model, shard.speculative_method, shard.speculate)


def test_a_speculative_model_may_have_a_revision_and_needs_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    log, nothing = Log(Output(2), False), {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    assert None is resolve_speculative_model(read([]), nothing, log)
    assert tmp_path == resolve_speculative_model(read(["--speculative-model", str(tmp_path)]), nothing, log)
    with pytest.raises(Refusal, match="some/heads is no folder here"):
        resolve_speculative_model(read(["--speculative-model", "some/heads@v1"]), nothing, log)


def test_adapters_get_names_and_folders(tmp_path: Path) -> None:
    log, offline = Log(Output(2), False), {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    folder = adapter_folder(tmp_path / "alice")
    given = f"{folder},b/ob={folder}"
    assert [("alice", folder), ("b/ob", folder)] == resolve_adapters(read(["--lora-adapters", given]), offline, log)
    settings = read([], {"LORA_ADAPTERS": given})
    assert [("alice", folder), ("b/ob", folder)] == resolve_adapters(settings, offline, log)
    with pytest.raises(Refusal) as refusal:
        resolve_adapters(read(["--lora-adapters", f"some/one@v1,tgi={folder},x={tmp_path}/no"]), offline, log)
    expected = [
        "some/one: some/one is no folder here, is not in the cache",
        "tgi is the model's own",
        "x: the adapter /",
    ]
    found = [problem.removeprefix("--lora-adapters").lstrip(" :") for problem in refusal.value.problems]
    assert expected == [problem[: len(start)] for problem, start in zip(found, expected, strict=True)]


def test_each_process_is_told_of_adapters(tmp_path: Path) -> None:
    argv = ("--lora-adapters", "a=/a,b=/b", "--adapter-dir", str(tmp_path), "--adapter-memory", "0.5")
    _, shards = written_configs(tmp_path, *argv)
    assert {(True, 0.5, 4.0, 64)} == {
        (s.has_adapters, s.adapter_memory, s.adapter_host_memory, s.max_adapters) for s in shards
    }
    model = ResolvedModel(tmp_path, tmp_path, tmp_path, "abc")
    with bind("127.0.0.1", 0) as listener:
        command = RouterCommand(read(argv), Layout(1), model, listener, [("a", Path("/a")), ("b", Path("/b"))])
        command.router_config(1, ("s",)).save(tmp_path / "router.json")
    told = RouterConfig.load(tmp_path / "router.json")
    assert (True, (("a", "/a"), ("b", "/b"))) == (told.has_adapters, told.adapters)
    assert (str(tmp_path), 0.5) == (told.adapter_dir, told.adapter_memory)


def test_another_group_shares_no_path_with_the_one_before(tmp_path: Path) -> None:
    model = ResolvedModel(tmp_path / "m", tmp_path / "w", tmp_path / "t", "abc")
    with bind("127.0.0.1", 0) as listener:
        settings, layout = read(["--port", "0"]), Layout(2)
        shard_commands = ShardCommands(tmp_path, settings, "cpu", layout, model)
        (_, first), (_, second) = shard_commands.group(1), shard_commands.group(2)
        assert not set(first) & set(second)
        assert not (tmp_path / "group-1").exists()
        assert {f"file://{tmp_path}/group-2/rendezvous-0"} == {
            ShardConfig.load(tmp_path / "group-2" / f"shard-{rank}.json").rendezvous for rank in range(2)
        }
        assert 2 == RouterCommand(settings, layout, model, listener).router_config(2, second).group


def test_shards_meet_over_tcp_only_when_asked(tmp_path: Path) -> None:
    assert "tcp://localhost:29501" == written_configs(tmp_path, "--master-port", "29501")[1][0].rendezvous


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "launcher.py"), *argv],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | environ,
    )


def test_refusal_on_the_command_line() -> None:
    done = run("--port", "0", "--max-batch-size", "0", "--api-kee", "hunter2")
    assert (2, "") == (done.returncode, done.stdout)
    assert [
        "error: --api-kee is not an option: did you mean --api-key?",
        "error: --max-batch-size is 0: the smallest allowed value is 1",
    ] == done.stderr.splitlines()


@pytest.mark.parametrize("given", ["quantise", "bach", "watermarks"])
def test_a_misspelt_command_is_one_problem(given: str) -> None:
    with pytest.raises(Refusal, match=f"{given} is not a command: did you mean lockstep (quantize|batch|watermark)"):
        refuse_misspelt([given, "--output", "x"], launcher.COMMANDS)
    for arguments in ([], ["--port", "1"], ["--quantize", "int8"], ["some/model"], ["batch"]):
        refuse_misspelt(arguments, launcher.COMMANDS)


def test_version_and_settings_page_print_and_leave() -> None:
    assert (0, f"lockstep {version()}\n") == ((done := run("--version")).returncode, done.stdout)
    assert render_settings() == run("--print-settings").stdout


def test_missing_model_folder_is_refused_after_the_environment_is_printed(tmp_path: Path) -> None:
    done = run("--env", "--model-id", str(tmp_path / "none"), "--port", "0", "--api-key", "hunter2", HF_TOKEN="hf_x")
    assert 1 == done.returncode
    assert f"error: the model {tmp_path}/none is not a folder: check the path\n" == done.stderr
    assert "torch" in done.stdout and "cores" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr and "hf_x" not in done.stdout + done.stderr


def test_the_last_error_is_a_record_where_the_log_has_records(tmp_path: Path) -> None:
    done = run("--port", "0", "--json-output", "--model-id", str(tmp_path / "none"))
    last = json.loads(done.stdout.splitlines()[-1])
    assert ("ERROR", "launcher", f"error: {last['message']}\n") == (last["level"], last["target"], done.stderr)
    assert done.returncode == 1 and "is not a folder" in last["message"]


def test_old_weights_are_converted_in_a_process_of_their_own(tmp_path: Path) -> None:
    import torch

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    log = Log(Output(os.open(os.devnull, os.O_WRONLY)), False)
    model = launcher.resolve_model(read(["--model-id", str(tmp_path)]), os.environ, log)
    assert ["pytorch_model.safetensors"] == [path.name for path in model.weights_path.iterdir()]
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02damaged")
    with pytest.raises(Refusal, match=r"^\S+/pytorch_model\.bin (is unsafe|cannot be read): [^\n]+$"):
        launcher.resolve_model(read(["--model-id", str(tmp_path)]), os.environ, log)


def test_launcher_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, launcher; sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    assert 0 == subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode
