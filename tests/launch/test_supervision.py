"""Supervision with real processes: small scripts stand in for the shards and the router."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.stand_ins import (
    FORK_SERVER,
    PRELUDE,
    ROUTER,
    SHARD,
    STUBBORN,
    SUPERVISE,
    Start,
    after,
    end,
    eventually,
    is_alive,
    wait_for,
)
from tests.running import ROOT


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
    code = PRELUDE + errors + f"say('said', text='{hostile}\\n')\nleave('{hostile}')"
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


def test_cause_after_readiness(supervise: Start, tmp_path: Path) -> None:
    process = supervise(shard_0=PRELUDE + after(tmp_path / "go") + "fail('CUDA error')", router=STUBBORN)
    wait_for(process, "serving")
    (tmp_path / "go").touch()
    assert (1, "error: shard 0 stopped: CUDA error\n") == end(process, within=5)[::2]


def test_last_exception_is_the_cause_when_nothing_else_was_said(supervise: Start) -> None:
    process = supervise(shard_0="raise MemoryError('no room')", router=SHARD)
    assert (1, "error: shard 0 cannot start: MemoryError: no room\n") == end(process, within=5)[::2]


def test_silent_exit_is_a_failure_too(supervise: Start) -> None:
    process = supervise(shard_0="", router=SHARD)
    assert "error: shard 0 cannot start: it exited with code 0 without saying why" in end(process, within=5)[2]


def test_sigkill_is_explained(supervise: Start) -> None:
    code, _, error = end(supervise(shard_0="import os; os.kill(os.getpid(), 9)", router=SHARD), within=5)
    assert code == 1 and error.startswith("error: shard 0 cannot start: killed by signal 9 (SIGKILL), by hand or by")


def test_other_signals_are_named_with_the_last_words(supervise: Start) -> None:
    crash = "import os, sys; sys.stderr.write('terminate called\\n'); sys.stderr.flush(); os.abort()"
    error = end(supervise(shard_0=crash, router=SHARD), within=5)[2]
    assert "error: shard 0 cannot start: killed by signal 6 (Aborted): terminate called\n" == error


def test_rank_that_lost_its_peers_is_not_blamed(supervise: Start, tmp_path: Path) -> None:
    victim = PRELUDE + "fail('lost its peers', consequence=True)"
    culprit = PRELUDE + after(tmp_path / "go") + "fail('out of memory')"
    process = supervise(blame=100, shard_0=victim, shard_1=culprit, shard_2=victim, router=SHARD)
    wait_for(process, "lost its peers", "lost its peers")
    (tmp_path / "go").touch()
    assert "error: shard 1 cannot start: out of memory\n" == end(process, within=5)[2]


def test_victim_is_named_if_nobody_else_confesses(supervise: Start) -> None:
    process = supervise(shard_0=PRELUDE + "fail('lost its peers', consequence=True)", router=STUBBORN)
    assert end(process, within=5)[2].endswith(": lost its peers\n")


def test_shards_that_fail_the_router_before_it_is_ready_cannot_start(supervise: Start) -> None:
    lost = "say('', event='group_lost', group=1, rank=0, cause='it is broken', is_known=True, is_silent=True)\n"
    process = supervise(shard_0=SHARD, router=PRELUDE + lost + "time.sleep(600)")
    assert (1, "error: shard 0 cannot start: it is broken\n") == end(process, within=5)[::2]


def test_failed_start_leaves_no_process(supervise: Start, tmp_path: Path) -> None:
    hidden = PRELUDE + "import subprocess\np = subprocess.Popen(['sleep', '60'])\nsay('pids', a=os.getpid(), b=p.pid)\n"
    process = supervise(True, shard_0=hidden + STUBBORN, router=PRELUDE + after(tmp_path / "go") + "fail('no')")
    record = json.loads(wait_for(process, "pids"))
    (tmp_path / "go").touch()
    end(process, within=5)
    eventually(lambda: not is_alive(record["a"]) and not is_alive(record["b"]))


def test_sigterm_drains_the_router_before_the_shards_stop(supervise: Start) -> None:
    slow = (
        PRELUDE
        + "on_term(lambda: (time.sleep(0.5), leave('router drained'))); say('serving', event='ready')\ntime.sleep(60)"
    )
    process = supervise(shard_0=SHARD, shard_1=SHARD, router=slow)
    wait_for(process, "serving", "loaded", "loaded")
    process.terminate()
    code, log, error = end(process, within=5)
    assert (0, "") == (code, error)
    assert log.index("router drained") < log.index("shard ends")


def test_sigint_drains_too(supervise: Start) -> None:
    process = supervise(shard_0=SHARD, router=ROUTER)
    wait_for(process, "serving", "loaded")
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


def supervise_forks(start: Start, fork_server: str, **scripts: str) -> subprocess.Popen[str]:
    named = {name.replace("_", "-"): code for name, code in scripts.items()}
    return start(
        SUPERVISE,
        json.dumps(
            {"scripts": named, "as_json": False, "drain": 100, "stop": 100, "blame": 0.1, "fork_server": fork_server}
        ),
    )


def test_a_fork_server_that_cannot_import_is_the_cause(start: Start) -> None:
    process = supervise_forks(start, "import nothing_there", shard_0=SHARD, shard_1=SHARD, router=SHARD)
    code, _, error = end(process, within=5)
    assert (1, "error: fork server cannot start: ModuleNotFoundError: No module named 'nothing_there'\n") == (
        code,
        error,
    )


def test_a_signal_does_not_wait_for_shards_that_have_not_started(start: Start) -> None:
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
WAITING = PRELUDE + "on_term(lambda: leave('router ends'))\ntime.sleep(60)"  # never ready: shards do not start
STILLBORN = "import os\nfrom server import fork_server\nfork_server.become_child_of = lambda parent: os._exit(1)\n"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            FEWER_FORKS,
            "fork server cannot start: OSError: a process for a shard could not be forked: raise the limit of",
        ),
        (STILLBORN, "shard 0 cannot start: it exited with code 1 without saying why"),
    ],
)
def test_a_fork_that_dies_before_it_has_started_is_noticed(start: Start, fault: str, sentence: str) -> None:
    code, _, error = end(supervise_forks(start, fault + FORK_SERVER, shard_0=SHARD, router=WAITING), within=5)
    assert 1 == code
    assert sentence in error


def testrunning_shards_need_no_fork_server(start: Start) -> None:
    pid = "import os, sys\nprint('fork server', os.getpid(), 'lives', file=sys.stderr, flush=True)\n"
    process = supervise_forks(start, pid + FORK_SERVER, shard_0=SHARD, router=ROUTER)
    found = re.search(r"fork server (\d+) lives", wait_for(process, "serving", "loaded", "lives"))
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    assert "fork server stopped: killed by signal 9" in wait_for(process, "running shards need it no more")
    process.terminate()
    code, log, error = end(process, within=5)
    assert (0, "") == (code, error)
    assert "shard ends" in log


def test_what_shards_leave_behind_is_reaped(start: Start) -> None:
    orphan = PRELUDE + "import subprocess\nsubprocess.run(['sh', '-c', 'sleep 0.1 & echo $!'])\n"
    process = supervise_forks(start, FORK_SERVER, shard_0=orphan + SHARD, router=ROUTER)
    found = re.search(r"shard-0: (\d+)\n", wait_for(process, "serving", "loaded"))
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
    limits = {"as_json": False, "drain": 100, "stop": 100, "blame": 0.1}
    options = json.dumps({"scripts": {"shard-0": SHARD, "router": ROUTER}, **limits})
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
    records = [json.loads(line) for line in wait_for(process, "serving", '"pid"', "loaded").splitlines()]
    process.terminate()
    assert 0 == end(process, within=5)[0]
    (pid,) = (record["pid"] for record in records if "pid" in record)
    eventually(lambda: not is_alive(pid))


def test_router_that_does_not_drain_is_killed(supervise: Start) -> None:
    process = supervise(drain=0.2, stop=2, shard_0=SHARD, router=STUBBORN)
    wait_for(process, "serving", "loaded")
    process.terminate()
    code, log, error = end(process, within=5)
    assert (1, "error: router stopped: it had not finished its requests after 0.2 s and was killed\n") == (code, error)
    assert "shard ends" in log


def test_signal_while_loading_stops_at_once(supervise: Start) -> None:
    process = supervise(shard_0=STUBBORN, router=SHARD)
    wait_for(process, "serving", "loaded")
    process.terminate()
    assert 0 == end(process, within=4)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_killed_launcher_leaves_nothing(supervise: Start) -> None:
    pid = PRELUDE + "say('pid', pid=os.getpid())\n"
    process = supervise(True, shard_0=pid + SHARD, shard_1=pid + SHARD, router=pid + STUBBORN)
    records = [json.loads(line) for line in wait_for(process, "serving", "loaded", "loaded").splitlines()]
    pids = [record["pid"] for record in records if "pid" in record]
    process.kill()
    assert 3 == len(pids)
    eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_child_is_not_stalled_by_a_reader_that_stopped(supervise: Start, tmp_path: Path) -> None:
    path = tmp_path / "done"
    channel = f"for _ in range(4000): say('x' * 1000)\nopen({str(path)!r}, 'w')\ntime.sleep(60)"
    process = supervise(shard_0=SHARD, router=PRELUDE + "say('serving', event='ready')\n" + channel)
    eventually(path.exists)  # 4 MB were taken off the talker's hands although nobody reads ours
    log = wait_for(process, "log lines dropped")  # or what is left at the end would have to leave within a second
    process.terminate()
    assert process.stdout
    log += process.stdout.read()  # with what `wait_for` has read ahead
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
