"""From one rank's settings to its engine: device, threads, dtype, and this rank's slices of the weights.

What can be refused is refused from config.json alone, before a byte of weights is read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from server import attention, distributed, native
from server.attention import MakeAttention
from server.cache import BLOCK_SIZE
from server.capture import Capture, CudaCapture
from server.config import DTYPES, ShardConfig
from server.distributed import Shard
from server.engine import Engine, Model
from server.layers.linear import DenseFormat, MakeFormat, MakeStockFormat
from server.layers.native import NativeFormat, NativeNorm, native_gate
from server.layers.packed import PackedFormat, can_pack
from server.model import families, transformer
from server.model.spec import validate
from server.model.transformer import Parts
from server.native import Kernels
from server.native.logits import NativeLogits
from server.native.memory import Arena
from server.native.recording import NativeCapture
from server.pb import generate_pb2 as pb
from server.quant.int8 import Int8Format
from server.sampling import Logits, StockLogits, Watermark
from server.weights import Checkpoint, RandomCheckpoint, Weights

log = logging.getLogger(__name__)

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
SMALL_MODEL_BYTES = 64 * 2**20
FORMATS: dict[str, MakeStockFormat] = {"int8": Int8Format}


def load(config: ShardConfig) -> tuple[Engine, pb.InfoReply]:
    """Join the other ranks and load this rank's share. Raises ValueError for a model that cannot be served so."""
    hf_config = json.loads((Path(config.model_path) / "config.json").read_text())
    loaded = _load_family(config, hf_config) if families.has(hf_config) else _load_fallback(config, hf_config)
    device = loaded.device
    threads, threads_reason = plan_threads(config.threads, device, config.world_size, loaded.model.nbytes)
    torch.set_num_threads(threads)
    loaded.shard.barrier()
    watermark = Watermark(config.watermark_gamma, config.watermark_delta)
    engine = Engine(loaded.model, loaded.shard, device, loaded.dtype, watermark, loaded.logits, loaded.capture)
    info = pb.InfoReply(
        model_type=hf_config["model_type"],
        dtype=str(loaded.dtype).removeprefix("torch."),
        dtype_reason=loaded.dtype_reason,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        world_size=config.world_size,
        vocab_size=loaded.model.vocab_size,
        max_positions=loaded.model.max_positions,
        weight_bytes=loaded.model.nbytes,
        kv_bytes_per_token=engine.kv_shape.bytes_per_token,
        attention=loaded.attention,
        threads=threads,
        threads_reason=threads_reason,
        quantize=config.quantize or "dense",
        block_size=BLOCK_SIZE,
        decoder_start=loaded.model.decoder_start,
        shares_prefixes=loaded.model.shares_prefixes,
    )
    return engine, info


@dataclass(frozen=True)
class Loaded:
    """One rank's model, and what the router is told about it."""

    model: Model
    shard: Shard
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    attention: str  # name of the backend
    logits: Logits = field(default_factory=StockLogits)
    capture: Callable[[], Capture] | None = None


def _load_family(config: ShardConfig, hf_config: dict[str, Any]) -> Loaded:
    family, spec = families.find(hf_config)
    validate(spec, config.world_size)
    device = _device(config)
    checkpoint, stored = _open(config, hf_config)
    dtype, reason = choose_dtype(config.dtype, stored, device)
    shard = distributed.connect(config.rank, config.world_size, config.rendezvous, device)
    weights = Weights.open(checkpoint, family.names, shard, dtype, device)
    kernels = _kernels(config, dtype, device)
    parts = choose_parts(kernels, dtype, device, config.quantize, config.disable_custom_kernels)
    model = transformer.load(weights, spec, parts)
    logits = NativeLogits(kernels) if kernels else StockLogits()
    capture = choose_capture(parts.attention, kernels, shard)
    return Loaded(model, shard, device, dtype, reason, parts.attention.name, logits, capture)


def choose_capture(backend: MakeAttention, kernels: Kernels | None, shard: Shard) -> Callable[[], Capture] | None:
    """How decode steps are captured; None: not. Ranks on CPUs speak to each other within a step."""
    if kernels is not None:
        return partial(NativeCapture, kernels) if shard.world_size == 1 else None
    return CudaCapture if backend.name == "paged" else None


