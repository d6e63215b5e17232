"""Prompts through the engine without HTTP: read or drawn, run by the router's batching loop, and timed step by step.

The rules of admission are the server's. The shards that the loop is handed note when each step was sent and answered,
and what it was for; what the device needs at least for a step follows from its request alone: which prompts it
advances, and how long its sequences are by then. Whether a prompt fits a server's limits is found out by starting one.

Beside it stands what one would run without a server: the same prompts by `generate` of the transformers library, in
this process, greedy, in the dtype and with the threads of the shards. It is imported only when it is used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.cost.roofline import BytesAndFlops, Piece, ServedModel
from benchmark.engine.shards import Detokenise, cached_file, random_prompts
from benchmark.result import BenchError, SampleSummary, table
from router.batching.batcher import Batcher
from router.scheduling.limits import Limits
from router.scheduling.request import Entry, Failed, Finished, ValidRequest
from router.shards.client import (
    KvCache,
    ModelInfo,
    OperatorTime,
    ShardError,
    ShardHealth,
    Shards,
    StepReply,
    StepRequest,
)
from router.telemetry.metrics import Metrics
from router.text.generated import Detokeniser
from router.text.tokenizer import ModelTokenizer, TokenizerError


@dataclass(frozen=True)
class Prompt:
    """The tokens of one prompt, and how many to generate after it."""

    token_ids: Sequence[int]
    max_new_tokens: int


def load_tokenizer(location: str, *, with_eos: bool) -> ModelTokenizer:
    """The model's tokenizer, from its folder or where it was downloaded to; without end tokens unless asked for."""
    folder = Path(location).expanduser()
    if not folder.is_dir():
        cached = cached_file(location, "tokenizer.json")
        if cached is None:
            raise BenchError(f"{location} is not on this machine yet: give a folder, or start a server with it once")
        folder = cached.parent
    try:
        tokenizer = ModelTokenizer.load(str(folder))
    except ValueError as error:
        raise BenchError(str(error)) from None
    return tokenizer if with_eos else ModelTokenizer.of(tokenizer.tokenizer, frozenset())


def detokenising(location: str) -> Detokenise:
    """The model's tokenizer making text, as a server does for a stream."""
    tokenizer = load_tokenizer(location, with_eos=False)
    return lambda prompt: Detokeniser(tokenizer, prompt).push


def read_prompts(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Prompt]:
    """Read the prompts of `--prompts`. Raises BenchError that names the line."""
    try:
        lines = args.prompts.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --prompts {args.prompts}: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line), args.output_length, tokenizer))
            except (ValueError, TypeError, AttributeError, TokenizerError) as error:
                raise BenchError(f"{args.prompts}, line {number}: {error}") from None
    if not prompts:
        raise BenchError(f"{args.prompts} has no prompts: write one JSON object a line")
    return prompts


def _prompt(line: Any, default_length: int, tokenizer: ModelTokenizer) -> Prompt:
    if not isinstance(line, dict) or not ("prompt" in line or "token_ids" in line):
        raise ValueError('not an object with "prompt" or "token_ids"')
    ids = line["token_ids"] if "token_ids" in line else tokenizer.encode(line["prompt"])
    new = line.get("max_new_tokens", default_length)
    size = tokenizer.tokenizer.get_vocab_size()
    if not ids or not isinstance(ids, list) or any(type(id) is not int or not 0 <= id < size for id in ids):
        raise ValueError(f"token ids must be a list of whole numbers below {size}, and at least one")
    if type(new) is not int or new < 1:
        raise ValueError(f"max_new_tokens is {new}: give a whole number of at least 1")
    return Prompt(ids, new)


