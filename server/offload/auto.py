"""`--weights-on-device auto`: how much of the layers stays, found when the first layer is there.

Its size is then known to the byte, in whatever format it is stored, and that of the others by what their matrices are
to its own; so is the memory that is still free, limits of control groups included. The cost model (`cost.py`) tries
every number of layers that could stay beside the KV cache that the limits want, and what decodes most tokens a second
is chosen. All ranks measure, and all choose by the least of what any of them found: the ranks must agree on whether
anything streams, because steps that do are not captured.

How fast weights come and are multiplied with is measured in some seconds and not looked up, because a disk's rate is
its machine's secret, and a throttle's. What is read is as large as a few layers and was written just before, so a cache
that the disk's host keeps may flatter it. Products are those of weights stored as the model's are: a quantised byte
stands for more of them than a dense one, and is unpacked first.

Left out: that a step which decodes has no use for the layers of an encoder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from server.backends.device import Device
from server.backends.protocol import Backend
from server.offload.cost import Choice, Rates, Room, Sizes, choose
from server.offload.ring import keep, pages
from server.offload.share import ALL, Share
from server.offload.stores import Store, Wait
from server.quantisation.random_weight import Kind, noise
from server.quantisation.sizes import Storage
from server.quantisation.stored import Stored

READ_BYTES = 256 << 20  # that are written, and then read again and again
MOST_IMAGES = 64
LINK_SECONDS = 2.0  # a throttle that counts in slices of time is off by a tenth in one
TOKENS = (1, 4, 16, 64, 256, 1024)  # of the steps whose products are measured
WIDTHS = (4096, 4096)  # (outputs, inputs) of each weight, which two caches of a processor do not hold together …
WEIGHTS = 4  # … with the others
PRODUCT_SECONDS = 0.1
PICO = 10**12  # seconds are exchanged as whole numbers of its square
# What cannot stream is as slow as anything can be; then all weights stay, or there is a sentence.
NO_LINK = Rates(1.0, [(1, 1e-12)])


class Ranks(Protocol):
    """What the ranks exchange: `Shard` in `server/ranks/collectives.py`."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks."""


@dataclass(frozen=True)
class Wanted:
    """What the limits want of one rank. kv_tokens: a size that the KV cache must have; 0: none."""

    longest: int
    sequences: int
    kv_tokens: int
    kv_bytes_per_token: int  # that the KV cache keeps
    head_bytes: int
    later_bytes: int  # of weights beside the layers that are loaded after them
    step_bytes: int  # what the largest step takes
    layer_sizes: Sequence[int] = ()  # of all layers beside one another, in the order of loading; none: they are alike
    expert_sizes: Mapping[float, int] = field(default_factory=dict)  # likewise of experts; see `cost.Sizes`
    windows: Mapping[int, float] | None = None  # see there
    state_bytes: int = 0  # of a sequence
    ring_bytes: int = 0  # likewise


@dataclass
class Auto:
    """See `streamed.ShareChooser`.

    rates: measures, for layers of so many bytes; why_not: nothing can stream, or None.
    """

    device: Device
    ranks: Ranks
    wanted: Wanted
    rates: Callable[[int], Rates]
    why_not: str | None = None
    fraction: float = 1.0  # share of a GPU's memory that we may use
    chosen: Choice | None = None
    measured: Rates | None = None
    fitting: str = ""  # why all weights stay, for people, where they do

    def choose(self, layer_bytes: int, total_layers: int) -> Share:
        """The share. Raises ValueError where too little memory is free, or where nothing can stream."""
        wanted = self.wanted
        free = self.device.free_bytes(fraction=self.fraction, world_size=self.ranks.world_size)
        memory = self._least(free + layer_bytes - wanted.later_bytes - wanted.step_bytes)
        unit = self._most(layer_bytes) / (wanted.layer_sizes or (1,))[0]
        layers, largest = unit * sum(wanted.layer_sizes or [1] * total_layers), unit * max(wanted.layer_sizes or (1,))
        experts = {share: unit * size for share, size in wanted.expert_sizes.items()}
        sizes = Sizes(
            *(layers, total_layers, wanted.head_bytes, max(wanted.kv_bytes_per_token, 1), largest, experts),
            windows=wanted.windows,
            states=wanted.state_bytes,
            rings=wanted.ring_bytes,
        )
        room = Room(memory, wanted.longest, wanted.sequences, wanted.kv_tokens)
        if _fits(sizes, room):
            self.fitting = f"{layers / 1e9:.2f} GB of layers fit beside a KV cache of {room.useful_tokens} tokens"
            return ALL  # and there is nothing to be measured
        self.measured = self._agreed(self.rates(layer_bytes) if self.why_not is None else NO_LINK)
        self.chosen = choose(sizes, self.measured, room)
        if self.chosen is None:
            tokens = max(room.longest, room.kv_tokens)
            kept = tokens * sizes.kv_per_token + sizes.beside_tokens(1)
            raise ValueError(
                f"--weights-on-device auto finds {memory / 1e9:.2f} GB for layers, slots and KV cache, and a KV cache "
                f"of {tokens} tokens with two layers takes {(kept + sizes.slots) / 1e9:.2f} GB: "
                "lower --max-batch-total-tokens or --max-total-tokens, or use more shards"
            )
        if not self.chosen.streams:
            self.fitting = (
                f"{layers / 1e9:.2f} GB of layers fit beside a KV cache of {self.chosen.kv_tokens} tokens, and decode "
                "more there than a larger one would"
            )
            return ALL
        if self.why_not is not None:
            raise ValueError(self.why_not)
        return Share(num_bytes=int(self.chosen.resident * (1 + 1e-9)))

    @property
    def description(self) -> str:
        """What was chosen, why, and what it should do, for people."""
        if self.chosen is None or self.measured is None or not self.chosen.streams:
            return self.fitting
        chosen = self.chosen
        return (
            f"chosen for {chosen.sequences} sequences of {self.wanted.longest} tokens in a KV cache of "
            f"{chosen.kv_tokens}, which should decode {chosen.tokens_per_second:.3g} tokens/s at "
            f"{self.measured.link / 1e9:.2f} GB/s"
        )

    def _agreed(self, rates: Rates) -> Rates:
        """The slowest of all ranks in each figure."""
        products, head = (
            [(tokens, self._most(int(seconds * PICO**2)) / PICO**2) for tokens, seconds in points]
            for points in (rates.products, rates.head)
        )
        return Rates(float(self._least(int(rates.link))), products, head)

    def _least(self, value: int) -> int:
        return self.ranks.minimum(value, self.device.torch_device)

    def _most(self, value: int) -> int:
        return -self._least(-value)


