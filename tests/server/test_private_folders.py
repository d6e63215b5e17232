"""What the server keeps on disks is its user's alone, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from server.backends.cpu.build import compiled_library
from server.checkpoint import convert
from server.checkpoint.hub import _converted
from server.prefix.prefix_file import PrefixFile


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def keep_blocks(folder: Path, _: pytest.MonkeyPatch) -> None:
    PrefixFile(folder / "prefixes" / "of-this-model", "rank-0", b"x" * 16, 4096, 1 << 16).close()


def compile_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(compiler: str, target: object, library: Path) -> None:
        library.touch(mode=0o600)

    monkeypatch.setattr(import_module("server.backends.cpu.build"), "compile_sources", compiled)
    compiled_library(folder / "kernels")


def convert_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder / "model"
    model.mkdir(mode=0o700)
    monkeypatch.setitem(convert.CONVERSIONS, "weights", lambda source, target: None)
    _converted("weights", model, [], convert.convert_once, folder / "cache", print)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("work", [keep_blocks, compile_kernels, convert_weights])
def test_nobody_else_may_enter_what_is_made(
    work: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "above" / "here"
    (tmp_path / "above").mkdir(mode=0o700)
    folder.mkdir(mode=0o700)
    work(folder, monkeypatch)
    made = [path for path in folder.rglob("*") if path.is_dir()]
    assert made and {0o700} == {path.stat().st_mode & 0o777 for path in made}
