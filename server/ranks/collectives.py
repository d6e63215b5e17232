"""This process's place among the ranks, and the collectives that tie them together.

With `rendezvous.py`, all that imports `torch.distributed`. A `Shard` of one rank does nothing and needs no
process group, so a model on one device runs the same code without paying for it. Ranks are matched by the order of
their calls: everything that reaches a collective must come from the one ordered stream of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout  # the one way there is, in torch 2.11 and 2.13

from host.process import refuse_connections
from server.ranks import symmetric
from server.ranks.host_sums import Collectives, HostCollectives, HostQueue, Operation
from server.ranks.rendezvous import SCHEME, SocketStore, StoreServer
from server.ranks.symmetric import SymmetricSum

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# How long a rank waits for its peers in one collective: far longer than any step, far shorter than a user's patience.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
# The same until all are warm: one rank may load from a slower disk, or compile what another finds compiled. Where one
# dies, the launcher ends the others.
LOAD_TIMEOUT = timedelta(minutes=20)
# The longest reason that ranks tell each other: one sentence.
PROBLEM_BYTES = 512

# How gloo, NCCL and the stores say that a peer does not answer, or that a communicator was aborted because of one.
PEER_IS_GONE = (
    "closed by peer",
    "reset by peer",
    "closed by remote peer",
    "connection refused",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "connectfullmesh failed",
    "remote process exited",
    "network error",
    "communicator was aborted",
)


class PeerLost(RuntimeError):
    """Another rank went away. A consequence, never a cause: the launcher reports the rank that failed first."""


def divide(size: int, parts: int) -> int:
    """`size / parts`, which must come out even: `spec.validate` has refused what does not."""
    assert size % parts == 0, f"{size} is not divisible by {parts}"
    return size // parts


class GroupCollectives:
    """`Collectives` of the process group, where and when they are called."""

    def all_reduce(self, tensor: Tensor, operation: Operation) -> None:
        _collective(lambda: dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper())))

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        # torch 2.13 says so of the older name, which is all that torch 2.11 has.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        _collective(lambda: gather(gathered.view(-1), tensor.reshape(-1)))

    def broadcast(self, tensor: Tensor) -> None:
        _collective(lambda: dist.broadcast(tensor, 0))

    def barrier(self) -> None:
        _collective(dist.barrier)

    def check(self) -> None:
        """They raise at once, or the device does."""

    def wait_at_most(self, timeout: timedelta) -> None:
        _set_pg_timeout(timeout)


@dataclass
class Progress:
    """How many collectives a rank has begun; of ranks that wait for each other, the one with the fewest lags."""

    begun: int = 0


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1
    small_sums: SymmetricSum | None = field(default=None, compare=False, repr=False)
    num_local: int = 0  # ranks on this machine, of all pipeline stages; 0: those of `world_size`
    collectives: Collectives = field(default_factory=GroupCollectives, compare=False, repr=False)
    store: SocketStore | None = field(default=None, compare=False, repr=False)  # NCCL asks it all the time
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)

    @property
    def sharing(self) -> int:
        """How many ranks share this machine's memory and cores."""
        return self.num_local or self.world_size

    def range(self, size: int) -> tuple[int, int]:
        """This rank's half-open share [start, stop) of `size` items, which the world size divides."""
        share = divide(size, self.world_size)
        return self.rank * share, (self.rank + 1) * share

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place; returns `tensor`."""
        self.progress.begun += 1
        if self.small_sums is not None and self.small_sums.takes(tensor):
            self.small_sums(tensor)
        elif self.world_size > 1:
            self.collectives.all_reduce(tensor, "sum")
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The largest of all ranks' numbers, in place; returns `tensor`."""
        self.progress.begun += 1
        if self.world_size > 1:
            self.collectives.all_reduce(tensor, "max")
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The ranks' equally shaped tensors, in the order of the ranks."""
        self.progress.begun += 1
        if self.world_size == 1:
            return [tensor]
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        self.collectives.all_gather(gathered, tensor)
        return list(gathered)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor in place of every rank's; returns `tensor`."""
        self.progress.begun += 1
        if self.world_size > 1:
            self.collectives.broadcast(tensor)
        return tensor

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        self.collectives.all_reduce(tensor, "min")
        smallest = int(tensor.item())
        self.check()
        return smallest

    def first_problem(self, problem: str | None, device: torch.device) -> str | None:
        """The problem of the lowest rank that has one, and on several ranks which it is; None where none has one."""
        if self.world_size == 1:
            return problem
        # Without the texts in the good case: one number of each rank.
        first = self.minimum(self.rank if problem is not None else self.world_size, device)
        if first == self.world_size:
            return None
        text = (problem or "").encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0")
        texts = self.all_gather(torch.tensor(list(text), dtype=torch.uint8, device=device))
        said = bytes(texts[first].tolist()).rstrip(b"\0").decode(errors="ignore")
        return f"rank {first}: {said}"

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            self.collectives.barrier()

    def check(self) -> None:
        """Raises what went wrong in a collective of work that has been waited for, where no call of it could."""
        self.collectives.check()

    def wait_at_most(self, timeout: timedelta) -> None:
        """From here on wait so long for other ranks in a collective."""
        if self.world_size > 1:
            self.collectives.wait_at_most(timeout)


