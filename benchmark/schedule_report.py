"""The report of `offline --schedule`: rows with FlexGen's headings, as FlexGen prints them, and one table beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmark import flexgen
from benchmark.prompts import Prompt
from benchmark.report import GIB, Result, footer, table
from benchmark.roofline import ServedModel
from benchmark.schedules import DIAGONAL, Phases, Policy
from benchmark.streaming import Measured, Streamed
from benchmark.timed_shards import StepRecord
from router.client import ModelInfo


def sizes(
    policy: Policy,
    prompts: Sequence[Prompt],
    info: ModelInfo,
    served: ServedModel | None,
    records: Sequence[StepRecord],
    pids: Sequence[int],
) -> dict[str, Any]:
    """FlexGen's sizes, with the KV budget of the policy for these prompts, and how many it computes together."""
    blocks = policy.kv_blocks(prompts, info.block_size, is_encoded=info.decoder_start is not None)
    widest = max(record.num_tokens for record in records)
    found = flexgen.sizes(info, served, pids, cache_tokens=blocks * info.block_size, widest_step=widest)
    return {"sequences_at_once": policy.at_once(prompts, info.block_size), **found}


def row(
    policy: Policy, phases: Phases, foreseen: Phases | None, sizes: dict[str, Any], *, is_projected: bool
) -> dict[str, Any]:
    """One run's figures. What was predicted is null where the model knows nothing of such a model."""
    expected = foreseen.row() if foreseen is not None else {}
    return {
        "schedule": policy.schedule,
        "num_gpu_batches": policy.num_gpu_batches,
        "gpu_batch_size": policy.gpu_batch_size,
        **sizes,
        "projected": is_projected,
        **phases.row(),
        **{f"predicted_{k}_tokens_per_second": expected.get(f"{k}_tokens_per_second") for k in flexgen.KINDS},
    }


def level(measured: float | None, foreseen: float | None) -> dict[str, Any]:
    """Tokens a second while a diagonal block is whole."""
    return {"level_tokens_per_second": measured, "predicted_level_tokens_per_second": foreseen}


def streamed(times: Streamed, began: float, ended: float) -> dict[str, Any]:
    """What the first shard's link did in the run."""
    return {
        "streamed_bytes_per_step": times.pass_bytes,
        "streamed_bytes": times.num_bytes,
        "waited_s": times.waited_s,
        "link_busy": times.busy(times.reads, began, ended),
        "layers_busy": times.busy(times.computed, began, ended),
    }


def notes(info: ModelInfo, measured: Measured | None) -> list[str]:
    """How the figures are meant."""
    found = [
        "Prefill: steps in which nothing decodes. Decode: steps without prompts, and the tokens generated behind the "
        "first of each sequence. A step that has both counts as decode for as long as the run's median step without "
        "prompts takes, and as prefill for the rest. Total: from the first request to the last token, and all tokens "
        "generated. Level: those of the steps in which the whole of a diagonal block is under way; before these its "
        "batches enter, and behind them they end, once in a run. Before 2026-11-24 reports called continuous diagonal.",
        "GB = 2**30 bytes. Model size: parameters on all shards. Cache size: the KV budget of the schedule; in the "
        "diagonal order, whose block is as large as the memory of a zig-zag block of n allows, what is in use at once. "
        "Hidden size (p): activations between two layers in the largest step. Peak memory: most that the shard "
        "processes held while the run lasted, libraries included, and keys and values that a run before has touched: "
        "what needs less is run first. On GPUs it is the driver's figure, with all that the largest block needs. Link "
        "and layers busy: the share of the run in which something was read, or a streamed layer computed.",
    ]
    found += [f"Off the device: {info.offloaded}."] if info.offloaded else []
    if measured is None:
        return found
    link = measured.rates.link
    took = 1e12 * measured.rates.products[-1][1]
    picoseconds = f"{took:.3g}" if took < 999.5 else f"{took:.0f}"
    rate = f"{link / 1e9:.2f} GB/s from where weights wait" if link < math.inf else "nothing streams"
    found.append(
        f"Predicted from what was measured before: {rate}, {measured.rates.memory / 1e9:.1f} GB/s from memory, and for "
        f"{measured.rates.products[-1][0]} tokens {picoseconds} ps for a byte of weights."
    )
    return found


def markdown(result: Result) -> str:
    """Each run as FlexGen prints it, then all in one table, then what to know about them."""
    parts = ["\n".join(_figures(row, result.context.device)) for row in result.rows]
    return "\n\n".join([*parts, _table(result.rows), footer(result)])


def _figures(row: dict[str, Any], device: str) -> Iterator[str]:
    yield f"#### {row['schedule']}"
    yield ""
    more = f" ({row['sequences_at_once']} sequences at once)" if row["schedule"] == DIAGONAL else ""
    yield f"--num-gpu-batches {row['num_gpu_batches']} --gpu-batch-size {row['gpu_batch_size']}{more}"
    yield from flexgen.size_lines(row, device, is_projected=row["projected"])
    for kind in flexgen.KINDS:
        yield flexgen.phase_line(kind, row[f"{kind}_latency_s"], row[f"{kind}_tokens_per_second"])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    headings = (
        "Schedule",
        "n",
        "Sequences",
        "Cache GB",
        "Decode token/s",
        "Predicted",
        "Total token/s",
        "Predicted",
        "Level token/s",
        "Predicted",
        "Link busy",
        "Layers busy",
    )
    cells = [
        [
            row["schedule"],
            row["num_gpu_batches"],
            row["sequences_at_once"],
            f"{row['cache_size_bytes'] / GIB:.3f}",
            flexgen.rate(row["decode_tokens_per_second"]),
            flexgen.rate(row["predicted_decode_tokens_per_second"]),
            flexgen.rate(row["total_tokens_per_second"]),
            flexgen.rate(row["predicted_total_tokens_per_second"]),
            flexgen.rate(row["level_tokens_per_second"]),
            flexgen.rate(row["predicted_level_tokens_per_second"]),
            _percent(row["link_busy"]),
            _percent(row["layers_busy"]),
        ]
        for row in rows
    ]
    return table(headings, cells)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
