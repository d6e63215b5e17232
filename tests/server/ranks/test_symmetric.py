"""Small sums through memory that all ranks read: when they are used, and that all ranks use them or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from server.ranks import collectives
from server.ranks.collectives import Shard, TorchMemory, connect
from server.ranks.symmetric import MOST_BYTES, SymmetricSum, join
from tests.server.driver import CPU

GPU = torch.device("cuda", 0)


@dataclass
class Host:
    """Ranks in threads, with memory that all of them read."""

    world_size: int
    buffers: list[dict[torch.dtype, Tensor]] = field(default_factory=list)
    problems: list[str | None] = field(default_factory=list)
    asked: int = 0
    sums: int = 0

    def __post_init__(self) -> None:
        # A rank that is alone at a barrier fails the test.
        self.barrier = Barrier(self.world_size, timeout=20)
        self.buffers = [{} for _ in range(self.world_size)]
        self.problems = [None] * self.world_size

    def agree(self, rank: int, problem: str | None) -> str | None:
        self.problems[rank] = problem
        self.barrier.wait()
        found = [f"rank {r}: {p}" for r, p in enumerate(self.problems) if p is not None]
        self.barrier.wait()
        return found[0] if found else None


@dataclass
class Memory:
    """One rank's view of it."""

    host: Host
    rank: int
    problem: str | None = None
    error: float = 0.0

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.host.asked += 1
        if self.problem is not None:
            raise RuntimeError(f"{self.problem}\nand more lines")
        self.host.buffers[self.rank][dtype] = torch.empty(elements, dtype=dtype)
        return self.host.buffers[self.rank][dtype]

    def sum(self, buffer: Tensor, tensor: Tensor) -> None:
        assert buffer.shape == tensor.shape and tensor.is_contiguous()
        assert buffer.data_ptr() == self.host.buffers[self.rank][tensor.dtype].data_ptr()
        self.host.sums += 1
        buffer.copy_(tensor)
        self.host.barrier.wait()
        parts = [buffers[tensor.dtype][: tensor.numel()] for buffers in self.host.buffers]
        total = torch.stack(parts).sum(dim=0).view(tensor.shape) + self.error
        self.host.barrier.wait()
        tensor.copy_(total)


def on_ranks(host: Host, act: Callable[[int], Any]) -> list[Any]:
    """What `act` gives on each rank, all running at once."""
    with ThreadPoolExecutor(host.world_size) as pool:
        return list(pool.map(act, range(host.world_size)))


def joined(host: Host, problems: dict[int, str], memories: dict[int, Memory]) -> list[SymmetricSum | str]:
    def act(rank: int) -> SymmetricSum | str:
        memory = memories.get(rank, Memory(host, rank))
        agree = lambda problem: host.agree(rank, problem)  # noqa: E731
        return join(memory, problems.get(rank), agree, rank=rank, world_size=host.world_size, device=CPU)

    return on_ranks(host, act)


def test_all_ranks_sum_in_place_through_one_buffer() -> None:
    host = Host(4)
    sums = joined(host, {}, {})

    def act(rank: int) -> list[Tensor]:
        made = sums[rank]
        assert isinstance(made, SymmetricSum)
        tensors = [torch.full((2, 8), 1.0 + rank), torch.full((8,), 2.0, dtype=torch.bfloat16)]
        strided, later = torch.full((8, 4), 1.0 + rank)[:, :2], torch.full((9,), 1.0 + rank)[1:]
        for tensor in [*tensors, strided, later]:
            assert made.takes(tensor)
            made(tensor)
        return [*tensors, strided, later]

    for found in on_ranks(host, act):
        assert [10.0, 8.0, 10.0, 10.0] == [float(t.mean()) for t in found]
        assert all(t.eq(t.flatten()[0]).all() for t in found)
    assert 2 * 4 == host.asked  # a buffer for each dtype on each rank, made once


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_knows_it_cannot_keeps_all_from_it(rank: int) -> None:
    host = Host(2)
    assert [f"rank {rank}: GPU 0 is blind"] * 2 == joined(host, {rank: "GPU 0 is blind"}, {})
    assert 0 == host.asked


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_gets_no_memory_leaves_no_other_waiting(rank: int) -> None:
    host = Host(2)
    assert [f"rank {rank}: no handle"] * 2 == joined(host, {}, {rank: Memory(host, rank, problem="no handle")})
    assert 0 == host.sums


def test_sums_that_come_out_wrong_are_not_used() -> None:
    host = Host(2)
    found = joined(host, {}, {1: Memory(host, 1, error=0.5)})
    assert ["rank 1: sums of torch.bfloat16 and torch.float32 through it are wrong"] * 2 == found


