"""Lines of a batch: requests of the input, answers in the shapes of OpenAI's batches, and the errors of a job.

A file may be of any size and a line of any length: what is longer than the limit is skipped piece by piece and never
held. A line that cannot be sent becomes a problem, which is its line in the output; the others go on. Whether the body
of a request is valid, the server says. The `id` of an output line names the job and the number of the input line, so
that a resumed job knows which lines are answered.

JobError            the input, the output or the journal cannot be used
├── InputChanged    the input is not, or no longer, the file that the job began with
└── ServerGone      the server has not answered for so long that the job gives up; it can be resumed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

URLS = ("/v1/chat/completions", "/v1/completions")
MOST_CUSTOM_ID = 512  # characters, so that an answer's line is never much longer than its answer
PIECE = 1 << 16  # bytes of one read of a line that is skipped
MOST_TEXT = 2000  # characters kept of an answer that is not JSON, such as a proxy's page, or too deeply nested


class JobError(ValueError):
    """One sentence that names the file and the remedy."""


class InputChanged(JobError):
    """The lines that are left are not those that the job began with."""


class ServerGone(JobError):
    """The server does not answer, or refuses the key."""


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError, which lacks it where the file is open already."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input. number: from 1, blank lines included. end: the offset of the next line.

    raw: None where it is longer than the limit.
    """

    number: int
    offset: int
    end: int
    raw: bytes | None

    @property
    def is_blank(self) -> bool:
        """As the last line of many files is."""
        return self.raw is not None and not self.raw.strip()


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request that can be sent. body: JSON."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a line cannot be sent. custom_id: None where the line does not even say that."""

    custom_id: str | None
    code: str
    message: str


class LineFile:
    """Reads lines of a file by their offsets. Raises OSError."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._path = path
        self._file: BinaryIO = path.open("rb", buffering=1 << 20)

    def close(self) -> None:
        self._file.close()

    def read(self, number: int, offset: int) -> Line | None:
        """The line that begins at `offset`; None at the end of the file."""
        with naming_file(self._path):
            return self._read(number, offset)

    def _read(self, number: int, offset: int) -> Line | None:
        if self._file.tell() != offset:
            self._file.seek(offset)
        raw = self._file.readline(self.most_bytes + 1)
        if not raw:
            return None
        if len(raw) <= self.most_bytes or raw.endswith(b"\n"):
            return Line(number, offset, offset + len(raw), raw.rstrip(b"\r\n"))
        end = offset + len(raw)
        while raw and not raw.endswith(b"\n"):
            raw = self._file.readline(PIECE)
            end += len(raw)
        return Line(number, offset, end, None)


def custom_id_of(line: Line) -> str | None:
    """The line's `custom_id`, if it has a valid one."""
    if line.raw is None:
        return None
    try:
        found = orjson.loads(line.raw)
    except orjson.JSONDecodeError:
        return None
    return _custom_id(found) if isinstance(found, dict) else None


def read_request(
    line: Line, urls: tuple[str, ...], most_bytes: int, first_line: Callable[[str], int]
) -> BatchRequest | Problem:
    """The request of a line. urls: that are allowed; first_line: `custom_id` -> number of the first line with it."""
    at = f"line {line.number}"
    if line.raw is None:
        return Problem(None, "line_too_long", f"{at} is longer than {most_bytes} bytes: shorten its body")
    try:
        found = orjson.loads(line.raw)
    except orjson.JSONDecodeError as error:
        return Problem(None, "invalid_json_line", f"{at} is not JSON: {error.msg} at column {error.colno}")
    if not isinstance(found, dict):
        return Problem(None, "invalid_json_line", f"{at} is no JSON object: write one request in each line")
    custom_id, body = _custom_id(found), found.get("body")
    if custom_id is None:
        sentence = f"{at} has no `custom_id`: give each line a text of 1 to {MOST_CUSTOM_ID} characters"
        return Problem(None, "missing_custom_id", sentence)
    if (first := first_line(custom_id)) != line.number:
        sentence = f"{at} has the `custom_id` of line {first}: give each line its own"
        return Problem(custom_id, "duplicate_custom_id", sentence)
    if problem := _problem_of(found, body, urls):
        return Problem(custom_id, *problem)
    try:
        return BatchRequest(custom_id, found["url"], orjson.dumps(body))
    except orjson.JSONEncodeError:  # it reads 1,024 levels and writes 254
        return Problem(custom_id, "invalid_body", "`body` is nested deeper than 250 levels: no request is that deep")


def _problem_of(found: dict[str, Any], body: Any, urls: tuple[str, ...]) -> tuple[str, str] | None:
    if found.get("method") != "POST":
        return "invalid_method", f"`method` is {_shown(found.get('method'))}: it must be POST"
    if found.get("url") not in urls:
        return "invalid_url", f"`url` is {_shown(found.get('url'))}: it must be {' or '.join(urls)}"
    if not isinstance(body, dict):
        return "invalid_body", "`body` is no JSON object: write there what you would send to the url"
    if body.get("stream"):
        return "invalid_body", "`stream` is for a client that reads along: leave it out of a batch"
    return None


def _custom_id(found: dict[str, Any]) -> str | None:
    custom_id = found.get("custom_id")
    return custom_id if isinstance(custom_id, str) and 1 <= len(custom_id) <= MOST_CUSTOM_ID else None


def _shown(value: Any) -> str:
    """A value of the input as a message shows it."""
    if isinstance(value, dict | list):
        return "a list or an object"
    return "missing" if value is None else orjson.dumps(value).decode()[:60]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered to one request. retry_after_s: how long it asks to wait, if it says so.

    adapters: that computed it, by name the key of its content.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)


def answer_id(job: str, line: int) -> str:
    """The `id` of an output line."""
    return f"batch_req_{job}_{line}"


def answered(job: str, line: int, custom_id: str, reply: Reply) -> bytes:
    """The output line of a request that a server answered, with whatever status."""
    response: dict[str, Any] = {"status_code": reply.status, "request_id": reply.request_id}
    found = {"id": answer_id(job, line), "custom_id": custom_id, "response": response, "error": None}
    try:
        response["body"] = orjson.loads(reply.body)
        return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # what is nested too deep can be read and not be written
        message = reply.body.decode(errors="replace")[:MOST_TEXT]
        response["body"] = {"error": {"message": message, "type": "not_json"}}
        return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)


def problem_line(job: str, line: int, problem: Problem) -> bytes:
    """The output line of a request that no server answered."""
    error = {"code": problem.code, "message": problem.message}
    found = {"id": answer_id(job, line), "custom_id": problem.custom_id, "response": None, "error": error}
    return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)


def parse_answer(job: str, raw: bytes) -> tuple[int, bool] | None:
    """The number of the input line that an output line answers, and whether it failed; None for no line of this job."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    name = found.get("id") if isinstance(found, dict) else None
    beginning = answer_id(job, 0)[:-1]
    if not isinstance(name, str) or not name.startswith(beginning) or not name[len(beginning) :].isdecimal():
        return None
    response = found.get("response")
    return int(name[len(beginning) :]), not (isinstance(response, dict) and response.get("status_code") == 200)
