"""The private folder of a launch: whose it is, who may enter, and who removes it when nobody is left to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch import files
from launch.errors import Refusal
from launch.files import LOCK, check_sockets, private_folder
from tests.running import ROOT


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which private folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "SOCKET_PATH_BYTES", 4096)  # or a long tmp_path would not be taken
    return tmp_path


LAUNCH = """
import os
from launch import files
files.SOCKET_PATH_BYTES = 4096
made = files.private_folder()
folder = made.__enter__()
(folder / "group-1").mkdir()
(folder / "group-1" / "shard-0.json").write_text("{}")
print(folder, flush=True)
os.kill(os.getpid(), 9)
"""


def leave_behind(temporary: Path) -> Path:
    """The folder of a launch that was killed."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
    )
    made = Path(done.stdout.strip())
    assert temporary == made.parent
    return made


def test_nobody_else_may_enter_whatever_the_umask() -> None:
    before = os.umask(0)
    try:
        with private_folder() as folder:
            (folder / "rendezvous").touch()  # as open to all as the umask lets torch make it
            assert 0o666 == (folder / "rendezvous").stat().st_mode & 0o777
            assert (0o700, os.geteuid()) == (folder.stat().st_mode & 0o777, folder.stat().st_uid)
            assert 0o600 == (folder / LOCK).stat().st_mode & 0o777
    finally:
        os.umask(before)
    assert not folder.exists()


def test_what_a_killed_launch_left_is_removed(temporary: Path) -> None:
    left = leave_behind(temporary)
    assert (left / "group-1" / "shard-0.json").exists()
    with private_folder():
        assert not left.exists()


def test_a_removal_that_was_cut_short_is_finished(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leave_behind(temporary)
    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        with private_folder():
            assert (left / LOCK).exists()  # it is found again by its lock
    with private_folder():
        assert not left.exists()


def test_folders_of_others_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leave_behind(temporary)
    (temporary / "lockstep-link").symlink_to(left)
    (temporary / "lockstep-no-lock").mkdir()
    (temporary / "lockstep-file").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
        with private_folder():
            assert {"link", "no-lock", "file", left.name.removeprefix("lockstep-")} < {
                path.name.removeprefix("lockstep-") for path in temporary.iterdir()
            }


def test_a_folder_that_was_taken_for_a_leftover_is_made_again(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launch comes between the making of the lock and its taking: before, at, and after it."""
    flock, came = files.fcntl.flock, []

    def flock_after_another_launch(lock: int, operation: int) -> None:
        if not came:
            came.append(lock)
            files._remove_leftovers(temporary)
        flock(lock, operation)

    monkeypatch.setattr(files.fcntl, "flock", flock_after_another_launch)
    with private_folder() as folder:
        assert [folder.name] == [path.name for path in temporary.iterdir()]
        assert (folder / LOCK).exists()


def test_launches_that_start_together_all_have_their_folders(temporary: Path) -> None:
    def launch(_: int) -> bool:
        with private_folder() as folder:
            (folder / "shard-0.json").write_text("{}")
            files._remove_leftovers(temporary)
            return (folder / "shard-0.json").exists() and (folder / LOCK).exists()

    with ThreadPoolExecutor(8) as pool:  # flock tells descriptors apart, not processes
        assert [True] * 200 == list(pool.map(launch, range(200)))
    assert [] == list(temporary.iterdir())


@pytest.mark.parametrize("character", ",%#?")
def test_sockets_are_nowhere_that_an_address_cannot_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    """gRPC would wait for another socket, without a word."""
    odd = tmp_path / f"a{character}b"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with private_folder() as folder:
        assert Path("/tmp") == folder.parent
    with pytest.raises(Refusal) as refused:
        check_sockets(str(odd / "shard"), 1)
    assert f"has a {character!r}, which the address of a socket may not: choose another" in str(refused.value.problems)
