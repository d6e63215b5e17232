"""The command `lockstep check -- ARGS`: whether a launch with these arguments would start here, and how.

ARGS are those of a launch, or a command line of TGI as it stands, `docker run` included. All problems are found in one
run. Weights are neither read nor fetched, and torch is not imported. Left out: what only a start can tell, such as how
fast it is, or whether the device has a kernel for a format.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.commands.estimate import Estimate, estimate, is_offloaded
from launch.compatibility import docker, tgi
from launch.errors import Refusal
from launch.flags import Parser, read_command_line
from launch.logs import printable
from launch.machine import Placement, bind, place, storage_warnings
from launch.models import find_description, is_offline
from launch.nodes import node_warnings
from launch.settings import Settings, flag, read_settings
from server.arch import families
from server.checkpoint.files import HubError, check_safetensors, need_space, read_json, readable, weight_files
from server.checkpoint.hub import TOKENIZER_SOURCES

# What stands before the arguments of a server on the command lines that people have.
PROGRAMS = ((tgi.PROGRAM,), ("lockstep",), ("vllm", "serve"), ("llama-server",), ("sglang", "serve"))
FILES = ("tokenizer_config_path", "chat_template", "api_keys_file")  # settings that name a file
SHOWN = (
    *("hostname", "port", "max_input_length", "max_total_tokens", "max_batch_prefill_tokens"),
    *("max_batch_total_tokens", "max_concurrent_requests", "max_batch_size", "waiting_served_ratio", "max_best_of"),
    *("max_stop_sequences", "max_top_n_tokens", "max_client_batch_size", "payload_limit", "cors_allow_origin"),
    "enable_prefill_logprobs",
)
DERIVED = ("max_input_length", "max_total_tokens", "max_batch_total_tokens")  # from the model, where not given
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
        """What the action returns; None where it raises, whose sentence is a problem then."""
        try:
            return action()
        except Refusal as refusal:
            self.problems += refusal.problems
        except ValueError as error:
            self.problems.append(str(error))
        return None


def run(argv: Sequence[str], environ: Mapping[str, str], write: Callable[[str], object]) -> int:
    """Write what is found. Returns 0 where the launch would start, else 1."""
    findings = examine(*read_command(argv, environ))
    write(render(findings, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)))
    return 1 if findings.problems else 0


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """The arguments and the environment of the launch that is meant. Prints the help and leaves for `--help`."""
    words = list(argv)
    if words[:1] and words[0] in ("-h", "--help"):
        about = (
            "Tell whether a server would start with these arguments, with which limits and in how much memory. Nothing "
            "is loaded. TGI's command line is taken as it is, with `docker run` too. Exit code 0: it would start."
        )
        Parser(prog="lockstep check", usage="lockstep check -- ARGUMENTS", description=about).parse_args(["--help"])
    if words[:1] == ["--"]:
        words = words[1:]
    try:
        container = docker.read_run(words, environ)
    except ValueError as error:
        raise Refusal([str(error)], 2) from None
    if container is not None:
        words, environ = inside(container)
    for program in PROGRAMS:
        if tuple(words[: len(program)]) == program:
            words = words[len(program) :]
    return words, environ


def inside(container: docker.Container) -> tuple[list[str], Mapping[str, str]]:
    """What the program in a container is given, as if it ran here, with the host's port and folders."""
    environ = {name: container.on_host(value) for name, value in container.variables.items()}
    home = container.variables.get("HF_HOME", "/data")  # which is where TGI's image has it
    if container.on_host(home) != home:
        environ.setdefault("HUGGINGFACE_HUB_CACHE", f"{container.on_host(home)}/hub")
    if container.port:
        environ["PORT"] = container.port
    return [container.on_host(word) for word in container.arguments], {"LOCKSTEP_HOSTNAME": "0.0.0.0", **environ}


def examine(arguments: Sequence[str], environ: Mapping[str, str]) -> Findings:
    """Everything that can be told of a launch without starting it."""
    findings = Findings()
    read = findings.attempt(lambda: read_command_line(arguments))
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
        findings.attempt(lambda: bind(settings.values["hostname"], settings.values["port"]).close())
    _check_files(settings, findings)
    findings.add("model", settings.shown_model, _about_model(settings))
    findings.add("device", placement.device, str(placement.layout))
    found = None if settings.is_null_model else _check_model(settings, placement, environ, findings)
    _add_settings(settings, found, findings)
    return findings


def _about_model(settings: Settings) -> str:
    if settings.sources["model_id"] == "default":
        return f"default; TGI: {tgi.SETTINGS['model_id'].default}"
    revision = settings.values["revision"]
    return f"revision {printable(revision)}" if revision else ""


def _other_meanings(settings: Settings) -> list[str]:
    """A sentence for each setting of TGI's that was given and is not quite the same here."""
    return [
        f"{flag(name)}: {setting.reason}"
        for name, setting in tgi.SETTINGS.items()
        if setting.fate is tgi.Fate.TAKEN and setting.reason and settings.sources.get(name, "default") != "default"
    ]


