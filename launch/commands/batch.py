"""The command `lockstep batch`: a file of requests in OpenAI's batch format becomes a file of answers.

The work is `router/jobs/`; here are the options, the signals, what a person is told, a server for the job unless a URL
is given, and the HTTP client.

The server is a launcher on a free port of this machine with a key of its own. The kernel ends it with this process,
whatever kills that. Its log is printed among the job's, by default from warnings on, because info has a line for each
request.

The client sends POSTs with a JSON body over TCP or TLS, on connections that stay open, with a bound on everything that
is waited for. It uses the transport of httpx2 alone: no redirects, proxies, cookies or compression, and nothing from
the environment. A connection that was closed while idle is replaced; one that is closed just as a request is sent
costs a try.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import httpx2

from host.process import end_with_parent
from host.progress import duration
from launch.config import ROOT
from launch.errors import Refusal
from launch.flags import Parser, unknown_arguments
from router.jobs.input_index import InputIndex, index_input
from router.jobs.journal import Journal, journal_path, temporary_path
from router.jobs.lines import BatchRequest, JobError, LineFile, Problem, Reply
from router.jobs.progress import Progress
from router.jobs.runner import NoAnswer, Plan, Runner

MOST_LINE_BYTES = 16 << 20  # far above what servers take of a body; such a line becomes an error of its own
MOST_CONCURRENCY = 1024
READY = re.compile(r"Lockstep is ready at (http://[^\s\"]+)")
STOP_S = 60.0  # for the job's server to end; it has no requests then
MOST_LOG_LINE_BYTES = 1 << 20  # of the log of the job's server
RESERVED_FLAGS = ("--hostname", "--port", "-p", "--api-key")  # that the job gives its server
CONNECT_S = 10.0
MOST_ANSWER_BYTES = 1 << 26
MOST_CAUSE = 200  # characters of the cause of a lost connection, which may quote the server
MOST_RETRY_AFTER_S = 300.0  # whatever a server asks for
# The kernel reports a peer that has vanished after 60 + 4 * 15 s.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
ADAPTER_HEADER = "x-lockstep-adapter"
NO_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)


class Stopped(Exception):
    """The job was stopped by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Command:
    """The command line. url: None for a server of the job's own, which gets `flags`. Times are in seconds."""

    input: Path
    output: Path
    errors: Path | None
    url: str | None
    api_key: str | None
    flags: tuple[str, ...]
    timeout_s: float
    plan: Plan


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """What the command line asks for. Raises Refusal with every problem at once."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser, flags = _parser(), list(argv[split + 1 :])
    given, unknown = parser.parse_known_args(argv[:split])
    problems = unknown_arguments(unknown, parser)
    for name in ("model_id", "num_shard"):
        if (value := getattr(given, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    if (given.url is None) == (not flags and split == len(argv)):
        problems.append("give either --url of a server, or --model-id (and more options of `lockstep` behind --)")
    taken = [one for one in flags if one.partition("=")[0].replace("_", "-") in RESERVED_FLAGS]
    problems += [f"{one.partition('=')[0]} is the job's to choose: leave it out" for one in taken]
    if given.url is not None:
        try:
            base_of(given.url)
        except ValueError as error:
            problems.append(f"--url: {error}")
    api_key = given.api_key or environ.get("API_KEY") or None
    if api_key is not None and (not api_key.isprintable() or api_key != api_key.strip()):
        problems.append("the API key has line ends, or spaces around it, which no header may have: give it without")
    bounds = (("concurrency", 1, MOST_CONCURRENCY), ("max_tries", 1, 1000))
    bounds_s = (("timeout", 0.1, 7 * 86400.0), ("give_up_after", 0.0, 30 * 86400.0))
    for name, least, most in (*bounds, *bounds_s):
        if not least <= (value := getattr(given, name)) <= most:
            problems.append(f"--{name.replace('_', '-')} is {value:g}: give {least:g} to {most:g}")
    paths = {name: Path(value) for name in ("input", "output", "errors") if (value := getattr(given, name))}
    problems += _path_problems(paths)
    if problems:
        raise Refusal(problems, 2)
    plan = Plan(given.concurrency, max_tries=given.max_tries, give_up_s=given.give_up_after)
    places = (paths["input"], paths["output"], paths.get("errors"))
    return Command(*places, given.url, api_key, tuple(flags), given.timeout, plan)


def _path_problems(paths: Mapping[str, Path]) -> list[str]:
    problems = []
    if not paths["input"].is_file():
        said = "is no file that can be read twice" if paths["input"].exists() else "is not there"
        problems.append(f"--input {paths['input']} {said}: give a file of lines of JSON")
    for name in ("output", "errors"):
        if name in paths and not paths[name].parent.is_dir():
            problems.append(f"--{name} {paths[name]}: there is no folder {paths[name].parent}: make it first")
    journal = journal_path(paths["output"])
    every = [os.path.realpath(path) for path in (*paths.values(), journal, temporary_path(journal))]
    if len(set(every)) < len(every):
        problems.append("--input, --output, --errors and the journal beside the output must be different files")
    return problems


def _parser() -> argparse.ArgumentParser:
    about = (
        "Answer a file of requests in OpenAI's batch format, line by line, into another. After an interruption the "
        "same command resumes: no line is lost or answered twice."
    )
    usage = (
        "lockstep batch --input FILE --output FILE --url URL [options]\n"
        "       lockstep batch --input FILE --output FILE --model-id MODEL [options] [-- options of lockstep]"
    )
    parser = Parser(prog="lockstep batch", usage=usage, description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--input", required=True, metavar="FILE", help="lines of JSON: custom_id, method, url, body")
    add("--output", required=True, metavar="FILE", help="file for the answers; FILE.journal records the progress")
    add("--errors", metavar="FILE", help="file for failed lines, like OpenAI's error file. Default: the output")
    add("--url", metavar="URL", help="a running server, such as http://127.0.0.1:3000")
    add("--api-key", metavar="KEY", help="its key; prefer the environment variable API_KEY: flags show in `ps`")
    add("--model-id", metavar="MODEL", help="start a server with this model for the job, and end it afterwards")
    add("--num-shard", metavar="N", help="number of GPUs or processes to split its model over")
    add("--concurrency", type=int, default=64, metavar="N", help="requests at once. Default: 64")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="time limit of one answer. Default: 3600")
    add(
        "--max-tries",
        type=int,
        default=5,
        metavar="N",
        help="tries of a request that fails after it was sent; 429 and 503 do not count. Default: 5",
    )
    add(
        "--give-up-after",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="stop after this time without any answer. Default: 3600",
    )
    return parser


def run(command: Command, environ: Mapping[str, str]) -> int:
    """Answer the lines that are left. Returns the exit code; raises Refusal with the sentence that ends the job."""
    progress = Progress(sys.stderr, is_live=sys.stderr.isatty())
    again = "start the same command again to go on"
    try:
        return asyncio.run(_run(command, environ, progress))
    except Stopped as stopped:
        progress.say(f"stopped by {stopped}: {again}")
        return 128 + stopped.number
    except JobError as error:
        raise Refusal([str(error)], 1) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise Refusal([f"the job cannot go on:{where} {error.strerror}: see to that, then {again}"], 1) from None
    except KeyboardInterrupt:  # before signals are handled
        return 128 + signal.SIGINT


async def _run(command: Command, environ: Mapping[str, str], progress: Progress) -> int:
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _note, stop, number)
    work = asyncio.create_task(_work(command, environ, progress, stop))
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            if work.cancelled():
                raise Stopped(stop.result())
        return work.result()
    finally:
        stop.cancel()


def _note(stop: asyncio.Future[int], number: int) -> None:
    if stop.done():
        os._exit(128 + number)  # the second signal; no answer is lost
    stop.set_result(number)


async def _work(command: Command, environ: Mapping[str, str], progress: Progress, stop: asyncio.Future[int]) -> int:
    began = time.monotonic()
    index = await asyncio.to_thread(_index, command, progress, stop)
    with ExitStack() as stack:
        stack.callback(index.ids.close)
        journal = stack.enter_context(closing(Journal(command.output, command.errors, index)))
        progress.total = index.num_lines
        if journal.state.is_complete:
            progress.say(f"{command.output} is complete: {_counts(journal)}")
            return 0
        lines = stack.enter_context(closing(LineFile(command.input, MOST_LINE_BYTES)))
        if journal.num_left < index.num_lines:
            progress.say(f"going on with {command.output}: {_counts(journal)}, {journal.num_left:,} are left")
        async with _server(command, environ, progress) as (url, key, engine_end):
            async with HttpSender(url, key, command.timeout_s) as sender:
                runner = Runner(index, lines, journal, sender, command.plan)
                await _run_with_progress(runner, journal, progress, engine_end)
        progress.say(f"{command.output} is complete: {_counts(journal)}, in {duration(time.monotonic() - began)}")
    return 0


def _index(command: Command, progress: Progress, stop: asyncio.Future[int]) -> InputIndex:
    told_at = time.monotonic()

    def advanced(share: float) -> None:
        nonlocal told_at
        if stop.done():
            raise Stopped(stop.result())
        if time.monotonic() - told_at > progress.period_s:
            told_at = time.monotonic()
            progress.show(f"reading the input: {100 * share:.0f} %")

    return index_input(command.input, command.output.parent, MOST_LINE_BYTES, advanced)


@asynccontextmanager
async def _server(
    command: Command, environ: Mapping[str, str], progress: Progress
) -> AsyncIterator[tuple[str, str | None, asyncio.Task[int] | None]]:
    """The server: its URL, the key, and a task that ends with it if it is the job's own."""
    if command.url is not None:
        yield command.url, command.api_key, None
        return
    async with own_server(command.flags, environ, progress.say) as (url, key, end):
        yield url, key, end


