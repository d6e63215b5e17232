"""The folder of files and batches: what is in it, whose it is, and how much more may come.

    DIR/lock                 held by the router that serves it
    DIR/files/ID.data        a file's bytes; ID.json says what it is, and is written last
    DIR/files/ID.data.journal  while a batch writes its output (`router/jobs/journal.py`)
    DIR/batches/ID.json      a batch

An ID is `file-` or `batch_` and 24 hexadecimal digits; what is written beside a file begins with its name.

Everything is readable by the server's user alone. What is known is in memory, and on the disk before anybody is told of
it; what a kill left half done is removed at the next start, by names of this form alone: whatever else is there stays.
Ids are looked up, never put into a path as they come.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter
from pydantic import ValidationError as SchemaError

from router.batches.documents import BatchRecord, FileRecord
from router.errors import NotFound, Unavailable, ValidationError
from router.fairness import may_take
from router.jobs.journal import journal_of, replace_durably
from router.openai.answers import now

PATIENCE_S = 10.0  # for a router that ends to leave the folder
FILE_MODE, FOLDER_MODE = 0o600, 0o700
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
OUTPUTS = 2  # files of a batch: answers, and errors
Record = dict[str, Any]
OURS = re.compile(
    r"((?:file-|batch_)[0-9a-f]{24})(\.json|\.json\.new|\.part|\.data|\.data\.journal|\.data\.journal\.new)"
)
WHOLE = {"files": (".json", ".data"), "batches": (".json",)}  # what is there of one that is whole
FILE_RECORD, BATCH_RECORD = TypeAdapter(FileRecord), TypeAdapter(BatchRecord)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """max_files: files, and batches, of one owner. Sizes are in bytes."""

    max_file_bytes: int
    max_files: int
    max_bytes: int


class Store:
    """All files and batches. Raises ValueError where the folder cannot be used, in one sentence.

    Records are OpenAI's objects, with `owner` (the name of an API key; "" without keys) and what `_` begins beside it.
    """

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        self.bounds = bounds
        self.folder = folder
        self.files: dict[str, Record] = {}  # oldest first
        self.batches: dict[str, Record] = {}
        self.writing: dict[str, Callable[[], int]] = {}  # what batches that have begun take, by their ids
        self._reserved: dict[int, tuple[str, int]] = {}  # for uploads under way: whose, and how much
        self._kept: Counter[str] = Counter()  # bytes of whole files, by owner
        self._numbers = itertools.count(1)
        self._lock = -1
        try:
            for one in (folder / "files", folder / "batches"):
                one.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._lock = _locked(folder / "lock")
            self._load()
        except BlockingIOError:
            said = "another server uses it: end that one, or give another folder"
            raise ValueError(f"batch_dir {folder} cannot be used: {said}") from None
        except OSError as error:
            self.close()
            said = error.strerror or str(error)
            raise ValueError(f"batch_dir {folder} cannot be used: {said}: give a folder that may be written") from None

    def close(self) -> None:
        """Leave the folder to others."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _load(self) -> None:
        files, batches = (self.folder / "files"), (self.folder / "batches")
        found = list(_records(batches, BATCH_RECORD))
        self.batches = {one["id"]: one for one in sorted(found, key=_age)}
        self.files = {one["id"]: one for one in sorted(_records(files, FILE_RECORD), key=_age)}
        for one in self.files.values():
            self._kept[one["owner"]] += one["bytes"]
        known = (one["_number"] for one in (*self.files.values(), *found))
        self._numbers = itertools.count(max(known, default=0) + 1)
        growing = {one[name] for one in found if one["status"] not in TERMINAL for name in ("_output", "_errors")}
        _clear(files, lambda id: id in growing)
        _clear(batches, lambda id: False)

    def next_number(self) -> int:
        """For a new file or batch: they are listed in this order, whatever the clock says."""
        return next(self._numbers)

    # ------------------------------------------------------------------------------------------------------- bounds

    @property
    def num_bytes(self) -> int:
        """Of all files, those that are being sent, and what batches write and may have to write yet."""
        reserved = sum(size for _, size in self._reserved.values())
        return self._kept.total() + reserved + sum(size() for size in self.writing.values())

    def _num_bytes_of(self, owner: str) -> int:
        grown = sum(size() for id, size in self.writing.items() if self.batches[id]["owner"] == owner)
        reserved = sum(size for whose, size in self._reserved.values() if whose == owner)
        return grown + reserved + self._kept[owner]

    @property
    def free(self) -> int:
        """How many more bytes may come."""
        return max(0, self.bounds.max_bytes - self.num_bytes)

    @property
    def is_full(self) -> bool:
        """Whether outputs may not grow any more."""
        return not self.free

    def has_room(self, owner: str, size: int) -> bool:
        """Whether an owner may have so many more bytes. Where there are keys, none may fill the folder alone."""
        free, held = self.free, self._num_bytes_of(owner)
        return size <= free and (not owner or may_take(size, held=held, free=free, weight=1.0))

    @contextmanager
    def reserved(self, owner: str, size: int) -> Iterator[None]:
        """Keep room for one more file while it comes. Raises ValidationError where there is none."""
        self._check_files(owner, 1)
        if not self.has_room(owner, size):
            sentence = f"a file of {size} bytes does not fit into the {self.free} that are left of `batch_max_bytes`"
            raise ValidationError(f"{sentence}: delete files, or send a smaller one")
        key = secrets.randbits(64)
        self._reserved[key] = (owner, size)
        try:
            yield
        finally:
            del self._reserved[key]

    def _check_files(self, owner: str, num_more: int) -> None:
        """Raises ValidationError where an owner may not have so many more files. Batches under way make theirs yet."""
        num_files = sum(one["owner"] == owner for one in self.files.values())
        num_files += sum(whose == owner for whose, _ in self._reserved.values())
        num_outputs = OUTPUTS * sum(one["status"] not in TERMINAL for one in self._batches_of(owner))
        if num_files + num_outputs + num_more > self.bounds.max_files:
            said = f"you keep {num_files} files" + (f" and await {num_outputs} of batches" if num_outputs else "")
            remedy = "delete some" + (", or wait for batches to end" if num_outputs else "")
            raise ValidationError(f"{said}, of `batch_max_files` {self.bounds.max_files}: {remedy}")

    # -------------------------------------------------------------------------------------------------------- files

    def data_path(self, id: str) -> Path:
        """Where a file's bytes are. id: of ours."""
        return self.folder / "files" / f"{id}.data"

    def part_path(self, id: str) -> Path:
        """Where they are while they come."""
        return self.folder / "files" / f"{id}.part"

    def file(self, owner: str, id: str) -> Record:
        """An owner's file. Raises NotFound."""
        found = self.files.get(id)
        if found is None or found["owner"] != owner:
            raise NotFound(f"there is no file {id[:100]}: GET /v1/files lists yours")
        return found

    def write_file(self, owner: str, id: str, filename: str, purpose: str) -> Record:
        """Write what a file is, whose bytes are there and durable; may run in a thread. Raises OSError."""
        record: Record = {
            "id": id,
            "object": "file",
            "bytes": self.data_path(id).stat().st_size,
            "created_at": now(),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
            "owner": owner,
            "_number": self.next_number(),
        }
        self._save("files", record)
        return record

    def add_file(self, record: Record) -> Record:
        """Know a file that was written. Returns it."""
        if record["id"] not in self.files:  # a batch that was killed at its very end makes its files known again
            self._kept[record["owner"]] += record["bytes"]
        self.files[record["id"]] = record
        return record

    def delete_file(self, owner: str, id: str) -> None:
        """Raises NotFound, ValidationError where a batch needs it, and OSError."""
        self.file(owner, id)
        for batch in self.batches.values():
            if batch["input_file_id"] == id and batch["status"] not in TERMINAL:
                raise ValidationError(f"the batch {batch['id']} reads this file: cancel it first, or wait for its end")
        (self.folder / "files" / f"{id}.json").unlink(missing_ok=True)
        self.data_path(id).unlink(missing_ok=True)
        self._kept[owner] -= self.files.pop(id)["bytes"]

    # ------------------------------------------------------------------------------------------------------ batches

    def batch(self, owner: str, id: str) -> Record:
        """An owner's batch. Raises NotFound."""
        found = self.batches.get(id)
        if found is None or found["owner"] != owner:
            raise NotFound(f"there is no batch {id[:100]}: GET /v1/batches lists yours")
        return found

    def check_one_more_batch(self, owner: str) -> None:
        """Raises ValidationError where there is no room for the files of one more."""
        self._check_files(owner, OUTPUTS)

    def add_batch(self, record: Record) -> None:
        """Know a new one, which was saved; of those that are over, the owner's oldest makes room."""
        mine = self._batches_of(record["owner"])
        over = next((one for one in mine if one["status"] in TERMINAL), None)
        if len(mine) >= self.bounds.max_files and over is not None:
            with suppress(OSError):  # the next start knows one more
                (self.folder / "batches" / f"{over['id']}.json").unlink(missing_ok=True)
            del self.batches[over["id"]]
            self.writing.pop(over["id"], None)
        self.batches[record["id"]] = record

    def _batches_of(self, owner: str) -> list[Record]:
        return [one for one in self.batches.values() if one["owner"] == owner]

    def num_bytes_of_outputs(self, record: Record) -> int:
        """What an earlier server has left of a batch's outputs."""
        paths = [self.data_path(record[name]) for name in ("_output", "_errors")]
        return sum(path.stat().st_size for path in paths if path.exists())

    def save_batch(self, record: Record) -> None:
        """Write how a batch is now. Raises OSError."""
        self._save("batches", record)

    def forget_journals(self, record: Record) -> None:
        """A batch is over: remove what its outputs no longer need, and outputs that are empty."""
        self.writing.pop(record["id"], None)
        for id in (record["_output"], record["_errors"]):
            journal_of(self.data_path(id)).unlink(missing_ok=True)
            if id not in self.files:
                self.data_path(id).unlink(missing_ok=True)

    def _save(self, kind: str, record: Record) -> None:
        path = self.folder / kind / f"{record['id']}.json"
        replace_durably(path, orjson.dumps(record), FILE_MODE)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"


