"""Batch files, and what answers their requests in tests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from router.jobs.input_index import InputIndex, index_input
from router.jobs.journal import Journal
from router.jobs.lines import BatchRequest, LineFile, Problem, Reply
from router.jobs.runner import Plan, Runner

MOST_BYTES = 1000
URL = "/v1/completions"


def request(custom_id: Any, **other: Any) -> dict[str, Any]:
    body = {"model": "a", "prompt": "hello", "max_tokens": 2}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body, **other}


def write_requests(path: Path, num_lines: int) -> Path:
    path.write_text("".join(json.dumps(request(f"r{i}")) + "\n" for i in range(1, num_lines + 1)))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    assert not raw or raw.endswith(b"\n")
    return [orjson.loads(line) for line in raw.splitlines()]


def index_of(path: Path) -> InputIndex:
    return index_input(path, path.parent, MOST_BYTES, lambda _: None)


class Answering:
    """Answers every request with what `answer` makes of it, or 200; counts how often each was asked."""

    def __init__(self, answer: Callable[[BatchRequest, int], Reply | Problem] | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self.num_at_once = self.most_at_once = 0
        self._answer = answer

    async def send(self, wanted: BatchRequest, request_id: str) -> Reply | Problem:
        self.asked[wanted.custom_id] += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(0)
            if self._answer is not None:
                return self._answer(wanted, self.asked[wanted.custom_id])
            return Reply(200, request_id, b'{"text": "hi"}')
        finally:
            self.num_at_once -= 1


def run_job(source: Path, output: Path, sender: Any, *, errors: Path | None = None, **plan: Any) -> Journal:
    """A whole job, or what there is of it until it raises."""
    index = index_of(source)
    try:
        with closing(LineFile(source, MOST_BYTES)) as lines, closing(Journal(output, errors, index)) as journal:
            runner = Runner(index, lines, journal, sender, Plan(**{"concurrency": 4, **plan}))
            asyncio.run(runner.run())
            return journal
    finally:
        index.ids.close()
