"""What CPUs share, by files as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.topology import allowed_cpus, nodes, physical_cores, share


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each: CPU 8 is the second thread of CPU 0, CPU 4 is of node 1."""
    for cpu in range(16):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for node, listed in enumerate(("0-3,8-11", "4-7,12-15")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(listed + "\n")
    (tmp_path / "node/node2").mkdir()  # memory without CPUs
    (tmp_path / "node/node2/cpulist").write_text("\n")
    return tmp_path


def test_threads_of_one_core_are_one_core(two_sockets: Path) -> None:
    assert 8 == physical_cores(range(16), two_sockets)
    assert 2 == physical_cores({0, 8, 1}, two_sockets)


def test_a_node_has_those_of_its_cpus_that_are_allowed(two_sockets: Path) -> None:
    assert [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}] == nodes(range(16), two_sockets)
    assert [{4, 5}] == nodes({4, 5}, two_sockets)


@pytest.mark.parametrize("listed", ["0-", "x", "-"])
def test_what_is_no_list_tells_nothing(two_sockets: Path, listed: str) -> None:
    for node in range(2):
        (two_sockets / f"node/node{node}/cpulist").write_text(listed)
    assert [set(range(16))] == nodes(range(16), two_sockets)


@pytest.mark.parametrize(
    ("ranks", "sharing", "firsts"), [(1, 1, [0]), (2, 1, [0, 4]), (3, 3, [0, 0, 0]), (4, 2, [0, 0, 4, 4])]
)
def test_shards_stay_on_a_node_where_each_gets_as_many(
    two_sockets: Path, ranks: int, sharing: int, firsts: list[int]
) -> None:
    shares = [share(rank, ranks, range(16), two_sockets) for rank in range(ranks)]
    assert firsts == [min(cpus) for cpus, _ in shares]
    assert {sharing} == {number for _, number in shares}
    assert set(range(16)) == {cpu for cpus, _ in shares for cpu in cpus}


def test_where_the_system_does_not_tell_each_cpu_is_a_core_and_all_are_near(tmp_path: Path) -> None:
    assert 3 == physical_cores({0, 1, 2}, tmp_path)
    assert [{0, 1, 2}] == nodes({0, 1, 2}, tmp_path)


def test_this_machine_has_a_core_and_a_node() -> None:
    assert 1 <= physical_cores(allowed_cpus()) <= len(allowed_cpus())
    assert allowed_cpus() == set.union(*nodes(allowed_cpus()))
