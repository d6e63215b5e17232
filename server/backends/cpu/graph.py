"""Graphs on a CPU: a computation that is captured once and then replayed without Python, as CUDA graphs are on a GPU.

While it runs for the first time, every call of a compiled kernel is noted with its addresses, and every operator of
torch with its tensors. A replay makes the same calls in the same order: runs of kernels by one call of C++, the few
torch operators one by one, their results copied to where the first ones lie. Most small operators are such calls too
(`elementwise.py`). Tensors that the computation makes and drops take their memory from a pool that all graphs share,
because only one of them runs at a time.

What a computation must not do is decide by values: operators whose results have a shape that depends on them, reading
a tensor into Python, or speaking to other processes. A backend knows beforehand which models do that
(`Backend.why_not_captured`); here operators that do are an error, while `Tensor.tolist` and `numpy`, which call none,
cannot be seen. Threads, addresses and shapes are those of the first run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from server.backends.cpu.elementwise import Elementwise
from server.backends.cpu.kernels import Function, KernelCall, Kernels
from server.backends.cpu.memory import Pool
from server.backends.device import CaptureFailed
from server.backends.protocol import Computation

EMPTY = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like}
BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class CaptureError(CaptureFailed):
    """A computation does what cannot be replayed, though its backend said nothing of it."""


def _unowned(tensor: Tensor) -> Tensor:
    """The same contiguous memory, which anyone may take when `tensor` is gone."""
    assert tensor.is_contiguous()
    if not tensor.nbytes:
        return tensor
    piece = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(piece, dtype=tensor.dtype).view(tensor.shape)


class CpuGraphCapture:
    """Captures computations made of compiled kernels and a few operators of torch. See `protocol.GraphCapture`."""

    sizes: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()  # there launching takes no longer than computing
    computes = True

    def __init__(self, kernels: Kernels):
        self._kernels = kernels
        self._pool = Pool()

    def __call__(self, function: Computation) -> Computation:
        with CpuGraph(self._kernels, self._pool) as graph:
            results = tuple(map(_unowned, function()))

        is_fresh = True

        def replay() -> tuple[Tensor, ...]:
            nonlocal is_fresh
            if not is_fresh:
                graph.replay()
            is_fresh = False
            return results

        return replay


class _PackedCall(ctypes.Structure):
    """`Call` of replay.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class _Calls:
    """Calls of kernels in a row."""

    def __init__(self, replay: Function, calls: Sequence[KernelCall]):
        self._replay = replay
        self._names = [call.name for call in calls]
        self._arguments = [(ctypes.c_int64 * len(c.arguments))(*(a or 0 for a in c.arguments)) for c in calls]
        addresses = [ctypes.addressof(arguments) for arguments in self._arguments]
        self._calls = (_PackedCall * len(calls))(
            *(_PackedCall(c.packed, a) for c, a in zip(calls, addresses, strict=True))
        )
        self._at = ctypes.addressof(self._calls)

    def __call__(self) -> None:
        if not torch._C._autograd._profiler_enabled():
            return self._replay(self._at, len(self._names))
        for index, name in enumerate(self._names):  # each for itself, so that the profile shows them
            with record_function(name):
                self._replay(self._at + index * ctypes.sizeof(_PackedCall), 1)


class CpuGraph(TorchDispatchMode):
    """One captured computation. Use as a context around the computation; afterwards, `replay` repeats it."""

    def __init__(self, kernels: Kernels, pool: Pool):
        super().__init__()
        self._kernels = kernels
        self._pool = pool
        self._steps: list[Callable[[], object]] = []
        self._calls: list[KernelCall] = []  # of kernels, since the last step
        self._elementwise = Elementwise(kernels, pool)
        self._constants: list[Tensor] = []  # made of numbers alone
        self._kept: list[object] = []  # what the steps point to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, would import torch._dynamo at the first capture: 892 modules, about two seconds.
        return False

    def __enter__(self) -> CpuGraph:
        self._kernels.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.recorder = None
        self._close_calls()

    def replay(self) -> None:
        """Compute everything again, from what the inputs' memory holds now into where the results are."""
        for step in self._steps:
            step()

    def add_call(self, call: KernelCall) -> None:
        """Note a call of a kernel, which was made beside."""
        self._calls.append(call)

    def _close_calls(self) -> None:
        """Make one step of the kernels called since the last one."""
        if self._calls:
            self._steps.append(_Calls(self._kernels.replay, self._calls))
        self._calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten" or _decides_by_values(func, args):
            raise CaptureError(f"{func} cannot be captured in a graph: start with --cuda-graphs 0, and report it")
        if func._schema.is_mutable and self._is_constant(args[0]):
            raise CaptureError(f"{func} changes what is the same each time: start with --cuda-graphs 0, and report it")
        if func._schema.is_mutable and not kwargs and (changed := self._elementwise.change(func, args)) is not None:
            return changed
        result = func(*args, **kwargs)
        if func.overloadpacket in EMPTY:
            return self._pool.empty(result.shape, result.dtype)
        if _is_view(func, args, result):
            return result
        if func.overloadpacket is torch.ops.aten.arange and not func._schema.is_mutable:
            self._constants.append(result)
            return result
        if not kwargs and (repeated := self._elementwise.result(func, args, result)) is not None:
            return repeated
        self._add_operator(func, args, kwargs, result)
        return result

    def _is_constant(self, tensor: Any) -> bool:
        places = {constant.untyped_storage().data_ptr() for constant in self._constants}
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in places

    def _add_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A step that computes an operator again, into its first results unless it changes its inputs."""
        self._close_calls()
        self._kept.append(result)
        if func._schema.is_mutable:
            self._steps.append(lambda: func(*args, **kwargs))
        elif isinstance(result, Tensor):
            self._steps.append(lambda: result.copy_(func(*args, **kwargs)))
        else:
            self._steps.append(lambda: _copy_all(result, func(*args, **kwargs)))


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _is_view(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a result lies in an argument's memory. Some operators that may return a view (`contiguous`, `reshape`,
    `to`) copy where they must, and are then to be repeated."""
    if not func.is_view or not isinstance(result, Tensor):
        return bool(func.is_view)
    memory = result.untyped_storage().data_ptr()
    return any(isinstance(arg, Tensor) and arg.untyped_storage().data_ptr() == memory for arg in args)


def _decides_by_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # by numbers its result has their shape, by a mask as many as are true
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return bool(BY_VALUE & set(func.tags))
