"""A device that stands in for a GPU: it computes on the CPU, and refuses what would make a host wait for a GPU.

Its tensors belong to a device of their own (PrivateUse1, torch's key for devices that it does not know) and keep their
values in tensors of the host, so every operator on them comes through `Driver`. Tensors of the device and of the host
with dimensions are in no operator together, as on a GPU. While a step is being launched, the driver refuses, naming the
operator:

* copies between host and device that do not go through `upload` and `download`, because they come from memory that is
  not pinned: a tensor made with `device=`, an index that is a list, `t[3] = 5` and `t[ids] = 5`, which copy a number;
* whatever must be known on the host: `item`, `tolist`, `bool`, `nonzero`, indices that are masks, and every other
  operator that torch marks as dependent on its data.

A download may not be read before an event that was made after it has been waited for. What is captured is recorded
and replayed with the addresses of the first run, and may neither upload, nor wait, nor ask for an event.

What is allowed is what CUDA does without waiting: `t[1:3] = 5` and `t[mask] = 5` are kernels with a number among their
arguments, as are operators with one tensor of the host without dimensions. Attention is one kernel (`Driver.kernel`),
as it is in Triton. Left out: streams, the allocator, and how long anything takes.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from server.arch.spec import ArchSpec
from server.backends.cpu.device import CpuDevice
from server.backends.device import Values, map_pages
from server.backends.protocol import Attention, Computation, GraphCapture, Rotation, Scores, StepMeta, split_heads
from server.backends.reference import ReferenceBackend
from server.backends.reference.attention import BatchedAttention, StoringAttention, rotate
from server.quantisation.kv import AS_COMPUTED, KvFormat

NAME = "standin"
SETUP = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
WHY_NOT = None if SETUP else "this torch cannot register a device that is written in Python"
SIZES = (2, 8, 32)  # batches that are captured
POISON = 77  # what a download holds before it is complete
NUMBERS = (bool, int, float)
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)  # whose kernels change a shape and touch no memory
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Torch has kernels of these for every device, which would bypass the driver; CUDA has its own of the last one.
NATIVE = (aten.alias.default, aten.detach.default, aten.view.dtype, aten._unsafe_view.default, aten._grouped_mm.default)
Recorded = tuple[Callable[[], Any], Any]


class Refused(RuntimeError):
    """Something that a GPU's host would wait for."""


class DeviceTensor(Tensor):
    """A tensor of the stand-in; its values are those of `host`."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __setitem__(self, index: Any, value: Any) -> None:
        # As for CUDA, and no other device: a number becomes a tensor of the host first.
        super().__setitem__(index, torch.tensor(value, dtype=self.dtype) if isinstance(value, NUMBERS) else value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{list(self.shape)} of {self.dtype} on the stand-in>"


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """An operator's arguments or results, with `function` of each."""
    if isinstance(value, dict):
        return {key: mapped(function, v) for key, v in value.items()}
    return type(value)([mapped(function, v) for v in value]) if type(value) in (list, tuple) else function(value)


def leaves(value: Any) -> list[Any]:
    """Each of an operator's arguments or results."""
    found: list[Any] = []
    mapped(found.append, value)
    return found


def on_device(host: Tensor) -> DeviceTensor:
    """A tensor of the stand-in over `host`, with its shape and strides."""
    with torch.inference_mode(host.is_inference()):  # a view of a weight is none
        made = torch._C._acc.create_empty_tensor(host.shape, host.dtype)
        if not host.is_contiguous() or host.storage_offset():
            made = aten.as_strided.default.redispatch(META, made, host.shape, host.stride(), host.storage_offset())
    made.__class__ = DeviceTensor
    made.host = host
    return made


class HostCopy(Tensor):
    """A download. Reading it before the device has reached an event made after it is an error."""

    arriving: Tensor | None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in leaves(args):
            if isinstance(tensor, HostCopy) and tensor.arriving is not None:
                raise Refused("a download is read before the device was waited for")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def host_copy(values: Tensor) -> HostCopy:
    """A download of `values`, not complete yet."""
    copy = torch.full(values.shape, POISON, dtype=values.dtype).as_subclass(HostCopy)
    copy.arriving = values
    return copy


