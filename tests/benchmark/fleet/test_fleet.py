"""Fleets in virtual time: prefixes, failures, restarts, and prompts apart from answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmark.cost.step_times import Fixed
from benchmark.fleet.fleet import Fleet
from benchmark.fleet.pools import Conditions, Pool
from benchmark.fleet.prediction import figures
from benchmark.fleet.replica import Tally
from benchmark.fleet.traffic import OpenLoop, Request
from tests.router.doubles import make_limits

LIMITS = make_limits(prefix_caching=True, max_batch_total_tokens=4096, max_batch_prefill_tokens=512)
COST = Fixed(0.010, 0.0001)
ONE_AT_ONCE = make_limits(
    prefix_caching=True, max_batch_total_tokens=4096, max_batch_prefill_tokens=512, max_concurrent_requests=1
)


def pool(num_replicas: int = 1, **changes: Any) -> Pool:
    return Pool(**{"name": "all", "limits": LIMITS, "cost": COST, "num_replicas": num_replicas} | changes)


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


def test_what_a_failed_replica_had_is_sent_again_after_a_while() -> None:
    tally = run([request(0.0)], pool(2), failures_at=(0.05, 0.0501), retries=3, startup_s=0.2, backoff_s=0.1)
    assert (0, 1, 1) == (tally.num_refused, len(tally.e2e), tally.num_lost)
    assert tally.num_retried >= 1
    assert tally.ttft[0] > 0.05 + 0.05  # from the first sending, with at least half a back-off
    given_up = run([request(0.0)], pool(1), failures_at=(0.05,))
    assert (1, 1, 0) == (given_up.num_lost, given_up.num_refused, len(given_up.e2e))


def test_what_a_lost_request_was_given_is_not_sold() -> None:
    """Its prompt takes 0.02 s and a token 0.01: it has four tokens when its replica fails, and none is kept."""
    wanted = [request(0.0), request(9.0)]
    tally = run(wanted, failures_at=(0.055,), retries=1, startup_s=0.01)
    assert (1, 2, 300) == (tally.num_lost, len(tally.e2e), tally.num_prompt_tokens)
    assert 20 == tally.num_tokens == tally.num_given
    assert (10, 100, 200) == (tally.given_by_then, tally.prompts_by_then, tally.num_prompts_sold)
    given_up = run(wanted, failures_at=(0.055,), startup_s=0.01)
    assert (10, 0, 100) == (given_up.num_given, given_up.given_by_then, given_up.num_prompts_sold)
    waiting = run([request(0.0), request(0.015)], failures_at=(0.016,), retries=1, startup_s=0.01)
    assert (20, 300, 200) == (waiting.num_given, waiting.num_prompt_tokens, waiting.num_prompts_sold)


def test_what_goes_on_nowhere_is_not_sold() -> None:
    pools = [pool(1, name="p", role="prefill"), pool(1, name="d", role="decode", limits=ONE_AT_ONCE)]
    tally = run([request(0.0, answer=50), request(0.3)], *pools, retries=5)
    assert tally.num_retried > 0 and 2 == len(tally.e2e)
    assert 60 == tally.num_given == tally.num_tokens
    assert 200 == tally.num_prompts_sold < tally.num_prompt_tokens
    second = run([request(0.0)], *pools, failures_at=(0.1,) * 8, retries=5, startup_s=0.01)
    assert second.num_lost > 0 and (10, 100) == (second.num_given, second.num_prompts_sold)


def test_failures_come_as_often_as_they_should() -> None:
    wanted = [request(n / 10, answer=100) for n in range(3000)]  # a second each, one on each replica
    tally = run(wanted, pool(10), mean_life_s=30.0, startup_s=1.0, retries=8)
    assert 3000 == len(tally.e2e)
    assert 60 < tally.num_lost < 160  # 300 s x 10 / 30 s
    assert tally.num_retried >= tally.num_lost


def test_a_rolling_restart_loses_nothing_and_forgets_prefixes() -> None:
    wanted = [request(n / 10, hashes=(1,), hash_tokens=64) for n in range(200)]
    tally, calm = (run(wanted, pool(3), restarts_at=at, startup_s=2.0, policy="round-robin") for at in ((5.0,), ()))
    assert (200, 0, 0) == (len(tally.e2e), tally.num_lost, tally.num_refused)
    assert calm.num_cached_tokens == 197 * 64
    assert tally.num_cached_tokens == 194 * 64  # each of the three computed it once more


def test_a_delay_is_part_of_every_first_token_and_of_no_other() -> None:
    wanted = [request(0.0), request(0.005), request(1.0)]
    alone, behind = run(wanted), run(wanted, delay_s=0.25)
    assert [first + 0.25 for first in alone.ttft] == pytest.approx(list(behind.ttft))
    assert list(alone.tpot) == pytest.approx(list(behind.tpot))
    assert behind.ended_at == pytest.approx(alone.ended_at + 0.25)
    lost = run([request(0.0)], failures_at=(0.26,), retries=1, startup_s=0.01, delay_s=0.25)
    assert (1, 1) == (lost.num_lost, len(lost.e2e))
    assert lost.ttft[0] > 0.26 + 0.05 + 0.25  # what is sent again is delayed again


def test_slow_replicas_take_longer() -> None:
    tally = run([request(0.0)], slow_share=1.0, slow_factor=3.0)
    assert [0.060] == pytest.approx(list(tally.ttft))


def test_replicas_are_paid_for_until_the_last_arrival_and_no_longer() -> None:
    tally = run([request(5 * n) for n in range(80)], pool(12, price=3600.0))
    assert tally.replica_seconds == pytest.approx(12 * tally.ended_at)
    assert tally.price == tally.paid_seconds == pytest.approx(12 * 395)


def test_answers_go_on_where_their_keys_and_values_went() -> None:
    pools = [pool(1, name="p", role="prefill", kv_bytes=1e6), pool(1, name="d", role="decode")]
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


def test_each_replica_s_cache_is_a_share_of_its_own_blocks() -> None:
    """One request of 110 tokens in a pool of 512 tokens, and two in one of 4,096, whichever pool is the first."""
    small = make_limits(prefix_caching=False, max_batch_total_tokens=512, max_batch_prefill_tokens=512)
    large = make_limits(prefix_caching=False, max_batch_total_tokens=4096, max_batch_prefill_tokens=512)
    wanted = [request(0.0, model=model) for model in "abb"]
    pools = [pool(1, name=name, model=name, limits=limits) for name, limits in (("a", small), ("b", large))]
    for both in (pools, pools[::-1]):
        row = figures(run(wanted, *both), 2, (None, None))
        block = small.block_size
        reserved = -(-110 // block) * block
        assert row["kv_share"]["peak"] == pytest.approx(reserved / 512)
        assert reserved / 4096 < row["kv_share"]["mean"] < reserved / 512


def test_models_have_pools_of_their_own() -> None:
    wanted = [request(n, model="ab"[n % 2]) for n in range(10)]
    slow = pool(name="b", model="b", cost=Fixed(0.1))
    tally = run(wanted, pool(name="a", model="a"), slow)
    assert [0.020, 0.1] * 5 == pytest.approx(list(tally.ttft))


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ([pool(), pool()], "two pools have one name, of all, all: give each its own"),
        (
            [pool(role="prefill")],
            "the pools have roles prefill: give them all `both`, or some `prefill` and the others",
        ),
        ([pool(model="m", role="decode")], "the pools of model m have roles decode"),
    ],
)
def test_pools_that_cannot_serve_together_are_refused(pools: Sequence[Pool], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run([request(0.0)], *pools)


def test_a_fleet_is_the_same_from_the_same_seed() -> None:
    wanted = [request(n / 50, hashes=(n % 7,), hash_tokens=32) for n in range(500)]
    chaos = {"mean_life_s": 5.0, "startup_s": 0.5, "retries": 9, "slow_share": 0.3, "slow_factor": 2.0, "seed": 4}
    first, second = (run(wanted, pool(6), policy="prefix-affine", **chaos) for _ in range(2))
    assert first == second
    assert 500 == len(first.e2e)
