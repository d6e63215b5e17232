"""The cost model of streaming: what it says of a step, and how much it has stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoConfig

from server.arch import families
from server.arch.footprint import expert_sizes, layer_sizes, seen_by_window
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint.formats import IN_FLIGHT as IN_FLIGHT_QUANTISERS
from server.offload.auto import Auto, Wanted, link_rate, product_rates, rates_of
from server.offload.cost import MOST_SPANS, Rates, Room, Sizes, Span, StepCost, Times, busy_seconds, choose
from server.offload.share import ALL, Share
from server.offload.stores import Memory, Run
from server.quantisation.random_weight import Kind, noise
from server.quantisation.sizes import IN_FLIGHT
from server.quantisation.stored import Stored
from tests.server.offload.streaming import weight_file

MB = 10**6
GB = 10**9
# Ten layers of 100 MB, a head of 50 MB, 1 MB for a token; 1 GB/s from the disk, 10 GB/s from memory.
SIZES = Sizes(layers=1 * GB, num_layers=10, head=50 * MB, kv_per_token=1 * MB)
RATES = Rates(link=1 * GB, products=[(1, 1e-10), (100, 1e-10), (200, 2e-10)])
ROOM = Room(memory=2 * GB, longest=10, sequences=8)


def test_products_cost_what_was_measured_and_lines_between() -> None:
    assert [1e-10, 1e-10, 1.5e-10, 2e-10] == [RATES.seconds_per_byte(tokens) for tokens in (1, 50, 150, 200)]
    assert 4e-10 == RATES.seconds_per_byte(400)  # in proportion
    assert 0.0 == RATES.seconds_per_byte(0)
    assert 10 * GB == pytest.approx(RATES.memory)


def test_a_step_takes_as_long_as_the_slower_of_bringing_and_computing() -> None:
    cost = StepCost(SIZES, RATES, streamed=0.5 * GB)
    assert 0.5 == cost.seconds(tokens=4, sampled=4, kv_bytes=100 * MB)
    assert 0.1 + 0.005 + 0.01 == pytest.approx(cost.computing(tokens=4, sampled=4, kv_bytes=100 * MB))
    assert 1.0 + 0.05 == pytest.approx(cost.seconds(tokens=1000, sampled=1000, kv_bytes=0))
    assert 0.0 == cost.seconds(tokens=0, sampled=0, kv_bytes=0)


def test_a_mixture_multiplies_with_the_experts_that_its_tokens_go_to() -> None:
    """Of 1 GB 800 MB are 8 experts, two a token: one token reads 200 MB of them, 400 compute with 100 each."""
    cost = StepCost(replace(SIZES, head=0, experts={0.25: 800 * MB}), RATES, streamed=0)
    alone, many = (cost.computing(tokens=n, sampled=n, kv_bytes=0) for n in (1, 400))
    assert (0.2 + 0.2) * GB * 1e-10 == pytest.approx(alone)
    assert 0.2 * GB * 4e-10 + 0.8 * GB * 1e-10 == pytest.approx(many)


def test_experts_of_a_shape() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    config = AutoConfig.for_model("mixtral", num_hidden_layers=2, num_key_value_heads=4, num_local_experts=8, **sizes)
    _, spec = families.find(config.to_dict())
    experts, attention_and_router = 2 * 8 * 3 * 32 * 48, 2 * (4 * 32 + 8) * 32
    assert ({0.25: experts}, experts + attention_and_router) == (expert_sizes(spec), sum(layer_sizes(spec)))
    assert {} == expert_sizes(families.find({**config.to_dict(), "num_experts_per_tok": 8})[1])


def test_layers_look_at_what_their_windows_reach_of_their_own_keys_or_of_earlier_ones() -> None:
    config = {"model_type": "bloom", "vocab_size": 99, "hidden_size": 64, "n_head": 8, "n_layer": 4}
    _, spec = families.find(config)
    first, second, third, fourth = spec.layers
    layers = (first, replace(second, window=4), replace(third, window=4, kv_from=1), replace(fourth, attends=False))
    assert {0: 100, 4: 20} == seen_by_window(replace(spec, layers=layers), [100, 10])


def test_no_sequence_looks_at_more_keys_than_a_window_has() -> None:
    half = replace(SIZES, windows={0: 0.5 * MB, 4: 0.5 * MB})
    assert [3, 7] == [half.kv_bytes(1, length) / MB for length in (3, 10)]
    long = replace(ROOM, longest=40)
    seconds = [choice.step_s for sizes in (SIZES, half) if (choice := choose(sizes, RATES, long)) is not None]
    assert 8 * (20 - 12) * MB / (10 * GB) == pytest.approx(seconds[0] - seconds[1])


def test_states_and_rings_have_their_memory_and_states_their_time() -> None:
    """1 GB of layers leaves 1 GB. Of 8 states of 50 MB and a spare one 550 MB are left, of 8 rings 600."""
    few = replace(ROOM, longest=100)
    states, rings = (choose(replace(SIZES, **{kind: 50 * MB}), RATES, few) for kind in ("states", "rings"))
    plain = choose(SIZES, RATES, few)
    assert states is not None and rings is not None and plain is not None
    assert (800, 550, 600) == (plain.kv_tokens, states.kv_tokens, rings.kv_tokens)
    assert (8, 5, 6) == (plain.sequences, states.sequences, rings.sequences)
    alike = (sizes.kv_bytes(5, 50) for sizes in (SIZES, replace(SIZES, states=50 * MB)))
    assert [5 * 50 * MB, 5 * 150 * MB] == list(alike)


def test_states_take_half_of_what_is_left_at_most() -> None:
    """All layers leave 1 GB, half of which has room for 5 of 90 MB; one of these is nobody's."""
    large = replace(SIZES, states=90 * MB)
    assert [4, 2, 0] == [large.sequences_in(memory, 8) for memory in (1 * GB, 0.6 * GB, 0.1 * GB)]
    assert choose(large, RATES, replace(ROOM, memory=0.3 * GB)) is None
    assert choose(large, RATES, replace(ROOM, memory=0.6 * GB, sequences=1)) is not None


