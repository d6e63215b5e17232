"""The command `lockstep batch` as people call it: killed, stopped, refused, with a server that is there or its own."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from launch.commands import batch
from launch.errors import Refusal
from router.jobs.journal import State, journal_path
from tests.router.jobs.making import read_lines, write_requests
from tests.running import PATIENCE_S, ROOT, Server, kill_group

SMALL, MANY = (1000, 2), (10_000, 5)  # lines and kills


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--model-id", "null") as it:
        yield it


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launcher.py"), "batch", *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def peak_kib(pid: int) -> int:
    """The most memory that a process has had so far; 0 once it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1])
    return 0


def kill_at(job: subprocess.Popen[str], output: Path, num: int) -> int:
    """SIGKILL once so many lines are there. Returns the most memory that it took."""
    peak = 0
    while job.poll() is None and num_lines(output) < num:
        peak = max(peak, peak_kib(job.pid))
        time.sleep(0.005)
    kill_group(job)
    return peak


@pytest.mark.parametrize(("lines", "kills"), [SMALL, pytest.param(*MANY, marks=pytest.mark.offload)])
def test_each_line_is_answered_once_however_often_the_job_is_killed(
    server: Server, tmp_path: Path, lines: int, kills: int
) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = ("--input", str(source), "--output", str(output), "--url", server.url, "--concurrency", "16")
    chance = random.Random(lines)
    peaks = []
    for number in range(1, kills + 1):
        job = started(*arguments)
        peaks.append(kill_at(job, output, int(lines * (number - chance.random() / 2) / (kills + 1))))
        assert job.returncode == -signal.SIGKILL
        assert num_lines(output) < lines
    before = num_lines(output)
    job = started(*arguments)
    last_peak = 0
    while job.poll() is None:
        last_peak = max(last_peak, peak_kib(job.pid))
        time.sleep(0.01)
    out, err = job.communicate()
    assert (0, "") == (job.returncode, out), err
    assert f"going on with {output}: " in err and f"{output} is complete: {lines:,} lines are answered, 0 failed" in err
    found = read_lines(output)
    assert Counter(f"r{i}" for i in range(1, lines + 1)) == Counter(one["custom_id"] for one in found)
    assert {200} == {one["response"]["status_code"] for one in found}
    assert before < lines and max(peaks[-1], last_peak) < 1.3 * peaks[0] + 4096, (peaks, last_peak)
    print(f"{lines} lines, {kills} kills: peaks {peaks}, at last {last_peak} KiB")
    again = started(*arguments)
    assert "is complete" in again.communicate()[1] and 0 == again.returncode


def test_a_job_with_a_key_of_its_own_ends_beside_live_requests(tmp_path: Path) -> None:
    """Whose every one is answered: what comes first is held in virtual time (`test_fairness.py`)."""
    keys = tmp_path / "keys.json"
    people, jobs = {"name": "people", "key": "open"}, {"name": "jobs", "key": "slow", "weight": 0.01}
    keys.write_text(json.dumps({"keys": [people, jobs]}))
    source, output = write_requests(tmp_path / "in.jsonl", 150), tmp_path / "out.jsonl"
    flags = ("--api-keys-file", str(keys), "--max-batch-size", "8", "--null-step-ms", "2")
    with Server("--model-id", "null", *flags) as server:
        job = started("--input", str(source), "--output", str(output), "--url", server.url, API_KEY="slow")
        answers = []
        while job.poll() is None:
            asked = {"inputs": "Once", "parameters": {"max_new_tokens": 20}}
            headers = {"authorization": "Bearer open"}
            answers.append(httpx2.post(f"{server.url}/generate", json=asked, headers=headers, timeout=60))
        _, err = job.communicate(timeout=60)
    assert 0 == job.returncode, err
    assert 150 == num_lines(output) and answers
    assert [200] * len(answers) == [answer.status_code for answer in answers]


def test_a_signal_stops_it_and_the_same_command_goes_on(server: Server, tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", 5000), tmp_path / "out.jsonl"
    arguments = ("--input", str(source), "--output", str(output), "--url", server.url, "--concurrency", "1")
    job = started(*arguments)
    while num_lines(output) < 3:
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert 130 == job.returncode and "stopped by SIGINT: start the same command again to go on" in err
    there = num_lines(output)
    state = State.of_json(journal_path(output).read_bytes())
    assert there == state.completed == len(read_lines(output)) and not state.is_complete
    job = started(*arguments)
    while num_lines(output) < there + 3:
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert 143 == job.returncode
    assert len({one["custom_id"] for one in read_lines(output)}) == num_lines(output)


def test_a_server_of_its_own_comes_and_goes_with_it(tmp_path: Path) -> None:
    """Also when it is killed: then nothing is left of it, and the next one goes on."""
    source, output = write_requests(tmp_path / "in.jsonl", 1500), tmp_path / "out.jsonl"
    arguments = ("--input", str(source), "--output", str(output), "--model-id", "null", "--concurrency", "2")
    job = started(*arguments, "--", "--device", "cpu", LOCKSTEP_TEST=str(tmp_path))
    while num_lines(output) < 3:
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    of_job = processes_with(str(tmp_path))
    assert len(of_job) >= 3, "the job, its launcher and what that has started"
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    wait_for_no_process_with(str(tmp_path))
    assert 3 <= num_lines(output) < 1500
    job = started(*arguments, "--", "--device", "cpu", LOCKSTEP_TEST=str(tmp_path))
    _, err = job.communicate(timeout=PATIENCE_S)
    assert 0 == job.returncode, err
    assert 1500 == len({one["custom_id"] for one in read_lines(output)}) == num_lines(output)
    wait_for_no_process_with(str(tmp_path))


def wait_for_no_process_with(text: str) -> None:
    """Until no process has it in its environment."""
    limit = time.monotonic() + PATIENCE_S  # a bound of liveness
    while processes_with(text):
        assert time.monotonic() < limit
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Processes that have a text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_a_server_that_does_not_start_ends_the_job(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 3)
    job = started("--input", str(source), "--output", str(tmp_path / "out"), "--model-id", str(tmp_path / "none"))
    _, err = job.communicate(timeout=120)
    assert 1 == job.returncode
    assert re.search(r"error: the server of this job ended with code [12] before it was ready", err)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give either --url of a server, or --model-id"),
        (["--url", "http://a", "--model-id", "x"], "give either --url"),
        (["--url", "nowhere"], "--url: nowhere is no server's URL"),
        (["--model-id", "x", "--", "--port", "3"], "--port is the job's to choose"),
        (["--model-id", "x", "--", "--api_key=3"], "--api_key is the job's to choose"),
        (["--url", "http://a", "--concurrency", "0"], "--concurrency is 0: give 1 to 1024"),
        (["--url", "http://a", "--max-tries", "0"], "--max-tries is 0"),
        (["--url", "http://a", "--timeout", "nan"], "--timeout is nan: give 0.1 to 604800"),
        (["--url", "http://a", "--give-up-after", "-1"], "--give-up-after is -1"),
        (["--url", "http://a", "--input", "/nowhere"], "--input /nowhere is not there"),
        (["--url", "http://a", "--input", "/dev/null"], "--input /dev/null is no file that can be read twice"),
        (["--url", "http://a", "--output", "/nowhere/out"], "there is no folder /nowhere: make it first"),
        (["--url", "http://a", "--errors", "OUT"], "must be different files"),
        (["--url", "http://a", "--errors", "OUT.journal"], "must be different files"),
        (["--url", "http://a", "--api-key", "k\n"], "the API key has line ends"),
        (["--url", "http://a", "--errors", "OUT.journal.new"], "must be different files"),
        (["--url", "http://a", "--output", "OUT", "--input", "OUT.journal.new"], "must be different files"),
        (["--url", "http://a", "--url-of"], "--url-of is not an option: did you mean --url?"),
        (
            ["--model-id", "a", "--dtype", "bfloat16"],
            "--dtype is not an option of lockstep batch: give it to the server, behind --",
        ),
    ],
)
def test_a_wrong_option_gets_a_sentence(tmp_path: Path, options: list[str], says: str) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", 1), tmp_path / "out"
    given = [one.replace("OUT", str(output)) for one in options]
    with pytest.raises(Refusal, match=re.escape(says)) as refused:
        batch.read_command(["--input", str(source), "--output", str(output), *given], {})
    assert 2 == refused.value.code


def test_the_key_comes_from_the_environment_or_the_command_line(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 1)
    given = ["--input", str(source), "--output", str(tmp_path / "out"), "--url", "http://a"]
    assert "k" == batch.read_command(given, {"API_KEY": "k"}).api_key
    assert "j" == batch.read_command([*given, "--api-key", "j"], {"API_KEY": "k"}).api_key


def test_an_output_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    source, output = write_requests(tmp_path / "in.jsonl", 1), tmp_path / "out"
    output.write_text("precious")
    job = started("--input", str(source), "--output", str(output), "--url", "http://127.0.0.1:1")
    _, err = job.communicate(timeout=60)
    assert 1 == job.returncode and f"error: {output} exists and belongs to no job" in err
    assert "precious" == output.read_text()


def test_the_page_says_how_to_call_it() -> None:
    page = (ROOT / "docs/operating.md").read_text()
    assert "lockstep batch --input prompts.jsonl --output out.jsonl" in page
    for option in ("--errors", "--url", "--model-id", "--concurrency", "--timeout", "--max-tries", "--give-up-after"):
        assert f"`{option}" in page
    example = re.findall(r"^\{.*\}$", page, re.MULTILINE)
    assert {"custom_id", "method", "url", "body"} == set(json.loads(example[0]))
    assert {"id", "custom_id", "response", "error"} == set(json.loads(example[1]))
