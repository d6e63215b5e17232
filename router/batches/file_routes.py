"""OpenAI's `/v1/files`: a client's inputs of batches, and their outputs.

An upload goes to the disk as it comes. In place of the bounds of other bodies it has its own: of size
(`batch_max_file_bytes`), of time (as many bytes a second as `payload_limit` in `body_timeout` asks of any body, and
never `body_timeout` without a byte), and of how many there may be at once, of which no API key takes all.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from router.api_document import ERROR_STATUSES
from router.batches.documents import DeletedFile, FileList, FileObject
from router.batches.multipart import Malformed, MultipartReader, PartBegins, boundary_of
from router.batches.pages import LIMIT_PARAMETERS, page, shown
from router.batches.store import FILE_MODE, Record, Store, disk_trouble, new_id
from router.errors import BodyTooLarge, Overloaded, UnsupportedMedia, ValidationError
from router.fairness import may_take
from router.guard import ClientConnection
from router.openai.documents import ErrorAnswer
from router.request_log import harmless
from router.serving import Services, account_of, json_response

MOST_UPLOADS = 16  # at once
MOST_FIELD_BYTES = 1024  # of a field that is no file
FORM_BYTES = 16 * 1024  # of a form around its file
WRITE_BYTES = 1 << 20  # that are written at once, in a thread
PIECE = 1 << 16  # of a file that is sent
MOST_FILENAME = 255
MOST_PAGE = 10_000
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}


class Upload:
    """One file on its way to the disk."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.filename: str | None = None
        self.purpose = bytearray()
        self._most_bytes = most_bytes
        self._num_bytes = self._num_form_bytes = 0  # of the file, and of the form with all of its fields
        self._part: PartBegins | None = None
        self._unwritten = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def close(self) -> None:
        """Of a whole file or of none."""
        os.close(self._file)

    async def take(self, reader: MultipartReader, data: bytes) -> None:
        """Take a part of the body. Raises Malformed, ValidationError, BodyTooLarge and OSError."""
        self._num_form_bytes += len(data)
        if self._num_form_bytes > self._most_bytes + FORM_BYTES:
            raise too_large(self._most_bytes)
        for piece in reader.feed(data):
            if isinstance(piece, PartBegins):
                self._part = piece
                if piece.name.startswith("expires_after"):
                    raise ValidationError("`expires_after` is not served: files stay until deleted, leave it out")
                if piece.name == "file":
                    if self.filename is not None:
                        raise Malformed("the form has two parts `file`: send one file at a time")
                    self.filename = harmless(piece.filename or "batch.jsonl", MOST_FILENAME)
            elif isinstance(piece, bytes) and self._part is not None:
                self._take_piece(self._part.name, piece)
        if len(self._unwritten) >= WRITE_BYTES:
            await self.flush()

    def _take_piece(self, name: str, piece: bytes) -> None:
        if name == "file":
            self._num_bytes += len(piece)
            if self._num_bytes > self._most_bytes:
                raise too_large(self._most_bytes)
            self._unwritten += piece
        elif name == "purpose":
            self.purpose += piece[: MOST_FIELD_BYTES + 1 - len(self.purpose)]

    async def flush(self) -> None:
        """Write what has come. Raises OSError."""
        data, self._unwritten = self._unwritten, bytearray()
        await asyncio.to_thread(_write, self._file, data)

    async def finish(self) -> None:
        """Make it durable. Raises OSError."""
        await self.flush()
        await asyncio.to_thread(os.fsync, self._file)


def _write(file: int, data: bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def too_large(most: int) -> BodyTooLarge:
    """What a client is told whose file is larger than it may be."""
    return BodyTooLarge(
        f"the file, or the form around it, is larger than `batch_max_file_bytes`, {most} bytes: split it"
    )


def owner_of(request: Request) -> str:
    """Whose files and batches a request sees."""
    account = account_of(request)
    return account.name if account is not None else ""


def documented_in(answer: Any, *statuses: int, **extra: Any) -> dict[str, Any]:
    """What a route says of itself."""
    responses: dict[int, Any] = {200: {"model": answer} if answer is not None else {}}
    return {
        "response_class": Response,
        "responses": responses | {status: {"model": ErrorAnswer} for status in statuses},
        **extra,
    }


def add_file_routes(app: FastAPI, services: Services, store: Store) -> None:
    """Serve files."""
    uploads = Uploads(services, store)

    async def upload(request: Request) -> Response:
        return json_response(shown(await uploads.take(request)))

    async def files(request: Request) -> Response:
        owner, purpose = owner_of(request), request.query_params.get("purpose")
        mine = [f for f in store.files.values() if f["owner"] == owner and purpose in (None, f["purpose"])]
        return json_response(page(mine, request.query_params, MOST_PAGE, MOST_PAGE, shown))

    async def one_file(request: Request, id: str) -> Response:
        return json_response(shown(store.file(owner_of(request), id)))

    async def content(request: Request, id: str) -> Response:
        record = store.file(owner_of(request), id)
        try:
            return FileAnswer(store.data_path(record["id"]).open("rb", buffering=0), record["bytes"])
        except OSError as error:
            raise disk_trouble(error) from None

    async def delete(request: Request, id: str) -> Response:
        try:
            store.delete_file(owner_of(request), id)
        except OSError as error:
            raise disk_trouble(error) from None
        return json_response({"id": id, "object": "file", "deleted": True})

    form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}}
    statuses = [status for status in ERROR_STATUSES if status not in (422, 424, 504)]
    of_upload = documented_in(FileObject, *statuses, openapi_extra=form)
    app.post("/v1/files", summary="Upload the input of a batch", **of_upload)(upload)
    parameters = {"parameters": [*LIMIT_PARAMETERS, PURPOSE]}
    of_files = documented_in(FileList, 400, openapi_extra=parameters)
    app.get("/v1/files", summary="Your files, the newest first", **of_files)(files)
    app.get("/v1/files/{id}", summary="What a file is", **documented_in(FileObject, 404))(one_file)
    of_delete = documented_in(DeletedFile, 400, 404, 503)
    app.delete("/v1/files/{id}", summary="Delete a file that no batch reads", **of_delete)(delete)
    of_content = documented_in(None, 404, 503)
    of_content["responses"][200] = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
    app.get("/v1/files/{id}/content", summary="The bytes of a file", **of_content)(content)


