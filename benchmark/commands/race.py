"""`lockstep-bench race`: Lockstep and other programs for CPUs in turn on this machine, on one model each, in one table.

The others are those that are installed, each run by its own command line: llama.cpp and ik_llama.cpp, OpenVINO GenAI,
vLLM. Beside each row is the least time that the machine could need. Here: the options, who takes part, and what the
result says; the rest is in `benchmark/race/`. Left out: GPUs, and whether the texts are right.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from benchmark import launch, options
from benchmark.cost import shapes
from benchmark.cost.devices import Probe, describe
from benchmark.cost.shapes import NamedShape
from benchmark.process import DONE, run_limited
from benchmark.race import limits
from benchmark.race.cells import FORMATS, SERVED, Cell, Entry, Records, Setup, cells_of, entry
from benchmark.race.course import Course, Folders, Settings, why
from benchmark.race.limits import Limits
from benchmark.race.report import markdown
from benchmark.race.systems import LlamaCpp, Lockstep, OpenVino, System, Vllm
from benchmark.report.publishing import published
from benchmark.result import BenchError, Result, RunContext, arguments_of, commit, hardware, prepare_output, table
from benchmark.terminal import Stage, shown, words
from host import cpu_kinds
from host.topology import allowed_cpus, physical_cores

SHAPES = (
    Entry("bloom-560m", ()),
    Entry("tinyllama-1.1b", ()),
    Entry("qwen3-0.6b", ()),
    entry("qwen3-4b=100x1"),
    entry("qwen3.5-0.8b=100x1,100x8,100x32"),
)
SERVED_SHAPES = (Entry("tinyllama-1.1b", ()),)
FORMATS_RUN = ("bf16", "int8", "int4", "q4_k_m")
SYSTEMS = ("lockstep", "llama.cpp", "ik_llama.cpp", "openvino", "vllm")
VERSION_SECONDS = 120.0
START_SECONDS = 15.0  # of a system, about, until it computes
OVER_LIMIT = 3.0  # times as long as its limit, about, a step takes
VERSION_BYTES = 2**20  # at most, of what a system says of its version
EXAMPLE = """\
The default takes hours; --plan says how many. A few minutes:
lockstep-bench race --output race --shape tinyllama-1.1b=100x1 --format int4 --served -d 16"""


# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.epilog = EXAMPLE
    who = parser.add_argument_group("systems (default: those found on PATH)")
    who.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="who takes part, if it is there")
    who.add_argument("--llama-cpp", type=Path, metavar="DIR", help="its source, built in build/bin, or its programs")
    who.add_argument("--ik-llama-cpp", type=Path, metavar="DIR", help="the same of ik_llama.cpp")
    who.add_argument("--openvino", type=Path, metavar="PYTHON", help="Python that has openvino-genai and optimum-intel")
    who.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python that has vLLM for CPUs")
    who.add_argument("--llm-compressor", type=Path, metavar="PYTHON", help="Python that has llmcompressor (vLLM's)")
    launch.add_kernels_argument(who)
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--shape", type=entry, nargs="*", metavar="SHAPE[=SIZES]", default=SHAPES,
        help="shapes, and sizes of their own as 100x8,512x1 (tokens x sequences)",
    )  # fmt: skip
    what.add_argument(
        "--served", type=entry, nargs="*", metavar="SHAPE[=SIZES]", default=SERVED_SHAPES,
        help="the same over HTTP, with so many clients",
    )  # fmt: skip
    what.add_argument(
        "--format", nargs="+", choices=list(FORMATS), default=FORMATS_RUN, help="of weights (all but f16)"
    )
    what.add_argument("-d", "--decode-length", type=options.at_least_two, default=100, help="generated tokens (100)")
    what.add_argument("--rounds", type=options.positive, default=1, help="times that each cell is run (1)")
    what.add_argument("-r", "--runs", type=options.positive, default=1, help="batches in each of them (1)")
    what.add_argument("--limit", type=options.number(at_least=1), default=300.0, metavar="S", help="of a cell (300)")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--output", type=Path, required=True, metavar="DIR", help="race.jsonl, tables, log.txt")
    kept.add_argument("--models", type=Path, metavar="DIR", help="folder of all models (OUTPUT/models)")
    kept.add_argument("--discard-models", action="store_true", help="remove each model when no later cell needs it")
    kept.add_argument("--retry", action="store_true", help="run again what race.jsonl says has failed")
    kept.add_argument("--only-models", action="store_true", help="make the models, and run nothing on them")
    kept.add_argument("--plan", action="store_true", help="only say what would run, and about how long")


def run(args: argparse.Namespace) -> int:
    """Run the cells that are not in the file yet, and print the tables of all that are; 0. Raises BenchError."""
    _check(args)
    prepare_output(args.output)
    named, steps, served = _named(args)
    log = args.output.resolve() / "log.txt"
    found, notes = _present(args)
    if not found:
        raise BenchError(f"nobody takes part: {' '.join(notes[1:])}")
    systems = [system for system, _ in found]
    records = _records(args, {system.name: version for system, version in found})
    if args.retry:
        records.forget_problems()
    known = {system.name: tuple(system.formats) for system in systems}
    every = cells_of(steps, served, known, options.distinct(args.format), args.rounds, args.decode_length)
    cells = [cell for cell in every if cell not in records]
    if not every:
        raise BenchError(f"nobody has a format of {', '.join(args.format)}: give another --format")
    gauges, missing = _gauges()
    floors = Limits({name: shape for name, (shape, _) in named.items()})
    if args.plan:
        about = "\n".join(f"- {note}" for note in [*PLAN_NOTES, *notes])
        print("\n\n".join([_plan(cells, floors, gauges, args), about]))
        return 0
    folders = Folders(_models(args), log, {name: where for name, (_, where) in named.items()})
    settings = Settings(args.limit, args.runs, _threads(), keep_models=not args.discard_models)
    course = Course(systems, records, floors, gauges, folders, settings)
    if args.only_models:
        _make_models(course, cells)
        return 0
    result = Result(_context(args, named), list(records.all.values()), [*notes, *missing])
    stages = [Stage(str(cell), _seconds(cell, floors, gauges, args)) for cell in cells]
    with published(result, markdown, args.output) as keep, shown("race", stages) as view:
        try:
            for _ in course.run(cells, view):
                result.rows = list(records.all.values())
                keep()
        finally:
            result.notes += [describe(gauge.seen) for gauge in gauges.values() if gauge.seen]
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be run before anything is looked for. Raises BenchError."""
    if not args.shape and not args.served:
        raise BenchError("there is nothing to run: give --shape or --served")
    if args.cpu_kernels is not None and args.cpu_kernels not in cpu_kinds.CHOICES:
        choices = ", ".join(cpu_kinds.CHOICES)
        raise BenchError(f"--cpu-kernels is {args.cpu_kernels}: give one of {choices}")
    try:
        cpu_kinds.check(args.cpu_kernels or cpu_kinds.AUTO)
    except ValueError as error:
        raise BenchError(f"--cpu-kernels is {args.cpu_kernels}: {error}") from None


