"""One link process: `python -P -m server.link --config PATH`, started by the launcher, with orders on standard input.

What keeps it from starting is one record of level CRITICAL that says why, and exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import uvloop

from host.logs import configure_logging
from host.process import name_process
from server.link.config import LinkConfig, Order
from server.link.handshake import TlsError
from server.link.link import Link

log = logging.getLogger("server")
events = logging.getLogger("server.link.events")  # what the launcher acts on, whatever the log's level


def main(argv: Sequence[str] | None = None) -> int:
    """Carry connections until the launcher closes its end. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="server.link", description=__doc__)
    parser.add_argument("--config", required=True, help="JSON file that the launcher wrote")
    config = LinkConfig.load(parser.parse_args(argv).config)
    name_process("link")
    os.umask(0o077)  # sockets that are this user's alone
    configure_logging(config.log_level)
    events.setLevel(logging.INFO)
    try:
        return uvloop.run(run(config))
    except (TlsError, OSError) as error:
        log.critical("%s", error)
        return 1


async def run(config: LinkConfig) -> int:
    """Listen, then do as told until standard input ends or a signal comes. Returns the exit code."""
    link = Link(config, tell)
    listener = bind(config.host, config.port)
    link.open(listener)
    host, port = listener.getsockname()[:2]
    tell("listening", {"host": host, "port": port})
    orders = asyncio.StreamReader()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, orders.feed_eof)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        await link.obey(Order.parse(line))
        tell("forwarding", {})
    await link.close()
    return 0


def tell(event: str, values: Mapping[str, object]) -> None:
    """Have the launcher act on something."""
    events.info("", extra={"event": event, "is_silent": True, **values})


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError with a sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise OSError(f"no address is known of {host}: give --master-addr as an address") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(
            f"the link cannot listen on {host} port {port} ({error.strerror}): --master-addr must be an address of "
            "node 0, and --master-port a port that is free on every node"
        ) from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
