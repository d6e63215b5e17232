"""Weights that stream give the tokens of weights that stay, and what goes wrong is said in a sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.arch.stages import stages_of
from server.backends.cpu import Kernels
from server.backends.cpu.device import CpuDevice
from server.backends.device import map_pages
from server.backends.protocol import LinearFormat
from server.backends.reference import ReferenceBackend
from server.backends.reference.linear import DenseFormat
from server.config import ShardConfig
from server.model.placement import automatic, choose_placement, described
from server.model.streamed import Streaming
from server.model.transformer import kv_shape
from server.offload import disk_store
from server.offload.auto import Auto, Wanted
from server.offload.cost import Rates
from server.offload.disk_store import DiskError, DiskStore
from server.offload.ring import Image, Ring, StoredImage, keep
from server.offload.share import Share
from server.offload.stores import HostStore, StagedStore
from server.quantisation.kv import AS_COMPUTED
from server.ranks.collectives import Shard
from server.stepping.cache import KVShape
from tests.combinations import by_turns
from tests.server.checkpoints import CASES, VARIED, Checkpoints
from tests.server.driver import generate, load_engine
from tests.server.offload.streaming import LinkedDevice, spec_of, streaming, weight_file
from tests.server.offload.test_cost import SmallDevice
from tests.server.ranks import tensor_parallel

# Formats of weights that move: dense, of integers, of levels, and with inputs that are rounded.
STORED = ("int8", "int4", "bitsandbytes-nf4", "fp8")


def tokens(folder: Path, tmp_path: Path, on_device: str, **settings: object) -> tuple[list[list[int]], int]:
    """The tokens of mixed prompts, and how many layers streamed."""
    with streaming(folder, on_device, tmp_path) as placement:
        engine = load_engine(folder, placement=placement, tokens=1024, warms_up=False, **settings)  # type: ignore[arg-type]
        found = [prompt.tokens for prompt in generate(engine, tensor_parallel.prompts())]
        assert not [p for s in placement.stored for p in s.image._pieces if p.tensor._base is not None], "kept alive"
        return found, len(placement.stored)


def resident_tokens(folder: Path, **settings: object) -> list[list[int]]:
    engine = load_engine(folder, tokens=1024, warms_up=False, **settings)  # type: ignore[arg-type]
    return [prompt.tokens for prompt in generate(engine, tensor_parallel.prompts())]


@pytest.mark.parametrize(
    ("case", "on_device"),
    [
        *by_turns(VARIED, ("0%", "50%")),
        *(pytest.param(*both, marks=pytest.mark.offload) for both in by_turns(CASES, ("50%", "0%"))),
    ],
)
def test_every_family_streams(checkpoints: Checkpoints, tmp_path: Path, case: str, on_device: str) -> None:
    folder, _ = checkpoints(case)
    found, streamed = tokens(folder, tmp_path, on_device)
    assert resident_tokens(folder) == found and streamed > 0


@pytest.mark.parametrize(("case", "quantise"), by_turns(("bloom", "mixtral", "t5", "mixtral"), [None, *STORED]))
def test_every_kind_of_panel_streams(
    checkpoints: Checkpoints, tmp_path: Path, kernels: Kernels, case: str, quantise: str | None
) -> None:
    folder, _ = checkpoints(case)
    settings = {"kernels": kernels, "quantise": quantise, "dtype": torch.bfloat16}
    expected = resident_tokens(folder, captured=False, **settings)
    assert expected == tokens(folder, tmp_path, "0%", **settings)[0]


@pytest.mark.parametrize("quantise", STORED)
def test_what_defines_correct_streams(checkpoints: Checkpoints, tmp_path: Path, quantise: str) -> None:
    folder, _ = checkpoints("llama")
    expected = resident_tokens(folder, quantise=quantise)
    assert expected == tokens(folder, tmp_path, "0%", quantise=quantise)[0]


def offloading(folder: Path, on_host: str, disk: Path) -> ShardConfig:
    """Settings of a shard none of whose layers stay on the device."""
    return ShardConfig(
        str(folder), str(folder), 0, 1, "", "", weights_on_device="0%", weights_on_host=on_host, offload_dir=str(disk)
    )


@pytest.mark.parametrize("on_host", ["100%", "40%", "0%"])
def test_weights_reach_a_device_with_memory_of_its_own(checkpoints: Checkpoints, tmp_path: Path, on_host: str) -> None:
    folder, _ = checkpoints("llama")
    placement = choose_placement(offloading(folder, on_host, tmp_path), spec_of(folder), LinkedDevice())
    assert isinstance(placement, Streaming)
    engine = load_engine(folder, placement=placement, tokens=1024, warms_up=False)
    assert resident_tokens(folder) == [prompt.tokens for prompt in generate(engine, tensor_parallel.prompts())]
    kinds = {type(stored.store) for stored in placement.stored}
    assert {"100%": {HostStore}, "40%": {HostStore, StagedStore}, "0%": {StagedStore}}[on_host] == kinds


def test_auto_streams_what_does_not_fit_and_says_so(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("gemma3_text")  # 7 layers
    with streaming(folder, "0%", tmp_path) as nothing:
        load_engine(folder, placement=nothing, warms_up=False)
    layer = nothing.streamed_bytes // 7
    wanted = Wanted(16, 1, 16, kv_bytes_per_token=1, head_bytes=0, later_bytes=0, step_bytes=0)
    auto = Auto(SmallDevice(4 * layer + 16), Shard(), wanted, rates=lambda _: Rates(1e9, [(1, 1e-12)]))
    with streaming(folder, "0%", tmp_path) as placement:
        placement.share = auto
        engine = load_engine(folder, placement=placement, tokens=1024, warms_up=False)
        assert resident_tokens(folder) == [prompt.tokens for prompt in generate(engine, tensor_parallel.prompts())]
        assert (3 * layer, 4 * layer) == (placement.resident_bytes, placement.streamed_bytes)
        assert re.search(
            r"4 of 7 layers, .* stream through .*; chosen for 1 sequences of 16 tokens", described(placement)
        )


def kept_of(spec: ArchSpec) -> KVShape:
    return kv_shape(spec, stages_of(spec, 1)[0], Shard(), torch.float32, AS_COMPUTED)


@pytest.mark.parametrize("case", ["gemma3_text", "gemma4-e", "mistral", "qwen3_next", "mamba2", "llama"])
def test_auto_counts_what_a_warm_up_keeps(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    folder, _ = checkpoints(case)
    limits = {"max_sequences": 2, "max_total_tokens": 4096, "max_batch_prefill_tokens": 64}
    config = replace(offloading(folder, None, tmp_path), weights_on_device="auto", **limits)
    spec = spec_of(folder)
    auto = automatic(config, spec, ReferenceBackend(CpuDevice()), torch.float32, Shard(), kept_of(spec))
    assert auto is not None
    kept = load_engine(folder, tokens=4096, rings=True).kv_shape
    wanted = auto.wanted
    assert kept.bytes_per_token == wanted.kv_bytes_per_token
    assert kept.bytes_per_sequence == wanted.state_bytes + wanted.ring_bytes
    assert bool(wanted.ring_bytes) == (case in ("gemma3_text", "gemma4-e", "mistral"))
    assert bool(wanted.state_bytes) == (case in ("qwen3_next", "mamba2"))


def test_auto_leaves_all_where_all_fits(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    config = replace(offloading(folder, None, tmp_path), weights_on_device="auto", max_sequences=2, max_total_tokens=64)
    spec = spec_of(folder)
    auto = automatic(config, spec, ReferenceBackend(CpuDevice()), torch.float32, Shard(), kept_of(spec))
    placement = choose_placement(config, spec, CpuDevice(), auto)
    assert isinstance(placement, Streaming)
    load_engine(folder, placement=placement, warms_up=False)
    assert (0, None) == (len(placement.stored), placement.times)
    assert re.fullmatch(r"nothing; 0\.00 GB of layers fit beside a KV cache of 128 tokens", described(placement))


def test_reads_and_layers_are_noted(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    with streaming(folder, "0%", tmp_path) as placement:
        engine = load_engine(folder, placement=placement, tokens=1024, warms_up=False)
        generate(engine, tensor_parallel.prompts())
        times, count = placement.times, len(placement.stored)
    assert times is not None and times.pass_bytes == placement.streamed_bytes
    layers = [span.layer for span in times.computed]
    assert len(layers) > count and [number % count for number in range(len(layers))] == layers
    assert {span.layer for span in times.reads} == set(range(count))
    assert all(span.began_s < span.ended_s for span in (*times.reads, *times.computed))


def test_a_cpu_has_no_host_beside_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    with pytest.raises(ValueError, match="--weights-on-host is for GPUs: a CPU's memory is the device's"):
        choose_placement(offloading(folder, "5GB", tmp_path), spec_of(folder), CpuDevice())


def test_a_share_is_spread_over_the_layers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("gemma3_text")  # 7 layers
    with streaming(folder, "45%", tmp_path) as placement:
        load_engine(folder, placement=placement, warms_up=False)
        layer = placement.resident_bytes // 3
        assert 3 * layer == placement.resident_bytes and 4 * layer == placement.streamed_bytes
    with streaming(folder, f"{(2 * layer + 10) / 1e6}MB", tmp_path) as placement:
        load_engine(folder, placement=placement, warms_up=False)
        assert 2 * layer == placement.resident_bytes


class OpaqueFormat(DenseFormat):
    """A weight in an order of which only an operator knows, as oneDNN's, on any processor."""

    memory = ()


