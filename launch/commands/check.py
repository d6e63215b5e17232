"""The command `lockstep check -- ARGS`: whether a launch with these arguments would start here, and how.

ARGS are those of a launch, or a command line of TGI as it stands, `docker run` included. All problems are found in one
run. Weights are neither read nor fetched, and torch is imported for models that are quantised or run through
transformers alone, which takes seconds. Left out: what only a start can tell, such as how
fast it is, or whether the device has a kernel for a format.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from host.version import package_version
from launch.commands.estimate import Estimate
from launch.commands.findings import Findings, render
from launch.commands.model_check import ModelCheck
from launch.compatibility import docker, platforms, tgi
from launch.errors import Refusal
from launch.files import check_sockets
from launch.flags import Parser, read_command_line
from launch.logs import printable
from launch.machine import Placement, PortTaken, access_warnings, bind, has_gpu_driver, place, storage_warnings
from launch.nodes import node_warnings
from launch.settings import Settings, flag, public_settings, read_settings

# What stands before the arguments of a server on the command lines that people have, behind a path or `python -m`.
PROGRAMS = (
    (tgi.PROGRAM,), ("lockstep",), ("vllm", "serve"), ("llama-server",), ("sglang", "serve"),
    ("vllm.entrypoints.openai.api_server",), ("sglang.launch_server",),
)  # fmt: skip
# What people have beside them, which starts no server or says elsewhere how.
OTHERS = ("text-generation-server", "text-generation-router", "docker-compose", "kubectl", "helm", "singularity")
SHELL = re.compile(r"(.*/)?(ba|da|z)?sh")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
IMAGE = {"PORT": "80", "HF_HOME": "/data", "LOCKSTEP_HOSTNAME": "0.0.0.0"}  # the variables of TGI's image, and of ours
DERIVED = ("max_input_length", "max_total_tokens", "max_batch_total_tokens")  # from the model, where not given
OWN_ROWS = ("model_id", "dtype", "device", "num_shard")  # settings that have rows of their own
TRACING = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc")
WIDTH = 120  # columns at most


@dataclass(frozen=True)
class Launch:
    """The launch that is meant, as if it ran here: a container's folders are the host's."""

    arguments: Sequence[str]
    variables: Mapping[str, str]
    container: docker.Container | None = None
    problem: str = ""  # for which the image would not start it


def run(argv: Sequence[str], environ: Mapping[str, str], write: Callable[[str], object]) -> int:
    """Write what is found. Returns 0 where the launch would start, else 1."""
    findings = examine(read_command(argv, environ))
    write(render(findings, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)))
    return 1 if findings.problems else 0


def print_text(text: str) -> None:
    """To standard output, whatever that can show, and whether or not somebody reads it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError):
        os.write(1, text.encode(encoding, errors="replace"))


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """The launch that is meant. Prints the help and leaves for `--help`. Raises Refusal."""
    words = list(argv)
    if words[:1] and words[0] in ("-h", "--help"):
        about = (
            "Tell whether a server would start with these arguments, with which limits and in how much memory. Nothing "
            "is loaded. TGI's command line is taken as it is, with `docker run` too. Exit code 0: it would start; 1: "
            "it would not; 2: it is not known which launch is meant."
        )
        Parser(prog="lockstep check", usage="lockstep check -- ARGUMENTS", description=about).parse_args(["--help"])
    try:
        words, variables = _behind_assignments(_behind_dashes(words))
        container = docker.read_run(words, {**environ, **variables})
        if container is not None:
            return _inside(container)
        words, more = _behind_program(words)
    except ValueError as error:
        raise Refusal([str(error)], 2) from None
    return Launch(_behind_dashes(words), {**environ, **variables, **more})


def _behind_dashes(words: list[str]) -> list[str]:
    return list(dropwhile(lambda word: word == "--", words))