class Driver:
    """What computes for the device and refuses; there is one in a process, as torch has one key for such devices.

    forbids: whether waiting is refused now; launches: kernels by name, since they were last cleared; views are none.
    """

    def __init__(self) -> None:
        self.forbids = False
        self.launches: Counter[str] = Counter()
        self.recording: list[Recorded] | None = None
        self.libraries: tuple[torch.library.Library, ...] = ()

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Any operator on the device's tensors."""
        may_wait = not self.forbids and self.recording is None
        if not may_wait:
            self._check(op, args)
        if op is aten._copy_from.default:
            return self._copy(*args)
        if not (may_wait and op in INDEXING):  # whose indices are copied
            _refuse_mixed(op, args)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return self._run(op, _with_tensors(op, args), kwargs)

    def kernel(self, function: Callable[..., Any], *args: Any) -> Any:
        """One kernel of the backend's own: `function` may do to its tensors' values what it likes."""
        return self._run(function, args, {})

    def capture(self, function: Computation) -> Computation:
        """Run `function` once, and record what it does to the device."""
        recorded: list[Recorded] = []
        self.recording = recorded
        try:
            results = function()
        finally:
            self.recording = None

        def replay() -> tuple[Tensor, ...]:
            self.launches["replay"] += 1
            for again, first in recorded:
                _overwrite(first, again())
            return results

        return replay

    def refuse_in_capture(self, what: str) -> None:
        """Raise where a step is being captured."""
        if self.recording is not None:
            raise Refused(f"{what} in a step that is being captured")

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        owners: dict[int, DeviceTensor] = {}

        def host(value: Any) -> Any:
            if not isinstance(value, DeviceTensor):
                bypasses = isinstance(value, Tensor) and value.device.type == NAME
                assert not bypasses, f"{function} is given what came from an operator that bypasses the driver"
                return value
            owners[id(value.host)] = value
            return value.host

        def device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if (owner := owners.get(id(value))) is None:
                return on_device(value)
            if owner.shape != value.shape:  # an operator gave its result its shape
                owner.data = on_device(value)
            return owner

        again = functools.partial(function, *mapped(host, args), **mapped(host, kwargs))
        results = again()
        self._note(getattr(function, "__name__", str(function)), again, results)
        return mapped(device, results)

    def _note(self, name: str, again: Callable[[], Any], results: Any) -> None:
        if not name.startswith(("as_strided", "view", "_unsafe_view", "alias", "detach", "empty")):
            self.launches[name] += 1
        if self.recording is not None and not name.startswith("empty"):  # the memory that it took is kept
            self.recording.append((again, results))

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        values, place = (t.host if isinstance(t, DeviceTensor) else t for t in (source, target))
        again = functools.partial(place.copy_, values)
        self._note("copy_", again, again())
        return target

    def _check(self, op: Any, args: Any) -> None:
        """Raise for what makes the host wait."""
        if op is aten._copy_from.default:
            if _of_host(args):
                raise Refused(f"{op} copies between host and device memory that is not pinned, and waits")
            return
        if op in INDEXING:
            _check_indexing(op, args)
        elif TAGS & set(op.tags):
            raise Refused(f"{op} waits for what the device has computed")


def _of_host(args: Any) -> list[Tensor]:
    return [t for t in leaves(args) if isinstance(t, Tensor) and not isinstance(t, DeviceTensor)]


def _refuse_mixed(op: Any, args: Any) -> None:
    if any(t.dim() for t in _of_host(args)):
        raise Refused(f"{op} is given a tensor of the host among those of the device")


def _with_tensors(op: Any, args: Any) -> Any:
    """The arguments, with tensors where the operator wants them and is given numbers, as Python's face of it allows."""
    wanted = [isinstance(a.type, torch.TensorType) for a in op._schema.arguments]
    if not any(want and isinstance(value, NUMBERS) for want, value in zip(wanted, args, strict=False)):
        return args
    dtypes = [t.dtype for t in leaves(args) if isinstance(t, Tensor)]

    def tensor(value: Any, want: bool) -> Any:
        if not (want and isinstance(value, NUMBERS)):
            return value
        own = torch.tensor(value).dtype
        same = (dtype for dtype in dtypes if dtype.is_floating_point == own.is_floating_point and dtype != torch.bool)
        return torch.tensor(value, dtype=next(same, own))

    return tuple(map(tensor, args, wanted))


def _check_indexing(op: Any, args: Any) -> None:
    indices = [index for index in args[1] if index is not None]
    value = args[2] if len(args) > 2 else None
    is_number = value is not None and not isinstance(value, DeviceTensor) and not value.dim()
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        if not (is_number and len(indices) == 1):  # which is masked_fill_
            raise Refused(f"{op} waits for how many places of a mask are true")
    elif is_number:
        raise Refused(f"{op} copies a number to the device, and waits")


def _overwrite(places: Any, values: Any) -> None:
    for place, value in zip(leaves(places), leaves(values), strict=True):
        if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():  # else a view of what was overwritten
            place.copy_(value)


