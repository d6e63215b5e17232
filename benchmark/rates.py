"""The rates that `offline` predicts with, measured in this process before the server has the device.

The probes are the server's (`server/offload/probes.py`). Torch is imported with this module, which is imported when
something is measured.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from benchmark.report import BenchError
from benchmark.roofline import ServedModel
from benchmark.shapes import ModelShape
from benchmark.streaming import Measured, sizes_of
from server import backends
from server.backends import Device
from server.offload.disk_store import DiskError
from server.offload.places import OnDisk
from server.offload.probes import link_rate, rates_of
from server.offload.ring import PAGES
from server.offload.stores import HostStore, Store


def measure(args: argparse.Namespace, shape: ModelShape) -> Measured:
    """Some seconds of probes. Raises BenchError for a folder that no weights can be streamed from."""
    try:
        device = backends.open_device(args.device or "auto", rank=0, world_size=1)
        dtype = args.dtype or _good_dtype(shape, device)
        sizes = sizes_of(ServedModel(shape, dtype, args.quantize))
        layer_bytes = int(sizes.layers / sizes.num_layers / (args.num_shard or 1))
        backend = backends.choose(device, getattr(torch, dtype), cpu_kernels=args.cpu_kernels or "auto")
        link, storage = _link(args, device, layer_bytes), shape.storage(args.quantize)
        rates = rates_of(backend, getattr(torch, dtype), link, storage, has_tied_head=shape.spec.tied_head)
        # Each shard of a GPU has one of its own, and shards of a CPU share all there is.
        devices = 1 if device.link() is None else args.num_shard or 1
        return Measured(rates.of_devices(devices), dtype, devices * device.free_bytes(fraction=1.0, world_size=1))
    except (ValueError, DiskError) as error:
        raise BenchError(str(error)) from None


def _good_dtype(shape: ModelShape, device: Device) -> str:
    """The published dtype where the device computes it well, else the nearest that it does, as in the server."""
    good = {str(dtype).removeprefix("torch.") for dtype in device.good_dtypes()}
    return next(dtype for dtype in (shape.dtype, "bfloat16", "float16", "float32") if dtype in good)


def _link(args: argparse.Namespace, device: Device, layer_bytes: int) -> float:
    """Bytes/s at which layers come from where they would wait; infinite where they would wait nowhere."""
    store = _store(args, device)
    if store is None:
        return math.inf
    try:
        return link_rate(store, device, layer_bytes)
    finally:
        store.close()


def _store(args: argparse.Namespace, device: Device) -> Store | None:
    """The slowest place where layers would wait."""
    link, folder = device.link(), args.offload_dir
    if folder is not None and (link is None or args.weights_on_host is not None):
        return OnDisk(Path(folder), "--offload-dir", 1, link).open(device, PAGES, "weights")
    return None if link is None else HostStore(link, PAGES)
