"""Which requests run in the next step: admission, prompt chunks, retirement, KV blocks and the prefix cache.

State and arithmetic alone, without clock, asyncio, text, wire or metrics: the batching loop
(`router/batching/batcher.py`) and `lockstep-bench simulate` share every decision. `plan` assumes that each plan is
sent, in order; `computed` and `failed` then say what became of it. What the shards lost is queued again as a new
sequence: its prompt, and behind it the tokens that it has got. So is a request that made room for another API key's. A
sequence with a grammar is held until it is known what it may get; tokens that come in any case join it as a chunk.

Blocks are reserved for all that a request may get, or on demand: then it joins as soon as what it is expected to need
fits (`forecast.py`), and gets blocks as it grows, in the step that first writes to them. Where none is free, a sequence
leaves in that very step, and waits to be rebuilt like those above. A request whose adapter is in no row of the shards
is passed over until it is. Left out: the rules of admission themselves (`queue.py`), those between keys
(`fairness.py`), and which adapters are in rows (`adapters.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic

from router.config import FROM_TEXTS
from router.drafting.proposals import Asked, Proposal
from router.drafting.speculation import Candidate, Drafting, Speculation, Verified
from router.scheduling.adapters import AdapterRows
from router.scheduling.checkpoints import Checkpoints, States, Windows
from router.scheduling.chunks import ChunkSize, chunk_size
from router.scheduling.fairness import MIN_ADVANCE, Ledger, fair_order, preempted_for, sent_away
from router.scheduling.forecast import Forecast
from router.scheduling.grammar import Continuation
from router.scheduling.limits import Limits, batch_size
from router.scheduling.plan import (
    Extension,
    FilledBlock,
    Lane,
    Lanes,
    S,
    StepPlan,
    continue_prompts,
    divide_prompts,
    take_unsent,
)
from router.scheduling.prefix_cache import Found, PrefixCache
from router.scheduling.prefix_index import TierIndex
from router.scheduling.queue import Budget, RequestSize, blocks_for, min_size, next_batch, take_from
from router.scheduling.request import Scheduled

ASKED_AGAIN = 8  # steps after which it is looked again whether a model's proposals pay


class Scheduler(Generic[S]):
    """Waiting and running requests under the limits."""

    def __init__(self, limits: Limits, tiers: TierIndex | None = None, adapters: AdapterRows | None = None) -> None:
        self.limits = limits
        sizes = (limits.adapter_rows, limits.adapter_bytes, limits.adapter_host_bytes)
        self.adapters = AdapterRows(*sizes) if adapters is None else adapters
        self.running: dict[int, S] = {}  # sequences on the shards, in order of admission
        self.waiting: deque[S] = deque()
        self._has_priorities = False  # whether any request has had one
        self.reserved_tokens = 0
        self.ledger = Ledger(limits.max_batch_total_tokens, limits.max_batch_size)
        self._chunk = chunk_size(limits)
        self._cache = self._new_cache(tiers)
        self._num_plans = 0
        self._ids = itertools.count(1)
        self._lanes: Lanes[S] = Lanes(limits.num_lanes)
        self._suspect: S | None = None  # It alone is computed until it gets a token.
        self._num_arrived = 0
        self.speculation = speculation_of(limits)
        self._lacks_blocks = False  # whether a sequence cannot go on in the step that is planned, for want of a block
        is_on_demand = limits.kv_admission == "demand"
        most_tokens = limits.max_batch_total_tokens
        forecast = Forecast[S](limits.block_size, limits.num_lanes, most_tokens) if is_on_demand else None
        self.forecast: Forecast[S] | None = forecast

    def _new_cache(self, tiers: TierIndex | None = None) -> PrefixCache:
        limits = self.limits
        distance, size = limits.checkpoint_tokens // limits.block_size, limits.checkpoint_blocks
        checkpoints: Checkpoints | None = None
        if distance and limits.prefix_caching:
            checkpoints = States(distance, size)
            if limits.window_blocks:
                checkpoints = Windows(distance, size, limits.window_blocks, limits.most_at_once)
        return PrefixCache(limits.num_blocks, tiers, checkpoints)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no running request has reserved."""
        return self._cache.pool.num_free

    def new_id(self) -> int:
        """An id that no sequence has had."""
        return next(self._ids)

    def add(self, entry: S) -> None:
        """Queue a request."""
        self.ledger.weigh(entry.owner, entry.weight)
        self._num_arrived += 1
        entry.arrival = self._num_arrived
        if (grammar := entry.request.grammar) is not None and not entry.generated_ids:
            entry.continuation = grammar.first.at_most(entry.request.max_new_tokens - 1)
        entry.has_run = bool(entry.generated_ids)  # on another server
        self._begin_sequence(entry)
        if entry.request.priority:
            self._has_priorities = True
        self.waiting.append(entry)
        if self._has_priorities:
            self._bring_forward(entry)

    def _bring_forward(self, entry: S) -> None:
        """Let the last of the queue have its turn before those of its key that may wait longer and have not run.

        They take each other's places, so that no other key waits longer for it.
        """
        for place, one in enumerate(self.waiting):
            if one.owner == entry.owner and one.request.priority > entry.request.priority and not one.has_run:
                self.waiting[place], entry = entry, one
        self.waiting[-1] = entry

    def add_again(self, lost: Sequence[S]) -> None:
        """Queue what the shards lost before all that waits, in the same order, but those first that run alone."""
        suspects = [entry for entry in lost if entry.is_suspect]
        for entry in reversed(suspects + [entry for entry in lost if not entry.is_suspect]):
            entry.has_run = True
            self._begin_sequence(entry)
            self.waiting.appendleft(entry)

    def _begin_sequence(self, entry: S) -> None:
        request = entry.request
        # Prompt log-probabilities need every prompt token computed; an encoder's prompt is no sequence's beginning.
        shares = self.limits.prefix_caching and not request.prompt_logprobs and not request.encoder_ids
        border = 0 if self.limits.window_blocks else self.limits.checkpoint_tokens
        entry.begin_sequence(self.limits.block_size if shares else None, border, self.limits.most_at_once)
        entry.expected = request.max_new_tokens
        if self.forecast is not None:
            self.forecast.expect(entry)
        self.ledger.queued(entry)
        self.adapters.queued(entry)

    def allow(self, entry: S, found: Continuation) -> None:
        """Its grammar allows this behind the tokens that have come back. It may go on."""
        num_generated = len(entry.generated_ids)
        entry.continuation = found.at_most(entry.request.max_new_tokens - num_generated - 1)
        if not entry.forced:
            return
        entry.num_known = num_generated + len(entry.forced)
        if entry.id in self.running:
            entry.has_unsent = True
            entry.num_prompt_scheduled = len(entry.request.token_ids) + num_generated - 1

    def taken(self, entry: S) -> tuple[int, ...]:
        """A token of what its grammar allowed has come back; returns those before it, which it forced."""
        forced, entry.continuation = entry.forced, None
        return forced

    def plan(self) -> StepPlan[S] | None:
        """The next step, or None when there is nothing to compute and none to retire, or enough is under way."""
        for lane in self._lanes.turns():
            if (plan := self._planned_again(lane) or self._planned(lane)) is not None:
                self._lanes.taken(lane)
                return plan
        return None

    def _planned_again(self, lane: Lane[S]) -> StepPlan[S] | None:
        """The step before once more, which is most steps: it only decoded, and no request waits or leaves."""
        if self.waiting or self._cache.has_passed or self.adapters.has_changes:
            return None
        if (before := lane.repeatable()) is None:
            return None
        lane.num_repeats -= 1
        for entry in before.decoding:
            entry.num_scheduled += 1
        self._num_plans += 1
        lane.steps_since_admission += 1
        saves = self._cache.take_saves(self._num_plans, 0, self.limits.block_size, is_idle=False)
        plan = before.again(self._num_plans, saves)
        if self.forecast is not None:
            self.forecast.planned(plan)
        return plan

    def _planned(self, lane: Lane[S]) -> StepPlan[S] | None:
        retired = self._retire(self._running_in(lane))
        preempted = self._make_room() if self.ledger.is_contested else {}
        grown, away = ({}, {}) if self.forecast is None else self._grow(lane)
        preempted |= away
        if self.adapters.num_rows:
            self._arrange_adapters()
        decoding, chunks, join_reason, fresh = self._chosen(lane, may_admit=not away)
        prefill_tokens = sum(chunks.values()) + sum(num_tokens for _, num_tokens in fresh)
        drafts, awaiting = self._guess(decoding, grown, prefill_tokens)
        proposals, proposed = self._ask(decoding, drafts, chunks, fresh, grown)
        copies = self._cache.take_copies()
        is_idle = not (retired or preempted or grown or decoding or drafts or chunks or fresh or copies)
        chunks |= {entry.id: 1 if entry.request.encoder_ids else num_tokens for entry, num_tokens in fresh}
        concerned = {entry.id: entry for entry in decoding}
        concerned |= {id: self.running[id] for id in (*drafts, *chunks, *grown)}
        filled = self._schedule(decoding, chunks)
        kept = self._keep_states(decoding, (*drafts, *chunks), filled)
        number, block_size = self._num_plans + 1, self.limits.block_size
        # Behind all that takes blocks, whose content is to be saved before it is written over.
        saves = self._cache.take_saves(number, prefill_tokens, block_size, is_idle=is_idle)
        if is_idle and not saves:
            return None
        self._num_plans = number
        plan = StepPlan(
            number=number,
            lane=lane.number,
            decoding=decoding,
            concerned=concerned,
            saves=saves,
            retired=retired,
            preempted=preempted,
            admitted=[entry for entry, _ in fresh],
            chunks=chunks,
            prefill_tokens=prefill_tokens,
            join_reason=join_reason,
            restores=self._cache.take_restores(number),
            filled=filled,
            held=self._held(lane, {entry.id for entry in decoding} | drafts.keys() | chunks.keys()),
            extended=take_unsent(self.running[id] for id in chunks),
            constrained=[e for e in concerned.values() if e.is_held and e.continuation is not None],
            grown=grown,
            loaded=self._cache.take_loads() if self._cache.checkpoints is not None else {},
            kept=kept,
            copies=copies,
            drafts=drafts,
            awaiting=awaiting,
            proposals=proposals,
            proposed=proposed,
            adapters=self.adapters.take_changes(number),
            completed=[id for id in chunks if not self.running[id].num_prompt_left],
        )
        lane.planned(plan)
        self._limit_repeats(lane, decoding)
        if self.forecast is not None:
            self.forecast.planned(plan)
        return plan

    def _limit_repeats(self, lane: Lane[S], decoding: Sequence[S]) -> None:
        """A step is no repetition of the one before where a model should be asked again, or where states are kept."""
        if self.speculation is not None and self.speculation.most_proposals:
            lane.num_repeats = min(lane.num_repeats, ASKED_AGAIN)
        if isinstance(self._cache.checkpoints, States):
            borders = [entry.steps_to_border - 1 for entry in decoding if entry.border]
            lane.num_repeats = min([lane.num_repeats, *borders])

    def _guess(
        self, decoding: list[S], grown: dict[int, Sequence[int]], prefill_tokens: int
    ) -> tuple[dict[int, Extension], list[S]]:
        """Those of `decoding` that go on with guesses, and those that wait to do so; both are taken out of it.

        What blocks they need for that are added to `grown`.
        """
        if self.speculation is None:
            return {}, []
        may_pay = self.speculation.may_pay(len(decoding))
        ready: list[S] = []
        under_way: list[S] = []
        for entry in decoding:
            if entry.drafting is not None and (entry.came is not None or (may_pay and entry.drafting.most)):
                (under_way if entry.num_scheduled > len(entry.generated_ids) else ready).append(entry)
        drafts: dict[int, Extension] = {}
        for entry, guess in self._guesses(ready, decoding, grown, prefill_tokens):
            if guess or entry.came is not None:
                drafts[entry.id] = Extension.of(entry, guess)
                entry.num_scheduled += 1
                entry.came = 0 if guess else None  # without guesses the shards know what it gets
        awaiting = [entry for entry, guess in self._guesses(under_way, decoding, grown, prefill_tokens) if guess]
        if drafts or awaiting:
            gone = drafts.keys() | {entry.id for entry in awaiting}
            decoding[:] = [entry for entry in decoding if entry.id not in gone]
        return drafts, awaiting

    def _guesses(
        self, able: Sequence[S], decoding: Sequence[S], grown: dict[int, Sequence[int]], prefill_tokens: int
    ) -> Iterable[tuple[S, tuple[int, ...]]]:
        """What each of `able`, some of `decoding`, may go on with."""
        if self.speculation is None or not able:
            return ()
        others = {entry.id: entry.drafting for entry in decoding}
        for entry in able:
            del others[entry.id]
        candidates = [self._candidate(entry, grown) for entry in able]
        return zip(able, self.speculation.choose(candidates, [*others.values()], prefill_tokens), strict=True)

    def _ask(
        self,
        decoding: Sequence[S],
        drafts: Mapping[int, Extension],
        chunks: Mapping[int, int],
        fresh: Sequence[tuple[S, int]],
        grown: dict[int, Sequence[int]],
    ) -> tuple[int, Sequence[int]]:
        """How many tokens are to be proposed behind those of this step, and for which sequences.

        Blocks that these need are added to `grown`, as far as there are any.
        """
        speculation = self.speculation
        if speculation is None or not speculation.most_proposals or self._suspect is not None:
            return 0, ()
        reached = {entry: entry.num_scheduled + 1 for entry in decoding}
        reached |= {self.running[id]: self.running[id].num_scheduled for id in drafts}
        begun = [(self.running[id], num_tokens) for id, num_tokens in chunks.items()]
        for entry, num_tokens in (*begun, *fresh):
            if num_tokens == entry.num_prompt_left and not entry.request.encoder_ids:
                reached[entry] = entry.num_scheduled + len(entry.forced) + 1
        if not reached or not speculation.may_pay(len(reached)):
            return 0, ()
        candidates = [Candidate(self._drafting(entry), self._draftable(entry, num)) for entry, num in reached.items()]
        asked = speculation.ask(candidates, may_try=not (chunks or fresh))
        places = {*asked.places}
        proposed = [entry for place, entry in enumerate(reached) if place in places]
        if self.forecast is not None:
            new = {entry for entry, _ in fresh}  # they have their first blocks
            for entry in proposed:
                guessed = len(drafts[entry.id].token_ids) - 1 if entry.id in drafts else 0
                if entry not in new and (needed := reached[entry] + guessed + asked.most) > entry.granted:
                    self._give(entry, needed, grown)
        return asked.most, [entry.id for entry in proposed]

    def _draftable(self, entry: S, num_reached: int) -> int:
        """Tokens that a draft has room for behind so many generated ones: in its answer, a ring, and up to a border."""
        assert entry.drafting is not None
        most = min(entry.drafting.most, entry.request.max_new_tokens - num_reached - 1)
        if entry.most_at_once:
            most = min(most, entry.most_at_once - 1)
        if entry.border:  # a step that keeps states has no guesses
            most = min(most, entry.steps_to_border - 2)
        return most

    def _candidate(self, entry: S, grown: dict[int, Sequence[int]]) -> Candidate:
        """How many guesses of a sequence have room: in its answer, the step, what its grammar allows, and blocks."""
        assert entry.drafting is not None
        wanted = self._draftable(entry, entry.num_scheduled)
        if entry.continuation is not None:
            wanted = min(wanted, len(entry.continuation.drafted))
        is_under_way = entry.num_scheduled > len(entry.generated_ids)
        needed = entry.num_scheduled + 1 + wanted
        if needed > entry.granted and wanted > 0 and self.forecast is not None and not is_under_way:
            wanted = len(entry.drafting.guess(wanted).token_ids)
            if wanted:
                self._give(entry, entry.num_scheduled + 1 + wanted, grown)
        return Candidate(entry.drafting, min(wanted, entry.granted - entry.num_scheduled - 1), is_under_way)

    def _keep_states(
        self, decoding: Iterable[S], others: Iterable[int], filled: list[FilledBlock]
    ) -> dict[int, Sequence[int]]:
        """Blocks for the states of those whose tokens end, with this step, where states are kept; `filled` grows."""
        kept: dict[int, Sequence[int]] = {}
        if not isinstance(self._cache.checkpoints, States):
            return kept
        for entry in itertools.chain(decoding, (self.running[id] for id in others)):
            if entry.border and entry.steps_to_border == entry.border:
                depth = entry.num_computed // self.limits.block_size - 1
                blocks, known = self._cache.keep_states(entry, depth)
                filled += known
                if blocks:
                    kept[entry.id] = blocks
        return kept

    def _held(self, lane: Lane[S], computed: Collection[int]) -> list[int]:
        """The sequences of a lane that could decode, but for a grammar that has not answered or a block that lacks."""
        if len(computed) == lane.size:
            return []
        return [entry.id for entry in self._running_in(lane) if entry.may_be_held and entry.id not in computed]

    def _chosen(
        self, lane: Lane[S], *, may_admit: bool
    ) -> tuple[list[S], dict[int, int], str | None, list[tuple[S, int]]]:
        """What is computed: (sequences that decode, chunks of prompts that were begun, why others join, these).

        Those that join come each with its first prompt chunk.
        """
        fresh = self._admit_suspect(lane) if may_admit else []
        if self._suspect is not None:
            goes_on = not fresh and self._suspect.lane == lane.number
            most = self.limits.max_batch_prefill_tokens if goes_on else 0
            return [], continue_prompts([self._suspect], most), None, fresh
        running = self._running_in(lane)
        decoding = [entry for entry in running if not (entry.num_prompt_left or entry.is_held)]
        if self._lacks_blocks:
            decoding = [entry for entry in decoding if entry.num_scheduled < entry.granted]
        has_prompts = self.waiting or len(decoding) < len(running)
        guesses = lane.before.num_guesses if decoding and lane.before is not None else 0  # about as many as before
        budget = self._prefill_budget(len(decoding) + guesses) if has_prompts else 0
        chunks: dict[int, int] = {}
        if self.ledger.is_contested:
            head = self._next_in_turn()
            has_room = head is not None and self._has_room(head)
            chunks = divide_prompts(running, budget, head if has_room else None, self.ledger.weights)
        elif budget:
            chunks = continue_prompts(running, budget)
        join_reason, fresh = self._admit_waiting(lane, budget - sum(chunks.values())) if may_admit else (None, [])
        return decoding, chunks, join_reason, fresh

    def _running_in(self, lane: Lane[S]) -> Collection[S]:
        if len(self._lanes) == 1:
            return self.running.values()
        return [entry for entry in self.running.values() if entry.lane == lane.number]

    def computed(self, plan: StepPlan[S]) -> None:
        """The step's reply is there, so the blocks that it filled may be shared."""
        self._lanes.answered(plan)
        self.adapters.computed(plan.number)
        if plan.filled or plan.saves or plan.restores:
            self._cache.computed(plan.filled, plan.saves, plan.restores)
        if plan.copies:
            self._cache.copied(plan.copies)

    def timed(self, plan: StepPlan[S], seconds: float) -> None:
        """Learn how long the step took, from when it could begin to its reply."""
        if plan.prefill_tokens and not (plan.num_decoding or plan.restores):
            self._cache.tiers.took(plan.prefill_tokens, seconds)
            if self.speculation is not None:
                self.speculation.costs.note_prompts(plan.prefill_tokens, seconds)
        if isinstance(self._chunk, ChunkSize) and not plan.restores:
            self._chunk.note(plan.num_decoding + plan.num_guesses, plan.prefill_tokens, seconds)

    def failed(self, plan: StepPlan[S]) -> list[S]:
        """The shards have dropped this step's sequences, and only those, which are returned under new ids."""
        self._lanes.answered(plan)
        self.adapters.failed(plan.number, plan.adapters)
        self._cache.failed(plan.filled, plan.saves, plan.restores)
        self._cache.lose(plan.concerned, plan.copies)
        lost = [entry for id, entry in plan.concerned.items() if entry.id == id]
        for entry in lost:
            if entry.id in self.running:
                self._release(entry)
            entry.id = self.new_id()
        return lost

    def restart(self, under_way: Sequence[StepPlan[S]]) -> list[S]:
        """The shards have lost every sequence and what their blocks held; returns those, under new ids.

        under_way: the plans that were sent and not answered. Some of their sequences have left with a later plan.
        """
        concerned = [entry for plan in under_way for id, entry in plan.concerned.items() if entry.id == id]
        lost = list(dict.fromkeys([*(e for e in concerned if e.id not in self.running), *self.running.values()]))
        for entry in lost:
            if entry.id in self.running:
                self._release(entry)
            entry.id = self.new_id()
        self._cache = self._new_cache()
        self._num_plans = 0
        self._lanes.restart()
        self.adapters.restart()
        return lost

    def resize(
        self, max_batch_total_tokens: int, num_blocks: int, tiers: TierIndex | None = None, num_states: int = 0
    ) -> None:
        """The KV cache of the shards that take over has this size, and these are behind it. Nothing runs.

        num_states: sequences whose recurrent layers have room for a state; 0: no layer has one.
        """
        assert not self.running
        self.limits = replace(
            self.limits,
            max_batch_total_tokens=max_batch_total_tokens,
            num_blocks=num_blocks,
            max_batch_size=batch_size(self.limits.max_batch_size, num_states),
        )
        self.ledger.max_tokens, self.ledger.max_places = max_batch_total_tokens, self.limits.max_batch_size
        if self.forecast is not None:
            self.forecast.most_tokens = max_batch_total_tokens
        self._cache = self._new_cache(tiers)

    @property
    def awaits_disk(self) -> bool:
        """Whether a request waits for what is on its way from the disk."""
        return any(e.disk_wait is not None and not e.disk_wait.is_over for e in self.waiting)

    def delivered(self, entry: S, token_id: int) -> None:
        """A generated token has come back, so the one before it is computed: a block that it fills may be shared."""
        ids = entry.generated_ids
        ids.append(token_id)
        if entry.came is not None:
            entry.came += 1
            entry.num_scheduled = max(entry.num_scheduled, len(ids))
        entry.num_losses = 0
        if entry is self._suspect:
            self._suspect = None
        if len(ids) - entry.num_rebuilt < 2 or entry.keys is None or not entry.blocks:
            return
        keys = entry.keys.keys
        num_full = len(keys)
        entry.keys.extend([ids[-2]])
        if len(keys) > num_full:
            self._cache.pool.announce(keys[num_full], entry.blocks[num_full])
            self._cache.confirm(keys[num_full], entry.blocks[num_full], entry.id, num_full)
            self._cache.name_states(entry, num_full, keys[num_full])

    def guess(self, entry: S, proposal: Proposal | None = None) -> Sequence[int]:
        """What a sequence may go on with, now that tokens have been delivered; a model proposes this."""
        speculation = self.speculation
        if speculation is None:
            return ()
        drafting, is_running = self._drafting(entry), entry.id in self.running
        if not drafting.most or (is_running and not speculation.may_pay(self._lanes.all[entry.lane].size)):
            return ()
        self._tell(entry, drafting)
        if proposal is not None:
            drafting.propose(proposal)
        if not is_running or not (guess := drafting.guess(drafting.most).token_ids):
            return ()
        self._lanes.all[entry.lane].num_repeats = 0
        return guess

    def _drafting(self, entry: S) -> Drafting:
        """What guesses how a sequence goes on, from its beginning on."""
        if entry.drafting is None:
            assert self.speculation is not None
            request, most = entry.request, entry.request.most_guesses(self.limits.speculate)
            said = [*request.prediction, *request.prompt_ids] if request.prediction else request.prompt_ids
            entry.drafting = self.speculation.begin(said, entry.key_name, request.cache_salt, most)
        return entry.drafting

    def _tell(self, entry: S, drafting: Drafting) -> None:
        drafting.came(entry.generated_ids[entry.num_told :])
        entry.num_told = len(entry.generated_ids)

    def stepped(
        self, plan: StepPlan[S], seconds: float | None, propose_seconds: float = 0.0, num_proposed: int = 0
    ) -> int:
        """All that the step has brought is delivered: learn what guesses are worth. Returns how many were right.

        seconds: that it took; None: not known. propose_seconds: what of it a model took to propose tokens, for so many
        sequences.
        """
        if self.speculation is None:
            return 0
        plain = [entry.drafting for entry in plan.decoding if entry.drafting is not None]
        verified = []
        for id, draft in plan.drafts.items():
            entry = plan.concerned[id]
            assert entry.drafting is not None
            verified.append(Verified(entry.drafting, len(draft.token_ids) - 1, _num_right(entry, draft)))
            entry.num_guessed += verified[-1].num_guesses
            entry.num_right += verified[-1].num_right
        held = [entry.drafting for entry in plan.awaiting if entry.drafting is not None]
        others = len(plan.decoding) - len(plain)
        is_pure = not (plan.prefill_tokens or plan.restores)
        asked = Asked(plan.proposals, num_proposed, propose_seconds) if plan.proposals else None
        self.speculation.stepped(plain, verified, others, seconds if is_pure else None, held, asked)
        return sum(one.num_right for one in verified)

    def finished(self, entry: S, *, is_cut: bool) -> None:
        """Its answer is complete. is_cut: only because its client wanted no more."""
        if entry.drafting is not None:
            self._tell(entry, entry.drafting)
            entry.drafting.end()
        if self.forecast is not None:
            self.forecast.finished(entry, is_cut=is_cut)

    def forget_cancelled(self) -> list[S]:
        """Take the requests out of the queue that are cancelled or over, and return them."""
        gone = [entry for entry in self.waiting if entry.cancelled or entry.is_over]
        if gone:
            take_from(self.waiting, gone)
            for entry in gone:
                self.ledger.unqueued(entry)
                self.adapters.unqueued(entry)
        return gone

    def _retire(self, running: Collection[S]) -> list[S]:
        """Take out the sequences that have ended, that end with the steps under way, or that were cancelled."""
        leaving = [entry for entry in running if entry.is_leaving]
        for entry in leaving:
            self._keep_end(entry)
            self._release(entry)
        return leaving

    def _prefill_budget(self, num_rows: int) -> int:
        """How many prompt tokens this step may compute: fewer while others decode, because their next tokens wait."""
        if not num_rows:
            return self.limits.max_batch_prefill_tokens
        return self._chunk.tokens(num_rows) if isinstance(self._chunk, ChunkSize) else self._chunk

    def _make_room(self) -> dict[int, S]:
        """Have others leave for the request that is next, if its key is entitled to that; by the ids that they had."""
        head = self._next_in_turn()
        if head is None or self._suspect is not None or self._has_room(head):
            return {}
        staying = [entry for entry in self.running.values() if not entry.is_leaving]  # others leave with their lanes
        leaving = preempted_for(head, staying, self.ledger, partial(self._has_room, head))
        preempted = {self._send_away(entry): entry for entry in leaving}
        self.add_again(leaving[::-1])
        return preempted

    def _send_away(self, entry: S) -> int:
        """Take a sequence out of the batch before its end; returns the id that it had."""
        id = entry.id
        self._keep_end(entry)
        self._release(entry)
        entry.id = self.new_id()
        entry.num_preempted += 1
        return id

    def _keep_end(self, entry: S) -> None:
        """Have the windows at the end of a sequence that leaves kept, as far as it is known what they are of."""
        windows, block_size = self._cache.checkpoints, self.limits.block_size
        if isinstance(windows, Windows) and entry.keys is not None:
            depth = min(len(entry.keys.keys), entry.num_computed // block_size)
            if windows.is_whole(depth, entry.num_computed, block_size):
                self._cache.pass_depth(entry, depth)

    def _has_room(self, entry: S, leaving: Sequence[S] = ()) -> bool:
        """Whether a waiting request fits into the batch once `leaving` have left it."""
        limits, size = self.limits, entry.request.size(new_tokens=self._first_grant(entry))
        has_place = limits.max_batch_size is None or len(self.running) - len(leaving) < limits.max_batch_size
        fits = has_place and self._is_free(size.tokens, size.blocks(limits.block_size), leaving)
        return fits and self._is_expected_to_fit(entry, leaving)

    def _is_expected_to_fit(self, entry: S, leaving: Collection[S]) -> bool:
        """Whether it fits until all have ended, without `leaving`. One alone always does."""
        if self.forecast is None or len(self.running) == len(leaving):
            return True
        return self.forecast.fits(entry, leaving)

    def _num_expected(self, waiting: Sequence[S], known: int, num: int) -> int:
        """How many of the first `num` of these fit until all have ended, where `known` do. One alone always does."""
        if self.forecast is None:
            return num
        return self.forecast.num_fitting(waiting[:num], known or not self.running)

    def _first_grant(self, entry: S) -> int:
        """For how many generated tokens a request has room when it joins."""
        if self.forecast is None or self.forecast.is_exhausted:
            return entry.request.max_new_tokens
        # So many that it may make room for another, if it was sent away before, once it needs more.
        return entry.request.filled_up(entry.num_known + MIN_ADVANCE, self.limits.block_size)

    def _grow(self, lane: Lane[S]) -> tuple[dict[int, Sequence[int]], dict[int, S]]:
        """Give blocks to the sequences that need some in this step, and ahead to others beside them.

        Returns the blocks by sequence, and who left the batch for them, by the ids that they had.
        """
        running = self._running_in(lane)
        self._lacks_blocks = False
        short = [e for e in running if (e.num_scheduled >= e.granted or e.num_known >= e.granted) and not e.is_held]
        if not short or self._suspect is not None:
            return {}, {}
        grown: dict[int, Sequence[int]] = {}
        away: dict[int, S] = {}
        for entry in sorted(short, key=lambda entry: entry.arrival):
            if entry.id in self.running:
                self._give_needed(entry, grown, away)
        self.add_again(sorted(away.values(), key=lambda entry: entry.arrival))
        if not away:
            self._give_ahead(running, grown)
        return grown, away

    def _give_needed(self, entry: S, grown: dict[int, Sequence[int]], away: dict[int, S]) -> None:
        """Give a sequence the blocks without which it cannot go on, if need be those of others, who leave."""
        assert self.forecast is not None
        counts, needed = self.forecast.counts, entry.num_reached + 1
        counts.blocks_asked += 1
        if self._give(entry, needed, grown):
            return
        if not (leaving := self._who_leaves(entry, needed)):
            counts.num_waits += 1
            self._lacks_blocks = True
            return
        for one in leaving:
            counts.blocks_given -= len(grown.pop(one.id, ()))
            away[self._send_away(one)] = one
            self.forecast.sent_away(one)
        if entry not in leaving:
            was_enough = self._give(entry, needed, grown)
            assert was_enough

    def _who_leaves(self, entry: S, new_tokens: int) -> list[S]:
        """Who makes room for a sequence where blocks run out, itself alone if it is among them; empty: it waits.

        Where others are not enough, one that lacks room for what its grammar forces leaves: when it comes back it has
        room for that and more. Else it might wait for others that wait for it.
        """
        staying = [one for one in self.running.values() if not one.is_leaving]
        tokens, blocks = self._missing(entry, new_tokens)

        def is_enough(leaving: Sequence[S]) -> bool:
            return entry in leaving or self._is_free(tokens, blocks, leaving)

        candidates = staying
        if self.forecast is not None and self.forecast.is_exhausted:  # who has reserved all stays
            candidates = [one for one in staying if one.granted < one.request.max_new_tokens]
        leaving = sent_away(candidates, self.ledger, is_enough)
        is_oldest = entry is min(staying, key=lambda one: one.arrival)
        if entry in leaving or not (leaving or entry.num_known < entry.granted or is_oldest):
            return [entry]
        return leaving

    def _is_free(self, tokens: int, blocks: int, leaving: Sequence[S]) -> bool:
        """Whether there are so many tokens and blocks once `leaving` have left."""
        tokens -= sum(one.request.input_length + one.granted for one in leaving)
        blocks -= self._cache.pool.num_freed_by(one.blocks for one in leaving)
        free_tokens = self.limits.max_batch_total_tokens - self.reserved_tokens
        return tokens <= free_tokens and blocks <= self._cache.pool.num_free

    def _give_ahead(self, running: Iterable[S], grown: dict[int, Sequence[int]]) -> None:
        """Have all be provided for as many steps as a block lasts, so that those steps can be repetitions."""
        block_size = self.limits.block_size
        for entry in running:
            goal = entry.num_reached + block_size
            is_decoding = not (entry.num_prompt_left or entry.is_held)
            if is_decoding and entry.granted < goal and not self._give(entry, goal, grown):
                return

    def _give(self, entry: S, new_tokens: int, grown: dict[int, Sequence[int]]) -> bool:
        """Give a sequence blocks for so many generated tokens, or all that it may get; whether there were enough."""
        assert self.forecast is not None
        more, count = self._missing(entry, new_tokens)
        if more <= 0:  # guesses that it was given blocks for have not come
            return True
        if not self._is_free(more, count, ()):
            return False
        self.reserved_tokens += more
        entry.granted += more
        if count:
            blocks = self._cache.pool.allocate(count)
            entry.blocks += blocks
            grown[entry.id] = [*grown.get(entry.id, ()), *blocks]
            self.forecast.counts.blocks_given += count
        expected = entry.expected
        if self.forecast.grown(entry):
            self.ledger.outgrown(entry.owner, entry.expected - expected)
        return True

    def _missing(self, entry: S, new_tokens: int) -> tuple[int, int]:
        """Tokens and blocks that a sequence lacks for so many generated tokens, or for all that it may get."""
        block_size = self.limits.block_size
        more = entry.request.filled_up(min(new_tokens, entry.request.max_new_tokens), block_size) - entry.granted
        return more, blocks_for(more, block_size)  # what it was granted before has filled its last block

    def _next_in_turn(self) -> S | None:
        """Between several keys, the waiting request that is admitted next."""
        return next(fair_order(self._unsuspected(), self.ledger), None)

    def _unsuspected(self) -> Iterator[S]:
        """The waiting requests before the first that runs alone, but for those that wait for more than room."""
        before = itertools.takewhile(lambda entry: not entry.is_suspect, self._with_adapters())
        block_size = self.limits.block_size
        return (e for e in before if not (e.is_held or self._cache.awaits_disk(e, block_size)))

    def _with_adapters(self) -> Iterable[S]:
        """The waiting requests but for those that await an adapter."""
        if not self.adapters.is_awaited:
            return self.waiting
        lacking = self.adapters.lacking
        return (e for e in self.waiting if (adapter := e.request.adapter) is None or adapter.key not in lacking)

    def _arrange_adapters(self) -> None:
        """Have those come to rows that waiting requests need, in the order in which these are admitted."""
        contested = self.ledger.is_contested and self.adapters.is_awaited
        self.adapters.arrange(fair_order(self.waiting, self.ledger) if contested else self.waiting)

    def _admit_suspect(self, lane: Lane[S]) -> list[tuple[S, int]]:
        """Admit the head of the queue alone if it may be what kills the shards: it, with its first prompt chunk."""
        head = next(iter(self._with_adapters()), None)
        if self._suspect is not None or head is None or not head.is_suspect or head.is_held:
            return []
        fresh = self._admit(lane, [head], self.limits.max_batch_prefill_tokens, None)
        self._suspect = fresh[0][0] if fresh else None
        return fresh

    def _admit_waiting(self, lane: Lane[S], prefill_tokens: int) -> tuple[str | None, list[tuple[S, int]]]:
        """Move requests from the queue into the batch.

        Returns why they may join a batch that runs (None if none runs), and each with its first prompt chunk.
        """
        lane.steps_since_admission += 1
        if not self.waiting:
            return None, []
        limits, running = self.limits, lane.size
        minimum = min_size(running, lane.steps_since_admission, limits.waiting_served_ratio, limits.max_waiting_tokens)
        if self.ledger.is_contested:  # the ratio would let in whoever fits, not whose turn it is
            admitted = self._admit(lane, fair_order(self._unsuspected(), self.ledger), prefill_tokens, None)
        else:
            admitted = self._admit(lane, self._unsuspected(), prefill_tokens, minimum)
        if not admitted:
            return None, []
        lane.steps_since_admission = 0
        reason = "wait_exceeded" if minimum is None else "backpressure"
        return reason if running else None, admitted

    def _admit(
        self, lane: Lane[S], candidates: Iterable[S], prefill_tokens: int, minimum: int | None
    ) -> list[tuple[S, int]]:
        """Admit the first of `candidates`, requests that wait, `minimum` or more, to a lane."""
        limits = self.limits
        most = None if limits.max_batch_size is None else limits.max_batch_size - len(self.running)
        of_lane = self._lanes.places(lane, len(self.waiting))
        budget = Budget(
            prefill_tokens=prefill_tokens,
            tokens=limits.max_batch_total_tokens - self.reserved_tokens,
            blocks=self._cache.pool.num_free,
            places=min((places for places in (most, of_lane) if places is not None), default=None),
            block_size=limits.block_size,
        )
        if budget.places == 0:
            return []
        seen: list[S] = []
        found: list[Found] = []
        sizes = self._sizes(candidates, max(1, minimum or 0), seen, found)
        chunks = next_batch(sizes, budget, minimum, partial(self._num_expected, seen))
        admitted = seen[: len(chunks)]
        take_from(self.waiting, admitted)
        # All found blocks are held before any is allocated: else one that a later request shares could be given away.
        for one in found[: len(admitted)]:
            self._cache.pool.hold(one.held)
        for entry, one in zip(admitted, found, strict=False):
            self._reserve(lane, entry, one)
        return list(zip(admitted, chunks, strict=True))

    def _sizes(self, entries: Iterable[S], least: int, seen: list[S], found: list[Found]) -> Iterator[RequestSize]:
        """What each of `entries` needs; it is appended to `seen`, and what holds its beginning to `found`.

        Nothing if `least` of them did not fit a moment ago.
        """
        block_size = self.limits.block_size
        for entry in entries:
            # The last token before forced ones is computed in any case: it yields the next logits.
            if self.forecast is not None:
                if not seen and self.forecast.is_refused(entry, least):
                    return
                self.forecast.expect(entry)
            seen.append(entry)
            most = (entry.num_prompt_left - len(entry.forced) - 1) // block_size
            found.append(self._cache.find(entry, most))
            size = self._size_of(entry, found[-1])
            if size.passing and size.blocks(block_size) + size.passing > self._cache.pool.num_free:
                found[-1] = Found([], [])  # else it might never fit
                size = self._size_of(entry, found[-1])
            yield size

    def _size_of(self, entry: S, found: Found) -> RequestSize:
        """What a request needs that has so much computed already."""
        size = entry.request.size(found.num_blocks * self.limits.block_size, entry.num_known, self._first_grant(entry))
        if not entry.most_at_once:
            return size
        return replace(size, most_at_once=entry.most_at_once, passing=len(found.needed))

    def _reserve(self, lane: Lane[S], entry: S, found: Found) -> None:
        entry.granted = self._first_grant(entry)
        size = entry.request.size(new_tokens=entry.granted)
        entry.blocks = self._cache.reserve(entry, found, size.blocks(self.limits.block_size))
        entry.num_prompt_scheduled = found.num_blocks * self.limits.block_size
        self.reserved_tokens += size.tokens
        if self.forecast is not None:
            self.forecast.admitted(entry)
            if entry.num_lost:
                self.forecast.came_back(entry)
        self.running[entry.id] = entry
        entry.lane, entry.row = lane.number, self.adapters.admitted(entry)
        lane.size += 1
        self.ledger.admitted(entry)

    def _release(self, entry: S) -> None:
        del self.running[entry.id]
        lane = self._lanes.all[entry.lane]
        lane.size -= 1
        lane.num_repeats = 0
        if entry is self._suspect:
            self._suspect = None
        self.reserved_tokens -= entry.request.input_length + entry.granted
        self.ledger.released(entry)
        self.adapters.released(entry)
        if self.forecast is not None:
            self.forecast.released(entry)
        self._cache.pool.free(entry.blocks)
        self._cache.drop_states(entry)
        entry.blocks = []

    def _schedule(self, decoding: list[S], chunks: dict[int, int]) -> list[FilledBlock]:
        """Note what the shards will have done once this step is computed, and return the blocks that it fills."""
        filled, block_size = list[FilledBlock](), self.limits.block_size
        for entry in decoding:
            entry.num_scheduled += 1
        for id, num_tokens in chunks.items():
            entry = self.running[id]
            first = entry.num_prompt_scheduled // block_size
            entry.num_prompt_scheduled += num_tokens
            if not entry.num_prompt_left:
                entry.num_scheduled += len(entry.forced) + 1  # the last chunk yields a token
            filled += self._cache.announced(entry, first, entry.num_prompt_scheduled // block_size)
            if isinstance(self._cache.checkpoints, Windows):
                self._pass_places(entry, self._cache.checkpoints, num_tokens)
        return filled

    def _pass_places(self, entry: S, windows: Windows, num_tokens: int) -> None:
        """Have the windows kept at the places that a chunk of so many tokens brings a prompt to."""
        if entry.keys is None:
            return
        last, block_size = entry.num_prompt_scheduled, self.limits.block_size
        known = last + entry.num_prompt_left
        for depth in windows.passed(last - num_tokens, last, known, block_size):
            if depth <= len(entry.keys.keys):
                self._cache.pass_depth(entry, depth)


def _num_right(entry: Scheduled, draft: Extension) -> int:
    """How many of its guesses came, the last token too where that has ended it."""
    came = entry.generated_ids[len(entry.generated_ids) - (entry.came or 0) :]
    pairs = zip(draft.token_ids[1:], came, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def speculation_of(limits: Limits) -> Speculation | None:
    """What guesses for running sequences, if anything does."""
    if not limits.speculate:
        return None
    return Speculation(
        limits.speculate,
        finds_answers=limits.speculative_method != "ngram",
        reads_texts=limits.speculative_method in ("auto", *FROM_TEXTS),
        most_proposals=limits.proposals,
        most_seconds=None if limits.max_inter_token_ms is None else limits.max_inter_token_ms / 1000,
        row_seconds=limits.token_seconds or math.inf,
    )
