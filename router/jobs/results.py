"""Lines of an output, in the shapes of OpenAI's batches, and what a resumed job reads of them again.

The `id` of a line says whose line it is: the job, and the number of the line in its input. A job that was killed finds
out by it which lines are answered already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from router.jobs.lines import Problem

# Characters that are kept of an answer that is not JSON, such as a proxy's page, or that is nested too deep for a line.
MOST_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered to one request. retry_after_s: how long it asks to wait, if it says so."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None


def name_of(job: str, line: int) -> str:
    """The `id` of an output line."""
    return f"batch_req_{job}_{line}"


def answered(job: str, line: int, custom_id: str, reply: Reply) -> bytes:
    """The output line of a request that a server answered, with whatever status."""
    response: dict[str, Any] = {"status_code": reply.status, "request_id": reply.request_id}
    found = {"id": name_of(job, line), "custom_id": custom_id, "response": response, "error": None}
    try:
        response["body"] = orjson.loads(reply.body)
        return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # what is nested too deep can be read and not be written
        message = reply.body.decode(errors="replace")[:MOST_TEXT]
        response["body"] = {"error": {"message": message, "type": "not_json"}}
        return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)


def unanswered(job: str, line: int, problem: Problem) -> bytes:
    """The output line of a request that no server answered."""
    error = {"code": problem.code, "message": problem.message}
    found = {"id": name_of(job, line), "custom_id": problem.custom_id, "response": None, "error": error}
    return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)


def read_again(job: str, raw: bytes) -> tuple[int, bool] | None:
    """The number of the input line that an output line answers, and whether it failed; None for no line of this job."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    name = found.get("id") if isinstance(found, dict) else None
    beginning = name_of(job, 0)[:-1]
    if not isinstance(name, str) or not name.startswith(beginning) or not name[len(beginning) :].isdecimal():
        return None
    response = found.get("response")
    return int(name[len(beginning) :]), not (isinstance(response, dict) and response.get("status_code") == 200)
