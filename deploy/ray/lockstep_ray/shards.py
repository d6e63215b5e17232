"""A batch job in shards of lines, so that many workers share it and each line is answered exactly once.

A worker answers a shard as `lockstep batch` answers a file (`router/jobs/runner.py`) and writes the answers to a file
of the shard's own, which gets its name once it is whole and on the disk: a shard whose worker was killed has no file,
and is answered again. When all shards have theirs, they become the output, in order, and each line is counted. Nothing
here knows Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from router.jobs.input_index import InputIndex, index_input
from router.jobs.journal import make_names_durable, replace_durably
from router.jobs.lines import InputChanged, JobError, Line, LineFile, custom_id_of, parse_answer
from router.jobs.runner import Plan, Runner, Sender

MOST_LINE_BYTES = 16 << 20
VERSION = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Lines of the input, of which first and last are numbers. offset: of the first, in bytes.

    firsts: `custom_id` -> number of the first line that has it, of ids that are duplicated in this shard.
    """

    number: int
    first: int
    last: int
    offset: int
    firsts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job and its folder. name: what the ids of its output lines begin with; num_lines: without blank ones."""

    input: Path
    output: Path
    name: str
    num_lines: int
    shards: tuple[Shard, ...]

    @property
    def folder(self) -> Path:
        """Where the shards' answers are until all are there."""
        return folder_of(self.output)

    def part(self, number: int) -> Path:
        """The answers of a shard."""
        return self.folder / f"part-{number:06d}.jsonl"

    def left(self) -> list[Shard]:
        """Shards without answers."""
        return [shard for shard in self.shards if not self.part(shard.number).exists()]


def folder_of(output: Path) -> Path:
    """The folder of the job that has this output."""
    return output.with_name(f"{output.name}.parts")


def begin(input_path: Path, output: Path, shard_lines: int) -> Job | None:
    """The job, new or resumed; None where its output is complete. Raises JobError and OSError."""
    folder, record = folder_of(output), folder_of(output) / "job.json"
    if output.exists() and not folder.exists():
        raise JobError(f"{output} exists and no job of it is under way: give another name, or move it away")
    if output.exists():
        shutil.rmtree(folder)  # the last step: there is no output before all shards are answered
        return None
    index = index_input(input_path, output.parent, MOST_LINE_BYTES, lambda _: None)
    with closing(index.ids):
        folder.mkdir(exist_ok=True)
        shards = tuple(cut(index, shard_lines))
        name = hashlib.sha256(f"{index.sha256} {output.absolute()}".encode()).hexdigest()[:12]
        said = {"version": VERSION, "sha256": index.sha256, "shard_lines": shard_lines, "name": name}
        if record.exists():
            known = orjson.loads(record.read_bytes())
            if known["sha256"] != index.sha256:
                raise InputChanged(f"{input_path} is not the input that {folder} was begun with: put that back")
            if known != said:
                raise JobError(f"{folder} was begun with other options: give the same, or delete it to begin anew")
        else:
            replace_durably(record, orjson.dumps(said))
        return Job(input_path.absolute(), output.absolute(), name, index.num_lines, shards)


