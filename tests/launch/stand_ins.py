"""Small scripts that stand in for the shards and the router, and what tests do with their processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# What every stand-in starts with. `say` writes one log record; `on_term` sets what SIGTERM does.
PRELUDE = """
import json, os, signal, sys, time
def say(message, **fields):
    record = {"timestamp": "2026-11-20T10:00:00+00:00", "level": "INFO", "target": "t", "message": message}
    print(json.dumps({**record, **fields}), flush=True)
def on_term(action):
    signal.signal(signal.SIGTERM, lambda *_: action())
def leave(message):
    say(message); os._exit(0)
def fail(message, **fields):
    say(message, level="CRITICAL", **fields); os._exit(1)
"""
SHARD = PRELUDE + "on_term(lambda: leave('shard ends')); say('loaded')\ntime.sleep(60)"
ROUTER = PRELUDE + "on_term(lambda: leave('router drained')); say('serving', event='ready')\ntime.sleep(60)"
STUBBORN = PRELUDE + "on_term(lambda: say('not yet')); say('serving', event='ready')\nwhile True: time.sleep(1)"

# A fork server whose forks run the code that they are given, in place of a shard.
FORK_SERVER = """
import sys
from server import fork_server
fork_server.IMPORTED = ()
fork_server.shard.main = lambda argv: exec(argv[0], {"__name__": "__main__"})
sys.exit(fork_server.main())
"""

# Runs the supervisor alone: scripts and options come as JSON.
SUPERVISE = """
import json, os, sys
from launch import supervisor
from launch.logs import Log
from launch.processes import ChildCommand
from launch.supervisor import signals_to_pipe
from host.output import Output
from host.process import adopt_orphans
options = json.loads(sys.argv[1])
commands = [ChildCommand(name, (sys.executable, "-S", "-c", code)) for name, code in options["scripts"].items()]
if "fork_server" in options:
    assert adopt_orphans()
    fork_server = (sys.executable, "-c", options["fork_server"])
    commands = [
        c if c.name == "router" else ChildCommand(c.name, c.argv[-1:], fork_server=fork_server) for c in commands
    ]
log = Log(Output(1), options["as_json"])
supervisor.CAUSE_S = options["blame"]
with signals_to_pipe() as wakeup:
    ours = supervisor.Supervisor(
        commands, dict(os.environ), log, drain_seconds=options["drain"], stop_seconds=options["stop"]
    )
    code = ours.run(wakeup)
if ours.failure:
    os.write(2, f"error: {ours.failure}\\n".encode())
sys.exit(code)
"""

# Runs a whole launch with stand-ins in place of `-m server` and `-m router`, and without a model.
LAUNCH = """
import json, sys, launcher
from pathlib import Path
from launch import shards, router_process
from server.checkpoint import hub
scripts = json.loads(sys.argv[1])
model = hub.ResolvedModel(Path("m"), Path("m"), Path("m"), None)
shards.python = router_process.python = lambda module: (sys.executable, "-S", "-c", scripts[module])
launcher.adopt_orphans = lambda: False
launcher.resolve_model = lambda *_: eval(scripts.get("resolve", "model"))
sys.exit(launcher.main(sys.argv[2:]))
"""
HTTP_ROUTER = (
    PRELUDE
    + """
import socket
config = json.load(open(sys.argv[-1]))
listener = socket.socket(fileno=config["listen_fd"])
listener.listen()
on_term(lambda: leave("router drained"))
folder = os.path.dirname(os.path.dirname(config["shard_sockets"][0]))
say("serving", event="ready", folder=folder, sockets=config["shard_sockets"])
while True:
    listener.accept()[0].sendall(b"hello")
"""
)

Start = Callable[..., subprocess.Popen[str]]


def after(path: Path) -> str:
    """Code of a stand-in that waits until the test makes the file `path`: not for a time that a busy machine takes."""
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.01)\n"


def wait_for(process: subprocess.Popen[str], *texts: str) -> str:
    """Read the log until each of `texts` has come, in any order and each in a line of its own; returns what was read.

    A line says of one process alone how far it is: whoever signals several has to wait for all of them.
    """
    assert process.stdout
    lines: list[str] = []
    missing = list(texts)
    while missing:
        line = process.stdout.readline()
        assert line, f"ended without {missing}: {lines}, {process.stderr and process.stderr.read()}"
        lines.append(line)
        for text in missing:
            if text in line:
                missing.remove(text)
                break
    return "".join(lines)


def end(process: subprocess.Popen[str], *, within: float) -> tuple[int, str, str]:
    """(exit code, rest of the log, standard error) of a process that must end by itself.

    within: seconds that an idle machine needs at most; a busy one is given ten times as many, and no stand-in ends by
    itself before that.
    """
    out, err = process.communicate(timeout=10 * within)
    return process.returncode, out, err


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 50  # a bound of liveness; the stand-ins go on for longer
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
