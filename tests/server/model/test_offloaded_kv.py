"""KV blocks that come and go give the tokens of blocks that stay, and what goes wrong is said in a sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from host.direct_io import PAGE
from server import loading
from server.backends.cpu import Kernels
from server.backends.cpu.device import CpuDevice
from server.blocks import BLOCK_SIZE
from server.config import ShardConfig
from server.model.offloaded_kv import OffloadedKv, Reach
from server.offload import disk_store
from server.offload.disk_store import DiskError
from server.offload.places import OnDisk
from server.offload.share import Share
from server.pb import generate_pb2 as pb
from server.stepping.cache import KVShape
from server.stepping.engine import Engine
from tests.cpu_kernels import asked
from tests.server.checkpoints import CASES, VARIED, Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Prompt, generate, load_engine
from tests.server.offload.streaming import offloaded, spec_of, streaming
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks

SIZES = {"total_tokens": 64, "warms_up": False}
SHARES = [("0%", 1), ("50%", 1), ("50%", 64 << 20)]  # on the device, and of an area: all sequences at once or a few


def tokens(engine: Engine) -> list[list[int]]:
    """The tokens of mixed prompts, which join and leave at different steps."""
    return [prompt.tokens for prompt in generate(engine, tensor_parallel.prompts())]


def sizes(folder: Path) -> dict[str, Any]:
    """Of an engine that has just the blocks that `tokens` takes."""
    return {"tokens": 17 * BLOCK_SIZE if spec_of(folder).encoder else 10 * BLOCK_SIZE, **SIZES}


def resident_tokens(folder: Path, **settings: Any) -> list[list[int]]:
    return tokens(load_engine(folder, **sizes(folder), **settings))


@contextmanager
def offloaded_engine(
    folder: Path, tmp_path: Path, on_device: str = "0%", stage_bytes: int = 1, **settings: Any
) -> Iterator[tuple[Engine, OffloadedKv]]:
    with offloaded(folder, on_device, tmp_path, stage_bytes=stage_bytes) as placement:
        yield load_engine(folder, kv_placement=placement, **(sizes(folder) | settings)), placement


def moved(placement: OffloadedKv) -> bool:
    """Whether blocks left the device and came back."""
    assert placement.staging is not None
    return placement.staging.times.read_blocks > 0 and placement.staging.times.written_blocks > 0


def check_family(checkpoints: Checkpoints, tmp_path: Path, case: str, shares: Sequence[tuple[str, int]]) -> None:
    folder, _ = checkpoints(case)
    expected = resident_tokens(folder)
    for on_device, stage_bytes in shares:
        with offloaded_engine(folder, tmp_path, on_device, stage_bytes) as (engine, placement):
            assert expected == tokens(engine), on_device
            assert moved(placement)


@pytest.mark.parametrize("case", VARIED)
def test_blocks_come_and_go(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    check_family(checkpoints, tmp_path, case, SHARES[: 1 + VARIED.index(case) % 2])


@pytest.mark.offload
@pytest.mark.parametrize("case", CASES)
def test_every_family_comes_and_goes(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    check_family(checkpoints, tmp_path, case, SHARES)


@pytest.mark.parametrize(
    ("case", "dtype", "cache"),
    [("llama", torch.bfloat16, "int8"), ("t5", torch.float32, "fp8_e4m3"), ("mistral", torch.bfloat16, "auto")],
)
def test_kernels_and_formats_of_the_cache(
    checkpoints: Checkpoints, tmp_path: Path, kernels: Kernels, case: str, dtype: torch.dtype, cache: str
) -> None:
    folder, _ = checkpoints(case)
    settings = {"kernels": kernels, "dtype": dtype, "kv_cache": cache}
    expected = resident_tokens(folder, captured=False, **settings)
    with offloaded_engine(folder, tmp_path, "20%", **settings) as (engine, placement):
        assert expected == tokens(engine)
        assert moved(placement)


@pytest.mark.offload
@pytest.mark.parametrize("case", ["bloom", "mixtral", "gemma3_text", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_format_of_the_cache(
    checkpoints: Checkpoints, tmp_path: Path, kernels: Kernels, case: str, dtype: torch.dtype, cache: str
) -> None:
    test_kernels_and_formats_of_the_cache(checkpoints, tmp_path, kernels, case, dtype, cache)


def test_pages_are_read_to_where_they_are_used(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    def no_buffer(num_bytes: int) -> None:
        raise AssertionError("pages take no way round")

    folder, _ = checkpoints(
        "bloom"
    )  # 8 heads of 8 numbers in float32: a block's keys are a page, and so are its values
    with offloaded_engine(folder, tmp_path, kernels=kernels) as (engine, placement):
        assert engine.kv_shape.layer_block_bytes == 2 * PAGE
        monkeypatch.setattr(disk_store, "map_pages", no_buffer)
        found = tokens(engine)
        assert moved(placement)
    assert resident_tokens(folder, kernels=kernels, captured=False) == found


def test_weights_stream_beside_blocks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    with (
        streaming(folder, "0%", tmp_path) as weights,
        offloaded_engine(folder, tmp_path, placement=weights) as (engine, placement),
    ):
        assert resident_tokens(folder) == tokens(engine)
        assert moved(placement) and weights.streamed_bytes


def test_blocks_are_used_again(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What the last sequences wrote late would be found in the next ones' blocks, which have the same ids."""
    folder, _ = checkpoints("llama")
    expected = resident_tokens(folder)
    with offloaded_engine(folder, tmp_path) as (engine, _):
        for _ in range(3):
            assert expected == tokens(engine)


