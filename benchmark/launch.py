"""A server of our own for the length of a measurement: the launcher in a child process, on loopback, on a free port.

Which model and how it is split is said by the same flags as the launcher's; `add_server_arguments` declares those that
matter for speed, and `running_server` runs a server with them. A server that cannot start, or dies, becomes a
BenchError with the launcher's own sentence. Environment variables reach the launcher unread.

What is awaited meanwhile runs on uvloop, so that SIGTERM ends it as Ctrl-C does: a handler of `signal.signal` raises
wherever the program is just then, and within a callback of a connection the loop takes that for an error of the
connection; a handler of the loop's own cancels what is awaited.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from benchmark import options
from benchmark.cost import shapes
from benchmark.result import ROOT, BenchError
from host import cpu_kinds
from host.process import end_with_parent

LAUNCHER = ROOT / "launcher.py"  # beside this package, in a checkout and where it is installed
DEMO = ROOT / "server" / "demo"
OFFLOADING = ("weights_on_device", "weights_on_host", "offload_dir")  # settings of where weights are
STOP_SECONDS = 30.0  # a launcher that has not ended by then is killed
COMMAND_STOP_SECONDS = 40.0  # likewise a command, which has a server to stop before
READY = "Lockstep is ready at "


@dataclass
class Startup:
    """How a server's start went, for the report."""

    table: str = ""  # what was loaded and which limits came of it, as the launcher prints it
    ready_s: float = 0.0  # from the launch until it answers


@dataclass(frozen=True)
class MeasuredModel:
    """What is to be measured: its name in the report, its folder or repository, and whether it has weights."""

    name: str
    location: str
    random_weights: bool


class Server:
    """A launcher that is ready. `url` is its HTTP address, `sockets` are its shards' in rank order."""

    def __init__(self, flags: Sequence[str], sockets: Sequence[str]) -> None:
        self.sockets = list(sockets)
        self.url = ""
        self.startup = Startup()
        self._started_at = time.monotonic()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()  # also set when the output has ended
        self._process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the benchmark, which then stops the server
            preexec_fn=end_with_parent(signal.SIGTERM),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises BenchError when it cannot start."""
        self._ready.wait()
        if not self.url:
            raise BenchError(f"the server did not start: {self._cause()}")

    def failure(self) -> str | None:
        """Why the server has ended, or None while it runs."""
        return None if self._process.poll() is None else f"the server ended: {self._cause()}"

    def wait_ended(self, seconds: float) -> None:
        """Wait so many seconds at most for the launcher to end, so that a failing server can say why."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def shard_pids(self) -> list[int]:
        """Process ids of the shards, in no order. Linux only."""
        children = [pid for pid in _pids() if _parent(pid) == self._process.pid]
        return [pid for pid in children if _name(pid).startswith("shard-")]

    def stop(self) -> None:
        """End the launcher and everything that it started, by force after STOP_SECONDS."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        """Take the launcher's lines until they end: one that nobody reads would be dropped, with its cause."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            record = _record(line)
            message = str(record.get("message", ""))
            self._last_lines.append(message)
            if record.get("raw"):
                self.startup.table = message
            if message.startswith(READY):
                self.startup.ready_s = time.monotonic() - self._started_at
                self.url = message.removeprefix(READY).split()[0]
                self._ready.set()
        self._ready.set()

    def _cause(self) -> str:
        self._process.wait(STOP_SECONDS)
        assert self._process.stderr is not None
        errors = [line.removeprefix("error: ") for line in self._process.stderr.read().splitlines() if line.strip()]
        return "; ".join(errors) or (self._last_lines[-1] if self._last_lines else "it did not say why")


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    return record if isinstance(record, dict) else {"message": line.rstrip()}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:  # it has ended meanwhile
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def peak_memory(pid: int) -> int:
    """Most bytes that the process ever had in memory (VmHWM). Raises BenchError when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        raise BenchError(f"cannot read the memory of process {pid}: {error.strerror}") from None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def startup_of(server: Server | None) -> dict[str, Any]:
    """How its start went, for a result's JSON; nothing for a server that is not ours."""
    return {} if server is None else {"startup": asdict(server.startup)}


# --------------------------------------------------------------------------------------------------------- command line


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the launcher's flags that decide speed."""
    group = parser.add_argument_group("server to start")
    model = group.add_mutually_exclusive_group()
    model.add_argument("--model-id", metavar="ID", help="model folder or repository (default: the embedded model)")
    model.add_argument(
        "--random-weights",
        metavar="SHAPE",
        help="random weights of a model's shape: a config.json, a model folder, or one of " + ", ".join(shapes.names()),
    )
    group.add_argument("--num-shard", type=options.positive, metavar="N", help="processes that the model is split over")
    group.add_argument("--dtype", choices=list(shapes.DTYPE_BYTES), help="data type of the computation")
    group.add_argument("--device", metavar="KIND", help="device: auto, cuda or cpu (default: auto)")
    add_kernels_argument(group)
    group.add_argument("--quantize", metavar="FORMAT", help="format of the linear layers' weights, such as int8")
    group.add_argument("--kv-cache-dtype", metavar="KIND", help="data type of the KV cache, such as int8")
    group.add_argument("--weights-on-device", metavar="SHARE", help="share of the layers, such as 40%%, 6GB or auto")
    group.add_argument("--weights-on-host", metavar="SHARE", help="share of the layers for a GPU, such as 40%% or 6GB")
    group.add_argument("--offload-dir", metavar="DIR", help="folder on a disk for streamed weights")


