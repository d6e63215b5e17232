"""Model processes die, hang and fail under streams, and every stream gets the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from benchmark.cost.shapes import write_word_tokenizer
from tests.running import ROOT, Server, body, events_of
from tests.server.tiny import COMMON, save_tiny
from tests.system.survival import SIGNALS, Disturb, Tally, mixed_requests, recoveries, recovery_after, signals, survive

FAULTS = ROOT / "tests" / "faults"


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that tells a shard of the server below to meet a fault."""
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def server(fault: Path) -> Iterator[Server]:
    """Two ranks of the embedded model, whose log is kept."""
    env = {"PYTHONPATH": str(FAULTS), "LOCKSTEP_TEST_FAULT": str(fault)}
    with Server("--dtype", "float32", "--num-shard", "2", env=env) as server:
        reader = threading.Thread(target=read_log, args=(server,), daemon=True)
        reader.start()
        yield server
        server.stop(signal.SIGKILL)
        reader.join()


def read_log(server: Server) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.lines.append(line)


def disturbed(server: Server, disturb: Disturb, streams: int = 8) -> tuple[Tally, str]:
    """What the clients saw, and what was logged meanwhile."""
    num_lines = len(server.lines)
    requests = mixed_requests(2 * streams, random.Random(4), most_tokens=40)
    tally = asyncio.run(survive(server, disturb, streams=streams, requests=requests))
    assert not tally.failures
    assert tally.answers >= streams
    return tally, "".join(server.lines[num_lines:])


def test_killed_ranks_cost_a_pause_and_no_token(server: Server) -> None:
    _, log = disturbed(server, signals(SIGNALS["kill"], 3, random.Random(2), most_s=1.0), streams=32)
    assert 3 <= log.count("all shards are started again")  # on a busy machine a step may be late enough for one more


@pytest.mark.rest
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_and_replaced(server: Server, rank: int) -> None:
    async def stop(server: Server) -> None:
        await asyncio.sleep(0.3)
        count = await recoveries(server)
        os.kill(server.shards()[rank], signal.SIGSTOP)
        await recovery_after(server, count)

    _, log = disturbed(server, stop)
    assert f"shard {rank} stopped: it does not answer: a step has taken" in log


@pytest.mark.parametrize(
    ("rank", "kind", "sentence"),
    [
        (1, "raise", "shard 1 stopped: RuntimeError: a tile was lost"),
        pytest.param(0, "60", "shard 0 stopped: it answers, but its step does not end", marks=pytest.mark.rest),
        pytest.param(1, "60", "shard 1 stopped: it answers, but its step does not end", marks=pytest.mark.rest),
    ],
)
def test_a_rank_that_fails_in_a_step_is_named_and_replaced(
    server: Server, fault: Path, rank: int, kind: str, sentence: str
) -> None:
    async def meet(server: Server) -> None:
        await asyncio.sleep(0.2)
        count = await recoveries(server)
        fault.write_text(f"{rank} {kind}")
        while fault.exists():  # another step may be late on a busy machine, and cost a recovery first
            await asyncio.sleep(0.01)
        await recovery_after(server, count)

    _, log = disturbed(server, meet)
    assert sentence in log


@pytest.mark.rest
def test_a_rank_that_answers_late_is_waited_for(server: Server, fault: Path) -> None:
    async def meet(server: Server) -> None:
        fault.write_text("1 0.8")
        while fault.exists():
            await asyncio.sleep(0.05)
        met_at.append(len(server.lines))
        await asyncio.sleep(1.5)

    met_at: list[int] = []
    disturbed(server, meet)
    # On a busy machine another rank may be late enough to be lost.
    assert "lost the model shards: shard 1: " not in "".join(server.lines[met_at[0] :])


@pytest.mark.rest
def test_a_kill_during_the_recovery_is_survived_too(server: Server) -> None:
    async def kill_twice(server: Server) -> None:
        await asyncio.sleep(0.3)
        count = await recoveries(server)
        first = server.shards()
        os.kill(first[1], signal.SIGKILL)
        while len(fresh := [pid for pid in server.shards() if pid not in first]) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        os.kill(fresh[0], signal.SIGKILL)
        await recovery_after(server, count)

    _, log = disturbed(server, kill_twice)
    assert 2 <= log.count("all shards are started again")


def test_health_says_no_while_there_are_no_shards(server: Server) -> None:
    async def kill(server: Server) -> None:
        count = await recoveries(server)
        os.kill(server.shards()[0], signal.SIGKILL)
        said: list[str] = []
        async with httpx2.AsyncClient(timeout=30) as client:
            # Who asks in the moment of the death is told that the shard's connection was closed.
            while not (said and "the model shards are being started again" in said[-1]):
                if (answer := await client.get(f"{server.url}/health")).status_code != 200:
                    assert 503 == answer.status_code
                    said.append(answer.json()["error"])
                await asyncio.sleep(0.01)
        assert all(sentence.startswith("unhealthy: ") for sentence in said)
        causes = [sentence for sentence in said if "are being started again" in sentence]
        assert all("shard 0: " in cause or "the launcher ended them all" in cause for cause in causes)
        await recovery_after(server, count)

    disturbed(server, kill)
    assert 200 == httpx2.get(f"{server.url}/health", timeout=30).status_code


