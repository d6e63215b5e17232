"""Starts and watches one Lockstep server: N shards and a router, from one table of settings.

A launch takes these steps, which are in `launch/`: every setting is read and checked, the port is taken, the model is
resolved once, each process gets its config as JSON (a shard in a private folder, the router, whose config holds the API
key, in a file without a name), all processes are started at once, and their logs are forwarded until a signal or a
failure. The end is one sentence and an exit code: 0 after a stop by signal, 1 when something failed, 2 for a wrong
setting, 128 + signal after SIGQUIT or a second signal.

The launcher knows nothing of HTTP or tensors and imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from host.output import Output
from host.process import adopt_orphans
from host.version import version
from launch.commands import COMMANDS
from launch.errors import Refusal
from launch.files import private_folder, shared_sockets
from launch.flags import read_command_line, refuse_misspelt, render_settings
from launch.logs import Log, open_standard_streams
from launch.machine import (
    Placement,
    access_warnings,
    bind,
    describe_environment,
    file_problems,
    place,
    storage_warnings,
)
from launch.models import resolve_adapters, resolve_model, resolve_speculative_model
from launch.node_agent import Agent
from launch.node_links import LinkProcess
from launch.nodes import Nodes, await_address, environment_of, node_warnings
from launch.remote_nodes import RemoteNodes
from launch.restarts import RestartCommands
from launch.router_process import RouterCommand
from launch.settings import Settings, read_settings
from launch.shards import ShardCommands, python
from launch.supervisor import Supervisor, leave_on_signal, signals_to_pipe


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `lockstep`. Returns the exit code."""
    open_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    log: Log | None = None
    try:
        command = COMMANDS.get(arguments[0]) if arguments else None
        if command is not None:
            return command(arguments[1:], os.environ)
        refuse_misspelt(arguments, COMMANDS)
        prepared = prepare(arguments, os.environ)
        if prepared is None:
            return 0
        settings, placement = prepared
        colour = os.isatty(1) and not os.environ.get("NO_COLOR")
        log = Log(Output(1), settings.values["json_output"], colour)
        if settings.values["env"]:
            for line in describe_environment(os.environ):
                log.info(line)
        run = launch if placement.nodes.index == 0 else join
        return run(settings, os.environ, placement, log)
    except Refusal as refusal:
        return _report(refusal, log)
    except KeyboardInterrupt:  # before signals are handled
        return _report(Refusal(["stopped by SIGINT: nothing is made, start again"], 128 + signal.SIGINT), log)
    except OSError as error:  # a full disk, a file that may not be read, no more processes
        return _report(Refusal([f"cannot start: {error}"], 1), log)


def _report(refusal: Refusal, log: Log | None) -> int:
    if log is not None and log.as_json:
        for problem in refusal.problems:
            log.error(problem)
    with suppress(OSError):
        os.write(2, "".join(f"error: {problem}\n" for problem in refusal.problems).encode(errors="replace"))
    return refusal.code


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, Placement] | None:
    """Every check that needs no model, or None if only something was printed.

    Raises Refusal with every problem at once.
    """
    flags, problems = read_command_line(argv)
    if flags["version"] or flags["print_settings"]:
        sys.stdout.write(f"lockstep {version()}\n" if flags["version"] else render_settings())
        return None
    settings, wrong_values = read_settings(flags, environ)
    problems += wrong_values
    placement, impossible = place(settings, environ)
    problems += impossible
    if problems:
        raise Refusal(problems, 2)
    return settings, placement


