"""Starts and watches one Lockstep server: N shards and a router, from one table of settings.

This is the story of a launch; its rooms are in `router/launch/`. Every setting is read and checked, the port is taken,
the model is resolved once, each process gets its config as JSON (a shard in a private folder, the router, whose config
holds the API key, in a file without a name), all processes are started at once, and their logs are forwarded until a
signal or a failure. The end is one sentence and an exit code: 0 after a stop by signal, 1 when something failed, 2 for
a wrong setting, 128 + signal after SIGQUIT or a second signal.

The launcher knows nothing of HTTP or tensors and imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from router.launch.config import DEMO, TOKEN_VARIABLES
from router.launch.crew import Crew
from router.launch.errors import Refusal
from router.launch.files import private_folder, shared_sockets
from router.launch.flags import read_command_line, refuse_misspelt
from router.launch.layout import Layout
from router.launch.logs import Log
from router.launch.machine import bind, describe_environment, is_on_loopback, plan_shards, visible_gpus
from router.launch.processes import child_environment
from router.launch.restarts import Renewal
from router.launch.settings import Settings, read_settings
from router.launch.settings_page import render_settings
from router.launch.signals import leave_on_signal, signals_to_pipe
from router.launch.storage import storage_problems, storage_warnings
from router.launch.supervisor import Supervisor
from router.launch.terminal import open_standard_streams
from router.version import version
from server.checkpoint import hub
from server.checkpoint.files import HubError
from server.output import Output
from server.process import adopt_orphans, end_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `lockstep`. Returns the exit code."""
    open_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        command = COMMANDS.get(arguments[0]) if arguments else None
        if command is not None:
            return command(arguments[1:], os.environ)
        refuse_misspelt(arguments, COMMANDS)
        prepared = prepare(arguments, os.environ)
        if prepared is None:
            return 0
        settings, device, layout = prepared
        colour = os.isatty(1) and not os.environ.get("NO_COLOR")
        log = Log(Output(1), settings.values["json_output"], colour)
        if settings.values["env"]:
            for line in describe_environment(os.environ):
                log.info(line)
        return launch(settings, os.environ, device, layout, log)
    except Refusal as refusal:
        return _report(refusal)
    except KeyboardInterrupt:  # before anybody heeds signals
        return _report(Refusal(["stopped by SIGINT: nothing is made, start again"], 128 + signal.SIGINT))
    except OSError as error:  # a full disk, a file that may not be read, no more processes
        return _report(Refusal([f"cannot start: {error}"], 1))


def _report(refusal: Refusal) -> int:
    with suppress(OSError):
        os.write(2, "".join(f"error: {problem}\n" for problem in refusal.problems).encode(errors="replace"))
    return refusal.code


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, str, Layout] | None:
    """Every check that needs no model: (settings, device, which shards), or None if only something was printed.

    Raises Refusal with every problem at once.
    """
    flags, problems = read_command_line(argv)
    if flags["version"] or flags["print_settings"]:
        sys.stdout.write(f"lockstep {version()}\n" if flags["version"] else render_settings())
        return None
    settings, wrong_values = read_settings(flags, environ)
    problems += wrong_values
    device, layout = "cpu", Layout(1)
    try:
        gpus = 0 if settings.values["device"] == "cpu" else visible_gpus(environ)
        device, layout = plan_shards(settings, gpus)
        problems += storage_problems(settings, device)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise Refusal(problems, 2)
    return settings, device, layout


