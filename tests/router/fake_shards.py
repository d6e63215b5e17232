"""Shards in memory: the double of `ShardedClient` in tests, deterministic and strict about the protocol.

`test_client.py` runs one contract over both, so that what tests rely on here holds for real shards.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.scheduling.queue import blocks_for
from router.shards.client import (
    KvCache,
    ModelInfo,
    OperatorTime,
    Prepared,
    ShardError,
    ShardHealth,
    StepReply,
    StepRequest,
)
from server.pb.generate_pb2 import Extension, NewSequence, PromptLogprobs, TokenMask


def fake_next_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token that FakeShardedClient gives after `token_ids`: their CRC-32, started from the seed.

    A pure function of the sequence so far, its length and the seed, as a real model with counter-based noise is; who
    else runs in the batch cannot matter. Seed 0 stands for greedy.
    """
    return zlib.crc32(array("I", token_ids).tobytes(), seed & 0xFFFFFFFF) % vocab_size


def adapter_seed(seed: int, key: bytes) -> int:
    """The seed in whose place an adapter puts another, so that every token is another's."""
    return zlib.crc32(key, seed) if key else seed


def fake_raw_logprob(token_id: int) -> float:
    """What FakeShardedClient says of a prompt's token where raw log-probabilities are wanted: exact in float32."""
    return -(token_id + 1) / 256


@dataclass(slots=True)
class _FakeSequence:
    id: int
    token_ids: list[int]
    prompt_length: int
    seed: int
    blocks: tuple[int, ...]
    reach: int  # tokens that its own blocks hold
    encoded: tuple[int, ...]
    top_n_tokens: int
    reported_from: int | None  # the first known token whose log-probability is reported
    is_constrained: bool
    raw_logprobs: bool
    lane: int
    adapter: bytes  # its key; empty: it has none
    computed: int
    digest: int  # of the tokens computed, and of its adapter
    windows_from: int = 0  # the first block of tokens that was written to its ring
    came: list[int] | None = None  # what came of its guesses in the step before; None: it had none


LOST = b"lost"  # in place of the key of an adapter that did not come to its row


def _origin(adapter: bytes) -> int:
    """What stands for no tokens: what one adapter computes is nothing that another could go on from."""
    return hash(adapter) if adapter else 0


def _digests(token_ids: Sequence[int], digest: int) -> Iterator[int]:
    """Of all tokens up to each one, after those that `digest` stands for."""
    for token_id in token_ids:
        digest = hash((digest, token_id))
        yield digest


