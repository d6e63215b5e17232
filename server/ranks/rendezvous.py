"""A store of torch.distributed's over a unix socket: how the ranks of a stage on several nodes find each other.

torch's own TCPStore listens on every interface and checks no identity. Here rank 0 of a stage answers on a socket
that is its owner's alone; the nodes' links carry connections to it from other nodes. One line of JSON asks, one
answers; bytes are written as Latin-1. What is kept is a few addresses for each rank. Left out: what torch's process
groups do not use (queues, lists of keys).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

POLL_S = 0.05
LINE_BYTES = 1 << 20  # addresses are some hundred bytes
SCHEME = "unix://"  # of a rendezvous at such a store


class StoreServer:
    """Answers at `path` until the process ends. Raises OSError where it cannot listen there."""

    def __init__(self, path: str) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        Path(path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                end, _ = self._listener.accept()
            except OSError:  # it was closed, or there are no more descriptors for a moment
                time.sleep(POLL_S)
            else:
                threading.Thread(target=self._serve, args=(end,), name="store-client", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, end: socket.socket) -> None:
        with end, end.makefile("rwb") as stream, suppress(OSError, ValueError, KeyError, TypeError):
            while line := stream.readline(LINE_BYTES):
                question = json.loads(line)
                answer = OPERATIONS[question["ask"]](self, *question["with"])
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()

    def _set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode("latin-1")
            self._changed.notify_all()

    def _add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        with self._changed:
            present = self._values.get(key)
            if (present is None and not expected) or present == expected.encode("latin-1"):
                present = self._values[key] = desired.encode("latin-1")
                self._changed.notify_all()
            return (expected.encode("latin-1") if present is None else present).decode("latin-1")

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str] | None:
        """The values of these keys once all are there; None where they are not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
                return None
            return [self._values[key].decode("latin-1") for key in keys]

    def _check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def _delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def _count(self) -> int:
        with self._changed:
            return len(self._values)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "set": StoreServer._set,
    "add": StoreServer._add,
    "compare_set": StoreServer._compare_set,
    "wait": StoreServer._wait,
    "check": StoreServer._check,
    "delete": StoreServer._delete,
    "count": StoreServer._count,
}


class SocketStore(dist.Store):  # type: ignore[name-defined,misc]  # torch does not declare it
    """The store at `path`, once it answers. Raises DistNetworkError where it does not in `patience` s."""

    def __init__(self, path: str, patience: float) -> None:
        super().__init__()
        self._asking = threading.Lock()
        self._seconds = patience
        self._end = _dial(path, time.monotonic() + patience)
        self._stream = self._end.makefile("rwb")

    def close(self) -> None:
        """Ask nothing any more."""
        self._stream.close()
        self._end.close()

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._asking:
            try:
                self._stream.write(json.dumps({"ask": operation, "with": arguments}).encode() + b"\n")
                self._stream.flush()
                answer = self._stream.readline(LINE_BYTES)
            except OSError as error:
                raise dist.DistNetworkError(f"Connection reset by peer: {error}") from None
        if not answer:
            raise dist.DistNetworkError("Connection closed by peer: the store of this stage is gone")
        return json.loads(answer)

    def set(self, key: str, value: str | bytes) -> None:
        """Have `value` under `key`."""
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """The value under `key`, once there is one. Raises DistStoreError where that takes too long."""
        return self._awaited([key], self._seconds)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values under `keys`, as `get`."""
        return self._awaited(keys, self._seconds)

    def add(self, key: str, amount: int) -> int:
        """Count up from 0; the new count."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put `desired` where `expected` is; what is there then."""
        return bytes(self._ask("compare_set", key, _text(expected), _text(desired)).encode("latin-1"))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raises DistStoreError where that takes too long."""
        self._awaited(keys, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return bool(self._ask("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """How many keys have values."""
        return int(self._ask("count"))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` may take from now on."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """As `set_timeout`."""
        return timedelta(seconds=self._seconds)

    def _awaited(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        values = self._ask("wait", list(keys), seconds)
        if values is None:
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s for {', '.join(keys)}")
        return [value.encode("latin-1") for value in values]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _dial(path: str, until: float) -> socket.socket:
    while True:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(path)
            return end
        except OSError as error:
            end.close()
            if time.monotonic() > until:
                raise dist.DistNetworkError(f"Connection refused: the store of this stage: {error}") from None
        time.sleep(POLL_S)
