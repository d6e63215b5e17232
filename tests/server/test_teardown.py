"""How a shard ends: what holds captured collectives goes before the process group, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import server.__main__ as shard
from server import loading
from server.backends.cpu.device import CpuDevice
from server.config import ShardConfig
from server.pb import generate_pb2 as pb
from server.ranks import collectives
from server.stepping.engine import Engine
from tests.running import ROOT
from tests.server.test_service import config_of

HANGS = """
import asyncio, sys, time
import server.__main__ as shard
from server.ranks import collectives
from server.config import ShardConfig

async def now():
    print("stopped", flush=True)

shard._stop_signal, shard.TEARDOWN_SECONDS = now, 0.5
collectives.disconnect = lambda: time.sleep(60)
asyncio.run(shard.run(ShardConfig.load(sys.argv[1])))
"""


class Graphs:
    """Stands in for captured steps, which refer to themselves where one is computed without a graph."""

    def __init__(self) -> None:
        self.step = self


class Agreed:
    """Stands in for captures of which one failed."""

    failures = ("rank 1: no memory",)


class Reached:
    """The end of a device's work."""

    def __init__(self, order: list[str]):
        self._order = order

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._order.append("the device is idle")


def test_graphs_go_before_the_process_group(tiny_bloom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def load(config: ShardConfig) -> tuple[Engine, pb.InfoReply]:
        engine, info = real_load(config)
        graphs = Graphs()
        weakref.finalize(graphs, order.append, "the graphs are dropped")
        engine._graphs, engine._agreed = graphs, Agreed()  # type: ignore[assignment]
        return engine, info

    async def stop() -> None:
        order.append("told to stop")

    real_load, threads = loading.load, torch.get_num_threads()
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(CpuDevice, "event", lambda device: Reached(order))
    monkeypatch.setattr(collectives, "disconnect", lambda: order.append("the group is destroyed"))
    monkeypatch.setattr(shard, "_stop_signal", stop)
    monkeypatch.setattr(shard, "_end_within", lambda seconds: order.append("a timer runs"))
    assert 0 == asyncio.run(shard.run(config_of(tiny_bloom, tmp_path / "s")))
    torch.set_num_threads(threads)
    expected = [
        "told to stop",
        "a timer runs",
        "the graphs are dropped",
        "the device is idle",
        "the group is destroyed",
    ]
    assert expected == order


def test_a_teardown_that_hangs_is_ended_and_says_where(tiny_bloom: Path, tmp_path: Path) -> None:
    config_of(tiny_bloom, tmp_path / "s").save(tmp_path / "config.json")
    command = [sys.executable, "-c", HANGS, str(tmp_path / "config.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert 1 == ended.returncode and "stopped" in ended.stdout
    assert "Timeout" in ended.stderr and "in run" in ended.stderr
