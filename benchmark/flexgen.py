"""What the two reports of offline runs share: FlexGen's figures by FlexGen's names, and what they were measured on.

The lines are those that FlexGen prints (Sheng et al. 2023, arXiv 2303.06865), but for the host's memory, which it
leaves out. GB is 2**30 bytes there and here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark import memory, shards
from benchmark.prompts import Prompt
from benchmark.report import GIB, RunContext, arguments_of
from benchmark.roofline import ServedModel
from benchmark.shapes import DTYPE_BYTES
from router.client import ModelInfo

KINDS = ("prefill", "decode", "total")


def context(
    name: str,
    args: argparse.Namespace,
    target: shards.MeasuredShards,
    info: ModelInfo,
    prompts: Sequence[Prompt],
    **work: Any,
) -> RunContext:
    """What a reader must know of a run. work: what is compared besides the prompts."""
    return RunContext.gather(
        name,
        model=target.name,
        device=info.device,
        dtype=info.dtype,
        num_shard=info.world_size,
        threads=info.threads,
        quantize=info.quantize,
        arguments=arguments_of(args),
        work={
            "model": target.name,
            "num_prompts": len(prompts),
            "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
            "max_new_tokens": sum(prompt.max_new_tokens for prompt in prompts),
            "stop_at_eos": args.stop_at_eos,
            **work,
        },
    )


def sizes(
    info: ModelInfo, served: ServedModel | None, pids: Sequence[int], *, cache_tokens: int, widest_step: int
) -> dict[str, Any]:
    """Bytes. Peak memory is measured, of all shard processes; the others are what is allocated.

    cache_tokens: what the KV cache holds. widest_step: tokens of the largest step.
    """
    width = None if served is None else served.shape.spec.hidden_size * DTYPE_BYTES[served.dtype]
    return {
        "model_size_bytes": sum(info.weight_bytes),
        "cache_size_bytes": cache_tokens * info.kv_bytes_per_token * info.world_size,
        "hidden_size_bytes": None if width is None else widest_step * width,
        "peak_gpu_memory_bytes": None if info.device == "cpu" else memory.peak_gpu_memory(pids),
        "peak_host_memory_bytes": memory.peak_host_memory(pids),
    }


def size_lines(sizes: Mapping[str, Any], device: str, *, is_projected: bool) -> Iterator[str]:
    """The sizes as FlexGen prints them."""
    names = ("model_size", "cache_size", "hidden_size", "peak_gpu_memory", "peak_host_memory")
    model, cache, hidden, gpu, host = (_gib(sizes[f"{name}_bytes"]) for name in names)
    yield f"model size: {model}\tcache size: {cache}\thidden size (p): {hidden}"
    of_gpu = "" if device == "cpu" else f"peak gpu mem: {gpu}\t"
    yield f"{of_gpu}peak host mem: {host}\tprojected: {is_projected}"


def phase_line(kind: str, seconds: float, tokens_per_second: float | None) -> str:
    """One phase as FlexGen prints it."""
    return f"{kind} latency: {seconds:.3f} s\t{kind} throughput: {rate(tokens_per_second)} token/s"


def rate(value: float | None) -> str:
    """Tokens a second."""
    return "–" if value is None else f"{value:.3f}"


def _gib(num_bytes: int | None) -> str:
    return "not measured" if num_bytes is None else f"{num_bytes / GIB:.3f} GB"
