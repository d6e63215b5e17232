"""How fast weights come, and how fast they are multiplied with: what the cost model asks of a device, in some seconds.

Measured and not looked up, because a disk's rate is its machine's secret, and a throttle's. What is read is as large as
a few layers and was written just before, so a cache that the disk's host keeps may flatter it. Products are those of
weights stored as the model's are: a quantised byte stands for more of them than a dense one, and is unpacked first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from server.backends.device import Device
from server.backends.protocol import Backend
from server.offload.cost import Rates
from server.offload.ring import keep, pages
from server.offload.stores import Store, Wait
from server.quant.noise import Kind, noise
from server.quant.sizes import Storage
from server.quant.stored import Stored

READ_BYTES = 256 << 20  # that are written, and then read again and again
MOST_IMAGES = 64
LINK_SECONDS = 2.0  # a throttle that counts in slices of time is off by a tenth in one
TOKENS = (1, 4, 16, 64, 256, 1024)  # of the steps whose products are measured
WIDTHS = (4096, 4096)  # (outputs, inputs) of each weight, which two caches of a processor do not hold together …
WEIGHTS = 4  # … with the others
PRODUCT_SECONDS = 0.1


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
