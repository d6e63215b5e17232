"""The systems of a race: how each makes its model of a shape, runs a batch of it, serves it, and what its output says.

Nothing of them comes with Lockstep: they are where the user says, and are run by their own command lines. What one of
them prints and cannot be read raises BenchError. Left out: when what runs, and for how long (`course.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmark.launch import flags_of
from benchmark.race.cells import FORMATS, Cell
from benchmark.race.limits import DTYPE
from benchmark.result import ROOT, BenchError

HERE = Path(__file__).parent
GIB = 2**30
CONTEXT_STEP = 256  # tokens: llama.cpp rounds a sequence's context up to a multiple of it


@dataclass(frozen=True)
class Command:
    """What is run, the variables that it finds set, and where; None: where the race has its log."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


Run = Callable[[Command], str]  # runs it to its end; what it printed. Raises BenchError where it fails


@dataclass(frozen=True)
class Task:
    """A cell, with what a system has to know to run it."""

    cell: Cell
    source: Path  # the model as transformers wrote it
    model: Path  # the system's own
    runs: int
    threads: int
    kv_bytes: int
    port: int = 0

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.cell.prompt_tokens + self.cell.decode_length


Times = Mapping[str, float]  # `prefill_ms` of a batch, and `decode_ms` of one of its steps: medians over the runs


class System(Protocol):
    """A system that runs models."""

    @property
    def name(self) -> str: ...

    @property
    def models_of(self) -> str:
        """The name of the system whose models it runs: its own, or that of another that makes them."""

    @property
    def formats(self) -> Mapping[str, str]:
        """What it calls those of `cells.FORMATS` that it has."""

    @property
    def api(self) -> str:
        """That of its server, as `serving` calls it."""

    def version(self) -> Command:
        """What says that it is there."""

    def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
        """Its model of one that transformers wrote, made in `folder` where it is not there. Raises BenchError."""

    def steps(self, task: Task) -> Command:
        """What times the steps of a batch."""

    def times(self, printed: str, task: Task) -> Times:
        """What that says. Raises BenchError where it does not."""

    def server(self, task: Task) -> Command:
        """What serves the model at 127.0.0.1. Raises BenchError where it has no server."""


# ------------------------------------------------------------------------------------------------------------- Lockstep


@dataclass(frozen=True)
class Lockstep:
    """This program. kernels: as `--cpu-kernels`."""

    kernels: str | None = None
    api: str = "tgi"
    formats: Mapping[str, str] = field(default_factory=lambda: {"bf16": DTYPE, "int8": "int8", "int4": "int4"})

    @property
    def name(self) -> str:
        """With the kernels where the user has chosen them, so that two choices can be in one race."""
        return f"Lockstep ({self.kernels})" if self.kernels else "Lockstep"

    @property
    def models_of(self) -> str:
        """It makes none."""
        return self.name

    def version(self) -> Command:
        """The launcher's."""
        return ours("launcher.py", "--version")

    def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
        """The model itself, quantised while it is loaded."""
        return source

    def steps(self, task: Task) -> Command:
        """Its own command for steps. Its server has warmed up by a batch as large when it is ready."""
        cell = task.cell
        sizes = {"-b": cell.batch_size, "-s": cell.prompt_tokens, "-d": cell.decode_length, "-r": task.runs, "-w": 0}
        return ours("-m", "benchmark", "latency", *self._options(task), *flags_of(sizes))

    def times(self, printed: str, task: Task) -> Times:
        """The medians of its rows."""
        rows = {row.get("step"): row for row in rows_of(printed)}
        return {f"{name}_ms": _positive(rows, step, "p50_ms") for name, step in LOCKSTEP_STEPS.items()}

    def server(self, task: Task) -> Command:
        """The launcher."""
        cell = task.cell
        limits = {
            "--hostname": "127.0.0.1",
            "--port": task.port,
            "--max-input-length": cell.prompt_tokens,
            "--max-total-tokens": task.length,
            "--max-concurrent-requests": max(128, cell.batch_size),
        }
        return ours("launcher.py", *self._options(task), *flags_of(limits))

    def _options(self, task: Task) -> list[str]:
        return flags_of(
            {
                "--model-id": task.model,
                "--device": "cpu",
                "--dtype": DTYPE,
                "--quantize": FORMATS[task.cell.format].quantize,
                "--cpu-kernels": self.kernels,
            }
        )


