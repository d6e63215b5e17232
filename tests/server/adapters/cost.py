"""What adapters add to a decode step, on an idle machine: `python -m tests.server.adapters.cost FOLDER`.

FOLDER is a model such as `python -m benchmark.race.model bloom-560m FOLDER` makes; adapters of rank 16 of all its
linear layers are made for it. Batches of 1, 8 and 32 sequences decode with no adapter, with one, with 8 and with 32
different ones, and without any in a model that serves none, in turn; a round is the median of some steps. It prints,
for each batch and kind, the median of all rounds in milliseconds, and the median, the least and the largest of what it
is beside the model that serves none.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from server.backends.cpu import load
from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine
from tests.gpu.gpu_backend import gpu_backend
from tests.server.adapters import made
from tests.server.driver import GREEDY, load_engine, place_adapters

BATCHES, ADAPTERS, PROMPT, STEPS = (1, 8, 32), 32, 100, 24
BLOCKS = 16  # of a sequence: 256 tokens


def begin(engine: Engine, batch: int, adapters: int) -> list[int]:
    """Sequences whose prompts are computed, of which each has one of so many adapters, or none."""
    request = pb.StepRequest(step=1, decode=False)
    for n in range(batch):
        row = n % adapters + 1 if adapters else 0
        blocks = range(n * BLOCKS, (n + 1) * BLOCKS)
        ids = [random.Random(n).randrange(1000, 20000) for _ in range(PROMPT)]
        request.add.add(id=n, token_ids=ids, blocks=blocks, sampling=GREEDY, adapter=row)
        request.chunk_ids.append(n)
        request.chunk_tokens.append(PROMPT)
    launched = engine.launch(request)
    assert launched is not None
    launched.finish()
    return list(range(batch))


def step_seconds(engine: Engine, batch: int, adapters: int) -> float:
    """The median of some decode steps."""
    ids, times = begin(engine, batch, adapters), []
    for _ in range(STEPS):
        began = time.perf_counter()
        launched = engine.launch(pb.StepRequest(step=1, decode=True))
        assert launched is not None
        launched.finish()
        times.append(time.perf_counter() - began)
    engine.launch(pb.StepRequest(step=1, retire=ids))
    return statistics.median(times[4:])


def measure(without: Engine, engine: Engine, batch: int, rounds: int) -> dict[str, list[float]]:
    """Of each kind, what it takes; each begins a round as often as the others."""
    kinds = {"none served": (without, 0)} | {
        name: (engine, count) for name, count in (("base", 0), ("one", 1), ("8", 8), ("32", 32)) if count <= batch
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):  # the first one captures
        for name in random.sample(list(kinds), len(kinds)):
            found[name].append(step_seconds(kinds[name][0], batch, kinds[name][1]))
    return {name: times[1:] for name, times in found.items()}


def shown(found: dict[str, list[float]]) -> dict[str, Sequence[float]]:
    """Milliseconds, the ratio to a model that serves none, and its least and largest."""
    plain = found["none served"]
    ratios = {name: [a / b for a, b in zip(times, plain, strict=True)] for name, times in found.items()}
    return {
        name: [round(1000 * statistics.median(times), 2)]
        + [round(value, 3) for value in (statistics.median(ratios[name]), min(ratios[name]), max(ratios[name]))]
        for name, times in found.items()
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(2)
    dtype = torch.bfloat16
    computes: dict[str, Any] = {"kernels": load()} if args.device == "cpu" else {"backend": gpu_backend(dtype)}
    options = computes | {"dtype": dtype, "tokens": 32 * BLOCKS * 16, "total_tokens": BLOCKS * 16, "warms_up": False}
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(n) for n in range(ADAPTERS)]
        for seed, folder in enumerate(folders):
            made.make(args.folder, folder, rank=16, seed=seed, size=0.01)
        without = load_engine(args.folder, **options)
        engine = load_engine(args.folder, adapters=ADAPTERS, **options)
        place_adapters(engine, folders)
    for batch in args.batches:
        print(json.dumps({"batch": batch} | shown(measure(without, engine, batch, args.rounds))), flush=True)


if __name__ == "__main__":
    main()
