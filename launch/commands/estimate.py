"""What a model takes of this machine's memory, and the limits that follow: for `lockstep check`, from config.json.

The arithmetic is that of `lockstep-bench plan`, with what is free here in place of a data sheet. Left out: weights and
KV blocks that are not on the device, for what stays there is measured at the start.
"""

from __future__ import annotations

import math
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmark.cost import shapes
from benchmark.cost.devices import Capacity, DatasheetDevice, least_capacity, stored_as
from benchmark.cost.roofline import Pipeline, ServedModel
from benchmark.cost.shapes import ModelShape, NamedShape
from host.cgroups import available_bytes
from host.cpu_kinds import good_dtypes
from launch.machine import Placement
from launch.settings import Settings
from router.config import RouterConfig
from router.scheduling.limits import LengthLimits, Room, derive_lengths, max_sequences
from server.arch.spec import with_rope_scaling
from server.quantisation import sizes

OFFLOADING = ("weights_on_device", "kv_on_device")
GPU_DTYPES = {"float32", "float16", "bfloat16"}


@dataclass(frozen=True)
class Memory:
    """Of one device: bytes that a server may use, and what they are of, for people."""

    free_bytes: int
    described: str


@dataclass(frozen=True)
class Estimate:
    """What a launch takes, and which sequences it serves."""

    parameters: int
    weight_bytes: int  # of all shards
    stored: str
    dtype: str
    dtype_reason: str
    memory: Memory | None  # None: not known
    capacity: Capacity | None  # likewise
    lengths: LengthLimits | None  # None: they contradict each other
    max_positions: int  # of the model; 0: no limit of its own


Report = Callable[[str], None]
T = TypeVar("T")


def estimate(
    settings: Settings, placement: Placement, folder: Path, environ: Mapping[str, str], report: Report
) -> Estimate | None:
    """What the model in `folder` takes; None where its config says nothing. report: is told each problem."""
    named = _attempt(lambda: shapes.find(str(folder)), report)
    config = _attempt(
        lambda: RouterConfig(model_path="", shard_sockets=(), **settings.pick(RouterConfig)), lambda _: None
    )
    if named is None or config is None:  # the settings' own problems are known
        return None
    values, on_cpu = settings.values, placement.device == "cpu"
    shape = _attempt(lambda: _scaled(named.shape, values), report) or named.shape
    stored = _attempt(lambda: _stored(named, values["quantize"], values["quantize_head"]), report)
    dtype, reason = _dtype(values["dtype"], shape.dtype, good_dtypes() if on_cpu else GPU_DTYPES, placement.device)
    served = ServedModel(shape, dtype, stored, values["kv_cache_dtype"], on_cpu)
    memory = None if is_offloaded(settings) else memory_of(placement.device, environ, values["cuda_memory_fraction"])
    if split_problem := shape.split_problem(placement.layout.num_shard):
        report(split_problem)
    lengths = _attempt(lambda: _lengths(config, shape), report)
    found = None
    if memory and lengths and not split_problem:
        found, lengths = _fit(served, placement, memory, config, lengths, report)
    return Estimate(
        *(shape.total_parameters, shape.weight_bytes(dtype, stored), stored or "dense", dtype, reason),
        *(memory, found, lengths, shape.spec.max_positions),
    )


def _fit(
    served: ServedModel,
    placement: Placement,
    memory: Memory,
    config: RouterConfig,
    lengths: LengthLimits,
    report: Report,
) -> tuple[Capacity | None, LengthLimits]:
    """What fits into the memory, and the lengths that this leaves."""
    found = _attempt(lambda: capacity(served, placement, memory, config, lengths), report)
    if found is None:
        return None, lengths
    return found, _attempt(lambda: _lengths(config, served.shape, found.kv_tokens), report) or lengths


def _attempt(action: Callable[[], T], report: Report) -> T | None:
    """What the action returns; None where it raises, of which `report` is told."""
    try:
        return action()
    except ValueError as error:
        report(str(error))
        return None


