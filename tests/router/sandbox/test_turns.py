"""Fair semaphores: owners in turn, order within each, and nothing left by a waiter that is cancelled."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.sandbox.workers import FairSemaphore


class Gate:
    """A gate and what came in, in order; nobody leaves until told to."""

    def __init__(self, num_places: int) -> None:
        self.turns = FairSemaphore(num_places)
        self.entered: list[str] = []

    async def visit(self, name: str) -> None:
        await self.turns.enter(name[0])
        self.entered.append(name)

    async def arrive(self, *names: str) -> list[asyncio.Task[None]]:
        """The first letter is the owner."""
        tasks = [asyncio.create_task(self.visit(name)) for name in names]
        await settle()
        return tasks

    async def leave(self, count: int = 1) -> None:
        for _ in range(count):
            self.turns.leave()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_owners_enter_in_turn_and_each_in_its_order() -> None:
    gate = Gate(1)
    await gate.arrive("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    await gate.leave(2)
    await gate.arrive("d1")
    await gate.leave(5)
    assert ["a1", "a2", "b1", "c1", "a3", "b2", "d1", "a4"] == gate.entered


async def test_who_is_cancelled_with_the_place_in_hand_passes_it_on() -> None:
    gate = Gate(1)
    tasks = await gate.arrive("a1", "a2", "b1")
    gate.turns.leave()
    tasks[1].cancel()  # before it could run
    await settle()
    assert ["a1", "b1"] == gate.entered
    tasks = await gate.arrive("a3")
    tasks[0].cancel()
    gate.turns.leave()  # before who is cancelled could run
    await settle()
    await gate.arrive("b2")
    assert ["a1", "b1", "b2"] == gate.entered


@given(
    st.integers(1, 3),
    st.lists(st.one_of(st.sampled_from("abc"), st.tuples(st.just("cancel"), st.integers(0, 50)), st.just("leave"))),
)
def test_any_order_of_arrivals_ends_and_cancellations_uses_every_place(
    num_places: int, story: list[str | tuple[str, int]]
) -> None:
    async def play() -> None:
        gate = Gate(num_places)
        tasks: list[asyncio.Task[None]] = []
        num_left = 0
        for number, act in enumerate(story):
            if isinstance(act, tuple):
                if tasks:
                    tasks[act[1] % len(tasks)].cancel()
            elif act != "leave":
                tasks += await gate.arrive(f"{act}{number}")
            elif num_left < len(gate.entered):
                num_left += 1
                gate.turns.leave()
            if number % 2:
                await settle()
                num_inside = len(gate.entered) - num_left
                assert num_inside <= num_places
                assert num_inside == num_places or not gate.turns.num_waiting
        await settle()
        await gate.leave(len(gate.entered) - num_left)
        while gate.turns.num_waiting:
            await gate.leave()
        assert all(task.done() for task in tasks)
        assert len(gate.entered) == len(set(gate.entered)) and {} == gate.turns._waiting

    asyncio.run(play())
