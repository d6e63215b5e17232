"""Shards to measure without HTTP: those of a server that runs or is started for it, driven step by step or profiled.

A connection knows what the shards loaded and which KV blocks they have. Whoever drives them uses sequence ids from
2**62 on, which a router that counts from 1 never reaches, and any block: nothing else may run meanwhile, which is
checked where it can be.

They are driven as the router does, for one batch at a time: a whole-prompt step, then decode steps. Two requests are
under way while decoding, so that the shards compute one while the next already waits in their queue.
No tokens are looked at and nothing is admitted or stopped: this measures the shards, not a scheduler. TGI's own tool
measures more: its shards make text of every token, and the next step is sent when that is done (`detokenise`).

Under a profiler on the first rank, a step's time is split three ways: operators (or, on a GPU, kernels), what the
shard's own code adds around them, and the wire with everything that the other side does. The profiler slows short
operators down, so that those runs are not among the recorded ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from benchmark.cost import shapes
from benchmark.cost.devices import DataSheet, Gauge, Probe, known
from benchmark.cost.roofline import ServedModel
from benchmark.launch import Server, launch_flags, model_for, running_server, sockets_at
from benchmark.result import BenchError, SampleSummary, table
from benchmark.terminal import words
from router.scheduling.plan import Extension
from router.scheduling.request import Sampling, ValidRequest
from router.shards.client import ModelInfo, OperatorTime, ShardedClient, ShardError, Shards, StepReply, StepRequest
from router.shards.wire import new_sequence, step_request

FIRST_ID = 2**62
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 0.3  # a router that serves anybody sends a step within this time


@dataclass(frozen=True)
class MeasuredShards:
    """Where the shards listen, and what is known of their model before asking them."""

    sockets: Sequence[str]
    name: str  # of the model, for the report
    shape: shapes.ModelShape | None  # None: not known, so there are no floors
    location: str | None = None  # folder or repository of the model
    server: Server | None = None  # None: not ours

    def cause(self, error: ShardError) -> BenchError:
        """Why the shards were lost: the launcher knows better than the connection."""
        if self.server is None:
            return BenchError(f"the shards failed: {error}")
        self.server.wait_ended(5.0)
        return BenchError(self.server.failure() or f"the shards failed: {error}")


@dataclass(frozen=True)
class ConnectedShards:
    """Shards that answer, and what they loaded; KV blocks 0 … info.num_blocks-1 are at hand."""

    shards: Shards
    info: ModelInfo


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how to reach shards that run already."""
    parser.add_argument(
        "--shard-uds-path",
        metavar="PATH",
        help="measure running shards at PATH-0, PATH-1, … with an idle router; --model-id or "
        "--random-weights then only name their model",
    )


