"""One rank's engine: launches steps and finishes them.

`launch` starts a step and returns without waiting for the device; `Launched.finish` waits and hands over the tokens,
which until then are where the device writes them. Between the two, the next step may be launched already: its inputs
are on the device (see `batch.py`). On a CPU `launch` is the computation itself.

Left out: how large the KV cache is (`warmup.py`), loading (`server/loading.py`), the wire (`server/service.py`), and
every decision about what runs when (the router's).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from server.adapters.adapters import Adapters
from server.backends.device import Device, Event
from server.backends.protocol import Backend, GraphCapture, TokenAdapters
from server.blocks import num_blocks
from server.offload.cost import Times
from server.pb import generate_pb2 as pb
from server.ranks.collectives import Shard
from server.stepping.batch import Carried, Forward, Spans, StepInput, Tables
from server.stepping.cache import (
    HostSlots,
    Kept,
    KvAndState,
    KvPlacement,
    KVShape,
    Session,
    allocate_rings,
    beside_states,
)
from server.stepping.checkpoints import Checkpoints, RingCopies
from server.stepping.decoding import Decoding
from server.stepping.graphs import EXACT_BYTES, AgreedCapture, DecodeGraphs, Form, MixedGraphs
from server.stepping.next_tokens import KnownLogprobs, Reported, TokenChooser, counted, reported_tokens
from server.stepping.pipeline import Neighbours, NoNeighbours
from server.stepping.proposals import Came, Proposal, Proposer, Surroundings
from server.stepping.sampling import Chosen, Watermark
from server.stepping.sequences import NOTHING, SequenceState, SequenceTable, StepError, StepRuns, TokenRun
from server.stepping.vocabulary import Vocabulary

# Sequences that there is always room for, and as many are expected where it is not known how many there can be.
LEAST_SEQUENCES = 256


class Engine:
    """The model on one rank, and the sequences that it is generating.

    why_not_captured: why decode steps are not captured in graphs; None: they are. graph_sizes: batch sizes to capture
    beforehand; None for the backend's choice. moved_bytes: of weights, from and to a disk, so far. neighbours: of a
    pipeline stage; None: the model is whole.
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
        moved_bytes: Callable[[], int] = lambda: 0,
        neighbours: Neighbours | None = None,
        proposer: Proposer | None = None,
        adapters: Adapters | None = None,
    ):
        self.model = model
        self.adapters = adapters
        self.proposer = proposer
        self.neighbours = neighbours or NoNeighbours()
        self._moved_bytes = moved_bytes
        self.shard = shard
        self.backend = backend
        self.device = backend.device
        self.kv_shape = replace(model.kv_shape(dtype), beside=None if proposer is None else proposer.kv_shape)
        self.kv_placement = model.kv_placement
        self.has_encoder = model.decoder_start is not None
        self._vocabulary = Vocabulary(backend.logits, shard, model.vocab_size, *model.vocab_range)
        self._watermark = watermark
        self._choose = TokenChooser(watermark, backend.device, self._vocabulary)
        self._unread: deque[Launched] = deque()  # steps whose tokens the proposer has not been told yet
        self._caches: list[Kept] = []  # of each layer: KV blocks, the states of all sequences, or both
        self._kv_caches: list[Tensor] = []  # those of them that are KV blocks
        self._sequences: SequenceTable | None = None
        self._tables: Tables | None = None
        self._why_not_captured = why_not_captured
        self._wanted_sizes = graph_sizes
        self._graphs: Graphs | None = None
        self._agreed: AgreedCapture | None = None
        self.slots: HostSlots | None = None  # the host's tier of the prefix cache
        self._checkpoints: Checkpoints | None = None  # what keeps states in blocks, where layers have states
        self._ring_copies: RingCopies | None = None  # what keeps parts of rings in blocks, where layers have rings
        self.times: Times | None = None  # what streaming has cost, where weights stream

    def allocate(self, tokens: int, total_tokens: int, sequences: int = 0) -> None:
        """Make a KV cache of so many tokens, for sequences of at most `total_tokens`. What was there before goes.

        sequences: most that are expected at once, 0 for LEAST_SEQUENCES; larger batches are not captured, and where
        layers have states, there is no room for more.
        """
        self.release()
        # An encoder-decoder's sequence has two runs of blocks: one block more, so that the longest one fits.
        blocks = num_blocks(tokens) + self.has_encoder
        longest = num_blocks(total_tokens)
        self._kv_caches = self.kv_placement.allocate(self.kv_shape, blocks, longest, self.backend)
        self._sequences = SequenceTable(
            blocks,
            self.device,
            self._vocabulary,
            self.has_encoder,
            longest=longest,
            most=max(sequences, 0 if self.kv_shape.bytes_per_sequence and sequences else LEAST_SEQUENCES),
            most_at_once=NOTHING if (ring := self.kv_shape.ring) is None else ring.most_at_once,
            has_states=self.model.has_states,
            num_adapters=0 if self.adapters is None else self.adapters.num_rows,
        )
        rows, shape = self._sequences.num_rows, self.kv_shape
        rings = allocate_rings(shape, rows - 1, self.device)
        own, beside = self._divided(self._kv_caches)
        self._caches = beside_states(shape, own, rings, rows + self._sequences.num_spares, self.device)
        if shape.ring is not None:
            self._ring_copies = RingCopies(self._parts_of(rings, shape.ringed), self._block_parts())
        elif shape.bytes_per_sequence and not self.kv_placement.offloaded:
            kept = zip(self._caches, shape.states, strict=True)
            states = [cache.state if isinstance(cache, KvAndState) else cache for cache, size in kept if size]
            self._checkpoints = Checkpoints(states, self._block_parts())
        tables = Tables.empty(rows, self._sequences.longest, self.device.torch_device, shape.ring)
        self._tables = tables
        capture = self._capture() if self.why_not_captured is None else None
        if capture is not None:
            self._graphs = self._make_graphs(capture, tables, most=sequences or LEAST_SEQUENCES)
        if self.proposer is not None:
            chooser, most = TokenChooser(self._watermark, self.device, self._vocabulary), sequences or LEAST_SEQUENCES
            is_exact = self._captures_exactly(capture)
            self.proposer.open(
                Surroundings(tables, beside, self.device, chooser, self._vocabulary, capture, most, is_exact)
            )
            if self._graphs is not None:
                self._graphs = replace(self._graphs, beside=self.proposer.captures())

    def _divided(self, kv_caches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The model's own, and those of the speculative model."""
        count = len(kv_caches) - (0 if self.kv_shape.beside is None else self.kv_shape.beside.num_layers)
        return kv_caches[:count], kv_caches[count:]

    def _capture(self) -> GraphCapture:
        capture = self.backend.graph_capture(self._wanted_sizes)
        if not capture.computes:
            capture = self._agreed = AgreedCapture(capture, self.shard, self.device.torch_device)
        return capture

    def _captures_exactly(self, capture: GraphCapture | None) -> bool:
        """Whether steps with few prompt tokens or with drafts are captured as they come."""
        return capture is not None and capture.computes and self.model.nbytes <= EXACT_BYTES

    def _make_graphs(self, capture: GraphCapture, tables: Tables, most: int) -> Graphs:
        """For batches of at most `most` sequences."""
        stage, width, dtype = self.neighbours.stage, self.neighbours.width, self.neighbours.dtype
        carried = None if stage.is_first else torch.empty(0, width, dtype=dtype, device=self.device.torch_device)
        decode = Decoding(self._hidden, self.model.logits, self._vocabulary, gives_hidden=self._reads_features)
        decodes = DecodeGraphs(
            *(capture, decode, self.device, tables),
            most=most,
            has_encoder=self.has_encoder,
            carried=carried,
            is_last=stage.is_last,
            has_adapters=self.adapters is not None,
        )
        # A recurrence in stock operators asks the host where prompts end.
        is_plain = not self.has_encoder and stage.count == 1 and not any(self.kv_shape.states)
        return Graphs(
            decodes,
            None
            if not is_plain
            else MixedGraphs(
                *(capture, self._hidden, self.device, tables),
                most=most,
                is_exact=self._captures_exactly(capture),
                gives_hidden=self._reads_features,
            ),
        )

    def release(self) -> None:
        """Give back the KV cache, and the graphs that read it."""
        if self.slots is not None:
            self.slots.close()
        has_cycles = bool(self.failed_captures)  # what is computed without a graph refers to those that have one
        if self.proposer is not None:
            self.proposer.close()
        self._unread.clear()
        self._caches, self._kv_caches, self._checkpoints, self._ring_copies = [], [], None, None
        self._graphs, self._agreed, self._tables, self.slots = None, None, None, None
        self.kv_placement.release()
        if has_cycles:
            gc.collect()

    def open_slots(self, count: int, session: Session) -> HostSlots:
        """Have a tier of so many blocks on the host behind the KV cache; a later call finds the first one's."""
        if self.slots is None:
            copies = self.device.host_copies(self._block_parts(), count)
            self.slots = HostSlots(copies, self.num_blocks, session)
        if (end := self.device.event()) is not None:
            end.synchronize()  # what a router before has told the device to copy is done
        return self.slots

    def _block_parts(self) -> list[Tensor]:
        """Views of the KV cache [B, n], row b of each being of block b."""
        if self.kv_shape.holds_states_alone:
            return self._kv_caches
        return self._parts_of(self._kv_caches, self.kv_shape.paged)

    def _parts_of(self, caches: Sequence[Tensor], shapes: Sequence[KVShape]) -> list[Tensor]:
        layers = zip(caches, shapes, strict=True)
        parts = [self.backend.block_parts(kv, layer.format, layer.head_dim) for kv, layer in layers]
        return [part for of_layer in parts for part in of_layer]

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks that hold the states of one sequence, or one block of tokens from its rings.

        0: they cannot be kept there, or there are none.
        """
        kept = self._checkpoints or self._ring_copies
        return 0 if kept is None else kept.num_blocks

    @property
    def num_blocks(self) -> int:
        """KV blocks allocated so far."""
        return self._sequences.num_blocks if self._sequences is not None else 0

    @property
    def why_not_captured(self) -> str | None:
        """Why decode steps are not captured in graphs; None: they are."""
        return self._why_not_captured or ("KV blocks stream" if self.kv_placement.offloaded else None)

    @property
    def graphs(self) -> Graphs | None:
        """The captured steps; None where none can be."""
        return self._graphs

    @property
    def pads_chunks(self) -> bool:
        """Whether steps with prompts are captured too, so that a chunk costs what the next larger captured one does."""
        return self._graphs is not None and self._graphs.mixed is not None and self._graphs.mixed.has_sizes

    def activity(self) -> int:
        """What grows while a step waits for something that goes on: bytes from and to a disk, and compiled kernels."""
        return self._moved_bytes() + self.kv_placement.moved_bytes + self.backend.num_compilations()

    @property
    def failed_captures(self) -> list[str]:
        """Why steps were not captured that should have been, one reason for each."""
        return [] if self._agreed is None else self._agreed.failures

    @torch.inference_mode()
    def launch(self, request: pb.StepRequest) -> Launched | None:
        """Start one step; None when it computes nothing. Sequences of a step that fails are dropped."""
        assert self._sequences is not None and self._tables is not None, "the router warms up before it steps"
        started = Clock(self.device)
        try:
            self._place_adapters(request)  # before all else that may fail: no row keeps what it is thought not to have
            copied = self._ring_blocks(request.copied_ids, request.copied_places, request.copied_blocks)
            plan = self._sequences.apply(request)
            if plan.added:
                self._tables.add(plan.added, self.device)
            if plan.grown:
                self._tables.grow(plan.grown, self.device)
            moves = self._move_blocks(request)
            if copied is not None:
                self._rings.keep(copied[:, 0], copied[:, 1:])
            self._load(request)
            if plan.computes:
                launched = self._run(plan, self._tables, started)
                if self.proposer is not None:
                    self._speculate(self.proposer, request, plan, launched)
                for row, blocks in self._states(request.kept_ids, request.kept_blocks):
                    self._kept_states.keep(row, self.device.upload(blocks))
                if self.proposer is not None:
                    self._unread.append(launched)  # nobody reads a step that fails before
                return launched
            return Launched([], [], {}, started, self.device, self.shard.check) if moves else None
        except BaseException:
            self._sequences.drop(request)
            raise

    def _place_adapters(self, request: pb.StepRequest) -> None:
        """Have rows hold what the step says. Raises StepError, also for sequences whose row is empty."""
        if self.adapters is None:
            if request.adapters:
                raise StepError("the step has adapters, but this shard serves none")
            return
        if request.reset:
            self.adapters.clear()
        try:
            self.adapters.place((place.row, place.key) for place in request.adapters)
        except ValueError as error:
            raise StepError(str(error)) from error
        for new in request.add:
            if new.adapter and new.adapter not in self.adapters.rows:
                raise StepError(f"sequence {new.id} has its adapter in row {new.adapter}, which is empty")

    def _captures_adapters(self, plan: StepRuns) -> bool:
        """Whether a captured step computes what the adapters of these sequences change, or none has one."""
        rows = {run.sequence.adapter for run in (*plan.decodes, *plan.uploaded)} - {0}
        return not rows or (self.adapters is not None and self.adapters.are_capturable(rows))

    @property
    def _reads_features(self) -> bool:
        return self.proposer is not None and self.proposer.reads_features

    def _features(self, hidden: Tensor) -> Tensor | None:
        """What a step keeps of its tokens until it is read: what a proposer goes on from."""
        return hidden if self._reads_features else None

    def _speculate(self, proposer: Proposer, request: pb.StepRequest, plan: StepRuns, launched: Launched) -> None:
        """Have tokens proposed behind those of a step, where the router asks for them."""
        self._finish_unread({*(one.id for one in request.extend), *(one.id for one in request.drafts)})
        proposer.see(plan)
        launched.tell(proposer.came)
        while self._unread and self._unread[0].is_read:
            self._unread.popleft()
        features = launched.features
        if not request.proposals:
            proposer.follow(plan, features)
            return
        for step in (*self._unread, launched):
            step.finish()
        began = time.perf_counter_ns()
        wanted = dict.fromkeys(request.proposed_ids, min(request.proposals, proposer.most))
        proposals = proposer.propose(plan, features, launched.came, wanted)
        launched.propose(proposals, time.perf_counter_ns() - began)

    def _finish_unread(self, ids: Collection[int]) -> None:
        """Have the proposer told what came of these sequences: the router knows it by rank 0, which may be ahead."""
        steps = [*self._unread]
        while steps and not steps[-1].gives_any(ids):
            steps.pop()
        for step in steps:
            step.finish()

    def _states(self, ids: Sequence[int], blocks: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        """The rows of these sequences, and the blocks of their states; none where other stages alone have states."""
        assert self._sequences is not None, "there are rows"
        if self.neighbours.stage.count > 1 and not any(self.kv_shape.states):
            return ()
        return self._sequences.rows_and_blocks(ids, blocks)

    def _load(self, request: pb.StepRequest) -> None:
        """Give new sequences the states, or the blocks in their rings, that they go on from."""
        if request.loaded_places:
            loaded = self._ring_blocks(request.loaded_ids, request.loaded_places, request.loaded_blocks)
            if loaded is not None:
                self._rings.load(loaded[:, 0], loaded[:, 1:])
            return
        for row, blocks in self._states(request.loaded_ids, request.loaded_blocks):
            self._kept_states.load(row, self.device.upload(blocks))

    def _ring_blocks(self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[int]) -> Tensor | None:
        """On the device, for each of these blocks of tokens: its place among all rings, then its KV blocks."""
        if not ids:
            return None
        if self.kv_shape.ring is None:
            raise StepError("the step copies from rings or to them, but this shard has none")
        assert self._sequences is not None
        found = self._sequences.ring_blocks(ids, places, blocks, self.kv_shape.ring)
        return self.device.upload(found) if found else None

    @property
    def _rings(self) -> RingCopies:
        assert self._ring_copies is not None, "they are allocated with the rings"
        return self._ring_copies

    @property
    def _kept_states(self) -> Checkpoints:
        if self._checkpoints is None:
            raise StepError("the step keeps or loads states, but this shard has none that blocks could hold")
        return self._checkpoints

    def _move_blocks(self, request: pb.StepRequest) -> bool:
        """Copy blocks to and from the host as the step says; whether there were any."""
        if not (request.saved_blocks or request.restored_blocks):
            return False
        if self.slots is None:
            raise StepError("the step moves blocks to or from the host, but this shard has no tier there")
        saved, restored = (request.saved_blocks, request.saved_slots), (request.restored_slots, request.restored_blocks)
        self.slots.move(request.tier_session, request.step, saved, restored)
        return True

    def hidden(self, step: StepInput) -> Tensor:
        """The final hidden states [T, D] of a step's tokens."""
        return self._hidden(step.forward)

    def _hidden(self, forward: Forward) -> Tensor:
        return self.model.run(forward, self._caches).hidden

    def _run(self, plan: StepRuns, tables: Tables, started: Clock) -> Launched:
        self.neighbours.take_tokens([*plan.decodes, *plan.drafts], tables)
        if self._graphs is not None and self._captures_adapters(plan):
            if not (plan.chunks or plan.drafts) and self._graphs.decodes.takes(len(plan.decodes)):
                return self._run_graph(plan, tables, self._graphs.decodes, started)
            if (launched := self._run_mixed(plan, tables, self._graphs.mixed, started)) is not None:
                return launched
        step = tables.lay_out(plan, self.device, has_encoder=self.has_encoder)
        encoding = step.forward.encoding
        before = self.neighbours.carried(len(step.forward.token_ids), len(encoding.token_ids) if encoding else 0)
        carried = self.model.run(replace(step.forward, carried=before), self._caches)
        if not self.neighbours.stage.is_last:
            return self._hand_on(carried, step.sampled, step.sample_rows, started)
        hidden = carried.hidden
        prompt = reported_tokens(step.forward, hidden, self.model.logits, self._vocabulary, self.device)
        at, forward = step.sample_at, step.forward
        found = hidden, forward.meta.positions[at] + 1, forward.token_ids[at], step.sample_rows
        return self._sample(step.sampled, found, plan, tables, started, at, prompt).showing(self._features(hidden))

    def _run_graph(self, plan: StepRuns, tables: Tables, graphs: DecodeGraphs, started: Clock) -> Launched:
        runs, form = plan.decodes, graphs.form_of(plan.decodes)
        found = graphs.run(runs, form, self.neighbours.carried(len(runs)))
        if form is not Form.HIDDEN:
            token_ids, logprobs, *rest = found
            self.neighbours.give_tokens(token_ids)
            chosen = [Chosen(token_ids, logprobs)]
            return Launched(runs, chosen, {}, started, self.device, self.shard.check).showing(self._features(rest[0]))
        if not self.neighbours.stage.is_last:
            return self._hand_on(Carried(found[0]), runs, found[-1], started)
        return self._sample(runs, found, plan, tables, started).showing(self._features(found[0]))

    def _hand_on(self, carried: Carried, sampled: Sequence[TokenRun], rows: Tensor, started: Clock) -> Launched:
        """End this stage's part of a step; the last stage gives the tokens."""
        self.neighbours.hand_on(carried, sampled, rows)
        return Launched([], [], {}, started, self.device, self.shard.check)

    def _run_mixed(self, plan: StepRuns, tables: Tables, graphs: MixedGraphs | None, started: Clock) -> Launched | None:
        """None: no graph is of such a step."""
        has_adapters = any(run.sequence.adapter for run in (*plan.decodes, *plan.uploaded))
        if graphs is None or has_adapters or any(run.reported for run in plan.chunks):
            return None
        spans = Spans.of(plan)
        if (graph := graphs.find(spans)) is None:
            return None
        found, hidden = graphs.run(graph, spans)
        return self._sample(plan.sampled, found, plan, tables, started).showing(hidden)

    def _sample(
        self,
        runs: Sequence[TokenRun],
        found: tuple[Tensor, ...],
        plan: StepRuns,
        tables: Tables,
        started: Clock,
        at: Tensor | None = None,
        prompt: dict[int, Reported] | None = None,
    ) -> Launched:
        """Choose the tokens that these runs yield.

        found: for each the hidden state whose logits choose, the token's position, the token before it, its row. at:
        which of the hidden states are theirs, where they are those of all tokens; they are gathered a few at a time.
        """
        hidden, positions, previous, rows = found
        adapters = tables.adapters_of(rows, runs)
        chosen = self._choose(
            [row for run in runs for row in run.rows],
            lambda part: self.model.logits(
                hidden[part if at is None else at[part]], None if adapters is None else adapters.at(part)
            ),
            positions=positions,
            previous=previous,
            allowed=plan.allowed,
        )
        if chosen:
            token_ids = torch.cat([part.token_ids for part in chosen])
            tables.keep(rows, token_ids)
            self.neighbours.give_tokens(token_ids)
        return Launched(runs, chosen, prompt or {}, started, self.device, self.shard.check)


class Launched:
    """A step that the device is computing."""

    def __init__(
        self,
        sampled: Sequence[TokenRun],
        chosen: Sequence[Chosen],
        prompt: dict[int, Reported],
        started: Clock,
        device: Device,
        check: Callable[[], None],
    ):
        """sampled: the runs that yield tokens, in the order of `chosen`.

        check: raises what went wrong where no call could, once the device has done the step.
        """
        self._sampled = sampled
        self._chosen = [part.downloaded(device) for part in chosen]
        self._prompt = {id: reported.downloaded(device) for id, reported in prompt.items()}
        self._started = started
        self._check = check
        self._done = device.event()
        self._lock = threading.Lock()
        self._result: StepResult | None = None
        self._told: Callable[[Sequence[Came]], None] | None = None
        self._proposals: Sequence[Proposal] = ()
        self._propose_ns = 0
        self.features: Tensor | None = None  # [T, F] of the step's tokens, until they are read
        self.came: Sequence[Came] = ()  # what sequences got, where somebody is told

    def showing(self, features: Tensor | None) -> Launched:
        """The same step, whose tokens have these features."""
        self.features = features
        return self

    def tell(self, told: Callable[[Sequence[Came]], None]) -> None:
        """Have somebody told what came, as soon as it is read."""
        self._told = told

    def propose(self, proposals: Sequence[Proposal], took_ns: int) -> None:
        """Add what was proposed behind what came."""
        self._proposals, self._propose_ns = proposals, took_ns

    def gives_any(self, ids: Collection[int]) -> bool:
        """Whether any of these sequences gets a token."""
        return any(run.sequence.id in ids for run in self._sampled)

    @property
    def is_read(self) -> bool:
        """Whether its tokens have been read."""
        return self._result is not None

    @property
    def is_done(self) -> bool:
        """Whether `finish` waits for nothing."""
        return self._done is None or self._done.query()

    def finish(self) -> StepResult:
        """Wait for the device and read the tokens, once. Raises PeerLost, and what the device fails with.

        Of a draft there are those up to the first that was not guessed.
        """
        with self._lock:
            if self._result is None:
                result = self._read()
                if self._told is not None:
                    self.came = _by_sequence(self._sampled, result)
                    self._told(self.came)
                self._result = result
        if not self._propose_ns:
            return self._result
        return replace(self._result, proposals=self._proposals, propose_ns=self._propose_ns)

    def _read(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        self._check()
        token_ids = [id for part in self._chosen for id in part.token_ids.tolist()]
        logprobs = [logprob for part in self._chosen for logprob in part.logprobs.tolist()]
        sequences, came = _came(self._sampled, token_ids)
        top_ids, top_logprobs = self._candidates(sequences, came)
        self.features = None
        return StepResult(
            ids=[s.id for s in sequences],
            token_ids=[token_ids[row] for row in came],
            logprobs=[logprobs[row] for row in came],
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt={id: reported.read() for id, reported in self._prompt.items()},
            forward_ns=self._started.ns_until(self._done),
        )

    def _candidates(
        self, sequences: Sequence[SequenceState], came: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The ids and log-probabilities of the candidates of the rows that came, as many as each sequence asked for."""
        if not any(s.choice.top_n_tokens for s in sequences):
            return [[] for _ in came], [[] for _ in came]
        ids = [row for part in self._chosen for row in _rows(part.top_ids, part)]
        values = [row for part in self._chosen for row in _rows(part.top_logprobs, part)]
        counts = [counted(values[row], s.choice.top_n_tokens) for row, s in zip(came, sequences, strict=True)]
        rows = list(zip(came, counts, strict=True))
        return [ids[row][:n] for row, n in rows], [values[row][:n] for row, n in rows]


@dataclass(frozen=True)
class StepResult:
    """What a step produced, on the host."""

    ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    prompt: dict[int, KnownLogprobs]  # of tokens that were known, by sequence
    forward_ns: int
    proposals: Sequence[Proposal] = ()
    propose_ns: int = 0  # that these took


class Clock:
    """The time from here to another event of a device: by its own clock, if it works behind the host's back."""

    def __init__(self, device: Device):
        self._began = device.event()
        self._began_ns = time.perf_counter_ns()

    def ns_until(self, end: Event | None) -> int:
        """Nanoseconds until `end`, which the device has reached; without one, until now."""
        if self._began is None or end is None:
            return time.perf_counter_ns() - self._began_ns
        return int(self._began.elapsed_time(end) * 1e6)


def _came(runs: Sequence[TokenRun], token_ids: Sequence[int]) -> tuple[list[SequenceState], Sequence[int]]:
    """Of the rows that were chosen in these runs, those that count, and their sequences.

    They are those behind which everything is as it was guessed.
    """
    if len(token_ids) == len(runs):
        return [run.sequence for run in runs], range(len(runs))
    sequences: list[SequenceState] = []
    came: list[int] = []
    first = 0
    for run in runs:
        guesses = run.guesses
        right = next((n for n, guess in enumerate(guesses) if token_ids[first + n] != guess), len(guesses))
        sequences += [run.sequence] * (1 + right)
        came += range(first, first + 1 + right)
        first += 1 + len(guesses)
    return sequences, came


def _by_sequence(runs: Sequence[TokenRun], result: StepResult) -> list[Came]:
    """What each of these sequences got."""
    found: dict[int, list[int]] = {}
    for id, token in zip(result.ids, result.token_ids, strict=True):
        found.setdefault(id, []).append(token)
    return [Came(run.sequence, found[run.sequence.id]) for run in runs]


def _rows(candidates: Tensor | None, part: Chosen) -> list[list[Any]]:
    """A list for each sequence of the part, empty where it has no candidates."""
    return [[] for _ in range(len(part.token_ids))] if candidates is None else candidates.tolist()


class Model(Protocol):
    """What an engine runs: a `Transformer`, or a model of another library (`server/fallback/`)."""

    @property
    def kv_placement(self) -> KvPlacement:
        """Where the blocks of its KV cache are kept."""

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
    def takes_drafts(self) -> bool:
        """Whether a sequence can go on from any of the tokens that a step computed."""

    @property
    def has_states(self) -> bool:
        """Whether any layer of it, in whatever stage, is recurrent."""

    @property
    def nbytes(self) -> int:
        """Memory of this rank's weights."""

    @property
    def vocab_range(self) -> tuple[int, int]:
        """The first token whose logits this rank computes, and how many it computes, with padding."""

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """What one token takes in this rank's cache."""

    def least_step_bytes(self, prefill_tokens: int, dtype: torch.dtype) -> int:
        """About what this rank's step takes whose prompts are no longer than they must be, at most `prefill_tokens`."""

    def run(self, forward: Forward, kv_caches: Sequence[Kept]) -> Carried:
        """The hidden states [T, D] of a step's tokens behind the last layer; their keys and values are kept."""

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """hidden [R, D] → this rank's logits [R, Vl], float32 or the model's dtype, the caller's to change.

        adapters: which the rows have; None: none has one.
        """


@dataclass(frozen=True)
class Graphs:
    """The captured steps of an engine."""

    decodes: DecodeGraphs
    mixed: MixedGraphs | None  # None: those of an encoder-decoder or a pipeline stage are not captured
    beside: Sequence[Callable[[], None]] = ()  # what captures those of a speculative model

    @property
    def kinds(self) -> list[list[Callable[[], None]]]:
        """What captures the graphs that are known beforehand, of each kind the largest first."""
        return [self.decodes.captures(), self.mixed.captures() if self.mixed else [], list(self.beside)]
