"""`python -m tests.system.soak --minutes 60`: what a server holds after an hour of streams, cancellations, bad bodies.

The embedded model in float32 on one rank; 32 clients, each a stream after the other: most read to the end, one in
twenty leaves in the middle, one in a hundred asks for what is refused. Every answer is compared with the undisturbed
one. Each minute the router collects its garbage, gives free memory back (`tests/faults/sitecustomize.py` does that on
SIGUSR2), and its resident memory, descriptors and threads are noted. It prints one JSON object, and ends with 1 if an
answer was wrong, memory grew by more than `--most-mb` from minute 10 on, or a descriptor or KV block is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from tests.running import ROOT, Server, body
from tests.system.survival import STREAMS, Clients, mixed_requests

SETTLED_MINUTE = 10
SAMPLE_S = 60.0


class RestlessClients(Clients):
    """Clients of whom some leave early and some ask for what is refused."""

    cancelled = 0
    refused = 0

    async def go_on(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        """One request after the other until `is_over`."""
        while not self.is_over:
            fate = rng.random()
            if fate < 0.05:
                await self._leave(client, rng)
            elif fate < 0.06:
                answer = await client.post(f"{self.url}/generate", json=body("Once", max_new_tokens=-1))
                self.refused += 1
                if answer.status_code != 422:
                    self.tally.failures.append(f"{answer.status_code} in place of 422")
            else:
                await self._one(client, rng)

    async def _leave(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        asked = rng.choice(self.requests)
        if asked["parameters"].get("decoder_input_details"):
            return
        async with client.stream("POST", f"{self.url}/generate_stream", json=asked) as stream:
            left = rng.randint(1, 10)
            async for line in stream.aiter_lines():
                left -= line.startswith("data:")
                if not left:
                    break
        self.cancelled += 1


def held(pid: int) -> dict[str, float]:
    """What a process holds: resident megabytes, descriptors, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) / 1000,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


async def soak(
    server: Server, minutes: float, sample_s: float = 60.0
) -> tuple[RestlessClients, list[dict[str, float]]]:
    """The clients, and what the router held at each sample; the last is of an idle router."""
    router = server.router()
    clients = RestlessClients(server.url, mixed_requests(2 * STREAMS, random.Random(5)))
    samples = []
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        await clients.learn(client)
        tasks = [asyncio.create_task(clients.go_on(client, random.Random(n))) for n in range(STREAMS)]
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            await asyncio.sleep(sample_s)
            samples.append(await trimmed(router))
            print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
        clients.is_over = True
        await asyncio.gather(*tasks)
    await asyncio.sleep(2.0)
    samples.append(await trimmed(router))
    return clients, samples


async def trimmed(pid: int) -> dict[str, float]:
    """What the process holds once it has given back what it can."""
    os.kill(pid, signal.SIGUSR2)
    await asyncio.sleep(1.0)
    return held(pid)


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--most-mb", type=float, default=2.0)
    args, flags = parser.parse_known_args()
    env = {"PYTHONPATH": str(ROOT / "tests" / "faults")}
    with Server("--dtype", "float32", *flags, env=env) as server:
        before = asyncio.run(trimmed(server.router()))
        clients, samples = asyncio.run(soak(server, args.minutes))
        metrics = server.metrics()
    settled = samples[min(SETTLED_MINUTE, len(samples)) - 1]
    grown = samples[-2]["rss_mb"] - settled["rss_mb"]
    left: dict[str, Any] = {
        "grown_mb_since_minute_10": round(grown, 2),
        "descriptors_left": samples[-1]["descriptors"] - before["descriptors"],
        "blocks_left": metrics["tgi_kv_blocks_total"] - metrics["tgi_kv_blocks_free"],
        "answers": clients.tally.answers,
        "cancelled": clients.cancelled,
        "refused": clients.refused,
        "failures": clients.tally.failures[:10],
        "before": before,
        "samples": samples,
    }
    print(json.dumps(left, indent=1))
    is_clean = not (left["failures"] or left["descriptors_left"] > 0 or left["blocks_left"])
    return 0 if is_clean and grown <= args.most_mb else 1


if __name__ == "__main__":
    sys.exit(main())
