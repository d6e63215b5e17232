"""Arithmetic that needs no model: what splits, what fits, which slope, which dtype; and the cache's memory."""

from __future__ import annotations

import platform
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from host import cpu_kinds
from host.cpu_kinds import AUTO, NONE
from server.arch import families
from server.arch.footprint import BLOCKS_OF_STATE
from server.arch.spec import Activation, Alibi, ArchSpec, Gated, KvHeads, LayerSpec, validate
from server.arch.stages import Stage
from server.backends.cpu.device import CpuDevice, plan_threads
from server.blocks import num_blocks
from server.layers.position import alibi_slopes
from server.loading import choose_dtype
from server.model.transformer import kv_shape
from server.quantisation.kv import AS_COMPUTED
from server.ranks.collectives import Shard
from server.stepping.cache import KVShape, allocate, beside_states, choose_tokens
from server.stepping.checkpoints import Checkpoints

CPU = CpuDevice()


def bloom(heads: int, hidden: int = 64) -> ArchSpec:
    config = {"model_type": "bloom", "vocab_size": 99, "hidden_size": hidden, "n_head": heads, "n_layer": 1}
    return families.find(config)[1]


def test_eight_heads_split_every_way_that_there_is_and_no_other() -> None:
    assert [1, 2, 4, 8] == [world_size for world_size in range(1, 9) if can_split(bloom(8), world_size)]


def can_split(spec: ArchSpec, world_size: int) -> bool:
    try:
        validate(spec, world_size)
    except ValueError:
        return False
    return True


def test_heads_that_do_not_divide_are_refused_with_what_does() -> None:
    with pytest.raises(
        ValueError, match=r"6 attention heads, which --num-shard 4 does not divide.*use --num-shard 1 or 2"
    ):
        validate(bloom(6, hidden=60), 4)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_round_up(tokens: int, blocks: int) -> None:
    assert blocks == num_blocks(tokens)


def test_a_token_takes_key_and_value_of_every_layer() -> None:
    assert 491_520 == KVShape(num_layers=30, num_kv_heads=32, head_dim=128, dtype=torch.float16).bytes_per_token


def test_the_cache_takes_what_fits_but_no_more_than_can_be_used() -> None:
    assert 160 == choose_tokens(wanted=0, useful=10_000, free_bytes=1700, bytes_per_token=10)
    assert 100 == choose_tokens(wanted=0, useful=100, free_bytes=1700, bytes_per_token=10)
    assert 150 == choose_tokens(wanted=150, useful=100, free_bytes=1700, bytes_per_token=10)


def test_a_wish_that_does_not_fit_is_refused_with_what_does() -> None:
    with pytest.raises(ValueError, match=r"--max-batch-total-tokens is 161.*use --max-batch-total-tokens 160 or less"):
        choose_tokens(wanted=161, useful=100, free_bytes=1700, bytes_per_token=10)
    with pytest.raises(ValueError, match="no memory is left for a KV cache"):
        choose_tokens(wanted=0, useful=100, free_bytes=-5, bytes_per_token=10)
    kept = {"--adapter-memory": 100 * 10**9, "--prefix-cache-host-gb": 0}
    told = (
        r"\(0 bytes free, 100 needed per token, 100.00 GB kept back for --adapter-memory\): lower --adapter-memory, use"
    )
    with pytest.raises(ValueError, match=told):
        choose_tokens(wanted=0, useful=1000, free_bytes=-5, bytes_per_token=100, kept_back=kept)


def test_slopes_of_a_power_of_two_are_geometric() -> None:
    assert [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8] == alibi_slopes(8, Alibi())


def test_slopes_between_powers_come_from_the_next_higher_one() -> None:
    assert pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]) == alibi_slopes(6, Alibi())


def test_the_checkpoints_dtype_is_kept_where_the_device_computes_it() -> None:
    assert (torch.float32, "the checkpoint's") == choose_dtype(None, torch.float32, CPU, AUTO)


def test_a_wish_for_a_dtype_wins() -> None:
    assert (torch.bfloat16, "asked for") == choose_dtype("bfloat16", torch.float32, CPU, AUTO)


def test_compiled_kernels_compute_bfloat16_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kinds, "cpu_flags", lambda: [*cpu_kinds.kinds_of(platform.machine())[-1].wanted])
    assert (torch.bfloat16, "the checkpoint's") == choose_dtype(None, torch.bfloat16, CPU, AUTO)
    assert torch.float32 == choose_dtype(None, torch.bfloat16, CPU, NONE)[0]
    monkeypatch.setattr(cpu_kinds, "cpu_flags", list)
    assert torch.float32 == choose_dtype(None, torch.bfloat16, CPU, AUTO)[0], "there are none for it"


def test_a_dtype_that_the_device_computes_badly_gives_way_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "good_dtypes", lambda device, kernels: {torch.float32})
    dtype, reason = choose_dtype(None, torch.float16, CPU, AUTO)
    assert torch.float32 == dtype
    assert "this CPU does not compute the checkpoint's float16 well" == reason