def test_auto_streams_where_states_take_the_room_of_layers() -> None:
    assert ALL == auto_of(1.9 * GB, rates=unmeasured, state_bytes=50 * MB).choose(100 * MB, 10)
    auto = auto_of(1.3 * GB, state_bytes=200 * MB, kv_tokens=80)  # beside all layers, not even one fits into a half
    assert Share(num_bytes=0) == auto.choose(100 * MB, 10)
    assert "chosen for 2 sequences of 10 tokens" in auto.description


def test_auto_prices_a_mixture_by_the_experts_of_a_step() -> None:
    changes = {"layer_sizes": (100,) * 10, "kv_tokens": 10, "longest": 10, "sequences": 1}
    quick = replace(RATES, link=100 * GB)  # so that a step takes as long as it computes
    dense, mixture = (
        auto_of(0.5 * GB, rates=lambda _: quick, expert_sizes=experts, **changes) for experts in ({}, {0.25: 800})
    )
    for auto in (dense, mixture):
        auto.choose(100 * MB, 10)
    assert dense.chosen is not None and mixture.chosen is not None
    assert mixture.chosen.step_s < dense.chosen.step_s
    sizes = Sizes(1 * GB, 10, 50 * MB, MB, experts={0.25: 800 * MB})
    assert mixture.chosen == choose(sizes, quick, Room(0.6 * GB, 10, 1, 10))


def test_where_everything_fits_nothing_streams() -> None:
    chosen = choose(SIZES, RATES, ROOM)
    assert chosen is not None and not chosen.streams
    assert (1 * GB, 80, 8) == (chosen.resident, chosen.kv_tokens, chosen.sequences)


def test_a_wanted_cache_is_kept_and_as_much_as_fits_beside_it_stays() -> None:
    chosen = choose(SIZES, RATES, replace(ROOM, memory=1 * GB, kv_tokens=80))
    assert chosen is not None and chosen.streams
    assert 7 * 100 * MB == chosen.resident  # 80 MB of keys and values and two slots of 100 MB beside
    assert 0.3 == pytest.approx(chosen.step_s)


def test_a_cache_that_nobody_asked_for_gives_way_to_weights() -> None:
    """400 sequences with nothing resident take 0.6 s a step; 8 with all resident take 0.11 s: the first are faster."""
    slow = replace(RATES, products=[(1, 1e-10)])
    many = choose(SIZES, slow, Room(memory=4 * GB, longest=10, sequences=500))
    assert many is not None and not many.streams
    few = choose(SIZES, RATES, Room(memory=1.1 * GB, longest=10, sequences=500))
    assert few is not None
    every = [
        option
        for count in range(11)
        if (option := choose(SIZES, RATES, Room(1.1 * GB, 10, 500, kv_tokens=10 * count + 10))) is not None
    ]
    assert few.tokens_per_second >= max(option.tokens_per_second for option in every)


def test_what_cannot_run_at_all_is_none() -> None:
    assert choose(SIZES, RATES, replace(ROOM, memory=0.2 * GB)) is None
    assert choose(SIZES, RATES, replace(ROOM, memory=0.22 * GB)) is not None


# ----------------------------------------------------------------------------------------------- the first layer's hour


class Ranks:
    """This rank beside one that always has less."""

    world_size = 2

    def __init__(self, less: float = 1.0):
        self._less = less

    def minimum(self, value: int, device: torch.device) -> int:
        return min(value, int(value * self._less)) if value > 0 else value


