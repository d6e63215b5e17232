"""What a pipeline stage has to do with the others within a step, as an engine knows it.

A later stage takes up what the one before hands on. The last one samples, and sends the tokens to the first, which
needs them for the sequences' next steps and for nothing else: so it waits for them only then, and meanwhile computes
steps of other sequences. All stages take the same steps in the same order, so that each knows what comes next on each
connection, how long it is, and whose tokens they are.

Shapes: T tokens in the step, E of prompts that an encoder reads, D model width, R sequences that get a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from server.backends.device import Device
from server.pipeline.ring import Ring
from server.pipeline.stage import Stage
from server.ranks.distributed import Shard
from server.stepping.batch import Carried, Tables
from server.stepping.sequences import SequenceState, TokenRun


class Neighbours(Protocol):
    """The stages before and behind this one."""

    stage: Stage
    width: int  # D, of what stages hand on; 0: nothing
    dtype: torch.dtype  # likewise

    def take_tokens(self, runs: Sequence[TokenRun], tables: Tables) -> None:
        """Have the latest tokens of these sequences in the tables. Raises PeerLost."""

    def carried(self, tokens: int, encoded: int = 0) -> Carried | None:
        """What the stage before hands on of so many tokens; None in the first stage. Raises PeerLost.

        encoded: tokens of the prompts that an encoder reads in the step.
        """

    def hand_on(self, carried: Carried, sampled: Sequence[SequenceState], rows: Tensor) -> None:
        """Give the next stage what this one made; the last one chooses tokens for `sampled`, in `rows` [R]."""

    def give_tokens(self, token_ids: Tensor) -> None:
        """Tell the first stage the tokens [R] that this one, the last, has chosen."""

    def close(self) -> None:
        """Let go of the neighbours."""


class Nobody:
    """The neighbours of a model that is not cut. See `Neighbours`."""

    stage = Stage.whole(0)
    width = 0
    dtype = torch.float32

    def take_tokens(self, runs: Sequence[TokenRun], tables: Tables) -> None:
        """They are there."""

    def carried(self, tokens: int, encoded: int = 0) -> Carried | None:
        """There is no stage before."""
        return None

    def hand_on(self, carried: Carried, sampled: Sequence[SequenceState], rows: Tensor) -> None:
        """There is no next stage."""
        raise AssertionError("a model that is not cut is its own last stage")

    def give_tokens(self, token_ids: Tensor) -> None:
        """Nobody else needs them."""

    def close(self) -> None:
        """There is nobody."""


class Stages:
    """The neighbours of one rank of a stage. ring: of the stage's first rank; the others hear of all from that one."""

    def __init__(
        self, stage: Stage, shard: Shard, ring: Ring | None, device: Device, dtype: torch.dtype, width: int
    ) -> None:
        assert (ring is not None) == (shard.rank == 0)
        self.stage = stage
        self._shard = shard
        self._ring = ring
        self._device = device
        self.dtype = dtype
        self.width = width
        self._due: deque[tuple[frozenset[int], Tensor]] = deque()  # tokens that will come: sequences, and their rows

    def take_tokens(self, runs: Sequence[TokenRun], tables: Tables) -> None:
        """See `Neighbours`."""
        wanted = {run.sequence.id for run in runs}
        last = max((n for n, (ids, _) in enumerate(self._due, 1) if not wanted.isdisjoint(ids)), default=0)
        for _ in range(last):
            _, rows = self._due.popleft()
            [token_ids] = self._receive([((len(rows),), torch.int64)])
            tables.keep(rows, token_ids)

    def carried(self, tokens: int, encoded: int = 0) -> Carried | None:
        """See `Neighbours`."""
        if self.stage.is_first:
            return None
        counts = [tokens, encoded] if encoded else [tokens]
        return Carried(*self._receive([((count, self.width), self.dtype) for count in counts]))

    def hand_on(self, carried: Carried, sampled: Sequence[SequenceState], rows: Tensor) -> None:
        """See `Neighbours`."""
        self._send([carried.hidden] if carried.encoded is None else [carried.hidden, carried.encoded])
        if self.stage.is_first and sampled:
            self._due.append((frozenset(s.id for s in sampled), rows.clone()))

    def give_tokens(self, token_ids: Tensor) -> None:
        """See `Neighbours`."""
        self._send([token_ids])

    def close(self) -> None:
        """See `Neighbours`."""
        if self._ring is not None:
            self._ring.close()

    def _send(self, tensors: Sequence[Tensor]) -> None:
        if self._ring is not None:
            copies = [self._device.download(tensor) for tensor in tensors]
            self._ring.send(copies, self._device.event())

    def _receive(self, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """The next message, on the device of every rank of this stage."""
        device = self._device.torch_device
        if self._ring is not None:
            tensors = [tensor.to(device) for tensor in self._ring.receive(parts)]
        else:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in parts]
        for tensor in tensors:
            self._shard.broadcast(tensor)
        return tensors
