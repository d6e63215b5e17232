"""A server for one job: a launcher of our own, on a free port of this machine, with a key that nobody else has.

It ends with the job, also when that is killed: the kernel ends it with its parent, and its processes with it. Its log
goes to the job's; only warnings are asked for, as a line for each request would bury the rest.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from os import killpg, pathsep

from router.launch.config import ROOT
from router.launch.errors import Refusal
from server.processes.linux import end_with_parent

READY = re.compile(r"Lockstep is ready at (http://[^\s\"]+)")
STOP_S = 60.0  # for its processes to leave in order; nothing runs in them then
MOST_LINE_BYTES = 1 << 20  # of its log
OURS = ("--hostname", "--port", "-p", "--api-key")  # what the job gives it


@asynccontextmanager
async def engine(
    flags: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]
) -> AsyncIterator[tuple[str, str, asyncio.Task[int]]]:
    """A server that is ready: its URL, its key, and what ends with its exit code. Raises Refusal if it never is.

    say: takes the lines of its log.
    """
    key = secrets.token_urlsafe(24)
    argv, env = command(flags, environ, key)
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        limit=MOST_LINE_BYTES,
        process_group=0,  # Ctrl-C is for the job, which then ends this
        preexec_fn=end_with_parent(),
    )
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read(process, url, say))
    try:
        await asyncio.wait((url, reading), return_when=asyncio.FIRST_COMPLETED)
        if not url.done():
            raise Refusal([f"the server of this job ended with code {reading.result()} before it was ready"], 1)
        yield url.result(), key, reading
    finally:
        await _end(process, reading)


def command(flags: Sequence[str], environ: Mapping[str, str], key: str) -> tuple[list[str], dict[str, str]]:
    """What starts such a server: its command and its environment."""
    path = pathsep.join(part for part in (str(ROOT), environ.get("PYTHONPATH", "")) if part)
    quiet = () if any(one.partition("=")[0] == "--log-level" for one in flags) else ("--log-level", "warn")
    argv = [sys.executable, "-P", "-m", "launcher", *quiet, *flags, "--hostname", "127.0.0.1", "--port", "0"]
    return argv, {**environ, "API_KEY": key, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


async def _read(process: asyncio.subprocess.Process, url: asyncio.Future[str], say: Callable[[str], None]) -> int:
    """Pass on the log until its end, and note where the server is ready. Returns the exit code."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line without end: what there was of it is dropped
            continue
        if not line:
            return await process.wait()
        text = line.decode(errors="replace").rstrip()
        say(text)
        if not url.done() and (found := READY.search(text)):
            url.set_result(found[1])


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[int]) -> None:
    """Let it leave in order, or end it with all that it started."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await asyncio.shield(process.wait())
    except TimeoutError:
        with suppress(ProcessLookupError, PermissionError):
            killpg(process.pid, signal.SIGKILL)
        await process.wait()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