LOCKSTEP_STEPS = {"prefill": "prefill", "decode": "decode_token"}


def ours(*arguments: str) -> Command:
    """A command of this Python that finds our packages."""
    return Command((sys.executable, *arguments), folder=ROOT)


def load_generator(task: Task, requests: int, api: str) -> Command:
    """What sends requests to a server of any system, and says how they were answered."""
    cell = task.cell
    settings = {
        "--url": f"http://127.0.0.1:{task.port}",
        "--api": api,
        "--model-id": MODEL_NAME,
        "--tokenizer": task.source,
        "--concurrency": cell.batch_size,
        "--input-length": cell.prompt_tokens,
        "--output-length": cell.decode_length,
        "--num-requests": requests,
    }
    return ours("-m", "benchmark", "serving", *flags_of(settings))


MODEL_NAME = "race"


def rows_of(printed: str) -> list[Mapping[str, Any]]:
    """The rows of the JSON object that a command of this benchmark printed last. Raises BenchError."""
    rows = last_object(printed).get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BenchError("its output has no rows")
    return rows


def last_object(printed: str) -> Mapping[str, Any]:
    """The last line that is a JSON object. Raises BenchError where none is."""
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    raise BenchError("its output has no line of JSON")


def _positive(found: Mapping[Any, Any], *names: str) -> float:
    """A figure within objects. Raises BenchError where there is no finite one above 0."""
    value: Any = found
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BenchError(f"its output has no finite {' '.join(names)} above 0")
    return float(value)