async def _run_with_progress(
    runner: Runner, journal: Journal, progress: Progress, engine_end: asyncio.Task[int] | None
) -> None:
    """Run the job, and report its progress. Raises JobError and OSError."""
    working = asyncio.create_task(runner.run())
    reporting = asyncio.create_task(_report(runner, journal, progress))
    tasks: set[asyncio.Task[None] | asyncio.Task[int]] = {working, reporting}
    try:
        await asyncio.wait(tasks | ({engine_end} if engine_end else set()), return_when=asyncio.FIRST_COMPLETED)
        if engine_end is not None and engine_end.done() and not working.done():
            code = engine_end.result()
            raise JobError(f"the server of this job ended with code {code}: see its log, then start the job again")
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        progress.report(journal.state.completed, journal.state.failed)
        progress.end()
    working.result()


async def _report(runner: Runner, journal: Journal, progress: Progress) -> None:
    progress.note(journal.state.completed + journal.state.failed)
    while True:
        await asyncio.sleep(progress.period_s)
        progress.report(journal.state.completed, journal.state.failed, runner.trouble)


def _counts(journal: Journal) -> str:
    state = journal.state
    return f"{state.completed:,} lines are answered, {state.failed:,} failed"


# ------------------------------------------------------------------------------------------------- a server for the job


