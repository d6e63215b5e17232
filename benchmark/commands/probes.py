"""`lockstep-bench probes`: what this machine's GPU (or CPU) does at best, operator by operator, without a model.

The questions that decide how a decode step is built: how fast memory is read and matrices are multiplied, what a launch
and the replay of a captured graph cost, how near decode attention comes to the bandwidth, what a top-k over a large
vocabulary takes, and how fast weights could come from the host. Each is measured for some tenths of a second, and the
best repeat counts, as in `cost/roofline.py`. What a device does not have is left out of its rows.

Shapes: S sequences, N heads, H head dim, B blocks, P tokens per block, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.cost.ceilings import GPU_READ_BYTES, Ceilings, Probe, best_seconds
from benchmark.cost.shapes import BLOCK_SIZE
from benchmark.report.publishing import published
from benchmark.result import Result, RunContext, arguments_of, footer, prepare_output, table
from benchmark.terminal import Stage, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from server.backends.protocol import Attention, StepMeta


KERNELS = 300  # small operators in a row: about what a decode step of 30 layers launches
DECODES = (1, 32, 256)  # sequences of the decode steps that are measured
CONTEXT = 2048  # tokens that each of those sequences attends to
HEADS, HEAD_DIM = 32, 128  # BLOOM-7b1's heads, each with keys of its own
MOST_CACHE_BYTES = 8 * 2**30  # of the caches that an attention probe reads in turn, so that none stays in the L2 cache
MOST_LAYERS = 30
LOGITS = (256, 250880)  # [S, V]: BLOOM's vocabulary
TOP_K = 50
READS, PRODUCTS = "memory is read at", "large matrix products"
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: auto)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(bfloat16)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")


def run(args: argparse.Namespace) -> int:
    """Measure what the device does at best and print it; 0. Raises BenchError."""
    import torch

    prepare_output(args.output)
    is_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if is_gpu else "cpu")
    result = Result(_context(args, torch.cuda.get_device_name() if is_gpu else "cpu"))
    chosen = (*ANYWHERE, *(ON_A_GPU if is_gpu else ()))
    stages = [Stage(probe.__name__.strip("_").replace("_", " ")) for probe in chosen]
    with (
        published(result, markdown, args.output) as keep,
        shown(f"probing {result.context.machine}", stages) as view,
        torch.inference_mode(),
    ):
        for probe in view.each(chosen):
            for row in probe(device, getattr(torch, args.dtype)):
                result.rows.append(row)
                keep()
    return 0


def ceilings(rows: Sequence[Row]) -> Ceilings | None:
    """The ceilings that the probes measured; None where they did not get so far."""
    values = {row["probe"]: row["value"] for row in rows}
    return Ceilings(1e9 * values[READS], 1e12 * values[PRODUCTS]) if {READS, PRODUCTS} <= values.keys() else None


# -------------------------------------------------------------------------------------------------------- on any device


def _ceilings(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    import torch

    name = str(dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    probe = Probe(device.type, name, threads=threads, num_devices=1, step_weight_bytes=GPU_READ_BYTES)
    for _ in range(3):
        probe.measure()
    yield _row(READS, probe.best.bytes_per_second / 1e9, "GB/s")
    yield _row(PRODUCTS, probe.best.flops_per_second / 1e12, "TFLOP/s")


def _launches(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    seconds = best_seconds(_small_operators(device, dtype), device)
    yield _row(f"a small operator, one of {KERNELS} in a row", 1e6 * seconds / KERNELS, "µs")


def _top_k(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    import torch

    logits = torch.rand(LOGITS, device=device)
    seconds = best_seconds(lambda: logits.topk(TOP_K), device)
    yield _row(f"topk({TOP_K}) of {list(LOGITS)} float32", 1e3 * seconds, "ms")


# ------------------------------------------------------------------------------------------------------------- on a GPU


def _replay(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    seconds = best_seconds(_captured(_small_operators(device, dtype)), device)
    yield _row(f"a replayed graph of {KERNELS} small operators", 1e6 * seconds, "µs")


def _decode_attention(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    import torch

    from server import backends
    from server.backends.protocol import Scores

    backend = backends.choose(backends.open_device(device.type, rank=0, world_size=1), dtype)
    attention = backend.attention(Scores(HEAD_DIM**-0.5))
    for sequences in DECODES:
        blocks = sequences * CONTEXT // BLOCK_SIZE
        num_bytes = 2 * blocks * HEADS * BLOCK_SIZE * HEAD_DIM * dtype.itemsize
        layers = min(MOST_LAYERS, max(1, MOST_CACHE_BYTES // num_bytes))
        # Not zeros: a device draws less power over those, keeps a higher clock, and may compress them.
        kv = torch.randn(layers, 2, blocks, HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype, device=device)
        q = torch.randn(sequences, HEADS, HEAD_DIM, dtype=dtype, device=device)
        step = _captured(partial(_attend, attention, q, kv, _decode_meta(sequences, device)))
        rate = layers * num_bytes / best_seconds(step, device)
        yield _row(
            f"decode attention ({backend.name}), {sequences} x {CONTEXT} tokens, keys read at", rate / 1e9, "GB/s"
        )


def _attend(attention: Attention, q: Tensor, kv_caches: Tensor, meta: StepMeta) -> None:
    for kv in kv_caches:
        attention.attend(q, kv, meta, window=0)


def _decode_meta(sequences: int, device: torch.device) -> StepMeta:
    """The layout of a step in which every sequence decodes its last token, on blocks of its own."""
    import torch

    from server.backends.protocol import StepMeta

    starts = list(range(sequences + 1))
    visible = torch.full((sequences,), CONTEXT, device=device)
    blocks = torch.arange(sequences * CONTEXT // BLOCK_SIZE, device=device).view(sequences, -1)
    return StepMeta(
        num_decodes=sequences,
        query_starts=starts,
        context_lengths=[CONTEXT] * sequences,
        longest=0,
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        positions=visible - 1,
        visible=visible,
        prompt_lengths=visible - 1,
        owners=None,
        block_tables=blocks,
    )


def _host_copies(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    import torch

    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    seconds = best_seconds(lambda: target.copy_(host, non_blocking=True), device)
    yield _row("pinned host memory is copied to the device at", len(host) / seconds / 1e9, "GB/s")


ProbeFunction = Callable[["torch.device", "torch.dtype"], Iterator[Row]]
ANYWHERE: Sequence[ProbeFunction] = (_ceilings, _launches, _top_k)
ON_A_GPU: Sequence[ProbeFunction] = (_replay, _host_copies, _decode_attention)


def _small_operators(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """A function that launches KERNELS operators with next to nothing to compute."""
    import torch

    x = torch.zeros(1024, dtype=dtype, device=device)

    def run() -> Tensor:
        for _ in range(KERNELS):
            x.add_(1)
        return x

    return run


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """A function that replays, as one CUDA graph, what `run` launches."""
    import torch

    run()  # compiles and allocates
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# --------------------------------------------------------------------------------------------------------------- report


def _row(probe: str, value: float, unit: str) -> Row:
    return {"probe": probe, "value": value, "unit": unit}


def _context(args: argparse.Namespace, device: str) -> RunContext:
    return RunContext.gather(
        "probes",
        model="no model",
        device=device,
        dtype=args.dtype,
        num_shard=1,
        threads=0,
        quantize=None,
        arguments=arguments_of(args),
        work={"dtype": args.dtype},
    )


def markdown(result: Result) -> str:
    """The table of probes, and what to know about it."""
    return f"{probe_table(result.rows)}\n\n{footer(result)}"


def probe_table(rows: Sequence[Row]) -> str:
    """One line for each probe, with its unit."""
    return table(("Probe", "Measured"), [[row["probe"], f"{row['value']:.4g} {row['unit']}"] for row in rows])
