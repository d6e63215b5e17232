"""Which adapters are in the rows of the shards' devices, and which wait behind them in the memory of their hosts.

Plain arithmetic over keys and bytes: no clock, no wire, no tensors. The router counts adapters as it counts KV blocks,
so that all shards hold the same and no step names one that is not there. A request is admitted once its adapter is in a
row, and pins it there while it runs. Where rows or bytes lack, those go that nobody uses, least recently used first
(S-LoRA, Sheng et al. 2023, arXiv 2311.03285). The hosts hold no more than their memory, and what comes next.

Who waits gets room in the order in which requests are admitted. An adapter that a request before it needs stays, and so
does one that came for a request until that runs: two never drive each other out in turn. Where all others are in use,
the least recently used lets nobody new in until its requests have ended, so that a few popular adapters never keep the
others out. Requests without adapters have no part in any of this.

Left out: what an adapter is made of (`server/adapters/`), who asks the shards for it
(`router/batching/adapter_mover.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# Adapters that requests wait for and that are prepared before there is a row for them: as many as come while a step or
# two are computed, and as there is memory of hosts for; one, where there is none.
AHEAD = 8
MOST_SIZES = 10_000  # of adapters that were prepared once


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA folder that requests may name. Its content alone decides what they get: `key` is the digest of that."""

    name: str  # as clients say it
    key: bytes  # 16 bytes, of `server/adapters/identity.py`
    folder: str


class Placed(NamedTuple):
    """From a step on, a row has another adapter."""

    row: int
    key: bytes  # empty: it has none


class Waiting(Protocol):
    """A request that waits, for whoever finds room for its adapter."""

    @property
    def adapter(self) -> Adapter | None:
        """What it needs in a row."""


class _Claim(NamedTuple):
    """An adapter for which there has to be room."""

    key: bytes
    entry: Waiting  # the first request that waits for it …
    before: Collection[bytes]  # … and the adapters of those that are admitted before that one, which stay


@dataclass(slots=True)
class AdapterCounts:
    """What happened since the start of the router."""

    num_loads: int = 0  # adapters that came to a row …
    num_evictions: int = 0  # … and that left one


