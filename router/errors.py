"""Everything that can go wrong with a request, one tree, with the HTTP status and tag that a client sees.

    RouterError
    ├── ValidationError       422 validation             the request breaks a rule or a limit
    ├── MalformedBody         400 validation             the body is not JSON
    ├── UnsupportedMedia      415 validation             the body does not say that it is JSON
    ├── BodyTooLarge          413 validation
    ├── Unauthorized          401 unauthorized           no API key, or a wrong one
    ├── Forbidden             403 forbidden              the API key may not do this
    ├── NotFound              404 not_found
    │   └── UnknownModel                                 no such model, or adapter
    ├── WrongHost             421 wrong_host             the Host is not this machine, and only this one is let in
    ├── RetryLater                                       with `Retry-After`
    │   ├── Overloaded        429 overloaded             `max_concurrent_requests`, `max_queue_tokens` or a key's limit
    │   ├── Unhealthy         503 healthcheck
    │   └── Unavailable       503 unavailable            draining, or the shards are gone
    ├── DeadlinePassed        504 timeout                `x-request-timeout-ms` or `request_timeout`
    ├── SlowClient            408 slow_client            a stream that is not read: seen in metrics and logs alone
    ├── GenerationError       424 generation             a shard could not compute the step
    └── IncompleteGeneration  500 incomplete_generation  a request ended without a final token: our bug

Statuses and tags are TGI's where it has them: clients choose their exception classes by them. A body is always
`{"error", "error_type"}`; it names values and bounds, never a prompt and never a stack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from typing_extensions import TypedDict

MOST_CHARACTERS_OF_A_CAUSE = 300
# Addresses of memory and sockets, paths, stacks, and gRPC's words about its connections.
INTERNALS = re.compile(
    r"0x[0-9a-f]{4,}|(^|[\s\"'(=:])/[\w.-]+/|Traceback|\b(ipv[46]|unix):|recvmsg|sendmsg|from Core|grpc|\bsocket closed"
    r"|connection (reset|refused|closed)|broken pipe",
    re.IGNORECASE,
)


class ErrorResponse(TypedDict):
    """Every answer that is not a success."""

    error: str
    error_type: str


class RouterError(Exception):
    """Base of all errors that reach a client."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    headers: ClassVar[Mapping[str, str]] = {}

    @property
    def failure_label(self) -> str:
        """Label of `tgi_request_failure`."""
        return self.error_type

    def body(self) -> ErrorResponse:
        """What the client reads, as a whole response or as the last event of a stream."""
        return {"error": str(self), "error_type": self.error_type}


class ValidationError(RouterError, ValueError):
    """The request breaks a rule or a limit."""

    status = 422
    error_type = "validation"

    def __init__(self, detail: str) -> None:
        super().__init__(f"Input validation error: {detail}")
        self.detail = detail


class TooLong(ValidationError):
    """A prompt, or it with what is asked for behind it, has more tokens than a request may have.

    Clients that go on with a shorter prompt look for words of the API that they speak, which are made of the numbers.
    most: of the whole sequence; most_prompt: of its prompt; num_prompt: that it has, None where they were not counted;
    num_new: to be generated, where it is they that do not fit.
    """

    def __init__(
        self, detail: str, *, most: int, most_prompt: int, num_prompt: int | None, num_new: int | None = None
    ) -> None:
        super().__init__(detail)
        self.most = most
        self.most_prompt = most_prompt
        self.num_prompt = num_prompt
        self.num_new = num_new


class AdapterRefused(ValidationError):
    """The adapter that the request names cannot be served. folder: its own, of which clients are told the files."""

    def __init__(self, name: str, problem: str, folder: str = "") -> None:
        super().__init__(f"the adapter {name} cannot be served: {_of_files(problem, folder)}")


class MalformedBody(ValidationError):
    """The body is not JSON."""

    status = 400


class UnsupportedMedia(ValidationError):
    """The body does not say that it is JSON."""

    status = 415


