"""Settings, refusals, shard counts and the port: everything that the launcher decides before a process starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import launcher
from launcher import LauncherConfig, Refusal, Settings
from router.config import RouterConfig
from server.checkpoint.hub import ResolvedModel
from server.config import ShardConfig

ROOT = Path(launcher.__file__).parent
LARGEST = "the largest allowed value is 2147483647"
TIME = "2026-11-20T11:00:00.123456+01:00"


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    prepared = launcher.prepare(["--device", "cpu", *argv], environ or {})
    assert prepared is not None
    return prepared[0]


def problems(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(Refusal) as refusal:
        read(argv, environ)
    assert 2 == refusal.value.code
    return refusal.value.problems


def test_defaults_are_those_of_the_dataclasses() -> None:
    settings = read()
    assert 128 == settings.values["max_concurrent_requests"]
    assert str(launcher.DEMO) == settings.values["model_id"]
    assert {"default"} == {source for name, source in settings.sources.items() if name != "device"}


def test_flag_wins_over_environment_and_its_source_is_kept() -> None:
    settings = read(["--max-batch-size", "4"], {"MAX_BATCH_SIZE": "8", "MAX_BEST_OF": "3"})
    assert (4, "flag") == (settings.values["max_batch_size"], settings.sources["max_batch_size"])
    assert (3, "environment") == (settings.values["max_best_of"], settings.sources["max_best_of"])


def test_wrong_environment_is_not_read_where_a_flag_is_given() -> None:
    assert 4 == read(["--max-batch-size", "4"], {"MAX_BATCH_SIZE": "none"}).values["max_batch_size"]


def test_empty_variable_counts_as_unset() -> None:
    assert "default" == read([], {"PORT": ""}).sources["port"]


@pytest.mark.parametrize("spelling", ["--max-batch-size=7", "--max_batch_size=7"])
def test_dashes_and_underscores_are_one_flag(spelling: str) -> None:
    assert 7 == read([spelling]).values["max_batch_size"]


def test_underscores_in_values_stay() -> None:
    settings = read(["--model_id=my_user/my_model", "--shard-uds-path", "/tmp/a_b"])
    assert ("my_user/my_model", "/tmp/a_b") == (settings.values["model_id"], settings.values["shard_uds_path"])


def test_short_flags() -> None:
    settings = read(["-p", "8080", "-e"])
    assert (8080, True) == (settings.values["port"], settings.values["env"])


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--json-output"], {}, True),
        (["--json-output", "false"], {"JSON_OUTPUT": "1"}, False),
        ([], {"JSON_OUTPUT": "true"}, True),
        ([], {"JSON_OUTPUT": "0"}, False),
        ([], {}, False),
    ],
)
def test_switches(argv: list[str], environ: dict[str, str], expected: bool) -> None:
    assert expected is read(argv, environ).values["json_output"]


def test_environment_of_the_machine_is_not_mistaken_for_settings() -> None:
    settings = read([], {"HOSTNAME": "web-7f9c", "ENV": "production", "LOCKSTEP_HOSTNAME": "127.0.0.1"})
    assert ("127.0.0.1", False) == (settings.values["hostname"], settings.values["env"])


def test_origins_repeat_and_split() -> None:
    argv = ["--cors-allow-origin", "https://a.example, https://b.example", "--cors-allow-origin", "https://c.example"]
    expected = ("https://a.example", "https://b.example", "https://c.example")
    assert expected == read(argv).values["cors_allow_origin"]


def test_alias_sets_the_same_setting() -> None:
    assert 9 == read(["--max-input-tokens", "9"]).values["max_input_length"]
    assert 9 == read([], {"MAX_INPUT_TOKENS": "9"}).values["max_input_length"]


def test_setting_and_alias_together_are_refused() -> None:
    both = {"MAX_INPUT_LENGTH": "9", "MAX_INPUT_TOKENS": "9"}
    assert ["MAX_INPUT_LENGTH and MAX_INPUT_TOKENS are two names of one setting: give only one of them"] == problems(
        [], both
    )


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--max-batch-size", "0"], {}, "--max-batch-size is 0: the smallest allowed value is 1"),
        (
            [],
            {"MAX_BATCH_SIZE": "0"},
            "--max-batch-size is 0: the smallest allowed value is 1 (from environment MAX_BATCH_SIZE)",
        ),
        (["--port", "65536"], {}, "--port is 65536: the largest allowed value is 65535"),
        (["--max-batch-total-tokens", "9" * 20], {}, f"--max-batch-total-tokens is {'9' * 20}: {LARGEST}"),
        (["--port", "-1"], {}, "--port is -1: the smallest allowed value is 0"),
        (["--port", "http"], {}, "--port is http: give a whole number"),
        (["--port", "1.5"], {}, "--port is 1.5: give a whole number"),
        (["--waiting-served-ratio", "nan"], {}, "--waiting-served-ratio is nan: give a finite number"),
        (["--watermark-delta", "inf"], {}, "--watermark-delta is inf: give a finite number"),
        (["--watermark-delta", "x"], {}, "--watermark-delta is x: give a number"),
        (["--dtype", "int3"], {}, "--dtype is int3: give one of float32, float16, bfloat16"),
        (["--num-shard", "3"], {}, "--num-shard is 3: give one of 1, 2, 4, 8"),
        (["--sharded", "maybe"], {}, "--sharded is maybe: give true or false"),
        (["--revision", ""], {}, "--revision is empty: give a value or leave it out"),
        (["--api-key", " "], {}, "--api-key is ***: give a value or leave it out"),
        (["--prot", "1"], {}, "--prot is not an option: did you mean --port?"),
        (["--api-kye=hunter2"], {}, "--api-kye is not an option: did you mean --api-key?"),
        (["--zzzzzz"], {}, "--zzzzzz is not an option: see lockstep --help"),
        (["my/model"], {}, "my/model belongs to no option: a model is given as --model-id my/model"),
        (["--dtype", "\x1b[31m"], {}, r"--dtype is \x1b[31m: give one of float32, float16, bfloat16"),
    ],
)
def test_wrong_value_is_refused_with_its_remedy(argv: list[str], environ: dict[str, str], expected: str) -> None:
    assert [expected] == problems(argv, environ)


def test_flag_without_its_value_is_refused() -> None:
    assert ["--port/-p: expected one argument"] == problems(["--port"])


def test_rules_between_settings_are_checked() -> None:
    (problem,) = problems(["--max-input-length", "10", "--max-total-tokens", "10"])
    assert problem.startswith("max_input_length is 10 but must be less than max_total_tokens, 10")


def test_every_problem_is_reported_at_once() -> None:
    found = problems(["--max-batch-size", "0", "--colour"], {"PORT": "x", "MAX_TOTAL_TOKENS": "1"})
    assert 4 == len(found)


def test_help_and_settings_page_never_fall_behind() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == launcher.render_settings(), (
        "run: python launcher.py --print-settings > docs/settings.md"
    )


def test_every_public_setting_has_a_group_and_all_its_texts() -> None:
    declared = [
        f for config in (LauncherConfig, RouterConfig, ShardConfig) for f in fields(config) if "help" in f.metadata
    ]
    assert {f.name for f in declared} == set(launcher.public_settings())
    assert [] == [f.name for f in declared if not f.metadata.get("when")]
    assert [] == [f.name for f in declared if f.default is None and "default" not in f.metadata]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-2b6a4f11"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 5),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 5),
        ({}, 5),
    ],
)
def test_visible_gpus(environ: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_installed_gpus", lambda: 5)
    assert expected == launcher.visible_gpus(environ)


def test_nvidia_smi_counts_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: a)'\necho '  MIG 1g.18gb Device 0'\necho 'GPU 1: b'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert 0 == launcher.visible_gpus({})  # not executable: as good as missing
    tool.chmod(0o755)
    assert 2 == launcher.visible_gpus({})


def shards(gpus: int, *argv: str) -> tuple[str, int] | str:
    settings, found = launcher.read_settings(
        vars(launcher.build_parser(launcher.public_settings()).parse_args(argv)), {}
    )
    assert not found
    try:
        return launcher.plan_shards(settings, gpus)
    except ValueError as error:
        return str(error)


MODEL = ("--model-id", "some/model")


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        (4, (), ("cuda", 4)),
        (0, (), ("cpu", 1)),
        (4, ("--num-shard", "2"), ("cuda", 2)),
        (0, ("--num-shard", "2"), ("cpu", 2)),
        (4, ("--sharded", "true"), ("cuda", 4)),
        (4, ("--sharded", "true", "--num-shard", "2"), ("cuda", 2)),
        (4, ("--sharded", "false"), ("cuda", 1)),
        (4, ("--sharded", "false", "--num-shard", "2"), ("cuda", 2)),
        (4, ("--device", "cpu"), ("cpu", 1)),
        (4, ("--device", "cpu", "--num-shard", "8"), ("cpu", 8)),
    ],
)
def test_number_of_shards(gpus: int, argv: tuple[str, ...], expected: tuple[str, int]) -> None:
    assert expected == shards(gpus, *MODEL, *argv)


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        (1, ("--sharded", "true"), "--sharded is true but the number of visible GPUs is 1"),
        (0, ("--sharded", "true"), "--sharded is true but the number of visible GPUs is 0"),
        (4, ("--sharded", "true", "--num-shard", "1"), "--sharded is true but --num-shard is 1"),
        (
            3,
            ("--num-shard", "4"),
            "--num-shard is 4 but the number of visible GPUs is 3: give at most 2, or --device cpu",
        ),
        (3, (), "3 GPUs are visible, which a model cannot be split over: give --num-shard 1, 2, 4 or 8"),
        (0, ("--device", "cuda"), "--device is cuda but no GPU is visible"),
    ],
)
def test_impossible_number_of_shards_is_refused(gpus: int, argv: tuple[str, ...], expected: str) -> None:
    message = shards(gpus, *MODEL, *argv)
    assert isinstance(message, str) and message.startswith(expected)


def test_embedded_model_runs_on_one_shard_of_many_gpus() -> None:
    assert ("cuda", 1) == shards(8)
    assert ("cuda", 8) == shards(8, "--sharded", "true")


def test_taken_port_is_named_with_the_remedy() -> None:
    with launcher.bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(Refusal, match=f"port {port} is taken: stop the server that has it, or give another --port"):
            launcher.bind("127.0.0.1", port)


def test_port_is_taken_as_soon_as_another_launch_has_bound_it() -> None:
    with launcher.bind("127.0.0.1", 0) as first, pytest.raises(Refusal, match="is taken") as refusal:
        launcher.bind("127.0.0.1", first.getsockname()[1])
    assert 1 == refusal.value.code


def test_port_does_not_accept_before_it_listens() -> None:
    with launcher.bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_port_is_free_again_at_once_after_a_server_with_connections() -> None:
    listener = launcher.bind("127.0.0.1", 0)
    address = listener.getsockname()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the launcher does when the model is ready
    listener.listen()
    with socket.create_connection(address) as client:
        server, _ = listener.accept()
        server.close()  # the server closes first, so the connection stays in TIME_WAIT on its side
        assert b"" == client.recv(1)
    listener.close()
    launcher.bind(*address).close()


def test_unknown_host_is_refused() -> None:
    with pytest.raises(Refusal, match=r"--hostname no\.such\.host\.invalid is no address of this machine"):
        launcher.bind("no.such.host.invalid", 0)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(Refusal, match=r"cannot listen on 192\.0\.2\.1 port 3000"):
        launcher.bind("192.0.2.1", 3000)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_port_on_ipv6() -> None:
    with launcher.bind("::1", 0) as listener:
        assert socket.AF_INET6 == listener.family


def test_children_get_no_secrets_and_no_network() -> None:
    environ = {"HF_TOKEN": "hf_secret", "API_KEY": "key", "PYTHONPATH": "/elsewhere", "LANG": "C"}
    child = launcher.child_environment(environ, local_rendezvous=True)
    assert not {"HF_TOKEN", "API_KEY"} & set(child)
    assert f"{ROOT}{os.pathsep}/elsewhere" == child["PYTHONPATH"]
    assert ("C", "1", "1") == (child["LANG"], child["HF_HUB_OFFLINE"], child["TRANSFORMERS_OFFLINE"])


@pytest.mark.skipif(sys.platform != "linux", reason="interface names are Linux's")
def test_gloo_stays_on_this_machine_unless_told_otherwise() -> None:
    assert "lo" == launcher.child_environment({}, True)["GLOO_SOCKET_IFNAME"]
    assert "eth1" == launcher.child_environment({"GLOO_SOCKET_IFNAME": "eth1"}, True)["GLOO_SOCKET_IFNAME"]
    assert "GLOO_SOCKET_IFNAME" not in launcher.child_environment({}, False)


def written_configs(tmp_path: Path, *argv: str) -> tuple[RouterConfig, list[ShardConfig]]:
    model = ResolvedModel(tmp_path / "m", tmp_path / "w", tmp_path / "t", "abc", False)
    sockets = ("/s-0", "/s-1")
    with launcher.bind("127.0.0.1", 0) as listener:
        launcher.write_configs(tmp_path, read(["--port", "0", *argv]), "cpu", sockets, model, listener)
        assert listener.getsockname()[1] == RouterConfig.load(tmp_path / "router.json").port
    return RouterConfig.load(tmp_path / "router.json"), [
        ShardConfig.load(tmp_path / f"shard-{rank}.json") for rank in range(2)
    ]


def test_configs_hold_what_each_process_needs(tmp_path: Path) -> None:
    router, shard_configs = written_configs(tmp_path, "--api-key", "key", "--dtype", "bfloat16")
    assert ("server/demo", "key", ("/s-0", "/s-1")) == (router.model_id, router.api_key, router.shard_sockets)
    assert (str(tmp_path / "t"), "flag") == (router.tokenizer_path, router.sources["api_key"])
    assert [0, 1] == [shard.rank for shard in shard_configs]
    assert {(2, "cpu", "bfloat16", None)} == {(s.world_size, s.device, s.dtype, s.threads) for s in shard_configs}
    assert {f"file://{tmp_path}/rendezvous"} == {shard.rendezvous for shard in shard_configs}
    assert 0o600 == (tmp_path / "router.json").stat().st_mode & 0o777


def test_shards_meet_over_tcp_only_when_asked(tmp_path: Path) -> None:
    assert "tcp://localhost:29501" == written_configs(tmp_path, "--master-port", "29501")[1][0].rendezvous


def test_log_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    shown = log_lines(
        tmp_path, {"level": "WARNING", "message": "a\x1b[2Jb\nc\r", "timestamp": TIME, "n": 3, "s": "x y"}
    )
    assert [r"2026-11-20T10:00:00.123Z  WARN shard-0: a\x1b[2Jb\nc\r n=3 s=x y"] == shown


def test_record_without_a_time_gets_one(tmp_path: Path) -> None:
    (line,) = log_lines(tmp_path, {"message": "m", "timestamp": "tea time"})
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  INFO shard-0: m", line)


def test_raw_record_is_printed_as_it_is(tmp_path: Path) -> None:
    assert ["a | b", "1 | 2"] == log_lines(tmp_path, {"level": "INFO", "message": "a | b\n1 | 2", "raw": True})


def test_json_log_names_process_and_rank(tmp_path: Path) -> None:
    (line,) = log_lines(tmp_path, {"timestamp": TIME, "level": "CRITICAL", "message": "m", "n": 1}, as_json=True)
    expected = {"target": "shard-0", "timestamp": "2026-11-20T10:00:00.123Z", "level": "ERROR", "message": "m", "n": 1}
    assert expected | {"process": "shard-0", "rank": 0} == json.loads(line)


def log_lines(tmp_path: Path, record: dict[str, object], as_json: bool = False) -> list[str]:
    with (tmp_path / "log").open("w+b") as file:
        launcher.Log(launcher.Output(file.fileno()), as_json).record("shard-0", record)
        return (tmp_path / "log").read_text().splitlines()


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


def test_version_and_settings_page_print_and_leave() -> None:
    assert (0, f"lockstep {launcher.version()}\n") == ((done := run("--version")).returncode, done.stdout)
    assert launcher.render_settings() == run("--print-settings").stdout


def test_missing_model_folder_is_refused_after_the_environment_is_printed(tmp_path: Path) -> None:
    done = run("--env", "--model-id", str(tmp_path / "none"), "--port", "0", "--api-key", "hunter2", HF_TOKEN="hf_x")
    assert 1 == done.returncode
    assert f"error: --model-id {tmp_path}/none is not a folder: check the path\n" == done.stderr
    assert "torch" in done.stdout and "cores" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr and "hf_x" not in done.stdout + done.stderr


def test_old_weights_are_converted_in_a_process_of_their_own(tmp_path: Path) -> None:
    import torch

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    log = launcher.Log(launcher.Output(os.open(os.devnull, os.O_WRONLY)), False)
    model = launcher.resolve_model(read(["--model-id", str(tmp_path)]), os.environ, log)
    assert ["pytorch_model.safetensors"] == [path.name for path in model.weights_path.iterdir()]
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02damaged")
    with pytest.raises(Refusal, match=r"^\S+/pytorch_model\.bin (is unsafe|cannot be read): [^\n]+$"):
        launcher.resolve_model(read(["--model-id", str(tmp_path)]), os.environ, log)


def test_launcher_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, launcher; sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    assert 0 == subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode
