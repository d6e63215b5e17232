"""A Ray Data job whose worker is killed, then the job itself, which is begun again: `python -m tests.ray.data`.

Prints one row: how many lines there were, and how often each is in the output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.ray.fleet import cluster, cmdline, descendants

SHARD_LINES = 250


def write_input(path: Path, count: int) -> None:
    """Short prompts with ids of their own; some that are refused, one that is nothing, and a blank line."""
    with path.open("w") as file:
        for number in range(count - 2):
            body = {"prompt": f"Story {number}:", "max_tokens": 2, "temperature": 0}
            if number % 1000 == 17:
                body["max_tokens"] = -1
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
        file.write("\nno JSON\n" + json.dumps({**line, "custom_id": "line-0"}) + "\n")


def begin(address: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """The command as a user types it."""
    argv = ["--input", folder / "in.jsonl", "--output", folder / "out.jsonl", "--shard-lines", SHARD_LINES]
    argv += ["--workers", 2, "--address", address]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep_ray.batch", *map(str, argv)], stdout=output, stderr=output
        )


def kill_worker() -> int:
    """End an actor of the job, which has a launcher for a child, with SIGKILL."""
    found = (pid for pid in descendants(os.getpid()) if cmdline(pid).startswith(b"ray::MapWorker"))
    victim = next(pid for pid in found if any(b"\0launcher\0" in cmdline(child) for child in descendants(pid)))
    os.kill(victim, signal.SIGKILL)
    return victim


def num_parts(folder: Path) -> int:
    """Shards that are done."""
    return len(list(folder.glob("out.jsonl.parts/part-*.jsonl")))


def until_parts(job: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Wait for so many shards."""
    while num_parts(folder) < count:
        assert job.poll() is None, "the job ended too early"
        time.sleep(0.05)


def run(count: int, address: str, folder: Path) -> str:
    """The story. Returns its row."""
    write_input(folder / "in.jsonl", count)
    num_shards, log, began = -(-(count + 1) // SHARD_LINES), folder / "log", time.monotonic()
    job = begin(address, folder, log)
    until_parts(job, folder, max(1, num_shards // 5))
    kill_worker()
    until_parts(job, folder, max(2, num_shards // 2))
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    num_kept = num_parts(folder)
    code = begin(address, folder, log).wait()
    assert code == 0, log.read_text()[-3000:]
    seconds = time.monotonic() - began
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    numbers = Counter(int(one["id"].rpartition("_")[2]) for one in found)
    wanted = Counter([*range(1, count - 1), count, count + 1])
    failed = Counter(
        one["error"]["code"] if one["error"] else one["response"]["status_code"]
        for one in found
        if one["error"] or one["response"]["status_code"] != 200
    )
    assert numbers == wanted, f"missing: {wanted - numbers}, too many: {numbers - wanted}"
    assert failed["invalid_json_line"] == failed["duplicate_custom_id"] == 1
    assert failed.total() == 2 + len(range(17, count - 2, 1000)), failed
    assert not list(folder.glob("out.jsonl.*"))
    return (
        f"| Ray Data, {count:,} lines in {num_shards} shards, 2 workers; one worker killed, then the job with "
        f"{num_kept} shards done, and begun again | each line once ({len(numbers):,} of {count:,}); "
        f"{failed.total()} failed as they should; {seconds:.0f} s |"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    lines = parser.parse_args().lines
    with cluster() as nodes, tempfile.TemporaryDirectory() as folder:
        print(run(lines, nodes.address, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