class AdapterRows:
    """The rows 1 … num_rows of every shard's device, and what is prepared behind them.

    device_bytes: for all rows of one shard. host_bytes: for adapters that are in no row; None: the device is the host,
    and these have what the rows leave of `device_bytes`. One of the default size has no row, and takes no requests.
    """

    def __init__(self, num_rows: int = 0, device_bytes: int = 0, host_bytes: int | None = 0) -> None:
        self.num_rows = num_rows
        self.device_bytes = device_bytes
        self.host_bytes = host_bytes
        self.counts = AdapterCounts()
        self.wanted: list[Adapter] = []  # to be prepared, in the order in which there should be room for them
        self._ahead: dict[bytes, int] = {}  # the next ones that need a row, and their bytes, 0 before they are prepared
        self._known_sizes: dict[bytes, int] = {}  # of those that were prepared once, the latest last
        self._waiting: Counter[bytes] = Counter()  # requests that wait, by their adapters
        self._pins: Counter[bytes] = Counter()  # and those that run
        self._begin()

    def _begin(self) -> None:
        """Nothing is prepared, and every row is empty."""
        self.used_bytes = 0  # of the rows
        self.waiting_bytes = 0  # of what is prepared and in no row
        self._sizes: dict[bytes, int] = {}  # of all that are prepared, on the device; least recently used first
        self._rows: dict[bytes, int] = {}  # likewise
        self._free = list(range(self.num_rows, 0, -1))
        self._owed: dict[bytes, Waiting] = {}  # those in rows that came for requests which have not run yet
        self._claim: _Claim | None = None  # the one that has to wait until others have ended …
        self._leaving: Collection[bytes] = ()  # … and the adapters of those, which let nobody new in
        self._changes: dict[int, bytes] = {}  # row -> what it gets with the next step
        self._settling: dict[bytes, int | None] = {}  # those that came or left -> the step; None: the next one

    def restart(self) -> None:
        """Other shards take over, on which nothing runs."""
        assert not self._pins
        self._begin()

    # ------------------------------------------------------------------------------------------------ of requests

    def queued(self, entry: Waiting) -> None:
        """A request waits."""
        if (adapter := entry.adapter) is not None:
            assert self.num_rows, "where there are no rows, requests with adapters are refused"
            self._waiting[adapter.key] += 1

    def unqueued(self, entry: Waiting) -> None:
        """It waits no more."""
        if (adapter := entry.adapter) is None:
            return
        key = adapter.key
        _drop_one(self._waiting, key)
        if key not in self._waiting:
            self.not_wanted(key)
            self._ahead.pop(key, None)
        if self._owed.get(key) is entry:
            del self._owed[key]
        if self._claim is not None and self._claim.entry is entry:
            self._claim, self._leaving = None, ()

    def admitted(self, entry: Waiting) -> int:
        """It runs; returns its adapter's row, which keeps that until it is `released`. 0: it has no adapter."""
        if (adapter := entry.adapter) is None:
            return 0
        key = adapter.key
        self.unqueued(entry)
        self._pins[key] += 1
        self._sizes[key] = self._sizes.pop(key)
        row = self._rows[key] = self._rows.pop(key)
        return row

    def released(self, entry: Waiting) -> None:
        """It runs no more."""
        if (adapter := entry.adapter) is not None:
            _drop_one(self._pins, adapter.key)

    @property
    def lacking(self) -> Collection[bytes]:
        """The adapters whose requests must wait for them."""
        return (self._waiting.keys() - self._rows.keys()).union(self._leaving)

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for an adapter that is in no row."""
        return not self._waiting.keys() <= self._rows.keys()

    @property
    def num_awaiting(self) -> int:
        """How many do."""
        return sum(count for key, count in self._waiting.items() if key not in self._rows)

    # ----------------------------------------------------------------------------------------------------- of rows

    def arrange(self, waiting: Iterable[Waiting]) -> None:
        """Find room for what those need that wait, given in the order of their admission."""
        self.wanted, self._ahead = [], {}
        missing = self._waiting.keys() - self._rows.keys()
        if not missing:
            return
        num_placed, before = 0, set[bytes]()  # adapters of the requests before
        is_full, goes_ahead = False, True
        if self._claim is not None:
            self._go_ahead(self._claim.entry)
            is_full = not self._find_room(self._claim)
        for entry in waiting:
            if (adapter := entry.adapter) is None or adapter.key in before:
                continue
            before.add(key := adapter.key)
            if key not in missing:
                continue
            missing.discard(key)
            if key in self._rows:  # by the claim
                continue
            is_ahead = goes_ahead and self._go_ahead(entry)
            if key in self._sizes and not is_full:  # nobody takes the room that one before it needs
                is_full = not self._find_room(_Claim(key, entry, frozenset(before)))
                num_placed += not is_full
                is_full |= num_placed == AHEAD
            if key not in self._rows:
                goes_ahead = is_ahead
            if not missing or (is_full and not goes_ahead):
                return

    def _go_ahead(self, entry: Waiting) -> bool:
        """Have its adapter at hand before there is a row for it; False: there is no memory for it behind the others."""
        adapter = entry.adapter
        assert adapter is not None
        key = adapter.key
        if key in self._ahead:
            return True
        held, size = sum(self._ahead.values()), self._known_sizes.get(key, 0)
        if len(self._ahead) == AHEAD or (held and held + size > self._host_room):
            return False
        self._ahead[key] = self._sizes.get(key, 0)
        if key not in self._sizes:
            self.wanted.append(adapter)
        return True

    @property
    def _host_room(self) -> int:
        """Bytes that those may take which are in no row."""
        return self.device_bytes - self.used_bytes if self.host_bytes is None else self.host_bytes

    def _find_room(self, claim: _Claim) -> bool:
        """Give an adapter a row, if need be one of another that no request needs before it does."""
        size = self._sizes[claim.key]
        gone = self._who_goes(size, claim.before)
        if any(one in self._pins for one in gone):
            if claim.key in self._ahead:
                self._claim, self._leaving = claim, gone
            return False
        self._claim, self._leaving = None, ()
        if not self._is_room(size, gone):
            return False
        for one in gone:
            self._evict(one)
        self._place(claim.key)
        self._owed[claim.key] = claim.entry
        return True

    def _who_goes(self, size: int, before: Collection[bytes]) -> list[bytes]:
        """Whose place an adapter takes; none, where there is room or all together would not be enough.

        First those that nobody uses or waits for, then those that nobody uses, and of all the least recently used.
        """
        staying = [key for key in self._rows if key not in before and key not in self._owed]
        unused = [key for key in staying if key not in self._pins]
        candidates = sorted(unused, key=self._waiting.__contains__) + [key for key in staying if key in self._pins]
        gone: list[bytes] = []
        for key in candidates:
            if self._is_room(size, gone):
                break
            gone.append(key)
        if not self._is_room(size, gone):
            return []
        for key in reversed(gone):  # a large one may have made room enough without a small one
            others = [one for one in gone if one != key]
            if self._is_room(size, others):
                gone = others
        return gone

    def _is_room(self, size: int, gone: Collection[bytes]) -> bool:
        """Whether there is a row, and so many bytes, without these."""
        free_bytes = self.device_bytes - self.used_bytes + sum(self._sizes[key] for key in gone)
        return bool(self._free or gone) and size <= free_bytes

    def _evict(self, key: bytes) -> None:
        row = self._rows.pop(key)
        self._free.append(row)
        self.used_bytes -= self._sizes[key]
        self.waiting_bytes += self._sizes[key]
        self._changes[row], self._settling[key] = b"", None
        self.counts.num_evictions += 1

    def _place(self, key: bytes) -> None:
        row = self._rows[key] = self._free.pop()
        self._ahead.pop(key, None)
        self.used_bytes += self._sizes[key]
        self.waiting_bytes -= self._sizes[key]
        self._changes[row], self._settling[key] = key, None
        self.counts.num_loads += 1

    @property
    def has_changes(self) -> bool:
        """Whether the next step has to tell the shards of rows."""
        return bool(self._changes)

    def take_changes(self, step: int) -> list[Placed]:
        """What this step tells them, rows that become empty first."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, {}
        self._settling = {key: step if at is None else at for key, at in self._settling.items()}
        return sorted((Placed(*change) for change in changes.items()), key=lambda placed: bool(placed.key))

    def failed(self, step: int, placed: Iterable[Placed]) -> None:
        """It is not known what the shards did of what this step told them: the next one says it again."""
        keys = {row: key for key, row in self._rows.items()}
        for row, _ in placed:
            key = self._changes.setdefault(row, keys.get(row, b""))
            if key:
                self._settling[key] = None
        self.computed(step)

    def computed(self, step: int) -> None:
        """The shards have done what this step told them."""
        if self._settling:
            self._settling = {key: at for key, at in self._settling.items() if at is None or at > step}

    # ------------------------------------------------------------------------------------------ of what is prepared

    @property
    def num_used(self) -> int:
        """Rows that have an adapter."""
        return len(self._rows)

    def fits(self, size: int) -> bool:
        """Whether the rows could hold an adapter of so many bytes."""
        return size <= self.device_bytes

    def is_prepared(self, key: bytes) -> bool:
        """Whether every shard has it at hand."""
        return key in self._sizes

    def prepared(self, key: bytes, size: int) -> None:
        """Every shard has an adapter at hand, which takes so many bytes on the device."""
        assert key not in self._sizes and self.fits(size)
        self._sizes[key] = size
        self.waiting_bytes += size
        self.not_wanted(key)
        self._note_size(key, size)

    def _note_size(self, key: bytes, size: int) -> None:
        self._known_sizes.pop(key, None)
        self._known_sizes[key] = size
        if len(self._known_sizes) > MOST_SIZES:
            del self._known_sizes[next(iter(self._known_sizes))]
        if key in self._ahead:
            self._ahead[key] = size
            if sum(self._ahead.values()) > self._host_room:
                self.wanted = []  # until it is known again which of them have room

    def not_wanted(self, key: bytes) -> None:
        """Nothing has to be done for an adapter now: it is at hand, or cannot be."""
        self.wanted = [adapter for adapter in self.wanted if adapter.key != key]

    def forgotten(self) -> list[bytes]:
        """What the shards are to forget, because it has no room in the memory of hosts. It is not prepared any more."""
        room = self._host_room
        if self.waiting_bytes <= room:
            return []
        forgotten: list[bytes] = []
        kept = (self._rows, self._ahead, self._settling)
        for key, size in [*self._sizes.items()]:
            if self.waiting_bytes <= room:
                break
            if not any(key in some for some in kept):
                del self._sizes[key]
                self.waiting_bytes -= size
                forgotten.append(key)
        return forgotten

    def discard(self, key: bytes) -> None:
        """No request will name it any more: it is the first to make room."""
        self._sizes, self._rows = _first(self._sizes, key), _first(self._rows, key)


def _first(some: dict[bytes, int], key: bytes) -> dict[bytes, int]:
    """The same with this key in front, if it is there."""
    return {key: some[key]} | some if key in some else some


def _drop_one(counter: Counter[bytes], key: bytes) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
