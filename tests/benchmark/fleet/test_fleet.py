"""Fleets in virtual time: prefixes, delays, prices, and prompts apart from answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmark.cost.step_times import Fixed
from benchmark.fleet.fleet import Conditions, Fleet, Pool
from benchmark.fleet.replica import Tally
from benchmark.fleet.traffic import OpenLoop, Request
from tests.router.doubles import make_limits

LIMITS = make_limits(prefix_caching=True, max_batch_total_tokens=4096, max_batch_prefill_tokens=512)
COST = Fixed(0.010, 0.0001)
ONE_AT_ONCE = make_limits(
    prefix_caching=True, max_batch_total_tokens=4096, max_batch_prefill_tokens=512, max_concurrent_requests=1
)


def pool(num_replicas: int = 1, **changes: Any) -> Pool:
    return Pool(**{"limits": LIMITS, "cost": COST, "num_replicas": num_replicas} | changes)


def request(at: float, prompt: int = 100, answer: int = 10, **fields: Any) -> Request:
    return Request(at, prompt, answer, answer, **fields)


def run(wanted: Sequence[Request], *pools: Pool, policy: str = "power-of-two", **conditions: Any) -> Tally:
    return Fleet(OpenLoop(iter(wanted)), pools or [pool()], Conditions(**conditions), policy).run()


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    wanted = [request(n, hashes=(7,), hash_tokens=64) for n in range(3)]
    tally = run(wanted)
    block = LIMITS.block_size
    assert (300, 2 * (64 // block) * block) == (tally.num_prompt_tokens, tally.num_cached_tokens)
    assert [0.020, 0.020 - 64e-4, 0.020 - 64e-4] == pytest.approx(list(tally.ttft))
    other = run([wanted[0], wanted[1]._replace(hashes=(8,))])
    assert 0 == other.num_cached_tokens


def test_affinity_finds_what_turns_compute_again() -> None:
    wanted = [request(n, hashes=(n % 5,), hash_tokens=64) for n in range(50)]
    affine, turns = (run(wanted, pool(4), policy=name).num_cached_tokens for name in ("prefix-affine", "round-robin"))
    assert affine == 45 * 64 > turns > 0


def test_a_delay_is_part_of_every_first_token_and_of_no_other() -> None:
    wanted = [request(0.0), request(0.005), request(1.0)]
    alone, behind = run(wanted), run(wanted, delay_s=0.25)
    assert [first + 0.25 for first in alone.ttft] == pytest.approx(list(behind.ttft))
    assert list(alone.tpot) == pytest.approx(list(behind.tpot))
    assert behind.ended_at == pytest.approx(alone.ended_at + 0.25)


def test_replicas_are_paid_for_until_the_last_arrival_and_no_longer() -> None:
    tally = run([request(5 * n) for n in range(80)], pool(12, price=3600.0))
    assert tally.price == tally.paid_seconds == pytest.approx(12 * 395)


def test_answers_go_on_where_their_keys_and_values_went() -> None:
    pools = [pool(1, role="prefill", kv_bytes=1e6), pool(1, role="decode")]
    tally = run([request(0.0)], *pools, link_bytes=1e9, link_s=0.005)
    assert 1e8 == tally.transferred
    assert [0.020] == pytest.approx(list(tally.ttft))
    # 101 tokens are known where it goes on, and those that fill no block are computed there.
    computed = 101 - 101 // LIMITS.block_size * LIMITS.block_size
    assert [0.020 + 0.105 + 9 * 0.010 + computed * 1e-4] == pytest.approx(list(tally.e2e), abs=1e-6)
    assert 10 == tally.num_tokens
    assert 10 == tally.num_given
    alone = run([request(0.0, answer=1)], *pools)
    assert (0, [0.020]) == (alone.transferred, pytest.approx(list(alone.e2e)))


def test_what_goes_on_nowhere_is_refused_and_not_sold() -> None:
    pools = [pool(1, role="prefill"), pool(1, role="decode", limits=ONE_AT_ONCE)]
    tally = run([request(0.0, answer=50), request(0.3)], *pools)
    assert (1, 1, 50) == (tally.num_refused, len(tally.e2e), tally.num_given)
    assert (200, 100) == (tally.num_prompt_tokens, tally.num_prompts_sold)


def test_a_fleet_is_the_same_from_the_same_seed() -> None:
    wanted = [request(n / 50, hashes=(n % 7,), hash_tokens=32) for n in range(500)]
    first, second = (run(wanted, pool(6), policy="power-of-two", seed=4) for _ in range(2))
    assert first == second
    assert 500 == len(first.e2e)
