"""What a model takes of this machine's memory, and the limits that follow: for `lockstep check`, from config.json.

The arithmetic is that of `lockstep-bench plan`, with what is free here in place of a data sheet. What config.json alone
refuses is asked of what a shard asks, so that the sentences are the same. Left out: weights and KV blocks that are not
on the device, for what stays there is measured at the start.
"""

from __future__ import annotations

import math
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.cost import shapes
from benchmark.cost.devices import Capacity, DatasheetDevice, least_capacity
from benchmark.cost.roofline import Pipeline, ServedModel
from benchmark.cost.shapes import ModelShape, NamedShape
from host.cgroups import available_bytes
from host.cpu_kinds import NONE, good_dtypes
from launch.errors import attempt
from launch.machine import Placement, chosen_gpus
from launch.settings import Settings
from router.config import RouterConfig
from router.scheduling.limits import LengthLimits, Room, derive_lengths, max_sequences
from server.arch import families
from server.arch.spec import with_rope_scaling
from server.checkpoint.files import readable, with_quantisation
from server.config import ShardConfig, dtype_for
from server.quantisation.sizes import config_of

DENSE = "dense"
GPU_DTYPES = {"float32", "float16", "bfloat16"}


@dataclass(frozen=True)
class Memory:
    """Of one device: bytes that a server may use, and what they are of, for people."""

    free_bytes: int
    described: str
    in_use: str = ""  # what others hold of it now, for people


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
    num_layers: int  # of the decoder; 0: not known
    unknown: str = ""  # why the memory is not known
    warning: str = ""  # of the start
    has_encoder: bool = False


Report = Callable[[str], None]


def estimate(
    settings: Settings,
    placement: Placement,
    folder: Path,
    hf_config: Mapping[str, Any],
    environ: Mapping[str, str],
    report: Report,
) -> Estimate | None:
    """What the model in `folder` takes; None where its config says nothing. report: is told each problem."""
    limits = attempt(
        lambda: RouterConfig(model_path="", shard_sockets=(), **settings.pick(RouterConfig)), lambda _: None
    )
    is_ours = attempt(lambda: families.has(hf_config), report)
    if is_ours is None or limits is None:  # the settings' own problems are known
        return None
    if not is_ours:
        return _of_fallback(settings, placement, folder, hf_config, limits, report)
    if attempt(lambda: families.find(hf_config), report) is None:
        return None
    stored = attempt(lambda: _stored(settings.values, folder, hf_config), report)
    named = attempt(lambda: shapes.find(str(folder)), report if stored else lambda _: None)
    if named is None:
        return None
    return _of_family(settings, placement, named, stored or DENSE, limits, environ, report)


def _of_family(
    settings: Settings,
    placement: Placement,
    named: NamedShape,
    stored: str,
    limits: RouterConfig,
    environ: Mapping[str, str],
    report: Report,
) -> Estimate:
    """What a model of ours takes. stored: in words."""
    values, layout = settings.values, placement.layout
    shape = attempt(lambda: _scaled(named.shape, values), report) or named.shape
    kernels = NONE if values["disable_custom_kernels"] else values["cpu_kernels"]
    dtype, reason = _dtype(settings, placement, shape.dtype, kernels)
    quantised = None if stored == DENSE else stored
    served = ServedModel(shape, dtype, quantised, values["kv_cache_dtype"], placement.device == "cpu")
    memory, unknown = None, "what is not on the device is chosen at the start"
    if not is_offloaded(settings):
        memory = attempt(lambda: memory_of(placement.device, environ, values["cuda_memory_fraction"]), report)
        unknown = "" if memory else "nvidia-smi does not tell it"
    if split_problem := shape.split_problem(layout.num_shard):
        report(split_problem)
    stages = attempt(lambda: served.stages(layout.num_stages), report)
    lengths = attempt(lambda: _lengths(limits, shape), report)
    found = None
    if memory and lengths and stages and not split_problem:
        pipeline, most = Pipeline(tuple(stages)), lengths
        adapter_bytes = values["adapter_memory"] * 1e9 if settings.has_adapters else 0.0
        found = attempt(lambda: capacity(pipeline, placement, memory, limits, most, adapter_bytes), report)
    if found:
        fitting = found.kv_tokens
        lengths = attempt(lambda: _lengths(limits, shape, fitting), report) or lengths
    return Estimate(
        *(shape.total_parameters, shape.weight_bytes(dtype, quantised), stored, dtype, reason),
        *(memory, found, lengths, shape.spec.num_layers),
        unknown=unknown,
        has_encoder=shape.spec.encoder is not None,
    )