@functools.cache
def open_driver() -> Driver:
    """The driver, registered with torch on the first call."""
    assert SETUP is not None, WHY_NOT
    SETUP(NAME)
    driver = Driver()
    fallback, own = (torch.library.Library(name, "IMPL", "PrivateUse1") for name in ("_", "aten"))
    fallback.fallback(driver)
    for op in NATIVE:
        own.impl(op.name(), functools.partial(driver, op))
    driver.libraries = fallback, own  # which last as long as it does
    return driver


class StandInEvent:
    """See `protocol.Event`. It has been reached once it was waited for."""

    def __init__(self, device: StandInDevice):
        self._device = device
        self._last = device.downloads
        self._is_reached = False

    def query(self) -> bool:
        self._device.driver.refuse_in_capture("an event is asked for")
        return self._is_reached

    def synchronize(self) -> None:
        self._device.driver.refuse_in_capture("an event is waited for")
        self._is_reached = True
        self._device.complete(self._last)

    def elapsed_time(self, end: StandInEvent) -> float:
        self._device.driver.refuse_in_capture("events are compared")
        assert self._is_reached or end._is_reached
        return 1.0


class StandInDevice:
    """See `device.Device`. uploads, downloads: how many there were."""

    name = kind = "the stand-in"
    measures_memory = True

    def __init__(self) -> None:
        self.driver = open_driver()
        self.torch_device = torch.device(NAME, 0)
        self.uploads = self.downloads = 0
        self._arriving: list[tuple[int, HostCopy]] = []
        self._completing = threading.Lock()
        self._staged: list[Tensor] = []

    @contextmanager
    def forbidding(self) -> Iterator[None]:
        """Refuse from now on whatever makes the host wait."""
        self.driver.forbids = True
        try:
            yield
        finally:
            self.driver.forbids = False

    def activate(self) -> None:
        """There is one device for all threads."""

    def good_dtypes(self, cpu_kernels: str) -> set[torch.dtype]:
        return {torch.float32}

    def upload(self, values: Values, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.upload_tensor(torch.tensor(values, dtype=dtype))

    def upload_tensor(self, tensor: Tensor) -> Tensor:
        self.driver.refuse_in_capture("something is uploaded")
        self.uploads += 1
        return on_device(tensor.clone())

    def stage(self, tensor: Tensor) -> Tensor:
        self._staged.append(tensor.clone())
        return self._staged[-1]

    def bring(self, staged: Tensor) -> Tensor:
        self.driver.refuse_in_capture("something is brought")
        if not any(staged is one for one in self._staged):
            raise Refused("what is brought was not staged, and is copied while the host waits")
        return on_device(staged.clone())

    def download(self, tensor: Tensor) -> Tensor:
        self.driver.refuse_in_capture("something is downloaded")
        assert isinstance(tensor, DeviceTensor)
        self.downloads += 1
        copy = host_copy(tensor.host.clone())
        with self._completing:
            self._arriving.append((self.downloads, copy))
        return copy

    @torch.inference_mode()
    def complete(self, last: int) -> None:
        """All downloads up to the `last` one have arrived."""
        with self._completing:
            for _, copy in (entry for entry in self._arriving if entry[0] <= last):
                values, copy.arriving = copy.arriving, None
                copy.copy_(values)
            self._arriving = [entry for entry in self._arriving if entry[0] > last]

    def event(self) -> StandInEvent:
        self.driver.refuse_in_capture("an event is made")
        return StandInEvent(self)

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.torch_device)

    def slot(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def link(self) -> StandInLink:
        return StandInLink(self)

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        return 2**30

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        return 2**30

    def peak_bytes(self, step: Callable[[], object]) -> int:
        step()
        return 0

    def clocks(self, action: Callable[[], object]) -> str:
        action()
        return "the stand-in has one clock"

    def host_queue(self) -> None:
        return None

    def taken_bytes(self, action: Callable[[], object]) -> int:
        action()
        return 0

    def profiled(self) -> tuple[list[Any], str]:
        return [], "self_cpu_time_total"


class StandInLink:
    """See `device.Link`. Copies at once, and holds a caller to what a GPU needs: events, and pinned memory."""

    def __init__(self, device: StandInDevice):
        self._device = device
        self.pins: list[Tensor] = []  # what is pinned now
        self.copies = 0

    def pinned(self, num_bytes: int) -> Tensor:
        self.pins.append(map_pages(num_bytes))
        return self.pins[-1]

    def unpin(self, memory: Tensor) -> None:
        self.pins = [pin for pin in self.pins if pin is not memory]

    def copy(self, source: Tensor, target: Tensor, after: StandInEvent) -> StandInEvent:
        assert isinstance(after, StandInEvent)
        sides = [side.host if isinstance(side, DeviceTensor) else side for side in (source, target)]
        pinned = [side for side in (source, target) if not isinstance(side, DeviceTensor)]
        ranges = [(pin.data_ptr(), pin.data_ptr() + pin.nbytes) for pin in self.pins]
        assert len(pinned) == 1 and any(a <= pinned[0].data_ptr() < b for a, b in ranges)
        sides[1].copy_(sides[0])
        self.copies += 1
        return StandInEvent(self._device)

    def order(self, event: StandInEvent) -> None:
        assert isinstance(event, StandInEvent)


class StandInCapture:
    """See `protocol.GraphCapture`. As `CudaGraphCapture` does, it runs a computation once before it captures it."""

    sizes = SIZES
    prompt_tokens = (16, 64)
    computes = False

    def __init__(self, driver: Driver):
        self._driver = driver

    def __call__(self, function: Computation) -> Computation:
        function()
        return self._driver.capture(function)


class StandInBackend(ReferenceBackend):
    """The reference, captured in graphs, with attention in kernels of its own."""

    name = "stand-in"

    def __init__(self) -> None:
        super().__init__(StandInDevice())

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        assert cache == AS_COMPUTED, "its kernels store what was computed"
        return StandInAttention(scores, open_driver().kernel)

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        return None

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return StandInCapture(open_driver())


class FreeBackend(ReferenceBackend):
    """Decode steps whose replay costs nothing and computes nothing, on tensors of the host: what is left is Python.

    An operator on a few numbers takes a CPU about as long as its launch takes the host of a GPU, or less.
    """

    name = "free"

    def __init__(self) -> None:
        super().__init__(CpuDevice())

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        assert cache == AS_COMPUTED, "its kernels store what was computed"
        return StandInAttention(scores, lambda function, *args: function(*args))

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        return None

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return FreeCapture()


class FreeCapture:
    """See `protocol.GraphCapture`. A replay gives what the first run gave."""

    sizes = SIZES
    prompt_tokens: tuple[int, ...] = ()
    computes = False

    def __call__(self, function: Computation) -> Computation:
        results = function()
        return lambda: results


class StandInAttention(StoringAttention):
    """Attention as two kernels, which skip rows without a sequence and need no lengths from the host."""

    def __init__(self, scores: Scores, launch: Callable[..., Any]):
        self._scores = scores
        self._launch = launch

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        """See `protocol.Attention`."""
        self._launch(_store, kv, k, v, meta.slots)

    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        """See `protocol.Attention`."""
        rotations = None if rotation is None else (rotation.cos, rotation.sin)
        is_interleaved = rotation is not None and rotation.interleaved
        return self._launch(_rotate_and_store, heads, kv, rotations, is_interleaved, meta.slots)

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        """See `protocol.Attention`."""
        tensors = meta.starts, meta.positions, meta.visible, meta.block_tables, self._scores.bias
        return self._launch(functools.partial(_attend, self._scores, meta, window), q, kv, *tensors)


def _store(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    kept = slots >= 0
    AS_COMPUTED.write(kv, k[kept], v[kept], slots[kept])


def _rotate_and_store(heads: Tensor, kv: Tensor, rotations: Any, is_interleaved: bool, slots: Tensor) -> Tensor:
    q, k, v = split_heads(heads, kv.shape[2])
    if rotations is not None:
        rotation = Rotation(*rotations, interleaved=is_interleaved)
        q, k = rotate(rotation, q), rotate(rotation, k)
    _store(kv, k, v, slots)
    return q.clone()


def _attend(
    scores: Scores,
    meta: StepMeta,
    window: int,
    q: Tensor,
    kv: Tensor,
    starts: Tensor,
    positions: Tensor,
    visible: Tensor,
    tables: Tensor,
    bias: Tensor | None,
) -> Tensor:
    visible = visible.clamp(min=1)
    query_starts = starts.tolist() or meta.query_starts
    runs = [(first, last) for first, last in pairwise(query_starts) if last > first]
    lengths = meta.context_lengths or [int(visible[first:last].max()) for first, last in runs]
    kept = [s for s, (first, last) in enumerate(pairwise(query_starts)) if last > first]
    host = {"context_lengths": lengths, "query_starts": [0, *(last for _, last in runs)]}
    meta = replace(meta, **host, positions=positions, visible=visible, block_tables=tables[kept])
    return BatchedAttention(replace(scores, bias=bias)).attend(q, kv, meta, window).clone()