@contextmanager
def target_for(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[MeasuredShards]:
    """The shards that the arguments name; a server with the launcher `flags` is started for them where none runs."""
    if args.shard_uds_path is not None:
        yield _running(args)
        return
    with model_for(args) as model:
        print(f"starting a server, which loads or makes the weights of {model.name}", file=sys.stderr, flush=True)
        with running_server([*launch_flags(args, model), *flags]) as server:
            print(f"the server is ready after {words(server.startup.ready_s)}", file=sys.stderr, flush=True)
            yield MeasuredShards(server.sockets, model.name, shape_of(model.location), model.location, server)


def _running(args: argparse.Namespace) -> MeasuredShards:
    location = args.random_weights or args.model_id
    shape = shapes.shape(args.random_weights) if args.random_weights else shape_of(location) if location else None
    return MeasuredShards(sockets_at(args.shard_uds_path), location or args.shard_uds_path, shape, location)


def shape_of(location: str) -> shapes.ModelShape | None:
    """The shape of a model folder, or of a repository whose config has been downloaded."""
    try:
        return shapes.shape(location)
    except BenchError:
        pass
    cached = cached_file(location, "config.json")
    try:
        return None if cached is None else shapes.shape(str(cached))
    except BenchError:  # of a family that is not known here
        return None


def cached_file(location: str, filename: str) -> Path | None:
    """A file of a repository where it was downloaded to; None if it was not, or if `location` names no repository."""
    try:
        cached = try_to_load_from_cache(location, filename)
    except ValueError:
        return None
    return Path(cached) if isinstance(cached, str) else None


@asynccontextmanager
async def connect(target: MeasuredShards) -> AsyncIterator[ConnectedShards]:
    """Connect to shards that are warmed up and idle. Raises BenchError when they are not."""
    shards = ShardedClient(target.sockets)
    try:
        with causes_of(target):
            await _wait_ready(shards, target)
            if target.server is None:
                await _require_idle(shards)
            info = await shards.info()
        if not info.num_blocks:
            raise BenchError(
                f"the shards at {target.sockets[0]} are not warmed up yet: wait until their server is ready"
            )
        yield ConnectedShards(shards, info)
    finally:
        await shards.close()


@contextmanager
def causes_of(target: MeasuredShards) -> Iterator[None]:
    """Turn a ShardError within the block into a BenchError that says why the shards were lost."""
    try:
        yield
    except ShardError as error:
        raise target.cause(error) from None


async def _wait_ready(shards: ShardedClient, target: MeasuredShards) -> None:
    try:
        await shards.wait_ready(CONNECT_SECONDS)
    except TimeoutError:
        raise BenchError(
            f"the shards at {target.sockets[0]} do not answer: check that their server still runs"
        ) from None


async def _require_idle(shards: ShardedClient) -> None:
    before = await shards.health()
    await asyncio.sleep(IDLE_SECONDS)
    after = await shards.health()
    if after.steps_received != before.steps_received or after.steps_finished != after.steps_received:
        raise BenchError("the server is generating for others: wait until it is idle, or start one for the measurement")


# --------------------------------------------------------------------------------------------------------------- floors


@dataclass(frozen=True)
class Floors:
    """What floors follow from: the model as it is served, and a gauge of the device; without both there are none."""

    served: ServedModel | None = None
    gauge: Gauge | None = None
    missing: str = ""  # why there are none


def floors_of(target: MeasuredShards, info: ModelInfo) -> Floors:
    """Of the shards' model on their device, one GPU each or one CPU for all: its data sheet, or else a probe."""
    served = served_model(target, info)
    if served is None:
        return Floors(missing="the model's config.json is not at hand; name it by --model-id or --random-weights")
    if sheet := known(info.device):
        return Floors(served, DataSheet(sheet.ceilings(served)))
    try:
        return Floors(served, _probe_for(served, info))
    except BenchError as error:
        return Floors(served, missing=str(error))


def served_model(target: MeasuredShards, info: ModelInfo) -> ServedModel | None:
    """The shape in the dtype and format that the shards serve it in; None where the shape is not known."""
    if target.shape is None:
        return None
    is_cpu = info.device == "cpu"
    return ServedModel(target.shape, info.dtype, info.quantize, info.kv_cache_dtype, is_cpu, info.world_size)


def _probe_for(served: ServedModel, info: ModelInfo) -> Probe:
    num_devices = 1 if info.device == "cpu" else info.world_size
    return Probe(
        info.device,
        info.dtype,
        threads=info.threads * info.world_size,
        num_devices=num_devices,
        step_weight_bytes=int(served.step_weight_bytes()) // num_devices,
        product_kind=served.product_kind,
    )


# ---------------------------------------------------------------------------------------------------------------- steps


REQUESTS_UNDER_WAY = 2  # as in router/batching/batcher.py


@dataclass(frozen=True)
class Times:
    """The times of one run of one batch, in seconds. The first rank says how much of each it computed."""

    prefill: float
    decode: float  # from the first request sent to the last reply, D-1 steps
    intervals: Sequence[float]  # between the replies of decode steps
    prefill_computed: float  # part of `prefill` in which the first rank computed
    decode_computed: float  # part of `decode` in which the first rank computed


Watch = Callable[[str], AbstractAsyncContextManager[None]]
Detokenise = Callable[[Sequence[int]], Callable[[int], str]]  # of a prompt, what makes text of each token behind it


STEPS = {"prefill": "Prefill", "decode_token": "Decode (token)", "decode_total": "Decode (total)"}


THROUGHPUT_STEPS = {"prefill": "Prefill", "decode_total": "Decode"}


def throughputs_of(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Tokens per second of a row's runs: their mean, the lowest and the highest."""
    rates = SampleSummary.of([1000 * row["tokens_per_sample"] / sample for sample in row["samples_ms"]])
    return rates.mean, rates.min, rates.max


def unwatched(phase: str) -> AbstractAsyncContextManager[None]:
    """A `Watch` that does nothing in any phase."""
    return nullcontext()


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids; equal arguments give equal prompts on every machine."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class StepDriver:
    """The one user of some shards. Raises ShardError when they are lost, BenchError when a step fails."""

    def __init__(
        self,
        shards: Shards,
        block_size: int,
        num_blocks: int,
        decoder_start: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        detokenise: Detokenise | None = None,
    ) -> None:
        """detokenise: what makes text of a step's tokens before its time ends and the next is sent; None: nothing."""
        self._shards = shards
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._decoder_start = decoder_start
        self._clock = clock
        self._detokenise = detokenise
        self._most_under_way = REQUESTS_UNDER_WAY if detokenise is None else 1
        self._texts: dict[int, Callable[[int], str]] = {}
        self._ids = itertools.count(FIRST_ID)
        self._step_numbers = itertools.count(1)

    def check(self, batch_size: int, sequence_length: int, decode_length: int) -> None:
        """Raise BenchError when so many sequences do not fit into the KV cache."""
        request = ValidRequest([0] * sequence_length, decode_length).read_by_encoder(self._decoder_start)
        each, cached = request.size().blocks(self._block_size), self._num_blocks
        if batch_size * each > cached:
            raise BenchError(
                f"--batch-size {batch_size} with {request.size().tokens} tokens each needs a KV cache of "
                f"{batch_size * each * self._block_size} tokens, but the shards have {cached * self._block_size}: use "
                f"a --batch-size of at most {cached // each}, shorter lengths, or a server with a larger "
                "--max-batch-total-tokens"
            )

    async def run(
        self,
        prompts: Sequence[Sequence[int]],
        decode_length: int,
        sampling: Sequence[Sampling],
        top_n_tokens: int = 0,
        watch: Watch = unwatched,
    ) -> Times:
        """Prefill all prompts in one step, decode to `decode_length` tokens each, and let go of them.

        watch: entered around the prefill and around the decodes.
        """
        ids = [next(self._ids) for _ in prompts]
        if (detokenise := self._detokenise) is not None:
            self._texts = {id: detokenise(prompt) for id, prompt in zip(ids, prompts, strict=True)}
        first = self._prefill(ids, prompts, decode_length, sampling, top_n_tokens)
        async with watch("prefill"):
            started = self._clock()
            computed = await self._exchange(first, len(ids))
            prefill = self._clock() - started
        async with watch("decode"):
            replies, steps = await self._decode(decode_length - 1, len(ids))
        await self._exchange(step_request(next(self._step_numbers), retire=ids), 0)
        intervals = [late - early for early, late in itertools.pairwise(replies)]
        return Times(prefill, replies[-1] - replies[0], intervals, computed, steps)

    async def check_guesses(
        self,
        prompts: Sequence[Sequence[int]],
        decode_length: int,
        sampling: Sequence[Sampling],
        guesses: Sequence[int],
    ) -> list[float]:
        """Prefill all prompts, then have each step check these guesses for every sequence; the seconds of each step.

        Guesses are nearly always wrong, so that a step brings each sequence one token, of `decode_length` at most. None
        is under way while another is computed, for that one's tokens tell what may be guessed; without guesses too.
        """
        ids = [next(self._ids) for _ in prompts]
        first = request = self._prefill(ids, prompts, decode_length, sampling, 0)
        lengths = {new.id: len(new.token_ids) for new in first.add}
        most = max(lengths.values()) + decode_length - 1 - len(guesses)
        seconds: list[float] = []
        while True:
            began = self._clock()
            self._shards.send(request)
            reply = _without_error(await self._shards.receive())
            if request is not first:
                seconds.append(self._clock() - began)
            brought: dict[int, list[int]] = {id: [] for id in ids}
            for id, token_id in zip(reply.ids, reply.token_ids, strict=True):
                brought[id].append(token_id)
                lengths[id] += 1
            if max(lengths.values()) > most:
                break
            came = {} if request is first else brought
            drafts = {
                id: Extension(lengths[id] - 1, [brought[id][-1], *guesses], came.get(id, ())) for id in ids if guesses
            }
            request = step_request(next(self._step_numbers), decode=not drafts, drafts=drafts)
        await self._exchange(step_request(next(self._step_numbers), retire=ids), 0)
        return seconds

    def _prefill(
        self,
        ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        decode_length: int,
        sampling: Sequence[Sampling],
        top_n_tokens: int,
    ) -> StepRequest:
        blocks = itertools.count()
        requests = [
            ValidRequest(prompt, decode_length, choice, top_n_tokens=top_n_tokens).read_by_encoder(self._decoder_start)
            for prompt, choice in zip(prompts, sampling, strict=True)
        ]
        add = [
            new_sequence(
                id, request, list(itertools.islice(blocks, request.size().blocks(self._block_size))), self._block_size
            )
            for id, request in zip(ids, requests, strict=True)
        ]
        chunks = [(id, len(request.token_ids)) for id, request in zip(ids, requests, strict=True)]
        return step_request(next(self._step_numbers), add=add, chunks=chunks)

    async def _decode(self, num_steps: int, batch_size: int) -> tuple[list[float], float]:
        """The time of the first request, then of every reply; and the seconds that the first rank computed."""
        times, computed = [self._clock()], 0.0
        sent = 0
        for received in range(num_steps):
            while sent < min(received + self._most_under_way, num_steps):
                self._shards.send(step_request(next(self._step_numbers), decode=True))
                sent += 1
            reply = self._read(await self._shards.receive(), batch_size)
            times.append(self._clock())
            computed += reply.forward_ns / 1e9
        return times, computed

    async def _exchange(self, request: StepRequest, num_tokens: int) -> float:
        """One step on its own; returns the seconds that the first rank computed."""
        self._shards.send(request)
        return self._read(await self._shards.receive(), num_tokens).forward_ns / 1e9

    def _read(self, reply: StepReply, num_tokens: int) -> StepReply:
        """A reply that is as it must be, with its tokens in the texts where there are any."""
        _checked(reply, num_tokens)
        if self._texts:
            for id, token_id in zip(reply.ids, reply.token_ids, strict=True):
                self._texts[id](token_id)
        return reply


def _without_error(reply: StepReply) -> StepReply:
    if reply.error:
        raise BenchError(f"a step failed on the shards: {reply.error}")
    return reply


def _checked(reply: StepReply, num_tokens: int) -> StepReply:
    if len(_without_error(reply).ids) != num_tokens:
        raise BenchError(f"a step gave {len(reply.ids)} tokens where {num_tokens} were due: the server is not idle")
    return reply


# -------------------------------------------------------------------------------------------------------------- profile


MOST_DECODES = 16  # steps: enough for a mean, few enough for a trace that a browser opens
SHOWN = 12  # operators in a table


@dataclass(frozen=True)
class Profile:
    """The mean step of one phase, in milliseconds."""

    phase: str
    batch_size: int
    steps: int
    step_ms: float  # from request to reply, or between replies
    computed_ms: float  # of that, from the shard's start of the step to its sampled tokens
    operators: Sequence[OperatorTime]  # of all steps together

    def rows(self) -> list[dict[str, Any]]:
        """Where a step's time goes: operators, then the host, then the wire."""
        busy = sum(operator.self_ns for operator in self.operators) / 1e6 / self.steps
        shown = [(o.name, o.calls / self.steps, o.self_ns / 1e6 / self.steps) for o in self.operators[:SHOWN]]
        others = self.operators[SHOWN:]
        if others:
            rest = sum(o.self_ns for o in others) / 1e6 / self.steps
            shown.append((f"{len(others)} others", sum(o.calls for o in others) / self.steps, rest))
        shown.append(("host: the shard around them", 0, max(0.0, self.computed_ms - busy)))
        shown.append(("wire: request, reply, waiting", 0, max(0.0, self.step_ms - max(busy, self.computed_ms))))
        return [
            {
                "phase": self.phase,
                "batch_size": self.batch_size,
                "where": name,
                "calls_per_step": calls,
                "ms_per_step": milliseconds,
                "percent": 100 * milliseconds / self.step_ms,
            }
            for name, calls, milliseconds in shown
        ]


async def profile_batch(
    shards: Shards,
    driver: StepDriver,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    decode_length: int,
    output: Path | None,
) -> list[Profile]:
    """Run one batch under the profiler. Traces go to the folder `output`, where there is one."""
    batch_size, decodes = len(prompts), min(decode_length - 1, MOST_DECODES)
    recorded: dict[str, list[OperatorTime]] = {}

    @asynccontextmanager
    async def watch(phase: str) -> AsyncIterator[None]:
        await shards.start_profile()
        yield
        trace = output / f"trace-{phase}-{batch_size}.json" if output else None
        recorded[phase] = await shards.stop_profile(str(trace.resolve()) if trace else "")

    times = await driver.run(prompts, 1 + decodes, sampling, watch=watch)
    return [
        _profile("prefill", batch_size, 1, times.prefill, times.prefill_computed, recorded["prefill"]),
        _profile("decode", batch_size, decodes, times.decode, times.decode_computed, recorded["decode"]),
    ]


def _profile(
    phase: str, batch_size: int, steps: int, seconds: float, computed: float, operators: Sequence[OperatorTime]
) -> Profile:
    return Profile(phase, batch_size, steps, 1000 * seconds / steps, 1000 * computed / steps, operators)


def profile_table(rows: Sequence[dict[str, Any]]) -> str:
    """One table of all profiles; empty where none was asked for."""
    cells = [
        [
            row["phase"],
            row["batch_size"],
            row["where"],
            f"{row['calls_per_step']:.0f}" if row["calls_per_step"] else "",
            f"{row['ms_per_step']:.2f} ms",
            f"{row['percent']:.1f} %",
        ]
        for row in rows
    ]
    return table(("Step", "Batch Size", "Where", "Calls", "Time", "Share"), cells) if cells else ""
