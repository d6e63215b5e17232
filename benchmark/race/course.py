"""The course of a race: its cells one after the other, each with a time limit and the machine's ceilings beside it.

Nothing runs beside anything else. What a cell's commands print goes into one log as it comes, and what came of the cell
into the records as soon as it has ended; a cell that fails, hangs or crashes costs its own time. Ceilings are measured
right before and right after a cell, and the better of both counts; of reads the best of all cells so far, for they do
not depend on what is multiplied, and a shared machine shows its bandwidth at times only.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from benchmark.cost.devices import Gauge
from benchmark.process import DONE, run_limited, started
from benchmark.race.cells import SERVED, Cell, Records
from benchmark.race.limits import Limits
from benchmark.race.systems import Command, System, Task, finished, load_generator, ours, rows_of
from benchmark.result import BenchError
from benchmark.terminal import Progress

MAKE_SECONDS = 3600.0  # of a model, which is made once
LEAST_REQUESTS = 3
MOST_LETTERS = 160
POLL_S = 0.5
TELLING = ("error", "not supported", "unsupported", "failed to")
SOURCE = "transformers"  # the folder of a shape's model as that library writes it
UNFINISHED = f"{SOURCE}.partial"
RAISED = re.compile(r"\b\w*(?:Error|Exception): \S.*")
WEIGHTS = (".gguf", ".safetensors", ".bin")
FAILURES = (ArithmeticError, HTTPException, OSError, ValueError)  # by which a cell's commands, answers and files fail


class UnmadeError(BenchError):
    """A model that its system cannot make."""


class CutError(BenchError):
    """A command that was stopped because its time was over."""


@dataclass(frozen=True)
class Settings:
    """Of all cells. seconds: of a cell at most; runs: of a batch; threads: of a system."""

    seconds: float
    runs: int
    threads: int
    keep_models: bool = True


@dataclass(frozen=True)
class Folders:
    """Where models are, what commands print, and by which name or path each shape is found."""

    models: Path
    log: Path
    shapes: Mapping[str, str]


class Course:
    """The cells of a race on their way."""

    def __init__(
        self,
        systems: Sequence[System],
        records: Records,
        limits: Limits,
        gauges: Mapping[str, Gauge],
        folders: Folders,
        settings: Settings,
    ) -> None:
        """gauges: as of limits.py; none where the ceilings cannot be measured."""
        self._systems = {system.name: system for system in systems}
        self._records = records
        self._limits = limits
        self._gauges = gauges
        self._read = 0.0  # bytes a second
        self._folders = folders
        self._log = folders.log
        self._settings = settings

    def run(self, cells: Sequence[Cell], view: Progress) -> Iterator[Cell]:
        """Run the cells, each a stage of `view`, and yield each that has ended. Raises BenchError on a full disk."""
        for place, cell in enumerate(cells):
            view.begin()
            began = time.monotonic()
            found = self._outcome(cell)
            self._records.add(cell, {**found, "seconds": round(time.monotonic() - began, 1)})
            view.say(f"{cell}: {sentence(found)}")
            yield cell
            if not self._settings.keep_models:
                self._discard(cell, cells[place + 1 :])

    def _outcome(self, cell: Cell) -> dict[str, Any]:
        if problem := self._records.hopeless(cell):
            return {"problem": problem}
        try:
            return self._measured(cell)
        except UnmadeError as error:
            return {"problem": str(error), "unmade": True}
        except CutError as error:
            return {"problem": str(error), "cut": True}
        except BenchError as error:
            return {"problem": str(error)}
        except FAILURES as error:
            return {"problem": f"{type(error).__name__}: {error}"}

    def _measured(self, cell: Cell) -> dict[str, Any]:
        system = self._systems[cell.system]
        source, model = self.make_model(cell)
        stored = None if model == source else stored_bytes(model)
        port = free_port() if cell.kind == SERVED else 0
        task = Task(cell, source, model, self._settings.runs, self._settings.threads, self._limits.kv_bytes(cell), port)
        gauge = self._gauges.get(self._limits.product_kind(cell))
        before = None if gauge is None else gauge.measure()
        found = self._served(system, task) if cell.kind == SERVED else self._timed(system, task)
        if gauge is None or before is None:
            return found
        ceilings = before.best_of(gauge.measure())
        self._read = max(self._read, ceilings.bytes_per_second)
        return {**found, **self._limits.figures(cell, stored, replace(ceilings, bytes_per_second=self._read))}

    def make_model(self, cell: Cell) -> tuple[Path, Path]:
        """The model of a cell as transformers has it, and as its system does, made where they are not there yet.

        Raises UnmadeError.
        """
        system = self._systems[cell.system]
        folder = self._folders.models / cell.shape / system.models_of
        run = partial(self._run, seconds=MAKE_SECONDS)
        try:
            source = self._source(cell.shape)
            return source, system.make_model(source, folder, cell.format, run)
        except (BenchError, OSError) as error:
            raise UnmadeError(f"no model: {error}") from None

    def _timed(self, system: System, task: Task) -> dict[str, Any]:
        printed = self._run(system.steps(task), self._settings.seconds)
        return dict(system.times(printed, task))

    def _served(self, system: System, task: Task) -> dict[str, Any]:
        command = system.server(task)
        until = time.monotonic() + self._settings.seconds
        with self._log.open("ab") as file:
            start = self._begin(file.fileno(), command)
            folder = command.folder or self._log.parent
            with started(command.arguments, command.environment, file.fileno(), folder=folder) as server:
                while not answers(task.port):
                    if server.poll() is not None:
                        raise BenchError(f"its server ended: {self._last_words(start)}")
                    if time.monotonic() > until:
                        raise CutError(f"its server was not ready after {self._settings.seconds:.0f} s")
                    time.sleep(POLL_S)
                requests = max(LEAST_REQUESTS, 2 * task.cell.batch_size)
                printed = self._run(load_generator(task, requests, system.api), until - time.monotonic())
        return served_figures(printed)

    def _source(self, shape: str) -> Path:
        """The model as transformers has it, made where it is not there yet."""
        folder = self._folders.models / shape / SOURCE
        if not folder.exists():
            unfinished = folder.with_name(UNFINISHED)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            make = ours("-m", "benchmark.race.model", self._folders.shapes[shape], str(unfinished))
            self._run(make, MAKE_SECONDS)
            finished(unfinished, folder)
        return folder

    def _run(self, command: Command, seconds: float) -> str:
        """What the command printed. Raises BenchError where it failed, CutError where it was stopped."""
        with self._log.open("ab") as file:
            start = self._begin(file.fileno(), command)
            seconds, folder = max(seconds, 1.0), command.folder or self._log.parent
            word = run_limited(command.arguments, command.environment, file.fileno(), seconds, folder=folder)
        if word.startswith("cut"):
            raise CutError(word)
        if word != DONE:
            raise BenchError(f"{word}: {self._last_words(start)}")
        return self._printed(start)

    def _begin(self, log: int, command: Command) -> int:
        """Where in the log the command's own lines begin."""
        variables = " ".join(f"{name}={value}" for name, value in command.environment.items())
        line = f"\n===== {variables} {' '.join(command.arguments)}\n".encode()
        os.write(log, line)
        return self._log.stat().st_size

    def _printed(self, start: int) -> str:
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def _last_words(self, start: int) -> str:
        return why(self._printed(start))

    def _discard(self, cell: Cell, later: Sequence[Cell]) -> None:
        """Remove the models that no later cell needs, and nothing that somebody else has put beside them."""
        formats = {other.format for other in later if other.shape == cell.shape}
        made = set() if cell.format in formats else {system.models_of for system in self._systems.values()}
        folder = self._folders.models / cell.shape
        for name in made if formats else made | {SOURCE, UNFINISHED}:
            shutil.rmtree(folder / name, ignore_errors=True)
        with suppress(OSError):  # it is not empty, or no folder
            folder.rmdir()


