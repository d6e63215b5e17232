"""What the cost model says of a document's blocks on the document's own device: computed, and measured by nobody.

The device at hand may have nothing to gain where the document's has, or the reverse. The model is that of `offline
--schedule auto` (`server/offload/cost.py`) with the data sheet's rates: bytes at the whole bandwidth, products at the
whole arithmetic, nothing streams, no time between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark import streaming
from benchmark.devices import DEVICES
from benchmark.prompts import Prompt
from benchmark.roofline import ServedModel
from benchmark.schedules import DIAGONAL, ZIG_ZAG, Policy, StreamedCost, planned, predicted
from benchmark.seeds.documents import Seed
from benchmark.shapes import BLOCK_SIZE, DTYPE_BYTES

BLOCKS = 4  # of a diagonal run, so that most of its steps are level


def block_figures(seed: Seed) -> list[dict[str, Any]]:
    """For each number of batches, figures of both schedules: sequences, bytes of memory, and tokens a second.

    Those of zig-zag are a whole block's, as the document's; those of the diagonal order are of its level steps.
    """
    served = ServedModel(seed.model(None).shape, seed.dtype)
    sizes = streaming.sizes_of(served)
    ceilings = DEVICES[seed.device].dense_ceilings(seed.dtype, 1)
    rates = streaming.sheet_rates(ceilings.bytes_per_second, ceilings.flops_per_second, seed.dtype)
    cost = StreamedCost(streaming.cost_of(sizes, rates, 0.0))
    found = []
    for count in _several(seed.sweep, "num_gpu_batches"):
        zig_zag, level = (Policy(name, count, _one(seed.sweep, "gpu_batch_size")) for name in (ZIG_ZAG, DIAGONAL))
        prompt = Prompt(range(_one(seed.sweep, "input_length")), _one(seed.sweep, "output_length"))
        block, several = [prompt] * zig_zag.block, [prompt] * zig_zag.block * BLOCKS
        limits = zig_zag.limits(
            block, block_size=BLOCK_SIZE, vocab_size=2, prefill_tokens=len(prompt.token_ids) * len(block)
        )
        works, plan = planned(zig_zag, block, limits), level.plan(several, BLOCK_SIZE)
        phases = predicted(works, cost)
        reached = {
            ZIG_ZAG: phases.total_tokens / phases.total_s,
            DIAGONAL: plan.level_rate([cost.seconds(step.work) for step in plan.steps]),
        }
        row: dict[str, Any] = {"num_gpu_batches": count}
        for policy, prompts, steps in ((zig_zag, block, works), (level, several, plan.works)):
            cache = policy.kv_blocks(prompts, BLOCK_SIZE) * BLOCK_SIZE * served.kv_bytes_per_token
            widest = max(work.prompt_tokens + work.decoding for work in steps)
            hidden = widest * served.shape.spec.hidden_size * DTYPE_BYTES[seed.dtype]
            weights = served.shape.weight_bytes(served.dtype, None)
            row[policy.schedule] = {
                "sequences": policy.at_once(prompts, BLOCK_SIZE),
                "cache_size_bytes": cache,
                "peak_bytes": weights + cache + hidden,
                "tokens_per_second": reached[policy.schedule],
            }
        found.append(row)
    return found


def _one(sizes: Mapping[str, int | list[int]], name: str) -> int:
    value = sizes[name]
    assert isinstance(value, int)
    return value


def _several(sizes: Mapping[str, int | list[int]], name: str) -> list[int]:
    value = sizes[name]
    assert isinstance(value, list)
    return value
