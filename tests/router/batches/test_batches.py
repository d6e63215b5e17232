"""`/v1/files` and `/v1/batches` with OpenAI's own client, through the server's guarded protocol."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from router.batches import batches as batches_module
from router.batches.file_routes import FileAnswer
from router.batches.store import Bounds, Store
from router.jobs.journal import journal_of
from tests.router.doubles import fake_shards, make_limits
from tests.router.jobs.making import request
from tests.router.site import Site, site
from tests.running import open_files

KEYS = {"keys": [{"name": "one", "key": "key-1"}, {"name": "other", "key": "key-2"}]}


def lines_of(num_lines: int, **body: Any) -> bytes:
    rows = [request(f"r{i}", body={"model": "m", "prompt": "hello", "max_tokens": 2, **body}) for i in range(num_lines)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@asynccontextmanager
async def batch_site(folder: Path, *, step_s: float = 0.0, permits: int = 128, **config: Any) -> AsyncIterator[Site]:
    limits = {"max_concurrent_requests": permits}
    shards = fake_shards(make_limits(**limits), step_delay_s=step_s)
    async with site(shards, config={"batch_dir": str(folder), **config}, **limits) as it:
        yield it


@asynccontextmanager
async def client(it: Site, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{it.port}/v1", api_key=key, max_retries=0) as found:
        yield found


async def ended(one: AsyncOpenAI, id: str) -> Batch:
    async with asyncio.timeout(30):
        while True:
            batch = await one.batches.retrieve(id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


async def begun(one: AsyncOpenAI, content: bytes, **more: Any) -> Batch:
    file = await one.files.create(file=("in.jsonl", content), purpose="batch")
    made: Batch = await one.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", **more
    )
    return made


async def content_of(one: AsyncOpenAI, id: str | None) -> list[dict[str, Any]]:
    assert id is not None
    raw = (await one.files.content(id)).content
    return [json.loads(line) for line in raw.splitlines()]


def test_a_batch_from_its_upload_to_its_output(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            content = (
                lines_of(20) + b"nonsense\n" + lines_of(1) + json.dumps(request("bad", body={"prompt": 5})).encode()
            )
            batch = await begun(one, content, metadata={"who": "me"})
            assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"who": "me"}, "/v1/completions")
            batch = await ended(one, batch.id)
            assert batch.status == "completed" and batch.errors is None
            counts = batch.request_counts
            assert counts is not None and (23, 20, 3) == (counts.total, counts.completed, counts.failed)
            answers = await content_of(one, batch.output_file_id)
            assert {f"r{i}" for i in range(20)} == {line["custom_id"] for line in answers} and 20 == len(answers)
            assert all(line["response"]["body"]["usage"]["completion_tokens"] == 2 for line in answers)
            errors = {line["custom_id"]: line for line in await content_of(one, batch.error_file_id)}
            assert "invalid_json_line" == errors[None]["error"]["code"]
            assert "duplicate_custom_id" == errors["r0"]["error"]["code"]
            assert 400 == errors["bad"]["response"]["status_code"]
            times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
            assert None not in times and list(times) == sorted(times, key=int)  # type: ignore[arg-type]
            assert batch.expires_at == batch.created_at + 24 * 3600
            await it.all_free()
            assert 0 == sum(path.name.endswith(".journal") for path in (tmp_path / "files").iterdir())
            document = (await it.http.get("/openapi.json")).json()
            for path in (f"/v1/batches/{batch.id}", f"/v1/files/{batch.output_file_id}", "/v1/batches", "/v1/files"):
                answer = await it.http.get(path)
                known = path.replace(batch.id, "{id}").replace(str(batch.output_file_id), "{id}")
                schema = document["paths"][known]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
                jsonschema.validate(answer.json(), {**schema, "components": document["components"]})

    asyncio.run(story())


def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            content = os.urandom(3_000_000)
            file = await one.files.create(file=("some name.jsonl", content), purpose="batch")
            assert (file.bytes, file.filename, file.purpose) == (len(content), "some name.jsonl", "batch")
            assert content == (await one.files.content(file.id)).content
            assert file == await one.files.retrieve(file.id)
            more = [await one.files.create(file=(f"{i}", b"x" * i), purpose="batch") for i in range(4)]
            assert [one.id for one in reversed(more)] + [file.id] == [f.id async for f in one.files.list(limit=2)]
            page = await one.files.list(limit=2, order="asc", after=more[0].id)
            assert [more[1].id, more[2].id] == [f.id for f in page.data] and page.has_more
            assert [] == [f.id async for f in one.files.list(purpose="batch_output")]
            assert (await one.files.delete(file.id)).deleted
            for call in (one.files.retrieve, one.files.content, one.files.delete):
                with pytest.raises(openai.NotFoundError, match="there is no file"):
                    await call(file.id)
            modes = {oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*") if p.is_file()}
            assert {"0o600"} == modes and 4 == sum(p.suffix == ".data" for p in tmp_path.rglob("*"))

    asyncio.run(story())


Call = Callable[[AsyncOpenAI, str], Any]
WRONG: list[tuple[Call, int, str]] = [
    (lambda one, id: one.files.create(file=("x", b""), purpose="fine-tune"), 400, "`purpose` must be `batch`"),
    (lambda one, id: one.files.create(file=("x", b"y" * 20_000), purpose="batch"), 413, "is larger than `batch_max"),
    (
        lambda one, id: one.files.create(
            file=("x", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        ),
        400,
        "`expires_after` is not served",
    ),
    (lambda one, id: one.files.list(limit=0), 400, "`limit` is '0'"),
    (lambda one, id: one.files.list(extra_query={"limit": "1" * 5000}), 400, "`limit` is '11111111111111111111'"),
    (lambda one, id: one.files.list(extra_query={"limit": "0" * 8 + "20000"}), 400, "from 1 to 10000"),
    (lambda one, id: one.files.list(after="x"), 400, "`after` is 'x'"),
    (lambda one, id: one.batches.retrieve("../lock"), 404, ""),
    (lambda one, id: one.batches.list(limit=101), 400, "from 1 to 100"),
    (lambda one, id: create(one, "file-x"), 404, "there is no file file-x"),
    (lambda one, id: create(one, id, endpoint="/v1/embeddings"), 400, "`endpoint`"),
    (lambda one, id: create(one, id, completion_window="1h"), 400, "`completion_window`"),
    (lambda one, id: create(one, id, metadata={"k" * 65: "v"}), 400, "`metadata"),
    (lambda one, id: create(one, id, metadata={str(i): "v" for i in range(17)}), 400, "`metadata`"),
    (lambda one, id: create(one, id, extra_body={"output_expires_after": {}}), 400, "`output_expires_after`"),
]


def test_what_is_wrong_gets_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, batch_max_file_bytes=10_000) as it, client(it) as one:
            file = await one.files.create(file=("x", b"{}"), purpose="batch")
            for call, status, says in WRONG:
                with pytest.raises(openai.APIStatusError) as refused:
                    await call(one, file.id)
                assert status == refused.value.status_code and says in refused.value.message
                assert {"message", "type", "param", "code"} == set(refused.value.response.json()["error"])
            assert [] == list(tmp_path.rglob("*.part"))
            assert [file.id] == [found.id async for found in one.files.list()]

    asyncio.run(story())


def create(one: AsyncOpenAI, id: str, **other: Any) -> Any:
    given = {"endpoint": "/v1/completions", "completion_window": "24h", **other}
    return one.batches.create(input_file_id=id, **given)


BOUNDARY = {"content-type": "multipart/form-data; boundary=b"}


def test_a_form_without_end_is_refused_though_no_file_is_in_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, batch_max_file_bytes=100_000) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            head = "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
            writer.write(f"{head}Content-Type: {BOUNDARY['content-type']}\r\n\r\n".encode())
            field = b'--b\r\nContent-Disposition: form-data; name="other"\r\n\r\n'
            writer.write(b"%x\r\n%s\r\n" % (len(field), field))
            answer = asyncio.create_task(reader.readline())
            async with asyncio.timeout(30):
                while not answer.done():
                    writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
                    await asyncio.sleep(0.001)
            assert b"HTTP/1.1 413 " == answer.result()[:13]
            writer.close()

    asyncio.run(story())


def test_a_file_that_is_deleted_while_it_is_sent_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was before its first byte; and nothing stays open."""
    content = os.urandom(200_000)

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            file = await one.files.create(file=("x", content), purpose="batch")
            store, send = it.app.state.batches.store, FileAnswer.__call__

            async def deleted_first(self: FileAnswer, *given: Any) -> None:
                store.delete_file("", file.id)
                await send(self, *given)

            monkeypatch.setattr(FileAnswer, "__call__", deleted_first)
            assert content == (await one.files.content(file.id)).content
            assert [] == [path for path in open_files(os.getpid()) if path.endswith(".data (deleted)")]

    asyncio.run(story())


