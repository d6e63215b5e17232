"""Batches beside full disks, clients that want everything, and what nobody expected."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from router.batches import batches as batches_module
from router.batches.store import Bounds, Record, Store
from router.jobs.census import Census, take_census
from tests.router.batches.test_batches import KEYS, batch_site, begun, client, content_of, create, ended, lines_of


def test_what_nobody_expected_fails_a_batch_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Census:
        raise ZeroDivisionError

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            with monkeypatch.context() as patch:
                patch.setattr(batches_module, "take_census", breaks)
                batch = await ended(one, (await begun(one, lines_of(2))).id)
            assert "failed" == batch.status and batch.failed_at is not None
            assert batch.errors is not None and batch.errors.data is not None
            assert ["internal_error"] == [error.code for error in batch.errors.data]
            while "failed" not in next((tmp_path / "batches").iterdir()).read_text():
                await asyncio.sleep(0.001)
        async with batch_site(tmp_path) as it, client(it) as one:
            assert batch == await one.batches.retrieve(batch.id)
            await one.files.delete(batch.input_file_id)

    asyncio.run(story())


def test_a_line_that_is_nested_too_deep_fails_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            deep = lines_of(1, x=0).replace(b'"x": 0', b'"x": ' + b"[" * 300 + b"]" * 300).replace(b'"r0"', b'"deep"')
            batch = await ended(one, (await begun(one, lines_of(2) + deep)).id)
            assert "completed" == batch.status
            assert ["deep"] == [line["custom_id"] for line in await content_of(one, batch.error_file_id)]

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------- full folders


def test_lines_that_may_take_more_than_there_is_fail_the_batch_before_it_writes(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, batch_max_bytes=1_000_000) as it, client(it) as one:
            batch = await ended(one, (await begun(one, b"1\n" * 20_000)).id)
            assert "failed" == batch.status and batch.errors is not None and batch.errors.data is not None
            assert ["too_many_lines"] == [error.code for error in batch.errors.data]
            assert 40_000 == sum(path.stat().st_size for path in (tmp_path / "files").glob("*.data*"))

    asyncio.run(story())


def test_a_batch_begins_once_there_is_room_for_an_error_of_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "DISK_RETRY_S", 0.01)

    async def story() -> None:
        async with batch_site(tmp_path, batch_max_bytes=200_000) as it, client(it) as one:
            filler = await one.files.create(file=("x", b"x" * 150_000), purpose="batch")
            counted = asyncio.Event()
            loop = asyncio.get_running_loop()

            def counting(*given: Any) -> Census:
                loop.call_soon_threadsafe(counted.set)
                return take_census(*given)

            monkeypatch.setattr(batches_module, "take_census", counting)
            batch = await begun(one, lines_of(100))  # 50 kB of errors at most
            for _ in range(3):
                counted.clear()
                await counted.wait()
            assert "validating" == (await one.batches.retrieve(batch.id)).status
            await one.files.delete(filler.id)
            batch = await ended(one, batch.id)
            assert ("completed", 100) == (batch.status, len(await content_of(one, batch.output_file_id)))

    asyncio.run(story())


def test_what_batches_may_have_to_write_counts_for_their_key(tmp_path: Path) -> None:
    store = Store(tmp_path, Bounds(1000, 3, 1000))
    assert store.has_room("one", 700)
    store.batches["b"], store.writing["b"] = {"owner": "one"}, lambda: 700
    assert not store.has_room("one", 100) and store.has_room("other", 100)
    store.batches["b"]["owner"] = ""
    assert store.has_room("", 300) and not store.has_room("", 301)
    store.close()


def test_a_batch_that_waits_for_room_hears_that_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says of its lines has room."""
    monkeypatch.setattr(batches_module, "DISK_RETRY_S", 3600)
    monkeypatch.setattr(Store, "is_full", True)

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            batch = await begun(one, lines_of(8))
            async with asyncio.timeout(30):
                while (await one.batches.retrieve(batch.id)).status != "in_progress":
                    await asyncio.sleep(0.001)
            await one.batches.cancel(batch.id)
            batch = await ended(one, batch.id)
            assert "cancelled" == batch.status
            errors = await content_of(one, batch.error_file_id)
            assert 8 * ["batch_cancelled"] == [line["error"]["code"] for line in errors]

    asyncio.run(story())


def test_a_batch_that_cannot_be_saved_was_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, record: Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            file = await one.files.create(file=("in.jsonl", lines_of(1)), purpose="batch")
            with monkeypatch.context() as patch:
                patch.setattr(Store, "save_batch", full)
                with pytest.raises(openai.InternalServerError, match="No space left"):
                    await create(one, file.id)
            assert [] == [batch async for batch in one.batches.list()]
            assert (await one.files.delete(file.id)).deleted

    asyncio.run(story())


