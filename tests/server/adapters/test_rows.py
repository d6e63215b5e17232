"""Rows of adapters on one rank: what fails on its way there leaves nothing behind, and nobody computes without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from server.adapters.adapters import Adapters, Change
from server.backends.protocol import ExpertsChange, LinearChange, LowRank
from server.backends.reference.adapters import StackedChange
from server.pb import generate_pb2 as pb
from server.stepping.sequences import StepError
from tests.server.adapters import made
from tests.server.checkpoints import Checkpoints
from tests.server.driver import GREEDY, load_engine, place_adapters


@dataclass
class Layers:
    """Two layers, which note what is in their rows; `failing` cannot be put into the second."""

    failing: bytes = b""
    rows: dict[tuple[int, int], bytes] = field(default_factory=dict)  # layer and row -> key
    most: int = 0  # that were there at once

    def read(self, key: bytes, folder: Path) -> list[Change]:
        return [PutDown(self, layer, key) for layer in range(2)]


@dataclass
class PutDown:
    layers: Layers
    layer: int
    key: bytes
    nbytes: int = 1
    is_capturable: bool = True

    def put(self, row: int) -> None:
        if self.layer and self.key == self.layers.failing:
            raise MemoryError("no room")
        assert (self.layer, row) not in self.layers.rows
        self.layers.rows[self.layer, row] = self.key
        self.layers.most = max(self.layers.most, len(self.layers.rows))

    def take_out(self, row: int) -> None:
        self.layers.rows.pop((self.layer, row), None)


def test_all_rows_of_a_step_are_empty_where_one_of_them_fails() -> None:
    layers = Layers(failing=b"bad")
    adapters = Adapters(4, 100, layers.read)
    for key in (b"a", b"b", b"c", b"bad"):
        adapters.prepare(key, Path())
    adapters.place([(1, b"a"), (2, b"b"), (4, b"c")])
    with pytest.raises(MemoryError):
        adapters.place([(2, b"c"), (3, b"bad"), (4, b"a")])
    assert {1} == {*adapters.rows} and {(0, 1): b"a", (1, 1): b"a"} == layers.rows
    with pytest.raises(ValueError, match="adapter 646464 goes to row 2, but it is not prepared"):
        adapters.place([(1, b"b"), (2, b"ddd")])
    assert not adapters.rows and not layers.rows
    with pytest.raises(ValueError, match="goes to row 5, but there are rows 1 to 4"):
        adapters.place([(5, b"a")])


def test_all_but_some_are_forgotten_and_rows_keep_what_they_have() -> None:
    layers = Layers()
    adapters = Adapters(4, 100, layers.read)
    for key in (b"a", b"b", b"c"):
        adapters.prepare(key, Path())
    adapters.place([(1, b"c")])
    adapters.forget_all_but({b"a", b"z"})
    adapters.place([(2, b"a")])
    for key in (b"b", b"c"):
        with pytest.raises(ValueError, match="it is not prepared"):
            adapters.place([(3, key)])
    assert {1: b"c", 2: b"a"} == {row: layers.rows[0, row] for row in adapters.rows}


def test_what_leaves_makes_room_before_anything_comes() -> None:
    layers = Layers()
    adapters = Adapters(2, 100, layers.read)
    for key in (b"a", b"b", b"c"):
        adapters.prepare(key, Path())
    adapters.place([(1, b"a"), (2, b"b")])
    adapters.place([(1, b"c"), (2, b"a")])
    assert 4 == layers.most and {(0, 1): b"c", (1, 1): b"c", (0, 2): b"a", (1, 2): b"a"} == layers.rows
    adapters.forget(b"a")
    adapters.place([(2, b"")])
    assert {1} == {*adapters.rows}


@torch.inference_mode()
def test_a_sequence_whose_row_is_empty_fails_its_step_and_never_gets_the_model_s_own_tokens(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints("llama")[0]
    engine = load_engine(folder, adapters=2)
    place_adapters(engine, [made.make_several(folder, tmp_path)[0].folder])
    first, second = pb.StepRequest(chunk_ids=[1], chunk_tokens=[3]), pb.StepRequest(chunk_ids=[2], chunk_tokens=[3])
    for id, request in enumerate((first, second), start=1):
        request.add.add(id=id, token_ids=[5, 6, 7], blocks=[id], sampling=GREEDY, adapter=id)
    assert engine.launch(first) is not None
    second.retire.append(1)
    with pytest.raises(StepError, match="sequence 2 has its adapter in row 2, which is empty"):
        engine.launch(second)
    assert engine.launch(pb.StepRequest(decode=True)) is None  # who left with it has left
    unknown = pb.StepRequest(adapters=[pb.AdapterPlace(row=1, key=bytes(16))])
    with pytest.raises(StepError, match="it is not prepared"):
        engine.launch(unknown)
    assert not engine.adapters.rows  # type: ignore[union-attr]


def test_changes_of_few_experts_count_as_what_they_take_when_they_are_stacked() -> None:
    one = LinearChange((LowRank(0, torch.zeros(32, 16), torch.zeros(24, 32), 1.0),))
    change = ExpertsChange((None, one, *[None] * 6))
    stacked = StackedChange.of(change)
    assert 8 * one.nbytes == change.nbytes == stacked.nbytes
    assert stacked is StackedChange.of(stacked) and 0 == ExpertsChange((None,)).nbytes