def synthetic_prompts(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[Prompt]:
    """`--num-prompts` prompts of random token ids; the same seed gives the same ids."""
    size = tokenizer.tokenizer.get_vocab_size()
    drawn = random_prompts(args.num_prompts, args.input_length, size, args.seed)
    return [Prompt(token_ids, args.output_length) for token_ids in drawn]


def warmup_prompt(prompts: Sequence[Prompt]) -> Prompt:
    """The shortest of the prompts, with one decode step if it has any."""
    shortest = min(prompts, key=lambda prompt: len(prompt.token_ids))
    return Prompt(shortest.token_ids, min(2, shortest.max_new_tokens))


# ---------------------------------------------------------------------------------------------------------------- steps


KINDS = ("prefill", "decode", "total")


@dataclass
class StepRecord:
    """One step: when it was sent and answered, and what it was for."""

    sent_at: float
    prompt_tokens: int
    needed: BytesAndFlops | None
    answered_at: float = 0.0
    generated_tokens: int = 0
    decoding: int = 0  # sequences that got their next token; the other generated tokens are the first of theirs

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.prompt_tokens + self.decoding

    @property
    def kind(self) -> str:
        """A step with any prompt chunk counts as prefill, whatever decodes beside it."""
        return "prefill" if self.prompt_tokens else "decode"


@dataclass
class TimedShards:
    """Shards that note every step that passes. The batching loop does not see the difference."""

    shards: Shards
    served: ServedModel | None
    clock: Callable[[], float] = time.perf_counter
    came: Callable[[int], None] | None = None  # told how many tokens each reply has
    records: list[StepRecord] = field(default_factory=list)
    _waiting: deque[StepRecord] = field(default_factory=deque)
    _progress: dict[int, tuple[int, int]] = field(default_factory=dict)  # sequence -> (prompt, tokens computed)

    def send(self, request: StepRequest) -> None:
        """Send the step and note when, and what it is for."""
        prompt_tokens = sum(_encoded(request) or request.chunk_tokens)
        decoding, needed = self._work(request)
        record = StepRecord(self.clock(), prompt_tokens, needed, decoding=decoding)
        self.records.append(record)
        self._waiting.append(record)
        self.shards.send(request)

    async def receive(self) -> StepReply:
        """Take the reply to the oldest step that waits for one, and note when it came. Raises ShardError."""
        reply = await self.shards.receive()
        record = self._waiting.popleft()
        record.answered_at, record.generated_tokens = self.clock(), len(reply.ids)
        if self.came is not None:
            self.came(len(reply.ids))
        return reply

    async def info(self) -> ModelInfo:
        """What the shards loaded. Raises ShardError."""
        return await self.shards.info()

    async def warmup(self, **wanted: Any) -> KvCache:
        """Size the KV cache. Raises ShardError."""
        return await self.shards.warmup(**wanted)

    async def health(self) -> ShardHealth:
        """How many steps the shards have received and finished. Raises ShardError."""
        return await self.shards.health()

    def check(self) -> None:
        """Raises ShardError when a shard is known to be lost."""
        self.shards.check()

    async def renew(self, error: ShardError) -> KvCache:
        """Wait for other shards. Raises ShardError where nobody starts any."""
        return await self.shards.renew(error)

    async def start_profile(self) -> None:
        """Start the profiler of the first rank. Raises ShardError."""
        await self.shards.start_profile()

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        """Stop the profiler; where the time of its steps went. Raises ShardError."""
        return await self.shards.stop_profile(trace_path)

    async def close(self) -> None:
        """Close the connections to the shards."""
        await self.shards.close()

    def _work(self, request: StepRequest) -> tuple[int, BytesAndFlops | None]:
        """How many sequences decode, and what the step needs at least, from the lengths that its sequences have."""
        for id in request.retire:
            self._progress.pop(id, None)
        for sequence in request.add:
            encoded = len(sequence.encoder_token_ids)  # read by the encoder before the chunks of this step
            self._progress[sequence.id] = (encoded + len(sequence.token_ids), encoded)
        decoding = [id for id, (prompt, done) in self._progress.items() if request.decode and done >= prompt]
        pieces, sampled = [], 0
        for id, count in [*zip(request.chunk_ids, request.chunk_tokens, strict=True), *((id, 1) for id in decoding)]:
            prompt, done = self._progress[id]
            self._progress[id] = (prompt, done + count)
            pieces.append(Piece(done, count))
            sampled += done + count >= prompt
        if self.served is None or not pieces:
            return len(decoding), None
        step = self.served.step(pieces, sampled=sampled)
        lengths = _encoded(request)
        return len(decoding), step.plus(self.served.encode(lengths)) if lengths else step


def _encoded(request: StepRequest) -> list[int]:
    """Lengths of the prompts that an encoder reads in this step."""
    return [len(sequence.encoder_token_ids) for sequence in request.add if sequence.encoder_token_ids]


# ----------------------------------------------------------------------------------------------------------- generation


DRAIN_SECONDS = 30.0  # for the last sequences to be let go of; nothing is left to compute


async def generate(
    timed: TimedShards,
    tokenizer: ModelTokenizer,
    limits: Limits,
    prompts: Sequence[Prompt],
    decoder_start: int | None = None,
    gang: int | None = None,
) -> list[list[int]]:
    """Run all prompts to their ends; the tokens of each. Raises ShardError, or BenchError for a sequence that failed.

    gang: so many enter together, each time when all that entered before have ended; None: each when there is room.
    """
    logging.getLogger("router").addHandler(logging.NullHandler())  # failures are raised here, not logged
    batcher = Batcher(timed, tokenizer, limits, Metrics(limits))
    loop = asyncio.create_task(batcher.run())
    entries: list[Entry] = []
    failures: list[str] = []
    for start in range(0, len(prompts), gang or len(prompts)):
        entering = prompts[start : start + gang] if gang else prompts
        requests = [ValidRequest(prompt.token_ids, prompt.max_new_tokens) for prompt in entering]
        entered = [batcher.submit(request.read_by_encoder(decoder_start)) for request in requests]
        failures += [error for error in await asyncio.gather(*map(_finish, entered)) if error]
        entries += entered
        if failures:
            break
    await batcher.drain(DRAIN_SECONDS)
    await loop
    if batcher.failure is not None:
        raise batcher.failure
    if failures:
        raise BenchError(f"{len(failures)} of {len(prompts)} sequences failed: {failures[0]}")
    return [entry.generated_ids for entry in entries]


async def _finish(entry: Entry) -> str | None:
    """Take an entry's events to the last; why it failed, if it did."""
    while True:
        event = await entry.events.get()
        if isinstance(event, Finished):
            return None
        if isinstance(event, Failed):
            return str(event.error)


# --------------------------------------------------------------------------------------------------------- transformers


@dataclass(frozen=True)
class PeerTimes:
    """One batch of one size, in milliseconds."""

    prefill: float
    decode_token: float  # mean over the decode steps


class TransformersPeer:
    """A model of the transformers library, loaded."""

    def __init__(self, location: str, *, random_weights: bool, dtype: str, device: str, threads: int) -> None:
        """Load the model. location: a folder or a repository; threads: 0 for as many as torch takes."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
        from transformers.utils import logging

        said: Any = logging
        said.disable_progress_bar()  # of its loading, amid our tables
        self._threads = threads
        config = AutoConfig.from_pretrained(location)
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        wanted = {"dtype": getattr(torch, dtype)}
        model = auto.from_config(config, **wanted) if random_weights else auto.from_pretrained(location, **wanted)
        self._model = model.to("cpu" if device == "cpu" else "cuda").eval()

    def run(self, prompts: Sequence[Sequence[int]], decode_length: int) -> PeerTimes:
        """Generate `decode_length` tokens for prompts of one length."""
        import torch
        from transformers import StoppingCriteriaList

        if self._threads:
            torch.set_num_threads(self._threads)
        input_ids = torch.tensor(prompts, device=self._model.device)
        times: list[float] = []

        def note_the_time(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        started = time.perf_counter()
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=decode_length,
            min_new_tokens=decode_length,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note_the_time]),
        )
        return PeerTimes(1000 * (times[0] - started), 1000 * (times[-1] - times[0]) / (decode_length - 1))


def peer_rows(rows: Sequence[dict[str, Any]], batch_size: int, runs: Sequence[PeerTimes]) -> list[dict[str, Any]]:
    """The peer's runs of one batch size beside our rows."""
    ours = {row["step"]: row["p50_ms"] for row in rows if row["batch_size"] == batch_size}
    found = []
    for step in ("prefill", "decode_token"):
        theirs = SampleSummary.of([getattr(run, step) for run in runs]).p50
        found.append(
            {"step": step, "batch_size": batch_size, "ours_ms": ours[step], "theirs_ms": theirs,
             "times_as_fast": theirs / ours[step]}
        )  # fmt: skip
    return found


def peer_table(rows: Sequence[dict[str, Any]], titles: dict[str, str]) -> str:
    """Our p50 beside the peer's for each step and batch size; empty where there was no peer."""
    cells = [
        [titles[r["step"]], r["batch_size"], f"{r['ours_ms']:.2f} ms", f"{r['theirs_ms']:.2f} ms",
         f"{r['times_as_fast']:.2f} x"]
        for step in titles for r in rows if r["step"] == step
    ]  # fmt: skip
    return table(("Step", "Batch Size", "p50", "transformers, p50", "Times as fast"), cells) if cells else ""
