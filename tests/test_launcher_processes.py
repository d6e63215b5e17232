"""Supervision with real processes: small scripts stand in for the shards and the router."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.launch.machine import bind
from tests.running import ROOT

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

# A nursery whose forks run the code that they are given, in place of a shard.
NURSERY = """
import sys
from server import nursery
nursery.IMPORTED = ()
nursery.shard.main = lambda argv: exec(argv[0], {"__name__": "__main__"})
sys.exit(nursery.main())
"""

# Runs the supervisor alone: scripts and options come as JSON.
SUPERVISE = """
import json, os, sys
from router.launch.logs import Log
from router.launch.processes import ChildCommand
from router.launch.signals import signals_to_pipe
from router.launch.supervisor import Supervisor
from server.output import Output
from server.process import adopt_orphans
options = json.loads(sys.argv[1])
commands = [ChildCommand(name, (sys.executable, "-S", "-c", code)) for name, code in options["scripts"].items()]
if "nursery" in options:
    assert adopt_orphans()
    nursery = (sys.executable, "-c", options["nursery"])
    commands = [c if c.name == "router" else ChildCommand(c.name, c.argv[-1:], nursery=nursery) for c in commands]
log = Log(Output(1), options["as_json"])
with signals_to_pipe() as wakeup:
    supervisor = Supervisor(
        commands, dict(os.environ), log, drain_seconds=options["drain"], stop_seconds=options["stop"]
    )
    code = supervisor.run(wakeup)
if supervisor.failure:
    os.write(2, f"error: {supervisor.failure}\\n".encode())
