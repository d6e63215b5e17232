"""What is done of a job, so that a crash loses no answer and no line is answered twice.

The output is its own journal: each line of it names the input line that it answers (`lines.py`). The file beside it,
`OUTPUT.journal`, is a checkpoint that saves reading all of the output again. About once a second the outputs' bytes are
made durable, then the checkpoint is written under another name, made durable, and renamed over the last one: so it
never counts a line that is not there. A job that is resumed

* reads the checkpoint: where to go on in the input, which lines before that were under way, how long the outputs were;
* reads what the outputs have beyond that, keeps the whole lines of this job and cuts the rest off: a torn last line, or
  the zeros that a power cut leaves;
* goes on with the lines that no kept line answers.

A checkpoint grows with the requests that are under way and those that are answered between two checkpoints, and with
nothing else. Locks on the output and on the errors, which the kernel releases with the process, keep a second process
out. Left out: reading the input (`lines.py`) and sending requests (`runner.py`).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from router.jobs.input_index import InputIndex
from router.jobs.lines import InputChanged, JobError, naming_file, parse_answer

MODE = 0o666  # of new files, less the user's umask
VERSION = 1
JOB = re.compile("[0-9a-f]{12}")
MOST_LINE_BYTES = 1 << 28  # of an output, far beyond what any answer has


@dataclass
class State:
    """The content of a checkpoint. Offsets and lengths are in bytes; `under_way` is line -> offset.

    answered: lines that the outputs answer already, of those that are under way or come yet. A job that was killed
    finds them, and it may be killed again before it has passed them all.
    """

    job: str
    sha256: str
    num_lines: int
    next_line: int = 1
    next_offset: int = 0
    under_way: dict[int, int] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    output_bytes: int = 0
    errors_bytes: int | None = None  # None where errors are in the output
    completed: int = 0
    failed: int = 0
    adapters: dict[str, str] = field(default_factory=dict)  # name -> key of the content that its answers are of
    is_complete: bool = False

    def to_json(self) -> bytes:
        """As a file holds it."""
        lists = {"under_way": sorted(self.under_way.items()), "answered": sorted(self.answered)}
        return orjson.dumps(
            {"version": VERSION, **asdict(self), **lists}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        )

    @staticmethod
    def of_json(raw: bytes) -> State:
        """Raises ValueError for what `to_json` did not write."""
        found: dict[str, Any] = orjson.loads(raw)
        try:
            if found.pop("version") != VERSION:
                raise ValueError("another version wrote it")
            state = State(**found | {"under_way": dict(found["under_way"]), "answered": set(found["answered"])})
            state.check()
            return state
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from None

    def check(self) -> None:
        """Raises ValueError or TypeError for values that no job has."""
        if not JOB.fullmatch(self.job) or type(self.is_complete) is not bool:
            raise ValueError("`job` or `is_complete` is none")
        numbers = [self.num_lines, self.next_line, self.next_offset, self.output_bytes, self.completed, self.failed]
        numbers += [] if self.errors_bytes is None else [self.errors_bytes]
        if not all(isinstance(text, str) for pair in self.adapters.items() for text in pair):
            raise ValueError("`adapters` are no names and keys")
        for one in (*numbers, *self.under_way.keys(), *self.under_way.values(), *self.answered):
            if type(one) is not int or one < 0:
                raise ValueError(f"{str(one)[:40]!r} is no number of lines or bytes")

    @property
    def furthest(self) -> int:
        """The largest offset in the input."""
        return max(self.next_offset, *self.under_way.values(), 0)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One moment of a job. content: None where nothing has changed since the last one."""

    number: int
    content: bytes | None


def journal_path(output: Path) -> Path:
    """The checkpoint beside an output."""
    return output.with_name(f"{output.name}.journal")