@pytest.mark.rest
def test_what_an_encoder_read_survives_too(tmp_path: Path) -> None:
    save_tiny("t5", tmp_path)
    write_word_tokenizer(COMMON["vocab_size"], tmp_path)
    words = [f"t{id}" for id in range(4, COMMON["vocab_size"])]
    requests = [
        body(request["inputs"], **{**request["parameters"], "stop": []})
        for request in mixed_requests(16, random.Random(4), 100, words, 60)
    ]
    with Server("--model-id", str(tmp_path), "--dtype", "float32", "--num-shard", "2") as server:
        disturb = signals(SIGNALS["kill"], 3, random.Random(3), most_s=0.3)
        tally = asyncio.run(survive(server, disturb, streams=8, requests=requests))
    assert not tally.failures
    assert tally.answers >= 8


# ------------------------------------------------------------------------------------------- routers, and giving up


def answer(server: Server) -> str:
    text: str = httpx2.post(f"{server.url}/generate", json=body("Once", max_new_tokens=9), timeout=60).json()[
        "generated_text"
    ]
    return text


def wait_for_end(pid: int) -> None:
    """Until nothing is left of a process."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)


def again(server: Server, within: float = 300) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + within
    while True:
        try:
            assert 200 == httpx2.get(f"{server.url}/health", timeout=30).status_code
        except (httpx2.TransportError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGUSR1, marks=pytest.mark.rest)])
def test_a_router_is_started_again_beside_the_same_shards(number: signal.Signals) -> None:
    with Server("--num-shard", "2") as server:
        expected, shards, router = answer(server), server.shards(), server.router()
        if number == signal.SIGUSR1:
            server.stop(number)
        else:
            os.kill(router, number)
        wait_for_end(router)
        again(server)
        assert (expected, shards) == (answer(server), server.shards())
        os.kill(shards[0], signal.SIGKILL)  # what came after knows its launcher, too
        again(server)
        assert expected == answer(server)
        server.stop(signal.SIGTERM)
        assert 0 == server.wait()[0]


def test_a_router_and_its_shards_may_die_together() -> None:
    with Server("--model-id", "null", "--num-shard", "2") as server:
        expected, router = answer(server), server.router()
        for pid in (router, *server.shards()):
            with contextlib.suppress(ProcessLookupError):  # the launcher ends the group of the first itself
                os.kill(pid, signal.SIGKILL)
        wait_for_end(router)
        again(server)
        assert expected == answer(server)


@pytest.mark.rest
@pytest.mark.parametrize("has_path", [False, True])
def test_a_router_may_die_while_the_next_shards_are_held_back(has_path: bool, tmp_path: Path) -> None:
    """As they are after the second death without a token between. has_path: all groups' sockets have the same names."""
    flags = ("--shard-uds-path", str(tmp_path / "s")) if has_path else ()
    with Server("--model-id", "null", *flags) as server:
        expected = answer(server)
        for death in range(3):  # the first one follows a token
            asyncio.run(recovery_after(server, death - 1))
            os.kill(server.shards()[0], signal.SIGKILL)
        router = server.router()
        os.kill(router, signal.SIGKILL)
        wait_for_end(router)
        again(server)
        assert expected == answer(server)
        server.stop(signal.SIGTERM)
        code, log = server.wait()
    assert 0 == code
    assert 3 == log.count("all shards are started again") and "started again in 1 s" in log


@pytest.mark.rest
@pytest.mark.parametrize("stages", [1, 2])
def test_routers_and_shards_may_die_one_after_the_other(stages: int) -> None:
    """The shards that took over were asked for the KV cache of those before; a router asks for that of the settings."""
    flags = ["--num-shard", str(2 // stages), "--pipeline-parallel", str(stages), "--max-batch-total-tokens", "4096"]
    with Server(*flags) as server:
        expected = answer(server)
        for victim in ("shard", "router", "router", "shard", "router"):
            pid = server.router() if victim == "router" else server.shards()[-1]
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
            again(server)
            assert expected == answer(server)
        server.stop(signal.SIGTERM)
        assert 0 == server.wait()[0]


def last_event(server: Server, rank: int) -> str:
    """The error that a stream ends with when this rank is killed."""
    asked = body("Once", max_new_tokens=2000)
    with httpx2.stream("POST", f"{server.url}/generate_stream", json=asked, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        os.kill(server.shards()[rank], signal.SIGKILL)
        error: str = events_of(list(lines))[-1]["error"]
        return error


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.rest)])
def test_where_nobody_starts_shards_again_every_stream_is_told(rank: int) -> None:
    slow = ("--null-step-ms", "5")  # the kill comes before the last token
    with Server("--model-id", "null", *slow, "--num-shard", "8", "--max-deaths", "0") as server:
        assert f"shard {rank} stopped: killed by signal 9" in last_event(server, rank)
        code, output = server.wait()
    assert 1 == code
    assert f"error: shard {rank} stopped: killed by signal 9" in output.splitlines()[-1]


@pytest.mark.rest
def test_deaths_without_a_token_between_are_given_up() -> None:
    with Server("--model-id", "null", "--max-deaths", "3") as server:
        for death in range(3):
            asyncio.run(recovery_after(server, death - 1))
            [shard] = server.shards()
            os.kill(shard, signal.SIGTERM)
            while Path(f"/proc/{shard}").exists() and server.process.poll() is None:
                time.sleep(0.02)
        code, output = server.wait()
    assert 1 == code
    assert "it exited with code 0 without saying why, as after a SIGTERM" in output.splitlines()[-1]
    assert "started again in 1 s" in output