def _fits(sizes: Sizes, room: Room) -> bool:
    """Whether all layers stay beside the fullest cache, with states and rings of all sequences."""
    left = room.memory - sizes.layers
    tokens = left - sizes.beside_tokens(room.sequences)
    return sizes.sequences_in(left, room.sequences) == room.sequences and (
        tokens >= room.useful_tokens * sizes.kv_per_token
    )


def link_rate(store: Store, device: Device, image_bytes: int, seconds: float = LINK_SECONDS) -> float:
    """Bytes/s at which a store brings images of one size, a layer's, to a device, one after the other.

    The first do not count: after a pause, a disk that is throttled gives more than it holds.
    The store is of no use afterwards but to be closed. Raises DiskError where its disk is full or broken.
    """
    images = max(2, min(MOST_IMAGES, READ_BYTES // image_bytes))
    memory = [device.slot(image_bytes) for _ in range(2)]
    kept = [keep(device, store, memory[0], image_bytes) for _ in range(images)]
    slots = [pages(slot) for slot in memory]
    waiting: deque[Wait] = deque()
    _wait(device)
    began, first, count = time.perf_counter(), 0, 0
    while count < first + images or time.perf_counter() < began + seconds:
        waiting.append(store.load(slots[count % 2], [kept[count % images]], device.event()))
        count += 1
        if len(waiting) == len(slots):
            waiting.popleft()()
            _wait(device)
        if not first and count > images // 2:
            began, first = time.perf_counter(), count - 1  # the last one is still to come
    while waiting:
        waiting.popleft()()
    _wait(device)
    return (count - first) * image_bytes / (time.perf_counter() - began)


def rates_of(
    backend: Backend,
    dtype: torch.dtype,
    link: float,
    storage: Storage | None,
    *,
    has_tied_head: bool,
    tokens: Sequence[int] = TOKENS,
    widths: tuple[int, int] = WIDTHS,
) -> Rates:
    """A device's rates, of weights that are stored so; None: dense. link: bytes/s."""
    head = storage and storage.of_head(is_tied=has_tied_head)
    products = product_rates(backend, dtype, storage, tokens, widths)
    return Rates(link, products, () if head == storage else product_rates(backend, dtype, head, tokens, widths))


@torch.inference_mode()
def product_rates(
    backend: Backend,
    dtype: torch.dtype,
    storage: Storage | None = None,
    tokens: Sequence[int] = TOKENS,
    widths: tuple[int, int] = WIDTHS,
) -> list[tuple[int, float]]:
    """For each number of tokens, the seconds that a byte of a weight costs that is stored so; see `cost.Rates`."""
    device = backend.device.torch_device
    weights = [backend.linear(_noise(storage, widths, dtype, device)) for _ in range(WEIGHTS)]
    num_bytes = sum(weight.nbytes for weight in weights)
    found = []
    for count in tokens:
        x = torch.randn(count, widths[1], device=device).to(dtype)

        def multiply(x: torch.Tensor = x) -> None:
            for weight in weights:
                weight(x, None)

        found.append((count, _best_seconds(multiply, backend.device) / num_bytes))
    return found


def _noise(storage: Storage | None, widths: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Stored:
    outputs, inputs = widths
    if storage is not None:
        return noise(Kind.of(storage), outputs, inputs, device)
    return torch.randn(outputs, inputs, dtype=torch.float32, device=device).mul_(inputs**-0.5).to(dtype)


def _best_seconds(run: Callable[[], None], device: Device) -> float:
    """The shortest of as many repeats as fit into the time, at least two, after one that does not count."""
    run()
    best, repeats, stop = float("inf"), 0, time.perf_counter() + PRODUCT_SECONDS
    while repeats < 2 or time.perf_counter() < stop:
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        best, repeats = min(best, time.perf_counter() - began), repeats + 1
    return best


def _wait(device: Device) -> None:
    """Until the device has done what it was given."""
    if (end := device.event()) is not None:
        end.synchronize()