def cut(index: InputIndex, shard_lines: int) -> Iterator[Shard]:
    """The input in shards of so many lines, blank ones included."""
    with closing(LineFile(index.path, MOST_LINE_BYTES)) as lines:
        number = offset = 0
        first, start, firsts = 1, 0, dict[str, int]()
        while (line := lines.read(number + 1, offset)) is not None:
            number, offset = line.number, line.end
            if (custom_id := custom_id_of(line)) is not None:
                known = index.ids.first_line(custom_id)
                if known != number:
                    firsts[custom_id] = known
            if number - first + 1 == shard_lines:
                yield Shard((first - 1) // shard_lines, first, number, start, firsts)
                first, start, firsts = number + 1, offset, {}
        if number >= first:
            yield Shard((first - 1) // shard_lines, first, number, start, firsts)


class _State:
    """The part of a journal's state that `Runner` reads."""

    def __init__(self, job: str, shard: Shard) -> None:
        self.job = job
        self.next_line, self.next_offset = shard.first, shard.offset
        self.under_way: dict[int, int] = {}
        self.answered: set[int] = set()


class ShardJournal:
    """A shard's answers in memory, in place of a journal with an output and a checkpoint."""

    def __init__(self, job: Job, shard: Shard) -> None:
        self.state = _State(job.name, shard)
        self.answers: dict[int, bytes] = {}
        self._folder = job.folder
        self._shard = shard
        self._adapters: dict[str, str] = {}

    def begun(self, line: int, offset: int, end: int) -> None:
        """A line was read."""
        if line >= self.state.next_line:
            self.state.next_line, self.state.next_offset = line + 1, end
        self.state.under_way[line] = offset

    def hold_to(self, adapter: str, key: str) -> bool:
        """Answers of one adapter are all of one content, in whichever shard. Raises JobError and OSError."""
        if self._adapters.get(adapter) != key:
            known = _first_key(self._folder, adapter, key)
            if known != key:
                raise JobError(
                    f"the adapter {adapter} is not the one that this job was begun with: put its files back, or delete "
                    f"{self._folder} to begin anew"
                )
            self._adapters[adapter] = key
        return False  # it is on the disk

    def passed(self, line: int) -> None:
        """A line asks for nothing."""
        del self.state.under_way[line]

    def write(self, line: int, text: bytes, *, is_failure: bool) -> None:
        """A line is answered."""
        assert line not in self.answers
        self.answers[line] = text
        del self.state.under_way[line]

    def snapshot(self, *, is_complete: bool = False) -> None:
        """There are no checkpoints within a shard."""

    def save(self, checkpoint: None) -> None:
        """See `snapshot`."""


def _first_key(folder: Path, adapter: str, key: str) -> str:
    """The key of the content that a job's first answers of an adapter had, which is this one if there are none yet."""
    record = folder / f"adapter-{hashlib.sha256(adapter.encode()).hexdigest()[:16]}"
    new = record.with_suffix(f".{os.getpid()}.new")
    try:
        replace_durably(new, key.encode())
        os.link(new, record)  # which does nothing where it is there
    except FileExistsError:
        return record.read_text()
    finally:
        new.unlink(missing_ok=True)
    make_names_durable(folder)
    return key


class _ShardLines:
    """The input's lines to the end of a shard."""

    def __init__(self, lines: LineFile, shard: Shard) -> None:
        self.most_bytes = lines.most_bytes
        self._lines = lines
        self._last = shard.last

    def read(self, number: int, offset: int) -> Line | None:
        return None if number > self._last else self._lines.read(number, offset)


class _ShardIndex:
    """What `Runner` asks of an input's index."""

    def __init__(self, lines: LineFile, shard: Shard) -> None:
        self.ids = self
        self._firsts: dict[str, int] = {}
        number, offset = shard.first, shard.offset
        while number <= shard.last and (line := lines.read(number, offset)) is not None:
            if (custom_id := custom_id_of(line)) is not None:
                self._firsts.setdefault(custom_id, number)
            number, offset = number + 1, line.end
        self._firsts |= shard.firsts

    def first_line(self, custom_id: str) -> int:
        return self._firsts.get(custom_id, 0)

    def check_unchanged(self) -> None:
        """Not checked for a shard alone."""


async def answer_shard(job: Job, journal: ShardJournal, shard: Shard, sender: Sender, plan: Plan) -> None:
    """Answer the lines that the journal lacks. Raises JobError and OSError."""
    with closing(LineFile(job.input, MOST_LINE_BYTES)) as lines:
        index: Any = _ShardIndex(lines, shard)
        ours: Any = _ShardLines(lines, shard)
        answers: Any = journal
        await Runner(index, ours, answers, sender, plan).run()


def write_part(job: Job, shard: Shard, journal: ShardJournal) -> None:
    """Write the file of a shard, whole or not at all. Raises OSError."""
    text = b"".join(journal.answers[line] for line in sorted(journal.answers))
    new = job.part(shard.number).with_suffix(f".{os.getpid()}.new")
    try:
        with new.open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(job.part(shard.number))
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    make_names_durable(job.folder)


def finish(job: Job) -> int:
    """Join all parts to the output. Returns how many of its lines are failures.

    Raises JobError where a line is missing or doubled, and OSError.
    """
    new = job.output.with_name(f"{job.output.name}.new")
    seen, num_failed = bytearray(job.shards[-1].last + 1 if job.shards else 1), 0
    with new.open("wb") as file:
        for shard in job.shards:
            for raw in job.part(shard.number).read_bytes().splitlines(keepends=True):
                found = parse_answer(job.name, raw)
                if found is None or seen[found[0]] or not shard.first <= found[0] <= shard.last:
                    raise JobError(f"{job.part(shard.number)} has a line that is not its own: delete it, then go on")
                seen[found[0]] = 1
                num_failed += found[1]
                file.write(raw)
        if sum(seen) != job.num_lines:
            raise JobError(f"the parts have {sum(seen)} of {job.num_lines} lines: delete {job.folder} to begin anew")
        file.flush()
        os.fsync(file.fileno())
    new.replace(job.output)
    make_names_durable(job.output.parent)
    shutil.rmtree(job.folder)
    return num_failed


async def unless_gone(work: Awaitable[None], is_gone: Callable[[], bool], period_s: float = 0.5) -> bool:
    """Wait for the work, or cancel it once the server is gone. Returns whether it was done."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=period_s)
            if not task.done() and is_gone():
                return False
        task.result()
        return True
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