def _kernels(config: ShardConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The compiled kernels, where they are of use."""
    if device.type != "cpu" or dtype not in NATIVE_DTYPES or config.disable_custom_kernels:
        return None
    kernels, reason = native.load()
    if kernels is None:
        log.warning("The compiled CPU kernels are not used: %s. Steps will take longer", reason)
    return kernels


def choose_parts(
    kernels: Kernels | None,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None = None,
    disable_custom_kernels: bool = False,
) -> Parts:
    """The fastest ways to compute each part of a model, as far as there is a choice."""
    backend = attention.choose(device, kernels, disable_custom_kernels=disable_custom_kernels)
    if kernels is not None:
        dense: MakeFormat = partial(NativeFormat, kernels, Arena())
        if quantize:
            stock = partial(FORMATS[quantize], gate=partial(native_gate, kernels))
            return Parts(backend, stock, dense, partial(NativeNorm, kernels))
        return Parts(backend, dense, dense, partial(NativeNorm, kernels))
    if backend.name == "paged":
        from server.layers.fused import FusedNorm, fused_gate  # imports Triton, as the backend has

        linear = partial(FORMATS.get(quantize or "", DenseFormat), gate=fused_gate)
        return Parts(backend, linear, DenseFormat, FusedNorm)
    dense = PackedFormat if can_pack(dtype, device) and not disable_custom_kernels else DenseFormat
    return Parts(backend, FORMATS.get(quantize or "", dense), dense)


def _load_fallback(config: ShardConfig, hf_config: dict[str, Any]) -> Loaded:
    from server import fallback  # takes seconds to import, and hardly any server needs it

    name, supported = hf_config.get("model_type"), sorted(families.FAMILIES)
    for flag, is_given in (("--num-shard", config.world_size > 1), ("--quantize", bool(config.quantize))):
        if is_given:
            raise ValueError(
                f"config.json says model_type {name!r}, which runs on one shard and unquantised only: leave out "
                f"{flag}; served without such limits are: {', '.join(supported)}"
            )
    device = _device(config)
    dtype, reason = choose_dtype(config.dtype, _open(config, hf_config)[1], device)
    weights_path = None if config.random_weights else Path(config.weights_path)
    model = fallback.load(Path(config.model_path), weights_path, dtype, device, supported)
    return Loaded(model, Shard(), device, dtype, reason, "transformers")


def _open(config: ShardConfig, hf_config: dict[str, Any]) -> tuple[Checkpoint | RandomCheckpoint, torch.dtype]:
    """The source of the weights, and the dtype that they are stored in."""
    if config.random_weights:
        name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float16"
        dtype = getattr(torch, name) if name in DTYPES else torch.float16
        return RandomCheckpoint(dtype), dtype
    checkpoint = Checkpoint(config.weights_path)
    return checkpoint, checkpoint.dtype_of(next(iter(checkpoint.names())))


def choose_dtype(wanted: str | None, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """What to compute in, and why: the wish, the checkpoint's dtype, or the nearest that the device does well."""
    if wanted is not None:
        return getattr(torch, wanted), "asked for"
    good = _good_dtypes(device)
    if stored in good:
        return stored, "the checkpoint's"
    nearest = next(d for d in (torch.bfloat16, torch.float16, torch.float32) if d in good)
    kind = "this GPU" if device.type == "cuda" else "this CPU"
    return nearest, f"{kind} does not compute the checkpoint's {str(stored).removeprefix('torch.')} well"


def _good_dtypes(device: torch.device) -> set[torch.dtype]:
    good = {torch.float32}
    if device.type == "cuda":
        good.add(torch.float16)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            good.add(torch.bfloat16)
        return good
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags:
        good.add(torch.bfloat16)
    if "avx512_fp16" in flags or "amx_fp16" in flags:
        good.add(torch.float16)
    return good


def plan_threads(wanted: int | None, device: torch.device, world_size: int, weight_bytes: int) -> tuple[int, str]:
    """Threads for operators on the host, and why so many: this rank's share of the cores, mostly.

    The router has no core of its own: it works while a step's last tokens are on their way, and threads that find no
    work sleep after a moment (threads.h). Threads wait for each other after every operator, and for a small model an
    operator is shorter than that wait: on two busy cores a second thread made a step of the embedded model 5 to 30
    times as long, on idle ones a tenth shorter.
    """
    if wanted is not None:
        return wanted, "asked for"
    if device.type == "cuda":
        return 1, "the GPU computes"
    if weight_bytes < SMALL_MODEL_BYTES:
        return 1, "the model is too small to share"
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // world_size), f"{cores} cores for all shards; they sleep when idle"


def _device(config: ShardConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no usable GPU: install its driver or use --device cpu")
    if config.world_size > (count := torch.cuda.device_count()):
        raise ValueError(f"--num-shard is {config.world_size}, but there are {count} GPUs: use --num-shard {count}")
    device = torch.device("cuda", config.rank)
    torch.cuda.set_device(device)
    return device
