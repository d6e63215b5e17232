"""One rank's engine: launches steps and finishes them.

`launch` starts a step and returns without waiting for the device; `Launched.finish` waits and hands over the tokens.
Between the two, the next step may be launched already: its inputs are on the device (see `batch.py`). On a CPU
`launch` is the computation itself. What this module leaves out: how large the KV cache is (`warmup.py`), loading
(`loading.py`), the wire (`service.py`), and every decision about who runs when (the router's).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from server.backends.protocol import Backend, Device
from server.blocks import num_blocks
from server.distributed import Shard
from server.pb import generate_pb2 as pb
from server.stepping import cache
from server.stepping.batch import FIRST_SEQUENCES, Forward, SequenceState, SequenceTable, StepInput, StepRuns, TokenRun
from server.stepping.cache import KVShape
from server.stepping.decode_graphs import DecodeGraphs
from server.stepping.sampling import Chosen, Watermark
from server.stepping.vocabulary import Vocabulary

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
        device: Device,
    ):
        self._sampled = sampled
        self._chosen = [
            [device.download(t) for t in (part.token_ids, part.logprobs, part.top_ids, part.top_logprobs)]
            for part in chosen
        ]
        self._prompt = {id: device.download(logprobs) for id, logprobs in prompt.items()}
        self._start_ns = start_ns
        self._done = device.event()

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
            top_ids=[ids[: counted(values, n)] for ids, values, n in zip(top_ids, top_logprobs, wanted, strict=True)],
            top_logprobs=[values[: counted(values, n)] for values, n in zip(top_logprobs, wanted, strict=True)],
            prompt_logprobs={id: logprobs.tolist() for id, logprobs in self._prompt.items()},
            forward_ns=time.perf_counter_ns() - self._start_ns,
        )


def counted(logprobs: Sequence[float], wanted: int) -> int:
    """How many candidates, most likely first, are reported: those wanted, but for tokens that a warper removed."""
    return sum(logprob > float("-inf") for logprob in logprobs[:wanted])


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

    @property
    def vocab_range(self) -> tuple[int, int]:
        """The first token whose logits this rank computes, and how many it computes, with padding."""

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """What one token takes in this rank's cache."""

    def run(self, forward: Forward, kv_caches: Sequence[Tensor]) -> Tensor:
        """The final hidden states [T, D] of a step's tokens; their keys and values are kept."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → this rank's logits [R, Vl], float32 or the model's dtype, the caller's to change."""