def _check_files(settings: Settings, findings: Findings) -> None:
    for name in FILES:
        path = settings.values[name]
        if path is not None and not Path(path).expanduser().is_file():
            findings.problems.append(f"{flag(name)} is {printable(path)}, which is no file: check the path")


# ---------------------------------------------------------------------------------------------------------------- model


def _check_model(
    settings: Settings, placement: Placement, environ: Mapping[str, str], findings: Findings
) -> Estimate | None:
    """Look at the model's files, and what it takes; None where that is not known."""
    try:
        folder, is_local = find_description(settings, environ)
        config = read_json(folder / "config.json", "the model's description")
    except HubError as error:
        findings.problems.append(str(error))
        findings.unchecked.append("the model: its shards, memory and longest sequence")
        return None
    _check_tokenizer(folder, is_local, findings)
    if not findings.attempt(lambda: [families.has(config)]):
        return None
    if not families.has(config):
        _describe_fallback(config, placement, findings)
        return None
    found = estimate(settings, placement, folder, environ, findings.problems.append)
    if found is not None:
        _add_estimate(settings, placement, found, findings)
    wanted = found.weight_bytes if found else 0
    _check_weights(settings, folder, findings, missing_bytes=None if is_local or is_offline(environ) else wanted)
    return found


def _check_tokenizer(folder: Path, is_local: bool, findings: Findings) -> None:
    names = {path.name for path in folder.iterdir()}
    if is_local and "tokenizer.json" not in names and not names & set(TOKENIZER_SOURCES):
        findings.problems.append(
            f"{folder} has no tokenizer.json: add it, or serve a model that comes with its tokenizer"
        )


def _describe_fallback(config: Mapping[str, Any], placement: Placement, findings: Findings) -> None:
    """A model that is none of ours."""
    kind = config.get("model_type")
    findings.notes.append(
        f"config.json says model_type {kind!r}, which runs through transformers: one shard, one sequence at a time"
    )
    if placement.layout.world_size > 1:
        findings.problems.append(f"model_type {kind!r} runs on one shard only: give --num-shard 1")
    findings.unchecked.append("whether transformers has this model, and its memory")


def _check_weights(settings: Settings, folder: Path, findings: Findings, missing_bytes: int | None) -> None:
    """Whether the weights are whole. missing_bytes: what the first start would download; None: it may not."""
    override = settings.values["weights_cache_override"]
    if settings.values["random_weights"]:
        return
    try:
        files = weight_files(folder if override is None else Path(override).expanduser())
        for path in files:
            if path.suffix == ".safetensors":
                check_safetensors(path)
    except HubError as error:
        if override is not None or missing_bytes is None:
            findings.problems.append(str(error))
            return
        findings.attempt(lambda: need_space(folder, missing_bytes, "for the weights: make room"))
        findings.unchecked.append(f"the weights: the first start downloads about {readable(missing_bytes)}")
        return
    if files[0].suffix == ".bin":
        findings.notes.append(f"{files[0].name} is converted to safetensors at the first start")


def _add_estimate(settings: Settings, placement: Placement, found: Estimate, findings: Findings) -> None:
    count, unit = (found.parameters / 1e6, "million") if found.parameters < 1e9 else (found.parameters / 1e9, "billion")
    findings.add("parameters", f"{count:.3g} {unit}", found.stored)
    findings.add("dtype", found.dtype, found.dtype_reason)
    room = found.capacity
    if found.memory is None:
        why = (
            "what is not on the device is chosen at the start" if is_offloaded(settings) else "nvidia-smi is not there"
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


# --------------------------------------------------------------------------------------------------------------- report


def _add_settings(settings: Settings, found: Estimate | None, findings: Findings) -> None:
    """A row for each limit: its value, where it comes from, and TGI's where nothing was given."""
    derived = _derived(settings, found) if found else {}
    for name in SHOWN:
        value, source = settings.values[name], settings.sources[name]
        if name in derived:
            value, source = derived[name]
        theirs = tgi.SETTINGS[name].default
        if settings.sources[name] == "default" and theirs and name not in derived:
            source += f"; TGI: {theirs}"
        findings.add(name, _shown(name, value), source)


def _derived(settings: Settings, found: Estimate) -> dict[str, tuple[object, str]]:
    """The limits that follow from the model and the memory: value, and why."""
    lengths, room = found.lengths, found.capacity
    if lengths is None:
        return {}
    why = lengths.reasons | {"max_batch_total_tokens": "for max_concurrent_requests of max_total_tokens, or what fits"}
    why |= {name: source for name in DERIVED if (source := settings.sources[name]) != "default"}
    result: dict[str, tuple[object, str]] = {
        "max_input_length": (lengths.max_input_length, why["max_input_length"]),
        "max_total_tokens": (lengths.max_total_tokens, why["max_total_tokens"]),
    }
    if room:
        result["max_batch_total_tokens"] = (room.max_batch_total_tokens, why["max_batch_total_tokens"])
    return result


def _shown(name: str, value: object) -> str:
    if value is None:
        return "not known" if name in DERIVED else "no limit"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(findings: Findings, width: int) -> str:
    """For people: the verdict and the problems first."""
    count = len(findings.problems)
    verdict = f"would not start: {count} problem{'s' if count > 1 else ''}" if count else "would start"
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
