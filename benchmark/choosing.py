"""What `offline --schedule auto` runs: the best policy of all that fit, by a model of the costs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from benchmark import streaming
from benchmark.prompts import Prompt
from benchmark.report import BenchError
from benchmark.roofline import ServedModel
from benchmark.schedules import DIAGONAL, SCHEDULES, Found, Policy, planned, search
from benchmark.shapes import BLOCK_SIZE
from benchmark.streaming import Measured

MOST_BATCHES = 64  # in a block that is tried


def schedules_for(args: argparse.Namespace) -> list[str]:
    """The schedules that can be chosen: in the diagonal order only where the lengths of all outputs are known."""
    is_unknown = args.stop_at_eos or args.cut_output_length is not None
    return [name for name in SCHEDULES if name != DIAGONAL or not is_unknown]


def powers(most: int) -> list[int]:
    """1, 2, 4 … and `most`, but for those that are too many."""
    powers = (1 << exponent for exponent in range(MOST_BATCHES.bit_length()))
    return [*(power for power in powers if power < most), *([most] if most <= MOST_BATCHES else [])]


def best(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    chosen: Sequence[Policy],
    served: ServedModel,
    measured: Measured,
    memory: float,
    prefill_tokens: int,
) -> Found:
    """The best policy that fits into the memory. Raises BenchError where none does."""
    sizes = streaming.sizes_of(served)
    fixed = streaming.share_of(args.weights_on_device, sizes.layers)
    shares = [fixed] if fixed is not None else streaming.shares_of(sizes.num_layers)
    can_stream = measured.rates.link < math.inf
    tried, candidates = shares if can_stream else [1.0], {}
    for policy in chosen:
        limits = policy.limits(
            prompts,
            block_size=BLOCK_SIZE,
            vocab_size=served.shape.spec.vocab_size,
            prefill_tokens=prefill_tokens,
        )
        works = planned(policy, prompts, limits)
        candidates[policy] = (works, limits.max_batch_total_tokens * sizes.kv_per_token)
    found = search(
        candidates,
        lambda share: streaming.cost_of(sizes, measured.rates, (1 - share) * sizes.layers),
        memory,
        tried,
    )
    if found is None:
        layers = min(share * sizes.layers + sizes.slots * (share < 1) for share in tried)
        least = layers + min((kv_bytes for _, kv_bytes in candidates.values()), default=0.0)
        enough = f"give --offload-memory {math.ceil(least / 1e6)}MB"
        remedy = enough if candidates and args.offload_memory else "lower --gpu-batch-size"
        where = "" if can_stream else ", and nothing can stream without --offload-dir"
        raise BenchError(f"nothing fits into {memory / 1e9:.2f} GB beside what must stay{where}: {remedy}")
    return found


def why(found: Found, served: ServedModel, measured: Measured, memory: float) -> str:
    """What was chosen, in a sentence."""
    policy, phases = found.policy, found.phases
    beside = streaming.rest_bytes(served) + streaming.sizes_of(served).head
    link = measured.rates.link
    from_where = f" with {link / 1e9:.2f} GB/s from where weights wait" if link < math.inf else ""
    return (
        f"auto: {policy.schedule}, blocks of {policy.num_gpu_batches} × {policy.gpu_batch_size} sequences, "
        f"{100 * found.resident:.4g} % of the layers on the device, of {found.tried} policies that fit into "
        f"{memory / 1e9:.2f} GB beside {beside / 1e9:.2f} GB of embedding and head: "
        f"predicted {phases.total_tokens / phases.total_s:.4g} tokens/s{from_where}"
    )
