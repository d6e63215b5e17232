"""Captures that all ranks have, or none.

A step that one rank replays and another one computes in Python is the same to neither: their collectives are then set
up by different means, and the rank that failed alone is reported as a lost peer by the others. So after each capture
the ranks compare notes. Where one could not, all compute that step without a graph: slower by the host's share of a
step, and the start-up table says which rank could not, and why. Nobody is stopped for it, because that a graph does not
fit is no reason not to serve.

Left out: what a rank cannot compute at all, or a device that a failed capture took with it. Those raise on their rank,
and end the server with their own cause.
"""

from __future__ import annotations

import logging

import torch

from server.backends.failures import CaptureFailed
from server.backends.protocol import Computation, GraphCapture
from server.ranks.distributed import Shard

log = logging.getLogger(__name__)


class AgreedCapture:
    """A `GraphCapture` whose captures exist on every rank or on none. `failures`: why some do not, one for each."""

    def __init__(self, capture: GraphCapture, shard: Shard, device: torch.device):
        # What computes while it captures would have computed a part when it fails.
        assert not capture.computes
        self.sizes, self.prompt_tokens = capture.sizes, capture.prompt_tokens
        self.computes = False
        self.failures: list[str] = []
        self._capture = capture
        self._shard = shard
        self._device = device

    def __call__(self, function: Computation) -> Computation:
        """A replay of `function`, or `function` itself where a rank has none. All ranks capture in the same order."""
        replay, problem = function, None
        try:
            replay = self._capture(function)
        except CaptureFailed as error:
            problem = str(error)
        reason = self._shard.first_problem(problem, self._device)
        if reason is None:
            return replay
        log.warning("a step is computed without a graph: %s", reason)
        self.failures.append(reason)
        return function
