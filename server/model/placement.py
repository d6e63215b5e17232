"""From one rank's settings to where its weights and KV blocks are: on the device, in the host's memory, on a disk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from server.arch.footprint import expert_sizes, layer_sizes, seen_by_window, step_bytes
from server.arch.spec import ArchSpec
from server.arch.windows import ring_for
from server.backends import Backend, Device
from server.backends.cpu.device import CpuDevice
from server.blocks import BLOCK_SIZE, num_blocks
from server.config import AUTO, NO_FOLDER, NO_HOST, NO_KV_FOLDER, ShardConfig
from server.model.offloaded_kv import OffloadedKv
from server.model.streamed import OnDevice, Placement, Streaming
from server.offload.auto import Auto, Wanted, link_rate, rates_of
from server.offload.cost import Rates
from server.offload.places import OnDisk, OnHost, Place
from server.offload.ring import PAGES
from server.offload.share import Share
from server.offload.stores import Store
from server.quantisation.sizes import Storage
from server.ranks.collectives import Shard
from server.stepping.cache import STATE_DTYPE, KvOnDevice, KVShape

DEFAULT_TOTAL_TOKENS = 2048  # of the longest sequence, where neither the settings nor the model say


def choose_placement(
    config: ShardConfig, spec: ArchSpec, device: Device, auto: Auto | None = None
) -> OnDevice | Streaming:
    """What the settings ask for. Raises ValueError for what this device or this machine does not have.

    auto: what finds the share, where the settings leave that open.
    """
    total_layers = spec.num_layers + (spec.encoder.num_layers if spec.encoder else 0)
    if auto is not None:
        return Streaming(device, auto, total_layers, _stores(config, device) if auto.why_not is None else [])
    on_device = Share.parse(config.weights_on_device)
    if on_device.is_all:
        return OnDevice()
    return Streaming(device, on_device, total_layers, _stores(config, device))


def automatic(
    config: ShardConfig,
    spec: ArchSpec,
    backend: Backend,
    dtype: torch.dtype,
    shard: Shard,
    kept: KVShape,
    storage: Storage | None = None,
) -> Auto | None:
    """What finds how much stays, where that is asked for; it measures when the first layer is there.

    kept: what this rank keeps of sequences, without rings; storage: how linear layers are stored; None: dense.
    """
    if config.weights_on_device != AUTO:
        return None
    has_somewhere = config.offload_dir is not None or backend.device.link() is not None
    return Auto(
        backend.device,
        shard,
        _wanted(config, spec, dtype, shard, kept, storage),
        rates=partial(_rates, config, spec, backend, dtype, storage),
        why_not=None if has_somewhere else NO_FOLDER.format(AUTO),
        fraction=config.cuda_memory_fraction,
    )


def _wanted(
    config: ShardConfig,
    spec: ArchSpec,
    dtype: torch.dtype,
    shard: Shard,
    kept: KVShape,
    storage: Storage | None,
) -> Wanted:
    """What the limits want of this rank's memory, beside the layers' weights."""
    bounds = [length for length in (spec.max_positions, config.max_batch_total_tokens) if length]
    lengths = [config.max_total_tokens or DEFAULT_TOTAL_TOKENS, *bounds]
    # The longest sequence that the warm-up is asked for, which decides about rings.
    asked = config.max_total_tokens or min(bounds, default=DEFAULT_TOTAL_TOKENS)
    ringed = replace(kept, ring=ring_for(kept.window, config.max_batch_prefill_tokens, asked))
    states = STATE_DTYPE.itemsize * sum(kept.states)
    rows, width = -(-spec.vocab_size // shard.world_size), spec.embed_dim or spec.hidden_size
    stored = storage and storage.of_head(is_tied=spec.tied_head)
    head = rows * width * dtype.itemsize if stored is None else stored.weight_bytes(rows, width)
    kind = spec.per_layer_inputs
    inputs = kind.dim * spec.num_layers * -(-kind.vocab_size // shard.world_size) * dtype.itemsize if kind else 0
    longest = num_blocks(min(lengths)) + (spec.encoder is not None)
    return Wanted(
        longest=longest * BLOCK_SIZE,
        sequences=config.max_sequences or 1,
        kv_tokens=config.max_batch_total_tokens,
        kv_bytes_per_token=ringed.bytes_per_token,
        head_bytes=head,
        later_bytes=(0 if spec.tied_head else head) + inputs,
        step_bytes=step_bytes(spec, config.max_batch_prefill_tokens, dtype.itemsize, shard.world_size),
        layer_sizes=layer_sizes(spec),
        expert_sizes=expert_sizes(spec),
        windows=seen_by_window(spec, [layer.bytes_per_token for layer in kept.layers]),
        state_bytes=states,
        ring_bytes=ringed.bytes_per_sequence - states,
    )


def _rates(
    config: ShardConfig, spec: ArchSpec, backend: Backend, dtype: torch.dtype, storage: Storage | None, layer_bytes: int
) -> Rates:
    """Measured on stores of their own, which are gone afterwards."""
    stores = _stores(config, backend.device)
    try:
        links = [link_rate(store, backend.device, layer_bytes) for _, store in stores]
    finally:
        for _, store in stores:
            store.close()
    return rates_of(backend, dtype, min(links), storage, has_tied_head=spec.tied_head)


def _stores(config: ShardConfig, device: Device) -> list[tuple[Share, Store]]:
    """Where weights go that leave the device, each store with its share."""
    return [
        (place.share, place.open(device, PAGES, "weights"))
        for place in _places(config, device, "weights", config.weights_on_device, config.weights_on_host, NO_FOLDER)
    ]


def choose_kv_placement(config: ShardConfig, spec: ArchSpec, device: Device) -> KvOnDevice | OffloadedKv:
    """Where the settings want KV blocks. Raises ValueError for what this device or this machine does not have."""
    on_device = Share.parse(config.kv_on_device)
    if on_device.is_all:
        return KvOnDevice()
    assert not config.has_tiers, "the launcher refuses it"
    if len({spec.cached(layer) for layer in spec.layers if layer.recurrence is None}) > 1:
        raise ValueError(
            f"--kv-on-device {config.kv_on_device} is for models whose layers all keep keys and values, of one size: "
            "leave it out for this one"
        )
    places = _places(config, device, "kv", config.kv_on_device, config.kv_on_host, NO_KV_FOLDER)
    windows = [layer.window for layer in spec.layers if layer.attends]
    if not windows:
        raise ValueError(
            f"--kv-on-device is {config.kv_on_device}, but no layer attends, so that there are no keys and values to "
            "move: leave it out"
        )
    encoder_layers = spec.encoder.num_layers if spec.encoder else 0
    return OffloadedKv(on_device, places, windows, encoder_layers)


def _places(
    config: ShardConfig, device: Device, name: str, on_device: str, on_host: str | None, no_folder: str
) -> list[Place]:
    """Where something goes that is not on the device, the last place taking what is left. name: of its settings."""
    link = device.link()
    if link is None and on_host is not None:
        raise ValueError(NO_HOST.format(name))
    places: list[Place] = []
    if link is not None:
        share = Share.parse(on_host or "100%")
        room = partial(CpuDevice().free_bytes, fraction=1.0, world_size=config.world_size)
        places.append(OnHost(link, share, room))
        if share.is_all:
            return places
    if config.offload_dir is None:
        raise ValueError(no_folder.format(on_device))
    return [*places, OnDisk(Path(config.offload_dir), "--offload-dir", config.world_size, link)]


def described(placement: Placement) -> str:
    """Where weights are that are not on the device, for people; empty: all are there, as the settings say."""
    if not isinstance(placement, Streaming):
        return ""
    if not placement.stored:
        why = placement.share.description if isinstance(placement.share, Auto) else ""
        return f"nothing; {why}" if why else ""
    cached = "" if all(store.is_direct for _, store in placement.stores) else ", through the page cache"
    text = (
        f"{len(placement.stored)} of {placement.total_layers} layers, {placement.streamed_bytes / 1e9:.2f} GB, stream "
        f"through {placement.slot_bytes / 1e9:.2f} GB{cached}"
    )
    why = placement.share.description if isinstance(placement.share, Auto) else ""
    return f"{text}; {why}" if why else text
