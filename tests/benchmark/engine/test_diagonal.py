"""FlexGen's diagonal block: who enters when, the memory that follows, and the tokens of each prompt run alone."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmark.cost.step_times import StepWork
from benchmark.engine import schedules
from benchmark.engine.generation import Prompt, TimedShards, generate
from benchmark.engine.schedules import DIAGONAL, ROW, ZIG_ZAG, Policy, planned
from benchmark.result import BenchError
from router.shards.client import ShardError
from tests.benchmark.commands.test_offline import WORK, words
from tests.router.fake_shards import FakeShardedClient


def equal(count: int, given: int, generated: int) -> list[Prompt]:
    return [Prompt([5] * given, generated) for _ in range(count)]


def drawn(count: int) -> list[Prompt]:
    draw = random.Random(3)
    return [
        Prompt([draw.randrange(256) for _ in range(draw.randint(1, 30))], draw.randint(1, 12)) for _ in range(count)
    ]


def ran(
    plan: schedules.DiagonalPlan, prompts: list[Prompt], block_size: int
) -> tuple[list[list[int]], FakeShardedClient]:
    """On shards that have not one block, sequence or prompt token more than the plan says."""
    fake = FakeShardedClient(
        max_batch_total_tokens=plan.num_blocks * block_size,
        block_size=block_size,
        max_batch_size=plan.at_once,
        max_batch_prefill_tokens=max(work.prompt_tokens for work in plan.works),
        lends_blocks=True,
    )
    tokens = asyncio.run(schedules.generate_diagonally(fake, plan, prompts, block_size, 256))
    assert set() == fake.live_ids
    return tokens, fake


def alone(prompt: Prompt) -> list[int]:
    """What row by row gives, a batch of one."""
    fake = FakeShardedClient(max_batch_total_tokens=4096, max_batch_size=1, max_batch_prefill_tokens=64)
    limits = Policy(ROW, 1, 1).limits([prompt], block_size=16, vocab_size=256, prefill_tokens=64)
    (tokens,) = asyncio.run(generate(TimedShards(fake, WORK), words(), limits, [prompt], gang=1))
    return tokens


def test_batches_enter_one_step_after_the_other_and_work_is_level() -> None:
    """Four batches of 2 for four tokens: from step 3 on, each step has 2 prompts of 3 tokens and 6 that decode."""
    plan = schedules.diagonal_plan(equal(2 * 8, 3, 4), 4, 2, 1)
    entering = [sorted({number // 2 for number in step.entering}) for step in plan.steps]
    assert [[batch] for batch in range(8)] + [[]] * 4 == entering
    leaving = [sorted({number // 2 for number in step.leaving}) for step in plan.steps]
    assert [[]] * 4 + [[batch] for batch in range(8)] == leaving
    assert range(3, 8) == plan.level
    # Those that decode look at 4, 5 and 6 keys, each twice.
    whole = StepWork(2 * 3, 2 * 9 / 2, 0, 6, 2 * (4 + 5 + 6), 8)
    assert [whole] * 5 == [plan.steps[number].work for number in plan.level]
    # At their ends they hold 3, 4, 5 and 6 tokens: 18 of a zig-zag block's 7 × 4 (its last token has a place, too).
    assert (2 * (3 + 4 + 5 + 6), 8) == (plan.num_blocks, plan.at_once)


def test_fewer_batches_than_tokens_enter_evenly() -> None:
    plan = schedules.diagonal_plan(equal(4, 3, 8), 2, 1, 1)
    assert [[0], [], [], [], [1], [], [], [], [2], [], [], [], [3]] == [list(one.entering) for one in plan.steps[:13]]
    assert range(4, 16) == plan.level
    # Right before one enters, one holds 3 + 7 tokens and the other one 3 + 3.
    assert 16 == plan.num_blocks == schedules.level_blocks(3, 8, 2, 1, 1)


def test_a_block_of_one_batch_is_row_by_row() -> None:
    prompts = equal(6, 5, 4)
    limits = Policy(ROW, 1, 2).limits(prompts, block_size=16, vocab_size=256, prefill_tokens=64)
    assert planned(Policy(ROW, 1, 2), prompts, limits) == schedules.diagonal_plan(prompts, 1, 2, 16).works


def test_the_memory_of_the_seed_by_hand() -> None:
    """512 tokens in, 32 out, 32 batches of 8, which stand at ages 0 to 31 and have written 512 + age tokens."""
    assert 8 * (32 * 512 + 31 * 32 // 2) == 135_040 == schedules.level_blocks(512, 32, 32, 8, 1)
    # In blocks of 16: one of them has 32, those of ages 1 to 16 have 33, the other 15 have 34. Zig-zag has 34 each.
    assert 8 * (32 + 16 * 33 + 15 * 34) == 8560 == schedules.level_blocks(512, 32, 32, 8, 16)
    assert 8560 == schedules.diagonal_plan(equal(8 * 96, 512, 32), 32, 8, 16).num_blocks
    assert 0.983 == pytest.approx(8560 / (8 * 32 * 34), abs=5e-4)


def test_how_much_larger_a_block_can_be() -> None:
    """By the paper (2s + 2g) / (2s + g) times: 1.03 for the seed, so that not one batch more fits, and up to 2."""
    assert [4, 8, 16, 32] == [schedules.fitting_batches(512, 32, count, 16) for count in (4, 8, 16, 32)]
    for given, generated in ((512, 32), (256, 256), (32, 480)):
        wanted = 64 * (2 * given + 2 * generated) / (2 * given + generated)
        assert wanted == pytest.approx(schedules.fitting_batches(given, generated, 64, 1), rel=0.02)
    room = 64 * (32 + 480)
    found = schedules.fitting_batches(32, 480, 64, 1)
    assert schedules.level_blocks(32, 480, found, 1, 1) <= room < schedules.level_blocks(32, 480, found + 1, 1, 1)


@pytest.mark.parametrize(("num_batches", "batch_size"), [(1, 1), (2, 3), (5, 2), (12, 1), (30, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_tokens_are_those_of_row_by_row_and_the_memory_is_what_was_computed(
    num_batches: int, batch_size: int, block_size: int
) -> None:
    prompts = drawn(33)
    plan = schedules.diagonal_plan(prompts, num_batches, batch_size, block_size)
    tokens, fake = ran(plan, prompts, block_size)
    assert [alone(prompt) for prompt in prompts] == tokens
    in_use = {block for block, _ in fake._written}  # measured: what shards wrote to, with no block more to have
    assert plan.num_blocks == len(in_use)
    bound = schedules.level_blocks(
        max(len(one.token_ids) for one in prompts), max(one.max_new_tokens for one in prompts),
        num_batches, batch_size, block_size,
    )  # fmt: skip
    assert plan.num_blocks <= bound and plan.at_once <= num_batches * batch_size


def test_blocks_in_use_at_once_are_those_of_the_plan() -> None:
    """Counted anew: each sequence's tokens written so far, in whole blocks, in every step."""
    prompts = drawn(40)
    plan = schedules.diagonal_plan(prompts, 4, 3, 4)
    most, running = 0, dict[int, int]()
    for step in plan.steps:
        for number in step.leaving:
            del running[number]
        running = {number: written + 1 for number, written in running.items()}
        running |= {number: len(prompts[number].token_ids) for number in step.entering}
        most = max(most, sum(-(-written // 4) for written in running.values()))
    assert most == plan.num_blocks


def test_a_policy_takes_the_memory_of_zig_zag_and_no_more() -> None:
    prompts = equal(2 * 60, 16, 112)
    zig_zag, level = Policy(ZIG_ZAG, 8, 2), Policy(DIAGONAL, 8, 2)
    # 12 batches at their closest: 16 batches would hold 2 × 16 × 8 blocks at their ends, half of that on average.
    assert (2 * 8 * 8, 16) == (zig_zag.kv_blocks(prompts, 16), zig_zag.at_once(prompts, 16))
    assert 24 == level.at_once(prompts, 16)
    assert level.kv_blocks(prompts, 16) <= zig_zag.kv_blocks(prompts, 16)


def test_the_rate_while_the_block_is_whole() -> None:
    """Steps 3 to 7 of twelve, 8 tokens each; those before take ten times as long."""
    plan = schedules.diagonal_plan(equal(2 * 8, 3, 4), 4, 2, 1)
    assert 5 * 8 / (5 * 0.5) == plan.level_rate([5.0] * 3 + [0.5] * 9)
    assert (
        schedules.diagonal_plan(equal(4, 3, 8), 8, 1, 1).level_rate([1.0] * 16) is None
    )  # four prompts make no block of 8


def test_what_the_shards_say_of_a_failure_is_raised() -> None:
    prompts = equal(4, 3, 4)
    plan = schedules.diagonal_plan(prompts, 2, 1, 16)
    for fake, error in (
        (FakeShardedClient(lends_blocks=True, failing_steps={3: "out of memory"}), BenchError),
        (FakeShardedClient(lends_blocks=True, deaths=[3]), ShardError),
    ):
        with pytest.raises(error, match="out of memory" if error is BenchError else "killed"):
            asyncio.run(schedules.generate_diagonally(fake, plan, prompts, 16, 256))