class BodyTooLarge(ValidationError):
    """The body is larger than `payload_limit`."""

    status = 413
    headers: ClassVar[Mapping[str, str]] = {"Connection": "close"}  # the rest of the body is not read


class Unauthorized(RouterError):
    """There is no API key, or a wrong one."""

    status = 401
    error_type = "unauthorized"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}

    def __init__(self) -> None:
        super().__init__("Missing or wrong API key: send it as `Authorization: Bearer KEY`")


class NotFound(RouterError):
    """What a request names is not here."""

    status = 404
    error_type = "not_found"


class UnknownModel(NotFound):
    """The request names a model or an adapter that is not served, or not to its API key."""


class Forbidden(RouterError):
    """The API key may not do this."""

    status = 403
    error_type = "forbidden"


class WrongHost(RouterError):
    """The request names another machine than this one, which alone may reach the server."""

    status = 421
    error_type = "wrong_host"

    def __init__(self, hostname: str) -> None:
        super().__init__(
            f"This server listens on {hostname} alone, and the Host header names another machine: send "
            "`Host: localhost`, or start the server with a --hostname that others can reach"
        )


class RetryLater(RouterError):
    """The same request may succeed after `retry_after_s` whole seconds; 1 where nothing is known."""

    def __init__(self, detail: str, retry_after_s: int = 1) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class Overloaded(RetryLater):
    """More requests than `max_concurrent_requests` would be in the server, or more than one key may have."""

    status = 429
    error_type = "overloaded"

    def __init__(self, detail: str = "Model is overloaded", retry_after_s: int = 1) -> None:
        super().__init__(detail, retry_after_s)


class DeadlinePassed(RouterError):
    """The request was not answered in the time that it had."""

    status = 504
    error_type = "timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The request was not finished within its {seconds:g} s: ask for fewer tokens, or allow it more time "
            "(`x-request-timeout-ms`, and the server's `--request-timeout`)"
        )


class SlowClient(RouterError):
    """The client does not read its stream. Only metrics and logs see this: the connection is cut."""

    status = 408
    error_type = "slow_client"

    def __init__(self, num_unread: int) -> None:
        super().__init__(f"The client reads too slowly: {num_unread} bytes of its stream are waiting")


class GenerationError(RouterError):
    """A shard could not compute the step."""

    status = 424
    error_type = "generation"

    def __init__(self, cause: str) -> None:
        super().__init__(f"Request failed during generation: {for_clients(cause)}")


class IncompleteGeneration(RouterError):
    """A request ended without a final token, which is a bug of ours."""

    status = 500
    error_type = "incomplete_generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")

    @property
    def failure_label(self) -> str:
        """TGI's label, which is not its error type."""
        return "incomplete"  # TGI's word


class Unhealthy(RetryLater):
    """A health check failed."""

    status = 503
    error_type = "healthcheck"


class Unavailable(RetryLater):
    """The server drains, or its shards are gone."""

    status = 503
    error_type = "unavailable"


class AdapterUnavailable(Unavailable):
    """The adapter that the request names cannot be served now. folder: as `AdapterRefused` has it."""

    def __init__(self, name: str, problem: str, folder: str = "") -> None:
        super().__init__(f"the adapter {name} cannot be served now: {_of_files(problem, folder)}")


def _of_files(problem: str, folder: str) -> str:
    """A problem with an adapter's files, for clients."""
    return for_clients(problem.replace(f"{folder}/", "") if folder else problem)


def for_clients(cause: str) -> str:
    """Why a shard failed, as a client may read it: one line, without the server's inside, which is for its log."""
    line = cause.strip().partition("\n")[0]
    if INTERNALS.search(cause):
        return "a model shard failed, and the server's log says why"
    return line if len(line) <= MOST_CHARACTERS_OF_A_CAUSE else f"{line[:MOST_CHARACTERS_OF_A_CAUSE]}…"
