"""From one rank's settings to its engine: device, backend, threads, dtype, and this rank's slices of the weights.

What can be refused is refused from config.json alone, before a byte of weights is read.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from host import topology
from host.cpu_kinds import EXACT, NONE
from server import backends
from server.adapters.adapters import Adapters
from server.adapters.sites import Sites
from server.arch import families
from server.arch.spec import validate, with_rope_scaling
from server.arch.stages import Stage, carried_width, stages_of
from server.backends import Backend, Device, cpu
from server.backends.cpu.device import plan_threads
from server.backends.cpu.memory import freed_at_once
from server.blocks import BLOCK_SIZE
from server.checkpoint import formats
from server.checkpoint.formats import Quantisation
from server.checkpoint.random_weights import RandomCheckpoint
from server.checkpoint.weights import Checkpoint, Weights
from server.config import DTYPES, THROUGH_HOST, ShardConfig, dtype_for, parse_graph_sizes
from server.drafting import load as drafting
from server.drafting.served import Served
from server.layers.embedding import with_own_head
from server.model import load as model_loading
from server.model import placement as placing
from server.model.streamed import Streaming
from server.model.transformer import kv_shape
from server.offload.cost import Times
from server.pb import generate_pb2 as pb
from server.prefix.identity import identity as identify
from server.prefix.mover import TierConfig, Tiers
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS
from server.quantisation.sizes import Storage
from server.ranks import collectives
from server.ranks.collectives import Shard
from server.stepping.engine import Engine, Model
from server.stepping.pipeline import Neighbours, NoNeighbours, StageNeighbours, connect_stages
from server.stepping.proposals import Proposer
from server.stepping.sampling import Watermark

log = logging.getLogger(__name__)

SAY_SECONDS = 10.0  # between two lines about how far loading is


class ChooseBackend(Protocol):
    """How a backend is chosen: `backends.choose`, or what a test has in its place."""

    def __call__(
        self,
        device: Device,
        dtype: torch.dtype,
        *,
        disable_custom_kernels: bool = False,
        cpu_kernels: str = "auto",
        cpu_inputs: str = "rounded",
    ) -> Backend: ...


@dataclass(frozen=True)
class Loaded:
    """One rank's model, and what the router is told about it."""

    model: Model
    shard: Shard
    backend: Backend
    dtype: torch.dtype
    dtype_reason: str
    computes: str  # what computes the model, for people
    why_not_captured: str | None
    quantised: str = "dense"  # how its linear layers are stored, for people
    offloaded: str = ""  # where weights are that are not on the device, for people
    moved_bytes: Callable[[], int] = lambda: 0  # of them, from and to a disk, so far
    times: Times | None = None  # what streaming has cost, where weights stream
    neighbours: Neighbours = field(default_factory=NoNeighbours)  # of a pipeline stage
    proposer: Proposer | None = None  # a speculative model
    adapters: Adapters | None = None
    no_adapters: str = ""  # why there are none although they were asked for


@dataclass
class LayerCount:
    """Says how many layers have been loaded, once in `SAY_SECONDS` at most: of a small model nothing."""

    total: int
    clock: Callable[[], float] = time.monotonic
    _loaded: int = 0
    _said_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._said_at = self.clock()

    def __call__(self) -> None:
        """One more has been loaded."""
        self._loaded += 1
        now = self.clock()
        if self._loaded < self.total and now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            log.info("%d of %d layers loaded", self._loaded, self.total)