def _records(args: argparse.Namespace, versions: Mapping[str, str]) -> Records:
    """What the file has of this processor, these versions and settings. What else it has is counted, and run again."""
    machine = hardware("cpu")
    setup = Setup(f"{machine['cpu']}, {machine['cores']}", _threads(), args.runs)
    records = Records(args.output / "race.jsonl", setup, versions)
    if records.num_others:
        what = f"{records.num_others} cells in race.jsonl are of another processor, version, commit or --runs"
        print(f"{what}: they are not shown, and run again where this race has them", file=sys.stderr)
    return records


def _make_models(course: Course, cells: Sequence[Cell]) -> None:
    """Make the models of all cells. One that cannot be made is named, and its cells will say so too."""
    for system, shape, format in options.distinct((cell.system, cell.shape, cell.format) for cell in cells):
        cell = next(one for one in cells if (one.system, one.shape, one.format) == (system, shape, format))
        try:
            course.make_model(cell)
        except BenchError as error:
            print(f"{system}, {shape} {format}: {error}", file=sys.stderr)


def _named(args: argparse.Namespace) -> tuple[dict[str, tuple[NamedShape, str]], list[Entry], list[Entry]]:
    """The shapes by the names that cells have for them, with where each is found; and the entries by these names."""
    named: dict[str, tuple[NamedShape, str]] = {}

    def entries(given: Sequence[Entry]) -> Iterator[Entry]:
        for one in given:
            found = shapes.find(one.shape)
            name = found.name.rsplit("/", 1)[-1]
            where = str(Path(one.shape).resolve()) if Path(one.shape).exists() else one.shape
            named[name] = (found, where)
            yield Entry(name, one.sizes)

    return named, list(entries(args.shape)), list(entries(args.served))


