"""The command `lockstep check -- ARGS`: whether a launch with these arguments would start here, and how.

ARGS are those of a launch, or a command line of TGI as it stands, `docker run` included. All problems are found in one
run. Weights are neither read nor fetched, and torch is not imported. Left out: what only a start can tell, such as how
fast it is, or whether the device has a kernel for a format.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from host.folders import nearest_folder
from host.version import package_version
from launch.commands.estimate import Estimate, estimate, is_offloaded
from launch.compatibility import docker, platforms, tgi
from launch.errors import Refusal, attempt
from launch.files import check_sockets
from launch.flags import Parser, read_command_line
from launch.logs import printable
from launch.machine import Placement, PortTaken, bind, has_gpu_driver, place, storage_warnings
from launch.models import Description, find_description, is_offline
from launch.nodes import node_warnings
from launch.settings import Settings, flag, public_settings, read_settings
from server.arch import families
from server.checkpoint.files import (
    HubError,
    check_safetensors,
    checked_file,
    choose_weights,
    need_space,
    read_json,
    readable,
    refuse_placeholder,
    weight_files,
)
from server.checkpoint.hub import TOKENIZER_SOURCES

# What stands before the arguments of a server on the command lines that people have.
PROGRAMS = ((tgi.PROGRAM,), ("lockstep",), ("vllm", "serve"), ("llama-server",), ("sglang", "serve"))
IMAGE = {"PORT": "80", "HF_HOME": "/data", "LOCKSTEP_HOSTNAME": "0.0.0.0"}  # the variables of TGI's image, and of ours
DERIVED = ("max_input_length", "max_total_tokens", "max_batch_total_tokens")  # from the model, where not given
OWN_ROWS = ("model_id", "dtype", "device", "num_shard")  # settings that have rows of their own
TRACING = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc")
# What a model that runs through transformers cannot have.
OF_FAMILIES = ("kv_cache_dtype", "quantize", "weights_on_device", "kv_on_device", "rope_scaling", "rope_factor")
AUTO_CLASSES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
WIDTH = 120  # columns at most
MOST_VALUE = 26  # of them for a value; a longer one, such as a model's path, stands out of line


@dataclass
class Findings:
    """What is known of a launch before it: rows of name, value and reason, and sentences."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # for which it would not start
    notes: list[str] = field(default_factory=list)  # what changes nothing, or means something else
    unchecked: list[str] = field(default_factory=list)

    def add(self, name: str, value: object, reason: str = "") -> None:
        """One row."""
        self.rows.append((name, printable(str(value)), reason))

    def attempt(self, action: Callable[[], Any]) -> Any:
        """What the action returns; None where it raises, whose sentences are problems then."""
        return attempt(action, self.problems.append)


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
    words = _behind_dashes(words)
    try:
        container = docker.read_run(words, environ)
    except ValueError as error:
        raise Refusal([str(error)], 2) from None
    if container is not None:
        return _inside(container)
    return Launch(_behind_dashes(_behind_program(words)), environ)


def _behind_dashes(words: list[str]) -> list[str]:
    return list(dropwhile(lambda word: word == "--", words))


def _behind_program(words: list[str]) -> list[str]:
    names = [Path(word).name for word in words[:1]] + words[1:]
    return next((words[len(program) :] for program in PROGRAMS if tuple(names[: len(program)]) == program), words)


def _inside(container: docker.Container) -> Launch:
    """What the program in a container of TGI's image, or of ours in its place, is given."""
    inner = IMAGE | container.variables
    environ = {name: container.on_host(value) for name, value in inner.items()}
    environ.setdefault("HUGGINGFACE_HUB_CACHE", f"{environ['HF_HOME']}/hub")
    try:
        words = platforms.arguments(_behind_program(list(container.arguments)), inner)
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
    _check_files(settings, placement, findings)
    findings.add("model", settings.shown_model, _about_model(settings, findings))
    findings.add("device", placement.device, str(placement.layout))
    found = None if settings.is_null_model else _check_model(settings, placement, launch, findings)
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
        bind(hostname, port).close()
    except PortTaken:
        findings.notes.append(f"port {port} is taken now: stop the server that has it first")
    except Refusal as refusal:
        if not container:  # a container's port is opened by root
            findings.problems += refusal.problems


def _about_model(settings: Settings, findings: Findings) -> str:
    if settings.sources["model_id"] == "default":
        theirs = tgi.SETTINGS["model_id"].default
        findings.notes.append(f"no model is named: the small one that comes with Lockstep is served; TGI: {theirs}")
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