def why(printed: str) -> str:
    """Why a command failed, as it says: Python's last exception with a message, else the first line that speaks of an
    error, which the others follow from, else the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in TELLING)]
    found = RAISED.findall(printed)[-1:] or telling or lines[-1:] or [""]
    return str(found[0])[:MOST_LETTERS]


def stored_bytes(model: Path) -> int:
    """Bytes of a model's weights on the disk, a file or a folder."""
    files = [model] if model.is_file() else [path for path in model.rglob("*") if path.suffix in WEIGHTS]
    return sum(path.stat().st_size for path in files)


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether a server there says that it is ready."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):  # not there yet, or another status
        return False


def served_figures(printed: str) -> dict[str, Any]:
    """What a record says of a server, from the row of `serving`. Raises BenchError where not all was answered."""
    row = rows_of(printed)[0]
    try:
        if row["errors"] or row["short"]:
            raise BenchError(f"{row['errors']} of {row['requests']} requests failed, {row['short']} answers were short")
        gaps = row["inter_token_ms"]
        return {
            "tokens_per_second": float(row["output_tokens_per_second"]),
            "ttft_ms": float(row["ttft_ms"]["p50"]),
            "gap_ms": float(gaps["p50"]),
            "gap_p99_ms": float(gaps["p99"]),
        }
    except (KeyError, TypeError):
        raise BenchError("its row lacks figures") from None


def sentence(found: Mapping[str, Any]) -> str:
    """What came of a cell, in a few words."""
    if "problem" in found:
        return str(found["problem"])
    if "tokens_per_second" in found:
        return f"{found['tokens_per_second']:.1f} tokens/s, first token {found['ttft_ms']:.0f} ms"
    return f"prefill {found['prefill_ms']:.1f} ms, decode {found['decode_ms']:.2f} ms a token"