def launch(settings: Settings, environ: Mapping[str, str], placement: Placement, log: Log) -> int:
    """Serve until a signal or a failure. Returns the exit code; raises Refusal for a failure."""
    device, layout, nodes = placement.device, placement.layout, placement.nodes
    started = time.monotonic()
    hostname = settings.values["hostname"]
    with ExitStack() as stack:
        stack.enter_context(leave_on_signal(log))
        holder = bind(hostname, settings.values["port"])
        stack.callback(holder.close)
        log.info(f"Lockstep {version()} starts {settings.shown_model} on {device} with {layout}")
        warnings = [*access_warnings(settings, holder), *settings.idle, *storage_warnings(settings)]
        for sentence in [*warnings, *node_warnings(settings, nodes, layout)]:
            log.warn(sentence)
        model = resolve_model(settings, environ, log)
        proposing = resolve_speculative_model(settings, environ, log)
        adapters = resolve_adapters(settings, environ, log)
        address = await_address(nodes, settings.values["node_timeout"], log.info) if nodes.count > 1 else ""
        wakeup = stack.enter_context(signals_to_pipe())
        folder = stack.enter_context(private_folder())
        prefix = settings.values["shard_uds_path"]
        chosen = stack.enter_context(shared_sockets(prefix, layout.world_size)) if prefix else ()
        shard_commands = ShardCommands(folder, settings, device, layout, model, chosen, adopt_orphans(), proposing)
        router_command = RouterCommand(settings, layout, model, holder, adapters)
        stack.callback(router_command.close)
        url = f"http://{f'[{hostname}]' if ':' in hostname else hostname}:{holder.getsockname()[1]}"

        def on_ready(is_first: bool) -> None:
            router_command.close_listener()
            after = f" after {time.monotonic() - started:.1f} s" if is_first else " again"
            log.info(f"Lockstep is ready at {url}{after}")

        first_group, sockets = shard_commands.group(1)
        supervisor = Supervisor(
            [*first_group, router_command.command(1, sockets)],
            environment_of(settings, environ, nodes, address),
            log,
            drain_seconds=settings.values["shutdown_delay"] + settings.values["graceful_termination_timeout"],
            on_ready=on_ready,
            restart=RestartCommands(
                shard_commands.group,
                router_command.command,
                settings.values["max_deaths"],
                partial(file_problems, settings),
            ),
            sockets=sockets,
            remote_nodes=remote_nodes_of(shard_commands, settings, nodes, address, log) if nodes.count > 1 else None,
        )
        code = supervisor.run(wakeup)
        if supervisor.failure:
            raise Refusal([supervisor.failure], code)
        return code


def remote_nodes_of(
    shard_commands: ShardCommands, settings: Settings, nodes: Nodes, address: str, log: Log
) -> RemoteNodes:
    """The nodes but this one, which is node 0 at `address`."""
    link = LinkProcess(shard_commands.folder, nodes, address, python("server.link"), settings.values["log_level"])
    patience = settings.values["node_timeout"]
    return RemoteNodes(
        shard_commands.folder, link, shard_commands.layout, shard_commands.identity(), log, patience=patience
    )


def join(settings: Settings, environ: Mapping[str, str], placement: Placement, log: Log) -> int:
    """Be a node other than 0, until node 0 ends or a failure. Returns the exit code; raises Refusal for a failure."""
    nodes, layout = placement.nodes, placement.layout
    with ExitStack() as stack:
        stack.enter_context(leave_on_signal(log))
        said_by = f", as {nodes.said_by} says" if nodes.said_by else ""
        log.info(
            f"Lockstep {version()} is node {nodes.index} of {nodes.count}{said_by}, on {placement.device} with {layout}"
        )
        for sentence in [*settings.idle, *storage_warnings(settings), *node_warnings(settings, nodes, layout)]:
            log.warn(sentence)
        model = resolve_model(settings, environ, log)
        proposing = resolve_speculative_model(settings, environ, log)
        resolve_adapters(settings, environ, log)  # at the paths at which node 0 has them
        address = await_address(nodes, settings.values["node_timeout"], log.info)
        wakeup = stack.enter_context(signals_to_pipe())
        folder = stack.enter_context(private_folder())
        device = placement.device
        shard_commands = ShardCommands(folder, settings, device, layout, model, (), adopt_orphans(), proposing)
        agent = Agent(
            shard_commands,
            LinkProcess(folder, nodes, address, python("server.link"), settings.values["log_level"]),
            environment_of(settings, environ, nodes, address),
            log,
            patience=settings.values["node_timeout"],
            master=nodes.master,
        )
        code = agent.run(wakeup)
        if agent.failure:
            raise Refusal([agent.failure], code)
        return code


if __name__ == "__main__":
    sys.exit(main())