def _check_files(settings: Settings, placement: Placement, findings: Findings) -> None:
    """Whether what the settings name is there, and can be read by those who need it."""
    values = settings.values
    checks: dict[str, Callable[[Path], object]] = {
        "tokenizer_config_path": lambda path: None,  # it is read with the tokenizer
        "chat_template": lambda path: path.read_bytes(),
        "api_keys_file": _read_keys,
    }
    for name, check in checks.items():
        path = Path(values[name] or "").expanduser()
        if values[name] and not path.is_file():
            findings.problems.append(f"{flag(name)} is {printable(values[name])}, which is no file: check the path")
        elif values[name]:
            findings.attempt(partial(check, path))
    if values["shard_uds_path"]:
        findings.attempt(lambda: check_sockets(values["shard_uds_path"], placement.layout.world_size))
    missing = [package for package in TRACING if package_version(package) == "not installed"]
    if values["otlp_endpoint"] and missing:
        findings.problems.append(
            f"--otlp-endpoint needs {' and '.join(missing)}: pip install --editable '.[otel]' in Lockstep's folder"
        )


def _read_keys(path: Path) -> None:
    from router.accounts import read_keys  # which takes time that hardly any check needs

    read_keys(path)


# ---------------------------------------------------------------------------------------------------------------- model


def _check_model(settings: Settings, placement: Placement, launch: Launch, findings: Findings) -> Estimate | None:
    """Look at the model's files, and what it takes; None where that is not known."""
    with tempfile.TemporaryDirectory() as spare:
        try:
            model = find_description(settings, launch.variables, Path(spare))
            config = read_json(model.folder / "config.json", "the model's description")
        except HubError as error:
            findings.problems.append(str(error))
            findings.unchecked.append("the model: its shards, memory and longest sequence")
            return None
        _check_tokenizer(settings, model, findings)
        is_ours = findings.attempt(lambda: families.has(config))
        if is_ours is None:
            return None
        if not is_ours:
            _check_fallback(settings, config, placement, findings)
        found = (
            estimate(settings, placement, model.folder, launch.variables, findings.problems.append) if is_ours else None
        )
        if found is not None:
            _add_estimate(settings, placement, found, findings)
        _check_weights(settings, model, launch, found, findings)
        return found


def _check_tokenizer(settings: Settings, model: Description, findings: Findings) -> None:
    folder, names = model.folder, model.names or {path.name for path in model.folder.iterdir()}
    if "tokenizer.json" in names:
        if model.names:
            findings.unchecked.append("the tokenizer, which is fetched at the first start")
        else:
            given = settings.values["tokenizer_config_path"]
            findings.attempt(lambda: _load_tokenizer(folder, given if given and Path(given).is_file() else None))
    elif names & set(TOKENIZER_SOURCES):
        findings.unchecked.append("the tokenizer, which is converted at the first start")
    elif model.names or model.cache is None:
        findings.problems.append(
            f"{settings.shown_model} has no tokenizer.json: add it, or serve a model that comes with its tokenizer"
        )
    else:
        findings.unchecked.append("the tokenizer, which is not in the cache")


def _load_tokenizer(folder: Path, tokenizer_config_path: str | None) -> None:
    from router.text.tokenizer import ModelTokenizer  # which takes time

    refuse_placeholder(checked_file(folder, "tokenizer.json"))
    ModelTokenizer.load(str(folder), None, tokenizer_config_path)


def _check_fallback(settings: Settings, config: Mapping[str, Any], placement: Placement, findings: Findings) -> None:
    """A model of no family here."""
    kind, defaults = config.get("model_type"), public_settings()
    known = known_to_transformers()
    if known is not None and kind not in known:
        findings.problems.append(
            f"model_type {kind!r} is no language model of Lockstep's or transformers': take another"
        )
        return
    findings.notes.append(
        f"config.json says model_type {kind!r}, which runs through transformers: one shard, one sequence at a time"
    )
    if placement.layout.world_size > 1:
        findings.problems.append(f"model_type {kind!r} runs on one shard only: give --num-shard 1")
    findings.problems += [
        f"model_type {kind!r} runs as it is only: leave out {flag(name)}"
        for name in OF_FAMILIES
        if settings.values[name] not in (defaults[name].default, "100%")
    ]
    findings.unchecked.append("whether transformers can load this model, and its memory")


