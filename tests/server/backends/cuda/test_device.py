"""What is decided about a GPU without one: how much of its memory is used, and what computes on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends import choose
from server.backends.cuda.device import HEADROOM_BYTES, CudaDevice
from server.backends.device import PAGE_BYTES, Values
from server.backends.reference import ReferenceBackend

GIB = 2**30


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A GPU of 80 GiB, of which 30 are free."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    return CudaDevice(0)


@pytest.mark.parametrize(("fraction", "usable"), [(1.0, 30), (0.75, 10)])
def test_some_memory_stays_free_beside_the_kv_cache(device: CudaDevice, fraction: float, usable: int) -> None:
    assert HEADROOM_BYTES >= GIB
    assert usable * GIB - HEADROOM_BYTES == device.free_bytes(fraction=fraction, world_size=1)


def test_what_is_left_is_all_that_is_left(device: CudaDevice) -> None:
    assert 30 * GIB == device.left_bytes(fraction=1.0, world_size=1, kv_bytes=0)
    assert 0 == device.left_bytes(fraction=0.05, world_size=1, kv_bytes=0)


@pytest.mark.parametrize("values", [[[1, 2], [3, 255]], np.array([[1, 2], [3, 255]], np.uint8), []], ids=str)
def test_numbers_and_arrays_are_uploaded_from_pinned_memory(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, values: Values
) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    device.torch_device = torch.device("cpu")  # here pinned memory cannot be had, but asking for it may be refused
    found = device.upload(values, torch.uint8)
    assert found is pinned[0] and torch.equal(torch.tensor(values, dtype=torch.uint8), found)


def test_the_hosts_tier_pins_what_it_needs_and_gives_it_back(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's allocator of pinned memory would make 128 GiB of 70."""
    pinned: dict[int, int] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
            pinned[address] = num_bytes
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            del pinned[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    parts = [torch.zeros(10, 3000, dtype=torch.int8), torch.zeros(10, 1000, dtype=torch.int8)]
    copies = device.host_copies(parts, 1100)
    assert (1100, 4000) == copies.slots.shape
    assert 4_400_000 <= sum(pinned.values()) < 4_400_000 + PAGE_BYTES
    copies.close()
    assert not pinned


def test_a_gpu_without_matrix_units_for_bfloat16_runs_the_reference_and_says_why(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    backend = choose(device, torch.float16)
    assert ReferenceBackend is type(backend)
    assert "the GPU kernels need compute capability 8.0, and this GPU has 7.5" == backend.description


def test_an_amd_gpu_runs_the_reference_and_says_why(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compute capability, as torch calls it, is 9.4 or 9.0, and its torch may have a Triton."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    backend = choose(device, torch.bfloat16)
    assert ReferenceBackend is type(backend)
    assert "the GPU kernels are for NVIDIA GPUs, and torch is built for AMD's (ROCm 6.4.43482)" == backend.description
    assert backend.why_not_captured(ArchSpec, None, 1) is not None  # type: ignore[arg-type]