def connect(
    rank: int,
    world_size: int,
    rendezvous: str,
    device: torch.device,
    all_reduce: str = "auto",
    num_local: int = 0,
    queue: HostQueue | None = None,
) -> Shard:
    """Join the process group: NCCL between GPUs, gloo between CPU processes. A single rank joins nothing.

    On AMD's GPUs RCCL goes by NCCL's name. all_reduce: `symmetric` or `auto` for small sums through symmetric memory,
    where that is possible; `nccl` for none; `host` for gloo between GPUs, by the functions of `queue`. num_local: see
    `Shard`. Raises ValueError where `symmetric` is asked for and is not possible.

    `rendezvous` is an init method of torch.distributed, or `unix://` and the path of the stage's own store, where its
    ranks are on several nodes. A `file://` one opens no listening port beyond the loopback
    pairs of gloo, which take no connection any more once every rank is here; `tcp://` lets TCPStore listen on every
    interface, so it is used only when the user asks for it.
    """
    is_gloo = device.type == "cpu" or all_reduce == "host"
    is_spread = rendezvous.startswith(SCHEME)
    store = None
    if world_size > 1:
        store = _collective(lambda: _join(rank, world_size, rendezvous, None if is_gloo else device))
    shard = Shard(rank, world_size, num_local=num_local, store=store)
    tell = log.info if rank == 0 else log.debug  # what is the same on all ranks
    if world_size > 1 and is_gloo:
        shard.barrier()  # all are connected to all
        refuse_connections()
    if world_size > 1 and queue is not None:
        tell("All sums over the ranks go through the memory of the host, which is slow")
        return replace(shard, collectives=HostCollectives(shard.collectives, queue, world_size))
    if world_size == 1 or all_reduce in ("nccl", "host") or (all_reduce == "auto" and device.type != "cuda"):
        return shard
    sums = _join_symmetric(shard, device, is_spread=is_spread)
    if isinstance(sums, SymmetricSum):
        tell("Small sums over the ranks go through symmetric memory")
        return replace(shard, small_sums=sums)
    if all_reduce == "symmetric":
        raise ValueError(f"--all-reduce is symmetric, which is not possible ({sums}): use --all-reduce auto")
    tell("All sums over the ranks go through NCCL, none through symmetric memory: %s", sums)
    return shard


def _join(rank: int, world_size: int, rendezvous: str, gpu: torch.device | None) -> SocketStore | None:
    """Become one of the process group, over NCCL from this GPU, or over gloo.

    A rank 0 that meets others at its own store answers there. What is returned has to last as long as the group.
    """
    path = rendezvous.removeprefix(SCHEME) if rendezvous.startswith(SCHEME) else None
    server = StoreServer(path) if path is not None and rank == 0 else None
    store = SocketStore(path, COLLECTIVE_TIMEOUT.total_seconds()) if path is not None else None
    place: dict[str, Any] = {"init_method": rendezvous} if store is None else {"store": store}
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        **place,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=gpu,
    )
    if path is not None:
        dist.barrier()  # all have come
    if server is not None:
        server.close()
    _set_pg_timeout(LOAD_TIMEOUT)
    return store


def _join_symmetric(shard: Shard, device: torch.device, *, is_spread: bool) -> SymmetricSum | str:
    return symmetric.join(
        TorchMemory(device),
        "they are on several nodes" if is_spread else _why_not_symmetric(shard, device),
        lambda problem: shard.first_problem(problem, device),
        rank=shard.rank,
        world_size=shard.world_size,
        device=device,
    )


def _why_not_symmetric(shard: Shard, device: torch.device) -> str | None:
    """What keeps this rank from sharing memory with the others, as far as it shows beforehand."""
    if device.type != "cuda":
        return "ranks on CPUs share no memory"
    if torch.version.hip is not None:
        return "it is untested on AMD GPUs"
    if TorchMemory.one_shot() is None:
        return f"torch {torch.__version__} has no one-shot all-reduce"
    # A stage's GPUs follow one another. torch ends the process where it is asked to share without such access.
    first = device.index - shard.rank
    peers = [first + rank for rank in range(shard.world_size) if rank != shard.rank]
    blind = [gpu for gpu in peers if not torch.cuda.can_device_access_peer(device, gpu)]
    return f"GPU {device.index} cannot read the memory of GPU {blind[0]}" if blind else None


class TorchMemory:
    """torch's `SymmetricMemory` of the process group. See `symmetric.SymmetricMemory`."""

    def __init__(self, device: torch.device):
        self._device = device

    @staticmethod
    def one_shot() -> Callable[..., object] | None:
        """torch's operator that copies a summand into a buffer and sums up; None in a torch that lacks it."""
        return getattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", None)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory  # takes long, and few servers need it

        buffer = symmetric_memory.empty(elements, dtype=dtype, device=self._device)
        symmetric_memory.rendezvous(buffer, _group())
        return buffer

    def sum(self, buffer: Tensor, tensor: Tensor) -> None:
        """See `symmetric.SymmetricMemory`. Each thread of the kernel reads a piece of `tensor` before it writes it."""
        operator = self.one_shot()
        assert operator is not None, "_why_not_symmetric has looked"
        operator(buffer, tensor, "sum", _group().group_name, tensor)


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _collective(call: Callable[[], Result]) -> Result:
    """Raises PeerLost where another rank is the cause; what failed here, as memory or the device, stays what it is."""
    try:
        return call()
    except RuntimeError as error:
        if _names_a_peer(error):
            raise PeerLost(f"lost contact with another rank: {error}") from error
        raise


def _names_a_peer(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed is that a peer, or the way to it, is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    # gloo raises plain RuntimeErrors, and NCCL the same class for its peers as for a failure on this device.
    text = str(error).lower()
    is_ours = type(error) not in (RuntimeError, dist.DistBackendError) or "cuda error" in text or "hip error" in text
    return not is_ours and any(words in text for words in PEER_IS_GONE)
