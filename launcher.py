"""Starts and watches one Lockstep server: N shards and a router, from one table of settings.

The settings are the dataclass fields of LauncherConfig, RouterConfig and ShardConfig that carry a `help`; flags,
environment variables, `--help` and `docs/settings.md` are all made from them, so that none can be forgotten. Sequence:
read and check every setting, take the port, resolve the model once, write one JSON config per process into a private
folder, spawn all processes at once, forward their logs, and end with one sentence and an exit code:
0 after a stop by signal, 1 when something failed, 2 for a wrong setting, 128 + signal after a second signal.

It knows nothing of HTTP or tensors and imports neither torch nor transformers. The supervisor has one thread: a
selector over the children's pipes and a wake-up pipe for signals, so there is nothing to lock.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import difflib
import errno
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import select
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from router.config import RouterConfig, relation_problems
from server.checkpoint import hub
from server.config import ShardConfig

ROOT = Path(__file__).resolve().parent
DEMO = ROOT / "server" / "demo"
NULL_MODEL = "null"  # in place of a model: shards that answer at once with fixed tokens
SHARD_COUNTS = (1, 2, 4, 8)  # what the head counts and widths of real models divide by
SOCKET_PATH_BYTES = 107  # sun_path of Linux less its final NUL
LARGEST = 2**31 - 1  # of a setting without a bound of its own: what 32 bits hold on the wire and in tensors
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class LauncherConfig:
    """What the launcher itself needs to know; the other public settings belong to the router and the shards."""

    model_id: str = field(
        default=str(DEMO),
        metadata={
            "help": "Model to serve: a local folder, or a repository of the Hugging Face Hub such as "
            "`bigscience/bloomz-560m`. `null` is no model: fixed words at once, to measure the router alone.",
            "default": "server/demo (embedded)",
            "when": "Always, except to try Lockstep out.",
        },
    )
    revision: str | None = field(
        default=None,
        metadata={
            "help": "Branch, tag or commit of the repository.",
            "default": "main",
            "when": "Give a full commit to serve the same bytes for ever.",
        },
    )
    sharded: bool | None = field(
        default=None,
        metadata={
            "help": "true: one shard per visible GPU; false: one shard, unless num_shard says otherwise.",
            "default": "decided by num_shard",
            "when": "num_shard says the same more precisely.",
        },
    )
    num_shard: int | None = field(
        default=None,
        metadata={
            "help": "Number of processes that the model is split over.",
            "unit": "shards",
            "choices": SHARD_COUNTS,
            "default": "the number of visible GPUs; 1 on a CPU and for the embedded model",
            "when": "The model does not fit on one GPU, or should answer faster than one GPU can.",
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={
            "help": "Accepted for compatibility and not needed: code from a model repository is never run.",
            "when": "Never.",
        },
    )
    shard_uds_path: str | None = field(
        default=None,
        metadata={
            "help": "Path of the shards' unix sockets; `-RANK` is appended.",
            "default": "a private folder for each launch",
            "when": "Another program, such as the benchmark, talks to the shards directly.",
        },
    )
    master_addr: str = field(
        default="localhost",
        metadata={
            "help": "Address at which the shards find each other. Giving it or master_port makes them meet over TCP "
            "rather than through a private file.",
            "when": "The file system of the temporary folder has no locks. TCP listens on every network interface.",
        },
    )
    master_port: int = field(
        default=29500,
        metadata={
            "help": "TCP port at which the shards find each other; see master_addr.",
            "min": 1,
            "max": 65535,
            "when": "As for master_addr, when the port is taken.",
        },
    )
    huggingface_hub_cache: str | None = field(
        default=None,
        metadata={
            "help": "Folder for downloaded models.",
            "default": "that of the Hugging Face libraries",
            "when": "The home folder is small, or the cache is a mounted volume.",
        },
    )
    weights_cache_override: str | None = field(
        default=None,
        metadata={
            "help": "Folder whose *.safetensors are used in place of the model's own weights.",
            "default": "the model's own",
            "when": "The weights are already on a local disk.",
        },
    )
    env: bool = field(
        default=False,
        metadata={
            "help": "Print versions, cores, memory and GPUs before starting.",
            "environment": None,  # ENV=production is common in containers and means something else
            "when": "For a bug report.",
        },
    )


# Order of the settings in --help and docs/settings.md.
GROUPS = {
    "Model": "model_id revision trust_remote_code huggingface_hub_cache weights_cache_override tokenizer_config_path",
    "Sharding": "sharded num_shard shard_uds_path master_addr master_port",
    "Limits": "max_concurrent_requests max_input_length max_total_tokens max_batch_prefill_tokens "
    "prefill_chunk max_batch_total_tokens max_batch_size waiting_served_ratio max_waiting_tokens max_best_of "
    "max_stop_sequences max_top_n_tokens max_client_batch_size payload_limit disable_prefix_caching",
    "HTTP": "hostname port api_key cors_allow_origin validation_workers graceful_termination_timeout",
    "Engine": "dtype device threads quantize random_weights cuda_memory_fraction disable_custom_kernels "
    "watermark_gamma watermark_delta",
    "Logs": "json_output otlp_endpoint env",
}
SHORT_FLAGS = {"port": "-p", "env": "-e"}


class Refusal(ValueError):
    """A launch that cannot go on: one sentence per problem, and the exit code that goes with them."""

    def __init__(self, problems: Iterable[str], code: int) -> None:
        self.problems = list(problems)
        self.code = code
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True)
class Setting:
    """One public setting, as its dataclass field describes it."""

    name: str
    kind: type  # bool, int, float, str or tuple
    default: Any
    metadata: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.metadata.get("aliases", ()))

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true; `--sharded`, which has three states, needs its value."""
        return self.kind is bool and self.default is not None

    @property
    def default_text(self) -> str:
        if "default" in self.metadata:
            return str(self.metadata["default"])
        return str(self.default).lower() if self.kind is bool else str(self.default)

    def variable(self, name: str) -> str | None:
        """The environment variable that sets it under `name`, if there is one."""
        variable: str | None = self.metadata.get("environment", name.upper())
        return variable


