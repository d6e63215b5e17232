"""What SIGTERM does to a command that awaits."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from benchmark import launch


class Deaf(asyncio.Protocol):
    """A connection during one of whose callbacks SIGTERM comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        transport.close()


def test_sigterm_within_a_callback_of_a_connection_ends_what_is_awaited() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Deaf, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                await asyncio.sleep(60)
            finally:
                writer.close()

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch.run_interruptible(story())
        assert signal.default_int_handler is signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ends_by_itself_has_its_result() -> None:
    assert "done" == launch.run_interruptible(asyncio.sleep(0, "done"))