def add_kernels_argument(group: argparse._ActionsContainer) -> None:
    """Declare which CPU kernels a command's servers have."""
    kinds = ", ".join(cpu_kinds.CHOICES)
    group.add_argument("--cpu-kernels", metavar="KIND", help=f"CPU kernels: {kinds} (default: auto)")


@contextmanager
def model_for(args: argparse.Namespace) -> Iterator[MeasuredModel]:
    """The model that the arguments name; the folder of a shape exists within the block."""
    with ExitStack() as stack:
        if args.random_weights is None:
            yield MeasuredModel(args.model_id or "server/demo", args.model_id or str(DEMO), random_weights=False)
            return
        named = shapes.find(args.random_weights)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-shape-")))
        shapes.make_model_folder(named, folder)
        yield MeasuredModel(f"{named.name} (random weights)", str(folder), random_weights=True)


def launch_flags(args: argparse.Namespace, model: MeasuredModel) -> list[str]:
    """The launcher's flags for the arguments of `add_server_arguments`."""
    flags = ["--model-id", model.location]
    flags += ["--random-weights"] if model.random_weights else []
    settings = ("num_shard", "dtype", "device", "cpu_kernels", "quantize", "kv_cache_dtype", *OFFLOADING)
    given = {"--" + name.replace("_", "-"): getattr(args, name) for name in settings}
    return flags + flags_of(given)


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Launcher flags with their values, as a command line has them; a setting that is None is left to the launcher."""
    return [part for flag, value in settings.items() if value is not None for part in (flag, str(value))]


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[Server]:
    """A server with these launcher flags, ready within the block and gone after it."""
    if not LAUNCHER.is_file():
        raise BenchError(f"{LAUNCHER} is missing: install Lockstep whole, or measure a running server")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        prefix = os.path.join(folder, "shard")
        own = ["--hostname", "127.0.0.1", "--port", "0", "--json-output", "--shard-uds-path", prefix]
        own += ["--max-deaths", "0"]  # what is measured is one life of a server
        own += ["--log-level", "info"]  # or the table would be missing where the environment asks for less
        own += ["--graceful-termination-timeout", "0"]  # nobody waits for an answer when we stop it
        server = Server([*own, *flags], ())
        try:
            server.wait_ready()
            server.sockets = sockets_at(prefix)
            yield server
        finally:
            server.stop()


def sockets_at(prefix: str) -> list[str]:
    """Sockets `PREFIX-0`, `PREFIX-1`, … in rank order. Raises BenchError when there is none."""
    folder, name = os.path.split(os.path.abspath(prefix))
    try:
        endings = [entry.removeprefix(f"{name}-") for entry in os.listdir(folder) if entry.startswith(f"{name}-")]
    except OSError:
        endings = []
    ranks = sorted(int(ending) for ending in endings if ending.isdecimal())
    if not ranks or ranks != list(range(len(ranks))):
        raise BenchError(
            f"no shards listen at {prefix}-0 and on: start the server with --shard-uds-path {prefix}, and give the "
            "same path here"
        )
    return [f"{prefix}-{rank}" for rank in ranks]


# --------------------------------------------------------------------------------------------------------- interruption


T = TypeVar("T")


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; in the main thread. Raises KeyboardInterrupt where SIGINT or SIGTERM came meanwhile."""
    came: list[int] = []

    async def interruptible() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end() -> None:
            came.append(signal.SIGTERM)
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, end)
        try:
            return await main
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        return uvloop.run(interruptible())
    except asyncio.CancelledError:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------------------------------------------- memory


def peak_host_memory(pids: Sequence[int]) -> int:
    """Bytes of all processes together (VmHWM of each). Raises BenchError when one is gone."""
    return sum(peak_memory(pid) for pid in pids)


def peak_gpu_memory(pids: Sequence[int]) -> int | None:
    """Bytes on all GPUs together, as the driver reports at the end; None where it does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        used = {int(pid): int(mib) * 2**20 for pid, mib in (line.split(",") for line in listing.splitlines())}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return sum(used[pid] for pid in pids) if used.keys() >= set(pids) else None


# ------------------------------------------------------------------------------------------------------------- commands


def started_command(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """A command of this benchmark in a process of its own, of which standard error is read."""
    command = [sys.executable, "-m", "benchmark", *arguments]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdout=nowhere, stderr=subprocess.PIPE, text=True, errors="replace")


def stop_command(process: subprocess.Popen[str]) -> None:
    """End a command that still runs, and with it the server that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(COMMAND_STOP_SECONDS)
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
