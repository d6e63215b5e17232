"""What the tests share that interpret kernels on a CPU: see `test_triton.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton.language import core
from triton.runtime import interpreter

from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from tests.server.backends.cuda.kernel_cases import ONE_SPLIT
from tests.server.driver import Prompt, generate, load_engine
from tests.server.tiny import save_tiny


@contextmanager
def interpreted_backend(processors: int = ONE_SPLIT) -> Iterator[CudaBackend]:
    """Whose kernels are interpreted, on tensors of the CPU, as for a GPU of so many multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=processors)
    with patch.object(torch.cuda, "get_device_properties", lambda device: properties):
        yield CudaBackend(CpuDevice(), torch.float32)


def check_model(case: str, folder: Path, sizes: dict[str, Any], **stored: str) -> None:
    """A tiny model gives the tokens of the reference, and nearly its log-probabilities. stored: as `load_engine`."""
    save_tiny(case, folder, **sizes)
    with interpreted_backend() as backend:
        expected, found = (
            generate(engine, [Prompt(list(range(4, 11)), 2, chunk=4), Prompt([40, 50], 2, joins_at=1)])
            for engine in (
                load_engine(folder, warms_up=False, **stored),  # type: ignore[arg-type]
                load_engine(folder, backend=backend, captured=False, warms_up=False, **stored),  # type: ignore[arg-type]
            )
        )
    assert [p.tokens for p in expected] == [p.tokens for p in found]
    for reference, fused in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.tensor(reference.logprobs), torch.tensor(fused.logprobs), atol=1e-4, rtol=0)


@pytest.fixture(autouse=True, scope="module")
def quick_calls() -> Iterator[None]:
    """The tests of a module interpret as quickly as they can."""
    with quick_interpreter():
        yield


@pytest.fixture(autouse=True, scope="module")
def inside() -> Iterator[None]:
    """No kernel of a module reads or writes what it was not given; those of adapters find it in tables of addresses."""
    with checked_addresses():
        yield


class Bounds:
    """The memory that a launch was given: the whole storage of each tensor."""

    def __init__(self, tensors: Iterable[object]):
        storages = (one.untyped_storage() for one in tensors if isinstance(one, torch.Tensor))
        ranges = np.array(sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}), np.uint64)
        self._begins, self._ends = ranges.reshape(-1, 2).T

    def check(self, pointers: Any, mask: Any) -> None:
        """Raises AssertionError unless each element that the mask wants is in one of the tensors."""
        wanted = pointers.data[np.broadcast_to(mask.data != 0, pointers.data.shape)]
        if not wanted.size:
            return
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self._begins, wanted, "right") - 1
        is_inside = (place >= 0) & (wanted + size <= self._ends[place])
        assert is_inside.all(), f"{(~is_inside).sum()} of {wanted.size} elements are in no tensor of the launch"


@contextmanager
def checked_addresses() -> Iterator[None]:
    """What a GPU would answer with an illegal address at best, and with anything at worst, ends the launch."""
    builder = interpreter.interpreter_builder
    bounds = Bounds([])

    def init_args(executor: Any, args: Sequence[object], kwargs: dict[str, object]) -> Any:
        nonlocal bounds
        found = prepare(executor, args, kwargs)
        bounds = Bounds([*found[0], *found[1].values()])
        return found

    def checked(method: str, mask_at: int, pointers_at: int = 0) -> Any:
        original = getattr(builder, method)

        def call(*args: Any) -> object:
            bounds.check(args[pointers_at], args[mask_at])
            return original(*args)

        return patch.object(builder, method, call)

    prepare = interpreter.GridExecutor._init_args_hst
    with (
        patch.object(interpreter.GridExecutor, "_init_args_hst", init_args),
        checked("create_masked_load", 1),
        checked("create_masked_store", 2),
        checked("create_atomic_rmw", 3, 1),
    ):
        yield


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Nothing is computed twice: most of the interpreter's time goes into what it has found out before.

    It also follows every sum and product of integers by the same in 64 bits, and compares; but the result would only be
    looked at in its `debug` mode.
    """
    builder = interpreter.interpreter_builder
    with (
        patch.object(interpreter.InterpretedFunction, "__call__", _caller()),
        patch.object(interpreter, "_get_np_dtype", _cached_numpy_dtype()),
        patch.object(core.block_type, "__init__", _cached_block_type()),
        patch.object(core.tensor, "__init__", _cached_tensor()),
        patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield


def _caller() -> Callable[..., object]:
    """A function that a kernel calls finds the language as the kernel's launch has left it.

    The interpreter replaces the whole language again at every such call, which takes longer than most functions.
    """
    patched: set[bool] = set()

    def call(function: Any, *args: object, **kwargs: object) -> object:
        # Functions of the language itself see another of its modules than ours do.
        is_own = function.fn.__module__.startswith("triton.")
        if is_own not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(is_own)
        return function.rewrite()(*args, **kwargs)

    return call


def _cached_numpy_dtype() -> Callable[[Any], object]:
    find, found = interpreter._get_np_dtype, dict[str, object]()

    def numpy_dtype(dtype: Any) -> object:
        name = str(dtype.scalar)
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return numpy_dtype


def _cached_block_type() -> Callable[..., None]:
    make, made = core.block_type.__init__, dict[tuple[object, ...], dict[str, object]]()

    def init(block: Any, element: Any, shape: Any) -> None:
        sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (element.name, getattr(element, "const", None), getattr(element, "address_space", None), *sizes)
        if key not in made:
            make(block, element, shape)
            made[key] = vars(block)
        else:
            vars(block).update(made[key])

    return init


def _cached_tensor() -> Callable[..., None]:
    make, made = core.tensor.__init__, dict[tuple[int, ...], dict[str, object]]()

    def init(tensor: Any, handle: object, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in made:
            make(tensor, handle, type)
            made[sizes] = {"shape": tensor.shape, "numel": tensor.numel}
        vars(tensor).update(made[sizes], handle=handle, type=type, dtype=type.scalar)

    return init
