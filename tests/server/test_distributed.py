"""Ranks and what ties them: whose fault an error is, and that no rank does what another one does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from server.distributed import PeerLost, Shard

DEVICE_FAILED = "CUDA error: an illegal memory access was encountered"


def two_ranks_whose_all_reduce(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Callable[[], object]:
    """An all-reduce of two ranks that fails with `error`."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    return lambda: Shard(0, 2).all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("The client socket has timed out after 2000ms"),
        dist.DistStoreError("Timed out after 3 seconds waiting for clients. 1/2 clients joined."),
        dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"),
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:424."),
        RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("Wait timeout"),
    ],
    ids=str,
)
def test_what_a_peer_caused_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    with pytest.raises(PeerLost):
        two_ranks_whose_all_reduce(monkeypatch, error)()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError(DEVICE_FAILED),
        RuntimeError(DEVICE_FAILED),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        RuntimeError("Tensors must be contiguous"),
    ],
    ids=str,
)
def test_what_failed_here_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised:
        two_ranks_whose_all_reduce(monkeypatch, error)()
    assert error is raised.value
