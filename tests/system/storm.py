"""A storm over what the router prepares aside: whoever leaves and whatever is killed, everybody gets what is theirs.

`python -m tests.system.storm --minutes 10` serves the embedded model. Clients of two keys have chats rendered and
grammars followed whose answers tell whose they are, and a batch job of a third key asks for objects that name their
line. Clients leave and set deadlines at random, and the processes that the router has started (those for chats and
grammars, what forks them, what follows texts) are killed and stopped. It prints one JSON object, and ends with 1 if an
answer was somebody else's, if anything was logged with a traceback, or if of the requests that nobody cancelled fewer
than 99 % were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.running import PATIENCE_S, ROOT, Server

KEYS = ("one", "other")
JOB = "job"
CLIENTS = 8  # of each key
LEAVES, HURRIES = 0.3, 0.15  # of the requests: whose client leaves, and that have a short deadline
SHORT_S = 0.08  # until somebody leaves, or a deadline
MOST_BETWEEN_S = 2.0  # of two faults
LINES = 20_000  # of the job: more than it does in ten minutes
ENOUGH = 0.99


def secret_of(key: str, number: int) -> str:
    """What nobody else asks with, of words that no tokenizer joins in two ways."""
    return f"secret of {key} number {number}"


def request_of(key: str, number: int, kind: str) -> tuple[str, dict[str, Any]]:
    """The route and the body."""
    secret = secret_of(key, number)
    if kind == "chat":
        return "/chat_tokenize", {"messages": [{"role": "user", "content": secret}]}
    grammar = {"type": "regex", "value": secret}
    return "/generate", {"inputs": "Say:", "parameters": {"max_new_tokens": 60, "grammar": grammar}}


def is_own(key: str, number: int, kind: str, answer: dict[str, Any]) -> bool:
    """Whether an answer is that to this request."""
    secret = secret_of(key, number)
    if kind == "chat":
        return bool(answer["templated_text"] == f"<|user|>\n{secret}</s>\n<|assistant|>\n")
    return bool(answer["generated_text"] == secret)


class Clients:
    """What they saw: counts by what became of requests that nobody cancelled, and of the others."""

    def __init__(self, url: str) -> None:
        self.calm: Counter[str] = Counter()
        self.hurried: Counter[str] = Counter()
        self.is_over = False
        self._url = url

    async def go_on(self, client: httpx2.AsyncClient, key: str, first: int) -> None:
        """One request after another; numbers are `first` and then every CLIENTS-th."""
        chance, number = random.Random(f"{key} {first}"), first
        while not self.is_over:
            await self._one(client, key, number, chance)
            number += CLIENTS

    async def _one(self, client: httpx2.AsyncClient, key: str, number: int, chance: random.Random) -> None:
        kind, what, wait = chance.choice(("chat", "grammar")), chance.random(), chance.uniform(0.001, SHORT_S)
        path, asked = request_of(key, number, kind)
        headers = {"authorization": f"Bearer {key}-secret"}
        if LEAVES <= what < LEAVES + HURRIES:
            headers["x-request-timeout-ms"] = str(max(1, int(1000 * wait)))
        tally = self.hurried if what < LEAVES + HURRIES else self.calm
        try:
            async with asyncio.timeout(wait if what < LEAVES else 300):
                answer = await client.post(self._url + path, json=asked, headers=headers)
        except TimeoutError:
            tally["gone"] += 1
        except httpx2.HTTPError as error:
            tally[f"{kind}: {type(error).__name__}"] += 1
        else:
            own = answer.status_code == 200 and is_own(key, number, kind, answer.json())
            cause = f" {answer.json()['error']}" if answer.status_code not in (200, 504) else ""
            tally["own" if own else "another's" if answer.status_code == 200 else f"{answer.status_code}{cause}"] += 1


def descendants(pid: int) -> list[int]:
    """All processes that it has started, and they."""
    found = []
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *descendants(child)]
    return found


async def disturb(router: int, until: float, chance: random.Random) -> Counter[str]:
    """Kill and stop a process of the router now and then. Returns the faults by name."""
    faults: Counter[str] = Counter()
    while time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0, MOST_BETWEEN_S))
        fault = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        with suppress(ProcessLookupError, IndexError):
            os.kill(chance.choice(descendants(router)), fault)
            faults[fault.name] += 1
    return faults


def write_job(path: Path) -> None:
    """Lines whose answers can only name them."""
    with path.open("w") as file:
        for number in range(LINES):
            schema = {"type": "object", "properties": {"line": {"const": secret_of(JOB, number)}}, "required": ["line"]}
            asked = {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
            }
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": "Which?"}],
                "max_tokens": 90,
                "response_format": asked,
            }
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def lines_done(path: Path) -> Counter[str]:
    """What became of the job's lines."""
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        done = json.loads(line)
        response = done.get("response") or {}
        if response.get("status_code") != 200:
            found[str(done.get("error") or response)] += 1
            continue
        own = {"line": secret_of(JOB, int(done["custom_id"]))}
        said = response["body"]["choices"][0]["message"]["content"]
        found["own" if json.loads(said) == own else "another's"] += 1
    return found


def wait_for_line(job: subprocess.Popen[bytes], path: Path) -> None:
    """Until one of the job's lines is done."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists() or b"\n" not in path.read_bytes():
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.05)


async def storm(server: Server, minutes: float, seed: int) -> tuple[Clients, Counter[str]]:
    """Clients and faults at once; what the clients saw, and the faults."""
    clients = Clients(server.url)
    async with httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None)) as client:
        tasks = [asyncio.ensure_future(clients.go_on(client, key, first)) for key in KEYS for first in range(CLIENTS)]
        try:
            faults = await disturb(server.router(), time.monotonic() + 60 * minutes, random.Random(seed))
        finally:
            clients.is_over = True
        await asyncio.gather(*tasks)
    return clients, faults


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = [{"name": key, "key": f"{key}-secret"} for key in (*KEYS, JOB)]
        (folder / "keys.json").touch(mode=0o600)
        (folder / "keys.json").write_text(json.dumps({"keys": keys}))
        write_job(folder / "in.jsonl")
        with Server("--api-keys-file", str(folder / "keys.json"), *flags) as server:
            command = (sys.executable, str(ROOT / "launcher.py"), "batch", "--url", server.url, "--concurrency", "4")
            files = ("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"))
            job = subprocess.Popen(
                (*command, *files), env=os.environ | {"API_KEY": f"{JOB}-secret"}, stderr=subprocess.DEVNULL
            )
            try:
                wait_for_line(job, folder / "out.jsonl")
                clients, faults = asyncio.run(storm(server, args.minutes, args.seed))
            finally:
                job.terminate()
                job.wait()
        lines = lines_done(folder / "out.jsonl")
        unexpected = [line.strip() for line in server.lines if "Traceback" in line]
    share = clients.calm["own"] / max(1, clients.calm.total())
    report = {
        "faults": faults,
        "not cancelled": clients.calm,
        "cancelled or hurried": clients.hurried,
        "lines of the job": lines,
        "unexpected": unexpected[:10],
        "share of the not cancelled that got their own": round(share, 5),
    }
    print(json.dumps(report, indent=1))
    wrong = sum(tally["another's"] for tally in (clients.calm, clients.hurried, lines))
    return 1 if wrong or unexpected or share < ENOUGH or not lines["own"] else 0


if __name__ == "__main__":
    sys.exit(main())
