"""Stores of KV blocks keep what they are given, and staging brings to each visit what was written last."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.backends.cpu.device import CpuDevice
from server.backends.device import Device, Link
from server.backends.reference import ReferenceBackend
from server.model.offloaded_kv import OffloadedKv
from server.offload import disk_store, stores
from server.offload.disk_store import DiskError
from server.offload.kv_blocks import AREAS, KvBlocks, Moved, Staging, Visit
from server.offload.places import OnDisk, OnHost, Place
from server.offload.share import ALL, Share
from server.offload.stores import Memory, Run
from tests.server.backends import stand_in
from tests.server.checkpoints import Checkpoints
from tests.server.driver import Prompt, generate, load_engine
from tests.server.model.test_offloaded_kv import fail_once, moved, resident_tokens, sizes, tokens
from tests.server.offload.streaming import LateLink, LinkedDevice, offloaded

LAYERS, BLOCKS = 3, 12
# Of planes with the bytes that a block has in each: odd sizes, whole pages, and those of codes and scales.
PLANES = [(96, 96), (4096, 8192), (640, 64, 640, 64)]
Make = Callable[[Path, Device, Link, Memory], KvBlocks]


def on_disk(folder: Path, device: Device, link: Link, pool: Memory) -> KvBlocks:
    return KvBlocks.open(device, pool, LAYERS, [(BLOCKS, OnDisk(folder, "--offload-dir", 1, None))])


def on_host(folder: Path, device: Device, link: Link, pool: Memory) -> KvBlocks:
    return KvBlocks.open(device, pool, LAYERS, [(BLOCKS, OnHost(link, ALL, lambda: 0))])


def staged(folder: Path, device: Device, link: Link, pool: Memory) -> KvBlocks:
    return KvBlocks.open(device, pool, LAYERS, [(BLOCKS, OnDisk(folder, "--offload-dir", 1, link))])


def divided(folder: Path, device: Device, link: Link, pool: Memory) -> KvBlocks:
    places = [(5, OnHost(link, ALL, lambda: 0)), (BLOCKS - 5, OnDisk(folder, "--offload-dir", 1, link))]
    return KvBlocks.open(device, pool, LAYERS, places)


def make_pool(blocks: int, sizes: Sequence[int]) -> list[Tensor]:
    return [CpuDevice().empty_kv((blocks, size), torch.uint8) for size in sizes]


def fill(pool: Sequence[Tensor], place: int, value: int) -> None:
    for number, plane in enumerate(pool):
        plane[place] = (value + number) % 251


@pytest.mark.parametrize("sizes", PLANES)
@pytest.mark.parametrize("make", [on_disk, on_host, staged, divided])
def test_visits_find_what_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, sizes: Sequence[int]
) -> None:
    """Any order of visits: a row of steps, of which some read the same blocks and some write those just read."""
    monkeypatch.setattr(stores, "STAGE_BYTES", 3 * sum(sizes))  # a few blocks, so that they take turns
    rng, size, device, link = random.Random(3), 8, LinkedDevice(), LateLink()
    pool = make_pool(2 + AREAS * size, sizes)
    store = make(tmp_path, device, link, Memory(pool))
    staging = Staging(device, store, first=2, size=size)
    held: dict[tuple[int, int], int] = {}  # what each layer's blocks hold
    try:
        for _ in range(12):
            known = dict(held)
            visits = [random_visit(rng, held, size) for _ in range(rng.randint(1, 7))]
            staging.begin([visit for visit, _ in visits])
            for visit, values in visits:
                base = staging.enter()
                for block, place in pairs(visit.reads.at(base)):
                    wanted = known[visit.layer, block]
                    assert all((plane[place] == (wanted + n) % 251).all() for n, plane in enumerate(pool))
                for block, place in pairs(visit.writes.at(base)):
                    fill(pool, place, values[block])
                    known[visit.layer, block] = values[block]
                staging.leave()
            staging.end()
            assert held == known
    finally:
        store.close()
    assert not link.pins
    assert staging.times.read_blocks > 50 and staging.times.written_blocks > 50
    assert (make is on_host) == (not store.moved_bytes)


def random_visit(rng: random.Random, held: dict[tuple[int, int], int], size: int) -> tuple[Visit, dict[int, int]]:
    """A visit and what it writes. What a visit before it in the same step writes, it may read: `held` knows."""
    layer = rng.randrange(LAYERS)
    blocks = rng.sample(range(BLOCKS), rng.randint(1, size))
    places = dict(zip(blocks, rng.sample(range(size), len(blocks)), strict=True))
    reads = [(block, place) for block, place in places.items() if (layer, block) in held]
    values = {block: rng.randrange(1000) for block in blocks if rng.random() < 0.5}
    held.update({(layer, block): value for block, value in values.items()})
    return Visit(layer, Moved.of(reads), Moved.of([(block, places[block]) for block in values])), values


def pairs(runs: Sequence[Run]) -> list[tuple[int, int]]:
    return [(run.block + i, run.place + i) for run in runs for i in range(run.length)]


def test_blocks_that_follow_each_other_move_together() -> None:
    runs = Moved.of([(7, 3), (4, 0), (5, 1), (6, 2), (9, 4)]).runs
    assert (Run(4, 0, 4), Run(9, 4, 1)) == runs
    assert [Run(4, 0, 3), Run(7, 3, 1)] == list(runs[0].cut(3))


def test_a_read_that_fails_leaves_no_stage_to_be_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way beside it has ended, so that the next blocks find their stages as they were."""
    monkeypatch.setattr(stores, "STAGE_BYTES", 4096)
    pool, device, link = make_pool(BLOCKS, [4096]), LinkedDevice(), LateLink()
    store = staged(tmp_path, device, link, Memory(pool))
    try:
        for block in range(BLOCKS):
            fill(pool, block, block)
        store.save(0, [Run(0, 0, BLOCKS)], device.event())()
        with monkeypatch.context() as broken:
            broken.setattr(disk_store.os, "preadv", fail_once(os.preadv, 1))
            with pytest.raises(DiskError, match="cannot be read back"):
                store.load(0, [Run(0, 0, BLOCKS)], device.event())()
        store.load(0, [Run(0, BLOCKS - 6, 6), Run(6, 0, 6)], device.event())()
        assert [*range(6, BLOCKS), *range(6)] == [int(row[0]) for row in pool[0]]
    finally:
        store.close()