def _models(args: argparse.Namespace) -> Path:
    folder: Path = (args.models or args.output / "models").resolve()
    prepare_output(folder)
    return folder


def _threads() -> int:
    return physical_cores(allowed_cpus())


# ------------------------------------------------------------------------------------------------------- who takes part


@dataclass(frozen=True)
class Seat:
    """Where a system is looked for. given: by the user; found: on PATH; remedy: what to do where it is not there."""

    given: Path | None
    found: Path | None
    system: Callable[[Path], System]
    remedy: str = ""


def _seats(args: argparse.Namespace) -> dict[str, Seat]:
    compressor = args.llm_compressor and args.llm_compressor.absolute()
    beside = _beside("llama-batched-bench")
    llama = args.llama_cpp or beside

    def ik_llama(folder: Path) -> System:
        return _ik_llama(folder, llama)

    def vllm(python: Path) -> System:
        return Vllm(python, compressor or python)

    return {
        "lockstep": Seat(None, Path(), lambda _: Lockstep(args.cpu_kernels)),
        "llama.cpp": Seat(args.llama_cpp, beside, _llama, REMEDIES["llama.cpp"]),
        "ik_llama.cpp": Seat(args.ik_llama_cpp, None, ik_llama, REMEDIES["ik_llama.cpp"]),
        "openvino": Seat(args.openvino, _python_of("optimum-cli"), OpenVino, REMEDIES["openvino"]),
        "vllm": Seat(args.vllm, _python_of("vllm"), vllm, REMEDIES["vllm"]),
    }


REMEDIES = {
    "llama.cpp": "no llama-batched-bench on PATH: give --llama-cpp DIR (source built in build/bin)",
    "ik_llama.cpp": "give --ik-llama-cpp DIR (source built in build/bin)",
    "openvino": "no optimum-cli on PATH: give --openvino PYTHON (pip install openvino-genai optimum-intel)",
    "vllm": "no vllm on PATH: give --vllm PYTHON (vLLM for CPUs; for int8 and int4 pip install llmcompressor)",
}


def _llama(folder: Path) -> LlamaCpp:
    return LlamaCpp("llama.cpp", folder)


def _ik_llama(folder: Path, llama: Path | None) -> LlamaCpp:
    return LlamaCpp("ik_llama.cpp", folder, ("-rtr",), None if llama is None else _llama(llama.absolute()))


def _beside(program: str) -> Path | None:
    found = shutil.which(program)
    return Path(found).resolve().parent if found else None


def _python_of(program: str) -> Path | None:
    """The Python of the environment that has a program."""
    found = shutil.which(program)
    python = Path(found).absolute().parent / "python" if found else None
    return python if python is not None and python.exists() else None


