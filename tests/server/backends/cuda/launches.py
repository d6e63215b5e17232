"""What a captured decode step would launch on a GPU, counted without one.

The engine captures a step as it does on a GPU, with the classes of the backend for GPUs and a published model's real
sizes, but every tensor is on the meta device: it has a shape and no contents. Operators of torch are seen by a dispatch
mode, launches of Triton kernels where they would be compiled, and collectives in place of a process group.

An operator counts one launch unless it only makes a view or takes memory; those that torch composes of several kernels
on a GPU, as its source shows, count each of them. Left out: what each launch costs, which only a GPU can tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from server.adapters.adapters import Adapters
from server.adapters.sites import Sites
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from server.backends.protocol import Computation
from server.checkpoint.weights import Weights
from server.model.layer import Layer
from server.model.load import load
from server.ranks.collectives import Shard
from server.stepping.engine import Engine
from server.stepping.graphs import Form
from server.stepping.sampling import Watermark
from tests.server.model.test_real_shapes import DTYPE, META, FakeCheckpoint, find

PROCESSORS = 132  # multiprocessors of an H200
CACHE_TOKENS, TOTAL_TOKENS = 65536, 2048  # of the KV cache, and of the longest sequence
# Operators that take memory and write nothing into it, or name it anew.
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
# What the first layer launches for all.
ONCE = {"_plan"}
# Operators of which torch launches more than one kernel (aten/src/ATen/native/ReduceOps.cpp and native/cuda/).
COMPOSED: dict[str, Sequence[str]] = {
    "logsumexp": ("amax", "abs", "eq", "masked_fill", "sub", "exp", "sum", "log", "add"),
    "topk": ("topk", "sort"),
    "sort": ("copy", "arange", "sort"),
    "_grouped_mm": ("offsets", "_grouped_mm"),
}


@dataclass
class Launches:
    """Launches by name, and collectives, of a step in which the first layers stand for all."""

    num_layers: int  # of the model
    traced: int  # of them, how many there are
    layers: Counter[str] = field(default_factory=Counter)  # of all traced layers together
    beside: Counter[str] = field(default_factory=Counter)  # before and behind them
    layer_collectives: int = 0
    beside_collectives: int = 0

    @property
    def layer(self) -> Counter[str]:
        """Those of one layer: all are alike."""
        assert not any(count % self.traced for count in self.layers.values()), self.layers
        return Counter({name: count // self.traced for name, count in self.layers.items()})

    @property
    def total(self) -> int:
        """All but the collectives."""
        return self.layer.total() * self.num_layers + self.beside.total()

    @property
    def collectives(self) -> int:
        """Of all layers and beside them."""
        return self.layer_collectives // self.traced * self.num_layers + self.beside_collectives


class PartOfCheckpoint(FakeCheckpoint):
    """Tensors of shapes alone, some of which nobody reads."""

    def leftovers(self, ignore: tuple[str, ...]) -> list[str]:
        return []


class Recorder(TorchDispatchMode):
    """Notes launches while it is entered."""

    def __init__(self, num_layers: int, traced: int) -> None:
        super().__init__()
        self._sizes = num_layers, traced
        self.launches = Launches(*self._sizes)
        self.captured: list[Launches] = []
        self.is_in_layer = False

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Count one capture, and keep it."""
        self.launches = Launches(*self._sizes)
        with self:
            yield
        self.captured.append(self.launches)
        self.launches = Launches(*self._sizes)  # what runs between captures counts nowhere

    def note(self, name: str) -> None:
        """Count what `name` launches."""
        is_of_layer = self.is_in_layer and name not in ONCE
        (self.launches.layers if is_of_layer else self.launches.beside).update(COMPOSED.get(name, (name,)))

    def note_collective(self, shard: Shard) -> None:
        """Count a collective, if there is anybody to speak to."""
        self.launches.layer_collectives += shard.world_size > 1 and self.is_in_layer
        self.launches.beside_collectives += shard.world_size > 1 and not self.is_in_layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)  # in inference mode, operators made of others come whole
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        is_on_device = any(isinstance(t, Tensor) and t.device == META for t in tree_leaves((args, kwargs, result)))
        name = func.overloadpacket.__name__
        if is_on_device and name not in SILENT and not makes_view(func):
            self.note(name.rstrip("_"))
        return result


def makes_view(func: Any) -> bool:
    """Whether an operator's results are views of its arguments, and nothing is written."""
    return any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)


class Tracing:
    """A `GraphCapture` that runs a step once, as others do before they capture, and notes what it launches then."""

    computes = False
    sizes = ()
    prompt_tokens = ()

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def __call__(self, function: Computation) -> Computation:
        function()
        with self._recorder.fresh():
            function()
        return function


class MetaDevice(CpuDevice):
    """A device that computes nothing."""

    torch_device = META

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=META)


class MetaBackend(CudaBackend):
    """The backend for GPUs without one."""

    def __init__(self, recorder: Recorder):
        super().__init__(MetaDevice(), DTYPE)
        self._recorder = recorder

    def graph_capture(self, sizes: Sequence[int] | None) -> Tracing:
        return Tracing(self._recorder)


def decode_launches(
    name: str, world_size: int, batch_sizes: Sequence[int], traced: int = 2, adapters: int = 0
) -> list[Launches]:
    """What one of the ranks launches for a captured decode of each batch size, with a model of `real_shapes`.

    traced: of how many layers every launch is counted; adapters: rows for those that sequences have.
    """
    published, family, spec = find(name)
    recorder = Recorder(spec.num_layers, traced)
    spec = replace(spec, layers=spec.layers[:traced])
    shard = Shard(0, world_size)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(recorder, patch)
        backend = MetaBackend(recorder)
        weights = Weights.open(PartOfCheckpoint(published.shapes), family.names, shard, DTYPE, META)
        sites = Sites(backend, adapters, DTYPE)
        model = load(replace(weights, adapting=sites if adapters else None), spec, backend, adapters=sites.tokens)
        kept = Adapters(adapters, 0, sites.read) if adapters else None
        engine = Engine(model, shard, backend, DTYPE, Watermark(gamma=0.5, delta=2.0), adapters=kept)
        engine.allocate(CACHE_TOKENS, TOTAL_TOKENS)
        assert engine.graphs is not None
        for size in batch_sizes:
            engine.graphs.decodes._graph(size, Form.PLAIN, adapts=adapters > 0)
    return recorder.captured


def stand_in(recorder: Recorder, patch: pytest.MonkeyPatch) -> None:
    """Count in place of a GPU, of a process group and of Triton's compiler."""
    call_layer: Callable[..., Any] = Layer.__call__

    def layer(self: Layer, *args: Any) -> Any:
        recorder.is_in_layer = True
        result = call_layer(self, *args)
        recorder.is_in_layer = False
        return result

    def all_reduce(shard: Shard, tensor: Tensor) -> Tensor:
        recorder.note_collective(shard)
        return tensor

    def all_gather(shard: Shard, tensor: Tensor) -> list[Tensor]:
        recorder.note_collective(shard)
        return [torch.empty_like(tensor) for _ in range(shard.world_size)]

    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    patch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: recorder.note(kernel.fn.__name__))
    patch.setattr(Layer, "__call__", layer)
    patch.setattr(Shard, "all_reduce", all_reduce)
    patch.setattr(Shard, "all_gather", all_gather)
    patch.setattr(Shard, "first_problem", lambda shard, problem, device: problem)
    patch.setattr("server.checkpoint.weights.PIECE_BYTES", 1 << 62)  # parts are read at once