class SmallDevice(CpuDevice):
    """A CPU with so much free memory."""

    def __init__(self, free: float):
        self._free = free

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        return int(self._free)


WANTED = Wanted(
    longest=10, sequences=8, kv_tokens=0, kv_bytes_per_token=MB, head_bytes=50 * MB, later_bytes=0, step_bytes=0
)


def auto_of(
    free: float, *, less: float = 1.0, rates: Callable[[int], Rates] = lambda _: RATES, **changes: object
) -> Auto:
    wanted = replace(WANTED, **{k: v for k, v in changes.items() if k in Wanted.__dataclass_fields__})  # type: ignore[arg-type]
    why_not = changes.get("why_not")
    return Auto(SmallDevice(free), Ranks(less), wanted, rates, why_not if isinstance(why_not, str) else None)


def unmeasured(layer_bytes: int) -> Rates:
    raise AssertionError("where everything fits, nothing is measured")


def test_auto_measures_nothing_where_everything_fits() -> None:
    auto = auto_of(2 * GB, rates=unmeasured)
    assert ALL == auto.choose(100 * MB, 10)
    assert "1.00 GB of layers fit beside a KV cache of 80 tokens" == auto.description


def test_auto_knows_that_layers_differ() -> None:
    """The first of four layers is the encoder's, and the decoder's are twice as large."""
    sizes = (100, 100, 200, 200)
    assert ALL == auto_of(0.70 * GB, rates=unmeasured, layer_sizes=sizes, kv_tokens=80).choose(100 * MB, 4)
    assert auto_of(0.55 * GB, layer_sizes=sizes, kv_tokens=80).choose(100 * MB, 4) != ALL
    assert 400 * MB == Sizes(600 * MB, 4, 0, 1, 200 * MB).slots


def test_layers_are_counted_from_the_encoder_on() -> None:
    config = AutoConfig.for_model("t5", d_model=16, num_heads=4, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=1)
    _, spec = families.find(config.to_dict())
    attention, mlp = 4 * 16 * 32, 2 * 16 * 24
    assert [attention + mlp, attention + mlp, 2 * attention + mlp] == layer_sizes(spec)


def test_auto_says_what_it_chose_and_why() -> None:
    auto = auto_of(0.9 * GB, kv_tokens=80)
    assert Share(num_bytes=700 * MB) == auto.choose(100 * MB, 10)
    assert (
        "chosen for 8 sequences of 10 tokens in a KV cache of 80, which should decode 26.7 tokens/s at 1.00 GB/s"
        == auto.description
    )


