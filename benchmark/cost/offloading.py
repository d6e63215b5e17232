"""What streaming costs, from a model's shape and measured rates, and what the shards tell of it: for `offline`.

The arithmetic is the server's (`server/offload/cost.py`), and so are the probes, which run in this process before a
server has the device (`server/offload/auto.py`). Here both meet a model's shape as a whole: all shards together are
looked at as one, which has what all of them have. Torch is imported only when something is measured.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import DTYPE_BYTES, ModelShape
from benchmark.result import BenchError
from router.shards.client import StreamedReply
from server.arch.footprint import step_bytes, window_shares
from server.offload.cost import MOST_SPANS, Rates, Sizes, Span, StepCost, busy_seconds
from server.offload.share import Share

if TYPE_CHECKING:
    from server.backends import Device
    from server.offload.stores import Store

WORDS = ("auto",)
MOST_SHARES = 32  # that are tried from no layers on the device to all


@dataclass(frozen=True)
class Measured:
    """A device before the server has it: its rates, what it computes well, and its free memory."""

    rates: Rates
    dtype: str
    free_bytes: int


def sizes_of(served: ServedModel) -> Sizes:
    """What the whole model's parts take, in bytes."""
    shape, head = served.shape, served.shape.head_bytes(served.dtype, served.quantize)
    encoder = shape.spec.encoder.num_layers if shape.spec.encoder else 0
    return Sizes(
        layers=shape.weight_bytes(served.dtype, served.quantize) - head - rest_bytes(served),
        num_layers=shape.spec.num_layers + encoder,
        head=head,
        kv_per_token=served.kv_bytes_per_token,
        experts=shape.expert_bytes(served.dtype, served.quantize),
        windows=window_shares(shape.spec),
    )


def rest_bytes(served: ServedModel) -> int:
    """Weights that are neither a layer's nor the head's: tables, the last norm."""
    shape = served.shape
    rest = shape.total_parameters - shape.layer_parameters - shape.head_parameters
    return rest * DTYPE_BYTES[served.dtype]


def memory_for(args: argparse.Namespace, served: ServedModel, measured: Measured, prefill_tokens: int) -> float:
    """Bytes for layers that stay, slots, and keys and values: what was asked for, or what is free beside the rest.

    prefill_tokens: prompt tokens of the largest step.
    """
    if args.offload_memory is not None:
        return float(Share.parse(args.offload_memory).num_bytes or 0)
    step = step_bytes(served.shape.spec, prefill_tokens, DTYPE_BYTES[served.dtype])
    return float(measured.free_bytes - rest_bytes(served) - sizes_of(served).head - step)


def share_of(text: str | None, layers: float) -> float | None:
    """A share of the layers' weights from an option; None: not given, or to be found. Raises BenchError."""
    if text is None or text in WORDS:
        return None
    try:
        share = Share.parse(text)
    except ValueError as error:
        raise BenchError(f"--weights-on-device is {text}: {error} or auto") from None
    return share.fraction if share.fraction is not None else min(1.0, (share.num_bytes or 0) / layers)


def shares_of(num_layers: int) -> list[float]:
    """The shares that a search tries: whole layers, of many layers not each number."""
    steps = min(num_layers, MOST_SHARES)
    return sorted({num_layers * step // steps / num_layers for step in range(steps + 1)})


def percent(share: float) -> str:
    """A share as a flag has it, rounded up, so that what is meant as whole layers has room for them."""
    return f"{min(math.ceil(share * 1e6) / 1e4, 100.0):.4f}%"


# ------------------------------------------------------------------------------------------------- what the shards tell


@dataclass(frozen=True)
class Streamed:
    """What the first shard's link and streamed layers did in one run."""

    pass_bytes: int
    num_bytes: int
    waited_s: float
    reads: list[Span]
    computed: list[Span]

    @classmethod
    def of(cls, reply: StreamedReply) -> Streamed:
        """From the wire."""
        reads = zip(reply.read_layers, reply.read_began_s, reply.read_ended_s, strict=True)
        computed = zip(reply.computed_layers, reply.computed_began_s, reply.computed_ended_s, strict=True)
        return cls(
            reply.pass_bytes,
            reply.bytes,
            reply.waited_s,
            [Span(*row) for row in reads],
            [Span(*row) for row in computed],
        )

    def busy(self, spans: list[Span], since: float, until: float) -> float | None:
        """The share of a run in which spans say that something was done; of its end, where the earliest are lost."""
        if not spans:
            return None
        since = max(since, spans[0].began_s) if len(spans) == MOST_SPANS else since
        return busy_seconds(spans, since, until) / max(until - since, 1e-9)


def cost_of(sizes: Sizes, rates: Rates, streamed: float) -> StepCost:
    """The cost of steps of which so many bytes stream."""
    return StepCost(sizes, rates, streamed)


# ------------------------------------------------------------------------------------------------------- measured rates


def measure_rates(args: argparse.Namespace, shape: ModelShape) -> Measured:
    """Some seconds of probes. Raises BenchError for a folder that no weights can be streamed from."""
    import torch

    from server import backends
    from server.offload.auto import rates_of
    from server.offload.disk_store import DiskError

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
    from server.offload.auto import link_rate

    store = _store(args, device)
    if store is None:
        return math.inf
    try:
        return link_rate(store, device, layer_bytes)
    finally:
        store.close()


def _store(args: argparse.Namespace, device: Device) -> Store | None:
    """The slowest place where layers would wait."""
    from server.offload.places import OnDisk
    from server.offload.ring import PAGES
    from server.offload.stores import HostStore

    link, folder = device.link(), args.offload_dir
    if folder is not None and (link is None or args.weights_on_host is not None):
        return OnDisk(Path(folder), "--offload-dir", 1, link).open(device, PAGES, "weights")
    return None if link is None else HostStore(link, PAGES)
