"""Dispatch policies, on counts that are written down."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from router.scheduling.balancing import BOUND, FREE_TOKENS, POLICIES, Balancer


def balancer(policy: str, *shares: float) -> Balancer:
    found = Balancer(policy, Random(1))
    for share in shares:
        found.up(found.add(share))
    return found


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="fastest is no dispatch policy: give one of power-of-two, round-robin, least"):
        Balancer("fastest", Random(1))


def test_round_robin_takes_turns_and_leaves_out_who_is_down() -> None:
    found = balancer("round-robin", 1, 1, 1)
    assert [0, 1, 2, 0] == [found.send(5) for _ in range(4)]
    found.down(1)
    found.down(1)
    assert {0, 2} == {found.send(5) for _ in range(4)}


def test_least_tokens_counts_what_ended_and_how_fast_each_is() -> None:
    found = balancer("least-tokens", 1, 1, 2)
    assert [0, 1, 2, 2] == [found.send(100) for _ in range(4)]
    found.done(1, 100)
    assert 1 == found.send(100)


def test_the_better_of_two_spreads_better_than_chance() -> None:
    found = balancer("power-of-two", *[1] * 50)
    for _ in range(5000):
        found.send(1)
    chance = Counter(int(Random(n).random() * 50) for n in range(5000))
    assert max(found.loads.tokens) < 106 < max(chance.values())


def test_requests_that_begin_alike_meet_within_the_bound() -> None:
    found = balancer("prefix-affine", *[1] * 10)
    homes = [{found.send(100, prefix) for _ in range(20)} for prefix in range(30)]
    assert {1} == {len(home) for home in homes[:3]}
    for _ in range(20_000):
        found.send(100, prefix=7)
    mean = found.loads.total / 10
    assert max(found.loads.tokens) <= max(BOUND * mean, FREE_TOKENS) + 100


def test_a_replica_that_goes_moves_its_own_prefixes_alone() -> None:
    found = balancer("prefix-affine", *[1] * 10)

    def homes() -> list[int | None]:
        sent = []
        for prefix in range(200):
            sent.append(found.send(10, prefix))
            found.done(sent[-1], 10)  # type: ignore[arg-type]
        return sent

    before = homes()
    found.down(4)
    after = homes()
    assert [a for a, b in zip(after, before, strict=True) if b != 4] == [b for b in before if b != 4]
    assert 4 not in after
    found.up(4)
    assert before == homes()


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_end_at_nothing_whatever_goes_and_comes(policy: str) -> None:
    found = balancer(policy, 1, 1, 1)
    sent = [found.send(n, n % 3) for n in range(30)]
    found.down(0)
    for n, replica in enumerate(sent):
        assert replica is not None
        found.done(replica, n)
    found.up(0)
    assert (0, [0, 0, 0], 3) == (found.loads.total, found.loads.tokens, found.loads.capacity)
    for replica in range(3):
        found.down(replica)
    assert None is found.send(1)


def test_balancers_that_met_replicas_in_another_order_agree_by_their_names() -> None:
    names = ["a", "b", "c", "d"]
    homes = []
    for order in (names, names[::-1]):
        found = Balancer("prefix-affine", Random(1))
        for name in order:
            found.up(found.add(name=name))
        homes.append([found.loads.names[found.choose(10, prefix) or 0] for prefix in range(50)])
    assert homes[0] == homes[1]
    assert set(names) == set(homes[0])
