"""Starts and watches one Lockstep server: N shards and a router, from one table of settings.

This is the story of a launch; its rooms are in `router/launch/`. Every setting is read and checked, the port is taken,
the model is resolved once, one JSON config for each process is written into a private folder, all processes are started
at once, and their logs are forwarded until a signal or a failure. The end is one sentence and an exit code: 0 after a
stop by signal, 1 when something failed, 2 for a wrong setting, 128 + signal after a second signal.

The launcher knows nothing of HTTP or tensors and imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from router.config import RouterConfig
from router.launch.config import DEMO, TOKEN_VARIABLES
from router.launch.errors import Refusal
from router.launch.files import private_folder, shared_sockets
from router.launch.flags import read_command_line
from router.launch.logs import Log, Output
from router.launch.machine import bind, describe_environment, is_on_loopback, plan_shards, visible_gpus
from router.launch.parent_death import end_with_parent
from router.launch.processes import ChildCommand, child_environment
from router.launch.settings import Settings, read_settings
from router.launch.settings_page import render_settings
from router.launch.signals import leave_on_signal, signals_to_pipe
from router.launch.supervisor import Supervisor
from router.launch.terminal import open_standard_streams
from router.version import version
from server.checkpoint import hub
from server.checkpoint.files import HubError
from server.config import ShardConfig


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `lockstep`. Returns the exit code."""
    open_standard_streams()
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


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, str, int] | None:
    """Every check that needs no model: (settings, device, number of shards), or None if only something was printed.

    Raises Refusal with every problem at once.
    """
    flags, problems = read_command_line(argv)
    if flags["version"] or flags["print_settings"]:
        sys.stdout.write(f"lockstep {version()}\n" if flags["version"] else render_settings())
        return None
    settings, wrong_values = read_settings(flags, environ)
    problems += wrong_values
    device, count = "cpu", 1
    try:
        gpus = 0 if settings.values["device"] == "cpu" else visible_gpus(environ)
        device, count = plan_shards(settings, gpus)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise Refusal(problems, 2)
    return settings, device, count


def launch(settings: Settings, environ: Mapping[str, str], device: str, count: int, log: Log) -> int:
    """Serve with `count` shards until a signal or a failure. Returns the exit code; raises Refusal for a failure."""
    started = time.monotonic()
    leave_on_signal(log)
    hostname = settings.values["hostname"]
    with ExitStack() as stack:
        listener = stack.enter_context(bind(hostname, settings.values["port"]))
        if settings.values["api_key"] is None and not is_on_loopback(listener):
            remedy = "set API_KEY, or use --hostname 127.0.0.1"
            log.warn(f"other machines can reach {hostname} and there is no API key: {remedy}")
        shards = f"{count} shards" if count > 1 else "one shard"
        log.info(f"Lockstep {version()} starts {settings.shown_model} on {device} with {shards}")
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

        write_router_config(folder, settings, sockets, model, listener)
        write_shard_configs(folder, settings, device, sockets, model)
        supervisor = Supervisor(
            commands(folder, count, listener),
            child_environment(environ, settings.values["master_addr"] in ("localhost", "127.0.0.1", "::1")),
            log,
            drain_seconds=settings.values["graceful_termination_timeout"],
            on_ready=on_ready,
        )
        code = supervisor.run(wakeup)
        if supervisor.failure:
            raise Refusal([supervisor.failure], code)
        return code


def resolve_model(settings: Settings, environ: Mapping[str, str], log: Log) -> hub.ResolvedModel:
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
            with_weights=not (values["random_weights"] or is_null),
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


def write_router_config(
    folder: Path, settings: Settings, sockets: tuple[str, ...], model: hub.ResolvedModel, listener: socket.socket
) -> None:
    """Tell the router what to serve, in `router.json`; the port that was taken replaces the one that was asked for."""
    given = settings.pick(RouterConfig) | {"model_id": settings.shown_model, "port": listener.getsockname()[1]}
    router = RouterConfig(
        model_path=str(model.path),
        tokenizer_path=str(model.tokenizer_path),
        shard_sockets=sockets,
        model_sha=model.sha,
        listen_fd=listener.fileno(),
        is_on_loopback=is_on_loopback(listener),
        sources=dict(settings.sources),
        **given,
    )
    router.save(folder / "router.json")


def write_shard_configs(
    folder: Path, settings: Settings, device: str, sockets: tuple[str, ...], model: hub.ResolvedModel
) -> None:
    """Tell each shard its part, in `shard-RANK.json`. The shards meet in a private file unless TCP was asked for."""
    rendezvous = f"file://{folder}/rendezvous"
    if {settings.sources["master_addr"], settings.sources["master_port"]} != {"default"}:
        rendezvous = f"tcp://{settings.values['master_addr']}:{settings.values['master_port']}"
    step_sockets = tuple(f"{folder}/steps-{rank}.sock" for rank in range(1, len(sockets)))
    for rank, path in enumerate(sockets):
        shard = ShardConfig(
            model_path=str(model.path),
            weights_path=str(model.weights_path),
            rank=rank,
            world_size=len(sockets),
            socket_path=path,
            rendezvous=rendezvous,
            step_sockets=step_sockets,
            is_null=settings.is_null_model,
            **settings.pick(ShardConfig) | {"device": device},
        )
        shard.save(folder / f"shard-{rank}.json")


def commands(folder: Path, count: int, listener: socket.socket) -> list[ChildCommand]:
    """The processes to start, which read their configs from `folder`. Only the router gets the listener."""
    shards = [_command("server", f"shard-{rank}", folder) for rank in range(count)]
    return [*shards, _command("router", "router", folder, (listener.fileno(),))]


def _command(module: str, name: str, folder: Path, pass_fds: tuple[int, ...] = ()) -> ChildCommand:
    config = str(folder / f"{name}.json")
    return ChildCommand(name, (sys.executable, "-P", "-m", module, "--config", config), pass_fds)


def hand_over(listener: socket.socket, folder: Path) -> None:
    """Let go of what the router has by now: the socket, and its config."""
    # Connections are accepted from here on; this lets a later launch bind beside those in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.close()  # or the port would stay open while the router drains
    (folder / "router.json").unlink()  # holds the API key, and would outlive a kill -9


if __name__ == "__main__":
    sys.exit(main())
