"""One rank's engine: sizes the KV cache and runs steps.

`launch` starts a step and returns without waiting for the device; `Launched.finish` waits and hands over the tokens.
Between the two, the next step may be launched already: its inputs are on the device (see `batch.py`). On a CPU
`launch` is the computation itself. What this module leaves out: loading (`loading.py`), the wire (`service.py`), and
every decision about who runs when (the router's).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from server import cache
from server.batch import Forward, Plan, SequenceState, SequenceTable, StepInput, Work
from server.cache import KVShape
from server.capture import Capture, NotCapturable
from server.distributed import Shard
from server.graphs import DecodeGraphs
from server.pb import generate_pb2 as pb
from server.rehearsal import Rehearsal, Reserve, step_bytes, taken_bytes
from server.sampling import Chosen, Logits, StockLogits, Watermark
from server.upload import upload

log = logging.getLogger(__name__)

# Rows whose logits are looked at together: 128 rows of BLOOM's 250,880 are 128 MB, and sampling takes several times
# that.
LOGIT_ROWS = 128


@dataclass(frozen=True)
class StepResult:
    """What a step produced, on the host."""

    ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    prompt_logprobs: dict[int, list[float]]
    forward_ns: int


class Launched:
    """A step that the device is computing."""

    def __init__(
        self,
        sampled: list[SequenceState],
        chosen: Sequence[Chosen],
        prompt: dict[int, Tensor],
        start_ns: int,
        done: torch.cuda.Event | None,
    ):
        self._sampled = sampled
        self._chosen = [
            [_to_host(t) for t in (part.token_ids, part.logprobs, part.top_ids, part.top_logprobs)] for part in chosen
        ]
        self._prompt = {id: _to_host(logprobs) for id, logprobs in prompt.items()}
        self._start_ns = start_ns
        self._done = done
        if done is not None:
            done.record()

    @property
    def is_done(self) -> bool:
        """Whether `finish` waits for nothing."""
        return self._done is None or self._done.query()

    def finish(self) -> StepResult:
        """Wait for the device and read the tokens."""
        if self._done is not None:
            self._done.synchronize()
        token_ids, logprobs, top_ids, top_logprobs = (
            [row for part in self._chosen for row in part[kind].tolist()] for kind in range(4)
        )
        wanted = [s.choice.top_n_tokens for s in self._sampled]
        return StepResult(
            ids=[s.id for s in self._sampled],
            token_ids=token_ids,
            logprobs=logprobs,
            top_ids=[ids[:n] for ids, n in zip(top_ids, wanted, strict=True)],
            top_logprobs=[values[:n] for values, n in zip(top_logprobs, wanted, strict=True)],
            prompt_logprobs={id: logprobs.tolist() for id, logprobs in self._prompt.items()},
            forward_ns=time.perf_counter_ns() - self._start_ns,
        )


class Model(Protocol):
    """What an engine runs: a `Transformer`, or a model of another library (`fallback.py`)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Longest sequence; 0: no limit of its own."""

    @property
    def decoder_start(self) -> int | None:
        """The token that an encoder-decoder's generations start from; None for a decoder."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether a token's keys and values depend on nothing but the tokens up to it."""

    @property
    def nbytes(self) -> int:
        """Memory of this rank's weights."""

    def kv_shape(self, dtype: torch.dtype) -> KVShape: ...

    def run(self, forward: Forward, kv_caches: Sequence[Tensor]) -> Tensor:
        """The final hidden states [T, D] of a step's tokens; their keys and values are kept."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, V] float32, the caller's to change."""


