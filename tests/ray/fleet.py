"""A Ray cluster of three nodes on this machine, the application on it, and clients that count what they lose."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import ray
from ray import serve
from ray.cluster_utils import Cluster

from lockstep_ray.app import build
from tests.ports import free_port

APP, MODEL = "lockstep", "lockstep-demo"
OBJECT_STORE = 80 << 20
PATIENCE_S = 600  # a bound of liveness


@contextmanager
def cluster(num_nodes: int = 3) -> Iterator[Cluster]:
    """Nodes whose processors are only counted: there are two of them in all."""
    common: dict[str, Any] = {"num_cpus": 3, "object_store_memory": OBJECT_STORE}
    nodes = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            nodes.add_node(**common)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="warning")
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@dataclass
class Told:
    """What a client got of one request."""

    status: int = 0
    ids: list[int] = field(default_factory=list)
    text: str | None = None  # once it is over
    error: str = ""
    first_token_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it is an answer with its end."""
        return self.status == 200 and not self.error and self.text is not None


class Fleet:
    """The application, served on `port`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def deploy(self, **model: Any) -> None:
        """Serve it with such a model, or change what is served to that; returns once it is so."""
        scaling = {"min_replicas": 3, "max_replicas": 3} | model.pop("scaling", {})
        settings = {"name": MODEL, "health_check_period_s": 1, "graceful_shutdown_timeout_s": 60, **model}
        app = build({"models": [{**settings, "scaling": scaling}], "most_tries": 8})
        serve.run(app, name=APP, route_prefix="/")

    def names(self, model: str = MODEL) -> list[str]:
        """Of the model's replicas that are there."""
        prefix = f"SERVE_REPLICA::{APP}#{model}#"
        actors = ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"].removeprefix(prefix) for one in actors if one["name"].startswith(prefix))

    def num_running(self) -> int:
        """Replicas that serve, as Serve says."""
        deployment = serve.status().applications[APP].deployments[MODEL]
        return deployment.replica_states.get("RUNNING", 0)

    def until_running(self, count: int, patience_s: float = PATIENCE_S) -> float:
        """Wait for so many, and for no others; returns how long that took."""
        began = time.monotonic()
        while (self.num_running(), len(self.names())) != (count, count):
            assert time.monotonic() - began < patience_s, f"{self.num_running()} of {count} replicas: {self.names()}"
            time.sleep(0.1)
        return time.monotonic() - began

    def counts(self) -> dict[str, int]:
        """The ingress' own."""
        found: dict[str, int] = serve.get_app_handle(APP).counts.remote().result()
        return found

    def counters(self, model: str = MODEL) -> dict[str, float]:
        """Samples of all replicas' /metrics together."""
        handle = serve.get_app_handle(APP)
        found = [handle.counters.remote(model, name).result() for name in self.names(model)]
        return {name: sum(one.get(name, 0.0) for one in found) for name in found[0]}


@contextmanager
def serving() -> Iterator[Fleet]:
    """A fleet on a cluster of its own, with nothing deployed."""
    with cluster():
        yield Fleet(free_port())


def kill_one(launcher: bool, ours: int | None = None) -> str:
    """End the launcher of a replica, or a replica, at once; says which."""
    replica = next(pid for pid in descendants(ours or os.getpid()) if b"ServeReplica:lockstep:lockstep" in cmdline(pid))
    victim = next(pid for pid in descendants(replica) if b"\0launcher\0" in cmdline(pid)) if launcher else replica
    os.kill(victim, signal.SIGKILL)
    return f"{'launcher' if launcher else 'replica'} {victim}"


def cmdline(pid: int) -> bytes:
    """Of a process; empty where it has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def descendants(pid: int) -> list[int]:
    """Its children, and theirs."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """With room for every request at once."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        yield http


async def stream(http: httpx2.AsyncClient, body: dict[str, Any], on_token: Callable[[], None] = lambda: None) -> Told:
    """A stream of TGI's, read to its end, whatever that is."""
    told, began = Told(), time.monotonic()
    try:
        async with http.stream("POST", "/generate_stream", json=body) as answer:
            told.status = answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                told.error = event.get("error", "")
                if "token" in event:
                    told.first_token_s = told.first_token_s or time.monotonic() - began
                    told.ids.append(event["token"]["id"])
                    told.text = event["generated_text"]
                    on_token()
    except httpx2.HTTPError as error:
        told.error = repr(error)
    return told


async def plain(http: httpx2.AsyncClient, body: dict[str, Any]) -> Told:
    """A request that is answered as a whole."""
    body = {**body, "parameters": {**body["parameters"], "details": True}}
    try:
        answer = await http.post("/generate", json=body)
    except httpx2.HTTPError as error:
        return Told(error=repr(error))
    found = answer.json()
    if answer.status_code != 200:
        return Told(answer.status_code, error=found["error"])
    return Told(200, [token["id"] for token in found["details"]["tokens"]], found["generated_text"])


async def together(work: Sequence[Callable[[], Any]], at_once: int) -> list[Any]:
    """All of it, so much at once."""
    places = asyncio.Semaphore(at_once)

    async def one(task: Callable[[], Any]) -> Any:
        async with places:
            return await task()

    return list(await asyncio.gather(*map(one, work)))
