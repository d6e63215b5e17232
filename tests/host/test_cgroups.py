"""Limits of control groups, in both versions, on the group itself and on those around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.cgroups import cpu_quota, memory_left

Files = dict[str, str]


def tree(folder: Path, files: Files, membership: str) -> tuple[Path, Path]:
    mounted, member = folder / "cgroup", folder / "self"
    for name, text in files.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(text + "\n")
    member.write_text(membership)
    return mounted, member


def v1(folder: str, quota: int) -> Files:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({}, "", None),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"cpu.max": "250000 100000"}, "0::/\n", 2.5),
        ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "150000 100000"}, "0::/a/b\n", 1.5),
        ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, "0::/a/b\n", 3.0),
        ({"other/cpu.max": "100000 100000"}, "0::/a\n", None),
        ({"cpu.max": "250000 100000"}, "0::/../../elsewhere\n", 2.5),  # a path of the host's, seen in a container
        (v1("cpu", -1), "4:cpu,cpuacct:/\n", None),
        (v1("cpu/docker/x", 400_000), "9:memory:/y\n4:cpu,cpuacct:/docker/x\n", 4.0),
        (v1("cpu", 50_000), "4:cpu,cpuacct:/docker/x\n", 0.5),
    ],
)
def test_the_narrowest_quota_counts(tmp_path: Path, files: Files, membership: str, quota: float | None) -> None:
    assert quota == cpu_quota(*tree(tmp_path, files, membership))


@pytest.mark.parametrize(
    ("files", "membership", "left"),
    [
        ({}, "0::/\n", None),
        ({"memory.max": "max", "memory.current": "5"}, "0::/\n", None),
        ({"a/memory.max": "100", "a/memory.current": "30"}, "0::/a\n", 70),
        ({"a/memory.max": "100", "a/memory.current": "130"}, "0::/a\n", 0),
        ({"memory/x/memory.limit_in_bytes": "100", "memory/x/memory.usage_in_bytes": "40"}, "9:memory:/x\n", 60),
        (
            {"a/memory.max": "100", "a/memory.current": "90", "a/memory.stat": "file 50\ninactive_file 40\n"},
            "0::/a\n",
            50,
        ),
        (
            {
                "memory/x/memory.limit_in_bytes": "100",
                "memory/x/memory.usage_in_bytes": "90",
                "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 40",
            },
            "9:memory:/x\n",
            50,
        ),
    ],
)
def test_what_memory_is_left(tmp_path: Path, files: Files, membership: str, left: int | None) -> None:
    assert left == memory_left(*tree(tmp_path, files, membership))