def test_files_that_batches_make_count_before_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "is_full", True)  # no batch ends by itself

    async def story() -> None:
        async with batch_site(tmp_path, batch_max_files=4) as it, client(it) as one:
            batch = await begun(one, lines_of(1))
            with pytest.raises(
                openai.BadRequestError, match="you keep 1 files and await 2 of batches, of `batch_max_f"
            ):
                await create(one, batch.input_file_id)
            await one.files.create(file=("x", b"y"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="delete some, or wait for batches to end"):
                await one.files.create(file=("x", b"y"), purpose="batch")
            await one.batches.cancel(batch.id)
            await ended(one, batch.id)
            await one.files.create(file=("x", b"y"), purpose="batch")

    asyncio.run(story())


# --------------------------------------------------------------------------------------------------- many at one time


def test_a_batch_can_be_cancelled_as_soon_as_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, may_save = Store.save_batch, threading.Event()

    def late(self: Store, record: Record) -> None:
        assert may_save.wait(30)
        save(self, record)

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            monkeypatch.setattr(Store, "save_batch", late)
            monkeypatch.setattr(Store, "is_full", True)  # it does not end by itself
            making = asyncio.create_task(begun(one, lines_of(3)))
            while not [file async for file in one.files.list()]:
                await asyncio.sleep(0.001)
            assert [] == [batch async for batch in one.batches.list()]
            may_save.set()
            batch = await making
            await one.batches.cancel(batch.id)
            assert "cancelled" == (await ended(one, batch.id)).status

    asyncio.run(story())


def test_batches_that_are_cancelled_before_their_turn_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are lines counted in the threads that uploads and downloads share."""
    threads: list[str] = []

    def noting(*given: Any) -> Census:
        threads.append(threading.current_thread().name)
        return take_census(*given)

    monkeypatch.setattr(batches_module, "take_census", noting)

    async def story() -> None:
        async with batch_site(tmp_path, step_s=0.01, batch_concurrency=1) as it, client(it) as one:
            long = await begun(one, lines_of(50, max_tokens=100))
            async with asyncio.timeout(30):
                while (await one.batches.retrieve(long.id)).status != "in_progress":
                    await asyncio.sleep(0.001)
            blank = await one.files.create(file=("blank", b"\n" * 100_000), purpose="batch")
            others = [await create(one, blank.id) for _ in range(20)]
            await asyncio.gather(*(one.batches.cancel(batch.id) for batch in others))
            for batch in others:
                batch = await ended(one, batch.id)
                assert ("cancelled", None) == (batch.status, batch.in_progress_at)
            assert ["census_0"] == threads
            assert (await one.files.delete(blank.id)).deleted
            await one.batches.cancel(long.id)
            await ended(one, long.id)

    asyncio.run(story())


def test_one_key_does_not_take_all_places_of_uploads(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    folder = tmp_path / "batches"
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer key-1\r\nContent-Length: 1000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n-"
    )

    async def story() -> None:
        async with batch_site(folder, api_keys_file=str(tmp_path / "keys.json")) as it, client(it, "key-2") as other:
            connections = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(16)]
            for _, writer in connections:
                writer.write(head.encode())
            answers = [asyncio.create_task(reader.readline()) for reader, _ in connections]
            async with asyncio.timeout(30):
                while sum(answer.done() for answer in answers) < 4 or len(list(folder.rglob("*.part"))) < 12:
                    await asyncio.sleep(0.001)
            assert 4 * [b"HTTP/1.1 429 Too Many Requests\r\n"] == [a.result() for a in answers if a.done()]
            assert 1 == (await other.files.create(file=("x", b"x"), purpose="batch")).bytes
            for answer, (_, writer) in zip(answers, connections, strict=True):
                answer.cancel()
                writer.close()

    asyncio.run(story())


def test_what_is_known_of_files_changes_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop alone: a list of files beside uploads would fail else."""
    threads: set[threading.Thread] = set()

    class Noting(dict[str, Record]):
        def __setitem__(self, id: str, record: Record) -> None:
            threads.add(threading.current_thread())
            super().__setitem__(id, record)

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            store = it.app.state.batches.store
            store.files, store.batches = Noting(), Noting()
            batch = await ended(one, (await begun(one, lines_of(3))).id)
            assert 2 == len(store.files) and "completed" == batch.status
            assert {threading.main_thread()} == threads

    asyncio.run(story())