def load(config: ShardConfig, choose: ChooseBackend = backends.choose) -> tuple[Engine, pb.InfoReply]:
    """Join the other ranks and load this rank's share. Raises ValueError for a model that cannot be served so."""
    hf_config = json.loads((Path(config.model_path) / "config.json").read_text())
    sharing = _settle(config) if config.device == "cpu" else config.num_sharing
    with freed_at_once():
        is_ours = families.has(hf_config)
        loaded = _load_family(config, hf_config, choose) if is_ours else _load_fallback(config, hf_config, choose)
    model, device = loaded.model, loaded.backend.device
    threads, threads_reason = plan_threads(
        config.threads,
        is_host=device.torch_device.type == "cpu",
        ranks=config.num_sharing,
        sharing=sharing,
        weight_bytes=model.nbytes,
    )
    torch.set_num_threads(threads)
    loaded.shard.barrier()
    watermark = Watermark(config.watermark_gamma, config.watermark_delta)
    sizes = None if config.cuda_graphs is None else parse_graph_sizes(config.cuda_graphs)
    why_not = loaded.why_not_captured or ("--cuda-graphs is 0" if sizes == () else None)
    engine = Engine(
        *(model, loaded.shard, loaded.backend, loaded.dtype, watermark, why_not, sizes),
        moved_bytes=loaded.moved_bytes,
        neighbours=loaded.neighbours,
        proposer=loaded.proposer,
        adapters=loaded.adapters,
    )
    engine.times = loaded.times
    info = pb.InfoReply(
        model_type=hf_config["model_type"],
        dtype=_name(loaded.dtype),
        dtype_reason=loaded.dtype_reason,
        device=device.name,
        world_size=config.world_size,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        weight_bytes=model.nbytes + (loaded.proposer.nbytes if loaded.proposer is not None else 0),
        kv_bytes_per_token=engine.kv_shape.bytes_per_token,
        backend=loaded.backend.name,
        backend_reason=loaded.computes,
        threads=threads,
        threads_reason=threads_reason,
        quantize=loaded.quantised,
        block_size=BLOCK_SIZE,
        decoder_start=model.decoder_start,
        shares_prefixes=model.shares_prefixes,
        takes_drafts=model.takes_drafts,
        most_proposals=loaded.proposer.most if loaded.proposer is not None else 0,
        proposes=loaded.proposer.description if loaded.proposer is not None else "",
        adapter_rows=loaded.adapters.num_rows if loaded.adapters is not None else 0,
        adapter_bytes=loaded.adapters.budget if loaded.adapters is not None else 0,
        no_adapters=loaded.no_adapters,
        offloaded=loaded.offloaded,
        has_tiers=model.shares_prefixes and config.has_tiers,
        kv_cache_dtype=engine.kv_shape.format.name if engine.kv_shape.format != AS_COMPUTED else _name(loaded.dtype),
    )
    return engine, info


def tiers(config: ShardConfig, info: pb.InfoReply) -> Tiers | None:
    """The tiers of the prefix cache behind this rank's device; None where there are none. Raises OSError.

    Whatever changes keys and values is in the names of their files, but for the tokens.
    """
    if not info.has_tiers:
        return None
    facts = [
        *(info.model_type, info.dtype, info.kv_cache_dtype, info.quantize, info.backend, info.backend_reason),
        *map(str, (info.device, info.world_size, config.num_stages, info.block_size, info.kv_bytes_per_token)),
        *map(str, (config.rope_scaling, config.rope_factor, config.quantize_head, config.random_weights)),
        *(config.version, torch.__version__),
    ]
    weights = None if config.random_weights else Path(config.weights_path)
    identity = identify(Path(config.model_path), weights, facts) if config.prefix_cache_disk_gb else b""
    return Tiers(
        TierConfig(
            host_bytes=int(config.prefix_cache_host_gb * 1e9) // config.world_size,
            disk_bytes=int(config.prefix_cache_disk_gb * 1e9) // config.world_size,
            folder=Path(config.prefix_cache_dir).expanduser() if config.prefix_cache_dir else None,
            name=f"{config.rank}-of-{config.world_size}",
            identity=identity,
        )
    )