# ------------------------------------------------------------------------------------------------------------ llama.cpp


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp, or a program with its tools. folder: with convert_hf_to_gguf.py; options: of `llama-batched-bench`
    and of its server; maker: whose models it reads, so that both have the same; None: its own."""

    name: str
    folder: Path
    options: Sequence[str] = ()
    maker: LlamaCpp | None = None
    api: str = "openai"
    formats: Mapping[str, str] = field(
        default_factory=lambda: {"bf16": "BF16", "f16": "F16", "int8": "Q8_0", "int4": "Q4_0", "q4_k_m": "Q4_K_M"}
    )

    @property
    def models_of(self) -> str:
        """The maker's."""
        return self.maker.name if self.maker is not None else self.name

    def version(self) -> Command:
        """The benchmark's."""
        return Command((self._tool("llama-batched-bench"), "--version"))

    def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
        """A file that its converter wrote, for other formats than 16 bits quantised by its own tool."""
        if self.maker is not None:
            return self.maker.make_model(source, folder, format, run)
        name, dense = self.formats[format], FORMATS[format].bits == 16
        path = folder / f"{name}.gguf"
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.partial.gguf"
        if dense:
            converter = (sys.executable, str(HERE / "gguf.py"), str(self._converter.parent), str(source))
            run(Command((*converter, "--outfile", str(partial), "--outtype", name.lower())))
        else:
            whole = self.make_model(source, folder, "bf16", run)
            run(Command((self._tool("llama-quantize"), str(whole), str(partial), name)))
        return finished(partial, path)

    def steps(self, task: Task) -> Command:
        """One sequence to warm up, then the batch as often as it is wanted."""
        cell = task.cell
        batches = ",".join(map(str, (1, *[cell.batch_size] * task.runs)))
        sizes = {"-npp": cell.prompt_tokens, "-ntg": cell.decode_length, "-npl": batches}
        bench = (self._tool("llama-batched-bench"), *self._model(task), *self.options)
        return Command((*bench, *flags_of(sizes)))

    def times(self, printed: str, task: Task) -> Times:
        """The medians of the rows behind the first."""
        return batched_bench_times(printed, task.cell)

    def server(self, task: Task) -> Command:
        """Its server, with a slot for each client."""
        own = {"--host": "127.0.0.1", "--port": task.port, "-np": task.cell.batch_size}
        return Command((self._tool("llama-server"), *self._model(task), *self.options, *flags_of(own)))

    def _model(self, task: Task) -> list[str]:
        padded = -(-task.length // CONTEXT_STEP) * CONTEXT_STEP
        context = padded * task.cell.batch_size
        return flags_of({"-m": task.model, "-t": task.threads, "-tb": task.threads, "-c": context})

    @property
    def _converter(self) -> Path:
        return self._found("convert_hf_to_gguf.py")

    def _tool(self, name: str) -> str:
        return str(self._found(name))

    def _found(self, name: str) -> Path:
        for place in ("", "bin", "build/bin"):
            if (path := self.folder / place / name).is_file():
                return path
        raise BenchError(f"{self.folder} has no {name}, nor have its bin and build/bin")


COLUMNS = ("PP", "TG", "B", "T_PP s", "T_TG s")


def batched_bench_times(printed: str, cell: Cell) -> Times:
    """What `llama-batched-bench` says of a cell in its table, whose first row is the warm-up. Raises BenchError."""
    lines = [
        [part.strip() for part in line.strip("|\\n ").split("|")]
        for line in printed.splitlines()
        if line.startswith("|")
    ]
    heads = [line for line in lines if "PP" in line]
    if not heads:
        raise BenchError("its output has no table")
    if missing := [column for column in COLUMNS if column not in heads[0]]:
        raise BenchError(f"its table has no column {', '.join(missing)}")
    places = [heads[0].index(column) for column in COLUMNS]
    rows = [[line[place] for place in places] for line in lines if len(line) == len(heads[0]) and line[0].isdecimal()]
    wanted = [str(cell.prompt_tokens), str(cell.decode_length), str(cell.batch_size)]
    found = [row for row in rows[1:] if row[:3] == wanted]
    if not found:
        raise BenchError(f"its table has no row of {cell.prompt_tokens} x {cell.batch_size} behind the warm-up")
    try:
        prefill, decode = (median(float(row[place]) for row in found) for place in (3, 4))
    except ValueError:
        raise BenchError(f"its table has times that are no numbers: {found[0]}") from None
    return _above_0({"prefill_ms": 1000 * prefill, "decode_ms": 1000 * decode / cell.decode_length})


def _above_0(times: Times) -> Times:
    """The times. Raises BenchError where one is not finite and above 0."""
    return {name: _positive(times, name) for name in times}


# ------------------------------------------------------------------------------------------- engines that are in Python


@dataclass(frozen=True)
class OpenVino:
    """OpenVINO GenAI, with optimum-intel as its converter. python: of an environment that has both."""

    python: Path
    name: str = "OpenVINO"
    api: str = ""
    formats: Mapping[str, str] = field(default_factory=lambda: {"bf16": "fp16", "int8": "int8", "int4": "int4"})

    @property
    def models_of(self) -> str:
        """Its own."""
        return self.name

    def version(self) -> Command:
        """That of the package."""
        return Command((str(self.python), "-c", _says_version("openvino_genai")))

    def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
        """What `optimum-cli export openvino` writes."""
        name = self.formats[format]

        def export(partial: Path) -> None:
            what = ("export", "openvino", "--model", str(source), "--task", "text-generation-with-past")
            tool = (str(self.python), "-m", "optimum.commands.optimum_cli", *what)
            run(Command((*tool, "--weight-format", name, str(partial)), OFFLINE))

        return _made(folder / name, export)

    def steps(self, task: Task) -> Command:
        """`steps.py`, on this engine."""
        return _python_steps(self.python, "openvino", task, {})

    def times(self, printed: str, task: Task) -> Times:
        """The medians of what that prints."""
        return _python_times(printed)

    def server(self, task: Task) -> Command:
        """There is none in its package."""
        raise BenchError("its package has no server")


@dataclass(frozen=True)
class Vllm:
    """vLLM built for CPUs, with llm-compressor as its converter. python, compressor: of environments that have them."""

    python: Path
    compressor: Path
    name: str = "vLLM"
    api: str = "openai"
    formats: Mapping[str, str] = field(default_factory=lambda: {"bf16": DTYPE, "int8": "W8A8", "int4": "W4A16"})

    @property
    def models_of(self) -> str:
        """Its own."""
        return self.name

    def version(self) -> Command:
        """That of the package."""
        return Command((str(self.python), "-c", _says_version("vllm")))

    def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
        """The model itself; quantised, what llm-compressor makes of its files without any text."""
        name = self.formats[format]
        if name == DTYPE:
            return source

        def compress(partial: Path) -> None:
            run(Command((str(self.compressor), "-c", COMPRESS, str(source), str(partial), name), OFFLINE))

        return _made(folder / name, compress)

    def steps(self, task: Task) -> Command:
        """`steps.py`, on this engine."""
        return _python_steps(self.python, "vllm", task, self._environment(task))

    def times(self, printed: str, task: Task) -> Times:
        """The medians of what that prints."""
        return _python_times(printed)

    def server(self, task: Task) -> Command:
        """Its server for OpenAI's API."""
        own = {
            "--served-model-name": MODEL_NAME, "--host": "127.0.0.1", "--port": task.port,
            "--dtype": DTYPE, "--max-model-len": task.length, "--max-num-seqs": task.cell.batch_size,
        }  # fmt: skip
        command = (str(self.python.with_name("vllm")), "serve", str(task.model), *flags_of(own))
        return Command((*command, "--no-enable-prefix-caching"), self._environment(task))

    def _environment(self, task: Task) -> dict[str, str]:
        """What its documentation recommends for CPUs."""
        library = self.python.parent.parent / "lib" / "libiomp5.so"
        return {
            **OFFLINE,
            "VLLM_CPU_INT4_W4A8": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(_cache_gib(task)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **({"LD_PRELOAD": str(library)} if library.is_file() else {}),
        }


OFFLINE = {"HF_HUB_OFFLINE": "1"}
COMPRESS = """
import sys
from llmcompressor import model_free_ptq
source, folder, scheme = sys.argv[1:]
heads = ["lm_head", "re:.*embed.*"]
model_free_ptq(model_stub=source, save_directory=folder, scheme=scheme, ignore=heads, max_workers=1, device="cpu")
"""


def _says_version(module: str) -> str:
    return f"import {module}; print('version', {module}.__version__)"


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is made once, whole or not at all."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        finished(partial, folder)
    return folder


def finished(partial: Path, whole: Path) -> Path:
    """What a command has written, by the name that it has from now on. Raises BenchError where it wrote nothing."""
    if not partial.exists():
        raise BenchError(f"its command ended without an error, but wrote no {partial}")
    return partial.rename(whole)


def _python_steps(python: Path, engine: str, task: Task, environment: Mapping[str, str]) -> Command:
    cell = task.cell
    sizes = {
        "prompt_tokens": cell.prompt_tokens, "batch_size": cell.batch_size, "decode_length": cell.decode_length,
        "runs": task.runs, "cache_gib": _cache_gib(task),
    }  # fmt: skip
    return Command((str(python), str(HERE / "steps.py"), engine, str(task.model), json.dumps(sizes)), environment)


def _python_times(printed: str) -> Times:
    found = last_object(printed)
    samples = {name: found.get(name) for name in ("prefill_ms", "decode_ms")}
    if not all(isinstance(values, list) and values for values in samples.values()):
        raise BenchError("its output has no prefill_ms and decode_ms")
    try:
        return _above_0({name: median(map(float, values or ())) for name, values in samples.items()})
    except (TypeError, ValueError):
        raise BenchError("its output has times that are no numbers above 0") from None


def _cache_gib(task: Task) -> int:
    """Of keys and values, with a spare half for what an engine rounds up."""
    return -(-task.kv_bytes * 3 // (2 * GIB))