class Engine:
    """The model on one rank, and the sequences that it is generating.

    why_not_captured: why decode steps are not captured in graphs; None: they are. graph_sizes: batch sizes to capture
    beforehand; None for the backend's choice.
    """

    def __init__(
        self,
        model: Model,
        shard: Shard,
        backend: Backend,
        dtype: torch.dtype,
        watermark: Watermark,
        why_not_captured: str | None = None,
        graph_sizes: Sequence[int] | None = None,
    ):
        self.model = model
        self.shard = shard
        self.backend = backend
        self.device = backend.device
        self.kv_shape = model.kv_shape(dtype)
        self.has_encoder = model.decoder_start is not None
        self._vocabulary = Vocabulary(backend.logits, shard, model.vocab_size, *model.vocab_range)
        self._watermark = watermark
        self._kv_caches: list[Tensor] = []
        self._table: SequenceTable | None = None
        self.why_not_captured = why_not_captured
        self._wanted_sizes = graph_sizes
        self._graphs: DecodeGraphs | None = None

    def allocate(self, tokens: int, total_tokens: int) -> None:
        """Make a KV cache of so many tokens, for sequences of at most `total_tokens`. What was there before goes."""
        self.release()
        # An encoder-decoder's sequence has two runs of blocks: one block more, so that the longest one fits.
        blocks = num_blocks(tokens) + self.has_encoder
        self._kv_caches = cache.allocate(self.kv_shape, blocks, self.device)
        self._table = SequenceTable(
            blocks,
            self._watermark,
            self.device,
            self._vocabulary,
            self.has_encoder,
            longest=num_blocks(total_tokens),
            most=max([FIRST_SEQUENCES, *(self._wanted_sizes or ())]),
        )
        if self.why_not_captured is None:
            capture = self.backend.graph_capture(self._wanted_sizes)
            self._graphs = DecodeGraphs(capture, self._decode, self.device, has_encoder=self.has_encoder)

    def release(self) -> None:
        """Give back the KV cache, and the graphs that read it."""
        self._kv_caches, self._graphs = [], None

    @property
    def num_blocks(self) -> int:
        """KV blocks allocated so far."""
        return self._table.num_blocks if self._table is not None else 0

    @property
    def graph_sizes(self) -> list[int]:
        """The batch sizes that are captured beforehand, largest first."""
        return [] if self._graphs is None else self._graphs.sizes()

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture decodes of these batch sizes."""
        assert self._table is not None and self._graphs is not None
        self._graphs.prepare(sizes, self._table.tables)

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

    def _run(self, plan: StepRuns, table: SequenceTable, start_ns: int) -> Launched:
        if not plan.chunks and self._graphs is not None and self._graphs.takes(len(plan.decodes)):
            return self._run_graph(plan.decodes, table, self._graphs, start_ns)
        step = table.lay_out(plan)
        hidden = self.hidden(step)
        prompt = {r.sequence.id: self._prompt_logprobs(hidden, step, i) for i, r in _reported_prompts(step)}
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

    def _run_graph(self, runs: list[TokenRun], table: SequenceTable, graphs: DecodeGraphs, start_ns: int) -> Launched:
        sequences = [r.sequence for r in runs]
        if all(s.choice.is_plain for s in sequences):
            token_ids, logprobs, _ = graphs.run(runs, table.tables, chooses=True)
            none = token_ids.new_empty(len(runs), 0)
            return self._launched(sequences, [Chosen(token_ids, logprobs, none, none)], {}, start_ns)
        logits, positions, previous, rows = graphs.run(runs, table.tables, chooses=False)
        chosen = self._choose(table, sequences, logits.__getitem__, positions=positions, previous=previous)
        table.tables.last_tokens[rows] = torch.cat([part.token_ids for part in chosen])
        return self._launched(sequences, chosen, {}, start_ns)

    def _decode(self, forward: Forward, chooses: bool) -> tuple[Tensor, ...]:
        """What is captured of a decode step, in which every sequence has one token and gets the next."""
        logits = self.model.logits(self.model.run(forward, self._kv_caches))
        if not chooses:
            return logits, forward.meta.positions + 1, forward.token_ids
        # What a sampler does for plain tokens, and nothing else: a graph repeats every operator.
        best = self._vocabulary.summarise(logits, 1)
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
        return chosen

    def _launched(
        self, sampled: list[SequenceState], chosen: list[Chosen], prompt: dict[int, Tensor], start_ns: int
    ) -> Launched:
        return Launched(sampled, chosen, prompt, start_ns, self.device)

    def _prompt_logprobs(self, hidden: Tensor, step: StepInput, index: int) -> Tensor:
        """Log-probabilities of the prompt tokens that follow those of one chunk."""
        run, start = step.forward.runs[index], step.forward.meta.query_starts[index]
        targets = run.sequence.prompt[run.start + 1 : run.start + run.count + 1]
        rows = hidden[start : start + len(targets)]
        parts = [
            self._vocabulary.logprobs(self.model.logits(r), ids)
            for r, ids in zip(rows.split(LOGIT_ROWS), self.device.upload(targets).split(LOGIT_ROWS), strict=True)
        ]
        return torch.cat(parts)


def _reported_prompts(step: StepInput) -> Sequence[tuple[int, TokenRun]]:
    """Runs of prompts whose log-probabilities are asked for, with their index in the step."""
    return [
        (i, run)
        for i, run in enumerate(step.forward.runs)
        if run.sequence.prompt_logprobs and run.start < len(run.sequence.prompt)
    ]
