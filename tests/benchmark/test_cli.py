"""The command line: one sentence and an exit code for whatever goes wrong, SIGTERM too."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import launch
from benchmark.__main__ import COMMANDS, main
from benchmark.result import BenchError
from tests.running import ROOT


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; from benchmark.__main__ import main\n"
        "heavy = {'torch', 'grpc', 'rich', 'matplotlib', 'benchmark.commands.latency'}\n"
        "try: main(['--help'])\n"
        "finally: print(sorted(set(sys.modules) & heavy))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout
    assert set(COMMANDS) <= {line.split()[0] for line in shown.splitlines() if line.startswith("    ")}
    assert "[]" == shown.splitlines()[-1]


@pytest.mark.parametrize("name", ["latency", "offline", "reproduce", "plan", "kernels", "gpu"])
def test_every_command_explains_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert 0 == end.value.code
    assert f"usage: lockstep-bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unheard"],
        ["latency", "--batch-size", "0"],
        ["latency", "--decode-length", "1"],
        ["latency", "--top-p", "1.5"],
        ["latency", "--temperature", "nan"],
        ["latency", "--run", "3"],
        ["latency", "--model-id", "a", "--random-weights", "b"],
        ["plan"],
        ["plan", "--model-id", "bloom-560m", "--device", "abacus"],
        ["offline", "--num-prompts", "-1"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert 2 == end.value.code
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--model-id", "gpt-17", "--device", "h200"], "error: no shape is called gpt-17"),
        (["latency", "--random-weights", "gpt-17"], "error: no shape is called gpt-17"),
        (["gpu", "--serving-shape", "gpt-17"], "error: no shape is called gpt-17"),
        (["latency", "--shard-uds-path", "/nowhere/shard"], "error: no shards listen at /nowhere/shard-0"),
        (["offline", "--model-id", "/nowhere"], "error: "),
        (["latency", "--model-id", "/nowhere"], "error: the server did not start: the model /nowhere is not a folder"),
        (["latency", "--device", "abacus"], "error: the server did not start: --device is abacus: give one of"),
    ],
)
def test_what_fails_is_said_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == main(arguments)
    *told, line = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence)
    assert all(one.startswith("starting a server, which loads or makes the weights of ") for one in told)


@pytest.mark.parametrize("command", [["latency"], ["offline"], ["plan", "--model-id", "bloom-560m", "--device", "l4"]])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert 1 == main([*command, "--output", str(blocked)])
    assert "error: cannot write results to" in capsys.readouterr().err


PLAN = ["-m", "benchmark", "plan", "--model-id", "bloom-560m", "--device", "l4"]


@pytest.mark.parametrize("arguments", [PLAN, [*PLAN[:2], "--help"]])
def test_a_reader_who_leaves_ends_nothing_with_a_traceback(arguments: list[str], tmp_path: Path) -> None:
    """As `| head -1`, whose end of the pipe may be closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    output = ["--output", str(tmp_path)] if arguments is PLAN else []
    try:
        done = subprocess.run(
            [sys.executable, *arguments, *output], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writing)
    assert (0, "") == (done.returncode, done.stderr)
    assert not output or json.loads((tmp_path / "result.json").read_text())["rows"]  # which is kept all the same


def test_a_terminal_gets_no_json(tmp_path: Path) -> None:
    """Of `plan`, and of `compare`, whose JSON is as long; a pipe gets both on the last line."""
    rows = [{"step": "prefill", "batch_size": 1, "mean_ms": 2.0, "samples_ms": [1.0, 3.0]}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"command": "latency", "work": {}, "rows": rows}))
    compare = ["-m", "benchmark", "compare", f"{tmp_path}/a.json", f"{tmp_path}/b.json"]
    for arguments in (PLAN, compare):
        shown = on_a_terminal([sys.executable, *arguments])
        piped = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "As JSON: with --output DIR" in shown and "{" not in shown
        assert json.loads(piped.stdout.splitlines()[-1])["rows"]


def on_a_terminal(command: list[str]) -> str:
    """What the command writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    written = b""
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # the command has ended, and with it the terminal's other end
            pass
    os.close(ours)
    return written.decode()


def test_sockets_are_found_in_rank_order(tmp_path: Path) -> None:
    for name in ("shard-0", "shard-1", "shard-10", "shard.lock", "other-0"):
        (tmp_path / name).touch()
    with pytest.raises(BenchError, match="no shards listen"):
        launch.sockets_at(str(tmp_path / "shard"))
    (tmp_path / "shard-10").unlink()
    assert [f"{tmp_path}/shard-0", f"{tmp_path}/shard-1"] == launch.sockets_at(f"{tmp_path}/shard")


def test_a_wrong_choice_is_one_line_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["offline", "--schedule", "zigzag"])
    (line,) = capsys.readouterr().err.splitlines()
    assert 2 == left.value.code and line.startswith("error: argument --schedule: invalid choice: 'zigzag'")
    assert "zig-zag" in line and line.endswith("see lockstep-bench offline --help")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("latencyy", "latencyy is not a command: did you mean latency?"),
        ("nothing", "nothing is not a command: see lockstep-bench --help"),
        ("latency --bath=1", "--bath is not an option: did you mean --batch-size?"),
        ("latency --zzz", "--zzz is not an option: see lockstep-bench latency --help"),
        ("latency 5", "unrecognized arguments: 5: see lockstep-bench --help"),
    ],
)
def test_what_is_misspelt_is_one_line_with_what_was_meant(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(given.split())
    assert (2, f"error: {said}\n") == (left.value.code, capsys.readouterr().err)


def test_nobody_listens_to_standard_error() -> None:
    flags = "simulate --step-ms 5 --request-rate 20 40 --num-requests 20"
    command = ["bash", "-c", f"{sys.executable} -m benchmark {flags} 2>&-"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (0, "# null on cpu")


# --------------------------------------------------------------------------------------------------------- interruption


class Deaf(asyncio.Protocol):
    """A connection during one of whose callbacks SIGTERM comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        transport.close()


def test_sigterm_within_a_callback_of_a_connection_ends_what_is_awaited() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Deaf, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                await asyncio.sleep(60)
            finally:
                writer.close()

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch.run_interruptible(story())
        assert signal.default_int_handler is signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ends_by_itself_has_its_result() -> None:
    assert "done" == launch.run_interruptible(asyncio.sleep(0, "done"))
