"""`lockstep-bench gpu-first`: what the first minutes on a GPU can tell, whatever happens to them.

A GPU may be there for ten minutes. Parts are commands in an order, most telling first, each with its own time and in a
group of processes of its own. What they print goes into one log as it comes, and a summary says after each part what
became of it: a run that ends anywhere has said something. What fails, hangs, crashes or loses the device costs its own
part. Three runs of ten minutes follow each other: is it right, is it fast, and what decides what is done next.
`--run rehearsal` needs no GPU: it collects the tests and compiles the kernels of the first run, and says what travels.

Left out: what is measured, which is the commands' business. Only Python's own library is imported here, as a machine
with a GPU may lack what else is needed: the first part of each run installs it from wheels (`make gpu-first`).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.process import CUT, DONE, GRACE_S, last_line, run_limited
from benchmark.result import ROOT, BenchError, table, write_atomically

WHEELS = ROOT / "dist" / "wheels"
MIB = 2**20
MOST_WHEELS, MOST_IN_ALL = 20 * MIB, 64 * MIB
LEAST_S = 5.0  # a part is not begun with less
NOT_REACHED, NOT_NEEDED = "not reached", "not needed"

# Warnings that only builds for CUDA give are shown, and fail no test; a test that compiles takes more than a minute.
GPU_TESTS = (
    *"-m pytest -p no:cacheprovider -v -W default -o faulthandler_timeout=150 -m".split(),
    "gpu and not kernels",
)
KERNELS, ENGINES = "tests/gpu/kernels", "tests/gpu/engines"
GRAPHS, RANKS = f"{ENGINES}/test_graphs.py", f"{ENGINES}/test_ranks.py"
# Whether there is all that the other parts import, and a GPU: tests would be skipped without, and count as done.
COMPLETE = (
    "import os, shutil, sysconfig, router.__main__, server.service, transformers, torch; "
    "assert torch.cuda.is_available(), 'torch sees no GPU'; "
    "assert any(map(shutil.which, (os.environ.get('CC', 'cc'), 'gcc', 'clang'))), 'Triton finds no C compiler'; "
    "where = sysconfig.get_paths()['include']; "
    "assert os.path.isfile(where + '/Python.h'), 'Triton finds no Python.h in ' + where; print('all is there')"
)
CAPTURED_DECODE = f"{KERNELS}/test_paged.py::test_a_captured_decode_follows_its_sequences"
BLOOMZ = tuple("latency --random-weights bloomz-7b1-mt --device cuda --dtype bfloat16 -d 100 -r 5".split())


@dataclass(frozen=True)
class Part:
    """A command, and how long it may take.

    if_failed: it is only wanted where the part of this name was not done. if_cut: also where that took too long.
    """

    name: str
    seconds: float
    command: Sequence[str]
    if_failed: str = ""
    if_cut: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a part: a word, the seconds that it took, and the last line that it printed."""

    part: Part
    word: str = NOT_REACHED
    seconds: float = 0.0
    last_line: str = ""


def python(*arguments: str) -> tuple[str, ...]:
    """A command of this Python."""
    return (sys.executable, *arguments)


def bench(*arguments: str) -> tuple[str, ...]:
    """A command of this benchmark."""
    return python("-m", "benchmark", *arguments)