FORMS = [
    (b"{}", {"content-type": "application/json"}, 415, "the body must be a form"),
    (b"--b\r\n", BOUNDARY, 400, "ends before its last boundary"),
    (b"x" * 9000, BOUNDARY, 400, "does not begin with the boundary"),
    (b"--b--\r\n", BOUNDARY, 400, "no part `file`"),
    (b"--b\r\nX: y\r\n\r\n\r\n--b--", BOUNDARY, 400, "no `Content-Disposition"),
]


def test_a_form_that_is_none_gets_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path) as it:
            for body, headers, status, says in FORMS:
                answer = await it.http.post("/v1/files", content=body, headers=headers)
                assert status == answer.status_code and says in answer.json()["error"]["message"], answer.text
            assert [] == list((tmp_path / "files").iterdir())

    asyncio.run(story())


def test_each_key_sees_its_own(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))

    async def story() -> None:
        folder = tmp_path / "batches"
        async with batch_site(folder, api_keys_file=str(tmp_path / "keys.json")) as it:
            async with client(it, "key-1") as one, client(it, "key-2") as other:
                batch = await begun(one, lines_of(3))
                batch = await ended(one, batch.id)
                assert "completed" == batch.status
                assert [] == [f async for f in other.files.list()] == [b async for b in other.batches.list()]
                for call in (other.batches.retrieve, other.batches.cancel):
                    with pytest.raises(openai.NotFoundError):
                        await call(batch.id)
                assert batch.output_file_id is not None
                with pytest.raises(openai.NotFoundError):
                    await other.files.content(batch.output_file_id)
                with pytest.raises(openai.AuthenticationError):
                    async with client(it, "wrong") as nobody:
                        await nobody.batches.list()

    asyncio.run(story())


