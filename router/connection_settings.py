"""Settings of the router's connections: how long each may last in which state, and what it may take."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """The part of `RouterConfig` that `guard.py` and `transport.py` keep to. Times are in seconds."""

    send_buffer_bytes: int = 256 * 1024  # of the kernel, for each connection; Linux grants the double, and 4 MB unasked

    header_timeout: float = field(
        default=10.0,
        metadata={
            "help": "How long a client has to send its headers, from connecting or from the first byte of a later "
            "request.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Hardly ever: headers are a few packets.",
        },
    )
    body_timeout: float = field(
        default=30.0,
        metadata={
            "help": "How long a client has to send a body. As long, at most, is what is left of a refused request "
            "thrown away, so that the client can read the refusal.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Raise it with payload_limit for clients on slow lines: 2 MB in 30 s is 70 KB/s.",
        },
    )
    keep_alive_timeout: float = field(
        default=75.0,
        metadata={
            "help": "How long a connection may wait for its next request.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Keep it above the idle limit of a proxy in front (60 s is common): the proxy then closes first.",
        },
    )
    unread_timeout: float = field(
        default=60.0,
        metadata={
            "help": "How long a byte of an answer may wait for the client to read it; then the connection is reset.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Lower it where many clients stall. What the kernel holds for a client is not counted.",
        },
    )
    max_header_bytes: int = field(
        default=32 * 1024,
        metadata={
            "help": "Largest request line, headers and trailers together; more is refused with 431.",
            "unit": "bytes",
            "min": 1024,
            "when": "A proxy in front adds large headers. Browsers and proxies stay under 16 KiB.",
        },
    )
    max_header_lines: int = field(
        default=100,
        metadata={
            "help": "Most headers and trailers of one request; more are refused with 431.",
            "unit": "lines",
            "min": 1,
            "when": "A proxy in front adds very many.",
        },
    )
    max_unfinished_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "help": "Bytes of unfinished request bodies, of all connections together. Beyond it, the API key or else "
            "the peer that holds the most has one refused with 429. Never less than payload_limit.",
            "unit": "bytes",
            "min": 1,
            "when": "Raise it for many large prompts at once over slow lines.",
        },
    )
    max_unread_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "help": "Bytes of answers that wait in the router for their clients, of all connections together. Beyond "
            "it, the connection that has taken nothing for the longest is reset. A single answer may be larger.",
            "unit": "bytes",
            "min": 1,
            "when": "Raise it for many large answers at once over slow lines. What the kernel holds is not counted.",
        },
    )
    max_discarded_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "help": "How much of a refused request is thrown away, so that the client can read the refusal; more than "
            "that resets the connection.",
            "unit": "bytes",
            "min": 0,
            "when": "Lower it where traffic is paid for.",
        },
    )