@pytest.mark.parametrize(
    ("tensor", "is_taken"),
    [
        (torch.empty(32, 4096, dtype=torch.bfloat16), True),
        (torch.empty(33, 4096, dtype=torch.bfloat16), False),
        (torch.empty(MOST_BYTES // 4), True),
        (torch.empty(8, dtype=torch.float16), False),  # the kernel adds up no others
        (torch.empty(4, dtype=torch.int64), False),
        (torch.empty(5), False),  # no whole pieces
        (torch.empty(0), False),
    ],
)
def test_small_sums_are_taken(tensor: Tensor, is_taken: bool) -> None:
    assert is_taken == SymmetricSum(Memory(Host(1), 0)).takes(tensor)


def test_what_is_not_taken_goes_through_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, operation: summed.append(tensor))
    host = Host(1)
    shard = Shard(0, 2, SymmetricSum(Memory(host, 0)))
    small, large = torch.ones(4), torch.ones(MOST_BYTES)
    for tensor in (small, large):
        assert tensor is shard.all_reduce(tensor)
    assert [id(large)] == [id(t) for t in summed]
    assert 1 == host.sums


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group that needs no second process."""
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(collectives, "_set_pg_timeout", lambda timeout: None)


@pytest.mark.parametrize(
    ("wish", "device", "answer", "has_sums", "said"),
    [
        ("auto", GPU, SymmetricSum(Memory(Host(1), 0)), True, "go through symmetric memory"),
        ("symmetric", GPU, SymmetricSum(Memory(Host(1), 0)), True, "go through symmetric memory"),
        ("auto", GPU, "rank 1: GPU 1 is blind", False, "none through symmetric memory: rank 1: GPU 1 is blind"),
        ("nccl", GPU, None, False, ""),
        ("auto", CPU, None, False, ""),
    ],
)
def test_the_setting_decides_and_a_line_says_why(
    grouped: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wish: str,
    device: torch.device,
    answer: SymmetricSum | str | None,
    has_sums: bool,
    said: str,
) -> None:
    def ask(shard: Shard, device: torch.device, *, is_spread: bool) -> SymmetricSum | str:
        assert not is_spread
        assert answer is not None, "nobody should ask"
        return answer

    monkeypatch.setattr(collectives, "_join_symmetric", ask)
    with caplog.at_level(logging.INFO):
        shard = connect(0, 2, "", device, wish)
    assert has_sums == (shard.small_sums is not None)
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_asking_for_what_is_not_possible_is_refused(grouped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_join_symmetric", lambda *_, **__: "rank 1: GPU 1 is blind")
    with pytest.raises(ValueError, match=r"not possible \(rank 1: GPU 1 is blind\): use --all-reduce auto"):
        connect(0, 2, "", GPU, "symmetric")


def test_what_keeps_a_rank_from_it_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str | None:
        return collectives._why_not_symmetric(Shard(0, 4), GPU)

    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: asked.append(peer) or peer != 2)
    assert "GPU 0 cannot read the memory of GPU 2" == why()
    assert [1, 2, 3] == asked
    asked.clear()
    assert collectives._why_not_symmetric(Shard(1, 2), torch.device("cuda", 5)) is None  # of the third stage
    assert [4] == asked
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    assert why() is None
    monkeypatch.setattr(TorchMemory, "one_shot", staticmethod(lambda: None))
    assert "no one-shot all-reduce" in str(why())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in str(why())
    assert "CPUs" in str(collectives._why_not_symmetric(Shard(0, 2), CPU))


def test_ranks_on_several_nodes_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that this node lacks torch says nothing but an AssertionError."""
    told: list[str | None] = []
    monkeypatch.setattr(collectives, "_join", lambda *_: None)
    monkeypatch.setattr(collectives.symmetric, "join", lambda memory, problem, *_, **__: told.append(problem))
    connect(0, 2, "unix:///a/store", GPU, "auto")
    assert ["they are on several nodes"] == told


def test_the_operator_is_torchs_and_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = TorchMemory.one_shot()
    assert operator is not None
    expected = "Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(a!) out"
    assert f"({expected})" in str(torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema)
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(TorchMemory, "one_shot", staticmethod(lambda: lambda *given: called.append(given)))
    monkeypatch.setattr(collectives, "_group", lambda: SimpleNamespace(group_name="the group"))
    buffer, tensor = torch.empty(4), torch.ones(4)
    TorchMemory(GPU).sum(buffer, tensor)
    assert [(buffer, tensor, "sum", "the group", tensor)] == called
