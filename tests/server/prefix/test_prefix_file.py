"""Blocks on disk: what is read is what was written under the same key, or it is not there."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from server.prefix.identity import identity
from server.prefix.mover import Move, TierConfig, Tiers
from server.prefix.prefix_file import Damaged, DiskTrouble, PrefixFile

BLOCK = 5000  # no multiple of a page
KEYS = [bytes([n + 1]) * 16 for n in range(4)]


def opened(folder: Path, name: str = "a", whose: bytes = b"w" * 16, places: int = 4) -> PrefixFile:
    return PrefixFile(folder, name, whose, BLOCK, places * 8192)


def page_of(byte: int) -> memoryview:
    memory = mmap.mmap(-1, 8192)
    memory[:] = bytes([byte]) * 8192
    return memoryview(memory)


def test_blocks_outlive_the_process_in_files_of_their_owner(tmp_path: Path) -> None:
    file = opened(tmp_path / "new" / "folder")
    file.write(2, KEYS[0], 77, page_of(9))
    file.close()
    again = opened(tmp_path / "new" / "folder")
    buffer = page_of(0)
    again.read(2, KEYS[0], buffer)
    assert bytes([9]) * BLOCK == bytes(buffer[:BLOCK])
    assert {2: 77} == {place: entry.stamp for place, entry in again.entries.items()}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "folder").iterdir()}
    assert {0o600} == modes
    again.close()


@pytest.mark.parametrize("at", [0, 4097, BLOCK - 1])
def test_a_flipped_bit_is_found_and_the_block_is_gone(tmp_path: Path, at: int) -> None:
    file = opened(tmp_path)
    file.write(1, KEYS[0], 1, page_of(3))
    with (tmp_path / "a.blocks").open("r+b") as raw:
        raw.seek(8192 + at)
        raw.write(bytes([3 ^ 16]))
        raw.flush()
        os.fsync(raw.fileno())
    for _ in range(2):
        with pytest.raises(Damaged):
            file.read(1, KEYS[0], page_of(0))
    file.close()
    assert {} == opened(tmp_path).entries


def test_another_key_another_model_and_a_cut_file_are_not_there(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for place in range(3):
        file.write(place, KEYS[place], place, page_of(place))
    with pytest.raises(Damaged):
        file.read(0, KEYS[1], page_of(0))
    os.truncate(tmp_path / "a.blocks", 8192)
    with pytest.raises(Damaged):
        file.read(1, KEYS[1], page_of(0))
    file.close()
    again = opened(tmp_path)
    assert {0} == set(again.entries)
    again.close()
    other = opened(tmp_path, whose=b"v" * 16)
    assert {} == other.entries
    other.close()


def test_a_file_in_use_removed_or_impossible_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.prefix.prefix_file.LOCK_SECONDS", 0.0)
    file = opened(tmp_path)
    with pytest.raises(DiskTrouble, match="in use by another server"):
        opened(tmp_path)
    (tmp_path / "a.blocks").unlink()
    with pytest.raises(DiskTrouble, match="was removed"):
        file.write(0, KEYS[0], 1, page_of(1))
    file.close()
    with pytest.raises(DiskTrouble, match=r"File exists|Not a directory"):
        opened(tmp_path / "a.index")


def test_a_full_disk_takes_no_block_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)
    file.write(0, KEYS[0], 1, page_of(1))
    monkeypatch.setattr(os, "pwritev", lambda *_: 100)  # part of a block
    with pytest.raises(DiskTrouble, match="No space left") as found:
        file.write(1, KEYS[1], 1, page_of(2))
    assert found.value.is_full and {0} == set(file.entries)
    file.read(0, KEYS[0], page_of(0))
    file.close()


class Memory:
    """Slots as the mover knows them."""

    num_slots, slot_bytes = 4, BLOCK

    def __init__(self) -> None:
        self.bytes = (ctypes.c_char * (self.num_slots * BLOCK))()
        self.address = ctypes.addressof(self.bytes)


def move_of(session: int, *, is_fetch: bool, slot: int) -> Move:
    return Move(session, 0, is_fetch, [slot], [0], KEYS[0], [] if is_fetch else [5])


def test_a_session_that_has_ended_touches_no_slot(tmp_path: Path) -> None:
    tiers, memory = Tiers(TierConfig(0, 4 * 8192, tmp_path, "0-of-1", b"i" * 16)), Memory()
    tiers.open(memory, 1)
    memory.bytes[:BLOCK] = b"x" * BLOCK
    file, never = tiers._file, threading.Event()
    assert file is not None
    assert tiers._move(move_of(1, is_fetch=False, slot=0), file, memory, never).is_moved == [True]
    contents = tiers.open(memory, 2)
    assert [KEYS[0]] == [entry.key for entry in contents.entries.values()]
    assert tiers._move(move_of(1, is_fetch=True, slot=1), file, memory, never).is_moved == [False]
    assert bytes(BLOCK) == memory.bytes[BLOCK : 2 * BLOCK]
    assert tiers._move(move_of(2, is_fetch=True, slot=1), file, memory, never).is_moved == [True]
    assert b"x" * BLOCK == memory.bytes[BLOCK : 2 * BLOCK]
    tiers.close()


def test_a_move_that_was_given_up_leaves_alone_what_a_later_step_saved(tmp_path: Path) -> None:
    """Else it would store another block under its key, or put its own where another one is looked for."""
    tiers, memory, never = Tiers(TierConfig(0, 4 * 8192, tmp_path, "0-of-1", b"i" * 16)), Memory(), threading.Event()
    tiers.open(memory, 1)
    file = tiers._file
    assert file is not None
    late_store, late_fetch = (
        replace(move_of(1, is_fetch=is_fetch, slot=0), after_step=5) for is_fetch in (False, True)
    )
    tiers.session.saved([0], 5)
    memory.bytes[:BLOCK] = b"x" * BLOCK
    assert tiers._move(late_store, file, memory, never).is_moved == [True]
    tiers.session.saved([0], 6)
    memory.bytes[:BLOCK] = b"y" * BLOCK
    for late in (late_store, late_fetch):
        assert tiers._move(late, file, memory, never).is_moved == [False]
    assert b"y" * BLOCK == memory.bytes[:BLOCK]
    assert tiers._move(move_of(1, is_fetch=True, slot=1), file, memory, never).is_moved == [True]
    assert b"x" * BLOCK == memory.bytes[BLOCK : 2 * BLOCK]
    tiers.close()


def test_whatever_changes_keys_and_values_changes_the_name(tiny_bloom: Path) -> None:
    plain = identity(tiny_bloom, tiny_bloom, ["bfloat16", "1 rank"])
    assert plain == identity(tiny_bloom, tiny_bloom, ["bfloat16", "1 rank"])
    others = [identity(tiny_bloom, tiny_bloom, ["bfloat16", "2 ranks"]), identity(tiny_bloom, None, ["bfloat16"])]
    weights = next(tiny_bloom.glob("*.safetensors"))
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    try:
        weights.write_bytes(bytes(byte ^ 1 for byte in content[:-4000:-1][::-1]).join([bytes(content[:-3999]), b""]))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy with its times has them
        others.append(identity(tiny_bloom, tiny_bloom, ["bfloat16", "1 rank"]))
    finally:
        weights.write_bytes(bytes(content))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert plain == identity(tiny_bloom, tiny_bloom, ["bfloat16", "1 rank"])
    assert 4 == len({plain, *others})


def test_a_file_that_may_be_larger_than_it_can_be_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.prefix.prefix_file.MOST_PLACES", 2)
    monkeypatch.setattr("server.prefix.mover.MOST_PLACES", 2)
    for rank, places in ((0, 2), (0, 4), (1, 4)):
        tiers = Tiers(TierConfig(0, places * 8192, tmp_path / str(places), f"{rank}-of-2", b"i" * 16))
        tiers.open(Memory(), 1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "asks for 0.00 GB in each shard, of which 0.00 GB are used: a file has at most 2 blocks" in message


def test_blocks_of_a_server_with_rings_are_not_those_of_one_without(tmp_path: Path) -> None:
    """With rings, a block holds nothing of a windowed layer, though it may be as large."""
    for kept in (False, True):
        for has_rings in (False, True):
            tiers, memory = Tiers(TierConfig(0, 4 * 8192, tmp_path, "0-of-1", b"i" * 16)), Memory()
            contents = tiers.open(memory, 1, has_rings=has_rings)
            assert (1 if kept else 0) == len(contents.entries)
            file = tiers._file
            assert file is not None
            if not kept:
                assert tiers._move(move_of(1, is_fetch=False, slot=0), file, memory, threading.Event()).is_moved[0]
            tiers.close()
            file.close()


def test_a_disk_tier_below_a_block_says_so(tmp_path: Path) -> None:
    tiers = Tiers(TierConfig(0, 100, tmp_path, "0-of-1", b"i" * 16))
    contents = tiers.open(Memory(), 1)
    assert 0 == contents.num_places and "leaves 100 bytes to each shard, and a block has" in contents.trouble
    tiers.close()
