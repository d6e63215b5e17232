"""One replica: a launcher of its own on a free port of its node's loopback, and what Serve asks of it.

The launcher is a child that dies with this process, whatever kills that (`child.py`). When it ends by itself, the
health check fails, and Serve starts another replica.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import httpx2
from ray import serve
from ray.serve import get_replica_context
from ray.util import metrics

from lockstep_ray.child import Child
from lockstep_ray.relay import Head, ReplicaLost
from lockstep_ray.requests import RelayedRequest
from lockstep_ray.scaling import KV, QUEUE
from lockstep_ray.settings import Model, deployment_name
from router.requests.continuing import KEY_HEADER, LENGTH_HEADER

CONNECT_S = 10.0
HEALTH_S = 10.0
MOST_WAITING_BYTES = 256 << 10  # that are read of an answer before Serve takes them
SAMPLE = re.compile(r"^(tgi_\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
# What Ray's own metrics show of each replica, beside what its scaling asks for.
SHOWN = (
    "tgi_queue_size", "tgi_batch_current_size", "tgi_kv_blocks_free", "tgi_kv_blocks_total", "tgi_request_count",
    "tgi_request_success", "tgi_request_prefix_hit_tokens", "tgi_batch_prefill_tokens",
)  # fmt: skip

logger = logging.getLogger("ray.serve")


class Replica:
    """The deployment of one model."""

    async def __init__(self, model: dict[str, Any]) -> None:  # type: ignore[misc]
        self._model = Model.model_validate(model)
        self._key = secrets.token_urlsafe(24)  # known to this process and its launcher alone
        self._name = get_replica_context().replica_id.unique_id
        self._gauges = {name: metrics.Gauge(name.replace("tgi_", "lockstep_replica_", 1)) for name in SHOWN}
        self._child = Child(
            self._model.every_flag, {**self._model.environment, "CONTINUATION_KEY": self._key}, logger.info
        )
        try:
            await asyncio.to_thread(self._child.wait_ready)
        except BaseException:
            self._child.end(0)
            raise
        self._headers = {"authorization": f"Bearer {self._child.api_key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        self._http = httpx2.AsyncClient(base_url=self._child.url, timeout=timeout, limits=limits, trust_env=False)

    async def check_health(self) -> None:
        """Serve's question. Raises RuntimeError where this replica should be replaced."""
        if self._child.code is not None:
            raise RuntimeError(f"the server of replica {self._name} ended with code {self._child.code}")
        answer = await self._http.get("/health", timeout=HEALTH_S)
        if answer.status_code != 200:
            raise RuntimeError(f"the server of replica {self._name} says {answer.status_code} of its health")

    async def __del__(self) -> None:
        """Serve's request to leave, once nothing runs here: the server ends in order."""
        with suppress(AttributeError):  # it was never ready
            await self._http.aclose()
            await asyncio.to_thread(self._child.end)

    async def counters(self, ask: RelayedRequest) -> dict[str, float]:
        """Samples of /metrics, by name and labels. ask: read by Serve's router alone, to choose this replica."""
        text = (await self._http.get("/metrics", headers=self._headers, timeout=HEALTH_S)).text
        return {name: float(value) for name, value in SAMPLE.findall(text)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.py` reads, and Ray's own metrics show."""
        found = await self.counters(_METRICS)
        for name, gauge in self._gauges.items():
            gauge.set(found.get(name, 0.0))
        return {QUEUE: found.get("tgi_queue_size", 0.0), KV: found.get("tgi_kv_used_ratio", 0.0)}

    async def ask(self, ask: RelayedRequest) -> AsyncGenerator[Head | bytes, None]:
        """The head of an answer, then its body as it comes. Raises ReplicaLost where the server is gone."""
        if self._child.code is not None:
            raise ReplicaLost("the server of the replica has ended", self._name)
        headers = [*ask.headers, *self._headers.items(), (KEY_HEADER, self._key)]
        if ask.known:
            headers.append((LENGTH_HEADER, str(len(ask.known))))
        url = httpx2.URL(ask.path, query=ask.query.encode() or None)
        content = ask.known + ask.body if ask.method == "POST" else None
        try:
            async with self._http.stream(ask.method, url, headers=headers, content=content) as response:
                told = tuple((name, value) for name, value in response.headers.multi_items())
                yield Head(response.status_code, told, self._name)
                async with aclosing(_gathered(response.aiter_raw())) as pieces:
                    async for piece in pieces:
                        yield piece
        except httpx2.HTTPError as error:
            raise ReplicaLost(f"the server of the replica was lost: {type(error).__name__}", self._name) from None


_METRICS = RelayedRequest("GET", "/metrics", "", (), b"", 0, None)


async def _gathered(pieces: Any) -> AsyncGenerator[bytes, None]:
    """The same bytes in fewer pieces, where they come faster than they are taken: each costs Ray a message."""
    waiting, error = bytearray(), list[BaseException]()
    has_come, has_room = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async for piece in pieces:
                waiting.extend(piece)
                has_come.set()
                if len(waiting) > MOST_WAITING_BYTES:
                    has_room.clear()
                    await has_room.wait()
        except httpx2.HTTPError as found:
            error.append(found)
        finally:
            has_come.set()

    reading = asyncio.create_task(read())
    try:
        while True:
            await has_come.wait()
            has_come.clear()
            if waiting:
                piece = bytes(waiting)
                waiting.clear()
                has_room.set()
                yield piece
            elif reading.done() or error:
                if error:
                    raise error[0]
                return
            if reading.done():
                has_come.set()
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


def deployment_of(model: Model) -> Any:
    """The bound deployment of a model."""
    scaling = model.scaling
    autoscaling = {
        **scaling.model_dump(exclude={"queue", "kv"}, exclude_none=True),
        "policy": {
            "policy_function": "lockstep_ray.scaling:QueueAndCache",
            "policy_kwargs": {"queue": scaling.queue, "kv": scaling.kv},
        },
    }
    resources = {"num_cpus": model.num_cpus, "num_gpus": model.num_gpus, "resources": model.resources}
    return serve.deployment(
        Replica,
        name=deployment_name(model.name),
        ray_actor_options=resources,
        autoscaling_config=autoscaling,
        max_ongoing_requests=model.max_ongoing_requests,
        health_check_period_s=model.health_check_period_s,
        health_check_timeout_s=model.health_check_timeout_s,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config={
            "request_router_class": "lockstep_ray.routing:PolicyRouter",
            "request_router_kwargs": {"policy": model.policy},
        },
    ).bind(model.model_dump())