def _of_fallback(
    settings: Settings,
    placement: Placement,
    folder: Path,
    hf_config: Mapping[str, Any],
    limits: RouterConfig,
    report: Report,
) -> Estimate | None:
    """What a model takes that transformers runs, of which the KV cache is its own."""
    import torch

    from server.fallback import load as fallback  # which takes seconds

    layout = placement.layout
    shard = ShardConfig(
        *(str(folder), str(folder), 0, layout.world_size, "", ""),
        stage_sockets=("",) * layout.num_stages,
        **settings.pick(ShardConfig),
    )
    dtype, reason = _dtype(settings, placement, shapes.published_dtype(hf_config), NONE)
    model = attempt(lambda: fallback.outlook(shard, getattr(torch, dtype)), report)
    if model is None:
        return None
    has_encoder = model.has_encoder
    lengths = attempt(lambda: derive_lengths(limits, model.max_positions, has_encoder=has_encoder), report)
    return Estimate(
        *(model.num_parameters, model.nbytes, DENSE, dtype, reason, None, None, lengths, 0),
        unknown="transformers has its own KV cache",
        warning=model.warning,
        has_encoder=has_encoder,
    )


def _dtype(settings: Settings, placement: Placement, published: str, cpu_kernels: str) -> tuple[str, str]:
    """What is computed in, and why."""
    good, device = (good_dtypes(cpu_kernels), "this CPU") if placement.device == "cpu" else (GPU_DTYPES, "this GPU")
    return dtype_for(settings.values["dtype"], published, good, device)


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
    return any(settings.values[name] != "100%" for name in ("weights_on_device", "kv_on_device"))


def capacity(
    stages: Pipeline,
    placement: Placement,
    memory: Memory,
    config: RouterConfig,
    lengths: LengthLimits,
    adapter_bytes: float,
) -> Capacity:
    """What fits beside the weights on the device with the least room. Raises ValueError where it is too little.

    adapter_bytes: for adapters, on each device.
    """
    layout = placement.layout
    # Shards on CPUs share a machine's memory, of which each stage is given its part.
    free = memory.free_bytes * (layout.num_shard / layout.num_local if placement.device == "cpu" else 1)
    device = DatasheetDevice(1.0, 1.0, 1.0, free, is_cpu=placement.device == "cpu")
    limits = Namespace(
        max_concurrent_requests=max_sequences(config),
        max_total_tokens=lengths.max_total_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
    )
    found = least_capacity(stages, device, layout.num_shard, limits, adapter_bytes)
    wanted = config.max_batch_total_tokens
    if found.problem:
        less = ", less --adapter-memory" if adapter_bytes else ""
        raise ValueError(f"{found.problem}: use more shards{less}, --quantize int8 or --kv-cache-dtype int8")
    if wanted is not None and wanted > found.kv_tokens:
        raise ValueError(
            f"--max-batch-total-tokens is {wanted}, but free memory holds a KV cache of about {found.kv_tokens} "
            f"tokens: use --max-batch-total-tokens {found.kv_tokens} or less"
        )
    return replace(found, max_batch_total_tokens=wanted or found.max_batch_total_tokens)


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi. Memory in bytes; what is neither free nor in use belongs to the driver."""

    index: str
    uuid: str
    name: str
    free: int
    used: int
    total: int


def memory_of(device: str, environ: Mapping[str, str], fraction: float) -> Memory | None:
    """What a server may use of the host's memory, or of the chosen GPU with the least; None where nobody tells.

    What other programs hold of a GPU now counts as free: it may be the server whose place this one takes. Raises
    ValueError for a GPU that is not there.
    """
    if device == "cpu":
        return Memory(available_bytes(), "free of this machine's memory, a fifth of it left to others")
    gpus, chosen = _gpus(), chosen_gpus(environ)
    if chosen is not None and gpus:
        if missing := [name for name in chosen if name.isdecimal() and name not in {gpu.index for gpu in gpus}]:
            raise ValueError(
                f"GPU {missing[0]} is chosen, but nvidia-smi has {len(gpus)} GPUs, from 0 on: choose others"
            )
        gpus = [gpu for gpu in gpus if any(name in (gpu.index, gpu.uuid[: len(name)]) for name in chosen)]
    if not gpus:
        return None
    least = min(gpus, key=lambda gpu: gpu.free + gpu.used - (1 - fraction) * gpu.total)
    usable = math.floor(least.free + least.used - (1 - fraction) * least.total)
    held = [f"{readable(gpu.used)} of GPU {gpu.index}" for gpu in gpus if gpu.used > gpu.total // 100]
    return Memory(usable, f"of GPU {least.index}, {least.name}", " and ".join(held))


def _gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where it does not answer."""
    fields = "index,uuid,name,memory.free,memory.used,memory.total"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
        rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
        return [Gpu(i, uuid, name, *(int(mib) * 2**20 for mib in memory)) for i, uuid, name, *memory in rows]
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return []


def _stored(values: Mapping[str, Any], folder: Path, hf_config: Mapping[str, Any]) -> str:
    """How linear layers are stored, in words. Raises ValueError where nobody can serve them so."""
    if values["quantize"] is None and not config_of(with_quantisation(folder, hf_config)):
        return DENSE
    from server.checkpoint import formats  # which imports torch

    return formats.choose(values["quantize"], folder, hf_config, values["quantize_head"]).description
