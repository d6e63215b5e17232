"""Where the files of the model are that the settings name: downloaded and converted if need be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from host.process import end_with_parent
from launch.config import DEMO, TOKEN_VARIABLES, AdapterSource, parse_adapters
from launch.errors import Refusal
from launch.logs import Log
from launch.processes import child_environment
from launch.settings import Settings
from router.config import own_names
from server.adapters.config import AdapterConfig, AdapterError
from server.checkpoint import hub
from server.checkpoint.files import HubError

T = TypeVar("T")
# Where nothing depends on the hub's answer yet: how long it may be silent, and how long it may take in all.
SILENT_SECONDS, ANSWER_SECONDS = 3.0, 15.0


def resolve_model(
    settings: Settings, environ: Mapping[str, str], log: Log, *, needs_weights: bool = True
) -> hub.ResolvedModel:
    """The folders of the model that the settings name, downloaded and converted if need be. Raises Refusal."""
    values = settings.values
    is_null = settings.is_null_model
    return _resolve(
        str(DEMO) if is_null else values["model_id"],  # the null model speaks the embedded one's tokens
        values["revision"],
        settings,
        environ,
        log,
        with_weights=needs_weights and not (values["random_weights"] or is_null),
        weights_override=values["weights_cache_override"],
    )


def resolve_speculative_model(settings: Settings, environ: Mapping[str, str], log: Log) -> Path | None:
    """The folder of the model that proposes tokens, likewise; None: there is none. Raises Refusal.

    Behind its name may stand `@` and a revision. It may be no more than heads, which have no tokenizer.
    """
    name = settings.values["speculative_model"]
    if name is None or settings.is_null_model:
        return None
    model_id, revision = name_and_revision(name)
    found = _resolve(model_id, revision, settings, environ, log, with_weights=True, with_tokenizer=False)
    return _one_folder(found)


def resolve_adapters(settings: Settings, environ: Mapping[str, str], log: Log) -> list[tuple[str, Path]]:
    """Name and folder of each adapter that the settings name, likewise. Raises Refusal with every problem."""
    found, problems = [], []
    for source in parse_adapters(settings.values["lora_adapters"]):
        if problem := name_problem(source, settings):
            problems.append(problem)
            continue
        try:
            folder = hub.resolve_adapter(source.given, revision=source.revision, **_hub_of(settings, environ, log))
            if other := other_base(source.name, AdapterConfig.read(folder), settings):
                log.warn(other)
            found.append((source.name, folder))
        except (HubError, AdapterError) as error:
            problems.append(f"--lora-adapters {source.name}: {error}")
    if problems:
        raise Refusal(problems, 1)
    return found


def name_problem(source: AdapterSource, settings: Settings) -> str:
    """Why an adapter cannot have its name; empty: it can."""
    if source.name not in own_names(settings.shown_model, settings.values["served_model_name"]):
        return ""
    return f"--lora-adapters: {source.name} is the model's own name: write NAME=ID with another one"


def other_base(name: str, config: AdapterConfig, settings: Settings) -> str:
    """What is said of an adapter that was trained on a model of another name; empty: it was not, or does not say so."""
    if not (base := config.other_base(settings.shown_model)):
        return ""
    return (
        f"the adapter {name} was trained on {base}, and {settings.shown_model} is served: where its shapes "
        "fit, it is computed all the same"
    )


def resolve_adapter(name: str, settings: Settings, environ: Mapping[str, str], log: Log) -> Path:
    """The folder of one adapter, behind whose name may stand `@` and a revision. Raises Refusal."""
    adapter_id, revision = name_and_revision(name)
    try:
        return hub.resolve_adapter(adapter_id, revision=revision, **_hub_of(settings, environ, log))
    except HubError as error:
        raise Refusal([str(error)], 1) from None


def name_and_revision(given: str) -> tuple[str, str | None]:
    """What a model is called, and what stands behind `@`, if anything does and it is no folder's name."""
    if Path(given).expanduser().is_dir():
        return given, None
    name, _, revision = given.partition("@")
    return name, revision or None