def _present(args: argparse.Namespace) -> tuple[list[tuple[System, str]], list[str]]:
    """The systems that answer, with their versions, and a line about each of the others; the first is of the kernels.

    Raises BenchError where one that the user has named does not answer.
    """
    systems, lines = [], [_kernels()]
    for name, seat in _seats(args).items():
        if name not in args.systems:
            continue
        place = seat.given or seat.found
        if place is None:
            lines.append(f"{name}: {seat.remedy}.")
            continue
        system = seat.system(place.absolute())
        try:
            version = _version(system, args.output.resolve())
        except BenchError as error:
            if seat.given is not None:
                raise BenchError(f"{name} at {seat.given} cannot be used: {error}") from None
            lines.append(f"{name} does not take part: {error}.")
            continue
        systems.append((system, version))
        lines.append(f"{system.name}: {version}.")
    return systems, lines


def _version(system: System, folder: Path) -> str:
    """What a system says of its version; of Lockstep with the commit. Raises BenchError where it does not."""
    command = system.version()
    with TemporaryFile() as file:
        where = command.folder or folder
        word = run_limited(command.arguments, command.environment, file.fileno(), VERSION_SECONDS, folder=where)
        file.seek(0)
        printed = file.read(VERSION_BYTES).decode(errors="replace")
    if word != DONE:
        raise BenchError(": ".join(part for part in (word, why(printed)) if part))
    said = [line.strip() for line in printed.splitlines() if line.strip()] or ["it says nothing"]
    line = next((line for line in said if "version" in line.lower()), said[-1])
    return f"{line}, commit {commit() or 'unknown'}" if isinstance(system, Lockstep) else line


def _kernels() -> str:
    """Those of this processor, and the others that Lockstep has."""
    kinds = cpu_kinds.kinds_of(platform.machine())
    own = next((kind.name for kind in kinds if kind.why_not() is None), "none")
    others = ", ".join(kind.name for kind in kinds if kind.name != own)
    return f"Kernels: {own} (Lockstep also has {others}); {_threads()} threads each."


# ------------------------------------------------------------------------------------------------------ limits and time


def _gauges() -> tuple[dict[str, Probe], list[str]]:
    try:
        return limits.gauges(_threads()), []
    except BenchError as error:
        return {}, [f"No limits: {error}."]


def _seconds(cell: Cell, floors: Limits, gauges: Mapping[str, Probe], args: argparse.Namespace) -> float:
    """About how long a cell takes, at most its limit."""
    if not gauges:
        return START_SECONDS
    gauge = gauges[floors.product_kind(cell)]
    prefill, decode = floors.needed(cell, None)
    ceilings = gauge.seen[0] if gauge.seen else gauge.measure()
    requests = 2 if cell.kind == SERVED else 1.5 * args.runs
    whole = prefill.floor_ms(ceilings) + cell.decode_length * decode.floor_ms(ceilings)
    return min(float(args.limit), START_SECONDS + requests * OVER_LIMIT * whole / 1000)


PLAN_NOTES = (
    "A cell is one system at one size. Steps: batches without a server; served: clients over HTTP.",
    f"About: {OVER_LIMIT:g} times the least that the machine needs as measured just now, so it varies with its load.",
)


def _plan(cells: Sequence[Cell], floors: Limits, gauges: Mapping[str, Probe], args: argparse.Namespace) -> str:
    """How many cells there are of each shape and format, and about how long they take."""
    parts: dict[tuple[str, str, str], list[float]] = {}
    for cell in cells:
        parts.setdefault((cell.shape, cell.format, cell.kind), []).append(_seconds(cell, floors, gauges, args))
    rows = [(*part, len(seconds), words(sum(seconds))) for part, seconds in parts.items()]
    whole = sum(map(sum, parts.values()))
    return table(("Shape", "Format", "What", "Cells", "About"), [*rows, ("All", "", "", len(cells), words(whole))])


def _context(args: argparse.Namespace, named: Mapping[str, object]) -> RunContext:
    return RunContext.gather(
        "race",
        model=", ".join(named),
        device="cpu",
        dtype="several formats",
        num_shard=1,
        threads=_threads(),
        quantize=None,
        arguments=arguments_of(args),
        work={"decode_length": args.decode_length, "runs": args.runs},
    )