def known_to_transformers() -> set[str] | None:
    """Each model_type that transformers generates text with, read without importing it; None where that is not said."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return None
    table = Path(package.origin).parent / "models/auto/modeling_auto.py"
    text = table.read_text() if table.is_file() else ""
    maps = [re.search(rf"^{name} = OrderedDict\((.*?)^\)", text, re.MULTILINE | re.DOTALL) for name in AUTO_CLASSES]
    return {kind for found in maps if found for kind in re.findall(r'\(\s*"([\w.-]+)",', found[1])} or None


def _check_weights(
    settings: Settings, model: Description, launch: Launch, found: Estimate | None, findings: Findings
) -> None:
    """Whether the weights are whole, or can be fetched."""
    override = settings.values["weights_cache_override"]
    if settings.values["random_weights"]:
        return
    try:
        files = weight_files(model.folder if override is None else Path(override).expanduser())
        for path in files:
            if path.suffix == ".safetensors":
                check_safetensors(path)
    except HubError as error:
        if override is not None or model.cache is None or is_offline(launch.variables):
            findings.problems.append(str(error))
        else:
            _check_download(settings, model, launch, found.weight_bytes if found else 0, findings)
        return
    if files[0].suffix == ".bin":
        findings.notes.append(f"{files[0].name} is converted to safetensors at the first start")
    elif found is not None and (layers := _count_layers(files)) < found.num_layers:
        findings.problems.append(
            f"{files[0].parent} has weights of {layers} layers, but config.json says {found.num_layers}: fetch it again"
        )


def _count_layers(files: Iterable[Path]) -> int:
    """By the first number in the names of tensors, as all families write it."""
    highest = -1
    for path in files:
        with safe_open(path, framework="np") as file:
            numbers = (re.search(r"\.(\d+)\.", f".{name}") for name in file.keys())
            highest = max([highest, *(int(number[1]) for number in numbers if number)])
    return highest + 1


def _check_download(settings: Settings, model: Description, launch: Launch, wanted: int, findings: Findings) -> None:
    """Whether the weights would be found, and have room."""
    if model.names and not choose_weights(model.names):
        findings.problems.append(f"{settings.shown_model} has no weights in a supported format: *.safetensors or *.bin")
        return
    size = f"about {readable(wanted)}" if wanted else "them"
    findings.unchecked.append(f"the weights: the first start downloads {size}")
    assert model.cache is not None
    if launch.container and not any(map(model.cache.is_relative_to, launch.container.mounts.values())):
        findings.notes.append(f"no folder of this machine is mounted at {model.cache}, where downloads go")
        return
    folder = nearest_folder(model.cache)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        findings.problems.append(f"{model.cache} cannot be made: {error.strerror}; move --huggingface-hub-cache")
        return
    findings.attempt(lambda: need_space(folder, wanted, "for the weights: make room"))


def _add_estimate(settings: Settings, placement: Placement, found: Estimate, findings: Findings) -> None:
    count, unit = (found.parameters / 1e6, "million") if found.parameters < 1e9 else (found.parameters / 1e9, "billion")
    findings.add("parameters", f"{count:.3g} {unit}", found.stored)
    findings.add("dtype", found.dtype, found.dtype_reason)
    room = found.capacity
    if found.memory is None:
        why = (
            "what is not on the device is chosen at the start"
            if is_offloaded(settings)
            else "nvidia-smi does not tell it"
        )
        findings.unchecked.append(f"memory: {why}")
    if room is None or found.memory is None:
        return
    findings.add("weights", f"{readable(room.weight_bytes_per_shard)} per shard")
    size = room.max_batch_total_tokens * room.kv_bytes_per_token_per_shard
    bytes_each = f"{room.kv_bytes_per_token_per_shard} bytes each; at most {room.kv_tokens} tokens fit"
    findings.add("KV cache", f"{readable(size)} per shard", f"{room.max_batch_total_tokens} tokens, {bytes_each}")
    count = placement.layout.num_local
    shared = f", shared by {count} shards" if placement.device == "cpu" and count > 1 else ""
    findings.add("memory", readable(found.memory.free_bytes), found.memory.described + shared)
    if found.memory.in_use:
        findings.notes.append(f"{found.memory.in_use} are in use now, and must be free when the server starts")


# --------------------------------------------------------------------------------------------------------------- report


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
    fits = "what fits, or max_concurrent_requests times max_total_tokens if that is less"
    why = lengths.reasons | {"max_batch_total_tokens": fits}
    why |= {name: source for name in DERIVED if (source := settings.sources[name]) != "default"}
    result: dict[str, tuple[object, str]] = {
        "max_input_length": (lengths.max_input_length, why["max_input_length"]),
        "max_total_tokens": (lengths.max_total_tokens, why["max_total_tokens"]),
    }
    if room:
        result["max_batch_total_tokens"] = (room.max_batch_total_tokens, why["max_batch_total_tokens"])
    return result


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(findings: Findings, width: int) -> str:
    """For people: the verdict and the problems first."""
    count = len(findings.problems)
    verdict = "would start, as far as this could be checked" if findings.unchecked else "would start"
    if count:
        verdict = f"would not start: {count} problem{'s' if count > 1 else ''}"
    parts = [verdict, *(_item(problem, width) for problem in findings.problems)]
    if findings.rows:
        parts += ["", _aligned(findings.rows, width)]
    for heading, sentences in (("notes", findings.notes), ("not checked", findings.unchecked)):
        if sentences:
            parts += ["", heading, *(_item(sentence, width) for sentence in sentences)]
    return "\n".join(parts) + "\n"


def _item(sentence: str, width: int) -> str:
    return _wrapped("- ", printable(sentence), width)


def _aligned(rows: Iterable[tuple[str, str, str]], width: int) -> str:
    rows = list(rows)
    columns = [max(len(r[column]) for r in rows if len(r[column]) <= MOST_VALUE) for column in (0, 1)]
    return "\n".join(_wrapped(f"{n:<{columns[0]}}  {v:<{columns[1]}}  ", reason, width) for n, v, reason in rows)


def _wrapped(head: str, text: str, width: int) -> str:
    """The text behind its head, with as many lines as it needs."""
    room = max(width - len(head), 30)
    first, *more = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join([f"{head}{first}".rstrip(), *(" " * len(head) + line for line in more)])
