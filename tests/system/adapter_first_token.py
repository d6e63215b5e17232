"""The first token with an adapter that lies on the disk: `python -m tests.system.adapter_first_token FOLDER`.

FOLDER is a model such as `python -m benchmark.race.model bloom-560m FOLDER` makes; adapters of rank 16 of all its
linear layers are made for it. Each is asked for 100 prompt tokens and one more, first while a server has never seen it
and its file is in no memory, then when it is loaded. It prints the medians in milliseconds, of reading the file alone
too, and the median of what the first takes beside a loaded one and reading its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx2

from tests.running import Server
from tests.server.adapters import made

ADAPTERS, PROMPT, RANK = 12, 100, 16


def first_token_seconds(client: httpx2.Client, adapter: str) -> float:
    """Of a prompt that nobody has asked for."""
    prompt = [random.randrange(1000, 20000) for _ in range(PROMPT)]
    began = time.perf_counter()
    answer = client.post("/v1/completions", json={"model": adapter, "prompt": prompt, "max_tokens": 1})
    answer.raise_for_status()
    return time.perf_counter() - began


def forget(path: Path) -> None:
    """Have the system drop what it holds of a file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(path: Path) -> float:
    """Of a file alone, from the disk."""
    forget(path)
    began = time.perf_counter()
    path.read_bytes()
    return time.perf_counter() - began


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"adapter-{n}" for n in range(ADAPTERS)]
        for seed, folder in enumerate(folders):
            made.make(args.folder, folder, rank=RANK, seed=seed, size=0.01)
        rows = ("--adapter-dir", name, "--max-adapters", str(ADAPTERS), "--adapter-memory", "2")
        with Server("--model-id", str(args.folder), "--max-total-tokens", "512", *rows, *flags) as server:
            client = httpx2.Client(base_url=server.url, timeout=120)
            first_token_seconds(client, folders[0].name)
            reading, cold, loaded = [], [], []
            for folder in folders[1:]:
                weights = folder / "adapter_model.safetensors"
                reading.append(read_seconds(weights))
                forget(weights)
                cold.append(first_token_seconds(client, folder.name))
                loaded.append(statistics.median(first_token_seconds(client, folder.name) for _ in range(3)))
    ratio = statistics.median(a / (b + c) for a, b, c in zip(cold, loaded, reading, strict=True))
    times = {"on disk": cold, "loaded": loaded, "reading": reading}
    medians = {kind: round(1000 * statistics.median(values), 1) for kind, values in times.items()}
    print(json.dumps(medians | {"ratio": round(ratio, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