def test_a_cancelled_batch_tells_of_every_line(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, step_s=0.01, batch_concurrency=2) as it, client(it) as one:
            batch = await begun(one, lines_of(40, max_tokens=100))
            async with asyncio.timeout(20):
                while (await one.batches.retrieve(batch.id)).status != "in_progress":
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.BadRequestError, match="cancel it first"):
                await one.files.delete(batch.input_file_id)
            assert "cancelling" == (await one.batches.cancel(batch.id)).status
            batch = await ended(one, batch.id)
            assert ("cancelled", 40) == (batch.status, batch.request_counts and batch.request_counts.total)
            errors = await content_of(one, batch.error_file_id)
            there = await content_of(one, batch.output_file_id) if batch.output_file_id else []
            assert {"batch_cancelled"} == {line["error"]["code"] for line in errors}
            assert {f"r{i}" for i in range(40)} == {line["custom_id"] for line in [*errors, *there]}
            assert 40 == len(errors) + len(there)
            with pytest.raises(openai.BadRequestError, match="the batch is cancelled"):
                await one.batches.cancel(batch.id)
            await it.all_free()

    asyncio.run(story())


def test_a_batch_whose_window_has_passed_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "WINDOW_S", 0)

    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            batch = await ended(one, (await begun(one, lines_of(5))).id)
            assert "expired" == batch.status and batch.expired_at is not None
            assert (None, None, None) == (batch.in_progress_at, batch.output_file_id, batch.error_file_id)
            monkeypatch.setattr(batches_module, "WINDOW_S", 3600)
            monkeypatch.setattr(Store, "is_full", True)  # it begins, and has no room for answers
            batch = await begun(one, lines_of(5))
            async with asyncio.timeout(20):
                while (await one.batches.retrieve(batch.id)).status != "in_progress":
                    await asyncio.sleep(0.001)
            it.app.state.batches._under_way[batch.id].end("batch_expired")  # as its clock does
            batch = await ended(one, batch.id)
            assert "expired" == batch.status and batch.expired_at is not None
            errors = await content_of(one, batch.error_file_id)
            assert 5 * ["batch_expired"] == [line["error"]["code"] for line in errors]

    asyncio.run(story())


