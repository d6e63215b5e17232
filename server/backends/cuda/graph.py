"""Graphs on an NVIDIA GPU: CUDA graphs that share one pool of memory, because only one of them runs at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.backends.protocol import Computation

# Batch sizes: a batch is filled up to the next one, by at most a seventh from 8 on.
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
# Prompt tokens of mixed steps. A 7B model computes 512 of them in about 12 ms of an H200, launched in 5 to 8.
PROMPT_TOKENS = (32, 64, 128, 256, 384, 512)


class CudaGraphCapture:
    """See `protocol.GraphCapture`. Not yet run on a GPU.

    The sizes are captured largest first: what a large graph has taken suffices for the smaller ones.
    """

    computes = False
    prompt_tokens: tuple[int, ...] = PROMPT_TOKENS

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Computation) -> Computation:
        # Once outside a graph, on another stream as capturing itself: kernels are compiled, libraries allocate.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile: one waits for the step before.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = function()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return replay