def _scaled(shape: ModelShape, values: Mapping[str, Any]) -> ModelShape:
    if not values["rope_scaling"] and not values["rope_factor"]:
        return shape
    kind, factor = values["rope_scaling"] or "linear", values["rope_factor"] or 1.0
    return replace(shape, spec=with_rope_scaling(shape.spec, kind, factor))


def _lengths(config: RouterConfig, shape: ModelShape, fitting_tokens: int | None = None) -> LengthLimits:
    has_encoder = shape.spec.encoder is not None
    room = None if fitting_tokens is None else Room(fitting_tokens, fitting_tokens)
    return derive_lengths(config, shape.spec.max_positions, has_encoder=has_encoder, room=room)


def is_offloaded(settings: Settings) -> bool:
    """Whether something is not on the device, of which nothing is known before a start."""
    return any(settings.values[name] != "100%" for name in OFFLOADING)


def capacity(
    served: ServedModel, placement: Placement, memory: Memory, config: RouterConfig, lengths: LengthLimits
) -> Capacity:
    """What fits beside the weights on the device with the least room. Raises ValueError where it is too little."""
    layout = placement.layout
    # Shards on CPUs share a machine's memory, of which each stage is given its part.
    free = memory.free_bytes * (layout.num_shard / layout.num_local if placement.device == "cpu" else 1)
    device = DatasheetDevice(1.0, 1.0, 1.0, free, is_cpu=placement.device == "cpu")
    limits = Namespace(
        max_concurrent_requests=max_sequences(config),
        max_total_tokens=lengths.max_total_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
    )
    stages = Pipeline(tuple(served.stages(layout.num_stages)))
    found = least_capacity(stages, device, layout.num_shard, limits)
    wanted = config.max_batch_total_tokens
    if found.problem:
        raise ValueError(f"{found.problem}: use more shards, --quantize int8 or --kv-cache-dtype int8")
    if wanted is not None and wanted > found.kv_tokens:
        raise ValueError(
            f"max_batch_total_tokens is {wanted}, but free memory holds a KV cache of about {found.kv_tokens} tokens: "
            f"use --max-batch-total-tokens {found.kv_tokens} or less"
        )
    return replace(found, max_batch_total_tokens=wanted or found.max_batch_total_tokens)


def memory_of(device: str, environ: Mapping[str, str], fraction: float) -> Memory | None:
    """What is free now of the host's memory, or of the visible GPU with the least; None where nobody tells."""
    if device == "cpu":
        free = available_bytes()
        return Memory(free, "free of this machine's memory, a fifth of it left to others")
    query = ["nvidia-smi", "--query-gpu=index,name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
        gpus = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
        chosen = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = [gpu for gpu in gpus if gpu[0] in chosen] or gpus
        least = min(((int(free) - (1 - fraction) * int(total)) * 2**20, name, i) for i, name, free, total in visible)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Memory(math.floor(least[0]), f"free of GPU {least[2]}, {least[1]}")


def _stored(named: NamedShape, quantize: str | None, head: str) -> str | None:
    if named.shape.stored is None and quantize is not None and quantize not in sizes.IN_FLIGHT:
        raise ValueError(
            f"--quantize is {quantize}, but config.json has no `quantization_config`: give a checkpoint that is "
            f"quantised so, or one of {', '.join(sizes.IN_FLIGHT)}, which quantise while loading"
        )
    return stored_as(named, quantize, head)


def _dtype(wanted: str | None, stored: str, good: set[str], device: str) -> tuple[str, str]:
    """As the server chooses it, from the dtype that the config names."""
    if wanted is not None:
        return wanted, "asked for"
    if stored in good:
        return stored, "the checkpoint's"
    nearest = next(dtype for dtype in ("bfloat16", "float16", "float32") if dtype in good)
    return nearest, f"this {device} does not compute the checkpoint's {stored} well"