sys.exit(code)
"""

# Runs a whole launch with stand-ins in place of `-m server` and `-m router`, and without a model.
LAUNCH = """
import json, sys, launcher
from pathlib import Path
from router.launch import crew
scripts = json.loads(sys.argv[1])
model = launcher.hub.ResolvedModel(Path("m"), Path("m"), Path("m"), None)
crew.python = lambda module: (sys.executable, "-S", "-c", scripts[module])
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


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where launches make their private folders: short, for the sockets; tmp_path is not."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def start(temporary: Path) -> Iterator[Start]:
    """Start Python code in a process of its own, which is gone after the test."""
    processes = []

    def run(code: str, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(params=[{}, {"nursery": NURSERY}], ids=["own processes", "forks"])
def supervise(start: Start, request: pytest.FixtureRequest) -> Start:
    # By default nothing is waited for longer than a test waits: what ends, ends before these limits.
    def run(as_json: bool = False, drain: float = 100, stop: float = 100, **scripts: str) -> subprocess.Popen[str]:
        named = {name.replace("_", "-"): code for name, code in scripts.items()}
        options = {"scripts": named, "as_json": as_json, "drain": drain, "stop": stop, **request.param}
        return start(SUPERVISE, json.dumps(options))

    return run


@pytest.fixture
def launch(start: Start) -> Start:
    def run(*argv: str, **scripts: str) -> subprocess.Popen[str]:
        return start(LAUNCH, json.dumps({"server": SHARD, "router": HTTP_ROUTER, **scripts}), "--device=cpu", *argv)

    return run


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the log up to the line that contains `text`, and return what was read."""
    assert process.stdout
    lines: list[str] = []
    while not lines or text not in lines[-1]:
        line = process.stdout.readline()
        assert line, f"ended without {text!r}: {lines}"
        lines.append(line)
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


def test_processes_that_all_end_at_once_are_a_failure(supervise: Start) -> None:
    process = supervise(shard_0="raise ImportError('broken')", router="raise ImportError('broken, too')")
    code, _, errors = end(process, within=60)
    assert 1 == code
    assert "cannot start: ImportError: broken" in errors


def test_records_of_children_become_lines_with_their_name(supervise: Start) -> None:
    process = supervise(shard_0=SHARD, router=PRELUDE + "say('hi', n=1); print('plain\\x1b[1m')\n" + ROUTER)
    log = wait_for(process, "serving")
    assert "2026-11-20T10:00:00.000Z  INFO router: hi n=1\n" in log
    assert r" WARN router: plain\x1b[1m" in log


def test_json_logs_stay_json(supervise: Start) -> None:
    process = supervise(
        True, shard_0=PRELUDE + "sys.stderr.write('odd\\n'); say('loaded', gib=1.5)\n" + SHARD, router=SHARD
    )
    wait_for(process, "loaded")
    process.terminate()
    for line in end(process, within=3)[1].splitlines():
        assert {"timestamp", "level", "message", "process"} <= set(json.loads(line))


@pytest.mark.parametrize("as_json", [True, False])
def test_what_a_process_prints_is_one_line_and_forges_no_cause(supervise: Start, as_json: bool) -> None:
    hostile = '{"level": "CRITICAL", "message": "forged", "event": "ready"}\\r\\x1b[2J\\u2028\\x85{}%s\\x00\\udcff'
    errors = f"sys.stderr.reconfigure(errors='surrogateescape'); sys.stderr.write('{hostile}\\n'); sys.stderr.flush()\n"
    code = PRELUDE + errors + f"say('said', text='{hostile}\\n')\ntime.sleep(0.3); leave('{hostile}')"
    _, log, error = end(supervise(as_json, shard_0=code, router=SHARD), within=5)
    lines = log.split("\n")[:-1]
    shown = [line for line in lines if "forged" in line]
    assert 3 == len(shown)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028]", log)
    assert "forged" in error.splitlines()[0] and 1 == len(error.splitlines())  # its last words, as such
    if as_json:
        assert {"INFO", "WARN"} == {json.loads(line)["level"] for line in lines}


def test_critical_record_is_the_reported_cause(supervise: Start) -> None:
    broken = PRELUDE + "fail('model.safetensors is cut short')"
    code, _, error = end(supervise(shard_0=SHARD, shard_1=broken, router=SHARD), within=5)
    assert (1, "error: shard 1 cannot start: model.safetensors is cut short\n") == (code, error)


def test_cause_after_readiness(supervise: Start) -> None:
    process = supervise(shard_0=PRELUDE + "time.sleep(0.5); fail('CUDA error')", router=STUBBORN)
    assert (1, "error: shard 0 stopped: CUDA error\n") == end(process, within=5)[::2]


def test_last_exception_is_the_cause_when_nothing_else_was_said(supervise: Start) -> None:
    process = supervise(shard_0="raise MemoryError('no room')", router=SHARD)
    assert (1, "error: shard 0 cannot start: MemoryError: no room\n") == end(process, within=5)[::2]


def test_silent_exit_is_a_failure_too(supervise: Start) -> None:
    process = supervise(shard_0="", router=SHARD)
    assert "error: shard 0 cannot start: it exited with code 0 without saying why" in end(process, within=5)[2]


def test_sigkill_is_explained(supervise: Start) -> None:
    code, _, error = end(supervise(shard_0="import os; os.kill(os.getpid(), 9)", router=SHARD), within=5)
    assert code == 1 and error.startswith("error: shard 0 cannot start: killed by signal 9 (SIGKILL), most often")


def test_other_signals_are_named_with_the_last_words(supervise: Start) -> None:
    crash = "import os, sys; sys.stderr.write('terminate called\\n'); sys.stderr.flush(); os.abort()"
    error = end(supervise(shard_0=crash, router=SHARD), within=5)[2]
    assert "error: shard 0 cannot start: killed by signal 6 (Aborted): terminate called\n" == error


def test_rank_that_lost_its_peers_is_not_blamed(supervise: Start) -> None:
    victim = PRELUDE + "fail('lost its peers', consequence=True)"
    culprit = PRELUDE + "time.sleep(0.4); fail('out of memory')"
    process = supervise(shard_0=victim, shard_1=culprit, shard_2=victim, router=SHARD)
    assert "error: shard 1 cannot start: out of memory\n" == end(process, within=5)[2]


def test_victim_is_named_if_nobody_else_confesses(supervise: Start) -> None:
    process = supervise(shard_0=PRELUDE + "fail('lost its peers', consequence=True)", router=STUBBORN)
    assert end(process, within=5)[2].endswith(": lost its peers\n")


def test_failed_start_leaves_no_process(supervise: Start) -> None:
    hidden = PRELUDE + "import subprocess\np = subprocess.Popen(['sleep', '60'])\nsay('pids', a=os.getpid(), b=p.pid)\n"
    process = supervise(True, shard_0=hidden + STUBBORN, router=PRELUDE + "time.sleep(1); fail('no')")
    record = json.loads(wait_for(process, "pids"))
    end(process, within=5)
    eventually(lambda: not is_alive(record["a"]) and not is_alive(record["b"]))


def test_sigterm_drains_the_router_before_the_shards_stop(supervise: Start) -> None:
    slow = (
        PRELUDE
        + "on_term(lambda: (time.sleep(0.5), leave('router drained'))); say('serving', event='ready')\ntime.sleep(60)"
    )
    process = supervise(shard_0=SHARD, shard_1=SHARD, router=slow)
    wait_for(process, "serving")
    process.terminate()
    code, log, error = end(process, within=5)
    assert (0, "") == (code, error)
    assert log.index("router drained") < log.index("shard ends")


def test_sigint_drains_too(supervise: Start) -> None:
    process = supervise(shard_0=SHARD, router=ROUTER)
    wait_for(process, "serving")
    process.send_signal(signal.SIGINT)
    assert 0 == end(process, within=3)[0]


@pytest.mark.parametrize(("second", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_aborts(supervise: Start, second: int, expected: int) -> None:
    process = supervise(shard_0=SHARD, router=STUBBORN)
    wait_for(process, "serving")
    process.terminate()
    wait_for(process, "not yet")
    process.send_signal(second)
    assert expected == end(process, within=3)[0]


def test_sigquit_aborts_at_once(supervise: Start) -> None:
    process = supervise(True, shard_0=SHARD, router=PRELUDE + "say('pid', pid=os.getpid())\n" + STUBBORN)
    records = [json.loads(line) for line in wait_for(process, "serving").splitlines()]
    process.send_signal(signal.SIGQUIT)
    assert 131 == end(process, within=3)[0]
    (pid,) = (record["pid"] for record in records if "pid" in record)
    assert not is_alive(pid)


def supervise_forks(start: Start, nursery: str, **scripts: str) -> subprocess.Popen[str]:
    named = {name.replace("_", "-"): code for name, code in scripts.items()}
    return start(
        SUPERVISE, json.dumps({"scripts": named, "as_json": False, "drain": 100, "stop": 100, "nursery": nursery})
    )


def test_a_nursery_that_cannot_import_is_the_cause(start: Start) -> None:
    process = supervise_forks(start, "import nothing_there", shard_0=SHARD, shard_1=SHARD, router=STUBBORN)
    code, _, error = end(process, within=5)
    assert (1, "error: nursery cannot start: ModuleNotFoundError: No module named 'nothing_there'\n") == (code, error)


def test_a_signal_does_not_wait_for_shards_that_are_not_born(start: Start) -> None:
    process = supervise_forks(start, PRELUDE + "time.sleep(60)", shard_0=SHARD, router=SHARD)
    wait_for(process, "loaded")
    process.terminate()
    code, _, error = end(process, within=5)
    assert (0, "") == (code, error)


FEWER_FORKS = """
import os
fork = os.fork
def fork_once():
    pid = fork()
    if pid == 0:
        os.fork = lambda: open("/nothing/there")  # an OSError, as at a limit of processes
    return pid
os.fork = fork_once
"""
STILLBORN = "import os\nfrom server import nursery\nnursery.become_child_of = lambda parent: os._exit(1)\n"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (FEWER_FORKS, "nursery stopped: OSError: a process for a shard could not be forked: raise the limit of"),
        (STILLBORN, "shard 0 stopped: it exited with code 1 without saying why"),
    ],
)
def test_a_fork_that_dies_before_its_birth_is_noticed(start: Start, fault: str, sentence: str) -> None:
    code, _, error = end(supervise_forks(start, fault + NURSERY, shard_0=SHARD, router=STUBBORN), within=5)
    assert 1 == code
    assert sentence in error


def test_running_shards_need_no_nursery(start: Start) -> None:
    pid = "import os, sys\nprint('nursery', os.getpid(), 'lives', file=sys.stderr, flush=True)\n"
    process = supervise_forks(start, pid + NURSERY, shard_0=SHARD, router=ROUTER)
    log = wait_for(process, "serving")
    log += "" if "loaded" in log else wait_for(process, "loaded")
    found = re.search(r"nursery (\d+) lives", log)
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    assert "nursery stopped: killed by signal 9" in wait_for(process, "running shards need it no more")
    process.terminate()
    code, log, error = end(process, within=5)
    assert (0, "") == (code, error)
    assert "shard ends" in log


def test_what_shards_leave_behind_is_reaped(start: Start) -> None:
    orphan = PRELUDE + "import subprocess\nsubprocess.run(['sh', '-c', 'sleep 0.1 & echo $!'])\n"
    process = supervise_forks(start, NURSERY, shard_0=orphan + SHARD, router=ROUTER)
    log = wait_for(process, "serving")
    log += "" if "loaded" in log else wait_for(process, "loaded")
    found = re.search(r"shard-0: (\d+)\n", log)
    assert found
    while Path("/proc", found[1]).exists():
        time.sleep(0.01)
    process.terminate()
    assert 0 == end(process, within=5)[0]


# A terminal of its own for what follows, as a login shell gives it.
IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
"""


@pytest.mark.parametrize("is_nohup", [False, True])
def test_a_terminal_that_closes_stops_the_server_unless_nohup_asks_otherwise(is_nohup: bool) -> None:
    options = json.dumps({"scripts": {"shard-0": SHARD, "router": ROUTER}, "as_json": False, "drain": 100, "stop": 100})
    nohup = (
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if is_nohup else 'SIG_DFL'})\n"  # whatever the tests run in
    )
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL + nohup + SUPERVISE, options],
        cwd=ROOT,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    try:
        os.close(inner)
        shown = b""
        while b"serving" not in shown:
            shown += os.read(terminal, 4096)
        os.close(terminal)  # the kernel sends SIGHUP
        if is_nohup:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            process.terminate()
        assert 0 == process.wait(timeout=50)
    finally:
        process.kill()
        process.wait()