@asynccontextmanager
async def own_server(
    flags: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]
) -> AsyncIterator[tuple[str, str, asyncio.Task[int]]]:
    """A server that is ready: its URL, its key, and a task that returns its exit code. Raises Refusal if it fails.

    say: takes the lines of its log.
    """
    key = secrets.token_urlsafe(24)
    argv, env = server_command(flags, environ, key)
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        limit=MOST_LOG_LINE_BYTES,
        process_group=0,  # Ctrl-C is for the job, which then ends the server
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


def server_command(flags: Sequence[str], environ: Mapping[str, str], key: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a server for a job."""
    path = os.pathsep.join(part for part in (str(ROOT), environ.get("PYTHONPATH", "")) if part)
    quiet = () if any(one.partition("=")[0] == "--log-level" for one in flags) else ("--log-level", "warn")
    argv = [sys.executable, "-P", "-m", "launcher", *quiet, *flags, "--hostname", "127.0.0.1", "--port", "0"]
    return argv, {**environ, "API_KEY": key, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


async def _read(process: asyncio.subprocess.Process, url: asyncio.Future[str], say: Callable[[str], None]) -> int:
    """Forward the log until its end, and set the URL once the server is ready. Returns the exit code."""
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
    """Let it end by itself, or kill it with its processes."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await asyncio.shield(process.wait())
    except TimeoutError:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


# ------------------------------------------------------------------------------------------------- the HTTP client


def base_of(url: str) -> str:
    """The URL of a server as `urlsplit` reads it, without a path. Raises ValueError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{url} has no port from 1 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(f"{url} is no server's URL: give one such as http://127.0.0.1:3000")
    if parts.username is not None or parts.query or parts.fragment or port == 0:
        raise ValueError("give the server's URL alone, such as http://127.0.0.1:3000, and a key with --api-key")
    base = f"{parts.scheme}://{parts.netloc}"
    try:
        httpx2.URL(base)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url} is no server's URL: {error}") from None
    return base


class HttpSender:
    """Sends requests to a server by its URL. Raises ValueError for an invalid one.

    timeout_s: of one answer, from its request to its last byte. An async context manager.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._base, self._timeout_s = base_of(url), timeout_s
        self._headers = {b"Content-Type": b"application/json", b"User-Agent": b"lockstep-batch"}
        if api_key is not None:
            self._headers[b"Authorization"] = b"Bearer " + api_key.encode()
        self._tls = ssl.create_default_context()
        # Of one connection each: one of 512 looks at all of them for each request, and takes three times as long.
        self._idle: list[httpx2.AsyncHTTPTransport] = []
        # A connection and its TLS have half of the time each, so that whether a request was sent is known.
        self._connect_s = min(CONNECT_S, timeout_s / 2)
        self._extensions = {"timeout": {"connect": self._connect_s}}

    async def __aenter__(self) -> HttpSender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    async def send(self, wanted: BatchRequest, request_id: str) -> Reply | Problem:
        """The answer to a request. Raises NoAnswer."""
        headers = {**self._headers, b"X-Request-Id": request_id.encode()}
        url = self._base + wanted.url
        request = httpx2.Request("POST", url, headers=headers, content=wanted.body, extensions=self._extensions)
        transport = self._idle.pop() if self._idle else self._new_transport()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _exchange(transport, request, wanted, request_id)
        except TimeoutError:
            raise NoAnswer(f"there was no answer within {self._timeout_s:g} s", was_sent=True) from None
        except (httpx2.ConnectTimeout, httpx2.PoolTimeout):
            raise NoAnswer(f"no connection to {self._base} within {self._connect_s:g} s", was_sent=False) from None
        except httpx2.ConnectError as error:
            raise NoAnswer(f"no connection to {self._base}: {_cause_of(error)}", was_sent=False) from None
        except httpx2.RemoteProtocolError as error:
            raise NoAnswer(
                f"the answer is not whole, or is not HTTP: {str(error)[:MOST_CAUSE]}", was_sent=True
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise NoAnswer(f"the connection was lost: {_cause_of(error)}", was_sent=True) from None
        finally:
            self._idle.append(transport)

    def _new_transport(self) -> httpx2.AsyncHTTPTransport:
        return httpx2.AsyncHTTPTransport(self._tls, limits=NO_LIMITS, socket_options=SOCKET_OPTIONS)


async def _exchange(
    transport: httpx2.AsyncHTTPTransport, request: httpx2.Request, wanted: BatchRequest, request_id: str
) -> Reply | Problem:
    body = bytearray()
    async with aclosing(await transport.handle_async_request(request)) as response:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MOST_ANSWER_BYTES:
                sentence = f"the answer is larger than {MOST_ANSWER_BYTES} bytes: ask for less of it"
                return Problem(wanted.custom_id, "answer_too_large", sentence)
    request_id = response.headers.get("x-request-id", request_id)
    adapters = _adapters(response.headers.get(ADAPTER_HEADER, ""))
    return Reply(response.status_code, request_id, bytes(body), _seconds(response.headers.get("retry-after")), adapters)


def _adapters(told: str) -> dict[str, str]:
    """NAME=KEY, and more of them behind commas."""
    pairs = (one.strip().rpartition("=") for one in told.split(","))
    return {name: key for name, _, key in pairs if name}


def _seconds(retry_after: str | None) -> float | None:
    """A `Retry-After` of whole seconds; a date is read as none."""
    if retry_after is None or not retry_after.strip().isdecimal():
        return None
    return min(float(retry_after), MOST_RETRY_AFTER_S)


def _cause_of(error: BaseException) -> str:
    """The kernel's error, where there is one, because httpx2 says no more than that it failed; else httpx2's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, ssl.SSLError | socket.gaierror):
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error)[:MOST_CAUSE] or type(error).__name__