def allowed_ids(mask: TokenMask, vocab_size: int) -> list[int]:
    """The tokens that a mask of the wire allows."""
    if mask.WhichOneof("tokens") == "bits":
        return [id for id in range(min(vocab_size, 8 * len(mask.bits))) if mask.bits[id // 8] >> id % 8 & 1]
    if mask.WhichOneof("tokens") == "allowed":
        return list(mask.allowed.ids)
    return [id for id in range(vocab_size) if id not in mask.forbidden.ids]


def _reported_from(new: NewSequence) -> int | None:
    if new.prompt_logprobs:
        return 1
    return len(new.token_ids) - new.forced if new.forced and new.sampling.raw_logprobs else None


class ProtocolViolation(AssertionError):
    """The router sent something that a shard must never get."""


@dataclass
class FakeShardedClient:
    """Shards in memory. Strict about the protocol: raises ProtocolViolation from `send`.

    A step begins when it was sent and the one before it is done, and takes `step_delay_s`; a test that replaces `clock`
    and `sleep` controls time. `requests` keeps all that was sent.
    """

    vocab_size: int = 256
    max_positions: int = 0
    block_size: int = 16
    max_batch_total_tokens: int = 4096
    max_batch_prefill_tokens: int | None = None  # checked when given, as is the next
    max_batch_size: int | None = None
    num_lanes: int = 1
    decoder_start: int | None = None  # plays an encoder-decoder when given
    checkpoint_blocks: int = 0  # plays a model with states when given: how many blocks hold those of a sequence
    window_blocks: int = 0  # with these, one with rings: how many blocks of tokens of it the next token sees
    most_at_once: int = 0  # tokens of a sequence in a step, which its ring has room for
    step_delay_s: float = 0.0
    row_delay_s: float = 0.0  # for each token that a step computes
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    next_token: Callable[[Sequence[int], int, int], int] = fake_next_token
    failing_steps: dict[int, str] = field(default_factory=dict)  # step -> the error that its reply carries
    fatal_token: int | None = None  # kills the shards when a prompt with it is computed
    failing_token: int | None = None  # fails the steps that compute a prompt with it
    deaths: Collection[int] = ()  # steps in which the shards die, counted over all groups
    renewals: int = 0  # how often other shards take the place of those that died
    renewed_tokens: int | None = None  # of the KV cache of those; None: the same
    lends_blocks: bool = False  # whether tables name blocks that others have until they are written to
    propose: Callable[[Sequence[int], int, int], tuple[Sequence[int], Sequence[float]]] | None = None
    propose_delay_s: float = 0.0  # for each token that is proposed, and once more
    interruptions_s: Iterator[float] = field(default_factory=lambda: iter(()))  # of the first answers with proposals
    adapter_rows: int = 0  # can serve adapters when given …
    adapter_bytes: int = 100  # … that take so much together …
    adapter_sizes: dict[str, int] = field(default_factory=dict)  # … and each of these folders so much, others 1
    adapter_problems: dict[str, str] = field(default_factory=dict)  # folder -> why it cannot be served
    adapter_delays_s: dict[str, float] = field(default_factory=dict)  # folder -> how long it takes to prepare
    fatal_folders: Collection[str] = ()  # preparing one kills the shards
    keep_requests: bool = True
    requests: list[StepRequest] = field(default_factory=list)
    death: str | None = None  # once set, `receive` and `health` raise ShardError with this cause
    _sequences: dict[int, _FakeSequence] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)  # lost with a failed step; the router may not know it yet
    _used_ids: set[int] = field(default_factory=set)
    _written: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (block, offset) -> digest of the tokens up to it
    prepared: dict[bytes, int] = field(default_factory=dict)  # key of an adapter -> its size
    num_prepared: int = 0  # adapters whose files were read
    _rows: dict[int, bytes] = field(default_factory=dict)  # row -> the key of its adapter; LOST: a failed step had one
    _states: dict[int, tuple[int, int]] = field(default_factory=dict)  # block -> digest of the tokens, its place
    # With the time when each is ready, and the lane of its step.
    _replies: deque[tuple[float, StepReply, int]] = field(default_factory=deque)
    _busy_until: float = 0.0
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _num_steps: int = 0
    _total_steps: int = 0

    @property
    def num_blocks(self) -> int:
        return blocks_for(self.max_batch_total_tokens, self.block_size) + (self.decoder_start is not None)

    @property
    def live_ids(self) -> set[int]:
        """Sequences added and not retired."""
        return set(self._sequences)

    async def wait_ready(self, timeout: float | None = None) -> None:
        return None

    async def info(self) -> ModelInfo:
        return ModelInfo(
            model_type="fake",
            dtype="float32",
            dtype_reason="no arithmetic is done",
            device="cpu",
            world_size=1,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            backend="none",
            backend_reason="",
            threads=1,
            threads_reason="",
            quantize="dense",
            kv_cache_dtype="float32",
            weight_bytes=(0,),
            kv_bytes_per_token=0,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            decoder_start=self.decoder_start,
            shares_prefixes=True,
            takes_drafts=True,
            adapter_rows=self.adapter_rows,
            adapter_bytes=self.adapter_bytes if self.adapter_rows else 0,
        )

    async def warmup(self, **wanted: int) -> KvCache:
        return KvCache(self.max_batch_total_tokens, self.block_size, self.num_blocks, kv_bytes=0, free_bytes=0)

    async def health(self) -> ShardHealth:
        self._raise_if_dead()
        return ShardHealth(self._num_steps, self._num_steps - len(self._replies), oldest_step_ms=0)

    def check(self) -> None:
        self._raise_if_dead()

    async def renew(self, error: ShardError) -> KvCache:
        if not self.renewals:
            raise error
        self.renewals -= 1
        for held in (self._sequences, self._gone, self._used_ids, self._written, self._states, self._replies):
            held.clear()
        self.prepared.clear()
        self._rows.clear()
        self._num_steps, self._busy_until, self.death = 0, 0.0, None
        self.max_batch_total_tokens = self.renewed_tokens or self.max_batch_total_tokens
        await self.sleep(0)
        return KvCache(self.max_batch_total_tokens, self.block_size, self.num_blocks, kv_bytes=0, free_bytes=0)

    async def prepare_adapter(self, key: bytes, folder: str) -> Prepared:
        self._raise_if_dead()
        if not folder:
            _require(key not in self._rows.values(), "an adapter is forgotten that a row has")
            self.prepared.pop(key, None)
            return Prepared(0)
        if key in self.prepared:
            return Prepared(self.prepared[key])
        if folder in self.fatal_folders:
            self.die("killed by what it read")
        group = self.renewals
        await self.sleep(self.adapter_delays_s.get(folder, 0.0))
        self._raise_if_dead()
        if group != self.renewals:
            raise ShardError(0, "its connection was closed", is_known=False)
        if problem := self.adapter_problems.get(folder, ""):
            return Prepared(0, problem)
        self.num_prepared += 1
        self.prepared[key] = self.adapter_sizes.get(folder, 1)
        return Prepared(self.prepared[key])

    async def forget_adapters(self, kept: Iterable[bytes]) -> None:
        self._raise_if_dead()
        self.prepared = {key: self.prepared[key] for key in {*kept} & self.prepared.keys()}

    async def start_profile(self) -> None:
        self._raise_if_dead()

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        self._raise_if_dead()
        return [OperatorTime("fake", calls=1, self_ns=1000)]

    def send(self, request: StepRequest) -> None:
        if self.keep_requests:
            self.requests.append(request)
        self._num_steps += 1
        self._total_steps += 1
        _require(request.step == self._num_steps, f"step {request.step} follows step {self._num_steps - 1}")
        began_at = max(self.clock(), self._busy_until)
        reply = self._run(request)
        chunks = zip(request.chunk_ids, request.chunk_tokens, strict=True)
        rows = sum(count for id, count in chunks if id not in self._gone)
        rows += sum(len(draft.token_ids) for draft in request.drafts if draft.id not in self._gone)
        rows += len({*reply.ids} - {*request.chunk_ids} - {draft.id for draft in request.drafts})
        seconds = self.step_delay_s + rows * self.row_delay_s
        reply.forward_ns = int(seconds * 1e9) + (rows > 0)
        self._busy_until = began_at + seconds + reply.propose_ns / 1e9
        self._replies.append((self._busy_until, reply, request.lane))
        of_lane = sum(lane == request.lane for _, _, lane in self._replies)
        _require(of_lane <= 2, f"more than two requests of lane {request.lane} under way")
        _require(len(self._replies) <= self.num_lanes + 1, "more requests under way than lanes and one")
        self._arrived.set()

    async def receive(self) -> StepReply:
        while not self._replies and self.death is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._replies:
            await self.sleep(max(0.0, self._replies[0][0] - self.clock()))
        self._raise_if_dead()
        return self._replies.popleft()[1]

    def die(self, cause: str) -> None:
        """End the stream, as the death of a shard does."""
        self.death = cause
        self._arrived.set()

    async def close(self) -> None:
        self.die("closed")

    def _raise_if_dead(self) -> None:
        if self.death is not None:
            raise ShardError(0, self.death)

    def _run(self, request: StepRequest) -> StepReply:
        reply = StepReply(step=request.step)
        copied = self._copied(request)
        _require(request.lane < self.num_lanes, f"a step of lane {request.lane}, of {self.num_lanes}")
        for id in request.retire:
            _require(id in self._sequences or id in self._gone, f"retire of unknown sequence {id}")
            self._sequences.pop(id, None)
        self._place_adapters(request)
        for sequence in request.add:
            self._add(sequence)
        for extension in request.extend:
            self._extend(extension)
        self._grow(request)
        for block, content in copied.items():
            self._states[block] = content
            for offset in range(self.block_size):
                self._written.pop((block, offset), None)
        self._load_windows(request) if self.window_blocks else self._load(request)
        self._check_limits(request)
        self._check_lane(request)
        masks = _masks_of(request)
        drafts = {draft.id: draft for draft in request.drafts if draft.id not in self._gone}
        decoding = [
            id
            for id, sequence in self._sequences.items()
            if request.decode
            and sequence.lane == request.lane
            and sequence.computed >= sequence.prompt_length
            and id not in request.held
            and id not in drafts
        ]
        chunks = [
            (id, n) for id, n in zip(request.chunk_ids, request.chunk_tokens, strict=True) if id not in self._gone
        ]
        grown = [id for id in request.grown_ids if id not in self._gone]
        touched = list(dict.fromkeys((*decoding, *drafts, *(id for id, _ in chunks), *grown)))
        if request.step in self.failing_steps:
            return self._fail(reply, touched, self.failing_steps[request.step])
        if any(self._sequences[new.id].adapter == LOST for new in request.add):
            return self._fail(reply, touched, "an adapter is not in its row")
        prompts = [self._sequences[id].token_ids for id, _ in chunks if id in self._sequences]
        if any(self.fatal_token in prompt for prompt in prompts):
            self.die("killed by what it computed")
        if any(self.failing_token in prompt for prompt in prompts):
            return self._fail(reply, touched, "cannot compute this")
        if self._total_steps in self.deaths:
            self.die("killed from outside")
        for id, num_tokens in chunks:
            self._prefill(id, num_tokens, masks, reply)
        for id in decoding:
            _require(self._sequences[id].came is None, f"sequence {id} decodes behind guesses that may be wrong")
            self._write(self._sequences[id], self._sequences[id].computed + 1)
            self._give_token(id, masks, reply)
        for draft in drafts.values():
            self._check_guesses(draft, masks, reply)
        _require({id for id, _ in masks} <= {*reply.ids, *self._gone}, "a mask for a sequence that gets no token")
        for id, blocks in self._blocks_of_states(request.kept_ids, request.kept_blocks):
            self._keep(id, blocks)
        self._propose(request, reply)
        return reply

    def _place_adapters(self, request: StepRequest) -> None:
        """Rows get other adapters, in this order: their bytes never exceed what there is. None, if the step fails."""
        _require(len({place.row for place in request.adapters}) == len(request.adapters), "a row gets two adapters")
        for place in request.adapters:
            row, key = place.row, place.key
            _require(1 <= row <= self.adapter_rows, f"row {row} of {self.adapter_rows}")
            old = self._rows.pop(row, b"")
            is_used = any(sequence.adapter == old for sequence in self._sequences.values()) and old not in (b"", key)
            _require(not is_used, f"row {row} gets another adapter while a sequence has the one before")
            if key:
                _require(key in self.prepared, f"row {row} gets an adapter that is not prepared")
                _require(key not in self._rows.values(), "an adapter is in two rows")
                self._rows[row] = LOST if request.step in self.failing_steps else key
        used = sum(self.prepared[key] for key in self._rows.values() if key != LOST)
        _require(used <= self.adapter_bytes, f"adapters take {used} of {self.adapter_bytes} bytes")

    def _propose(self, request: StepRequest, reply: StepReply) -> None:
        """What `propose` says of tokens, seed and number, as far as a sequence has blocks."""
        _require(bool(request.proposals) == bool(request.proposed_ids), "so many proposals for none, or none for some")
        _require(len(set(request.proposed_ids)) == len(request.proposed_ids), "proposals for a sequence twice")
        if not request.proposals:
            return
        _require(self.propose is not None, "there is nothing to propose with")
        assert self.propose is not None
        _require({*request.proposed_ids} <= {*reply.ids, *self._gone}, "proposals behind no token")
        for id in request.proposed_ids:
            if (sequence := self._sequences.get(id)) is None:
                continue
            room = sequence.reach - len(sequence.token_ids)
            token_ids, logprobs = self.propose(sequence.token_ids, sequence.seed, request.proposals)
            count = max(0, min(room, len(token_ids)))
            reply.proposal_ids.append(id)
            reply.proposal_counts.append(count)
            reply.proposal_tokens.extend(token_ids[:count])
            reply.proposal_logprobs.extend(logprobs[:count])
        seconds = (1 + request.proposals) * self.propose_delay_s + next(self.interruptions_s, 0.0)
        reply.propose_ns = int(seconds * 1e9)

    def _blocks_of_states(self, ids: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, list[int]]]:
        each = self.checkpoint_blocks
        _require(len(blocks) == each * len(ids) == each * len(set(ids)), "blocks of states are miscounted")
        return [(id, list(blocks[place * each : (place + 1) * each])) for place, id in enumerate(ids)]

    def _load(self, request: StepRequest) -> None:
        """A sequence goes on from the states behind exactly the tokens that it has, where a model has states."""
        loaded = dict(self._blocks_of_states(request.loaded_ids, request.loaded_blocks))
        for new in request.add:
            _require(
                bool(self.checkpoint_blocks and new.computed) == (new.id in loaded), f"states of sequence {new.id}"
            )
            if self._sequences[new.id].adapter == LOST:
                continue  # the step that brought it fails
            found = [self._states.get(block) for block in loaded.get(new.id, ())]
            expected = [(self._sequences[new.id].digest, place) for place in range(len(found))]
            _require(found == expected, f"sequence {new.id} goes on from states never computed")
        _require(loaded.keys() <= {new.id for new in request.add}, "states for a sequence that runs")

    def _copied(self, request: StepRequest) -> dict[int, tuple[int, int]]:
        """What is copied from rings, by the blocks that it goes to. The ring must still have it."""
        each, ring = self.checkpoint_blocks, self.window_blocks + blocks_for(self.most_at_once, self.block_size) + 1
        blocks = list(request.copied_blocks)
        _require(len(blocks) == len(set(blocks)) == each * len(request.copied_ids), "copied blocks are miscounted")
        taken = {block for other in self._sequences.values() for block in other.blocks}
        leaving = {block for id in request.retire if (s := self._sequences.get(id)) for block in s.blocks}
        _require((taken - leaving).isdisjoint(blocks), "windows are written over what others have")
        copied: dict[int, tuple[int, int]] = {}
        for id, place in zip(request.copied_ids, request.copied_places, strict=True):
            some, blocks = blocks[:each], blocks[each:]
            _require(id in self._sequences or id in self._gone, f"windows of unknown sequence {id}")
            if (sequence := self._sequences.get(id)) is None:
                continue
            end, last = (place + 1) * self.block_size, blocks_for(sequence.computed, self.block_size)
            _require(end <= sequence.computed, f"block {place} of sequence {id} is not computed")
            _require(max(sequence.windows_from, last - ring) <= place, f"block {place} of sequence {id} is gone")
            digest = [*_digests(sequence.token_ids[:end], _origin(sequence.adapter))][-1]
            copied |= {block: (digest, part) for part, block in enumerate(some)}
        return copied

    def _load_windows(self, request: StepRequest) -> None:
        """A sequence goes on from all that its next token sees."""
        blocks, each = list(request.loaded_blocks), self.checkpoint_blocks
        _require(len(blocks) == each * len(request.loaded_ids), "loaded blocks are miscounted")
        found: dict[int, list[int]] = {new.id: [] for new in request.add}
        for id, place in zip(request.loaded_ids, request.loaded_places, strict=True):
            some, blocks = blocks[:each], blocks[each:]
            end, origin = (place + 1) * self.block_size, _origin(self._sequences[id].adapter)
            digest = [*_digests(self._sequences[id].token_ids[:end], origin)][-1]
            expected = [(digest, part) for part in range(each)]
            _require([self._states.get(block) for block in some] == expected, f"windows of {id} were never copied")
            found[id].append(place)
        for new in request.add:
            depth = new.computed // self.block_size
            first = self._sequences[new.id].windows_from = max(0, depth - self.window_blocks)
            _require(found[new.id] == [*range(first, depth)], f"sequence {new.id} lacks windows")

    def _keep(self, id: int, blocks: list[int]) -> None:
        """Write states to blocks that no sequence has."""
        if id in self._gone:
            return
        taken = {block for other in self._sequences.values() for block in other.blocks}
        _require(taken.isdisjoint(blocks), f"states of sequence {id} are written over what others have")
        for place, block in enumerate(blocks):
            self._states[block] = self._sequences[id].digest, place
            for offset in range(self.block_size):
                self._written.pop((block, offset), None)

    def _grow(self, request: StepRequest) -> None:
        blocks = list(request.grown_blocks)
        _require(len(set(request.grown_ids)) == len(request.grown_ids), "a sequence grows twice in a step")
        _require(sum(request.grown_counts) == len(set(blocks)) == len(blocks), "blocks that grow are miscounted")
        for id, count in zip(request.grown_ids, request.grown_counts, strict=True):
            more, blocks = blocks[:count], blocks[count:]
            _require(id in self._sequences or id in self._gone, f"growth of unknown sequence {id}")
            if (sequence := self._sequences.get(id)) is None:
                continue
            taken = {block for other in self._sequences.values() for block in other.blocks}
            _require(not taken.intersection(more), f"sequence {id} grew by blocks of another")
            _require(count > 0 and max(more) < self.num_blocks, f"sequence {id} grew by a block too many")
            own = sequence.reach // self.block_size
            sequence.blocks = (*sequence.blocks[:own], *more, *sequence.blocks[own:])
            sequence.reach += count * self.block_size

    def _extend(self, extension: Extension) -> None:
        if extension.id in self._gone:
            return
        sequence = self._sequences[extension.id]
        self._go_back(sequence, extension)
        last, *forced = extension.token_ids
        _require(sequence.computed >= sequence.prompt_length, f"sequence {extension.id} is extended within its prompt")
        _require(last == sequence.token_ids[-1], f"sequence {extension.id} is extended behind a token it did not get")
        _require(len(forced) > 0, f"sequence {extension.id} is extended by nothing")
        _require(sequence.is_constrained, f"sequence {extension.id} is extended without a grammar")
        sequence.reported_from = len(sequence.token_ids) if sequence.raw_logprobs else None
        sequence.token_ids += forced
        sequence.prompt_length = len(sequence.token_ids)

    def _go_back(self, sequence: _FakeSequence, extension: Extension) -> None:
        """What is behind the last token that it got is not computed."""
        id, position = sequence.id, extension.position
        _require(position == len(sequence.token_ids) - 1, f"sequence {id} goes on from {position}")
        _require(list(extension.came) == (sequence.came or []), f"sequence {id} has other tokens than came")
        _require(position <= sequence.computed, f"sequence {id} goes on from {position}, which is not computed")
        _require(position == sequence.computed or sequence.came is not None, f"sequence {id} goes back")
        sequence.computed, sequence.came = position, None
        origin = _origin(sequence.adapter)
        sequence.digest = [origin, *_digests(sequence.token_ids[:position], origin)][-1]

    def _check_guesses(self, draft: Extension, masks: Mapping[tuple[int, int], TokenMask], reply: StepReply) -> None:
        """The tokens behind its latest one and behind each guess, up to the first that was not guessed."""
        sequence = self._sequences[draft.id]
        self._go_back(sequence, draft)
        last, *guesses = draft.token_ids
        end = len(sequence.token_ids)
        _require(last == sequence.token_ids[-1], f"sequence {draft.id} goes on behind a token it did not get")
        _require(not self.most_at_once or len(guesses) < self.most_at_once, f"guesses of {draft.id} exceed its ring")
        given, sequence.token_ids = sequence.token_ids, [*sequence.token_ids, *guesses]
        self._write(sequence, end + len(guesses))
        for row, guess in enumerate([*guesses, None]):
            sequence.token_ids = given
            self._give_token(draft.id, masks, reply, row)
            if given[-1] != guess:
                break
        sequence.came = given[end:] if guesses else None

    def _fail(self, reply: StepReply, ids: Sequence[int], error: str) -> StepReply:
        for id in ids:
            del self._sequences[id]
        self._gone.update(ids)
        reply.error = error
        return reply

    def _add(self, sequence: NewSequence) -> None:
        _require(sequence.id not in self._used_ids, f"id {sequence.id} used again")
        _require(len(sequence.token_ids) > 0, f"sequence {sequence.id} has no prompt")
        adapter = self._rows.get(sequence.adapter, b"")
        _require(bool(adapter) == bool(sequence.adapter), f"sequence {sequence.id} has an adapter from an empty row")
        origin = _origin(adapter)
        self._check_prefix(sequence, origin)
        shared = sequence.computed // self.block_size
        taken = {block for other in self._sequences.values() for block in other.blocks}
        blocks = (*sequence.blocks, *sequence.encoder_blocks)
        is_others = bool(taken.intersection(blocks[shared:])) and not self.lends_blocks
        _require(not is_others, f"sequence {sequence.id} got blocks of another to write to")
        _require(len(set(blocks)) == len(blocks), f"sequence {sequence.id} got a block twice")
        _require(all(block < self.num_blocks for block in blocks), f"sequence {sequence.id} got a block too many")
        self._check_encoder(sequence)
        self._used_ids.add(sequence.id)
        self._sequences[sequence.id] = _FakeSequence(
            id=sequence.id,
            token_ids=list(sequence.token_ids),
            prompt_length=len(sequence.token_ids),
            seed=adapter_seed(sequence.sampling.seed if sequence.sampling.do_sample else 0, adapter),
            adapter=adapter,
            blocks=blocks,
            reach=len(sequence.blocks) * self.block_size,
            encoded=tuple(sequence.encoder_token_ids),
            top_n_tokens=sequence.top_n_tokens,
            reported_from=_reported_from(sequence),
            is_constrained=sequence.sampling.is_constrained,
            raw_logprobs=sequence.sampling.raw_logprobs,
            lane=sequence.lane,
            computed=sequence.computed,
            digest=[origin, *_digests(list(sequence.token_ids)[: sequence.computed], origin)][-1],
        )

    def _check_prefix(self, sequence: NewSequence, origin: int) -> None:
        """What is said to be computed has been, for exactly these tokens, with the same adapter."""
        ids, computed = list(sequence.token_ids), sequence.computed
        if self._rows.get(sequence.adapter) == LOST:
            return  # as above
        _require(computed % self.block_size == 0 and computed < len(ids), f"sequence {sequence.id} has no full prefix")
        for position, digest in enumerate(_digests(ids[:computed], origin)):
            found = self._written.get((sequence.blocks[position // self.block_size], position % self.block_size))
            _require(found == digest, f"sequence {sequence.id} got a prefix never computed")

    def _write(self, sequence: _FakeSequence, end: int) -> None:
        """Compute up to token `end`, and note what each place of the KV cache holds: all tokens up to it."""
        _require(end <= sequence.reach, f"sequence {sequence.id} outgrew its blocks")
        fresh = range(sequence.computed, end)
        if self.lends_blocks:
            self._check_lent(sequence, fresh)
        for position, digest in zip(
            fresh, _digests(sequence.token_ids[sequence.computed : end], sequence.digest), strict=True
        ):
            self._written[sequence.blocks[position // self.block_size], position % self.block_size] = digest
            self._states.pop(sequence.blocks[position // self.block_size], None)
            sequence.digest = digest
        sequence.computed = end

    def _check_lent(self, sequence: _FakeSequence, fresh: range) -> None:
        """What is written to holds nothing of a sequence that is still there."""
        written = {sequence.blocks[position // self.block_size] for position in fresh}
        for other in self._sequences.values():
            held = other.blocks[: blocks_for(other.computed, self.block_size)] if other is not sequence else ()
            _require(
                written.isdisjoint(held), f"sequence {sequence.id} writes over what sequence {other.id} has computed"
            )

    def _check_encoder(self, sequence: NewSequence) -> None:
        given, reach = len(sequence.encoder_token_ids), len(sequence.encoder_blocks) * self.block_size
        if self.decoder_start is None:
            _require(given == reach == 0, f"sequence {sequence.id} is for an encoder")
        else:
            _require(0 < given <= reach, f"sequence {sequence.id} has {reach} places for {given} encoded tokens")
            _require(sequence.token_ids[0] == self.decoder_start, f"sequence {sequence.id} starts from a wrong token")

    def _check_limits(self, request: StepRequest) -> None:
        encoded = [len(sequence.encoder_token_ids) for sequence in request.add]
        size, prefill = len(self._sequences), sum(encoded if self.decoder_start is not None else request.chunk_tokens)
        _require(self.max_batch_size is None or size <= self.max_batch_size, f"{size} sequences in a batch")
        _require(
            self.max_batch_prefill_tokens is None or prefill <= self.max_batch_prefill_tokens,
            f"{prefill} prompt tokens in a step",
        )

    def _check_lane(self, request: StepRequest) -> None:
        """A step names no sequence of another lane, but for those that leave."""
        named = {
            *request.chunk_ids,
            *request.held,
            *(one.id for one in (*request.extend, *request.drafts)),
            *(one.id for one in request.add),
        }
        for id in sorted(named - self._gone):
            _require(id in self._sequences, f"a step names unknown sequence {id}")
            lane = self._sequences[id].lane
            _require(
                lane == request.lane, f"a step of lane {request.lane} names sequence {id}, which is in lane {lane}"
            )

    def _prefill(self, id: int, num_tokens: int, masks: Mapping[tuple[int, int], TokenMask], reply: StepReply) -> None:
        _require(id in self._sequences, f"chunk of unknown sequence {id}")
        sequence = self._sequences[id]
        start, end = sequence.computed, sequence.computed + num_tokens
        _require(not self.most_at_once or num_tokens <= self.most_at_once, f"chunk of {id} does not fit its ring")
        _require(0 < num_tokens and end <= sequence.prompt_length, f"chunk of {id} reaches {end}, beyond its prompt")
        self._write(sequence, end)
        if sequence.reported_from is not None:
            reported = sequence.token_ids[max(start + 1, sequence.reported_from) : end + 1]
            reply.prompt.append(self._known_logprobs(sequence, reported))
        if end == sequence.prompt_length:
            self._give_token(id, masks, reply)

    def _known_logprobs(self, sequence: _FakeSequence, token_ids: Sequence[int]) -> PromptLogprobs:
        """Raw ones tell of which token they are, and have candidates from the token itself on."""
        known = PromptLogprobs(id=sequence.id)
        for token_id in token_ids:
            known.logprobs.append(fake_raw_logprob(token_id) if sequence.raw_logprobs else -1.0)
            for rank in range(sequence.top_n_tokens if sequence.raw_logprobs else 0):
                known.top_ids.append((token_id + rank) % self.vocab_size)
                known.top_logprobs.append(fake_raw_logprob(token_id) - rank)
        return known

    def _give_token(self, id: int, masks: Mapping[tuple[int, int], TokenMask], reply: StepReply, row: int = 0) -> None:
        sequence = self._sequences[id]
        token_id = self.next_token([*sequence.encoded, *sequence.token_ids], sequence.seed, self.vocab_size)
        _require(
            sequence.is_constrained == ((id, row) in masks), f"sequence {id} has a grammar and no mask, or neither"
        )
        if (id, row) in masks:
            allowed = allowed_ids(masks[id, row], self.vocab_size)
            token_id = allowed[token_id % len(allowed)]
        sequence.token_ids.append(token_id)
        reply.ids.append(id)
        reply.token_ids.append(token_id)
        reply.logprobs.append(-0.5)
        reply.top_counts.append(sequence.top_n_tokens)
        for rank in range(sequence.top_n_tokens):
            reply.top_ids.append((token_id + rank) % self.vocab_size)
            reply.top_logprobs.append(-0.5 - rank)


def _masks_of(request: StepRequest) -> dict[tuple[int, int], TokenMask]:
    """By sequence and row of its draft."""
    return {
        place: mask for mask in request.masks for place in zip(mask.ids, mask.rows or [0] * len(mask.ids), strict=True)
    }


def _require(holds: bool, violation: str) -> None:
    if not holds:
        raise ProtocolViolation(violation)