class Engine:
    """The model on one rank, and the sequences that it is generating."""

    def __init__(
        self,
        model: Model,
        shard: Shard,
        device: torch.device,
        dtype: torch.dtype,
        watermark: Watermark,
        logits: Logits | None = None,
        capture: Callable[[], Capture] | None = None,
    ):
        self.model = model
        self.shard = shard
        self.device = device
        self.dtype = dtype
        self.kv_shape = model.kv_shape(dtype)
        self._has_encoder = model.decoder_start is not None
        self._watermark = watermark
        self._logits = logits or StockLogits()
        self._kv_caches: list[Tensor] = []
        self._table: SequenceTable | None = None
        self._capture = capture
        self.reserve = Reserve()
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def warm_up(
        self, *, prefill_tokens: int, total_tokens: int, wanted_tokens: int, useful_tokens: int, fraction: float
    ) -> int:
        """Run the largest prompt step once, then allocate the KV cache; returns its size in tokens.

        prefill_tokens: prompt tokens of the largest step; total_tokens: longest sequence; wanted_tokens: what the user
        asked for, 0 for as much as fits, at most useful_tokens; fraction: share of a GPU's memory that we may use.
        """
        self.reserve = self._rehearse(prefill_tokens, total_tokens)
        self._kv_caches, self._graphs = [], None  # what is rehearsed with is free again
        free = cache.free_bytes(self.device, fraction=fraction, world_size=self.shard.world_size)
        free = self.shard.minimum(free - self.reserve.step_bytes - self.reserve.graph_bytes, self.device)
        tokens = cache.choose_tokens(
            wanted=wanted_tokens,
            useful=useful_tokens,
            free_bytes=free,
            bytes_per_token=self.kv_shape.bytes_per_token,
        )
        self._allocate(tokens, total_tokens)
        graph_bytes = taken_bytes(self._capture_all, self.device)
        self.reserve = replace(self.reserve, graph_bytes=graph_bytes)
        return tokens

    def _rehearse(self, prefill_tokens: int, total_tokens: int) -> Reserve:
        """Compute the largest step, and capture the largest decodes, over a cache of just the size that it takes.

        On a CPU a short prompt is enough: it makes the libraries allocate and plan, and what a long one needs besides
        lies within the headroom that is kept back there.
        """
        is_cpu = self.device.type == "cpu"
        rehearsal = Rehearsal.of(
            prefill_tokens=min(prefill_tokens, 4 * cache.BLOCK_SIZE) if is_cpu else prefill_tokens,
            total_tokens=total_tokens,
            sampled=1 if is_cpu else LOGIT_ROWS,
            has_encoder=self._has_encoder,
        )
        self._allocate(rehearsal.kv_tokens, total_tokens)

        def step() -> None:
            launched = self.launch(rehearsal.request())
            assert launched is not None
            launched.finish()

        return Reserve(step_bytes(step, self.device), self._rehearse_graphs())

    def _rehearse_graphs(self) -> int:
        """What all captured steps will take: the largest, whose memory the others share, and what each has alone.

        Each size in both its forms; the one that is captured when somebody samples keeps logits of its own.
        """
        sizes = [] if self._graphs is None else self._graphs.sizes()
        if self.device.type == "cpu" or len(sizes) < 2:
            return 0
        first, second = (taken_bytes(partial(self._capture_all, [size]), self.device) for size in sizes[:2])
        logits = sum(sizes) * self.model.vocab_size * torch.float32.itemsize
        return first + (2 * len(sizes) - 1) * second + logits

    def _capture_all(self, sizes: Sequence[int] | None = None) -> None:
        """Capture decodes of these batch sizes, by default of all that are known beforehand."""
        assert self._table is not None
        try:
            if self._graphs is not None:
                self._graphs.prepare(self._graphs.sizes() if sizes is None else sizes, self._table.tables)
        except NotCapturable as reason:
            self._give_up_graphs(reason)

    def _give_up_graphs(self, reason: NotCapturable) -> None:
        log.info("decode steps are not captured: %s", reason)
        self._graphs = None

    @property
    def num_blocks(self) -> int:
        """KV blocks allocated so far."""
        return self._table.num_blocks if self._table is not None else 0

    @property
    def captured(self) -> str:
        """Which decode steps are captured, for the start-up table."""
        if self._graphs is None:
            return "none"
        sizes = self._graphs.sizes()
        return f"{len(sizes)} batch sizes up to {sizes[0]}" if sizes else "each at its first use"

    def _allocate(self, tokens: int, total_tokens: int) -> None:
        # An encoder-decoder's sequence has two runs of blocks: one block more, so that the longest one fits.
        blocks = cache.num_blocks(tokens) + self._has_encoder
        self._kv_caches = cache.allocate(self.kv_shape, blocks, self.device)
        self._table = SequenceTable(
            self.model.vocab_size,
            blocks,
            self._watermark,
            self.device,
            self._has_encoder,
            self._logits,
            longest=cache.num_blocks(total_tokens),
        )
        if self._capture is not None:
            self._graphs = DecodeGraphs(self._capture(), self._decode, has_encoder=self._has_encoder)

    @torch.inference_mode()
    def launch(self, request: pb.StepRequest) -> Launched | None:
        """Start one step; None when it computes nothing. Sequences of a step that fails are dropped."""
        assert self._table is not None, "the router warms up before it steps"
        start_ns = time.perf_counter_ns()
        try:
            plan = self._table.apply(request)
            return None if plan is None else self._run(plan, self._table, start_ns)
        except BaseException:
            self._table.drop(request)
            raise

    def hidden(self, step: StepInput) -> Tensor:
        """The final hidden states [T, D] of a step's tokens."""
        return self.model.run(step.forward, self._kv_caches)

    def _run(self, plan: Plan, table: SequenceTable, start_ns: int) -> Launched:
        if not plan.chunks and self._graphs is not None and self._graphs.takes(len(plan.decodes)):
            try:
                return self._run_captured(plan.decodes, table, self._graphs, start_ns)
            except NotCapturable as reason:
                self._give_up_graphs(reason)
        step = table.lay_out(plan)
        hidden = self.hidden(step)
        prompt = {w.sequence.id: self._prompt_logprobs(hidden, step, i) for i, w in _prompt_work(step)}
        at = step.sample_at
        chosen = self._choose(
            table,
            step.sampled,
            lambda rows: self.model.logits(hidden[at[rows]]),
            positions=step.forward.meta.positions[at] + 1,
            previous=step.forward.token_ids[at],
        )
        if chosen:
            table.tables.last_tokens[step.sample_rows] = torch.cat([part.token_ids for part in chosen])
        return self._launched(step.sampled, chosen, prompt, start_ns)

    def _run_captured(self, work: list[Work], table: SequenceTable, graphs: DecodeGraphs, start_ns: int) -> Launched:
        sequences = [w.sequence for w in work]
        if all(s.choice.is_plain for s in sequences):
            token_ids, logprobs, _ = graphs.run(work, table.tables, chooses=True)
            none = token_ids.new_empty(len(work), 0)
            return self._launched(sequences, [Chosen(token_ids, logprobs, none, none)], {}, start_ns)
        logits, positions, previous, rows = graphs.run(work, table.tables, chooses=False)
        chosen = self._choose(table, sequences, logits.__getitem__, positions=positions, previous=previous)
        table.tables.last_tokens[rows] = torch.cat([part.token_ids for part in chosen])
        return self._launched(sequences, chosen, {}, start_ns)

    def _decode(self, forward: Forward, chooses: bool) -> tuple[Tensor, ...]:
        """What is captured of a decode step, in which every sequence has one token and gets the next."""
        logits = self.model.logits(self.model.run(forward, self._kv_caches))
        if not chooses:
            return logits, forward.meta.positions + 1, forward.token_ids
        # What a sampler does for plain tokens, and nothing else: a recording repeats every operator.
        best = self._logits.summarise(logits, 1)
        return best.top_ids.squeeze(1), (best.top_logits - best.log_totals).squeeze(1)

    def _choose(
        self,
        table: SequenceTable,
        sequences: list[SequenceState],
        logits: Callable[[slice], Tensor],
        *,
        positions: Tensor,
        previous: Tensor,
    ) -> list[Chosen]:
        """A token for each of `sequences`, a few rows at a time, so that no batch takes more memory than they do."""
        chosen = []
        for first in range(0, len(sequences), LOGIT_ROWS):
            rows = slice(first, first + LOGIT_ROWS)
            histories = [s.history for s in sequences[rows]]
            sampler = table.sampler_for(sequences[rows], part=first)
            chosen.append(sampler(logits(rows), positions[rows], previous[rows], histories))
            for i, history in enumerate(histories):
                if history is not None:
                    history.append(chosen[-1].token_ids[i : i + 1])
        return chosen

    def _launched(
        self, sampled: list[SequenceState], chosen: list[Chosen], prompt: dict[int, Tensor], start_ns: int
    ) -> Launched:
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        return Launched(sampled, chosen, prompt, start_ns, done)

    def _prompt_logprobs(self, hidden: Tensor, step: StepInput, index: int) -> Tensor:
        """Log-probabilities of the prompt tokens that follow those of one chunk."""
        work, start = step.forward.work[index], step.forward.meta.query_starts[index]
        targets = work.sequence.prompt[work.start + 1 : work.start + work.count + 1]
        rows = hidden[start : start + len(targets)]
        ids = upload(targets, self.device).unsqueeze(1)
        parts = [
            self.model.logits(r).log_softmax(dim=-1).gather(1, i)
            for r, i in zip(rows.split(LOGIT_ROWS), ids.split(LOGIT_ROWS), strict=True)
        ]
        return torch.cat(parts).squeeze(1)


def _prompt_work(step: StepInput) -> Sequence[tuple[int, Work]]:
    """Chunks whose sequence asked for prompt log-probabilities, with their index in the step."""
    return [
        (i, w)
        for i, w in enumerate(step.forward.work)
        if w.sequence.prompt_logprobs and w.start < len(w.sequence.prompt)
    ]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that the device makes when it gets there."""
    if not tensor.is_cuda:
        return tensor.clone()  # the next step may write its results to the same place
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