def runs(output: Path, site: Path) -> dict[str, list[Part]]:
    """All parts by run. site: where wheels are installed."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    pip = ("install", "-q", *(f"--no-{what}" for what in ("index", "deps", "compile", "cache-dir")), "--upgrade")
    install = [Part("install wheels", 60, python("-m", "pip", *pip, "--target", str(site), *wheels))] if wheels else []
    shell = (
        "nvidia-smi; nvidia-smi -q -d CLOCK,POWER,ECC; python3 -m torch.utils.collect_env; gcc --version; "
        f'ncu --version; exec {sys.executable} -c "{COMPLETE}"'
    )
    workers = ("-n", "14", "--dist", "worksteal", "--maxfail", "80")
    return {
        "right": [
            *install,
            Part("environment", 60, ("sh", "-c", shell)),
            Part("a captured decode", 100, python(*GPU_TESTS, CAPTURED_DECODE)),
            Part(
                "the same under compute-sanitizer", 300, ("compute-sanitizer", *python(*GPU_TESTS, CAPTURED_DECODE)),
                if_failed="a captured decode", if_cut=False,
            ),
            Part("engines and graphs", 190, python(*GPU_TESTS, GRAPHS, ENGINES, "--ignore", RANKS)),
            Part("ranks that share the GPU", 90, python(*GPU_TESTS, RANKS)),
            Part("kernels", 200, python(*GPU_TESTS, *workers, KERNELS)),
        ],
        "fast": [
            *install,
            Part("decode and prefill", 240, bench(*BLOOMZ, "-b", "1", "8", "32", "-s", "100", "--profile")),
            Part(
                "the same without graphs", 150, bench(*BLOOMZ, "-b", "1", "32", "-s", "100"),
                if_failed="decode and prefill", environment={"CUDA_GRAPHS": "0"},
            ),
            Part(
                "what is promised of one GPU", 420,
                bench("gpu", "--serving-shape", "mistral-7b", "--limit", "150", "--output", str(output / "gpu.md")),
            ),
        ],
        "next": [
            *install,
            Part("products of quantised weights", 200, bench("kernels", "--time", "--write", "--output", str(output))),
            Part("sampled decode", 120, bench(*BLOOMZ, "-b", "1", "32", "-s", "100", "--do-sample")),
            Part("long contexts", 150, bench(*BLOOMZ, "-b", "1", "8", "-s", "8000")),
            Part("fp8", 120, bench(*BLOOMZ, "-b", "1", "32", "-s", "100", "--quantize", "fp8")),
        ],
        "rehearsal": [
            *(install if are_for_this_python(wheels) else []),
            Part("collect the tests", 60, python(*GPU_TESTS, "--collect-only", "tests/gpu")),
            Part("compile the kernels", 1500, bench("kernels", "--capability", "9.0")),
        ],
    }  # fmt: skip


def are_for_this_python(wheels: Sequence[str]) -> bool:
    """Whether compiled packages among them are for the Python that runs this."""
    tag = f"-cp{sys.version_info.major}{sys.version_info.minor}-"
    return any(tag in Path(wheel).name for wheel in wheels)


def planned() -> str:
    """What the three runs would do on a GPU, as a table."""
    rows = [
        (name, part.name, f"{part.seconds:.0f}", f"if not done: {part.if_failed}" if part.if_failed else "")
        for name, parts in runs(Path("out"), Path("site")).items()
        for part in parts
        if name != "rehearsal"
    ]
    return table(("Run", "Part", "Seconds at most", "Condition"), rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--run", default="right", choices=list(runs(Path(), Path())), help="which parts (right)")
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit of all parts together (9.5)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for log.txt and summary.md")


def run(args: argparse.Namespace) -> int:
    """Run the parts; 1 where one was wanted and not done. Raises BenchError without a GPU, or a folder to write."""
    check_gpu(args.run)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write {args.output}: {error.strerror}; give another --output") from None
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-first-") as folder:
        parts = runs(args.output.resolve(), Path(folder) / "site")[args.run]
        first = FirstMinutes(parts, args.output, environment_of(Path(folder)))
        try:
            first.go(60 * args.minutes)
        finally:
            print(first.summary())
    if args.run == "rehearsal":
        print(f"What a GPU would be asked:\n{planned()}\n{travels()}")
    return 0 if all(outcome.word in (DONE, NOT_NEEDED) for outcome in first.outcomes) else 1


def check_gpu(run: str) -> None:
    """Raises BenchError for a machine without a GPU, where tests would be skipped, or without what they import."""
    if run == "rehearsal":
        return
    if shutil.which("nvidia-smi") is None:
        raise BenchError(f"--run is {run}, and this machine has no nvidia-smi: --run rehearsal needs no GPU")
    if importlib.util.find_spec("fastapi") is None and not any(WHEELS.glob("*.whl")):
        raise BenchError(
            f"there is no fastapi, and {WHEELS} has no wheels: carry what `make gpu-first` has packed there"
        )


def environment_of(folder: Path) -> dict[str, str]:
    """What is set for all parts: wheels that are installed, output at once, compiled kernels that are kept."""
    return {
        "PYTHONPATH": str(folder / "site"),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",  # images of NVIDIA's set it, and float32 would be something else
    }


class FirstMinutes:
    """Parts one after the other, and what became of them."""

    def __init__(self, parts: Sequence[Part], output: Path, environment: Mapping[str, str]) -> None:
        self.outcomes = [Outcome(part) for part in parts]
        self._output = output
        self._environment = environment

    def go(self, seconds: float) -> None:
        """Run all parts, in so many seconds at most."""
        until = time.monotonic() + seconds
        for outcome in self.outcomes:
            left = min(outcome.part.seconds, until - time.monotonic() - GRACE_S)
            if not self._is_wanted(outcome.part):
                outcome.word = NOT_NEEDED
            elif left >= LEAST_S:
                outcome.word = "was running"  # should this process be killed
                self._save()
                self._take(outcome, left)
            self._save()

    def _is_wanted(self, part: Part) -> bool:
        words = {outcome.part.name: outcome.word for outcome in self.outcomes}
        if not part.if_failed:
            return True
        word = words[part.if_failed]
        return word not in (DONE, NOT_REACHED) and (part.if_cut or not word.startswith(CUT))

    def _take(self, outcome: Outcome, seconds: float) -> None:
        began = time.monotonic()
        log = self._output / "log.txt"
        with log.open("ab") as file:
            file.write(f"\n===== {outcome.part.name}: {' '.join(outcome.part.command)}\n".encode())
            file.flush()
            start = file.tell()
            try:
                part = outcome.part
                environment = {**self._environment, **part.environment}
                outcome.word = run_limited(part.command, environment, file.fileno(), seconds, GRACE_S)
            finally:
                outcome.seconds = time.monotonic() - began
                outcome.last_line = last_line(log, start)

    def _save(self) -> None:
        write_atomically(self._output / "summary.md", self.summary() + "\n")

    def summary(self) -> str:
        """What became of each part, as a table."""
        rows = [(o.part.name, o.word, f"{o.seconds:.0f}", o.last_line.replace("|", "/")) for o in self.outcomes]
        return table(("Part", "Outcome", "Seconds", "Its last line"), rows)


def travels() -> str:
    """How much goes to the machine with the GPU. Raises BenchError for more than it takes."""
    wheels, tree = (sum(map(_size, files)) for files in (WHEELS.glob("*.whl"), _tracked()))
    of = MOST_WHEELS // MIB, MOST_IN_ALL // MIB
    said = f"wheels {wheels / MIB:.1f} MiB of {of[0]}, with the tree {(wheels + tree) / MIB:.1f} of {of[1]}"
    if wheels > MOST_WHEELS or wheels + tree > MOST_IN_ALL:
        raise BenchError(f"too much travels: {said}")
    return f"What travels: {said}"


def _tracked() -> Iterator[Path]:
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, check=False).stdout
    return (ROOT / name.decode() for name in listed.split(b"\0") if name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