def test_an_empty_file_fails(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            batch = await ended(one, (await begun(one, b"\n")).id)
            assert "failed" == batch.status and batch.errors is not None and batch.errors.data is not None
            assert ["empty_file"] == [error.code for error in batch.errors.data]

    asyncio.run(story())


def test_the_next_server_goes_on_and_answers_no_line_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, step_s=0.01, batch_concurrency=2) as it, client(it) as one:
            batch = await begun(one, lines_of(60))
            async with asyncio.timeout(20):
                while True:
                    counts = (await one.batches.retrieve(batch.id)).request_counts
                    if counts is not None and counts.completed >= 5:
                        break
                    await asyncio.sleep(0.001)
        [journal] = (tmp_path / "files").glob("*.journal")
        done = Path(str(journal).removesuffix(".journal")).read_bytes().count(b"\n")
        assert 5 <= done < 60
        async with batch_site(tmp_path) as it, client(it) as one:
            batch = await ended(one, batch.id)
            assert "completed" == batch.status
            answers = await content_of(one, batch.output_file_id)
            assert sorted(f"r{i}" for i in range(60)) == sorted(line["custom_id"] for line in answers)
            generated = it.metrics.request_count._value.get()
            assert generated == 60 - done
            (left,) = (one for one in (tmp_path / "batches").iterdir())
            assert left.name == f"{batch.id}.json"

    asyncio.run(story())


def test_batches_take_no_permits_and_wait_for_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, step_s=0.005, permits=1) as it, client(it) as one:
            batch = await begun(one, lines_of(60, max_tokens=100))
            async with asyncio.timeout(20):
                while not it.shards.live_ids:
                    await asyncio.sleep(0.001)
            for _ in range(3):
                answer = await it.post("/generate", max_new_tokens=2)
                assert 200 == answer.status_code, answer.text
            assert (await one.batches.retrieve(batch.id)).status == "in_progress"
            await one.batches.cancel(batch.id)
            await ended(one, batch.id)

    asyncio.run(story())


def test_a_full_disk_lets_a_batch_wait_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "DISK_RETRY_S", 0.05)
    real, is_full = os.pwrite, True
    refused = asyncio.Event()

    def write(file: int, content: Any, at: int) -> int:
        if is_full:
            refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, content, at)

    async def story() -> None:
        nonlocal is_full
        async with batch_site(tmp_path) as it, client(it) as one:
            monkeypatch.setattr("router.jobs.journal.os.pwrite", write)
            batch = await begun(one, lines_of(8))
            async with asyncio.timeout(20):
                await refused.wait()
            assert 200 == (await it.post("/generate", max_new_tokens=2)).status_code
            is_full = False
            batch = await ended(one, batch.id)
            assert "completed" == batch.status
            assert 8 == len(await content_of(one, batch.output_file_id))

    is_full = True
    asyncio.run(story())


def test_a_folder_has_room_for_so_much(tmp_path: Path) -> None:
    async def story() -> None:
        async with batch_site(tmp_path, batch_max_bytes=50_000, batch_max_files=3) as it, client(it) as one:
            for _ in range(3):
                last = await one.files.create(file=("x", b"y" * 10_000), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="you keep 3 files, of `batch_max_files` 3"):
                await one.files.create(file=("x", b"y"), purpose="batch")
            await one.files.delete(last.id)
            with pytest.raises(openai.BadRequestError, match=r"does not fit into the 30000 that are left"):
                await one.files.create(file=("x", b"y" * 40_000), purpose="batch")

    asyncio.run(story())