@dataclass(frozen=True)
class Settings:
    """Every public setting's value, and where it came from: "flag", "environment" or "default"."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def pick(self, config: type) -> dict[str, Any]:
        """The values of the fields that `config` declares."""
        return {f.name: self.values[f.name] for f in dataclasses.fields(config) if f.name in self.values}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def public_settings() -> dict[str, Setting]:
    """All public settings by name, in the order of the documentation."""
    found = {}
    for config in (LauncherConfig, RouterConfig, ShardConfig):
        hints = typing.get_type_hints(config)
        for f in dataclasses.fields(config):
            if "help" in f.metadata:
                found[f.name] = Setting(f.name, _plain_type(hints[f.name]), f.default, f.metadata)
    ordered = [name for names in GROUPS.values() for name in names.split()]
    assert found.keys() == set(ordered), f"in no group, or in one without being a setting: {found.keys() ^ ordered}"
    return {name: found[name] for name in ordered}


def _plain_type(hint: Any) -> type:
    """`int | None` -> int, `tuple[str, ...]` -> tuple."""
    options = [t for t in typing.get_args(hint) if t is not types.NoneType] if isinstance(hint, types.UnionType) else []
    plain: type = options[0] if options else typing.get_origin(hint) or hint
    return plain


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal([message.removeprefix("argument ")], 2)


def build_parser(settings: Mapping[str, Setting]) -> argparse.ArgumentParser:
    """One option per setting, all taken as text: values are checked together later, with those of the environment."""
    about = "Serve a language model over HTTP. Each option may also be given by the environment variable in brackets."
    parser = _Parser(prog="lockstep", usage="lockstep [options]", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("--print-settings", action="store_true", help="print docs/settings.md and leave")
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for setting in (settings[name] for name in names.split()):
            for name in setting.names:
                group.add_argument(*_option_strings(setting, name), **_option(setting, name))
    return parser


def _option_strings(setting: Setting, name: str) -> list[str]:
    short = SHORT_FLAGS.get(name)
    return [flag(name), short] if short else [flag(name)]


def _option(setting: Setting, name: str) -> dict[str, Any]:
    variable = setting.variable(name)
    text = f"{setting.metadata['help']} Default: {setting.default_text}." + (f" [{variable}]" if variable else "")
    option: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "metavar": setting.metadata.get("unit", setting.kind.__name__).upper().replace("TUPLE", "ORIGIN"),
        "help": text.replace("%", "%%") if name == setting.name else argparse.SUPPRESS,
    }
    if setting.is_switch:
        option |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    if setting.kind is tuple:
        option["action"] = "append"
    return option


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Every setting's value, and one sentence for each that is wrong. A flag wins over the environment."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    for name, setting in public_settings().items():
        values[name], sources[name] = setting.default, "default"
        try:
            if given := _given(setting, flags, environ):
                text, sources[name], label = given
                values[name] = parse_value(setting, text, label)
        except ValueError as error:
            problems.append(str(error))
    rules = ("max_input_length", "max_total_tokens", "max_batch_total_tokens", "waiting_served_ratio")
    problems += relation_problems(**{name: values[name] for name in rules})
    return Settings(values, sources), problems


def _given(setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """(text, source, how to call it in a message), or None where the default holds."""
    by_flag = {flag(name): flags[name] for name in setting.names if name in flags}
    variables = [v for name in setting.names if (v := setting.variable(name))]
    by_environment = {variable: environ[variable] for variable in variables if environ.get(variable)}
    source = "flag" if by_flag else "environment"
    given: dict[str, Any] = by_flag or by_environment
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are two names of one setting: give only one of them")
    for label, value in given.items():
        return ",".join(value) if isinstance(value, list) else value, source, label
    return None


def parse_value(setting: Setting, text: str, label: str) -> Any:
    """`text` as the setting's type, or ValueError in one sentence that names value, bound and remedy."""
    try:
        value = _convert(setting.kind, text.strip())
        _check_bounds(setting.metadata, value)
    except ValueError as error:
        origin = "" if label.startswith("--") else f" (from environment {label})"
        shown = "***" if setting.metadata.get("secret") else _printable(text) or "empty"
        raise ValueError(f"{flag(setting.name)} is {shown}: {error}{origin}") from None
    return value


