"""The store at which ranks on several nodes meet does what torch's process groups ask of a store."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from server.ranks.rendezvous import SocketStore, StoreServer


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    server = StoreServer(str(tmp_path / "store.sock"))
    yield str(tmp_path / "store.sock")
    server.close()


def test_values_are_shared_by_all(path: str) -> None:
    with closing(SocketStore(path, 10)) as one, closing(SocketStore(path, 10)) as other:
        assert 0o600 == os.stat(path).st_mode & 0o777
        one.set("key", bytes(range(256)))
        assert bytes(range(256)) == other.get("key")
        assert [3, 5] == [one.add("count", 3), other.add("count", 2)]
        assert (True, False) == (other.check(["key", "count"]), other.check(["key", "none"]))
        assert 2 == one.num_keys()
        assert [b"5", bytes(range(256))] == one.multi_get(["count", "key"])
        assert (True, False) == (one.delete_key("key"), one.delete_key("key"))
        assert b"mine" == one.compare_set("owner", "", "mine")
        assert b"mine" == other.compare_set("owner", "nobody", "theirs")
        assert b"theirs" == other.compare_set("owner", "mine", "theirs")
        assert b"expected" == other.compare_set("nothing", "expected", "x")


def test_who_asks_waits_until_a_value_comes_or_time_is_up(path: str) -> None:
    with closing(SocketStore(path, 10)) as one, closing(SocketStore(path, 10)) as other:
        later = threading.Timer(0.1, other.set, ("late", b"here"))
        later.start()
        assert b"here" == one.get("late")
        one.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.05 s for never"):
            one.get("never")
        with pytest.raises(dist.DistStoreError, match="never"):
            other.wait(["never"], timedelta(seconds=0.05))


def test_a_store_that_is_gone_is_a_lost_peer(path: str, tmp_path: Path) -> None:
    with pytest.raises(dist.DistNetworkError, match="refused"):
        SocketStore(str(tmp_path / "none.sock"), 0.05)


def test_a_moment_without_descriptors_ends_nothing(path: str) -> None:
    """Who is let in then is let in a little later."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(20)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            end.connect(path)
            time.sleep(0.2)  # in which it is tried in vain
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        end.sendall(b'{"ask": "add", "with": ["count", 2]}\n')
        assert b"2\n" == end.recv(100)


def test_strangers_end_their_own_connection(path: str) -> None:
    for line in (b"no JSON\n", b'{"ask": "eval", "with": []}\n', b'{"ask": "set", "with": [1]}\n', b"[]\n"):
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(10)
            end.connect(path)
            end.sendall(line)
            assert b"" == end.recv(1)
    with closing(SocketStore(path, 10)) as store:
        assert 0 == store.num_keys()
