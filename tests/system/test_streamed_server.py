"""A server with half of its weights on the disk keeps its promises, and says where they are."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import httpx2

from tests.running import Server, body, events_of, is_alive, start_launcher
from tests.system.survival import SIGNALS, mixed_requests, recoveries, signals, survive

GREEDY = body("Once upon a time there was", max_new_tokens=20, details=True)


def test_half_of_the_weights_stream_under_streams_that_lose_a_shard(tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--num-shard", "2", "--weights-on-device", "50%", "--offload-dir", str(tmp_path))
    with Server(*flags) as server:
        table = "".join(server.lines)
        found = re.search(r"off the device +(\d+) of (\d+) layers, 0\.\d\d GB, stream through 0\.\d\d GB", table)
        assert found is not None, table
        assert int(found[2]) == 2 * int(found[1])
        assert re.search(r"decode graphs +none: weights stream", table)
        plain = mixed_requests(16, random.Random(4), most_tokens=40)
        kill = signals(SIGNALS["kill"], 1, random.Random(2), most_s=1.0)
        tally = asyncio.run(survive(server, kill, streams=8, requests=plain))
        assert not tally.failures
        assert 1 <= asyncio.run(recoveries(server))  # on a busy machine a step may be late enough for one more
        assert [] == list(tmp_path.iterdir())
        children = server.children()
        with httpx2.stream("POST", f"{server.url}/generate_stream", json=GREEDY, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.stop()  # what runs is answered to its end
            events = events_of([first, *lines])
        assert 0 == server.wait()[0]
        assert 20 == len(events) and events[-1]["generated_text"]
        assert not [pid for pid in children if is_alive(pid)]


def test_weights_without_a_place_are_refused_before_a_model_is_asked_for() -> None:
    for given in (["--weights-on-device", "40%"], ["--weights-on-device", "40%", "--offload-dir", "/nothing/here"]):
        process = start_launcher("--device", "cpu", "--port", "0", "--model-id", "no/model", *given)
        output, _ = process.communicate(timeout=60)
        problem = "a disk: name a folder on one with" if len(given) == 2 else "/nothing/here: no file can be made there"
        assert output.startswith("error: --") and problem in output and "no/model" not in output
        assert 2 == process.returncode
