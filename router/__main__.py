"""The router process: `python -P -m router --config PATH`.

Three phases. Start: wait for the shards, warm them up, settle the limits. Serve: only now does the port listen.
Stop: a signal drains and exits 0, a second one aborts; losing the shards exits 1, which ends the server.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from host.logs import BEAT, configure_logging
from router.apis.app import accounts_of, chat_template_of, create_app, matchers_of
from router.batching.adapter_mover import AdapterMover, AdapterRowMetrics
from router.batching.batcher import Batcher
from router.batching.prefix_mover import Mover, TierMetrics
from router.config import RouterConfig
from router.grammars.follower import Follower
from router.http.guard import GuardedHttpProtocol
from router.http.transport import Connections
from router.requests.adapters import Adapters
from router.scheduling.adapters import AdapterRows
from router.scheduling.limits import Limits
from router.shards.client import ShardError
from router.shards.group import NextGroup, ShardGroup
from router.shards.startup import Started, has_tiers, start, table
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import make_tracer
from router.text.tokenizer import ModelTokenizer

FLUSH_S = 3.0  # for what the prefix cache still has to write to disk when the server stops
LAST_BYTES_S = 5  # for answers that are complete when the server stops
# A full collection looks at every connection, a second for 10,000; it waits until 1.4 million objects more are kept.
GC_THRESHOLDS = (700, 10, 200)  # Python's but for the last, which is 10
MOST_FILES = 2**20  # that are asked for: some containers allow a billion, and tables are sized by it
SPARE_FILES = 64  # descriptors that are no connections and may yet be opened: channels to shards, files that are sent
# New connections in one turn of the event loop, which accepts one a turn at each descriptor of a listener: under load
# turns are long, and hundreds of clients would wait for theirs.
MOST_ACCEPTED = 16
TURNS_TO_READ = 4  # of the event loop, in which what a new connection has sent is read
BEAT_S = 1.0  # between two signs of life

Result = TypeVar("Result")

logger = logging.getLogger("router")
lifecycle = logging.getLogger("router.lifecycle")  # what the launcher acts on; it is sent at every log level


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until it is told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="router", description="The HTTP side of Lockstep; started by the launcher.")
    parser.add_argument("--config", required=True, help="JSON file written by RouterConfig.save")
    _configure_logging("info")
    try:
        config = RouterConfig.load(parser.parse_args(argv).config)
        _configure_logging(config.log_level)
        return uvloop.run(run(config))
    except ShardError as error:
        logger.critical("%s", error, extra={"consequence": True})  # the shard knows its cause better
        return 1
    except (ValueError, OSError) as error:
        logger.critical("%s", error)
        return 1


def _configure_logging(level: str) -> None:
    """Log as every process does; what kills this one becomes a record too."""
    configure_logging(level)
    lifecycle.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))


async def run(config: RouterConfig) -> int:
    """Start, serve, stop. Returns the exit status."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)
    accounts = accounts_of(config)  # first of all: a file that cannot be used is found before a model is loaded
    chat_template = chat_template_of(config)
    tracer = make_tracer(config.otlp_endpoint, config.otlp_service_name, config.model_id)
    tokenizer = ModelTokenizer.load(config.model_path, config.tokenizer_path, config.tokenizer_config_path)
    news = None if config.control_fd is None else NextGroup(config.group)
    shards = ShardGroup(config.shard_sockets, news)
    try:
        listening = _listen_to_launcher(news, config.control_fd)
        started = await _unless_stopped(stop, shards.begin(partial(_start, config, shards)))
        if started is None:
            return 0
        mover = Mover(shards if has_tiers(started) else None, started.limits.block_size)
        await mover.open()
        started = replace(started, tiers=mover.contents)
        adapters = _adapter_mover(shards, started.limits)
        metrics = _metrics_of(started.limits, mover, adapters)
        follower = Follower(matchers_of(config, started.limits, tokenizer))  # it starts with the first grammar
        batcher = Batcher(shards, tokenizer, started.limits, metrics, matching=follower, mover=mover, adapters=adapters)
        app = create_app(
            config,
            limits=started.limits,
            model=started.model,
            cache=started.cache,
            tokenizer=tokenizer,
            shards=shards,
            batcher=batcher,
            metrics=metrics,
            tracer=tracer,
            accounts=accounts,
            chat_template=chat_template,
            shelf=adapters if started.limits.adapter_rows else None,
        )
        if await _unless_stopped(stop, _read_named(config, app.state.services.adapters, adapters)) is None:
            return 0
        assert config.listen_fd is not None, "the launcher binds"
        listener = socket.socket(fileno=config.listen_fd)  # does not listen yet, so that clients are refused until then
        listener.set_inheritable(False)  # or what this process starts would keep the port when it is gone
        address = _address(config, listener)
        asked = (config.tool_call_parser, config.reasoning_parser)
        formats = app.state.services.answer_formats.facts(*asked, has_template=bool(chat_template.named))
        logger.info("%s", table(config, started, address, formats), extra={"raw": True})
        gc.set_threshold(*GC_THRESHOLDS)
        listeners = listener_descriptors(listener)
        gc.freeze()  # what start-up made stays: a full collection would stop every stream for 20 ms to look at it again
        connections = Connections(config, max_connections())
        server = HttpServer(app, connections, partial(_ready, shards, address))
        watching = asyncio.create_task(_watch(shards, news, listening, batcher))
        try:
            return await _serve(server, listeners, batcher, watching, stop, config, mover)
        finally:
            await adapters.close()
            await mover.close()
            await follower.close()
    finally:
        await shards.close()


