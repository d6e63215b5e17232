"""What every measurement ends in: rows, the tables that people read, and one JSON object for scripts.

The rules live here once: how samples become percentiles, how a table looks, what a result must say about the machine
that it was measured on, and that rows which were measured are never lost, whatever fails afterwards. What a row means
is its command's business. `BenchError` is the one error of this package: a sentence for the user, exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from host.version import package_version, version

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

PERCENTILE_RULE = (
    "Percentiles: pQ is the sample at index min(int(Q / 100 * n), n - 1) of the n samples in ascending order, "
    "without interpolation."
)


class BenchError(ValueError):
    """A measurement that cannot be made or kept; the message is one sentence for the user."""


# ----------------------------------------------------------------------------------------------------------- statistics


def percentile(ordered: Sequence[float], q: float) -> float:
    """TGI's index rule on samples in ascending order, at least one; `q` is in percent."""
    return ordered[min(int(q / 100 * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """Samples of one quantity in the six numbers of a row, in the samples' unit."""

    count: int
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> SampleSummary:
        """The summary of some samples in any order. Raises ValueError without samples."""
        if not samples:
            raise ValueError("no samples")
        ordered = sorted(samples)
        points = [percentile(ordered, q) for q in (50, 90, 99)]
        return cls(len(ordered), statistics.fmean(ordered), ordered[0], ordered[-1], *points)


def percentile_notes(num_samples: int) -> list[str]:
    """What a reader must know about percentiles of this many samples."""
    if num_samples >= 100:
        return [PERCENTILE_RULE]
    maximum = "the maximum" if percentile(range(num_samples), 99) == num_samples - 1 else "nearly the maximum"
    return [PERCENTILE_RULE, f"With {num_samples} samples a row, p99 is {maximum}."]


# --------------------------------------------------------------------------------------------------------------- tables


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, centred: bool = False) -> str:
    """A Markdown table with padded columns, without a final newline.

    Plain: cells to the left, equal neighbours in the first column shown once, as TGI's benchmark prints it. Centred:
    `:---:` rules, every cell shown, as vLLM's published tables are written.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [headers, *cells]) for column in range(len(headers))]
    if centred:
        rule = "|" + "|".join(f" :{'-' * (width - 2)}: " for width in widths) + "|"
        return "\n".join([_line(headers, widths, _centre), rule, *(_line(row, widths, _centre) for row in cells)])
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([_line(headers, widths, str.ljust), rule, *(_line(r, widths, str.ljust) for r in _merged(cells))])


def _line(cells: Sequence[str], widths: Sequence[int], pad: Callable[[str, int], str]) -> str:
    return "| " + " | ".join(pad(cell, width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _centre(text: str, width: int) -> str:
    """`str.center` puts an odd space now left, now right; the published tables always put it right."""
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)


def _merged(rows: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    previous = None
    for row in rows:
        yield ["", *row[1:]] if row[0] == previous else row
        previous = row[0]


# -------------------------------------------------------------------------------------------------------------- context


@dataclass(frozen=True)
class RunContext:
    """Everything that a reader needs to judge a number, or to measure it again."""

    command: str
    model: str
    device: str
    dtype: str
    num_shard: int | Sequence[int]  # several: one after the other
    threads: int  # intra-op threads of each shard; 0: not known, for a server that is not ours
    quantize: str | None
    versions: Mapping[str, str]
    commit: str | None
    hardware: Mapping[str, Any]
    date: str
    arguments: Mapping[str, Any]
    work: Mapping[str, Any]  # what must be equal for two results to be comparable

    @classmethod
    def gather(
        cls,
        command: str,
        *,
        model: str,
        device: str,
        dtype: str,
        num_shard: int | Sequence[int],
        threads: int,
        quantize: str | None,
        arguments: Mapping[str, Any],
        work: Mapping[str, Any],
    ) -> RunContext:
        """The context of a run that begins now on this machine."""
        return cls(
            command=command,
            model=model,
            device=device,
            dtype=dtype,
            num_shard=num_shard,
            threads=threads,
            quantize=quantize,
            versions=versions(),
            commit=commit(),
            hardware=hardware(device),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            arguments=arguments,
            work=work,
        )

    @property
    def machine(self) -> str:
        """What computed, in a few words for titles: the GPU, or the CPU with its cores."""
        return f"{self.hardware['cpu']}, {self.hardware['cores']}" if self.device == "cpu" else self.device

    def lines(self) -> list[str]:
        """The context as one Markdown line for people."""
        counts = [self.num_shard] if isinstance(self.num_shard, int) else self.num_shard
        number = " and ".join(map(str, counts)) if any(counts) else "an unknown number of"
        shards = f"{number} shard{'s' if counts != [1] else ''}"
        threads = f" x {self.threads} threads" if self.threads else ""
        quantize = f", {self.quantize}" if self.quantize and self.quantize != "dense" else ""
        machine = ", ".join(str(value) for value in self.hardware.values() if value)
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"{self.model} on {self.device}, {self.dtype}{quantize}, {shards}{threads}; {machine}; {software}; "
            f"commit {self.commit or 'unknown'}; {self.date}."
        ]


def arguments_of(args: argparse.Namespace) -> dict[str, Any]:
    """A command's arguments in a form that JSON has."""
    return {name: _plain(value) for name, value in sorted(vars(args).items())}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def versions() -> dict[str, str]:
    """Versions of what decides speed. Reads metadata only: importing torch takes seconds."""
    return {"lockstep": version(), "python": platform.python_version(), "torch": package_version("torch")}


def commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ from it; None for an installed package."""
    if not (ROOT / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def hardware(device: str) -> dict[str, Any]:
    """CPU, cores that this process may use, memory, and the GPU if that is what computed."""
    return {
        "cpu": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB",
        "gpu": None if device == "cpu" else device,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# --------------------------------------------------------------------------------------------------------------- result


@dataclass
class Result:
    """Rows as they are measured, with the context and the notes that a reader needs."""

    context: RunContext
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # further top-level keys of the JSON
    failure: str | None = None  # why there are no more rows

    def to_json(self) -> dict[str, Any]:
        """One object: the context's fields at the top level, then the rows."""
        ends = {"failure": self.failure} if self.failure else {}
        return {**asdict(self.context), **self.extra, "rows": self.rows, "notes": self.notes, **ends}


def above_limit_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of rows that were faster than their limit; nothing where none was."""
    above = [row["percent_of_limit"] for row in rows if (row.get("percent_of_limit") or 0.0) > 100]
    if not above:
        return []
    return [
        f"**Above its limit**: {len(above)} of {len(rows)} rows, up to {max(above):.1f} %, which cannot be: the device "
        "was slower while its ceilings were measured, or the floor is too high. Measure again."
    ]


def footer(result: Result) -> str:
    """The Markdown after the tables: context, notes, and what went wrong."""
    failure = [f"**Incomplete**: {result.failure}"] if result.failure else []
    return "\n".join(f"- {line}" for line in [*result.context.lines(), *result.notes, *failure])


def prepare_output(output_dir: Path | None) -> None:
    """Refuse a folder that cannot be written before anything is measured."""
    if output_dir is None:
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise _unwritable(output_dir, error) from None


def save(result: Result, markdown: str, output_dir: Path | None) -> None:
    """Write `result.md` and `result.json`, each whole or not at all. Raises BenchError."""
    if output_dir is None:
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(output_dir / "result.md", markdown.rstrip("\n") + "\n")
        write_atomically(output_dir / "result.json", json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise _unwritable(output_dir, error) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file by `content` in one step, so that a full disk leaves the old file. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _unwritable(output_dir: Path, error: OSError) -> BenchError:
    cause = error.strerror or str(error)
    return BenchError(f"cannot write results to {output_dir}: {cause}; give another --output or free some space")


def show(text: str, as_json: str, path: Path | None) -> None:
    """Print the text, then the JSON as the last line; on a terminal, where nobody reads that line, where it is instead.

    path: the file that has the JSON, None without one. A reader who leaves early, as `head` does, is no error.
    """
    if sys.stdout.isatty():
        where = "with --output DIR, or on the last line in a pipe or a file." if path is None else str(path)
        as_json = f"\nAs JSON: {where}"
    try:
        print(f"{text}\n{as_json}", flush=True)
    except BrokenPipeError:
        forget_reader()


def forget_reader() -> None:
    """Send what is still to be printed nowhere, because nobody reads standard output any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
