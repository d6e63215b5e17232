"""CUDA graphs without a GPU: one stream for all captures, and what a capture that fails leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from server.backends.cpu.device import CpuDevice
from server.backends.cuda.graph import CudaGraphCapture
from server.backends.device import CaptureFailed, DeviceLost

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more lines")
INVALIDATED = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@dataclass(eq=False)
class Stream:
    """A stream, which knows whether it is capturing."""

    number: int
    is_capturing: bool = False

    def wait_stream(self, other: Stream) -> None:
        pass


@dataclass
class FakeCuda:
    """What of `torch.cuda` a capture uses, with errors on demand."""

    beginning: RuntimeError | None = None
    ending: RuntimeError | None = None
    stays_capturing: bool = False
    streams: list[Stream] = field(default_factory=list)
    ran: list[tuple[Stream, bool]] = field(default_factory=list)  # each computation's stream, and whether it captured
    graphs: int = 0

    pools: list[tuple[object, WeakSet[object]]] = field(default_factory=list)  # and the graphs that hold them

    def __post_init__(self) -> None:
        self.current = Stream(0)

    def take(self, pool: object, graph: object) -> None:
        """As torch's allocators, which take no pool again that no graph holds any more."""
        graphs = next((graphs for other, graphs in self.pools if other is pool), None)
        if graphs is None:
            graphs = WeakSet()
            self.pools.append((pool, graphs))
        elif not graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        graphs.add(graph)

    def make_stream(self, device: object = None) -> Stream:
        self.streams.append(Stream(1 + len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    def compute(self) -> tuple[Tensor, ...]:
        self.ran.append((self.current, self.current.is_capturing))
        return (torch.ones(1),)


def fake(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    """Put `cuda` in the place of torch's."""

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            if cuda.beginning is not None:
                raise cuda.beginning
            cuda.take(pool, self)
            cuda.current.is_capturing = True

        def capture_end(self) -> None:
            assert cuda.current.is_capturing
            cuda.current.is_capturing = cuda.stays_capturing
            if cuda.ending is not None:
                raise cuda.ending
            cuda.graphs += 1

        def reset(self) -> None:
            pass

        def replay(self) -> None:
            pass

    @contextmanager
    def capturing(graph: Graph, pool: object, capture_error_mode: str, stream: Stream | None = None) -> Iterator[None]:
        """As torch 2.13's own: its stream is left only where the capture's end raises nothing."""
        context = cuda.stream(stream or cuda.make_stream())
        context.__enter__()
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()
            context.__exit__(None, None, None)

    replaced = {
        "Stream": cuda.make_stream,
        "CUDAGraph": Graph,
        "graph": capturing,
        "stream": cuda.stream,
        "current_stream": lambda: cuda.current,
        "is_current_stream_capturing": lambda: cuda.current.is_capturing,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": object,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return cuda


def capture_of(cuda: FakeCuda) -> CudaGraphCapture:
    return CudaGraphCapture((1, 2), cuda.make_stream())  # type: ignore[arg-type]


def test_everything_runs_and_is_captured_on_one_stream_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream, and one that is born inside a capture belongs to the graph's pool."""
    pytest.importorskip("triton")
    from server.backends.cuda.backend import CudaBackend

    cuda = fake(monkeypatch, FakeCuda())
    backend = CudaBackend(CpuDevice(), torch.float32)
    for capture in (backend.graph_capture(None), backend.graph_capture((1, 2))):  # the profile run's, and the server's
        for _ in range(3):
            capture(cuda.compute)
    assert 1 == len(cuda.streams) and 6 == cuda.graphs
    assert [(cuda.streams[0], is_capturing) for _ in range(6) for is_capturing in (False, True)] == cuda.ran


def failing(cuda: FakeCuda, error: BaseException, *, at: int = 2) -> CudaGraphCapture:
    """A capture whose computation raises: at 1, before the capture; at 2, in it."""
    compute = cuda.compute

    def fail() -> tuple[Tensor, ...]:
        results = compute()
        if at == len(cuda.ran):
            raise error
        return results

    cuda.compute = fail  # type: ignore[method-assign]
    return capture_of(cuda)


@pytest.mark.parametrize("ending", [None, INVALIDATED], ids=["its end is good", "its end raises"])
def test_a_failed_capture_names_its_cause_and_leaves_its_stream(
    monkeypatch: pytest.MonkeyPatch, ending: RuntimeError | None
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    cuda = fake(monkeypatch, FakeCuda(ending=ending))
    caller = cuda.current
    with pytest.raises(CaptureFailed, match=r"^OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB$"):
        failing(cuda, OUT_OF_MEMORY)(cuda.compute)
    assert caller is cuda.current and not cuda.streams[0].is_capturing


def test_the_next_capture_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    cuda = fake(monkeypatch, FakeCuda(ending=INVALIDATED))
    capture = failing(cuda, OUT_OF_MEMORY)
    with pytest.raises(CaptureFailed):
        capture(cuda.compute)
    cuda.ending = None
    capture(cuda.compute)()
    assert 1 == cuda.graphs


def test_graphs_share_a_pool_until_none_of_them_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph goes with its failed capture, or because another rank has none."""
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    cuda = fake(monkeypatch, FakeCuda())
    capture = failing(cuda, OUT_OF_MEMORY)
    with pytest.raises(CaptureFailed):
        capture(cuda.compute)
    replays = [capture(cuda.compute) for _ in range(3)]
    assert 2 == len(cuda.pools)
    replays.clear()
    replays.append(capture(cuda.compute))
    assert 3 == len(cuda.pools)


def test_an_end_that_raises_by_itself_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    cuda = fake(monkeypatch, FakeCuda(ending=INVALIDATED))
    with pytest.raises(CaptureFailed, match="previous error during capture"):
        capture_of(cuda)(cuda.compute)


@pytest.mark.parametrize(
    ("cuda", "error", "version", "said"),
    [
        (FakeCuda(ending=INVALIDATED), OUT_OF_MEMORY, "2.11.0", "torch 2.11.0 cannot recover from: OutOfMemoryError"),
        (FakeCuda(ending=INVALIDATED, stays_capturing=True), OUT_OF_MEMORY, "2.13.0", "cannot leave the capture"),
        (FakeCuda(beginning=INVALIDATED), OUT_OF_MEMORY, "2.13.0", "previous error during capture"),
        (FakeCuda(), ILLEGAL, "2.13.0", "only a fresh start opens it again: CUDA error: an illegal memory access"),
    ],
    ids=["old torch", "stuck stream", "no beginning", "lost device"],
)
def test_what_cannot_be_recovered_is_a_lost_device(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, error: RuntimeError, version: str, said: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    fake(monkeypatch, cuda)
    with pytest.raises(DeviceLost, match=said):
        failing(cuda, error)(cuda.compute)


def test_out_of_memory_in_a_capture_that_ends_well_is_survived_by_old_torch_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    cuda = fake(monkeypatch, FakeCuda())
    with pytest.raises(CaptureFailed):
        failing(cuda, OUT_OF_MEMORY)(cuda.compute)


def test_what_fails_before_the_capture_is_no_matter_of_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake(monkeypatch, FakeCuda())
    with pytest.raises(torch.OutOfMemoryError):
        failing(cuda, OUT_OF_MEMORY, at=1)(cuda.compute)
