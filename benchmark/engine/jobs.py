"""What `offline --schedule` is to run: prompts, policies and limits, decided before a server starts.

`--schedule auto` takes the best policy of all that fit, by a model of the costs whose rates are measured here. The
arithmetic is the server's (`server/offload/cost.py`), and so are the probes, which run in this process before a server
has the device (`server/offload/auto.py`). Here both meet a model's shape as a whole: all shards together are looked at
as one, which has what all of them have. What contradicts itself is refused before anything is measured.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark import launch
from benchmark.cost.devices import kept_bytes
from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import BLOCK_SIZE, DTYPE_BYTES, ModelShape
from benchmark.engine import shards
from benchmark.engine.generation import Prompt, synthetic_prompts
from benchmark.engine.schedules import (
    DIAGONAL,
    SCHEDULES,
    Found,
    Policy,
    largest_gang,
    length_of,
    planned,
    policies,
    search,
)
from benchmark.result import BenchError
from host import cpu_kinds
from router.scheduling.limits import Limits
from router.shards.client import StreamedReply
from router.text.tokenizer import ModelTokenizer
from server.arch.footprint import state_bytes, step_bytes
from server.offload.cost import MOST_SPANS, Rates, Sizes, Span, StepCost, busy_seconds
from server.offload.share import Share

if TYPE_CHECKING:
    from server.backends import Device
    from server.offload.stores import Store


AUTO = "auto"
MOST_BATCHES = 64  # in a block that is tried
DEFAULT_BATCHES, DEFAULT_BATCH_SIZE = 4, 4  # FlexGen's default batch, and the first row of its table
PREFILL_TOKENS = 4096  # of a step at most, unless a block's prompts are more


@dataclass(frozen=True)
class Job:
    """What is to be run, decided before the server starts."""

    prompts: Sequence[Prompt]  # as they are wanted
    cut: int | None  # of their generated tokens so many are; None: all
    policies: Sequence[Policy]
    weights_on_device: str | None  # as a launcher's flag
    notes: Sequence[str]
    measured: Measured | None  # None: nothing is predicted
    prefill_tokens: int  # of a step at most
    is_encoded: bool  # an encoder reads the prompts

    @property
    def run_prompts(self) -> list[Prompt]:
        """The prompts as they are run."""
        return [replace(p, max_new_tokens=self.cut or p.max_new_tokens) for p in self.prompts]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(length_of, self.prompts))


def check_schedules(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and weights that nothing can keep. Raises BenchError."""
    for name in ("num_gpu_batches", "gpu_batch_size", "shortest_output_length", "cut_output_length", "offload_memory"):
        if getattr(args, name) is not None and not args.schedule:
            raise BenchError(f"--{name.replace('_', '-')} is for schedules: give --schedule too, or leave it out")
    share_of(args.weights_on_device, 1.0)  # before anything is measured
    if not args.schedule:
        return
    if AUTO in args.schedule and len(args.schedule) > 1:
        raise BenchError("--schedule auto is one of the others that is chosen: give it alone, or the others")
    if args.max_batch_size or args.max_batch_total_tokens:
        raise BenchError(
            "--max-batch-size and --max-batch-total-tokens follow from --num-gpu-batches × --gpu-batch-size and the "
            "longest prompt where there is a --schedule: leave them out"
        )
    _check_diagonal(args)
    if args.stop_at_eos and args.cut_output_length:
        raise BenchError("--cut-output-length extrapolates, and where sequences end is not known: drop --stop-at-eos")
    if args.shortest_output_length and (args.prompts or args.shortest_output_length > args.output_length):
        raise BenchError(
            f"--shortest-output-length is {args.shortest_output_length}: it is for synthetic prompts, and at most "
            f"--output-length, {args.output_length}"
        )
    if args.offload_memory is not None and AUTO not in args.schedule:
        raise BenchError(
            "--offload-memory is what --schedule auto may fill: leave it out, or let the schedule be chosen"
        )
    if args.offload_memory is not None:
        _check_size(args.offload_memory)