def disk_trouble(error: OSError) -> Unavailable:
    """What a client is told when the folder fails; the log says more."""
    logger.error("batch_dir: %s", error)
    return Unavailable(f"The server cannot write its files ({error.strerror}): try again later", 60)


def _records(folder: Path, kind: TypeAdapter[Any]) -> Iterator[Record]:
    for path in folder.glob("*.json"):
        try:
            raw = path.read_bytes()
            kind.validate_json(raw, strict=True)
            found: Record = {"_room": 0, **orjson.loads(raw)}  # an earlier version set no room aside
            if found["id"] != path.stem:
                raise ValueError(f"it is of {found['id']}")
        except (OSError, ValueError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, SchemaError) else error
            logger.error("%s is left out, as it cannot be read: %s", path, reason)
            continue
        if folder.name == "batches" or path.with_suffix(".data").is_file():
            yield found


def _clear(folder: Path, is_growing: Callable[[str], bool]) -> None:
    """Remove what a kill has left half done, and nothing that is not ours."""
    foreign = []
    for path in sorted(folder.iterdir()):
        if (ours := OURS.fullmatch(path.name)) is None:
            foreign.append(path.name)
            continue
        id, kind = ours.groups()
        is_whole = kind in (".json", ".data") and all(
            path.with_name(f"{id}{one}").exists() for one in WHOLE[folder.name]
        )
        is_its_output = kind in (".data", ".data.journal") and is_growing(id)
        if not (is_whole or is_its_output):
            with suppress(OSError):
                path.unlink()
    if foreign:
        logger.warning("%s has %d names that are no server's, such as %r: they stay", folder, len(foreign), foreign[0])


def _age(record: Record) -> int:
    age: int = record["_number"]
    return age


def _locked(path: Path) -> int:
    """A descriptor that holds the lock. Raises OSError; BlockingIOError where another process has it for too long."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    limit = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > limit:
                os.close(file)
                raise
            time.sleep(0.05)
