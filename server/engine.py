"""One rank's engine: sizes the KV cache and runs steps.

`launch` starts a step and returns without waiting for the device; `Launched.finish` waits and hands over the tokens.
Between the two, the next step may be launched already: its inputs are on the device (see `batch.py`). On a CPU
`launch` is the computation itself. What this module leaves out: loading (`loading.py`), the wire (`service.py`), and
every decision about who runs when (the router's).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from server.sampling import Chosen, Logits, Sampler, StockLogits, TokenChoice, Watermark

log = logging.getLogger(__name__)

# Rows whose logits are computed at once for prompt log-probabilities: 128 rows of BLOOM's 250,880 are 128 MB.
PROMPT_LOGPROB_ROWS = 128


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

    def __init__(self, sampled: list[SequenceState], chosen: Chosen, prompt: dict[int, Tensor], start_ns: int):
        self._sampled = sampled
        self._chosen = [_to_host(t) for t in (chosen.token_ids, chosen.logprobs, chosen.top_ids, chosen.top_logprobs)]
        self._prompt = {id: _to_host(logprobs) for id, logprobs in prompt.items()}
        self._start_ns = start_ns
        self._done = torch.cuda.Event() if chosen.token_ids.is_cuda else None
        if self._done is not None:
            self._done.record()

    def finish(self) -> StepResult:
        """Wait for the device and read the tokens."""
        if self._done is not None:
            self._done.synchronize()
        token_ids, logprobs, top_ids, top_logprobs = (t.tolist() for t in self._chosen)
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
        capture: Capture | None = None,
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
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def warm_up(
        self, *, prefill_tokens: int, total_tokens: int, wanted_tokens: int, useful_tokens: int, fraction: float
    ) -> int:
        """Run the largest prompt step once, then allocate the KV cache; returns its size in tokens.

        prefill_tokens: prompt tokens of the largest step; total_tokens: longest sequence; wanted_tokens: what the user
        asked for, 0 for as much as fits, at most useful_tokens; fraction: share of a GPU's memory that we may use.
        """
        self._rehearse(prefill_tokens, total_tokens)
        free = cache.free_bytes(self.device, fraction=fraction, world_size=self.shard.world_size)
        free = self.shard.minimum(free, self.device)
        tokens = cache.choose_tokens(
            wanted=wanted_tokens,
            useful=useful_tokens,
            free_bytes=free,
            bytes_per_token=self.kv_shape.bytes_per_token,
        )
        self._allocate(tokens)
        return tokens

    def _rehearse(self, prefill_tokens: int, total_tokens: int) -> None:
        """Compute prompts of the largest step's size, so that the memory they need is known to be taken.

        On a CPU a short prompt is enough: it makes the libraries allocate and plan, and what a long one needs besides
        lies within the headroom that is kept back there.
        """
        if self.device.type == "cpu":
            prefill_tokens = min(prefill_tokens, 4 * cache.BLOCK_SIZE)
        lengths = [total_tokens] * (prefill_tokens // total_tokens) + [prefill_tokens % total_tokens]
        prompts = [[0] * length for length in lengths if length]
        self._allocate(sum(cache.num_blocks(len(p)) + self._has_encoder for p in prompts) * cache.BLOCK_SIZE)
        request, blocks = pb.StepRequest(), itertools.count()
        for id, prompt in enumerate(prompts):
            decoded, encoded = ([0], prompt) if self._has_encoder else (prompt, [])
            request.add.add(
                id=id,
                token_ids=decoded,
                blocks=itertools.islice(blocks, cache.num_blocks(len(decoded))),
                encoder_token_ids=encoded,
                encoder_blocks=itertools.islice(blocks, cache.num_blocks(len(encoded))),
                sampling=_WORST_SAMPLING,
                top_n_tokens=5,
            )
            request.chunk_ids.append(id)
            request.chunk_tokens.append(len(decoded))
        launched = self.launch(request)
        assert launched is not None
        launched.finish()

    @property
    def num_blocks(self) -> int:
        """KV blocks allocated so far."""
        return self._table.num_blocks if self._table is not None else 0

    def _allocate(self, tokens: int) -> None:
        self._kv_caches = []  # the old cache is free before the new one is taken
        # An encoder-decoder's sequence has two runs of blocks: one block more, so that the longest one fits.
        blocks = cache.num_blocks(tokens) + self._has_encoder
        self._kv_caches = cache.allocate(self.kv_shape, blocks, self.device)
        self._table = SequenceTable(
            self.model.vocab_size, blocks, self._watermark, self.device, self._has_encoder, self._logits
        )
        if self._capture is not None:
            self._graphs = DecodeGraphs(self._capture, self._decode, has_encoder=self._has_encoder)

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
                log.info("decode steps are not captured: %s", reason)
                self._graphs = None
        step = table.lay_out(plan)
        hidden = self.hidden(step)
        prompt = {w.sequence.id: self._prompt_logprobs(hidden, step, i) for i, w in _prompt_work(step)}
        at = step.sample_at
        chosen = self._choose(
            step.sampler,
            step.sampled,
            self.model.logits(hidden[at]),
            positions=step.forward.meta.positions[at] + 1,
            previous=step.forward.token_ids[at],
        )
        table.tables.last_tokens[step.sample_rows] = chosen.token_ids
        return Launched(step.sampled, chosen, prompt, start_ns)

    def _run_captured(self, work: list[Work], table: SequenceTable, graphs: DecodeGraphs, start_ns: int) -> Launched:
        sequences = [w.sequence for w in work]
        if all(s.choice.is_plain for s in sequences):
            token_ids, logprobs, _ = graphs.run(work, table.tables, chooses=True)
            none = token_ids.new_empty(len(work), 0)
            return Launched(sequences, Chosen(token_ids, logprobs, none, none.float()), {}, start_ns)
        logits, positions, previous, rows = graphs.run(work, table.tables, chooses=False)
        sampler = table.sampler_for(sequences)
        chosen = self._choose(sampler, sequences, logits, positions=positions, previous=previous)
        table.tables.last_tokens[rows] = chosen.token_ids
        return Launched(sequences, chosen, {}, start_ns)

    def _decode(self, forward: Forward, chooses: bool) -> tuple[Tensor, ...]:
        """What is captured of a decode step, in which every sequence has one token and gets the next."""
        logits = self.model.logits(self.model.run(forward, self._kv_caches))
        positions, previous = forward.meta.positions + 1, forward.token_ids
        if not chooses:
            return logits, positions, previous
        plain = Sampler([TokenChoice()] * len(previous), self._watermark, self.device, self._logits)
        chosen = plain(logits, positions, previous, histories=[None] * len(previous))
        return chosen.token_ids, chosen.logprobs

    def _choose(
        self, sampler: Sampler, sequences: list[SequenceState], logits: Tensor, *, positions: Tensor, previous: Tensor
    ) -> Chosen:
        chosen = sampler(logits, positions, previous, [s.history for s in sequences])
        for i, sequence in enumerate(sequences):
            if sequence.history is not None:
                sequence.history.append(chosen.token_ids[i : i + 1])
        return chosen

    def _prompt_logprobs(self, hidden: Tensor, step: StepInput, index: int) -> Tensor:
        """Log-probabilities of the prompt tokens that follow those of one chunk."""
        work, start = step.forward.work[index], step.forward.meta.query_starts[index]
        targets = work.sequence.prompt[work.start + 1 : work.start + work.count + 1]
        rows = hidden[start : start + len(targets)]
        ids = torch.tensor(targets, dtype=torch.int64, device=self.device).unsqueeze(1)
        parts = [
            self.model.logits(r).log_softmax(dim=-1).gather(1, i)
            for r, i in zip(rows.split(PROMPT_LOGPROB_ROWS), ids.split(PROMPT_LOGPROB_ROWS), strict=True)
        ]
        return torch.cat(parts).squeeze(1)


_WORST_SAMPLING = pb.SamplingParameters(
    do_sample=True,
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    watermark=True,
)


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