class BrokenStore:
    """Whose reads or writes of one layer fail; notes what is waited for."""

    moved_bytes = 0

    def __init__(self, fails: str):
        self._fails, self.under_way = fails, 0

    def load(self, layer: int, runs: object, after: object) -> Callable[[], None]:
        return self._begin("load", layer)

    def save(self, layer: int, runs: object, after: object) -> Callable[[], None]:
        return self._begin("save", layer)

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, what: str, layer: int) -> Callable[[], None]:
        self.under_way += 1

        def finish() -> None:
            self.under_way -= 1
            if (what, layer) == (self._fails, 1):
                raise DiskError(f"this {what} fails")

        return finish


@pytest.mark.parametrize("fails", ["load", "save"])
def test_a_step_ends_when_nothing_moves_whatever_failed(fails: str) -> None:
    store = BrokenStore(fails)
    staging = Staging(CpuDevice(), store, first=0, size=4)
    both = Moved.of([(0, 0), (1, 1)])
    for layers, error in (([0, 1, 2], DiskError), ([0, 1], DiskError), ([0, 2], None)):
        found: type[DiskError] | None = None
        staging.begin([Visit(layer, both, both) for layer in layers])
        try:
            try:
                for _ in layers:
                    staging.enter()
                    staging.leave()
            finally:
                staging.end()
        except DiskError as raised:
            found = type(raised)
            assert f"this {fails} fails" == str(raised)
        assert (error, 0) == (found, store.under_way)


@pytest.mark.parametrize("case", ["llama", "t5"])
@pytest.mark.parametrize("shares", [("20%", "100%"), ("0%", "30%")])
def test_blocks_reach_a_device_with_memory_of_its_own(
    checkpoints: Checkpoints, tmp_path: Path, case: str, shares: tuple[str, str]
) -> None:
    """By way of the host's memory, and of stages where it has too little."""
    folder, _ = checkpoints(case)
    device, link = LinkedDevice(), LateLink()
    places: list[Place] = [OnHost(link, Share.parse(shares[1]), lambda: 2**30)]
    if shares[1] != "100%":
        places.append(OnDisk(tmp_path, "--offload-dir", 1, link))
    with offloaded(folder, shares[0], tmp_path, stage_bytes=1, places=places) as placement:
        engine = load_engine(folder, backend=ReferenceBackend(device), kv_placement=placement, **sizes(folder))
        assert resident_tokens(folder) == tokens(engine)
        assert moved(placement)
        assert 1 + (len(places) > 1) == len(link.pins)
    assert not link.pins


@pytest.mark.skipif(stand_in.WHY_NOT is not None, reason=str(stand_in.WHY_NOT))
def test_no_step_waits_for_a_device_whose_blocks_are_on_its_host(checkpoints: Checkpoints) -> None:
    folder, _ = checkpoints("llama")

    def prompts() -> list[Prompt]:
        return [Prompt(list(range(4, 40)), chunk=16), Prompt([9, 8, 7], joins_at=1)]

    expected = [p.tokens for p in generate(load_engine(folder, **sizes(folder)), prompts())]
    backend = stand_in.StandInBackend()
    link = backend.device.link()
    places = [OnHost(link, Share.parse("100%"), lambda: 2**30)]
    placement = OffloadedKv(Share.parse("10%"), places, [0] * 3, 0, stage_bytes=1)
    engine = load_engine(folder, backend=backend, kv_placement=placement, **sizes(folder))
    with backend.device.forbidding():
        assert expected == [p.tokens for p in generate(engine, prompts())]
    assert moved(placement) and link.copies
    placement.release()
