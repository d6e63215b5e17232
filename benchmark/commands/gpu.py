"""`lockstep-bench gpu`: every figure that is promised of one GPU, in one command and one Markdown file.

Nothing is measured here: the other commands are run one after the other, each in a process of its own with a time
limit, on random weights of real shapes, and what they found is held against its target. A row whose command fails says
why, and the others still run; the file is written anew after each, so that nothing measured is lost. It ends with the
tables of the commands as they printed them.

Floors are those that `plan` prints for the device, from its data sheet or, where there is none, measured first. A
ceiling is that of all bytes and all operations of sequences that run together, however they are divided over steps:
what prompts multiply may hide what decoding reads, in steps that do both. Left out: several GPUs, quantised formats,
and anything about the text.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmark import launch, options
from benchmark.cost import shapes
from benchmark.cost.devices import ceilings_of, machine_at_hand
from benchmark.cost.roofline import Ceilings, ServedModel, ceiling_of
from benchmark.launch import started_command, stop_command
from benchmark.result import ROOT, BenchError, commit, prepare_output, table, versions, write_atomically
from benchmark.terminal import Stage, shown

RESULTS = ROOT / "docs" / "results"
LENGTHS = {"latency": (100, 100), "serving": (128, 128), "offline": (512, 32)}  # tokens of a prompt, and generated
DECODE_PERCENT = {1: 76.0, 32: 75.0}  # least share of the limit that a decode step of these batch sizes reaches
OTHER_DECODE_PERCENT = 68.0  # the same for any other batch size
PREFILL_PERCENT = 63.0  # least share of the limit that a prefill reaches
MOST_STEP_RATIO = 1.03  # time of a decode step from reply to reply / time that the device computes in it
SERVING_PERCENT = 40.0  # least share of the ceiling over HTTP
OFFLINE_PERCENT = 29.0  # least share of the ceiling without HTTP
MOST_READY_SECONDS = 60.0
Found = Mapping[str, Any]  # a command's result.json


class ReportRow(NamedTuple):
    """One line of the summary, in the words that are printed."""

    what: str
    target: str
    measured: str
    verdict: str  # met, missed or failed; empty where there is no target


def judged(what: str, target: str, measured: str, is_met: bool) -> ReportRow:
    """A line whose verdict is that its target was met or missed."""
    return ReportRow(what, target, measured, "met" if is_met else "missed")


@dataclass(frozen=True)
class Measurement:
    """One command of this benchmark, and what its result says, which may be incomplete."""

    title: str
    arguments: Sequence[str]
    rows: Callable[[Found], Iterator[ReportRow]]


@dataclass
class Report:
    """What the measurements have found so far, and the file that it is written to."""

    args: argparse.Namespace
    device: str
    ceilings: Ceilings  # what the device does at best
    rows: list[ReportRow] = field(default_factory=list)
    startups: list[tuple[str, str]] = field(default_factory=list)  # (model, start-up table)
    details: list[tuple[str, str]] = field(default_factory=list)  # (command line, what it printed)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def path(self) -> Path:
        """Where the report is written: `--output`, or a file named after the day and the device."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return Path(self.args.output or RESULTS / f"{self.started_at:%Y-%m-%d}-{slug}.md")

    def save(self) -> None:
        """Write the report to its file, whole or not at all. Raises BenchError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.markdown())
        except OSError as error:
            raise BenchError(f"cannot write {self.path}: {error.strerror}; give another --output") from None

    def markdown(self) -> str:
        """The whole report: context, summary, start-up tables, and what each command printed."""
        minutes = (datetime.now(UTC) - self.started_at).total_seconds() / 60
        software = ", ".join(f"{name} {version}" for name, version in versions().items())
        context = [f"{self.started_at:%Y-%m-%d}", f"commit {commit() or 'unknown'}", software, self.args.dtype]
        parts = [
            f"# {self.device}",
            f"{'; '.join(context)}, random weights; {minutes:.1f} minutes. Floors and ceilings are those of "
            "`lockstep-bench plan`, explained in docs/benchmarking.md; a target is a share of them and no forecast.",
            self.table(),
            *(f"## Start of {model}\n\n```\n{text}\n```" for model, text in self.startups),
            *(f"## `{command}`\n\n````\n{text.rstrip()}\n````" for command, text in self.details),
        ]
        return "\n\n".join(parts) + "\n"

    def table(self) -> str:
        """The summary: one line for each figure."""
        return table(("", "Target", "Measured", "Verdict"), self.rows)


# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    group = parser.add_argument_group("shapes (a name of `plan`, a config.json, or a model folder)")
    group.add_argument("--latency-shape", default="bloomz-7b1-mt", metavar="SHAPE", help="(bloomz-7b1-mt)")
    group.add_argument(
        "--serving-shape", nargs="+", default=["mistral-7b", "chatglm3-6b"], metavar="SHAPE",
        help="(mistral-7b chatglm3-6b)",
    )  # fmt: skip
    group.add_argument("--offline-shape", default="opt-1.3b", metavar="SHAPE", help="(opt-1.3b)")
    _add_sizes(parser.add_argument_group("sizes"))
    parser.add_argument("--dtype", default="bfloat16", choices=list(shapes.DTYPE_BYTES), help="(bfloat16)")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help="(auto)")
    launch.add_kernels_argument(parser)
    parser.add_argument(
        "--limit", type=options.positive, default=150, metavar="S", help="time limit of one command (150)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="(docs/results/DATE-DEVICE.md)")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    for command, (given, generated) in LENGTHS.items():
        group.add_argument(
            f"--{command}-lengths", type=options.at_least_two, nargs=2, default=(given, generated),
            metavar=("IN", "OUT"), help=f"prompt and generated tokens ({given} {generated})",
        )  # fmt: skip
    group.add_argument("-b", "--batch-size", type=options.positive, nargs="+", default=[1, 32], help="latency (1 32)")
    group.add_argument("--runs", type=options.positive, default=5, help="latency, recorded runs per batch size (5)")
    group.add_argument("--concurrency", type=options.positive, default=256, help="serving, streams (256)")
    group.add_argument("--num-prompts", type=options.positive, default=256, help="offline, sequences (256)")


def run(args: argparse.Namespace) -> int:
    """Run every measurement and write the report; 1 when one of them failed. Raises BenchError."""
    served = ServedModel(shapes.find(args.latency_shape).shape, args.dtype)
    for shape in (*args.serving_shape, args.offline_shape):
        shapes.find(shape)  # what is no shape is said before anything is measured
    machine = machine_at_hand(args.device)
    if machine.is_cpu and args.device != "cpu":
        raise BenchError("this machine shows no GPU: give --device cpu to measure its CPU")
    prepare_output(args.output.parent if args.output else RESULTS)
    report = Report(args, machine.device, ceilings_of(machine, served, 1))
    planned = steps(args, report)
    with shown("every figure of one GPU", [Stage(step.title) for step in planned]) as view:
        for step in view.each(planned):
            take(step, report, args.limit)
            report.save()
    print(f"{report.table()}\n\n{report.path}")
    return 1 if any(row.verdict == "failed" for row in report.rows) else 0


def take(step: Measurement, report: Report, limit_s: float) -> None:
    """Run one measurement and enter its rows, or why it failed, into the report."""
    command = f"lockstep-bench {' '.join(step.arguments)}"
    print(command, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        problem = run_command([*step.arguments, "--output", folder], limit_s)
        found, text = _read(Path(folder))
    if startup := found.get("startup"):
        report.startups.append((step.title, startup["table"]))
        report.rows.append(_ready_row(step.title, startup["ready_s"]))
    if text:
        report.details.append((command, text))
    report.rows += step.rows(found)
    if problem:
        report.rows.append(ReportRow(step.title, "", problem, "failed"))


def run_command(arguments: Sequence[str], limit_s: float) -> str | None:
    """Run a command of this benchmark in a process of its own; why it failed, or None."""
    process = started_command(arguments)
    try:
        _, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than {limit_s:g} s: raise --limit"
    finally:
        stop_command(process)
    return _reason(errors) if process.returncode else None


def _reason(errors: str) -> str:
    """The command's own sentence, or the last thing that it wrote, such as an exception."""
    lines = [line for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (said or lines or ["it did not say why"])[-1]


def _read(folder: Path) -> tuple[Found, str]:
    """A command's result as JSON and as Markdown; both empty where it measured nothing."""
    path = folder / "result.json"
    if not path.is_file():
        return {"rows": []}, ""
    return json.loads(path.read_text()), (folder / "result.md").read_text()


# ---------------------------------------------------------------------------------------------------------------- steps


def steps(args: argparse.Namespace, report: Report) -> list[Measurement]:
    """What to run, in this order. Raises BenchError."""
    flags = ["--device", args.device, "--dtype", args.dtype, *launch.flags_of({"--cpu-kernels": args.cpu_kernels})]
    return [
        _latency_step(args, report, flags),
        *(_serving_step(args, report, flags, shape) for shape in args.serving_shape),
        _offline_step(args, report, flags),
    ]


def _latency_step(args: argparse.Namespace, report: Report, flags: Sequence[str]) -> Measurement:
    named, (given, generated) = shapes.find(args.latency_shape), args.latency_lengths
    sizes = ["-b", *args.batch_size, "-s", given, "-d", generated, "-r", args.runs]
    command = _command("latency", args.latency_shape, flags, sizes)
    served = ServedModel(named.shape, args.dtype)

    def rows(found: Found) -> Iterator[ReportRow]:
        for row in found["rows"]:
            batch_size = row["batch_size"]
            if row["step"] == "decode_token":
                floor_ms = served.mean_decode(batch_size, given, generated).floor_ms(report.ceilings)
                target = DECODE_PERCENT.get(batch_size, OTHER_DECODE_PERCENT)
                what = f"{named.name}: decode step, batch {batch_size}"
                yield _share_row(what, row["p50_ms"], floor_ms, target, report.ceilings)
                yield _overhead_row(f"{named.name}: the same, from reply to reply", row)
            elif row["step"] == "prefill" and batch_size == max(args.batch_size):
                floor_ms = served.prefill(batch_size, given).floor_ms(report.ceilings)
                what = f"{named.name}: prefill, {batch_size} x {given}"
                yield _share_row(what, row["p50_ms"], floor_ms, PREFILL_PERCENT, report.ceilings)

    return Measurement(named.name, command, rows)


def _serving_step(args: argparse.Namespace, report: Report, flags: Sequence[str], shape: str) -> Measurement:
    named, (given, generated) = shapes.find(shape), args.serving_lengths
    sizes = ["--input-length", given, "--output-length", generated, "--concurrency", args.concurrency]
    command = _command("serving", shape, flags, [*sizes, "--warmups", args.concurrency])
    served = ServedModel(named.shape, args.dtype)

    def rows(found: Found) -> Iterator[ReportRow]:
        for row in found["rows"]:
            ceiling = ceiling_of(served, args.concurrency, given, generated, report.ceilings)
            what = f"{named.name}: {args.concurrency} concurrent, {given} in, {generated} out"
            yield _rate_row(what, row["output_tokens_per_second"], ceiling, SERVING_PERCENT, report.ceilings)
            if row["errors"]:
                yield ReportRow(what, "", f"{row['errors']} of {row['requests']} requests failed", "failed")

    return Measurement(named.name, command, rows)


def _offline_step(args: argparse.Namespace, report: Report, flags: Sequence[str]) -> Measurement:
    named, (given, generated) = shapes.find(args.offline_shape), args.offline_lengths
    sizes = ["--num-prompts", args.num_prompts, "--input-length", given, "--output-length", generated]
    served = ServedModel(named.shape, args.dtype)

    def rows(found: Found) -> Iterator[ReportRow]:
        for row in found["rows"]:
            if row["step"] == "total":
                ceiling = ceiling_of(served, args.num_prompts, given, generated, report.ceilings)
                what = f"{named.name}: {args.num_prompts} sequences offline, {given} in, {generated} out"
                yield _rate_row(what, row["tokens_per_second"], ceiling, OFFLINE_PERCENT, report.ceilings)

    return Measurement(named.name, _command("offline", args.offline_shape, flags, sizes), rows)


def _command(name: str, shape: str, flags: Sequence[str], sizes: Sequence[object]) -> list[str]:
    """A command line that means the same from any folder."""
    located = str(Path(shape).resolve()) if Path(shape).exists() else shape
    return [name, "--random-weights", located, *flags, *map(str, sizes)]


# ----------------------------------------------------------------------------------------------------------------- rows


def _share_row(what: str, ms: float, floor_ms: float, target_percent: float, ceilings: Ceilings) -> ReportRow:
    percent = 100 * floor_ms / ms
    target = f"{target_percent:g} % of limit ({ceilings.source}), {100 * floor_ms / target_percent:.2f} ms"
    return judged(what, target, f"{percent:.1f} %, {ms:.2f} ms", percent >= target_percent)


def _overhead_row(what: str, row: Mapping[str, Any]) -> ReportRow:
    ratio = row["p50_ms"] / row["computed_p50_ms"]
    target = f"at most {MOST_STEP_RATIO:g} times what is computed of it"
    return judged(what, target, f"{ratio:.3f} times {row['computed_p50_ms']:.2f} ms", ratio <= MOST_STEP_RATIO)


def _rate_row(what: str, rate: float, ceiling: float, target_percent: float, ceilings: Ceilings) -> ReportRow:
    percent = 100 * rate / ceiling
    target = f"{target_percent:g} % of limit ({ceilings.source}), {target_percent / 100 * ceiling:,.0f} tokens/s"
    return judged(what, target, f"{percent:.1f} %, {rate:,.0f} tokens/s", percent >= target_percent)


def _ready_row(model: str, seconds: float) -> ReportRow:
    target = f"at most {MOST_READY_SECONDS:g} s"
    return judged(f"{model}: launch to ready", target, f"{seconds:.1f} s", seconds <= MOST_READY_SECONDS)