PURPOSE = {
    "name": "purpose",
    "in": "query",
    "required": False,
    "description": "Only files of this purpose.",
    "schema": {"type": "string"},
}


class Uploads:
    """Files that are being sent."""

    def __init__(self, services: Services, store: Store) -> None:
        self._config = services.config
        self._store = store
        self._under_way: Counter[str] = Counter()  # by owner

    async def take(self, request: Request) -> Record:
        """The whole body. Raises RouterError."""
        if (account := account_of(request)) is not None:
            account.count_request()
        most = self._config.batch_max_file_bytes
        length = request.headers.get("content-length")
        num_bytes = int(length) if length is not None else most
        if length is not None and num_bytes > most + FORM_BYTES:
            raise too_large(most)
        try:
            reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
        except Malformed as error:
            raise UnsupportedMedia(str(error)) from None
        try:
            with self._place(request), self._store.reserved(owner_of(request), num_bytes):
                return await self._receive(request, reader, num_bytes)
        except OSError as error:
            raise disk_trouble(error) from None

    @contextmanager
    def _place(self, request: Request) -> Iterator[None]:
        """One of the places for uploads. Raises Overloaded where there is none, or the key has its share of them."""
        owner, account, free = owner_of(request), account_of(request), MOST_UPLOADS - self._under_way.total()
        if not free:
            raise Overloaded(f"{MOST_UPLOADS} files are being uploaded: try again in a moment", 5)
        held = self._under_way[owner]
        if account is not None and account.owner and not may_take(1, held=held, free=free, weight=account.share):
            raise Overloaded(f"you upload {held} files, and {free} places are left for all: try again in a moment", 5)
        self._under_way[owner] += 1
        try:
            yield
        finally:
            self._under_way[owner] -= 1

    async def _receive(self, request: Request, reader: MultipartReader, num_bytes: int) -> Record:
        config, store, id = self._config, self._store, new_id("file-")
        ClientConnection.of(request.scope).body_may_take(
            config.body_timeout * max(1.0, num_bytes / config.payload_limit)
        )
        part = store.part_path(id)
        upload = Upload(part, config.batch_max_file_bytes)
        try:
            try:
                async for data in _body(request, config.body_timeout):
                    await upload.take(reader, data)
                _check(upload, reader)
            except Malformed as error:
                raise ValidationError(str(error)) from None
            await upload.finish()
            part.rename(store.data_path(id))
            assert upload.filename is not None
            about = (owner_of(request), id, upload.filename, "batch")
            return store.add_file(await asyncio.to_thread(store.write_file, *about))
        except BaseException:
            with suppress(OSError):
                store.data_path(id).unlink(missing_ok=True)
            raise
        finally:
            upload.close()
            with suppress(OSError):
                part.unlink(missing_ok=True)


async def _body(request: Request, silent_s: float) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ValidationError when nothing comes for so long."""
    while True:
        try:
            async with asyncio.timeout(silent_s):
                message = await request.receive()
        except TimeoutError:
            raise ValidationError(
                f"nothing of the file came for {silent_s:g} s (body_timeout): send it again"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if data := message.get("body", b""):
            yield data
        if not message.get("more_body", False):
            return


def _check(upload: Upload, reader: MultipartReader) -> None:
    """Raises ValidationError for a form that lacks something."""
    if not reader.is_over:
        raise ValidationError("the form ends before its last boundary: send all of it")
    if upload.filename is None:
        raise ValidationError("the form has no part `file`: send the file under this name")
    if bytes(upload.purpose) != b"batch":
        raise ValidationError("`purpose` must be `batch`: no other files are kept here")


class FileAnswer(StreamingResponse):
    """A file's bytes, as they were when it was asked for: it is open by now, and may be deleted meanwhile."""

    def __init__(self, file: FileIO, num_bytes: int) -> None:
        self._file = file
        headers = {"content-length": str(num_bytes)}
        super().__init__(_pieces(file, num_bytes), media_type="application/octet-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, and close it however that ends."""
        with self._file:
            await super().__call__(scope, receive, send)


async def _pieces(file: FileIO, num_bytes: int) -> AsyncIterator[bytes]:
    while num_bytes > 0 and (piece := await asyncio.to_thread(file.read, min(PIECE, num_bytes))):
        num_bytes -= len(piece)
        yield piece