def test_an_orderly_end_leaves_no_process_of_a_process(supervise: Start) -> None:
    hidden = PRELUDE + "import subprocess\nsay('pid', pid=subprocess.Popen(['sleep', '60']).pid)\n"
    process = supervise(True, shard_0=hidden + SHARD, router=ROUTER)
    records = [json.loads(line) for line in wait_for(process, "serving").splitlines()]
    if not any("pid" in record for record in records):
        records.append(json.loads(wait_for(process, '"pid"').splitlines()[-1]))
    process.terminate()
    assert 0 == end(process, within=5)[0]
    (pid,) = (record["pid"] for record in records if "pid" in record)
    eventually(lambda: not is_alive(pid))


def test_router_that_does_not_drain_is_killed(supervise: Start) -> None:
    process = supervise(drain=0.2, stop=0.2, shard_0=SHARD, router=STUBBORN)
    wait_for(process, "serving")
    process.terminate()
    code, log, error = end(process, within=5)
    assert (1, "error: router stopped: it had not finished its requests after 0.2 s and was killed\n") == (code, error)
    assert "shard ends" in log


def test_signal_while_loading_stops_at_once(supervise: Start) -> None:
    process = supervise(shard_0=STUBBORN, router=SHARD)
    wait_for(process, "loaded")
    process.terminate()
    assert 0 == end(process, within=4)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_killed_launcher_leaves_nothing(supervise: Start) -> None:
    pid = PRELUDE + "say('pid', pid=os.getpid())\n"
    process = supervise(True, shard_0=pid + SHARD, shard_1=pid + SHARD, router=pid + STUBBORN)
    records = [json.loads(line) for line in wait_for(process, "serving").splitlines()]
    pids = [record["pid"] for record in records if "pid" in record]
    process.kill()
    assert pids
    eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_child_is_not_stalled_by_a_reader_that_stopped(supervise: Start, tmp_path: Path) -> None:
    path = tmp_path / "done"
    talk = f"for _ in range(4000): say('x' * 1000)\nopen({str(path)!r}, 'w')\ntime.sleep(60)"
    process = supervise(shard_0=SHARD, router=PRELUDE + "say('serving', event='ready')\n" + talk)
    eventually(path.exists)  # 4 MB were taken off the talker's hands although nobody reads ours
    process.terminate()
    log = end(process, within=5)[1]
    dropped = sum(int(line.split()[3]) for line in log.splitlines() if "log lines dropped" in line)
    assert 4000 == dropped + log.count("x" * 1000)


