"""Lines for a reader that stops, goes away, or has no room: nothing waits, order holds, no line is torn."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from host.output import Output


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """(reader, writer) of a pipe; the writer would wait where it may."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        yield reader, writer
    finally:
        for descriptor in (reader, writer):
            os.close(descriptor)


def read_all(reader: int, output: Output) -> bytes:
    """Everything that `output` has for a reader that goes on."""
    got = bytearray()
    while True:
        try:
            got += os.read(reader, 1 << 20)
        except BlockingIOError:
            if not output.pending:
                return bytes(got)
        output.flush()


def test_a_reader_that_stopped_gets_whole_lines_in_order_and_the_number_of_the_others() -> None:
    with pipe() as (reader, writer):
        output = Output(writer)
        for number in range(3000):
            output.write(f"{number} " + "x" * 1000)
        assert output.dropped and output.take_drops() is None  # the reader has not caught up yet
        dropped = output.dropped
        lines = read_all(reader, output).decode().splitlines()
        assert [f"{number} " + "x" * 1000 for number in range(3000 - dropped)] == lines
        assert f"{dropped} log lines dropped: output was blocked" == output.take_drops()
        assert output.take_drops() is None


def test_a_vital_line_is_kept_whatever_waits() -> None:
    with pipe() as (reader, writer):
        output = Output(writer)
        for _ in range(3000):
            output.write("x" * 1000)
        output.write("why it ends", is_vital=True)
        assert read_all(reader, output).endswith(b"\nwhy it ends\n")


def test_the_descriptor_stays_as_it_was() -> None:
    with pipe() as (_, writer):
        before = fcntl.fcntl(writer, fcntl.F_GETFL)
        Output(writer).write("x")
        assert before == fcntl.fcntl(writer, fcntl.F_GETFL)


def test_a_reader_that_is_gone_is_gone_for_good() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = Output(writer)
    output.write("x")
    output.write("y")
    assert (False, None) == (output.pending, output.take_drops())
    os.close(writer)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_an_obstacle_that_may_pass_is_waited_out(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with (tmp_path / "log").open("wb") as file, monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        output = Output(file.fileno())
        output.write("first")
        for _ in range(3000):
            output.write("x" * 1000)
        dropped = output.dropped
        patched.undo()
        output.flush()
        assert f"{dropped} log lines dropped: {os.strerror(code)}" == output.take_drops()
    lines = (tmp_path / "log").read_text().splitlines()
    assert ("first", 3001 - dropped) == (lines[0], len(lines))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 1 MB; it takes root, or a user namespace, to have one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_tears_no_line_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    lines = [f"{number} " + "x" * 1000 for number in range(600)]
    with small_disk(tmp_path / "disk") as disk:
        (disk / "rest").write_bytes(b"x" * 700_000)
        with (disk / "log").open("wb") as file:
            output = Output(file.fileno())
            for line in lines:
                output.write(line)
            assert output.pending
            (disk / "rest").unlink()
            output.flush()
        assert lines == (disk / "log").read_text().splitlines()
    assert 0 == output.dropped