def test_threads_are_a_share_of_the_cores_and_one_where_waiting_costs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.backends.cpu.device.physical_cores", lambda cpus: 8)
    monkeypatch.setattr("server.backends.cpu.device.cpu_quota", lambda: None)
    large, small = 2**30, 2**20

    def plan(wanted: int | None, ranks: int, num_bytes: int, is_host: bool = True) -> tuple[int, str]:
        return plan_threads(wanted, is_host=is_host, ranks=ranks, sharing=ranks, weight_bytes=num_bytes)

    assert (8, "8 cores; they sleep when idle") == plan(None, 1, large)
    assert (2, "8 cores for 4 shards; they sleep when idle") == plan(None, 4, large)
    assert 1 == plan(None, 16, large)[0]
    assert (1, "the model is too small for more of 8 cores") == plan(None, 1, small)
    assert (1, "the GPU computes") == plan(None, 1, large, is_host=False)
    assert (5, "asked for") == plan(5, 1, small)


def test_threads_keep_to_a_containers_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.backends.cpu.device.physical_cores", lambda cpus: 8)
    monkeypatch.setattr("server.backends.cpu.device.cpu_quota", lambda: 2.5)
    plan = partial(plan_threads, None, is_host=True, weight_bytes=2**30)
    assert (2, "a cgroup quota of 2.5 cores for all shards") == plan(ranks=1, sharing=1)
    assert 1 == plan(ranks=4, sharing=4)[0]
    assert (1, "a cgroup quota of 2.5 cores for all shards") == plan(ranks=2, sharing=1)  # each on a node of its own


def test_a_cache_on_a_cpu_takes_memory_where_it_is_written() -> None:
    before = resident_bytes()
    shape = KVShape(num_layers=4, num_kv_heads=16, head_dim=64, dtype=torch.bfloat16)
    caches = allocate(shape, blocks=4096, device=CPU)  # 1 GiB
    assert resident_bytes() - before < 2**24
    caches[3][1, 4095] = 1.0
    assert 4 == len(caches)
    assert caches[3][1].sum(dtype=torch.float64) == 16 * 16 * 64


def test_what_is_left_on_a_cpu_is_counted_with_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.backends.cpu.device.available_bytes", lambda: 100)
    assert 30 == CPU.left_bytes(fraction=1.0, world_size=2, kv_bytes=20)
    assert 0 == CPU.left_bytes(fraction=1.0, world_size=2, kv_bytes=60)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(("rank", "world_size", "sizes"), [(0, 1, [(4, 16), (2, 32)]), (3, 4, [(1, 16), (1, 32)])])
def test_layers_keep_heads_of_their_own_size(rank: int, world_size: int, sizes: list[tuple[int, int]]) -> None:
    layers = [LayerSpec(Gated(8, Activation.SILU), None, kv_heads=KvHeads(*kind)) for kind in ((4, 16), (2, 32))]
    spec = replace(bloom(8), layers=tuple(layers))
    shape = kv_shape(spec, Stage.whole(2), Shard(rank, world_size), torch.float32, AS_COMPUTED)
    assert sizes == [(layer.num_kv_heads, layer.head_dim) for layer in shape.layers]
    assert 4 * 2 * sum(count * dim for count, dim in sizes) == shape.bytes_per_token


def test_where_no_layer_attends_blocks_hold_kept_states_alone() -> None:
    shape = KVShape(0, 1, 64, torch.float32, states=(1500, 24), attending=(False, False))
    (blocks,) = allocate(shape, 80, CpuDevice())
    states = beside_states(shape, [blocks], [], 3, CpuDevice())
    assert [(3, 1500), (3, 24)] == [tuple(state.shape) for state in states]
    checkpoints, places = Checkpoints(states, [blocks]), torch.arange(10, 10 + BLOCKS_OF_STATE)
    assert 0 < checkpoints.num_blocks <= BLOCKS_OF_STATE
    for state in states:
        state[1] = torch.arange(state.shape[1])
    checkpoints.keep(1, places)
    checkpoints.load(2, places)
    assert all(torch.equal(state[1], state[2]) and not state[0].any() for state in states)


def test_layers_of_one_branch_keep_blocks_or_a_state_or_nothing() -> None:
    shape = KVShape(1, 2, 16, torch.float32, states=(0, 7, 0), attending=(True, False, False))
    kv = allocate(shape, 4, CpuDevice())
    attention, recurrence, mlp = beside_states(shape, kv, [], 3, CpuDevice())
    assert attention is kv[0] and (3, 7) == tuple(recurrence.shape) and not mlp.numel()
    of_mlps = KVShape(0, 2, 16, torch.float32, states=(0, 0), attending=(False, False))
    assert [0, 0] == [kept.numel() for kept in beside_states(of_mlps, [], [], 3, CpuDevice())]
    assert 4 == of_mlps.bytes_per_token  # so that a block has a size
    assert [4 * 16] == [kept.nbytes // 3 for kept in allocate(of_mlps, 3, CpuDevice())]