def _check_diagonal(args: argparse.Namespace) -> None:
    """Refuse what contradicts lengths that are known when a sequence enters. Raises BenchError."""
    if DIAGONAL not in args.schedule:
        return
    if args.stop_at_eos:
        raise BenchError(
            "--schedule diagonal divides memory by the lengths of outputs, and with --stop-at-eos these are not known: "
            "drop it, or give --schedule continuous"
        )
    if args.cut_output_length:
        raise BenchError(
            "--cut-output-length extrapolates steps that go on alike, and in the diagonal order shorter outputs have "
            "other ones: drop it, or leave diagonal out"
        )


def _check_size(text: str) -> None:
    """Refuse a size that is none. Raises BenchError."""
    try:
        share = Share.parse(text)
    except ValueError as error:
        raise BenchError(f"--offload-memory is {text}: {error}") from None
    if not share.num_bytes:
        raise BenchError(f"--offload-memory is {text}: give a size such as 6GB")


def drawn(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Prompt]:
    """Synthetic prompts, whose outputs are of one length, or of any from the shortest on."""
    prompts = synthetic_prompts(args, tokenizer)
    if args.shortest_output_length is None:
        return prompts
    draw = random.Random(args.seed)
    lengths = range(args.shortest_output_length, args.output_length + 1)
    return [replace(prompt, max_new_tokens=draw.choice(lengths)) for prompt in prompts]


def schedule_limits(job: Job) -> list[str]:
    """Launcher flags under which every policy can run."""
    sequences = max(policy.at_once(job.run_prompts, BLOCK_SIZE) for policy in job.policies)
    prompt = max(len(prompt.token_ids) for prompt in job.prompts)
    return launch.flags_of(
        {
            "--max-input-length": prompt,
            "--max-total-tokens": job.longest,
            "--max-concurrent-requests": sequences,
            "--max-batch-prefill-tokens": job.prefill_tokens,
            "--max-batch-total-tokens": BLOCK_SIZE
            * max(policy.kv_blocks(job.prompts, BLOCK_SIZE, is_encoded=job.is_encoded) for policy in job.policies),
        }
    )