def _convert(kind: type, text: str) -> Any:
    if kind is bool:
        return _boolean(text)
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is str:
        if not text:
            raise ValueError("give a value or leave it out")
        return text
    try:
        value = kind(text)
    except ValueError:
        raise ValueError("give a whole number" if kind is int else "give a number") from None
    if not math.isfinite(value):
        raise ValueError("give a finite number")
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError("give true or false")
    return text.lower() in ("true", "1")


def _check_bounds(metadata: Mapping[str, Any], value: Any) -> None:
    if "choices" in metadata and value not in metadata["choices"]:
        raise ValueError(f"give one of {', '.join(str(choice) for choice in metadata['choices'])}")
    if "min" in metadata and value < metadata["min"]:
        raise ValueError(f"the smallest allowed value is {metadata['min']}")
    largest = metadata.get("max", LARGEST if isinstance(value, int) else math.inf)
    if not isinstance(value, (str, tuple)) and value > largest:
        raise ValueError(f"the largest allowed value is {largest}")


def unknown_arguments(unknown: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """One sentence for each argument that is no option, with the nearest option that exists."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    problems = []
    for position, argument in enumerate(unknown):
        name = _printable(argument.split("=")[0])  # the value of a misspelt --api-key is not for the screen
        if argument.startswith("-"):
            nearest = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "see lockstep --help"
            problems.append(f"{name} is not an option: {remedy}")
        elif position == 0 or not unknown[position - 1].startswith("-"):
            problems.append(f"{name} belongs to no option: a model is given as --model-id {name}")
    return problems


def render_settings() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Written by `python launcher.py --print-settings` from the code; do not edit.",
        "",
        "Every setting is a flag (`--max_batch_size` is read as `--max-batch-size`) and an environment variable. A",
        "flag wins over the environment; an empty variable counts as not set. A switch alone means true. `HOSTNAME`",
        "is not read, because shells and containers set it to the machine's name. `HF_TOKEN` and `HF_HUB_OFFLINE`",
        "have their usual meaning. `--version` and `--print-settings` print and leave.",
    ]
    settings = public_settings()
    for title, names in GROUPS.items():
        lines += ["", f"## {title}", "", "| flag | environment | unit | default | what it does | when to change it |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_settings_row(settings[name]) for name in names.split()]
    return "\n".join(lines) + "\n"


def _settings_row(setting: Setting) -> str:
    flags = [option for name in setting.names for option in _option_strings(setting, name)]
    variables = [v for name in setting.names if (v := setting.variable(name))]
    unit = setting.metadata.get("unit") or ("true or false" if setting.kind is bool else "")
    if "choices" in setting.metadata:
        unit = f"{unit}: ".lstrip(": ") + ", ".join(str(choice) for choice in setting.metadata["choices"])
    cells = (_code(flags), _code(variables) or "–", unit, setting.default_text)
    return "| " + " | ".join((*cells, setting.metadata["help"], setting.metadata["when"])) + " |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# ---------------------------------------------------------------------------------------------------------------------
# The machine: version, GPUs, shards, port


def version() -> str:
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def describe_environment(environ: Mapping[str, str]) -> list[str]:
    """What a bug report needs; no values of variables, which may be secret."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "grpcio", "fastapi", "uvicorn")
    return [
        f"lockstep {version()}, Python {platform.python_version()}, {platform.platform()}",
        f"{os.cpu_count()} cores, {memory:.1f} GiB memory, {visible_gpus(environ)} GPUs",
        ", ".join(f"{package} {_package_version(package)}" for package in packages),
    ]


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def visible_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES, else NVIDIA_VISIBLE_DEVICES, else nvidia-smi names."""
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        devices = environ.get("NVIDIA_VISIBLE_DEVICES") or "all"
        if devices in ("all", "void", "none"):
            return _installed_gpus()
    # CUDA ignores the list from its first invalid entry on; -1 is how people hide all GPUs.
    return len(list(takewhile(lambda d: d and not d.startswith("-"), (d.strip() for d in devices.split(",")))))


def _installed_gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def plan_shards(settings: Settings, gpus: int) -> tuple[str, int]:
    """(device, number of shards) by TGI's rules, or ValueError in one sentence."""
    device, sharded, count = (settings.values[name] for name in ("device", "sharded", "num_shard"))
    if device == "cuda" and gpus == 0:
        raise ValueError("--device is cuda but no GPU is visible: check nvidia-smi, or use --device cpu")
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    visible = gpus if device == "cuda" else 0
    if sharded and (count == 1 or (count is None and visible <= 1)):
        fact = "--num-shard is 1" if count == 1 else f"the number of visible GPUs is {visible}"
        raise ValueError(f"--sharded is true but {fact}: give --num-shard 2, 4 or 8, or leave --sharded out")
    if count is None:
        is_small = is_null(settings) or settings.sources["model_id"] == "default"
        count = 1 if sharded is False or (is_small and not sharded) else max(visible, 1)
    if count not in SHARD_COUNTS:
        raise ValueError(f"{count} GPUs are visible, which a model cannot be split over: give --num-shard 1, 2, 4 or 8")
    if device == "cuda" and count > gpus:
        most = max(allowed for allowed in SHARD_COUNTS if allowed <= gpus)
        raise ValueError(
            f"--num-shard is {count} but the number of visible GPUs is {gpus}: give at most {most}, or --device cpu"
        )
    return device, count


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that the port opens only when the model can answer."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise Refusal([f"--hostname {hostname} is no address of this machine: use 0.0.0.0 or 127.0.0.1"], 1) from None
    # Two sockets with SO_REUSEADDR may both be bound as long as neither listens, so a second launch would notice the
    # first only after loading. Hence without it first; with it only where old connections in TIME_WAIT hold the port.
    for reuse in (0, 1):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            listener.bind(address)
            return listener
        except OSError as error:
            listener.close()
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    raise Refusal([_bind_problem(hostname, port, problem)], 1)


def _bind_problem(hostname: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken: stop the server that has it, or give another --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} needs root: give a --port of 1024 or more"
    return f"cannot listen on {hostname} port {port}: {error.strerror}; use --hostname 0.0.0.0 or 127.0.0.1"


# ---------------------------------------------------------------------------------------------------------------------
# Files of one launch


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of this launch alone, removed at the end; short, because a socket's path may have 107 bytes."""
    parent = None if len(os.fsencode(tempfile.gettempdir())) < SOCKET_PATH_BYTES - 40 else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="lockstep-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_sockets(prefix: str, count: int) -> Iterator[tuple[str, ...]]:
    """Sockets at a path that the user chose. A lock keeps a second launch from stealing them, which gRPC would do."""
    sockets = tuple(f"{prefix}-{rank}" for rank in range(count))
    if len(os.fsencode(sockets[-1])) > SOCKET_PATH_BYTES:
        raise Refusal([f"--shard-uds-path {prefix} is too long: a socket's path may have 107 bytes"], 1)
    try:
        lock = os.open(f"{prefix}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refusal([f"--shard-uds-path {prefix} cannot be used: {error.strerror}; choose another"], 1) from None
    try:
        _take_lock(lock, prefix)
        _remove_sockets(sockets)
        yield sockets
        _remove_sockets(sockets)
    finally:
        os.close(lock)


def _take_lock(lock: int, prefix: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal([f"--shard-uds-path {prefix} is in use by another launch: choose another"], 1) from None


def _remove_sockets(sockets: Iterable[str]) -> None:
    for path in sockets:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise Refusal([f"--shard-uds-path: {path} exists and is no socket; move it away"], 1)
            os.unlink(path)


def child_environment(environ: Mapping[str, str], local_rendezvous: bool) -> dict[str, str]:
    """The launcher's environment without its secrets, and nothing left for a child to look up on the network."""
    child = {name: value for name, value in environ.items() if name not in (*TOKEN_VARIABLES, "API_KEY")}
    path = os.pathsep.join(part for part in (str(ROOT), environ.get("PYTHONPATH", "")) if part)
    child |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    child |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if local_rendezvous and sys.platform == "linux":
        child.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return child


def death_guard() -> Callable[[], None] | None:
    """What a child runs before exec, so that the kernel kills it when the launcher dies in any way. Linux only."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec it would be too late
    launcher = os.getpid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG

    def guard() -> None:
        libc.prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before prctl took effect
            os._exit(1)

    return guard


# ---------------------------------------------------------------------------------------------------------------------
# Logs

LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR", "FATAL": "ERROR"}
COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARN": "\x1b[33m", "ERROR": "\x1b[31m"}
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
KNOWN_FIELDS = {"timestamp", "level", "target", "message", "raw", "event", "consequence"}


def _printable(text: str) -> str:
    """`text` with control characters escaped: what a prompt or a file name says must not steer the terminal."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def _timestamp(given: object) -> str:
    """The record's own time if it has one, else now, in UTC to the millisecond."""
    try:
        moment = datetime.fromisoformat(str(given)).astimezone(UTC)
    except (ValueError, OverflowError):
        moment = datetime.now(UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class Output:
    """Standard output that never stalls the supervisor: what a blocked or closed reader does not take is dropped."""

    BACKLOG_BYTES = 1 << 20  # a reader may be this far behind before lines are dropped
    CHUNK_BYTES = 4096  # what a pipe that poll calls writable takes without blocking: PIPE_BUF

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._backlog = bytearray()
        self._closed = False
        self.dropped = 0

    @property
    def pending(self) -> bool:
        return bool(self._backlog)

    def write(self, text: str) -> None:
        line = text.encode(errors="backslashreplace") + b"\n"
        if self._closed or len(self._backlog) + len(line) > self.BACKLOG_BYTES:
            self.dropped += 1
            return
        self._backlog += line
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        while self._backlog and self._poll.poll(0):
            try:
                written = os.write(self._descriptor, self._backlog[: self.CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone
                self._closed = True
                self._backlog.clear()
                return
            del self._backlog[:written]


class Log:
    """Re-emits the records of all processes and writes the launcher's own."""

    def __init__(self, output: Output, as_json: bool, colour: bool = False) -> None:
        self.output = output
        self._as_json = as_json
        self._colour = colour

    def info(self, message: str) -> None:
        self.record("launcher", {"level": "INFO", "message": message})

    def warn(self, message: str) -> None:
        self.record("launcher", {"level": "WARN", "message": message})

    def flush(self) -> None:
        """Write what waited, and once the reader has caught up say how much it missed."""
        self.output.flush()
        if (dropped := self.output.dropped) and not self.output.pending:
            self.output.dropped = 0
            self._write("launcher", {"level": "WARN", "message": f"{dropped} log lines dropped: output was blocked"})

    def record(self, process: str, record: Mapping[str, Any]) -> None:
        self.flush()
        self._write(process, record)

    def _write(self, process: str, record: Mapping[str, Any]) -> None:
        level = str(record.get("level", "INFO")).upper()
        head = {"timestamp": _timestamp(record.get("timestamp")), "level": LEVELS.get(level, level)}
        complete = {**head, "target": process, **record, **head}
        self.output.write(self._json(process, complete) if self._as_json else self._text(process, complete))

    def _json(self, process: str, record: dict[str, Any]) -> str:
        rank = {"rank": int(process.removeprefix("shard-"))} if process.startswith("shard-") else {}
        return json.dumps({**record, "process": process, **rank})

    def _text(self, process: str, record: dict[str, Any]) -> str:
        message = str(record.get("message", ""))
        if record.get("raw") is True:  # a table, printed as it is
            return "\n".join(_printable(line) for line in message.split("\n"))
        extra = [
            f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in record.items() if k not in KNOWN_FIELDS
        ]
        level = _printable(record["level"])
        shown = f"{COLOURS.get(level, '')}{level:>5}\x1b[0m" if self._colour else f"{level:>5}"
        return f"{_printable(str(record['timestamp']))} {shown} {process}: " + _printable(" ".join([message, *extra]))


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@dataclass(frozen=True)
class Command:
    """One process to run: "router", or "shard-0" and so on."""

    name: str
    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()


class Child:
    """A running process: its pipes, the unfinished lines in them, and what it said about its end."""

    LINE_BYTES = 1 << 20  # a longer line is cut

    def __init__(self, command: Command, environment: Mapping[str, str], log: Log) -> None:
        self.name = command.name
        self.critical: str | None = None
        self.is_consequence = False
        self.is_ready = False
        self._log = log
        self._errors: deque[str] = deque(maxlen=50)
        self.process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=command.pass_fds,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
            preexec_fn=death_guard(),
        )
        assert self.process.stdout and self.process.stderr
        self.pipes = {self.process.stdout.fileno(): bytearray(), self.process.stderr.fileno(): bytearray()}
        for pipe in self.pipes:
            os.set_blocking(pipe, False)

    @property
    def title(self) -> str:
        return self.name.replace("-", " ")

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    def read(self, pipe: int) -> bool:
        """Forward what is in one pipe now; False at its end."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        buffer = self.pipes[pipe]
        buffer += data
        *lines, rest = buffer.split(b"\n")
        if rest and (not data or len(rest) > self.LINE_BYTES):
            lines, rest = [*lines, rest], bytearray()
        buffer[:] = rest
        for line in lines:
            self._forward(pipe, line.decode(errors="replace").rstrip("\r"))
        return bool(data)

    def drain(self) -> None:
        """Forward what a finished process left in its pipes; not until their end: a grandchild may hold them open."""
        for pipe in self.pipes:
            while select.select([pipe], [], [], 0)[0] and self.read(pipe):
                pass

    def close(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def signal(self, number: int) -> None:
        """Send to the process alone; SIGKILL to whatever it started, too."""
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
        elif self.is_running:
            self.process.send_signal(number)

    def _forward(self, pipe: int, line: str) -> None:
        is_error = self.process.stderr is not None and pipe == self.process.stderr.fileno()
        record = None if is_error else _parse_record(line)
        if record is None:
            if is_error:
                self._errors.append(line)
            if line.strip():
                self._log.record(self.name, {"level": "WARN", "message": line})
            return
        if record.get("level") == "CRITICAL" and self.critical is None:
            self.critical = str(record.get("message", ""))
            self.is_consequence = record.get("consequence") is True
        self.is_ready = self.is_ready or record.get("event") == "ready"
        self._log.record(self.name, record)

    @property
    def has_cause(self) -> bool:
        """Whether it ended for a reason of its own that is known, and not because another process did."""
        if self.critical is not None:
            return not self.is_consequence
        return self.process.returncode < 0

    @property
    def cause(self) -> str:
        """Why it ended, in one sentence."""
        code = self.process.returncode
        last = self._last_error()
        if self.critical is not None:
            return self.critical
        if code == -signal.SIGKILL:
            return (
                "killed by signal 9 (SIGKILL), most often the system's out-of-memory killer: use a smaller model, "
                "--quantize int8, a lower --max-batch-total-tokens, or a machine with more memory"
            )
        if code < 0:
            return f"killed by signal {-code} ({signal.strsignal(-code)})" + (f": {last}" if last else "")
        return last or f"it exited with code {code} without saying why"

    def _last_error(self) -> str:
        lines = [line.strip() for line in self._errors if line.strip()]
        exceptions = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
        return (exceptions or lines or [""])[-1][:500]


def _parse_record(line: str) -> dict[str, Any] | None:
    """The log record in one line of a child's output, if it is one."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "message" in record else None


class Phase(Enum):
    STARTING = auto()
    SERVING = auto()
    FAILING = auto()  # something ended by itself; another process may still say why
    DRAINING = auto()  # the router finishes its requests
    STOPPING = auto()  # every process is told to end


class Supervisor:
    """Runs the processes until a signal or a failure, and leaves none behind.

    `run` returns the exit code and, after a failure, sets `failure` to the sentence that says whose it was.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        environment: Mapping[str, str],
        log: Log,
        *,
        drain_seconds: float,
        on_ready: Callable[[], None] = lambda: None,
        stop_seconds: float = 10.0,
    ) -> None:
        self.failure: str | None = None
        self._commands = commands
        self._environment = environment
        self._log = log
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._stop_seconds = stop_seconds
        self._phase = Phase.STARTING
        self._children: list[Child] = []
        self._failed: list[Child] = []  # in the order in which they ended
        self._verb = "stopped"
        self._exit_code = 0
        self._deadline = math.inf
        self._at_deadline: Callable[[], None] = self._kill
        self._selector = selectors.DefaultSelector()

    def run(self, wakeup: int) -> int:
        """`wakeup` is the pipe into which `signals_to_pipe` writes the number of each signal."""
        self._selector.register(wakeup, selectors.EVENT_READ)
        try:
            for command in self._commands:
                self._spawn(command)
            while any(child.is_running for child in self._children):
                self._turn(wakeup)
        finally:
            self._kill()
            self._finish()
        return self._exit_code

    def _spawn(self, command: Command) -> None:
        child = Child(command, self._environment, self._log)
        self._children.append(child)
        for pipe in child.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, child)

    def _turn(self, wakeup: int) -> None:
        patience = 0.05 if self._log.output.pending else 60.0
        events = self._selector.select(max(0.0, min(patience, self._deadline - time.monotonic())))
        self._log.flush()
        for key, _ in events:
            if key.data is None:
                self._take_signals(os.read(wakeup, 4096))
            elif not key.data.read(key.fd):
                self._selector.unregister(key.fd)
        self._notice_ready()
        for child in self._children:
            if child.is_running and child.process.poll() is not None:
                self._take_exit(child)
        if time.monotonic() >= self._deadline:
            self._deadline = math.inf
            self._at_deadline()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._deadline = time.monotonic() + seconds
        self._at_deadline = action

    def _notice_ready(self) -> None:
        if self._phase is Phase.STARTING and any(c.is_ready for c in self._children if c.name == "router"):
            self._phase = Phase.SERVING
            self._on_ready()

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            if self._phase in (Phase.STARTING, Phase.SERVING):
                self._stop(number)
            else:
                self._exit_code = 128 + number
                self._kill()

    def _stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._phase is Phase.STARTING:
            self._log.info(f"{name}: stopping before the model is ready")
            self._stop_all(2.0)
            return
        self._phase = Phase.DRAINING
        self._log.info(f"{name}: running requests may finish within {self._drain_seconds:g} s; once more to abort")
        for child in self._children:
            if child.name == "router":
                child.signal(signal.SIGTERM)
        self._after(self._drain_seconds + self._stop_seconds, self._kill_router)

    def _kill_router(self) -> None:
        for child in self._children:
            if child.name == "router":
                child.critical = f"it had not finished its requests after {self._drain_seconds:g} s and was killed"
                child.signal(signal.SIGKILL)

    def _stop_all(self, patience: float) -> None:
        self._phase = Phase.STOPPING
        for child in self._children:
            child.signal(signal.SIGTERM)
        self._after(patience, self._kill)

    def _kill(self) -> None:
        self._phase = Phase.STOPPING
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _take_exit(self, child: Child) -> None:
        child.drain()
        if self._phase is Phase.STOPPING:
            return
        if self._phase is Phase.DRAINING and child.name == "router":
            if child.process.returncode:
                self._blame(child)
            self._stop_all(self._stop_seconds)
            return
        self._failed.append(child)
        if self._phase is not Phase.FAILING:
            self._verb = "cannot start" if self._phase is Phase.STARTING else "stopped"
            self._phase = Phase.FAILING
            self._after(1.0, self._fail)  # a rank that only lost its peers may be noticed before the one that failed
        if child.has_cause:
            self._fail()

    def _fail(self) -> None:
        culprit = next((c for c in self._failed if c.has_cause), None)
        culprit = culprit or next((c for c in self._failed if not c.is_consequence), self._failed[0])
        self._blame(culprit)
        self._kill()

    def _blame(self, child: Child) -> None:
        self.failure = f"{child.title} {self._verb}: {_printable(child.cause)}"
        self._exit_code = 1

    def _finish(self) -> None:
        for child in self._children:
            child.process.wait()
            child.drain()
            child.close()
        self._selector.close()
        limit = time.monotonic() + 1.0
        while self._log.output.pending and time.monotonic() < limit:
            time.sleep(0.01)
            self._log.flush()


@contextmanager
def signals_to_pipe() -> Iterator[int]:
    """Make every signal that concerns us a byte in the returned pipe, for the selector."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    numbers = [signal.SIGCHLD, signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to outlive the terminal
        numbers.append(signal.SIGHUP)
    previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reader)
        os.close(writer)


# ---------------------------------------------------------------------------------------------------------------------
# One launch


def leave_on_signal(log: Log) -> None:
    """Until the processes run there is nothing to drain: a signal ends the launch at once, in the middle of a download
    too. Files that are complete stay for the next launch; a conversion dies with its parent."""

    def leave(number: int, _: object) -> None:
        log.info(f"{signal.Signals(number).name}: stopped before the model was there")
        os._exit(0)  # threads of a download would hold up an orderly exit

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def convert_in_child(environment: Mapping[str, str]) -> hub.Convert:
    """How the hub module has files converted: in a process of its own, for it needs torch and reads untrusted files."""

    def convert(kind: str, source: Path, target: Path) -> None:
        argv = [sys.executable, "-P", "-m", "server.checkpoint.convert", kind, str(source), str(target)]
        job = subprocess.run(argv, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=death_guard())
        if job.returncode:
            lines = job.stderr.strip().splitlines() or [f"the conversion ended with code {job.returncode}"]
            raise hub.HubError(lines[-1].removeprefix("error: "))

    return convert


def resolve_model(settings: Settings, environ: Mapping[str, str], log: Log) -> hub.ResolvedModel:
    values = settings.values
    if values["trust_remote_code"]:
        log.warn("--trust-remote-code is not needed: code from a model repository is never run")
    try:
        return hub.resolve(
            str(DEMO) if is_null(settings) else values["model_id"],  # the null model speaks the embedded one's tokens
            revision=values["revision"],
            cache_dir=values["huggingface_hub_cache"],
            with_weights=not (values["random_weights"] or is_null(settings)),
            weights_override=values["weights_cache_override"],
            token=next((environ[name] for name in TOKEN_VARIABLES if environ.get(name)), None),
            offline=environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
            report=log.info,
            convert=convert_in_child(child_environment(environ, True)),
            user_cache=Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep",
        )
    except hub.HubError as error:
        raise Refusal([str(error)], 1) from None


def is_null(settings: Settings) -> bool:
    return bool(settings.values["model_id"] == NULL_MODEL)


def shown_model(settings: Settings) -> str:
    """The model's name for people; of the embedded one not this machine's path to it, which clients would see."""
    return "server/demo" if settings.sources["model_id"] == "default" else str(settings.values["model_id"])


def write_configs(
    folder: Path,
    settings: Settings,
    device: str,
    sockets: tuple[str, ...],
    model: hub.ResolvedModel,
    listener: socket.socket,
) -> list[Command]:
    """One JSON config per process in the private folder, and the commands that read them."""
    rendezvous = f"file://{folder}/rendezvous"
    if {settings.sources["master_addr"], settings.sources["master_port"]} != {"default"}:
        rendezvous = f"tcp://{settings.values['master_addr']}:{settings.values['master_port']}"
    given = settings.pick(RouterConfig) | {"model_id": shown_model(settings), "port": listener.getsockname()[1]}
    router = RouterConfig(
        model_path=str(model.path),
        tokenizer_path=str(model.tokenizer_path),
        shard_sockets=sockets,
        model_sha=model.sha,
        listen_fd=listener.fileno(),
        sources=dict(settings.sources),
        **given,
    )
    router.save(folder / "router.json")
    for rank, path in enumerate(sockets):
        shard = ShardConfig(
            model_path=str(model.path),
            weights_path=str(model.weights_path),
            rank=rank,
            world_size=len(sockets),
            socket_path=path,
            rendezvous=rendezvous,
            is_null=is_null(settings),
            **settings.pick(ShardConfig) | {"device": device},
        )
        shard.save(folder / f"shard-{rank}.json")
    shards = [_command("server", f"shard-{rank}", folder) for rank in range(len(sockets))]
    return [*shards, _command("router", "router", folder, (listener.fileno(),))]


def _command(module: str, name: str, folder: Path, pass_fds: tuple[int, ...] = ()) -> Command:
    config = str(folder / f"{name}.json")
    return Command(name, (sys.executable, "-P", "-m", module, "--config", config), pass_fds)


def launch(settings: Settings, environ: Mapping[str, str], device: str, count: int, log: Log) -> int:
    """Serve until a signal or a failure; returns the exit code."""
    started = time.monotonic()
    leave_on_signal(log)
    hostname = settings.values["hostname"]
    shards = f"{count} shards" if count > 1 else "one shard"
    with ExitStack() as stack:
        listener = stack.enter_context(bind(hostname, settings.values["port"]))
        log.info(f"Lockstep {version()} starts {shown_model(settings)} on {device} with {shards}")
        model = resolve_model(settings, environ, log)
        wakeup = stack.enter_context(signals_to_pipe())
        folder = stack.enter_context(private_folder())
        prefix = settings.values["shard_uds_path"]
        sockets = tuple(f"{folder}/shard-{rank}.sock" for rank in range(count))
        if prefix:
            sockets = stack.enter_context(shared_sockets(prefix, count))
        url = f"http://{f'[{hostname}]' if ':' in hostname else hostname}:{listener.getsockname()[1]}"

        def on_ready() -> None:
            hand_over(listener, folder)
            log.info(f"Lockstep is ready at {url} after {time.monotonic() - started:.1f} s")

        supervisor = Supervisor(
            write_configs(folder, settings, device, sockets, model, listener),
            child_environment(environ, settings.values["master_addr"] in ("localhost", "127.0.0.1", "::1")),
            log,
            drain_seconds=settings.values["graceful_termination_timeout"],
            on_ready=on_ready,
        )
        code = supervisor.run(wakeup)
        if supervisor.failure:
            raise Refusal([supervisor.failure], code)
        return code


def hand_over(listener: socket.socket, folder: Path) -> None:
    """Let go of what the router has by now: the socket, and its config."""
    # Connections are accepted from here on; this lets a later launch bind beside those in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.close()  # or the port would stay open while the router drains
    (folder / "router.json").unlink()  # holds the API key, and would outlive a kill -9


def _open_standard_streams() -> None:
    """A launcher started with closed standard streams must not get a socket under their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, str, int] | None:
    """Every check that needs no model: (settings, device, shard count), or None if only something was to be printed."""
    parser = build_parser(public_settings())
    dashed = [flag(a[2:].split("=")[0]) + a[len(a.split("=")[0]) :] if a.startswith("--") else a for a in argv]
    namespace, unknown = parser.parse_known_args(dashed)
    if namespace.version or namespace.print_settings:
        sys.stdout.write(f"lockstep {version()}\n" if namespace.version else render_settings())
        return None
    settings, problems = read_settings(vars(namespace), environ)
    problems = unknown_arguments(unknown, parser) + problems
    device, count = "cpu", 1
    try:
        gpus = 0 if settings.values["device"] == "cpu" else visible_gpus(environ)
        device, count = plan_shards(settings, gpus)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise Refusal(problems, 2)
    return settings, device, count


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `lockstep`."""
    _open_standard_streams()
    try:
        prepared = prepare(sys.argv[1:] if argv is None else argv, os.environ)
        if prepared is None:
            return 0
        settings, device, count = prepared
        colour = os.isatty(1) and not os.environ.get("NO_COLOR")
        log = Log(Output(1), settings.values["json_output"], colour)
        if settings.values["env"]:
            for line in describe_environment(os.environ):
                log.info(line)
        return launch(settings, os.environ, device, count, log)
    except Refusal as refusal:
        return _report(refusal)
    except OSError as error:  # a full disk, a file that may not be read, no more processes
        return _report(Refusal([f"cannot start: {error}"], 1))


def _report(refusal: Refusal) -> int:
    with suppress(OSError):
        os.write(2, "".join(f"error: {problem}\n" for problem in refusal.problems).encode(errors="replace"))
    return refusal.code


if __name__ == "__main__":
    sys.exit(main())