class OpaqueBackend(ReferenceBackend):
    """Dense weights that cannot move."""

    def dense(self, weight: Tensor, *, is_gated: bool) -> LinearFormat:
        return OpaqueFormat(weight, is_gated=is_gated)


def test_weights_that_cannot_move_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    with streaming(folder, "0%", tmp_path) as placement, pytest.raises(ValueError, match=r"cannot stream.*C\+\+"):
        load_engine(folder, placement=placement, backend=OpaqueBackend(CpuDevice()), warms_up=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("40%", Share(fraction=0.4)), ("6GB", Share(num_bytes=6 * 10**9)), ("5.5 GiB", Share(num_bytes=11 * 2**29))],
)
def test_shares_as_people_write_them(text: str, expected: Share) -> None:
    assert expected == Share.parse(text)


@pytest.mark.parametrize("text", ["", "40", "-1GB", "101%", "nan%", "1e9GB", "6 TB", "4GB "[:-2] + "b"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a share"):
        Share.parse(text)


class _Weights:
    """A `Movable` of one tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.memory: Sequence[torch.Tensor] = [tensor]

    def moved(self) -> None:
        """Nobody else knows where it is."""


def _stored(file: DiskStore, count: int) -> list[StoredImage]:
    """Images whose number fills their weights."""
    found = []
    slot = map_pages(1 << 16)
    for number in range(count):
        image = Image([_Weights(torch.full((5000,), float(number)))])
        image.write(slot)
        found.append(StoredImage(image, file, keep(CpuDevice(), file, slot, image.nbytes)))
    return found


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4] * 3, [0, 1, 4, 4, 2, 0, 3, 3, 1], [2], [4, 3, 2, 1, 0]])
@pytest.mark.parametrize("slots", [2, 3])
def test_a_ring_brings_what_is_asked_for(tmp_path: Path, order: list[int], slots: int) -> None:
    file = weight_file(tmp_path)
    stored = _stored(file, 5)
    ring = Ring(CpuDevice(), stored, [1, 2, 3, 4, 0], [map_pages(1 << 16) for _ in range(slots)])
    for number in order:
        ring.bring(number)
        (tensor,) = stored[number].image._formats[0].memory
        assert torch.equal(torch.full((5000,), float(number)), tensor)
    file.close()


def test_a_file_that_shrinks_is_an_error_and_no_end(tmp_path: Path) -> None:
    file = weight_file(tmp_path)
    stored = _stored(file, 3)
    ring = Ring(CpuDevice(), stored, [1, 2, 0], [map_pages(1 << 16) for _ in range(2)])
    ring.bring(0)
    whole = os.fstat(file.descriptor).st_size
    os.ftruncate(file.descriptor, 4096)
    for _ in range(2):
        with pytest.raises(DiskError, match=r"--offload-dir .*: the file of weights ends at byte"):
            ring.bring(2)
    os.ftruncate(file.descriptor, whole)  # holes read as zeros: nothing but the ring is looked at here
    ring.bring(2)
    file.close()


def test_a_file_that_is_closed_twice_closes_nobody_elses(tmp_path: Path) -> None:
    """Its number may be a socket's by then."""
    file = weight_file(tmp_path)
    number = file.descriptor
    file.close()
    other, unused = os.pipe()
    try:
        assert number in (other, unused)
        file.close()
        os.fstat(number)
    finally:
        os.close(other)
        os.close(unused)


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store.os, "pwritev", full)
    file = weight_file(tmp_path)
    with pytest.raises(
        DiskError,
        match=r"weights cannot be written .No space left on device. behind the first 0\.00 GB: free space there",
    ):
        _stored(file, 1)
    file.close()


def test_a_full_disk_says_how_much_goes_there(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoints("llama")
    monkeypatch.setattr(disk_store.os, "pwritev", full)
    with streaming(folder, "0%", tmp_path) as placement, pytest.raises(DiskError, match=r"; about 0\.00 GB go there"):
        load_engine(folder, placement=placement, warms_up=False)
    placement.stores = [(Share(num_bytes=6), placement.stores[0][1]), *placement.stores]
    placement._share = Share(fraction=0.25)
    assert 69 == placement._last_bytes(100)


def test_the_file_has_no_name_and_no_other_reader(tmp_path: Path) -> None:
    file = weight_file(tmp_path)
    assert [] == list(tmp_path.iterdir())
    assert 0o600 == os.fstat(file.descriptor).st_mode & 0o777
    file.close()


@pytest.mark.parametrize("folder", ["nothing/here", "file"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--offload-dir .*: no file can be made there"):
        weight_file(tmp_path / folder)
