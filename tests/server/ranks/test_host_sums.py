"""Ranks that share a GPU exchange what they have through the memory of their host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.ranks.collectives import PeerLost, Shard
from server.ranks.host_sums import HostCollectives, Operation
from tests.server.backends.cuda.test_triton import needs_triton
from tests.server.driver import generate, load_engine
from tests.server.ranks.sharing_ranks import prompts_on, tokens_of_ranks
from tests.server.tiny import save_tiny


@needs_triton
@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.kernels)]
)
def test_ranks_with_interpreted_kernels_choose_the_tokens_of_one(world_size: int, tmp_path: Path) -> None:
    save_tiny("bloom", tmp_path, n_layer=1)
    engine = load_engine(tmp_path, tokens=1024, total_tokens=64, warms_up=False)
    expected = [prompt.tokens for prompt in generate(engine, prompts_on("cpu"))]
    found = tokens_of_ranks("cpu", world_size, tmp_path, tmp_path / "rendezvous")
    assert [{"captured": expected, "plain": expected}] * world_size == found


class Later:
    """A queue that is worked off when somebody waits for it, as a device does; copies to it are not in it."""

    def __init__(self) -> None:
        self.functions: list[Callable[[], None]] = []

    def memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def call(self, function: Callable[[], None]) -> None:
        self.functions.append(function)

    def synchronize(self) -> None:
        while self.functions:
            self.functions.pop(0)()


class Others:
    """Another rank that has ones, or has gone after so many meetings."""

    def __init__(self, lives: int = 1000) -> None:
        self.lives = lives
        self.met: list[str] = []

    def all_reduce(self, tensor: Tensor, operation: Operation) -> None:
        self._meet(operation)
        tensor += 1

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        self._meet("gather")
        gathered.copy_(torch.stack([tensor, torch.ones_like(tensor)]))

    def broadcast(self, tensor: Tensor) -> None:
        self._meet("broadcast")
        tensor.fill_(1)

    def barrier(self) -> None:
        self._meet("barrier")

    def check(self) -> None:
        raise AssertionError("they raise at once")

    def _meet(self, what: str) -> None:
        self.met.append(what)
        if len(self.met) > self.lives:
            raise PeerLost("connection closed by peer")


class AtOnce(Later):
    """A queue that is never behind."""

    def call(self, function: Callable[[], None]) -> None:
        function()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3,), (5, 40), (1,)])
def test_tensors_go_in_pieces_and_come_back_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    shard = Shard(0, 2, collectives=HostCollectives(Others(), AtOnce(), 2, staged_bytes=200))
    assert torch.equal(tensor + 1, shard.all_reduce(tensor.clone()))
    assert torch.equal(
        tensor.repeat_interleave(2, -1)[..., ::2] + 1, shard.all_reduce(tensor.repeat_interleave(2, -1)[..., ::2])
    )
    own, theirs = shard.all_gather(tensor)
    assert torch.equal(tensor, own) and torch.equal(torch.ones_like(tensor), theirs)
    assert torch.equal(torch.ones_like(tensor), shard.broadcast(tensor.clone()))
    assert 8 == shard.minimum(7, torch.device("cpu"))


def test_a_function_is_kept_once_for_all_tensors_of_a_size() -> None:
    queue = Later()
    sums = HostCollectives(Others(), queue, 2)
    for _ in range(3):
        sums.all_reduce(torch.ones(4), "sum")
        sums.all_reduce(torch.ones(4), "max")
    assert 6 == len(queue.functions) and 2 == len({*queue.functions})


def test_a_barrier_waits_for_what_is_behind_it_in_the_queue() -> None:
    queue, others = Later(), Others()
    sums = HostCollectives(others, queue, 2)
    sums.all_reduce(torch.ones(4), "sum")
    sums.barrier()
    assert ["sum", "barrier"] == others.met


def test_a_lost_rank_is_met_once_and_told_to_who_waits_for_the_step() -> None:
    queue, others = Later(), Others(lives=1)
    shard = Shard(0, 2, collectives=HostCollectives(others, queue, 2))
    for _ in range(4):
        shard.all_reduce(torch.ones(4))
    shard.check()  # nothing of it has been done yet
    queue.synchronize()
    assert ["sum", "sum"] == others.met
    with pytest.raises(PeerLost, match="closed by peer"):
        shard.check()
    with pytest.raises(PeerLost):
        shard.barrier()
