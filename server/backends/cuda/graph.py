"""Graphs on an NVIDIA GPU: CUDA graphs that share one pool of memory, because only one of them runs at a time.

A capture that fails leaves the stream and the memory as they were, and says so in `CaptureFailed`; where torch cannot
do that, the device counts as lost. `torch.cuda.graph` is not used for it: when the end of a capture raises, it stays on
the capturing stream, and hides what made the capture fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from server.backends.device import CaptureFailed, DeviceLost, lost_device
from server.backends.protocol import Computation

# Batch sizes: a batch is filled up to the next one. Above the last, a step takes as long as its launch takes the host.
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
# Prompt tokens of mixed steps. A 7B model computes 512 of them in about 12 ms of an H200, launched in 5 to 8.
PROMPT_TOKENS = (32, 64, 128, 256, 384, 512)
# From this torch on, memory is no longer given to a graph whose capture ended in an error
# (github.com/pytorch/pytorch/pull/180395); before it the allocator goes on as if it were captured, and later aborts.
CLOSES_BROKEN_CAPTURES = (2, 13)


class CudaGraphCapture:
    """See `protocol.GraphCapture`. Not yet run on a GPU.

    The sizes are captured largest first: what a large graph has taken suffices for the smaller ones. `stream` is the
    one on which everything is run and captured: cuBLAS keeps 32 MiB for each stream that it has seen, taken when it
    first computes there, which must not be inside a capture, or the graph's pool owns it.
    """

    computes = False
    prompt_tokens: tuple[int, ...] = PROMPT_TOKENS

    def __init__(self, sizes: Sequence[int], stream: torch.cuda.Stream) -> None:
        self.sizes = tuple(sizes)
        self._stream = stream
        self._pool: Any = None  # what torch takes for one
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # that hold the pool

    def __call__(self, function: Computation) -> Computation:
        """Raises CaptureFailed for what is not captured, and DeviceLost where that left no way on."""
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            # Once outside a graph: kernels are compiled, libraries allocate. What fails here is no matter of capturing.
            function()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the pool, which takes no memory that the cache holds
            graph, results = self._capture(function)
        caller.wait_stream(self._stream)

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return replay

    def _capture(self, function: Computation) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        if not self._graphs:  # torch takes no pool again that nothing holds any more
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on meanwhile: one waits for the step before.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except RuntimeError as error:
            # There is no end to what has half begun.
            raise DeviceLost(f"a CUDA graph could not be captured: {_first_line(error)}") from error
        try:
            results = function()
        except RuntimeError as error:
            ending = _end(graph)
            raise _verdict(error, ending) from error
        except BaseException:
            _end(graph)
            raise
        if (ending := _end(graph)) is not None:
            raise _verdict(ending, ending) from ending
        self._graphs.add(graph)
        return graph, results


def _end(graph: torch.cuda.CUDAGraph) -> RuntimeError | None:
    """End a capture; what that raised. A broken graph is given up with all that it holds."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        with suppress(RuntimeError):
            graph.reset()
        return error
    return None


def _verdict(cause: RuntimeError, ending: RuntimeError | None) -> RuntimeError:
    """What a failed capture means. ending: what the end of the capture raised, too."""
    if lost := lost_device(cause) or (ending and lost_device(ending)):
        return lost
    text = _first_line(cause)
    if torch.cuda.is_current_stream_capturing():
        return DeviceLost(f"a CUDA graph could not be captured, and its stream cannot leave the capture: {text}")
    if ending is not None and _torch_version() < CLOSES_BROKEN_CAPTURES:
        return DeviceLost(
            f"a CUDA graph could not be captured, which torch {torch.__version__} cannot recover from: {text}; "
            "use torch 2.13 or newer, or start with --cuda-graphs 0"
        )
    return CaptureFailed(text)


def _first_line(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
