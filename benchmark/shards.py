"""Shards to measure without HTTP: those of a running server, or of one that is started for the measurement.

A connection knows what the shards loaded and which KV blocks they have. Whoever drives them uses sequence ids from
2**62 on, which a router that counts from 1 never reaches, and any block: nothing else may run meanwhile, which is
checked where it can be.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from benchmark import shapes
from benchmark.ceilings import Gauge, Probe
from benchmark.devices import DataSheet, known
from benchmark.launch import Server, launch_flags, model_for, running_server, sockets_at
from benchmark.report import BenchError
from benchmark.roofline import ServedModel
from router.client import ModelInfo, ShardedClient, ShardError, Shards

FIRST_ID = 2**62
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 0.3  # a router that serves anybody sends a step within this time


@dataclass(frozen=True)
class MeasuredShards:
    """Where the shards listen, and what is known of their model before asking them."""

    sockets: Sequence[str]
    name: str  # of the model, for the report
    shape: shapes.ModelShape | None  # None: not known, so there are no floors
    location: str | None = None  # folder or repository of the model
    server: Server | None = None  # None: not ours

    def cause(self, error: ShardError) -> BenchError:
        """Why the shards were lost: the launcher knows better than the connection."""
        if self.server is None:
            return BenchError(f"the shards failed: {error}")
        self.server.wait_ended(5.0)
        return BenchError(self.server.failure() or f"the shards failed: {error}")


@dataclass(frozen=True)
class ConnectedShards:
    """Shards that answer, and what they loaded; KV blocks 0 … info.num_blocks-1 are at hand."""

    shards: Shards
    info: ModelInfo


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how to reach shards that run already."""
    parser.add_argument(
        "--shard-uds-path",
        metavar="PATH",
        help="measure running shards at PATH-0, PATH-1, … with an idle router; --model-id or "
        "--random-weights then only name their model",
    )


@contextmanager
def target_for(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[MeasuredShards]:
    """The shards that the arguments name; a server with the launcher `flags` is started for them where none runs."""
    if args.shard_uds_path is not None:
        yield _running(args)
        return
    with model_for(args) as model, running_server([*launch_flags(args, model), *flags]) as server:
        yield MeasuredShards(server.sockets, model.name, shape_of(model.location), model.location, server)


def _running(args: argparse.Namespace) -> MeasuredShards:
    location = args.random_weights or args.model_id
    shape = shapes.shape(args.random_weights) if args.random_weights else shape_of(location) if location else None
    return MeasuredShards(sockets_at(args.shard_uds_path), location or args.shard_uds_path, shape, location)


def shape_of(location: str) -> shapes.ModelShape | None:
    """The shape of a model folder, or of a repository whose config has been downloaded."""
    try:
        return shapes.shape(location)
    except BenchError:
        pass
    cached = cached_file(location, "config.json")
    try:
        return None if cached is None else shapes.shape(str(cached))
    except BenchError:  # of a family that is not known here
        return None


def cached_file(location: str, filename: str) -> Path | None:
    """A file of a repository where it was downloaded to; None if it was not, or if `location` names no repository."""
    try:
        cached = try_to_load_from_cache(location, filename)
    except ValueError:
        return None
    return Path(cached) if isinstance(cached, str) else None


@asynccontextmanager
async def connect(target: MeasuredShards) -> AsyncIterator[ConnectedShards]:
    """Connect to shards that are warmed up and idle. Raises BenchError when they are not."""
    shards = ShardedClient(target.sockets)
    try:
        with causes_of(target):
            await _wait_ready(shards, target)
            if target.server is None:
                await _require_idle(shards)
            info = await shards.info()
        if not info.num_blocks:
            raise BenchError(
                f"the shards at {target.sockets[0]} are not warmed up yet: wait until their server is ready"
            )
        yield ConnectedShards(shards, info)
    finally:
        await shards.close()


@contextmanager
def causes_of(target: MeasuredShards) -> Iterator[None]:
    """Turn a ShardError within the block into a BenchError that says why the shards were lost."""
    try:
        yield
    except ShardError as error:
        raise target.cause(error) from None


async def _wait_ready(shards: ShardedClient, target: MeasuredShards) -> None:
    try:
        await shards.wait_ready(CONNECT_SECONDS)
    except TimeoutError:
        raise BenchError(
            f"the shards at {target.sockets[0]} do not answer: check that their server still runs"
        ) from None


async def _require_idle(shards: ShardedClient) -> None:
    before = await shards.health()
    await asyncio.sleep(IDLE_SECONDS)
    after = await shards.health()
    if after.steps_received != before.steps_received or after.steps_finished != after.steps_received:
        raise BenchError("the server is generating for others: wait until it is idle, or start one for the measurement")


# ------------------------------------------------------------------------------------------------------- floors


@dataclass(frozen=True)
class Floors:
    """What floors follow from: the model as it is served, and a gauge of the device; without both there are none."""

    served: ServedModel | None = None
    gauge: Gauge | None = None
    missing: str = ""  # why there are none


def floors_of(target: MeasuredShards, info: ModelInfo) -> Floors:
    """Of the shards' model on their device, one GPU each or one CPU for all: its data sheet, or else a probe."""
    served = served_model(target, info)
    if served is None:
        return Floors(missing="the model's config.json is not at hand; name it by --model-id or --random-weights")
    if sheet := known(info.device):
        return Floors(served, DataSheet(sheet.ceilings(served)))
    try:
        return Floors(served, _probe_for(served, info))
    except BenchError as error:
        return Floors(served, missing=str(error))


def served_model(target: MeasuredShards, info: ModelInfo) -> ServedModel | None:
    """The shape in the dtype and format that the shards serve it in; None where the shape is not known."""
    if target.shape is None:
        return None
    is_cpu = info.device == "cpu"
    return ServedModel(target.shape, info.dtype, info.quantize, info.kv_cache_dtype, is_cpu, info.world_size)


def _probe_for(served: ServedModel, info: ModelInfo) -> Probe:
    num_devices = 1 if info.device == "cpu" else info.world_size
    return Probe(
        info.device,
        info.dtype,
        threads=info.threads * info.world_size,
        num_devices=num_devices,
        step_weight_bytes=int(served.step_weight_bytes()) // num_devices,
        product_kind=served.product_kind,
    )
