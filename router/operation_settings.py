"""Settings of how a server is run: what it tells its operators, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

LOG_LEVELS = ("debug", "info", "warn", "error")


@dataclass(frozen=True, kw_only=True)
class OperationSettings:
    """The part of `RouterConfig` that logs, traces and the end of a server keep to."""

    otlp_endpoint: str | None = field(
        default=None,
        metadata={
            "help": "OpenTelemetry collector (OTLP over gRPC) that gets a trace of every request.",
            "default": "none",
            "when": "You run a collector; needs the extra `otel`.",
        },
    )
    otlp_service_name: str = field(
        default="text-generation-inference.router",
        metadata={
            "help": "Name under which the traces of otlp_endpoint appear; the default is TGI's, for its dashboards.",
            "when": "Several servers send traces to one collector.",
        },
    )
    log_level: str = field(
        default="info",
        metadata={
            "help": "Least important log records of the router and the shards that are written: info has one for each "
            "request, debug one for each step too. The launcher's own few lines are always written.",
            "choices": LOG_LEVELS,
            "environment": "LOCKSTEP_LOG_LEVEL",  # LOG_LEVEL is common in containers, and TGI's has a form of its own
            "when": "warn keeps the log of a busy server small; debug shows what each step is made of.",
        },
    )
    json_output: bool = field(
        default=False,
        metadata={"help": "Write logs as JSON, one object a line.", "when": "A log collector reads them."},
    )
    continuation_key: str | None = field(
        default=None,
        metadata={
            "help": "Key with which a balancer of several servers asks to be told the tokens of streams, so that "
            "another server can go on with those of one that is lost. Clients must not know it.",
            "default": "none",
            "secret": True,
            "when": "Several servers of one model run behind a balancer of ours; `deploy/ray` sets it itself.",
        },
    )
    shutdown_delay: int = field(
        default=0,
        metadata={
            "help": "How long after SIGTERM new requests are still accepted, while /health says 503 already.",
            "unit": "seconds",
            "min": 0,
            "when": "Behind a load balancer: longer than it takes to notice, so that a rolling restart loses nothing.",
        },
    )
    graceful_termination_timeout: int = field(
        default=90,
        metadata={
            "help": "How long running requests may go on after SIGTERM before they are ended with an error.",
            "unit": "seconds",
            "min": 0,
            "when": "Match it to the grace period of the platform that sends the signal.",
        },
    )