def _load_family(config: ShardConfig, hf_config: dict[str, Any], choose: ChooseBackend) -> Loaded:
    family, spec = families.find(hf_config)
    if config.rope_scaling or config.rope_factor:
        spec = with_rope_scaling(spec, config.rope_scaling or "linear", config.rope_factor or 1.0)
    validate(spec, config.stage_size)
    stage = stages_of(spec, config.num_stages)[config.stage]
    quantised = formats.choose(config.quantize, Path(config.model_path), hf_config, config.quantize_head)
    shares = config.all_reduce == THROUGH_HOST
    device = backends.open_device(config.device, config.local_rank, config.num_sharing, shares=shares)
    checkpoint, stored = _open(config, hf_config, quantised.storage if quantised.format else None)
    found = Weights.open(checkpoint, family.names, Shard(), stored, device.torch_device)
    if (own := with_own_head(found, spec)) is not spec:
        spec = own
        log.warning(
            "config.json says that the head is the embedding table, and the checkpoint has another one, which is served"
        )
    dtype, reason = choose_dtype(config.dtype, stored, device, _cpu_kernels(config, device))
    backend = _backend(config, device, dtype, choose)
    quantised = _rounded_by(backend, quantised)
    part = replace(spec, layers=tuple(spec.layers[layer] for layer in stage.layers))
    kv_placement = placing.choose_kv_placement(config, part, device)
    shard = _connect(config, device, backend)
    neighbours = _neighbours(config, stage, shard, device, dtype, carried_width(spec, stage))
    cache = KV_FORMATS[config.kv_cache_dtype]
    of_sequences = kv_shape(spec, stage, shard, dtype, cache)
    auto = placing.automatic(config, part, backend, dtype, shard, of_sequences, _kept(quantised, config, device, dtype))
    placement = placing.choose_placement(config, part, device, auto)
    weights = Weights.open(
        checkpoint,
        family.names,
        shard,
        dtype,
        device.torch_device,
        quantised.format,
        quantised.quantise,
        quantised.quantise_head,
    )
    sites = _sites(config, weights, spec.num_layers, backend, stage)
    report = LayerCount(part.num_layers + (spec.encoder.num_layers if spec.encoder and stage.is_first else 0))
    model = model_loading.load(
        *(replace(weights, adapting=sites), spec, backend, cache, placement, kv_placement),
        report if shard.rank == 0 else lambda: None,  # the ranks of a stage load alike
        stage,
        None if sites is None else sites.tokens,
    )
    model, proposer = drafting.beside(config, Served(model, weights, backend, dtype, cache))
    streams = isinstance(placement, Streaming) and bool(placement.stored)
    why_not = "weights stream" if streams else backend.why_not_captured(spec, quantised.name, config.stage_size)
    return Loaded(
        *(model, shard, backend, dtype, reason, backend.description, why_not, quantised.description),
        placing.described(placement),
        placement.moved_bytes,
        placement.times if isinstance(placement, Streaming) else None,
        neighbours,
        proposer,
        None if sites is None else _adapters(config, sites),
    )


def _adapters(config: ShardConfig, sites: Sites) -> Adapters:
    return Adapters(sites.num_rows, int(config.adapter_memory * 1e9), sites.read, sites.nothing)


def _sites(config: ShardConfig, weights: Weights, num_layers: int, backend: Backend, stage: Stage) -> Sites | None:
    """What notes the layers that adapters can change; None: none are served."""
    if not config.has_adapters:
        return None
    others = model_loading.changed_elsewhere(weights, stage, num_layers)
    return Sites(backend, config.max_adapters, weights.dtype, others, config.adapter_memory * 1e9)


def _connect(config: ShardConfig, device: Device, backend: Backend) -> Shard:
    """Meet the other ranks of this stage. Raises ValueError for a way of theirs that cannot be had, and PeerLost."""
    queue = device.host_queue() if config.all_reduce == THROUGH_HOST else None
    if queue is not None and config.num_stages > 1:  # a stage would hand on what `check` has not seen
        raise ValueError("--all-reduce is host, which one stage alone can have: use auto, or --pipeline-parallel 1")
    shard = collectives.connect(
        config.rank % config.stage_size,
        config.stage_size,
        config.rendezvous,
        device.torch_device,
        config.all_reduce,
        config.num_sharing,
        queue,
    )
    return backend.joined(shard) if config.all_reduce == "auto" else shard


