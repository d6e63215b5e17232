"""What a launcher tells its link, and what a link that takes another's place hears."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, cast

from launch.node_links import LinkProcess
from launch.nodes import Nodes
from launch.processes import Child


class Link:
    """A child that listens."""

    def __init__(self, port: int) -> None:
        self.told: list[dict[str, Any]] = []
        self.events = deque([{"event": "listening", "port": port}])

    def write(self, line: str) -> None:
        self.told.append(json.loads(line))


def test_a_link_in_anothers_place_listens_for_the_next_group_only(tmp_path: Path) -> None:
    link = LinkProcess(tmp_path, Nodes(2, 0, ("127.0.0.1", 29500)), "127.0.0.1", ("python",), "info")
    first, second = Link(1), Link(2)
    link.started(cast(Child, first))
    link.take(cast(Child, first))
    link.order("L", {}, {"group-1/shard-1.sock": 1})
    link.started(cast(Child, second))
    assert not link.is_listening
    link.take(cast(Child, second))
    assert [] == second.told and ("127.0.0.1", 2) == link.address
    link.order("L", {}, {"group-2/shard-1.sock": 1})
    assert [{"group-1/shard-1.sock": 1}] == [order["forwards"] for order in first.told]
    assert [{"group-2/shard-1.sock": 1}] == [order["forwards"] for order in second.told]
