"""One log line for each request that is over: its key, its route, the reason of its end, counts and times.

A line has never a text that was sent or generated, never a key's value. Names that a client chose (a path, a model,
fields of a body) are cut and cleaned first. Requests that generated something are all logged: their work bounds their
number. Refusals cost next to nothing, and a client may cause thousands a second: MOST_REFUSALS_A_MINUTE of them are
logged, and the next line counts the others.

Left out: GET and HEAD requests that succeed (probes and scrapes would be most of the log), and connections without a
request (`router/http/guard.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.accounts import MinuteBudget

MOST_REFUSALS_A_MINUTE = 600
MOST_CHARACTERS = 64  # of a name that a client chose
MOST_CHARACTERS_OF_A_PATH = 100
MOST_NAMES = 16
CLIENT_GONE = 499  # nginx's, for the log alone
QUIET_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

logger = logging.getLogger(__name__)


def harmless(text: str, most: int = MOST_CHARACTERS) -> str:
    """The beginning of a client's text, with a replacement for each character that is not printable."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text[:most])


def harmless_names(names: Iterable[str]) -> str:
    """The first of these names, separated by commas, and how many there are besides."""
    every = list(names)
    shown = [harmless(name) for name in every[:MOST_NAMES]]
    return ", ".join([*shown, f"and {len(every) - MOST_NAMES} more"] if len(every) > MOST_NAMES else shown)


class RequestLogMiddleware:
    """Writes the lines. Routes add fields to `request.state.log`."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._refusals = MinuteBudget(MOST_REFUSALS_A_MINUTE, clock)
        self._num_left_out = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fields: dict[str, Any] = {"request_id": scope["state"]["request_id"]}
        scope["state"]["log"] = fields
        status = 500  # unless a response starts

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        finally:
            self._write(scope, status, fields)

    def _write(self, scope: Scope, status: int, fields: dict[str, Any]) -> None:
        is_refused = status >= 400 and not fields.get("generated_tokens")
        if scope["method"] in QUIET_METHODS and not is_refused:
            return
        if is_refused and self._refusals.take(1):
            self._num_left_out += 1
            return
        state = scope["state"]
        path = harmless(scope["path"], MOST_CHARACTERS_OF_A_PATH)
        line = {"request_id": state["request_id"], "path": path, "status": status, "reason": _reason(status)}
        if (account := state.get("account")) is not None:
            line["key"] = account.name
        if self._num_left_out:
            line["refusals_left_out"], self._num_left_out = self._num_left_out, 0
        line |= fields
        verb = "refused" if is_refused and "stream" not in fields else "ended"
        logger.info("request %s: %s", verb, line["reason"], extra=line)


def _reason(status: int) -> str:
    """The reason where the route gives none."""
    if status < 400:
        return "answered"
    return "cancelled" if status == CLIENT_GONE else HTTPStatus(status).phrase.lower().replace(" ", "_")
