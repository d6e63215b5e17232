"""Which adapters are in rows: nobody computes with another's, none is forgotten that a step names, nobody starves."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.adapters import AHEAD, Adapter, AdapterRows

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)  # bytes of each adapter


@dataclass(eq=False)
class Asked:
    adapter: Adapter | None
    row: int = 0


def adapter_of(number: int) -> Adapter:
    return Adapter(f"number-{number}", bytes([number]) * 16, f"/adapters/{number}")


@dataclass
class World:
    """Requests in a queue, a batch without limits, and shards that do what steps tell them, a step or two later."""

    sizes: list[int]
    rows: AdapterRows
    queue: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    under_way: deque[int] = field(default_factory=deque)
    on_device: dict[int, bytes] = field(default_factory=dict)  # row -> key, behind the steps that were sent
    at_hand: set[bytes] = field(default_factory=set)
    named: dict[int, set[bytes]] = field(
        default_factory=dict
    )  # by the steps that may be under way: what comes and goes
    num_admitted: int = 0
    num_steps: int = 0

    def ask(self, number: int | None) -> Asked:
        entry = Asked(None if number is None else adapter_of(number % len(self.sizes)))
        self.rows.queued(entry)
        self.queue.append(entry)
        return entry

    def lacks(self, entry: Asked) -> bool:
        return entry.adapter is not None and entry.adapter.key in self.rows.lacking

    def prepare(self, count: int = AHEAD) -> None:
        for adapter in self.rows.wanted[:count]:
            if not self.rows.is_prepared(adapter.key):
                self.at_hand.add(adapter.key)
                self.rows.prepared(adapter.key, self.sizes[adapter.key[0]])
        self.forget()

    def forget(self) -> None:
        for key in self.rows.forgotten():
            assert key not in self.on_device.values(), "a row has it"
            assert not any(key in self.named[step] for step in self.under_way), "a step names it"
            self.at_hand.remove(key)

    def step(self, most: int = 1000) -> None:
        """Admit the first `most` requests that may be."""
        if len(self.under_way) == 2:
            self.rows.computed(self.under_way.popleft())
        self.rows.arrange(iter(self.queue))
        for entry in [entry for entry in self.queue if not self.lacks(entry)][:most]:
            self.queue.remove(entry)
            entry.row = self.rows.admitted(entry)
            self.running.append(entry)
            self.num_admitted += 1
        self.num_steps += 1
        named = self.named[self.num_steps] = set[bytes]()
        for row, key in self.rows.take_changes(self.num_steps):
            assert not key or key in self.at_hand, "it was forgotten, or never prepared"
            named |= {key, self.on_device.get(row, b"")}
            self.on_device[row] = key
        self.under_way.append(self.num_steps)
        self.check()

    def arrange(self) -> None:
        """Without a step, while one that was sent is answered."""
        self.rows.arrange(iter(self.queue))
        if self.under_way:
            self.rows.computed(self.under_way.popleft())

    def end(self, place: int) -> None:
        if self.running:
            self.rows.released(self.running.pop(place % len(self.running)))

    def cancel(self, place: int) -> None:
        if self.queue:
            self.rows.unqueued(self.queue.pop(place % len(self.queue)))

    def restart(self) -> None:
        """Other shards: what ran waits again, in front."""
        for entry in self.running:
            self.rows.released(entry)
        self.rows.restart()
        for entry in self.running:
            self.rows.queued(entry)
        self.queue, self.running = self.running + self.queue, []
        self.on_device.clear()
        self.at_hand.clear()
        self.under_way.clear()
        self.num_steps = 0

    def check(self) -> None:
        for entry in self.running:
            found = self.on_device.get(entry.row, b"")
            assert found == (b"" if entry.adapter is None else entry.adapter.key), "it computes with another's"
        held = [key for key in self.on_device.values() if key]
        assert len(held) == len(set(held)) <= self.rows.num_rows
        assert {*self.on_device} <= {*range(1, self.rows.num_rows + 1)}
        in_rows = sum(self.sizes[key[0]] for key in held)
        assert in_rows == self.rows.used_bytes <= self.rows.device_bytes
        assert sum(self.sizes[key[0]] for key in self.at_hand) == in_rows + self.rows.waiting_bytes
        assert self.rows.num_used == len(held)
        missing = [entry for entry in self.queue if entry.adapter is not None and entry.adapter.key not in held]
        assert len(missing) == self.rows.num_awaiting and bool(missing) == self.rows.is_awaited

    def finish(self) -> None:
        """Everybody runs, in no more rounds than there are requests."""
        for _ in range(3 * (len(self.queue) + len(self.running)) + 10):
            if not self.queue:
                break
            self.step()
            self.prepare()
            self.end(0)
            self.end(0)
        assert not self.queue, "somebody starves"
        while self.running:
            self.end(0)
        self.step()
        assert not self.rows._pins and not self.rows._waiting and not self.rows._owed and not self.rows._leaving


def world_of(sizes: list[int], num_rows: int, room: int = 60, host_bytes: int | None = 0) -> World:
    return World(sizes, AdapterRows(num_rows, room, host_bytes))


OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 11) | st.none()),
    st.tuples(st.just("ask"), st.integers(0, 2)),
    st.tuples(st.just("prepare"), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 4)),
    st.tuples(st.just("end"), st.integers(0, 30)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("forget"), st.none()),
    st.tuples(st.just("arrange"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


@given(SIZES, st.integers(1, 5), st.integers(60, 200), st.none() | st.integers(0, 200), st.lists(OPERATIONS))
def test_whatever_happens_each_computes_with_its_own_and_all_run(
    sizes: list[int], num_rows: int, room: int, host_bytes: int | None, operations: list[tuple[str, int | None]]
) -> None:
    world = world_of(sizes, num_rows, room, host_bytes)
    for name, argument in operations:
        act = getattr(world, name)
        act(argument) if name not in ("forget", "arrange", "restart") else act()
    world.finish()


@given(st.integers(1, 4), st.none() | st.integers(0, 60), st.lists(st.integers(0, 11), min_size=1, max_size=60))
def test_the_hosts_hold_no_more_than_their_memory_and_what_comes_next(
    num_rows: int, host_bytes: int | None, asked: list[int]
) -> None:
    """However many wait. What leaves a row is there for the steps under way and the next one.

    What is read is not known to be too large before it is there.
    """
    world = world_of([10] * 12, num_rows, 40, host_bytes)
    at_once = 2  # are read by `AdapterMover`
    for number in asked:
        world.ask(number)
        if number % 3:
            continue
        world.step()
        while world.rows.wanted:
            world.prepare(at_once)
            settling = sum(10 for key in world.rows._settling if key not in world.rows._rows)
            room = 40 - world.rows.used_bytes if host_bytes is None else host_bytes
            assert world.rows.waiting_bytes <= room + 10 * (1 + at_once) + settling
        world.end(0)
    world.finish()
    for _ in range(3):
        world.step()
    world.forget()
    assert world.rows.waiting_bytes <= (40 if host_bytes is None else host_bytes)


def test_what_has_no_room_beside_the_next_one_is_read_once_and_not_again_and_again() -> None:
    """A row whose requests do not end, and others that wait, of whom one has memory."""
    world = world_of([10] * 6, 1, 10, host_bytes=None)
    world.ask(0)
    world.step()
    world.prepare()
    world.step()
    for number in (1, 2, 3, 4, 5):
        world.ask(number)
    num_read = 0
    for _ in range(20):
        world.arrange()
        num_read += len(world.rows.wanted[:2])
        world.prepare(2)
    assert num_read <= 2 and world.rows.waiting_bytes == 10
    world.finish()


def test_who_goes_is_the_one_that_was_not_used_for_longest() -> None:
    world = world_of([10] * 5, 3)
    for number in (0, 1, 2, 0, 3):
        world.ask(number)
        world.step()
        world.prepare()
        world.step()
        world.end(0)
    assert {adapter_of(number).key for number in (0, 2, 3)} == {*world.on_device.values()}


def test_a_large_one_takes_the_place_of_no_more_than_it_must() -> None:
    world = world_of([10, 40, 10, 40], 4)
    for number in (0, 1, 2):
        world.ask(number)
    world.step()
    world.prepare()
    world.step()
    while world.running:
        world.end(0)
    world.ask(3)
    world.step()
    world.prepare()
    world.step()
    assert {adapter_of(number).key for number in (0, 2, 3)} == {key for key in world.on_device.values() if key}


def test_a_row_that_loses_its_adapter_for_the_bytes_alone_is_emptied_first() -> None:
    world = world_of([30, 30, 60], 2)
    for number in (0, 1):
        world.ask(number)
    world.step()
    world.prepare()
    world.step()
    world.end(0)
    world.end(0)
    world.ask(2)
    world.step()
    world.prepare()
    world.rows.arrange(world.queue)
    empty, full = world.rows.take_changes(9)
    assert b"" == empty.key and adapter_of(2).key == full.key and empty.row != full.row


def test_none_is_forgotten_before_the_shards_know_that_its_row_has_another() -> None:
    world = world_of([10] * 2, 1, host_bytes=0)
    for number in (0, 1):
        world.ask(number)
        world.step()
        world.prepare()
        world.step()
        world.end(0)
    assert world.under_way and adapter_of(0).key in world.at_hand
    world.ask(0)
    world.arrange()  # the step that says so is not sent yet
    world.forget()
    assert adapter_of(1).key in world.at_hand
    world.step()
    world.step()
    world.forget()
    assert adapter_of(1).key in world.at_hand
    world.step()
    world.forget()
    assert {adapter_of(0).key} == world.at_hand


def test_popular_ones_make_room_for_one_that_waits() -> None:
    """Though each of them is asked for in every step, and always has a request that runs."""
    world = world_of([10] * 3, 2)
    rare, ends = None, deque[list[Asked]]()
    for num_steps in range(12):
        world.ask(0)
        world.ask(1)
        if num_steps == 4:
            assert 2 == world.rows.num_used
            rare = world.ask(2)
        before = [*world.running]
        world.step()
        world.prepare()
        ends.append([entry for entry in world.running if entry not in before])
        for entry in ends.popleft() if len(ends) > 2 else ():  # each runs for three steps
            world.end(world.running.index(entry))
        if rare is not None and rare not in world.queue:
            break
    assert rare is not None and rare not in world.queue and num_steps < 10
    world.finish()


@pytest.mark.parametrize("most", [0, 1])
def test_one_that_came_for_a_request_stays_until_that_runs(most: int) -> None:
    """Even where the order of those that wait turns round, as it does between several API keys."""
    world = world_of([10, 10], 1)
    first, second = world.ask(0), world.ask(1)
    world.step()
    world.prepare()
    for _ in range(6):
        world.queue.reverse()
        world.step(0)
    assert 1 == world.rows.counts.num_loads and 0 == world.rows.counts.num_evictions
    if not most:  # whoever waits no more owes it nothing
        for entry in (first, second):
            if entry.adapter is not None and entry.adapter.key in world.on_device.values():
                world.cancel(world.queue.index(entry))
    world.finish()
    assert (2, 1) == (world.rows.counts.num_loads, world.rows.counts.num_evictions)


def test_nobody_takes_the_room_that_a_larger_one_before_waits_for() -> None:
    world = world_of([30, 60, 10], 3)
    world.ask(0)
    world.step()
    world.prepare()
    world.step()  # the first runs
    world.ask(1)
    small = world.ask(2)
    for _ in range(3):
        world.step()
        world.prepare()
    assert small in world.queue and 2 == len(world.queue)
    world.end(0)
    world.step()
    assert [small] == world.queue


def test_who_is_before_keeps_an_adapter_that_nobody_uses() -> None:
    world = world_of([10] * 2, 1)
    world.ask(0)
    world.step()
    world.prepare()
    world.step()
    world.end(0)
    first, second = world.ask(0), world.ask(1)
    for _ in range(3):
        world.step(0)  # the batch is full
        world.prepare()
    world.step()
    assert first in world.running and second in world.queue and 0 == world.rows.counts.num_evictions


def test_whoever_gives_up_waiting_keeps_nobody_out() -> None:
    world = world_of([10] * 2, 1)
    world.ask(0)
    world.step()
    world.prepare()
    world.step()
    impatient = world.ask(1)
    world.step()
    world.prepare()
    world.step()
    patient = world.ask(0)
    world.step()
    assert patient in world.queue  # until those before it have ended
    world.cancel(world.queue.index(impatient))
    world.step()
    assert patient in world.running


def test_what_only_one_wanted_that_waits_no_more_is_not_wanted() -> None:
    world = world_of([10] * 2, 1)
    impatient, _ = world.ask(0), world.ask(1)
    world.step()
    assert 2 == len(world.rows.wanted)
    world.cancel(world.queue.index(impatient))  # and no step looks at those that wait before it is asked what is wanted
    assert [adapter_of(1).key] == [adapter.key for adapter in world.rows.wanted]


def test_requests_without_adapters_are_nobodys_business() -> None:
    rows = AdapterRows()
    entry = Asked(None)
    rows.queued(entry)
    rows.arrange([entry])
    assert not rows.lacking and 0 == rows.admitted(entry)
    rows.released(entry)
    assert not rows.is_awaited and not rows.has_changes and [] == rows.take_changes(1)


def test_one_that_is_discarded_is_the_first_to_go() -> None:
    world = world_of([10] * 4, 3)
    for number in (0, 1, 2):
        world.ask(number)
    world.step()
    world.prepare()
    world.step()
    for _ in range(3):
        world.end(0)
    world.rows.discard(adapter_of(2).key)
    world.rows.discard(adapter_of(3).key)  # which is nowhere
    world.ask(3)
    world.step()
    world.prepare()
    world.step()
    assert {adapter_of(number).key for number in (0, 1, 3)} == {*world.on_device.values()}


def test_the_same_content_under_two_names_is_one_adapter() -> None:
    world = world_of([10], 1)
    one = world.ask(0)
    assert one.adapter is not None
    other = Asked(replace(one.adapter, name="other"))
    world.rows.queued(other)
    world.queue.append(other)
    world.step()
    world.prepare()
    world.step()
    assert [1, 1] == [entry.row for entry in world.running]
    assert Counter({one.adapter.key: 2}) == world.rows._pins