def listener_descriptors(listener: socket.socket) -> list[socket.socket]:
    """Descriptors of the one listener, for the event loop to accept at each in every turn."""
    return [listener, *(listener.dup() for _ in range(MOST_ACCEPTED - 1))]


def max_connections() -> int:
    """How many connections may be open, after raising this process's limit of descriptors as far as it may be.

    Beyond that number one connection is closed: the one that has been idle the longest, else one with incomplete
    headers or body or an unread answer, else the new one. So `accept` always finds a descriptor; without one it would
    fail repeatedly while the connection waits.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    return max(1, limit - num_open - SPARE_FILES)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(1)  # asked twice: no waiting for anything
    stop.set()


def _listen_to_launcher(news: NextGroup | None, descriptor: int | None) -> asyncio.Future[None]:
    """Hear what the launcher says of later groups, for ever."""
    loop = asyncio.get_running_loop()
    if news is None or descriptor is None:
        return loop.create_future()
    return loop.create_task(news.listen(descriptor))


async def _watch(shards: ShardGroup, news: NextGroup | None, listening: asyncio.Future[None], batcher: Batcher) -> None:
    """Watch the time of steps, act on what the launcher says, and give it signs of life, for ever."""
    if news is not None:

        def on_news() -> None:
            shards.noticed()
            batcher.wake()

        news.on_news = on_news
        on_news()  # what has come by now
    await asyncio.gather(shards.watch(), listening, _beat())


async def _beat() -> None:
    """Show the launcher that the event loop turns, for ever. It begins with serving: what loads may take its time."""
    while True:
        lifecycle.info("", extra={"event": BEAT, "is_silent": True})
        await asyncio.sleep(BEAT_S)


async def _start(config: RouterConfig, shards: ShardGroup) -> Started:
    count = len(config.shard_sockets)
    logger.info("waiting for %d model shard%s", count, "" if count == 1 else "s")
    if config.is_warm and shards.number == config.group:
        await shards.expect_answers()  # or one that is stopped would be waited for for ever
    await shards.wait_ready()
    return await start(config, shards)


def _adapter_mover(shards: ShardGroup, limits: Limits) -> AdapterMover:
    rows = AdapterRows(limits.adapter_rows, limits.adapter_bytes, limits.adapter_host_bytes)
    return AdapterMover(shards if limits.adapter_rows else None, rows)


def _metrics_of(limits: Limits, mover: Mover, adapters: AdapterMover) -> Metrics:
    metrics = Metrics(limits)
    if mover.contents is not None:
        metrics.add(TierMetrics(mover, limits.block_size), *TierMetrics.COUNTERS)
    metrics.add(AdapterRowMetrics(adapters), *AdapterRowMetrics.COUNTERS)
    return metrics


async def _read_named(config: RouterConfig, named: Adapters, mover: AdapterMover) -> bool:
    """Have the shards read the adapters that the settings name. Raises ValueError for those that cannot be served.

    A router that follows another serves without them: whoever asks for one is told why.
    """
    found, problems = await named.listed()
    try:
        await mover.prepare_all(found)
    except ValueError as error:
        problems.append(str(error))
    if problems and config.group == 1 and not config.is_warm:
        raise ValueError("; ".join(problems))
    for problem in problems:
        logger.warning("%s", problem)
    return True


def _ready(shards: ShardGroup, address: str) -> None:
    lifecycle.info("ready at %s", address, extra={"event": "ready", "group": shards.number})


async def _unless_stopped(stop: asyncio.Event, starting: Coroutine[Any, Any, Result]) -> Result | None:
    work, stopping = asyncio.ensure_future(starting), asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that the launcher bound, without its signal handling: stopping is decided here."""

    def __init__(self, app: FastAPI, connections: Connections, on_listening: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(GuardedHttpProtocol, shared=connections)),  # all that uvicorn does is call it
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=LAST_BYTES_S,
            )
        )
        self._connections = connections
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`: uvicorn's own handlers would end the process before the drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets, then say so."""
        await super().startup(sockets)
        self._on_listening()

    def leave(self) -> None:
        """From now on each answer tells its client to ask next time on a new connection."""
        self._connections.is_leaving = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that wait and read what has come on connections that are kept open, then close.

        Closing a listener resets the connections that are not accepted yet, with the requests that they have sent.
        """
        self.leave()
        waiting = select.poll()
        for listener in sockets or ():
            waiting.register(listener, select.POLLIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_BYTES_S):
                while waiting.poll(0):
                    await asyncio.sleep(0)
        for _ in range(TURNS_TO_READ):
            await asyncio.sleep(0)
        await super().shutdown(sockets)


async def _serve(
    server: HttpServer,
    listeners: list[socket.socket],
    batcher: Batcher,
    watching: asyncio.Task[None],
    stop: asyncio.Event,
    config: RouterConfig,
    mover: Mover,
) -> int:
    batching = asyncio.create_task(batcher.run())
    serving = asyncio.create_task(server.serve(sockets=listeners))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({batching, serving, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        server.leave()
        await batcher.leave(config.shutdown_delay)
        logger.info("draining", extra={"event": "draining"})
        await batcher.drain(config.graceful_termination_timeout)
        await mover.flush(FLUSH_S)
    server.should_exit = True
    await serving
    stopping.cancel()
    batching.cancel()
    watching.cancel()
    await asyncio.wait({batching, watching})
    if batcher.failure is not None:
        raise batcher.failure
    for task in (batching, watching):
        if not task.cancelled():
            task.result()  # it raises an unexpected error
    return 0 if stop.is_set() else 1


def _address(config: RouterConfig, listener: socket.socket) -> str:
    host = f"[{config.hostname}]" if ":" in config.hostname else config.hostname
    return f"http://{host}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