def _settle(config: ShardConfig) -> int:
    """How many ranks have this one's cores, of which it loads with its share: else all wait at every operator."""
    sharing = topology.settle(config.local_rank, config.num_sharing)  # before memory is taken and threads begin
    torch.set_num_threads(max(1, torch.get_num_threads() // sharing))
    return sharing


def _rounded_by(backend: Backend, quantised: Quantisation) -> Quantisation:
    """The same, with weights rounded in the backend's way while they are loaded."""
    if quantised.quantise is None:
        return quantised
    return replace(quantised, quantise=backend.rounding(quantised.quantise))


def _kept(quantised: Quantisation, config: ShardConfig, device: Device, dtype: torch.dtype) -> Storage | None:
    """How linear layers are kept in memory."""
    is_exact = device.torch_device.type == "cpu" and (config.cpu_inputs == EXACT or dtype == torch.float32)
    return quantised.storage.with_exact_inputs() if is_exact and quantised.storage else quantised.storage


def _cpu_kernels(config: ShardConfig, device: Device) -> str:
    """Those that compute, as `--cpu-kernels`."""
    if device.torch_device.type != "cpu" or config.disable_custom_kernels:
        return NONE
    return cpu.usable(config.cpu_kernels)


def _backend(config: ShardConfig, device: Device, dtype: torch.dtype, choose: ChooseBackend) -> Backend:
    """Of those that the settings leave. Raises ValueError for CPU kernels that cannot be had."""
    return choose(
        device,
        dtype,
        disable_custom_kernels=config.disable_custom_kernels,
        cpu_kernels=config.cpu_kernels,
        cpu_inputs=config.cpu_inputs,
    )


def _neighbours(
    config: ShardConfig, stage: Stage, shard: Shard, device: Device, dtype: torch.dtype, width: int
) -> Neighbours:
    """Meet the stages before and behind this one. Raises PeerLost."""
    if stage.count == 1:
        return NoNeighbours()
    connections = (
        connect_stages(stage.index, config.stage_sockets, activate=device.activate) if shard.rank == 0 else None
    )
    return StageNeighbours(stage, shard, connections, device, dtype, width)


def _load_fallback(config: ShardConfig, hf_config: dict[str, Any], choose: ChooseBackend) -> Loaded:
    from server.fallback import load as fallback  # takes seconds to import, and hardly any server needs it

    fallback.refuse_settings(config)
    quantised = formats.choose(config.quantize, Path(config.model_path), hf_config, config.quantize_head)
    shares = config.all_reduce == THROUGH_HOST
    device = backends.open_device(config.device, config.local_rank, config.num_sharing, shares=shares)
    stored = _open(config, hf_config)[1]
    dtype, reason = choose_dtype(config.dtype, stored, device, NONE)  # most of it is computed by torch
    backend = _backend(config, device, dtype, choose)
    if config.stage_size > 1:
        fallback.outlook(config, dtype)  # refuses before the ranks meet
    shard = _connect(config, device, backend)
    model = fallback.Loader(config, backend, shard, dtype, _rounded_by(backend, quantised)).load()
    if shard.rank == 0:
        log.warning("%s", model.warning)
    is_batched = model.shares_prefixes
    computes = f"transformers' own model, batched; {backend.description}" if is_batched else "transformers' own model"
    return Loaded(
        *(model, shard, backend, dtype, reason, computes, "transformers runs the model", quantised.description),
        no_adapters="adapters are for model families of Lockstep's own, and transformers runs this model: merge each "
        "into its model with `lockstep merge`, and serve that"
        if config.has_adapters
        else "",
    )


def _open(
    config: ShardConfig, hf_config: dict[str, Any], storage: Storage | None = None
) -> tuple[Checkpoint | RandomCheckpoint, torch.dtype]:
    """The source of the weights, and the dtype that dense ones are stored in. storage: of random ones, if quantised."""
    if config.random_weights:
        text = hf_config.get("text_config") or {}  # of a model that reads images too
        name = hf_config.get("dtype") or hf_config.get("torch_dtype") or text.get("dtype") or "float16"
        dtype = getattr(torch, name) if name in DTYPES else torch.float16
        return RandomCheckpoint(dtype, storage), dtype
    checkpoint = Checkpoint(config.weights_path)
    return checkpoint, checkpoint.dtype_of_most() or torch.float16


def choose_dtype(wanted: str | None, stored: torch.dtype, device: Device, cpu_kernels: str) -> tuple[torch.dtype, str]:
    """What to compute in, and why."""
    name, reason = dtype_for(wanted, _name(stored), {*map(_name, device.good_dtypes(cpu_kernels))}, device.kind)
    return getattr(torch, name), reason


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
