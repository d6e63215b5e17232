"""Settings of what leaves memory: what cannot be is refused without a model, what changes nothing is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from host import folders
from server import config
from server.config import folder_problems, idle_settings, offload_problems, room_problem
from server.prefix.prefix_file import DiskTrouble, PrefixFile
from tests.server.offload.streaming import weight_file

STAYS: dict[str, Any] = {
    "weights_on_device": "100%",
    "weights_on_host": None,
    "kv_on_device": "100%",
    "kv_on_host": None,
    "offload_dir": None,
}


@pytest.fixture(params=["tmpfs", "ramfs"])
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every folder is on a file system in memory."""
    monkeypatch.setattr(folders, "_file_system", lambda folder: request.param)
    return str(request.param)


def test_the_file_system_of_a_folder_is_found_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    lines = [f"30 1 {device >> 63}:77 / /else rw - proc proc rw", f"31 1 {{}} / {tmp_path} rw shared:1 - tmpfs none rw"]
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text("\n".join(lines).format(number))
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    with pytest.raises(ValueError, match=r"--offload-dir .* is in memory \(tmpfs\).*: name a folder on a disk"):
        folders.refuse_memory(tmp_path, "--offload-dir")
    mounts.write_text(lines[0])
    folders.refuse_memory(tmp_path, "--offload-dir")
    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "none")
    folders.refuse_memory(tmp_path, "--offload-dir")


def test_memory_is_no_disk_for_anything(tmp_path: Path, in_memory: str) -> None:
    with pytest.raises(ValueError, match=f"--offload-dir .* is in memory .{in_memory}."):
        weight_file(tmp_path)
    with pytest.raises(DiskTrouble, match=f"--prefix-cache-dir .* is in memory .{in_memory}."):
        PrefixFile(tmp_path, "a", b"w" * 16, 4096, 1 << 20)
    for found in (
        folder_problems(str(tmp_path / "not" / "there")),
        offload_problems(**STAYS | {"offload_dir": str(tmp_path)}, has_own_memory=True),
    ):
        assert "is in memory" in found[0]


@pytest.mark.parametrize(
    ("given", "has_own_memory", "expected"),
    [
        (
            {"weights_on_device": "auto", "kv_on_device": "50%", "offload_dir": "/tmp"},
            False,
            "--weights-on-device auto chooses beside a KV cache that is all on the device, and --kv-on-device is 50%",
        ),
        ({}, False, None),
        ({"weights_on_device": "auto"}, False, None),
        ({"weights_on_device": "50%"}, True, None),
        ({"weights_on_device": "50%"}, False, "--weights-on-device 50% leaves weights to a disk: name a folder on one"),
        ({"kv_on_device": "2GB"}, False, "--kv-on-device 2GB leaves KV blocks to a disk: name a folder on one"),
        (
            {"weights_on_device": "5%", "weights_on_host": "1GB"},
            True,
            "--weights-on-device 5% leaves weights to a disk",
        ),
        ({"weights_on_host": "50%"}, False, "--weights-on-host is for GPUs"),
        ({"kv_on_host": "50%"}, False, "--kv-on-host is for GPUs"),
        ({"offload_dir": "/nothing/here"}, False, "--offload-dir /nothing/here: no file can be made there"),
    ],
)
def test_flags_alone_tell_what_has_no_place(given: dict[str, str], has_own_memory: bool, expected: str | None) -> None:
    found = offload_problems(**STAYS | given, has_own_memory=has_own_memory)
    assert [] == found if expected is None else found[0].startswith(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"offload_dir": "/a", "weights_on_device": "auto"}, None),
        ({"offload_dir": "/a", "kv_on_device": "50%"}, None),
        ({"offload_dir": "/a"}, "--offload-dir holds nothing"),
        ({"weights_on_host": "50%"}, "--weights-on-host changes nothing: --weights-on-device is 100%"),
        ({"kv_on_host": "50%"}, "--kv-on-host changes nothing: --kv-on-device is 100%"),
    ],
)
def test_settings_without_effect_are_said(given: dict[str, str], expected: str | None) -> None:
    found = idle_settings(STAYS | given)
    assert [] == found if expected is None else found[0].startswith(expected)


def test_a_disk_smaller_than_the_prefix_cache_may_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "free_bytes", lambda folder: 77 * 10**9)
    assert room_problem(77.0, str(tmp_path)) is None
    found = room_problem(1000.0, str(tmp_path / "not" / "there"))
    assert found is not None and "is 1000 and" in found and "has room for 77.0 GB" in found
    assert room_problem(0.0, str(tmp_path)) is None
