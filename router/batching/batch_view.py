"""The running batch as people may look at it: its requests, what the last steps computed, KV blocks, prefix hits.

It is put together when it is asked for. Steps are recorded only while it is: the first look begins the record, and
UNSEEN_S after the last one the record ends and is forgotten. Left out: every text. Where several API keys share the
server, a key sees of the others' requests how long they are and how far they have come, and neither their ids, which
clients choose, nor what the prefix cache held of them, which would say what they begin with: the totals of that cache
are those of its own requests, once these are over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from prometheus_client import Counter

from router.accounts import Account
from router.scheduling.request import Entry
from router.scheduling.scheduler import Scheduler
from router.telemetry.metrics import Metrics, StepTrace

MOST_REQUESTS = 64  # of those that run, and of those that wait; the others are counted
NUM_STEPS = 64
UNSEEN_S = 10.0
Json = dict[str, Any]


class BatchView:
    """One batching loop's scheduler, to be looked at."""

    def __init__(self, scheduler: Scheduler[Entry], metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._steps: deque[StepTrace] = deque(maxlen=NUM_STEPS)
        self._num_decoded = 0
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_recording(self) -> bool:
        """Whether steps are recorded: there was a look of late."""
        return self._end is not None

    def look(self, account: Account | None) -> Json:
        """How things are now, for a key, whose own requests have their ids; it starts or prolongs the record."""
        self._record()
        owner = account.owner if account is not None else ""
        scheduler, limits = self._scheduler, self._scheduler.limits
        return {
            "running": _shown(scheduler.running.values(), len(scheduler.running), owner),
            "waiting": _shown(scheduler.waiting, len(scheduler.waiting), owner),
            "max_running": limits.max_batch_size or limits.max_concurrent_requests,
            "waiting_tokens": scheduler.ledger.waiting_tokens,
            "kv_blocks": {"total": limits.num_blocks, "free": scheduler.num_free_blocks, "size": limits.block_size},
            "prefix_cache": {"is_on": limits.prefix_caching, **self._prefix_totals(account)},
            "decoded_tokens": self._num_decoded + _value(self._metrics.right_guesses),
            "steps": [[step.step, step.num_decoding, step.prefill_tokens] for step in self._steps],
        }

    def _prefix_totals(self, account: Account | None) -> Json:
        if account is None or account.is_alone:
            hits, computed = _value(self._metrics.prefix_hit_tokens), _value(self._metrics.prefill_tokens)
        else:
            hits = account.used_tokens["cached"]
            computed = account.used_tokens["prompt"] - hits
        return {"hit_tokens": hits, "computed_tokens": computed}

    def _record(self) -> None:
        if self._end is None:
            self._metrics.on_step = self._note
        else:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(UNSEEN_S, self._stop)

    def _note(self, trace: StepTrace) -> None:
        self._steps.append(trace)
        self._num_decoded += trace.num_decoding

    def _stop(self) -> None:
        self._metrics.on_step = None
        self._end = None
        self._steps.clear()


def _shown(entries: Iterable[Entry], count: int, owner: str) -> Json:
    return {"count": count, "requests": [_request(entry, owner) for entry in islice(entries, MOST_REQUESTS)]}


def _request(entry: Entry, owner: str) -> Json:
    is_own = entry.owner == owner
    return {
        "sequence": entry.id,
        "id": entry.request_id if is_own else None,
        "prompt_tokens": entry.request.input_length,
        "prompt_left": max(0, len(entry.request.token_ids) - entry.num_prompt_scheduled),
        "cached_tokens": entry.num_cached if is_own else None,
        "generated_tokens": len(entry.generated_ids),
        "max_new_tokens": entry.request.max_new_tokens,
    }


def _value(counter: Counter) -> int:
    [family] = counter.collect()
    return int(next(sample.value for sample in family.samples if sample.name.endswith("_total")))
