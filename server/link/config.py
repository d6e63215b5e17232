"""What a launcher tells its link: at the start a file, later a line of JSON for each change."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

CONTROL = "control.sock"  # at which the launcher of node 0 hears from the others
# The sockets that a link may open: nothing else of the folder, and nothing outside it.
SOCKET_NAME = re.compile(rf"{re.escape(CONTROL)}|group-\d{{1,9}}/(shard|steps|stage|store)-\d{{1,6}}\.sock", re.ASCII)


@dataclass(frozen=True)
class LinkConfig:
    """One link's settings."""

    folder: str  # the launch's, in which the sockets are
    host: str  # the address at which other nodes' links reach this one
    port: int  # 0: a free one
    node: int
    version: str  # of Lockstep, the same on all nodes
    tls_dir: str | None = None  # with ca.pem, cert.pem and key.pem; None: nothing is encrypted
    log_level: str = "info"

    @classmethod
    def load(cls, path: str | Path) -> LinkConfig:
        """Read what `save` wrote."""
        return cls(**json.loads(Path(path).read_text()))

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Order:
    """What a link is to do from now on, in place of what it was told before."""

    launch: str  # which launch of node 0's this is: links of two do not speak to each other. Empty: not known yet
    peers: Mapping[int, tuple[str, int]]  # where other nodes' links are
    forwards: Mapping[str, int]  # sockets to listen at, and the node on which each of them is

    @classmethod
    def parse(cls, line: str | bytes) -> Order:
        """What `to_json` made."""
        values = json.loads(line)
        peers = {int(node): (str(host), int(port)) for node, (host, port) in values["peers"].items()}
        forwards = {str(name): int(node) for name, node in values["forwards"].items()}
        assert all(SOCKET_NAME.fullmatch(name) for name in forwards), f"no sockets of a launch: {forwards}"
        return cls(values["launch"], peers, forwards)

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))
