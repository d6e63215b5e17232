"""A file of requests on all workers of a Ray cluster: `python -m lockstep_ray.batch --input FILE --output FILE`.

Ray Data gives the shards of the input (`shards.py`) to actors, each with a launcher of its own, and again where an
actor is lost. Input, output and the parts beside it are on a file system that all nodes share.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.data

from launch.commands.batch import HttpSender
from lockstep_ray.child import Child, ChildError
from lockstep_ray.shards import Job, Shard, ShardJournal, answer_shard, begin, finish, unless_gone, write_part
from router.jobs.lines import JobError
from router.jobs.runner import Plan

MOST_SERVERS = 5  # that a worker starts in a row without answering a shard


class Worker:
    """Answers shards with a server of its own, which it starts again where it ends."""

    def __init__(self, job: Job, flags: Sequence[str], plan: Plan, timeout_s: float) -> None:
        self._job, self._flags, self._plan, self._timeout_s = job, list(flags), plan, timeout_s
        self._child = self._start()
        self._num_ended = 0

    def _start(self) -> Child:
        child = Child(self._flags, {}, lambda line: print(line, file=sys.stderr))
        child.wait_ready()
        return child

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Shards, by column -> their numbers, and how many lines each has."""
        shards = [self._shard_of(number) for number in batch["number"]]
        return {"number": batch["number"], "lines": [self._answer(shard) for shard in shards]}

    def _shard_of(self, number: int) -> Shard:
        return self._job.shards[int(number)]

    def _answer(self, shard: Shard) -> int:
        journal = ShardJournal(self._job, shard)
        while not self._job.part(shard.number).exists() and not asyncio.run(self._ask(shard, journal)):
            self._num_ended += 1
            if self._num_ended >= MOST_SERVERS:
                raise ChildError(f"the server of this worker ended {self._num_ended} times: see its log")
            self._child = self._start()
        if not self._job.part(shard.number).exists():  # a worker that seemed dead may have been faster
            write_part(self._job, shard, journal)
            self._num_ended = 0
        return len(journal.answers)

    async def _ask(self, shard: Shard, journal: ShardJournal) -> bool:
        async with HttpSender(self._child.url, self._child.api_key, self._timeout_s) as sender:
            work = answer_shard(self._job, journal, shard, sender, self._plan)
            return await unless_gone(work, lambda: self._child.code is not None)


def run(job: Job, arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Answer the shards that are left, on the cluster."""
    left = job.left()
    if not left:
        return
    plan = Plan(arguments.concurrency, max_tries=arguments.max_tries)
    shards = ray.data.from_items([{"number": shard.number} for shard in left], override_num_blocks=len(left))
    done = shards.map_batches(
        Worker,
        fn_constructor_args=(job, tuple(flags), plan, arguments.timeout),
        batch_size=1,
        concurrency=min(arguments.workers, len(left)),
        num_cpus=arguments.num_cpus,
        num_gpus=arguments.num_gpus,
    )
    num_done = len(job.shards) - len(left)
    for _ in done.iter_rows():
        num_done += 1
        print(f"{num_done:,} of {len(job.shards):,} shards are answered", flush=True)


def main(argv: Sequence[str]) -> int:
    """The command. Returns its exit code."""
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser().parse_args(argv[:split])
    try:
        job = begin(arguments.input, arguments.output, arguments.shard_lines)
        if job is None:
            print(f"{arguments.output} is complete")
            return 0
        ray.init(address=arguments.address, log_to_driver=True)
        run(job, arguments, argv[split + 1 :])
        num_failed = finish(job)
    except (JobError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.output} is complete: {job.num_lines:,} lines, {num_failed:,} failed")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lockstep_ray.batch", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--input", type=Path, required=True, metavar="FILE", help="lines of JSON, as `lockstep batch` reads them")
    add("--output", type=Path, required=True, metavar="FILE", help="where answers go, in the input's order")
    add("--workers", type=int, default=1, metavar="N", help="servers at once. Default: 1")
    add("--shard-lines", type=int, default=500, metavar="N", help="lines that are done or not done. Default: 500")
    add("--num-cpus", type=float, default=1, metavar="N", help="of each worker, for Ray to count. Default: 1")
    add("--num-gpus", type=float, default=0, metavar="N", help="of each worker: as many as --num-shard. Default: 0")
    add("--concurrency", type=int, default=64, metavar="N", help="requests at once at each server. Default: 64")
    add(
        "--max-tries",
        type=int,
        default=5,
        metavar="N",
        help="tries of a request that fails after it was sent. Default: 5",
    )
    add("--timeout", type=float, default=3600, metavar="SECONDS", help="time limit of one answer. Default: 3600")
    add("--address", default="auto", metavar="ADDRESS", help="of the cluster. Default: auto, the one on this machine")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
