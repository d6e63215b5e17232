"""Are requests that would cost the server a great deal dealt with at once, and do streams beside them notice?

`python -m tests.system.hostile_requests [--seconds 60] [--streams 16]` starts the embedded model and measures the gaps
between the tokens of its streams: alone, beside a process that sends one hostile request after another, and alone
again. One line of JSON; exit code 1 if a hostile request was not refused within `MOST_S`. The two regular expressions
whose automata would explode if they were built at once may be answered in that time instead: they are built as far as a
text needs them.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvloop

from tests.running import ROOT, Server
from tests.system.hostile_connections import gaps, p50, p99

MOST_S = 2.0
TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(300_000)}}
DEEP = {"type": "json", "value": json.loads('{"items":' * 500 + "{}" + "}" * 500)}


def asked(**parameters: Any) -> tuple[str, dict[str, Any]]:
    """A request of TGI's own API."""
    return "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 5, **parameters}}


def regex(value: str) -> tuple[str, dict[str, Any]]:
    """One whose answer is held by a regular expression."""
    return asked(grammar={"type": "regex", "value": value})


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a template that loops": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "repetitions of repetitions": regex("((a{1,1000}){1,1000}){1,1000}"),
    "a regex of exponential states": regex("(.*a.{40}){20}"),
    "a regex of 100,000 characters": regex("(a|b)?" * 17_000),
    "a schema of 10 MB": asked(grammar={"type": "json", "value": WIDE}),
    "a deep schema": asked(grammar=DEEP),
    "a temperature of 1e308": asked(temperature=1e308),
    "10,000 stop strings": asked(stop=["x"] * 10_000),
}
LAZY = {"repetitions of repetitions", "a regex of exponential states"}


def attack(url: str) -> None:
    """The hostile process: request after request, until its input ends; then it reports."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    bodies = {name: (path, json.dumps(body).encode()) for name, (path, body) in KINDS.items()}
    print("ready", flush=True)
    with httpx2.Client(base_url=url, timeout=60) as http:
        for name in over_and_over(list(bodies)):
            path, body = bodies[name]
            began = time.monotonic()
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            found[name].append((answer.status_code, time.monotonic() - began))
    print(json.dumps(found), flush=True)


def over_and_over(names: Sequence[str]) -> Iterator[str]:
    """One name after the other, round and round, while a signal does not say that it is enough."""
    ending: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    while not ending:
        yield from names


@contextmanager
def attacked(url: str, found: dict[str, list[tuple[int, float]]]) -> Iterator[None]:
    """A hostile process beside the block; `found` gets statuses and seconds of each kind."""
    command = [sys.executable, "-m", "tests.system.hostile_requests", "--attack", url]
    # On another machine its work would take nothing from the server's cores: here it has what they leave.
    process = subprocess.Popen(["nice", "-n", "19", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
        yield
        process.terminate()
        output, _ = process.communicate(timeout=60)
        found.update(json.loads(output))
    finally:
        process.kill()
        process.wait()


def refused(found: dict[str, list[tuple[int, float]]]) -> dict[str, dict[str, Any]]:
    """What came of each kind: statuses, how often, and the longest time in seconds."""
    return {
        name: {
            "statuses": sorted({status for status, _ in answers}),
            "requests": len(answers),
            "longest_s": round(max(seconds for _, seconds in answers), 2),
        }
        for name, answers in found.items()
    }


def measure(seconds: float, streams: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        with Server("--chat-template", str(template)) as server:

            def figures() -> dict[str, float]:
                between = uvloop.run(gaps(server, streams, seconds, num_tokens=200))
                return {"p50_ms": round(p50(between), 2), "p99_ms": round(p99(between), 2)}

            uvloop.run(gaps(server, streams, 3, num_tokens=200))
            before = figures()
            answers: dict[str, list[tuple[int, float]]] = {}
            with attacked(server.url, answers):
                beside = figures()
            after = figures()
    ratio = round(beside["p99_ms"] / max(before["p99_ms"], after["p99_ms"]), 2)
    return {"alone": before, "beside": beside, "alone_again": after, "ratio": ratio, "refused": refused(answers)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print, or be hostile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.attack:
        attack(args.attack)
        return 0
    result = measure(args.seconds, args.streams)
    print(json.dumps(result))
    kinds = result["refused"]
    refused_all = all(one["longest_s"] <= MOST_S and is_dealt_with(name, one) for name, one in kinds.items())
    return 0 if refused_all and kinds.keys() == KINDS.keys() else 1


def is_dealt_with(name: str, told: dict[str, Any]) -> bool:
    """Whether every request of a kind was refused, or answered where that is as good."""
    return all(400 <= status < 500 or (status == 200 and name in LAZY) for status in told["statuses"])


if __name__ == "__main__":
    sys.exit(main())