def _behind_assignments(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """What follows NAME=VALUE at the start of a line for a shell, and these variables."""
    rest = list(dropwhile(ASSIGNMENT.match, words))
    return rest, _assigned(words[: len(words) - len(rest)])


def _assigned(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if ASSIGNMENT.match(word))


def _behind_program(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """A server's arguments, and the variables that are set before its name. Raises ValueError."""
    if len(words) > 2 and SHELL.fullmatch(words[0]) and re.fullmatch("-[a-z]*c", words[1]):
        try:
            words = shlex.split(words[2])
        except ValueError as error:
            raise ValueError(f"of {words[0]} {words[1]}, nothing can be read: {error}") from None
    names = [Path(word).name for word in takewhile(lambda word: not word.startswith("--"), words)]
    for start in range(len(names)):
        for program in PROGRAMS:
            if tuple(names[start : start + len(program)]) == program:
                return words[start + len(program) :], _assigned(words[:start])
    if names and names[0] in OTHERS:
        raise ValueError(
            f"of {names[0]}, nothing can be read: give the command line of {tgi.PROGRAM} or `docker run`, or the "
            "options alone"
        )
    return words, {}


def _inside(container: docker.Container) -> Launch:
    """What the program in a container of TGI's image, or of ours in its place, is given."""
    inner = IMAGE | container.variables
    environ = {name: container.on_host(value) for name, value in inner.items()}
    environ.setdefault("HUGGINGFACE_HUB_CACHE", f"{environ['HF_HOME']}/hub")
    try:
        words = platforms.arguments(container.arguments, inner)
    except ValueError as error:
        return Launch([], environ, container, str(error))
    return Launch([container.on_host(word) for word in words], environ, container)


def examine(launch: Launch) -> Findings:
    """Everything that can be told of a launch without starting it."""
    findings, environ = Findings(), launch.variables
    if launch.container:
        findings.unchecked += launch.container.unread
        if not re.search("tgi|text-generation-inference", launch.container.image):
            findings.notes.append(f"{launch.container.image} is read as TGI's image: port 80, and downloads in /data")
    if launch.problem:
        findings.problems.append(launch.problem)
    read = findings.attempt(lambda: read_command_line(launch.arguments))
    if read is None:
        findings.unchecked.append("everything else: the command line cannot be read")
        return findings
    flags, wrong_arguments = read
    settings, wrong_values = read_settings(flags, environ)
    placement, impossible = place(settings, environ)
    findings.problems += [*wrong_arguments, *wrong_values, *impossible]
    findings.notes += [*settings.idle, *storage_warnings(settings)]
    findings.notes += node_warnings(settings, placement.nodes, placement.layout)
    findings.notes += _other_meanings(settings)
    if wrong_values:
        findings.unchecked.append("what the wrong settings change: in their place stand the defaults")
    if placement.nodes.index == 0:
        _check_port(settings, launch.container, findings)
    if placement.device == "cuda" and not has_gpu_driver():
        findings.problems.append("GPUs are chosen by a variable, but none is here: check nvidia-smi, or unset it")
    if launch.container and launch.container.wants_gpus and placement.device == "cpu":
        findings.unchecked.append("GPUs: the container is given them, but none is seen here")
    _check_sockets_and_traces(settings, placement, findings)
    findings.add("model", settings.shown_model, _about_model(settings, environ, findings))
    findings.add("device", placement.device, str(placement.layout))
    model = ModelCheck(settings, placement, environ, launch.container, findings)
    found = None if settings.is_null_model else model.run()
    _add_settings(settings, found, findings)
    return findings


def _check_port(settings: Settings, container: docker.Container | None, findings: Findings) -> None:
    """Whether the port can be had. A server that is to be replaced may have it now."""
    hostname, port = settings.values["hostname"], settings.values["port"]
    if container and not container.shares_network:
        if str(port) not in container.ports:
            findings.notes.append(f"port {port} of the container is not published: give -p 8080:{port}")
            return
        hostname, port = "0.0.0.0", int(container.ports[str(port)])
        findings.add("published port", port)
    try:
        with bind(hostname, port) as listener:
            findings.notes += access_warnings(settings, listener)
    except PortTaken:
        findings.awaited.append(f"port {port} is free, which is taken now")
    except Refusal as refusal:
        if not container:  # a container's port is opened by root
            findings.problems += refusal.problems


def _about_model(settings: Settings, environ: Mapping[str, str], findings: Findings) -> str:
    if settings.sources["model_id"] == "default":
        theirs = tgi.SETTINGS["model_id"].default
        findings.notes.append(f"no model is named: the small one that comes with Lockstep is served; TGI: {theirs}")
        if environ.get("HF_MODEL_ID"):
            findings.notes.append("HF_MODEL_ID is read by the image alone: set MODEL_ID")
        return "default"
    revision = settings.values["revision"]
    return f"revision {printable(revision)}" if revision else ""


def _other_meanings(settings: Settings) -> list[str]:
    """A sentence for each setting of TGI's that was given and is not quite the same here."""
    return [
        f"{flag(name)}: {setting.reason}"
        for name, setting in tgi.SETTINGS.items()
        if setting.fate is tgi.Fate.TAKEN and setting.reason and settings.sources.get(name, "default") != "default"
    ]


def _check_sockets_and_traces(settings: Settings, placement: Placement, findings: Findings) -> None:
    """Whether sockets can be made where they are wanted, and traces sent."""
    values = settings.values
    if values["shard_uds_path"]:
        findings.attempt(lambda: check_sockets(values["shard_uds_path"], placement.layout.world_size))
    missing = [package for package in TRACING if package_version(package) == "not installed"]
    if values["otlp_endpoint"] and missing:
        findings.problems.append(
            f"--otlp-endpoint needs {' and '.join(missing)}: pip install --editable '.[otel]' in Lockstep's folder"
        )


def _add_settings(settings: Settings, found: Estimate | None, findings: Findings) -> None:
    """A row for each setting that was given, follows from the model, or is another than TGI's."""
    derived = _derived(settings, found) if found else {}
    for name, setting in public_settings().items():
        value, source = settings.values[name], settings.sources[name]
        theirs = tgi.SETTINGS[name].default if name in tgi.SETTINGS else ""
        if name in derived:
            value, source = derived[name]
        elif source == "default" and theirs and name != "cuda_graphs":
            source = f"default; TGI: {theirs}"
        elif source == "default" or setting.metadata.get("secret"):
            continue
        if name not in OWN_ROWS:
            findings.add(name, "not known" if value is None else _shown(value), source)


def _derived(settings: Settings, found: Estimate) -> dict[str, tuple[object, str]]:
    """The limits that follow from the model and the memory: value, and why."""
    lengths, room = found.lengths, found.capacity
    if lengths is None:
        return {}
    is_full_size = room is not None and room.max_batch_total_tokens < room.kv_tokens
    why = lengths.reasons | {"max_batch_total_tokens": "the largest load" if is_full_size else "what fits into memory"}
    why |= {name: source for name in DERIVED if (source := settings.sources[name]) != "default"}
    result: dict[str, tuple[object, str]] = {
        "max_input_length": (lengths.max_input_length, why["max_input_length"]),
        "max_total_tokens": (lengths.max_total_tokens, why["max_total_tokens"]),
    }
    if settings.sources["max_batch_prefill_tokens"] == "default" and not found.has_encoder:
        step = "default, or what takes about a second; TGI: from the GPU"
        result["max_batch_prefill_tokens"] = (settings.values["max_batch_prefill_tokens"], step)
    if room:
        result["max_batch_total_tokens"] = (room.max_batch_total_tokens, why["max_batch_total_tokens"])
    return result


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
