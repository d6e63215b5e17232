"""Tests that compare times with a clock run beside no other one."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from tests.conftest import place


def test_who_is_alone_waits_for_the_others_and_they_for_it(tmp_path: Path) -> None:
    """Two share the room, one comes that wants it alone, and then another that would share it."""
    order: list[str] = []
    is_waiting = threading.Event()

    def alone() -> None:
        is_waiting.set()
        with place(tmp_path, is_alone=True):
            order.append("alone")

    def later() -> None:
        with place(tmp_path, is_alone=False):
            order.append("later")

    threads = [threading.Thread(target=alone), threading.Thread(target=later)]
    with place(tmp_path, is_alone=False):
        with place(tmp_path, is_alone=False):
            order.append("two")
        threads[0].start()
        assert is_waiting.wait(10)
        while not is_held(tmp_path / "door"):
            threads[0].join(0.01)
        threads[1].start()
        threads[1].join(0.1)
        order.append("left")
    for thread in threads:
        thread.join(10)
    assert ["two", "left", "alone", "later"] == order


def is_held(path: Path) -> bool:
    """Whether somebody has the lock."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