def launch(settings: Settings, environ: Mapping[str, str], device: str, layout: Layout, log: Log) -> int:
    """Serve until a signal or a failure. Returns the exit code; raises Refusal for a failure."""
    started = time.monotonic()
    hostname = settings.values["hostname"]
    with ExitStack() as stack:
        stack.enter_context(leave_on_signal(log))
        listener = bind(hostname, settings.values["port"])
        stack.callback(listener.close)
        if settings.values["api_key"] is None and not is_on_loopback(listener):
            remedy = "set API_KEY, or use --hostname 127.0.0.1"
            log.warn(f"other machines can reach {hostname} and there is no API key: {remedy}")
        log.info(f"Lockstep {version()} starts {settings.shown_model} on {device} with {layout}")
        for sentence in storage_warnings(settings):
            log.warn(sentence)
        model = resolve_model(settings, environ, log)
        wakeup = stack.enter_context(signals_to_pipe())
        folder = stack.enter_context(private_folder())
        prefix = settings.values["shard_uds_path"]
        chosen = stack.enter_context(shared_sockets(prefix, layout.world_size)) if prefix else ()
        crew = Crew(folder, settings, device, layout, model, listener, chosen, adopt_orphans())
        stack.callback(crew.close)
        url = f"http://{f'[{hostname}]' if ':' in hostname else hostname}:{listener.getsockname()[1]}"

        def on_ready(is_first: bool) -> None:
            crew.hand_over()
            after = f" after {time.monotonic() - started:.1f} s" if is_first else " again"
            log.info(f"Lockstep is ready at {url}{after}")

        shard_commands, sockets = crew.group(1)
        supervisor = Supervisor(
            [*shard_commands, crew.router(1, sockets)],
            child_environment(environ, settings.values["master_addr"] in ("localhost", "127.0.0.1", "::1")),
            log,
            drain_seconds=settings.values["shutdown_delay"] + settings.values["graceful_termination_timeout"],
            on_ready=on_ready,
            renewal=Renewal(crew.group, crew.router, settings.values["max_deaths"]),
            sockets=sockets,
        )
        code = supervisor.run(wakeup)
        if supervisor.failure:
            raise Refusal([supervisor.failure], code)
        return code


def detect_watermark(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep watermark`. Returns the exit code; raises Refusal."""
    from router.launch import watermark  # a launch needs no tokenizer

    settings, file, as_json = watermark.read_command(argv, environ)
    text = watermark.read_text(file)
    model = resolve_model(settings, environ, Log(Output(2), False), needs_weights=False)
    sys.stdout.write(watermark.report(text, settings, model.path, model.tokenizer_path, as_json=as_json))
    return 0


def quantize(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep quantize`. Returns the exit code; raises Refusal."""
    from router.launch import quantize  # a launch needs no tokenizer

    command = quantize.read_command(argv, environ)
    model = resolve_model(command.settings, environ, Log(Output(2), False))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(command.job(model.path, model.weights_path, model.tokenizer_path).to_json())
        file.flush()
        arguments = [sys.executable, "-P", "-m", "server.quantising", file.name]
        job = subprocess.Popen(arguments, env=child_environment(environ, True), preexec_fn=end_with_parent())
        return quantize.wait_for(job)


def answer_batch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep batch`. Returns the exit code; raises Refusal."""
    from router.launch import batch  # a launch needs none of it

    return batch.run(batch.read_command(argv, environ), environ)


COMMANDS = {"watermark": detect_watermark, "quantize": quantize, "batch": answer_batch}


def resolve_model(
    settings: Settings, environ: Mapping[str, str], log: Log, *, needs_weights: bool = True
) -> hub.ResolvedModel:
    """The folders of the model that the settings name, downloaded and converted if need be. Raises Refusal."""
    values = settings.values
    if values["trust_remote_code"]:
        log.warn("--trust-remote-code is not needed: code from a model repository is never run")
    is_null = settings.is_null_model
    try:
        return hub.resolve(
            str(DEMO) if is_null else values["model_id"],  # the null model speaks the embedded one's tokens
            revision=values["revision"],
            cache_dir=values["huggingface_hub_cache"],
            with_weights=needs_weights and not (values["random_weights"] or is_null),
            weights_override=values["weights_cache_override"],
            token=next((environ[name] for name in TOKEN_VARIABLES if environ.get(name)), None),
            offline=environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
            report=log.info,
            convert=convert_in_child(child_environment(environ, True)),
            user_cache=Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep",
        )
    except HubError as error:
        raise Refusal([str(error)], 1) from None


def convert_in_child(environment: Mapping[str, str]) -> hub.Convert:
    """How the hub module has files converted: in a process of its own, for it needs torch and reads untrusted files."""

    def convert(kind: str, source: Path, target: Path) -> None:
        argv = [sys.executable, "-P", "-m", "server.checkpoint.convert", kind, str(source), str(target)]
        job = subprocess.run(argv, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent())
        if job.returncode:
            lines = job.stderr.strip().splitlines() or [f"the conversion ended with code {job.returncode}"]
            raise HubError(lines[-1].removeprefix("error: "))

    return convert


if __name__ == "__main__":
    sys.exit(main())
