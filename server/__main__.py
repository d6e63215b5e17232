"""One shard process: `python -P -m server --config PATH`, started by the launcher.

Logs one JSON object a line on standard output, which the launcher forwards under this rank's name. What keeps a shard
from starting is one record of level CRITICAL that says why, and exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from host.logs import configure_logging
from host.process import name_process
from server.config import ShardConfig

log = logging.getLogger("server")

# The longest that a shard takes to leave its device and the other ranks, in seconds: with the grace of its server below
# the ten after which the launcher kills it.
TEARDOWN_SECONDS = 6.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one shard until it is told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="server", description=__doc__)
    parser.add_argument("--config", required=True, help="JSON file that the launcher wrote")
    config = ShardConfig.load(parser.parse_args(argv).config)
    name_process(f"shard-{config.rank}")
    os.umask(0o077)  # sockets that are this user's alone, wherever they are
    configure_logging(config.log_level)
    log.debug("%s", config)
    return uvloop.run(_run_null(config) if config.is_null else run(config))


async def _run_null(config: ShardConfig) -> int:
    """Serve the null model until a signal. Returns the exit code."""
    from server.null import serving

    async with serving(config):
        log.info("Serving the null model on %s", config.socket_path)
        await _stop_signal()
    return 0


async def run(config: ShardConfig) -> int:
    """Load, serve until a signal, stop. Returns the exit code."""
    from server.loading import load, tiers
    from server.ranks.collectives import PeerLost, disconnect  # after logging is set up: torch takes seconds to import
    from server.ranks.relay import RankPlace
    from server.service import ShardService, serve

    try:
        engine, info = load(config)
        behind = tiers(config, info)
    except PeerLost as error:
        log.critical("%s", error, extra={"consequence": True})  # of another rank's failure: not the one to report
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        log.critical("%s", error)
        return 1
    ranks = RankPlace(config.rank, config.world_size, config.speaker)
    service = ShardService(engine, info, config.cuda_memory_fraction, config.step_sockets, behind, ranks)
    try:
        server = await serve(service, config.socket_path)
    except (OSError, RuntimeError) as error:
        log.critical("%s", error)
        return 1
    log.info("Serving on %s, process %d", config.socket_path, os.getpid())
    stopped = asyncio.create_task(_stop_signal())
    waits: list[asyncio.Future[None] | asyncio.Future[BaseException]] = [stopped, service.failed]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if service.failed.done():
        failure = service.failed.result()
        log.critical("%s", failure, extra={"consequence": isinstance(failure, PeerLost)})
        _end_within(TEARDOWN_SECONDS)  # a thread may wait for a rank that is gone
    await server.stop(grace=1)  # rank 0 may still be telling the router which rank failed
    service.steps.close()
    if service.failed.done():
        return 1
    _end_within(TEARDOWN_SECONDS)
    await service.close()
    disconnect()  # last: NCCL waits for the end of every graph that holds one of its collectives
    return 0


def _end_within(seconds: float) -> None:
    """End this process by then, whatever it waits for, and say where each thread was."""
    faulthandler.dump_traceback_later(seconds, exit=True)


async def _stop_signal() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