class Journal:
    """An output, its errors file if there is one, and the checkpoint; open for one job. Raises JobError and OSError."""

    def __init__(self, output: Path, errors: Path | None, index: InputIndex) -> None:
        self.state = State(secrets.token_hex(6), index.sha256, index.num_lines)
        self._output, self._errors, self._index = output, errors, index
        self._paths = [output, *([errors] if errors is not None else [])]
        self._files: list[int] = []  # their descriptors
        self._is_changed = False
        self._held: set[str] = set()  # adapters that a checkpoint has, or is about to
        self._saving = threading.Lock()
        self._num_snapshots = self._num_saved = 0
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def num_left(self) -> int:
        """Lines without an answer."""
        return self.state.num_lines - self.state.completed - self.state.failed

    def close(self) -> None:
        """Release the files, once nothing is being saved."""
        with self._saving:
            while self._files:
                os.close(self._files.pop())

    # ------------------------------------------------------------------------------------------------- the beginning

    def _open(self) -> None:
        for path in self._paths:
            if path.exists() and not path.is_file():
                raise JobError(_of_no_job(path))
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE))
            try:
                fcntl.flock(self._files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JobError(f"another process writes {path}: wait for its end, or end it") from None
        known = self._read_checkpoint()
        for path, file in zip(self._paths, self._files, strict=True):
            if known is None and os.fstat(file).st_size:
                raise JobError(_of_no_job(path))
        if known is None:
            self.state.errors_bytes = 0 if self._errors is not None else None
            self._is_changed = True
            self.save(self.snapshot())
            return
        self._check(known)
        self.state = known
        self._held = set(known.adapters)
        self.state.output_bytes = self._recover(0, known.output_bytes)
        if known.errors_bytes is not None:
            self.state.errors_bytes = self._recover(1, known.errors_bytes)

    def _read_checkpoint(self) -> State | None:
        path = journal_path(self._output)
        try:
            return State.of_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise JobError(f"{path} cannot be read ({error}): {self._anew()}") from None

    def _check(self, known: State) -> None:
        """Raises JobError where the checkpoint is not of this input and these outputs."""
        index, journal = self._index, journal_path(self._output)
        if (known.sha256, known.num_lines) != (index.sha256, index.num_lines):
            raise InputChanged(
                f"{index.path} is not the input that {self._output} was begun with: put that back, or {self._anew()}"
            )
        if known.furthest > index.num_bytes:
            raise JobError(f"{journal} speaks of bytes that {index.path} does not have: {self._anew()}")
        if (known.errors_bytes is None) != (self._errors is None):
            said = "without" if known.errors_bytes is None else "with"
            raise JobError(
                f"{self._output} was begun {said} a file for errors: give the same options, or {self._anew()}"
            )
        sizes = (known.output_bytes, known.errors_bytes or 0)
        for path, file, least in zip(self._paths, self._files, sizes, strict=False):
            if os.fstat(file).st_size < least:
                raise JobError(f"{path} is shorter than {journal} says: put the whole file back, or {self._anew()}")

    def _anew(self) -> str:
        return f"delete {self._output} and {journal_path(self._output)} to begin anew"

    def _recover(self, index: int, offset: int) -> int:
        """Keep the whole lines of this job beyond `offset` and cut the rest off. Returns where the file ends then."""
        with os.fdopen(os.dup(self._files[index]), "rb") as file:
            file.seek(offset)
            while (raw := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
                found = parse_answer(self.state.job, raw)
                if found is None:
                    break
                number, is_failure = found
                self.state.answered.add(number)
                self._count(is_failure)
                offset += len(raw)
        os.ftruncate(self._files[index], offset)
        self._is_changed = True
        return offset

    # ------------------------------------------------------------------------------------------------------ the work

    def begun(self, line: int, offset: int, end: int) -> None:
        """A line was read, and what is behind it comes next."""
        if line >= self.state.next_line:
            self.state.next_line, self.state.next_offset = line + 1, end
        self.state.under_way[line] = offset
        self._is_changed = True

    def hold_to(self, adapter: str, key: str) -> bool:
        """Answers of one adapter are all of one content. Returns whether the next checkpoint is the first to say so.

        Raises JobError where the adapter has another than earlier answers of this job.
        """
        known = self.state.adapters.setdefault(adapter, key)
        if known != key:
            raise JobError(
                f"the adapter {adapter} is not the one that {self._output} was begun with: put its files back, or "
                f"{self._anew()}"
            )
        is_new = adapter not in self._held
        self._held.add(adapter)
        self._is_changed |= is_new
        return is_new

    def passed(self, line: int) -> None:
        """A line is blank, or an earlier run has answered it."""
        self._is_changed = True
        del self.state.under_way[line]
        self.state.answered.discard(line)

    def write(self, line: int, text: bytes, *, is_failure: bool) -> None:
        """A line is answered. Raises OSError; what was written of the line by then counts as nothing."""
        index = 1 if is_failure and self._errors is not None else 0
        at = (self.state.errors_bytes or 0) if index else self.state.output_bytes
        left = memoryview(text)
        with naming_file(self._paths[index]):
            while left:
                num_written = os.pwrite(self._files[index], left, at)
                left, at = left[num_written:], at + num_written
        if index:
            self.state.errors_bytes = at
        else:
            self.state.output_bytes = at
        self._count(is_failure)
        del self.state.under_way[line]
        self._is_changed = True

    def _count(self, is_failure: bool) -> None:
        if is_failure:
            self.state.failed += 1
        else:
            self.state.completed += 1

    def snapshot(self, *, is_complete: bool = False) -> Checkpoint:
        """What there is to save now. To be called by the thread that writes."""
        self.state.is_complete = is_complete
        is_new, self._is_changed = self._is_changed or is_complete, False
        self._num_snapshots += 1
        return Checkpoint(self._num_snapshots, self.state.to_json() if is_new else None)

    def save(self, checkpoint: Checkpoint) -> None:
        """Make durable what a checkpoint speaks of, then the checkpoint; may run in a thread. Raises OSError."""
        with self._saving:
            if checkpoint.content is None or checkpoint.number < self._num_saved:
                return
            for path, file in zip(self._paths, self._files, strict=True):
                with naming_file(path):
                    os.fdatasync(file)
            replace_durably(journal_path(self._output), checkpoint.content)
            self._num_saved = checkpoint.number


def _of_no_job(path: Path) -> str:
    return f"{path} exists and belongs to no job: give another name, or move it away"


def temporary_path(path: Path) -> Path:
    """The name under which a file is written before it replaces the old one."""
    return path.with_name(f"{path.name}.new")


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file so that, whatever happens, either the old content is there or the new. Raises OSError."""
    new = temporary_path(path)
    try:
        with naming_file(new):
            _write_durably(new, content)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    make_names_durable(path.parent)


def make_names_durable(folder: Path) -> None:
    """Make the names of files in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_durably(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
