"""What it takes to compute the same thing again and again without Python's share of it.

A computation is captured once: run with its inputs in fixed places, and every operation noted with its addresses. After
that a repetition is one call, which reads those inputs anew and writes the same results. On NVIDIA GPUs that is a CUDA
graph, on CPUs a recording of kernel calls (`server/native/recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

# A computation without parameters. What a captured one returns is overwritten by the next call of any captured one.
Computation = Callable[[], tuple[Tensor, ...]]


class NotCapturable(Exception):
    """The computation does what cannot be repeated; says what."""


class HostOnly(list[Any]):
    """Stands in a captured step for a list that the host alone has, and that differs from step to step."""

    def _refuse(self, *_: object) -> Any:
        raise NotCapturable("it needs the sequences' lengths on the host")

    __len__ = __iter__ = __getitem__ = _refuse


class Capture(Protocol):
    """How a kind of device captures."""

    # Batch sizes to capture, ascending, a smaller batch being filled up; empty: each as it comes, up to any size.
    sizes: tuple[int, ...]
    # Whether capturing is the first computation; else it needs inputs that do no harm, and may compute several times.
    computes: bool

    def __call__(self, function: Computation) -> Computation:
        """A repetition of `function`; its first call gives the results of the first computation. Raises
        NotCapturable."""


class CudaCapture:
    """CUDA graphs that share one pool of memory, because only one of them runs at a time.

    Largest first: what a large graph has taken suffices for the smaller ones. Not yet run on a GPU.
    """

    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
    computes = False

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Computation) -> Computation:
        # Once outside a graph, on another stream as capturing itself: kernels are compiled, libraries allocate.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on meanwhile: one waits for the step before.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = function()
        except RuntimeError as error:
            raise NotCapturable(str(error).partition("\n")[0]) from error

        def repeat() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return repeat