def test_closed_output_does_not_end_the_server(supervise: Start) -> None:
    process = supervise(
        shard_0=SHARD, router=PRELUDE + "say('serving', event='ready')\nwhile True: say('x'); time.sleep(0.01)"
    )
    wait_for(process, "serving")
    assert process.stdout
    process.stdout.close()
    time.sleep(0.3)
    assert process.poll() is None


def connect(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
        return client.recv(16)


def ready(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(port, log so far) of a launch that is ready."""
    log = wait_for(process, "Lockstep is ready at ")
    return int(log.split("Lockstep is ready at http://127.0.0.1:")[1].split()[0]), log


def test_launch_serves_and_stops_and_cleans_up(launch: Start) -> None:
    process = launch("--hostname=127.0.0.1", "--port=0", "--num-shard=2")
    port, log = ready(process)
    folder = Path(log.split("folder=")[1].split()[0])
    assert b"hello" == connect(port)
    assert folder.is_dir() and 0o700 == folder.stat().st_mode & 0o777
    process.terminate()
    assert (0, "") == end(process, within=5)[::2]
    assert not folder.exists()


def folder_of(log: str) -> Path:
    """The private folder of a launch that is ready."""
    return Path(log.split("folder=")[1].split()[0])


def test_the_next_launch_removes_what_a_killed_one_left_and_nothing_else(launch: Start) -> None:
    argv = ("--hostname=127.0.0.1", "--port=0")
    killed, living = launch(*argv), launch(*argv)
    left, kept = folder_of(ready(killed)[1]), folder_of(ready(living)[1])
    foreign = left.with_name("lockstep-foreign")
    foreign.mkdir()  # no launch made it: it has no lock
    killed.kill()
    killed.wait()
    assert left.is_dir()
    ready(launch(*argv))
    assert not left.exists()
    assert kept.is_dir() and foreign.is_dir()


def test_a_launch_that_is_killed_before_it_is_ready_leaves_no_key(launch: Start, temporary: Path) -> None:
    loading = PRELUDE + "say('loading', key=json.load(open(sys.argv[-1]))['api_key'], pid=os.getpid())\ntime.sleep(60)"
    process = launch("--port=0", "--api-key=hunter2", "--json-output", router=loading)
    record = json.loads(wait_for(process, "loading").splitlines()[-1])
    assert "hunter2" == record["key"]
    process.kill()
    process.wait()
    eventually(lambda: not is_alive(record["pid"]))
    (folder,) = temporary.glob("lockstep-*")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert "shard-0.json" in {path.name for path in files}
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_sigquit_leaves_no_folder(launch: Start) -> None:
    process = launch("--hostname=127.0.0.1", "--port=0")
    folder = folder_of(ready(process)[1])
    process.send_signal(signal.SIGQUIT)
    assert 131 == end(process, within=5)[0]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argv", "is_warned"),
    [
        ([], False),
        (["--hostname=0.0.0.0"], True),
        (["--hostname=0.0.0.0", "--api-key=key"], False),
    ],
)
def test_server_that_anyone_can_use_says_so(launch: Start, argv: list[str], is_warned: bool) -> None:
    """Only who asks for it has such a server: by default it listens on this machine alone."""
    process = launch("--port=0", *argv)
    log = wait_for(process, "Lockstep is ready at ")
    warning = "other machines can reach 0.0.0.0 and there is no API key: set API_KEY, or use --hostname 127.0.0.1"
    assert is_warned is (warning in log)
    assert argv or "ready at http://127.0.0.1:" in log
    process.terminate()
    assert 0 == end(process, within=5)[0]


def test_two_launches_do_not_meet(launch: Start) -> None:
    first, second = (launch("--hostname=127.0.0.1", "--port=0") for _ in range(2))
    (port_a, log_a), (port_b, log_b) = ready(first), ready(second)
    assert port_a != port_b
    assert log_a.split("sockets=")[1].split()[0] != log_b.split("sockets=")[1].split()[0]


def test_taken_port_is_refused_before_anything_loads(launch: Start) -> None:
    with bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        process = launch("--hostname=127.0.0.1", f"--port={port}", resolve="1/0")
        code, log, error = end(process, within=2)
    assert (1, "") == (code, log)
    assert (
        error
        == f"error: port {port} is taken: stop the server that has it, or give another --port (0 takes a free one)\n"
    )


def test_port_closes_while_the_router_drains(launch: Start) -> None:
    closing = HTTP_ROUTER.replace('leave("router drained")', '(listener.close(), say("closed"), time.sleep(30))')
    process = launch("--hostname=127.0.0.1", "--port=0", router=closing)
    port, _ = ready(process)
    process.terminate()
    wait_for(process, "closed")
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_launch_again_at_once_on_the_same_port(launch: Start) -> None:
    first = launch("--hostname=127.0.0.1", "--port=0")
    port, _ = ready(first)
    assert b"hello" == connect(port)
    first.kill()
    eventually(lambda: first.poll() is not None)
    time.sleep(0.2)  # the kernel ends the children
    assert port == ready(launch("--hostname=127.0.0.1", f"--port={port}"))[0]


def test_chosen_socket_path_has_one_user_at_a_time(launch: Start, tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{prefix}-0")  # left by a launch that was killed
    argv = ("--hostname=127.0.0.1", "--port=0", f"--shard-uds-path={prefix}")
    first = launch(*argv)
    assert f'sockets=["{prefix}-0"]' in ready(first)[1]
    assert not Path(f"{prefix}-0").exists()
    assert (1, f"error: --shard-uds-path {prefix} is in use by another launch: choose another\n") == end(
        launch(*argv), within=5
    )[::2]
    first.terminate()
    assert 0 == end(first, within=5)[0]
    ready(launch(*argv))


def test_file_at_a_chosen_socket_path_is_not_removed(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "s-0").write_text("precious")
    error = end(launch("--port=0", f"--shard-uds-path={tmp_path}/s"), within=5)[2]
    assert f"error: --shard-uds-path: {tmp_path}/s-0 exists and is no socket; move it away\n" == error
    assert "precious" == (tmp_path / "s-0").read_text()


def test_socket_path_that_is_too_long_is_refused(launch: Start, tmp_path: Path) -> None:
    error = end(launch("--port=0", f"--shard-uds-path={tmp_path}/{'x' * 107}"), within=5)[2]
    assert error.endswith("is too long: a socket's path may have 107 bytes\n")


def test_signal_during_download_stops_at_once(launch: Start) -> None:
    slow = "(print('downloading', flush=True), __import__('time').sleep(60))"
    process = launch("--port=0", resolve=slow)
    wait_for(process, "downloading")
    process.terminate()
    code, log, error = end(process, within=3)
    assert (0, "") == (code, error)
    assert "SIGTERM: stopped before the model was there" in log


# The launch as above, but to report a failure takes its time.
SLOW_TO_REPORT = LAUNCH.replace(
    "sys.exit(", "launcher._report = lambda _: print('unwinds', flush=True) or __import__('time').sleep(60)\nsys.exit("
)


@pytest.mark.parametrize("failing", [{"server": "raise ValueError('no')"}, {"resolve": "open('/nothing/there')"}])
def test_signal_while_a_failed_launch_unwinds_is_no_success(start: Start, failing: dict[str, str]) -> None:
    scripts = {"server": SHARD, "router": HTTP_ROUTER, **failing}
    process = start(SLOW_TO_REPORT, json.dumps(scripts), "--device=cpu", "--port=0")
    wait_for(process, "unwinds")
    process.terminate()
    assert 143 == end(process, within=5)[0]


def test_sigquit_during_download_is_no_success(launch: Start) -> None:
    process = launch("--port=0", resolve="(print('downloading', flush=True), __import__('time').sleep(60))")
    wait_for(process, "downloading")
    process.send_signal(signal.SIGQUIT)
    assert 131 == end(process, within=3)[0]


def test_closed_standard_streams_are_replaced(start: Start) -> None:
    shown = "os.write(2, os.readlink('/proc/self/fd/1').encode())"
    code = f"import os, launcher; os.close(1); launcher.open_standard_streams(); {shown}"
    assert "/dev/null" == end(start(code), within=5)[2]