def test_prefixes_are_shared(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("mistral")  # with a window: what it does not see of the prefix is not read

    def prompts() -> list[Prompt]:
        prefix = list(range(10, 58))
        return [Prompt([*prefix, 5, 6, 7]), *(Prompt([*prefix, 8, n], cached=(0, 48), joins_at=3) for n in (9, 10))]

    expected = [p.tokens for p in generate(load_engine(folder, **sizes(folder)), prompts())]
    with offloaded_engine(folder, tmp_path, "10%") as (engine, placement):
        assert expected == [p.tokens for p in generate(engine, prompts())]
        assert moved(placement)


def test_blocks_before_a_window_stay_where_they_are() -> None:
    blocks = range(100, 110)
    assert list(blocks[:4]) == list(Reach(blocks, start=50, length=1).read(window=0))
    assert list(blocks[1:4]) == list(Reach(blocks, start=50, length=1).read(window=24))  # tokens 27 … 50
    assert list(blocks[2:4]) == list(Reach(blocks, start=55, length=1).read(window=24))  # tokens 32 … 55
    assert [103] == list(Reach(blocks, start=50, length=1).written)
    assert [103, 104] == list(Reach(blocks, start=50, length=15).written)
    assert [] == list(Reach(blocks, start=50, length=0).written)  # an encoder's, which the decoder only reads


def test_ranks_generate_the_tokens_of_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folders = [checkpoints(case)[0] for case in ("llama", "mt5")]
    expected = {f"{folder}@50%,0%,1": resident_tokens(folder) for folder in folders}
    assert [expected] * 2 == run_ranks(list(expected), 2, tmp_path / "rendezvous")


@pytest.mark.offload
def test_ranks_with_every_family(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folders = {case: checkpoints(case)[0] for case in CASES}
    expected = {case: tensor_parallel.tokens(folder, tensor_parallel.Shard()) for case, folder in folders.items()}
    models = {f"{folder}@{shares}": case for case, folder in folders.items() for shares in ("0%,0%,1", "100%,50%,1")}
    for found in run_ranks(list(models), 2, tmp_path / "rendezvous"):
        assert {model: expected[case] for model, case in models.items()} == found


def test_all_on_the_device_is_as_without_offloading(checkpoints: Checkpoints, tmp_path: Path, kernels: Kernels) -> None:
    """A size that holds all: layers have tensors of their own, steps are captured, no file is made."""
    folder, _ = checkpoints("llama")
    before = len(os.listdir("/proc/self/fd"))
    with offloaded_engine(folder, tmp_path, "1GB", kernels=kernels) as (engine, placement):
        assert engine.why_not_captured is None and engine.graphs is not None
        assert placement.staging is None and not placement.offloaded
        assert engine.num_blocks == engine._kv_caches[0].shape[1]
        assert placement.device_bytes == engine.num_blocks * engine.kv_shape.bytes_per_block
        assert before == len(os.listdir("/proc/self/fd"))
        assert resident_tokens(folder, kernels=kernels) == tokens(engine)


def test_what_is_released_is_given_back(checkpoints: Checkpoints, tmp_path: Path, kernels: Kernels) -> None:
    folder, _ = checkpoints("llama")
    before = len(os.listdir("/proc/self/fd"))
    with offloaded_engine(folder, tmp_path, kernels=kernels) as (engine, _):
        assert "KV blocks stream" == engine.why_not_captured
        engine.allocate(640, total_tokens=64)  # what was there before goes
        tokens(engine)
        assert before + 1 == len(os.listdir("/proc/self/fd"))
        engine.release()
        assert before == len(os.listdir("/proc/self/fd"))
        assert not [t for t in threading.enumerate() if t.name.startswith("offload")]


def fail_once(call: Callable[..., int], number: int) -> Callable[..., int]:
    """The same system call, of which one fails as on a disk that breaks."""
    calls = iter(range(10**9))

    def failing(*arguments: Any) -> int:
        if next(calls) == number:
            raise OSError(5, "Input/output error")
        return call(*arguments)

    return failing


@pytest.mark.parametrize(("name", "sentence"), [("preadv", "cannot be read back"), ("pwritev", "cannot be written")])
@pytest.mark.parametrize("number", [0, 5])
def test_a_disk_that_fails_fails_a_step(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str, number: int
) -> None:
    """The sequences of that step are gone, and those that come next are computed as ever."""
    folder, _ = checkpoints("llama")
    expected = resident_tokens(folder)
    with offloaded_engine(folder, tmp_path) as (engine, _):
        monkeypatch.setattr(disk_store.os, name, fail_once(getattr(os, name), number))
        with pytest.raises(DiskError, match=rf"--offload-dir .*: KV blocks {sentence} \(Input/output error\)"):
            tokens(engine)
        engine.launch(pb.StepRequest(retire=range(5)))  # those that were not in that step
        assert expected == tokens(engine)


def test_a_file_that_shrinks_is_an_error_and_no_end(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    with offloaded_engine(folder, tmp_path) as (engine, placement):
        descriptor = placement._store._stores[0][1].descriptor  # type: ignore[union-attr]
        add = pb.StepRequest(chunk_ids=[0], chunk_tokens=[20])
        add.add.add(id=0, token_ids=range(4, 24), blocks=[8, 9], sampling=GREEDY)
        engine.launch(add)
        os.ftruncate(descriptor, 4096)
        with pytest.raises(DiskError, match="the file of KV blocks ends at byte"):
            engine.launch(pb.StepRequest(decode=True))
        assert resident_tokens(folder) == tokens(engine)  # what is written makes the file longer again


def test_a_disk_without_room_is_known_at_once(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder, _ = checkpoints("llama")
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(disk_store.os, "posix_fallocate", full)
    with (
        pytest.raises(ValueError, match=r"--offload-dir .*: 0.00 GB of KV blocks do not fit there .No space left"),
        offloaded_engine(folder, tmp_path),
    ):
        pass
    assert before == len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True)
class SmallDisk(OnDisk):
    num_bytes: int = 0

    def room(self) -> int:
        return self.num_bytes


class Bounded:
    """A place with room for so many bytes, of slots that are as large as what they hold."""

    name = "elsewhere"

    def __init__(self, share: str, num_bytes: int):
        self.share, self._room = Share.parse(share), num_bytes

    def room(self) -> int:
        return self._room

    def slot_bytes(self, block_bytes: int) -> int:
        return block_bytes

    def open(self, *_: Any) -> Any:
        raise AssertionError("nothing is allocated here")


@pytest.mark.parametrize(
    ("on_device", "places", "blocks", "stored"),
    [
        ("0%", [("100%", 1000)], 1000, (1000,)),
        ("50%", [("100%", 1000)], 191, (96,)),  # the device has 100, of which three areas of 5 in one layer take 5
        ("90%", [("100%", 1000)], 106, (11,)),
        ("10%", [("100%", 30)], 33, (30,)),  # the disk is the bound: 3 of 33 stay
        ("0.5MB", [("100%", 1000)], 1040, (1000,)),  # 40 blocks are not quite so much
        ("0%", [("40%", 100), ("100%", 1000)], 252, (100, 152)),  # host and disk, the host is the bound
    ],
)
def test_the_places_bound_the_cache(
    on_device: str, places: list[tuple[str, int]], blocks: int, stored: tuple[int, ...]
) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=4, head_dim=8, dtype=torch.float32)
    size = shape.bytes_per_block
    placement = OffloadedKv(
        Share.parse(on_device), [Bounded(s, n * size) for s, n in places], [0] * 3, 0, stage_bytes=1
    )
    room = placement.room(shape, 100 * size, longest=5)
    assert blocks * size == room
    assert stored == placement._divide(shape, blocks, 5).stored


def test_a_server_warms_up_with_what_device_and_disk_hold(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("bloom")
    with offloaded_engine(folder, tmp_path, "25%", tokens=4096, total_tokens=128, warms_up=True) as (engine, placement):
        assert 256 == engine.num_blocks
        assert placement.offloaded.startswith("64 on the device, 192 in --offload-dir (0.00 GB), through 0.00 GB")
        assert resident_tokens(folder) == tokens(engine)
    small = SmallDisk(tmp_path, "--offload-dir", 1, None, num_bytes=48 * engine.kv_shape.bytes_per_block)
    with (
        offloaded(folder, "0%", tmp_path, places=[small]) as placement,
        pytest.raises(ValueError, match=r"4096, but free memory with --offload-dir holds a KV cache of 768 tokens"),
    ):
        load_engine(folder, kv_placement=placement, tokens=4096, total_tokens=128)


def shard_config(tmp_path: Path, **settings: Any) -> ShardConfig:
    return ShardConfig(
        model_path=str(DEMO),
        weights_path=str(DEMO),
        rank=0,
        world_size=1,
        socket_path=str(tmp_path / "socket"),
        rendezvous=f"file://{tmp_path / 'rendezvous'}",
        cpu_kernels=asked(),
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "--kv-on-device 50% leaves KV blocks to a disk: name a folder on one with --offload-dir"),
        ({"offload_dir": "/tmp", "kv_on_host": "10%"}, "--kv-on-host is for GPUs: .* leave it out"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        loading.load(shard_config(tmp_path, device="cpu", kv_on_device="50%", **settings))


def test_a_folder_that_is_none_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    with (
        pytest.raises(ValueError, match=r"--offload-dir .*nothing: no file can be made there"),
        offloaded_engine(folder, tmp_path / "nothing", warms_up=True),
    ):
        pass


def test_the_settings_are_what_the_engine_does(tmp_path: Path, kernels: Kernels) -> None:
    config = shard_config(tmp_path, device="cpu", kv_on_device="50%", offload_dir=str(tmp_path))
    with ExitStack() as stack:
        engine, _ = loading.load(config)
        stack.callback(loading.collectives.disconnect)
        stack.callback(engine.release)
        engine.allocate(20 * BLOCK_SIZE, total_tokens=64)
        assert "10 on the device, 10 in --offload-dir" in engine.kv_placement.offloaded
        assert isinstance(engine.device, CpuDevice)
        assert "KV blocks stream" == engine.why_not_captured