def _one_folder(model: hub.ResolvedModel) -> Path:
    """The folder with both the description and the weights of a model. Raises Refusal for old formats."""
    if model.weights_path != model.path:
        raise Refusal(
            [
                f"--speculative-model {model.path} has no *.safetensors, which it must have: copy those into which its "
                f"weights were converted from {model.weights_path} there"
            ],
            1,
        )
    return model.path


def _resolve(
    model_id: str, revision: str | None, settings: Settings, environ: Mapping[str, str], log: Log, **options: Any
) -> hub.ResolvedModel:
    """Raises Refusal."""
    try:
        return hub.resolve(model_id, revision=revision, **_hub_of(settings, environ, log), **options)
    except HubError as error:
        raise Refusal([str(error)], 1) from None


def _hub_of(settings: Settings, environ: Mapping[str, str], log: Log) -> dict[str, Any]:
    """The hub as the settings and the environment have it."""
    return {
        "cache_dir": settings.values["huggingface_hub_cache"],
        "token": _token(environ),
        "offline": is_offline(environ),
        "report": log.info,
        "convert": convert_in_child(child_environment(environ, True)),
        "user_cache": Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep",
    }


@dataclass(frozen=True)
class Description:
    """What is known of a model before a start."""

    folder: Path  # has what describes it
    cache: Path | None  # where a start downloads to; None: the model is a folder that was given
    names: set[str]  # of the repository's files; empty where the hub was not asked


def find_description(
    settings: Settings,
    environ: Mapping[str, str],
    spare: Path,
    model_id: str,
    revision: str | None,
    content: hub.Content = hub.MODEL,
) -> Description:
    """A model's config.json, or what else describes `content`, fetched into `spare` if it is not here or in the cache.

    Nothing else is fetched, converted or kept; a hub that is silent for SILENT_SECONDS is given up, and so is one that
    is not done after ANSWER_SECONDS. Raises HubError.
    """
    values = settings.values
    if local := hub.local_folder(model_id, content.what):
        return Description(local, None, set())
    repository = hub.Repository(
        model_id,
        revision,
        values["huggingface_hub_cache"],
        _token(environ),
        is_offline(environ),
        endpoint=environ.get("HF_ENDPOINT") or None,
        report=lambda sentence: None,
        pauses=(),
        timeout=SILENT_SECONDS,
        content=content,
    )
    folder, names = _in_time(lambda: repository.describe(spare))
    return Description(folder, repository.cache, names)


def _in_time(describe: Callable[[], T]) -> T:
    """What it returns. Raises HubError where that takes longer than ANSWER_SECONDS; its thread is left to itself."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(describe())
        except (ValueError, OSError) as error:
            answer.set_exception(error)
        finally:
            answer.cancel()  # no effect where there is an answer

    Thread(target=ask, daemon=True).start()
    try:
        return answer.result(ANSWER_SECONDS)
    except TimeoutError:
        raise HubError(
            f"the hub has not sent the description after {ANSWER_SECONDS:.0f} seconds: check the network, or "
            "HF_ENDPOINT"
        ) from None


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether the network is forbidden."""
    return environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _token(environ: Mapping[str, str]) -> str | None:
    return next((environ[name] for name in TOKEN_VARIABLES if environ.get(name)), None)


def convert_in_child(environment: Mapping[str, str]) -> hub.Convert:
    """How the hub module has files converted: in a process of its own, for it needs torch and reads untrusted files."""

    def convert(kind: str, source: Path, target: Path) -> None:
        argv = [sys.executable, "-P", "-m", "server.checkpoint.convert", kind, str(source), str(target)]
        job = subprocess.run(argv, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent())
        if job.returncode:
            lines = job.stderr.strip().splitlines() or [f"the conversion ended with code {job.returncode}"]
            raise HubError(lines[-1].removeprefix("error: "))

    return convert