def test_all_ranks_choose_by_the_least_that_any_of_them_has() -> None:
    auto = auto_of(0.9 * GB, kv_tokens=80, less=0.8)
    share = auto.choose(100 * MB, 10)
    assert Share(num_bytes=500 * MB) == share
    assert auto.measured is not None and auto.measured.link == pytest.approx(0.8 * GB)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"kv_tokens": 900},
            "--weights-on-device auto finds 1.00 GB for layers, slots and KV cache, and a KV cache of 900",
        ),
        ({"why_not": "name a folder", "kv_tokens": 80}, "name a folder"),
    ],
)
def test_auto_refuses_what_cannot_be(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        auto_of(0.9 * GB, **changes).choose(100 * MB, 10)


def test_without_a_folder_all_stay_while_anything_fits_beside_them() -> None:
    auto = auto_of(0.92 * GB, why_not="name a folder")
    assert ALL == auto.choose(100 * MB, 10)
    assert auto.description.startswith("1.00 GB of layers fit beside a KV cache of ")


# ---------------------------------------------------------------------------------------------------- probes and times


class TimedStore:
    """Brings one image after the other, each in 0.01 s of a clock of its own, but the first ones at once."""

    moved_bytes, is_direct = 0, True

    def __init__(self, fast: int) -> None:
        self.now, self.brought, self._fast = 0.0, 0, fast
        self._free_at = 0.0

    def add(self, blocks: int) -> int:
        return 0

    def save(self, memory: Memory, runs: Sequence[Run], after: object) -> Callable[[], None]:
        return lambda: None

    def load(self, memory: Memory, runs: Sequence[Run], after: object) -> Callable[[], float]:
        self.brought += 1
        self._free_at = there_at = max(self.now, self._free_at) + (0.01 if self.brought > self._fast else 0.0)

        def finish() -> float:
            self.now = max(self.now, there_at)
            return self.now

        return finish

    def close(self) -> None:
        """There is nothing."""


def test_a_link_is_as_fast_as_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TimedStore(fast=2)  # of 4 images: a throttle that gives more after a pause
    monkeypatch.setattr("server.offload.auto.READ_BYTES", 4 * MB)
    monkeypatch.setattr("server.offload.auto.time", SimpleNamespace(perf_counter=lambda: store.now))
    assert 100 * MB == pytest.approx(link_rate(store, CpuDevice(), MB, seconds=0.05))


def test_rates_are_measured(tmp_path: Path) -> None:
    store = weight_file(tmp_path)
    try:
        assert link_rate(store, CpuDevice(), 1 << 20, seconds=0.01) > 0
        assert store.moved_bytes >= 2 << 20
    finally:
        store.close()
    backend = ReferenceBackend(CpuDevice())
    found = product_rates(backend, torch.float32, tokens=(1, 8), widths=(64, 32))
    assert [1, 8] == [tokens for tokens, _ in found]
    assert all(seconds > 0 for _, seconds in found)


class CountedProducts(ReferenceBackend):
    """A CPU on which any product of a token with a weight takes a nanosecond, however the weight is stored."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.now = 0.0
        self.stored: list[int] = []

    def linear(self, weight: Stored, **_: object) -> Any:
        self.stored.append(weight.nbytes)

        def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> None:
            self.now += 1e-9 * len(x) * weight.shape[0] * weight.shape[1]

        return MagicMock(side_effect=multiply, nbytes=weight.nbytes)


@pytest.mark.parametrize("name", [*IN_FLIGHT, None])
def test_a_step_of_a_quantised_model_computes_no_less_than_one_of_a_dense_model(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tokens times a layer of 64 x 128 weights and a head of 32 x 128: so many products, in whatever bytes."""
    backend = CountedProducts()
    monkeypatch.setattr("server.offload.auto.time", SimpleNamespace(perf_counter=lambda: backend.now))
    storage = None if name is None else IN_FLIGHT[name]
    sizes = {"tokens": (1, 64), "widths": (64, 128)}
    rates = rates_of(backend, torch.bfloat16, 1 * GB, storage, has_tied_head=False, **sizes)
    layer, *_, last = backend.stored  # the head's are the last, where they are others
    model = Sizes(layers=layer, num_layers=1, head=last / 2, kv_per_token=1)
    computing = StepCost(model, rates, streamed=0).computing(tokens=64, sampled=64, kv_bytes=0)
    assert 1e-9 * 64 * (64 * 128 + 32 * 128) == pytest.approx(computing)


def test_the_head_is_priced_as_it_is_stored() -> None:
    int4, eetq = IN_FLIGHT["int4"], IN_FLIGHT["eetq"]
    assert IN_FLIGHT["int8"] == int4.of_head(is_tied=True) == int4.of_head(is_tied=False)
    assert eetq.of_head(is_tied=False) is None
    checkpoint = replace(int4, has_int8_head=False, includes_head=True)
    assert (checkpoint, None) == (checkpoint.of_head(is_tied=False), checkpoint.of_head(is_tied=True))
    rates = replace(RATES, head=[(1, 5e-11), (100, 4e-10)])
    cost = StepCost(SIZES, rates, streamed=0)
    assert 0.1 + 50 * MB * 4e-10 == pytest.approx(cost.computing(tokens=100, sampled=100, kv_bytes=0))
    assert 20 * GB == pytest.approx(rates.memory)


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_noise_has_the_kind_that_the_quantiser_makes(name: str) -> None:
    made = IN_FLIGHT_QUANTISERS[name](torch.randn(64, 128))
    like = noise(Kind.of(IN_FLIGHT[name]), 64, 128, torch.device("cpu"))
    assert (made.bits, made.codes.dtype, made.scale.shape) == (like.bits, like.codes.dtype, like.scale.shape)
    assert (made.inputs and made.inputs.dtype, made.levels is None) == (
        like.inputs and like.inputs.dtype,
        like.levels is None,
    )
    assert ReferenceBackend(CpuDevice()).linear(like)(torch.randn(3, 128), None).isfinite().all()


def test_busy_time_counts_nothing_twice_and_nothing_outside() -> None:
    spans = [Span(0, 1.0, 3.0), Span(1, 2.0, 4.0), Span(2, 2.5, 3.5), Span(3, 6.0, 9.0)]
    assert 3.0 + 2.0 == busy_seconds(spans, 0.0, 8.0)
    assert 1.5 == busy_seconds(spans, 2.5, 4.5)
    assert 0.0 == busy_seconds([], 0.0, 8.0)


def test_times_are_bounded_and_begin_anew() -> None:
    times = Times(pass_bytes=7)
    for layer in range(MOST_SPANS + 5):
        times.reads.append(Span(layer, 0.0, 1.0))
    times.bytes, times.waited_s = 3, 4.0
    assert (MOST_SPANS, 5) == (len(times.reads), times.reads[0].layer)
    times.forget()
    assert Times(pass_bytes=7) == times