def planned_job(args: argparse.Namespace, prompts: Sequence[Prompt], location: str) -> Job:
    """What to run with how much of the weights on the device. Raises BenchError where nothing fits."""
    shape = shards.shape_of(location)
    cut = _cut(args, prompts)
    size = args.gpu_batch_size or DEFAULT_BATCH_SIZE
    can_predict = shape is not None and shape.spec.encoder is None
    is_auto = AUTO in args.schedule
    if is_auto and (shape is None or not can_predict):
        raise BenchError("--schedule auto needs a decoder whose shape is known here: name a schedule instead")
    measured = _measured(args, shape) if shape is not None and can_predict else None
    is_encoded = shape is not None and shape.spec.encoder is not None
    if DIAGONAL in args.schedule and is_encoded:
        raise BenchError("--schedule diagonal is for decoders, and this model has an encoder: name another schedule")
    counts = args.num_gpu_batches or ([DEFAULT_BATCHES] if not is_auto else powers(-(-len(prompts) // size)))
    names = schedules_for(args) if is_auto else list(dict.fromkeys(args.schedule))
    chosen = policies(names, counts, size)
    most = max(policy.block for policy in chosen)
    if most > len(prompts) and not is_auto:
        raise BenchError(
            f"a block of --num-gpu-batches {max(counts)} × --gpu-batch-size {size} is {most} sequences, and there are "
            f"{len(prompts)} prompts: raise --num-prompts or lower one of the two"
        )
    if not is_auto:
        prefill_tokens = _prefill_tokens(args, prompts, chosen)
        return Job(prompts, cut, chosen, args.weights_on_device, (), measured, prefill_tokens, is_encoded)
    assert shape is not None and measured is not None, "refused above"
    prefill_tokens = args.max_batch_prefill_tokens or PREFILL_TOKENS
    one_step = [policy for policy in chosen if largest_gang(prompts, [policy], BLOCK_SIZE) <= prefill_tokens]
    served = ServedModel(shape, measured.dtype, args.quantize, args.kv_cache_dtype)
    memory = memory_for(args, served, measured, prefill_tokens)
    found = best_policy(args, prompts, one_step, served, measured, memory, prefill_tokens)
    why = why_chosen(found, served, measured, memory)
    return Job(prompts, cut, [found.policy], percent(found.resident), [why], measured, prefill_tokens, False)


def _prefill_tokens(args: argparse.Namespace, prompts: Sequence[Prompt], chosen: Sequence[Policy]) -> int:
    """Prompt tokens of a step, in which a block's prompts are computed together. Raises BenchError."""
    least, given = largest_gang(prompts, chosen, BLOCK_SIZE), args.max_batch_prefill_tokens
    if given is not None and given < least:
        raise BenchError(
            f"--max-batch-prefill-tokens is {given}, and the prompts of a block, which are computed together, have "
            f"{least} tokens: raise it or leave it out, or take smaller blocks"
        )
    return int(given or max(PREFILL_TOKENS, least))


def _measured(args: argparse.Namespace, shape: ModelShape) -> Measured:
    print("measuring what predictions need", file=sys.stderr, flush=True)
    return measure_rates(args, shape)


def _cut(args: argparse.Namespace, prompts: Sequence[Prompt]) -> int | None:
    cut = args.cut_output_length
    if cut is None:
        return None
    lengths = {prompt.max_new_tokens for prompt in prompts}
    if len(lengths) > 1 or cut >= min(lengths):
        raise BenchError(
            f"--cut-output-length is {cut}: it extrapolates outputs of one length, and must be less than that, "
            f"{min(lengths)} here"
        )
    return int(cut)


def schedules_for(args: argparse.Namespace) -> list[str]:
    """The schedules that can be chosen: in the diagonal order only where the lengths of all outputs are known."""
    is_unknown = args.stop_at_eos or args.cut_output_length is not None
    return [name for name in SCHEDULES if name != DIAGONAL or not is_unknown]


def powers(most: int) -> list[int]:
    """1, 2, 4 … and `most`, but for those that are too many."""
    powers = (1 << exponent for exponent in range(MOST_BATCHES.bit_length()))
    return [*(power for power in powers if power < most), *([most] if most <= MOST_BATCHES else [])]


def best_policy(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    chosen: Sequence[Policy],
    served: ServedModel,
    measured: Measured,
    memory: float,
    prefill_tokens: int,
) -> Found:
    """The best policy that fits into the memory. Raises BenchError where none does."""
    sizes = sizes_of(served)
    fixed = share_of(args.weights_on_device, sizes.layers)
    shares = [fixed] if fixed is not None else shares_of(sizes.num_layers)
    can_stream = measured.rates.link < math.inf
    tried, candidates = shares if can_stream else [1.0], {}
    kept = kept_bytes(served, prefill_tokens, max(map(length_of, prompts)))
    for policy in chosen:
        limits = policy.limits(
            prompts, block_size=BLOCK_SIZE, vocab_size=served.shape.spec.vocab_size, prefill_tokens=prefill_tokens
        )
        works = planned(policy, prompts, limits)
        candidates[policy] = (works, _cache_bytes(policy.at_once(prompts, BLOCK_SIZE), limits, sizes, kept))
    found = search(candidates, lambda share: cost_of(sizes, measured.rates, (1 - share) * sizes.layers), memory, tried)
    if found is None:
        layers = min(share * sizes.layers + sizes.slots * (share < 1) for share in tried)
        least = layers + min((kv_bytes for _, kv_bytes in candidates.values()), default=0.0)
        enough = f"give --offload-memory {math.ceil(least / 1e6)}MB"
        remedy = enough if candidates and args.offload_memory else "lower --gpu-batch-size"
        where = "" if can_stream else ", and nothing can stream without --offload-dir"
        raise BenchError(f"nothing fits into {memory / 1e9:.2f} GB beside what must stay{where}: {remedy}")
    return found


def _cache_bytes(sequences: int, limits: Limits, sizes: Sizes, kept: tuple[int, int]) -> float:
    """What must be free for a cache with states or rings of so many sequences. kept: see `devices.kept_bytes`."""
    of_token, of_sequence = kept
    beside = (sequences + bool(sizes.states)) * of_sequence
    # A server gives at most half of what is free to states and rings, and keeps room for one more.
    return max(limits.max_batch_total_tokens * of_token + beside, 2 * (sequences + 1) * of_sequence)


def why_chosen(found: Found, served: ServedModel, measured: Measured, memory: float) -> str:
    """What was chosen, in a sentence."""
    policy, phases = found.policy, found.phases
    beside = rest_bytes(served) + sizes_of(served).head
    link = measured.rates.link
    from_where = f" with {link / 1e9:.2f} GB/s from where weights wait" if link < math.inf else ""
    return (
        f"auto: {policy.schedule}, blocks of {policy.num_gpu_batches} × {policy.gpu_batch_size} sequences, "
        f"{100 * found.resident:.4g} % of the layers on the device, of {found.tried} policies that fit into "
        f"{memory / 1e9:.2f} GB beside {beside / 1e9:.2f} GB of embedding and head: "
        f"predicted {phases.total_tokens / phases.total_s:.4g} tokens/s{from_where}"
    )


# ------------------------------------------------------------------------------------------------- what streaming costs


WORDS = ("auto",)
MOST_SHARES = 32  # that are tried from no layers on the device to all


@dataclass(frozen=True)
class Measured:
    """A device before the server has it: its rates, what it computes well, and its free memory."""

    rates: Rates
    dtype: str
    free_bytes: int


def sizes_of(served: ServedModel) -> Sizes:
    """What the whole model's parts take, in bytes."""
    shape, head = served.shape, served.shape.head_bytes(served.dtype, served.quantize)
    encoder = shape.spec.encoder.num_layers if shape.spec.encoder else 0
    return Sizes(
        layers=shape.weight_bytes(served.dtype, served.quantize) - head - rest_bytes(served),
        num_layers=shape.spec.num_layers + encoder,
        head=head,
        kv_per_token=served.kv_bytes_per_token,
        experts=shape.expert_bytes(served.dtype, served.quantize),
        windows=served.kv_bytes,
        states=state_bytes(shape.spec),
    )


def rest_bytes(served: ServedModel) -> int:
    """Weights that are neither a layer's nor the head's: tables, the last norm."""
    shape = served.shape
    rest = shape.total_parameters - shape.layer_parameters - shape.head_parameters
    return rest * DTYPE_BYTES[served.dtype]


def memory_for(args: argparse.Namespace, served: ServedModel, measured: Measured, prefill_tokens: int) -> float:
    """Bytes for layers that stay, slots, and keys and values: what was asked for, or what is free beside the rest.

    prefill_tokens: prompt tokens of the largest step.
    """
    if args.offload_memory is not None:
        return float(Share.parse(args.offload_memory).num_bytes or 0)
    step = step_bytes(served.shape.spec, prefill_tokens, DTYPE_BYTES[served.dtype])
    return float(measured.free_bytes - rest_bytes(served) - sizes_of(served).head - step)


def share_of(text: str | None, layers: float) -> float | None:
    """A share of the layers' weights from an option; None: not given, or to be found. Raises BenchError."""
    if text is None or text in WORDS:
        return None
    try:
        share = Share.parse(text)
    except ValueError as error:
        raise BenchError(f"--weights-on-device is {text}: {error} or auto") from None
    return share.fraction if share.fraction is not None else min(1.0, (share.num_bytes or 0) / layers)


def shares_of(num_layers: int) -> list[float]:
    """The shares that a search tries: whole layers, of many layers not each number."""
    steps = min(num_layers, MOST_SHARES)
    return sorted({num_layers * step // steps / num_layers for step in range(steps + 1)})


def percent(share: float) -> str:
    """A share as a flag has it, rounded up, so that what is meant as whole layers has room for them."""
    return f"{min(math.ceil(share * 1e6) / 1e4, 100.0):.4f}%"


# ------------------------------------------------------------------------------------------------- what the shards tell


@dataclass(frozen=True)
class Streamed:
    """What the first shard's link and streamed layers did in one run."""

    pass_bytes: int
    num_bytes: int
    waited_s: float
    reads: list[Span]
    computed: list[Span]

    @classmethod
    def of(cls, reply: StreamedReply) -> Streamed:
        """From the wire."""
        reads = zip(reply.read_layers, reply.read_began_s, reply.read_ended_s, strict=True)
        computed = zip(reply.computed_layers, reply.computed_began_s, reply.computed_ended_s, strict=True)
        return cls(
            reply.pass_bytes,
            reply.bytes,
            reply.waited_s,
            [Span(*row) for row in reads],
            [Span(*row) for row in computed],
        )

    def busy(self, spans: list[Span], since: float, until: float) -> float | None:
        """The share of a run in which spans say that something was done; of its end, where the earliest are lost."""
        if not spans:
            return None
        since = max(since, spans[0].began_s) if len(spans) == MOST_SPANS else since
        return busy_seconds(spans, since, until) / max(until - since, 1e-9)


def cost_of(sizes: Sizes, rates: Rates, streamed: float) -> StepCost:
    """The cost of steps of which so many bytes stream."""
    return StepCost(sizes, rates, streamed)


# ------------------------------------------------------------------------------------------------------- measured rates


def measure_rates(args: argparse.Namespace, shape: ModelShape) -> Measured:
    """Some seconds of probes. Raises BenchError for a folder that no weights can be streamed from."""
    import torch

    from server import backends
    from server.offload.auto import rates_of
    from server.offload.disk_store import DiskError

    try:
        device = backends.open_device(args.device or "auto", rank=0, world_size=1)
        kernels = args.cpu_kernels or cpu_kinds.AUTO
        dtype = args.dtype or _good_dtype(shape, device, kernels)
        sizes = sizes_of(ServedModel(shape, dtype, args.quantize))
        layer_bytes = int(sizes.layers / sizes.num_layers / (args.num_shard or 1))
        backend = backends.choose(device, getattr(torch, dtype), cpu_kernels=kernels)
        link, storage = _link(args, device, layer_bytes), shape.storage(args.quantize)
        rates = rates_of(backend, getattr(torch, dtype), link, storage, has_tied_head=shape.spec.tied_head)
        # Each shard of a GPU has one of its own, and shards of a CPU share all there is.
        devices = 1 if device.link() is None else args.num_shard or 1
        return Measured(rates.of_devices(devices), dtype, devices * device.free_bytes(fraction=1.0, world_size=1))
    except (ValueError, DiskError) as error:
        raise BenchError(str(error)) from None


def _good_dtype(shape: ModelShape, device: Device, kernels: str) -> str:
    """The published dtype where the device computes it well, else the nearest that it does, as in the server."""
    good = {str(dtype).removeprefix("torch.") for dtype in device.good_dtypes(kernels)}
    return next(dtype for dtype in (shape.dtype, "bfloat16", "float16", "float32") if dtype in good)


def _link(args: argparse.Namespace, device: Device, layer_bytes: int) -> float:
    """Bytes/s at which layers come from where they would wait; infinite where they would wait nowhere."""
    from server.offload.auto import link_rate

    store = _store(args, device)
    if store is None:
        return math.inf
    try:
        return link_rate(store, device, layer_bytes)
    finally:
        store.close()


def _store(args: argparse.Namespace, device: Device) -> Store | None:
    """The slowest place where layers would wait."""
    from server.offload.places import OnDisk
    from server.offload.ring import PAGES
    from server.offload.stores import HostStore

    link, folder = device.link(), args.offload_dir
    if folder is not None and (link is None or args.weights_on_host is not None):
        return OnDisk(Path(folder), "--offload-dir", 1, link).open(device, PAGES, "weights")
    return None if link is None else HostStore(link, PAGES)