def test_an_upload_may_take_longer_than_a_body_and_not_be_silent(tmp_path: Path) -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        "Content-Length: {}\r\n\r\n"
    )
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 4000 + b"\r\n--b--\r\n"
    )

    async def send(port: int, pieces: list[bytes]) -> tuple[bytes, float]:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.format(len(form)).encode())
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.25)
        async with asyncio.timeout(60):
            answer = await reader.readline()
        writer.close()
        return answer, time.monotonic() - began

    async def story() -> None:
        async with batch_site(tmp_path, body_timeout=1.5, payload_limit=100) as it:
            slow, took = await send(it.port, [form[at : at + 500] for at in range(0, len(form), 500)])
            assert b" 200 " in slow and took > 1.5  # the pauses alone are longer
            silent, _ = await send(it.port, [form[:2000]])
            assert b" 400 " in silent
            assert [] == list(tmp_path.rglob("*.part"))

    asyncio.run(story())


@pytest.mark.parametrize("in_the_way", ["", "files", "batches"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, in_the_way: str) -> None:
    folder = tmp_path / "batches"
    if in_the_way:
        folder.mkdir()
    (folder / in_the_way).write_text("a file, where there must be a folder: not even root can write below it")
    with pytest.raises(ValueError, match=r"batch_dir .*batches cannot be used: .*: give a folder that may be written"):
        Store(folder, Bounds(1, 3, 1))


def test_two_servers_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.store.PATIENCE_S", 0.0)
    store = Store(tmp_path, Bounds(1, 3, 1))
    with pytest.raises(ValueError, match=r"another server uses it: end that one, or give another folder$"):
        Store(tmp_path, Bounds(1, 3, 1))
    store.close()
    Store(tmp_path, Bounds(1, 3, 1)).close()


def test_what_a_kill_left_is_cleared_and_what_is_not_ours_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Store(tmp_path, Bounds(1, 3, 1)).close()
    files, batches = tmp_path / "files", tmp_path / "batches"
    a, b, c, d = (f"file-{letter * 24}" for letter in "abcd")
    for name in (f"{a}.part", f"{b}.data", f"{c}.json", f"{c}.json.new", f"{b}.data.journal", f"{b}.data.journal.new"):
        (files / name).write_text("x")
    (batches / f"batch_{'e' * 24}.json.new").write_text("x")
    stay = {f"{d}.json", f"{d}.data", "precious.txt", "thesis.pdf", "link.data", "file-x.part", f"{a}.part.old"}
    for name in stay - {"link.data"}:
        (files / name).write_text("{")
    (files / "link.data").symlink_to(files / "thesis.pdf")
    Store(tmp_path, Bounds(1, 3, 1)).close()
    assert stay == {path.name for path in files.iterdir()} and [] == list(batches.iterdir())
    told = [record.getMessage() for record in caplog.records if "they stay" in record.getMessage()]
    assert 1 == len(told) and "has 5 names that are no server's, such as 'file-" in told[0]


def test_a_damaged_record_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with batch_site(tmp_path) as it, client(it) as one:
            batch = await ended(one, (await begun(one, lines_of(2))).id)
        known = [tmp_path / "batches" / f"{batch.id}.json", tmp_path / "files" / f"{batch.input_file_id}.json"]
        for path in known:
            whole = json.loads(path.read_text())
            for field in set(whole) - {"_room"}:
                for wrong in ({**whole, field: {"x": 1}}, {name: whole[name] for name in whole if name != field}):
                    if field == "metadata" and field in wrong:
                        continue  # it may be any object of texts
                    caplog.clear()
                    path.write_text(json.dumps(wrong))
                    store = Store(tmp_path, Bounds(1, 3, 1))
                    store.close()
                    assert path.stem not in {*store.files, *store.batches}, wrong
                    assert f"{path} is left out" in caplog.text
            path.write_text(json.dumps({name: whole[name] for name in whole if name != "_room"}))
            store = Store(tmp_path, Bounds(1, 3, 1))
            store.close()
            assert path.stem in {*store.files, *store.batches}

    asyncio.run(story())


def test_without_a_folder_there_are_no_such_routes() -> None:
    async def story() -> None:
        async with site() as it:
            for path in ("/v1/files", "/v1/batches"):
                answer: httpx2.Response = await it.http.get(path)
                assert 404 == answer.status_code
                assert "started with --batch-dir" in answer.json()["error"]["message"]
            assert "/v1/files" not in (await it.http.get("/openapi.json")).json()["paths"]

    asyncio.run(story())


def test_journals_are_beside_outputs() -> None:
    assert Path("a/file-x.data.journal") == journal_of(Path("a/file-x.data"))
