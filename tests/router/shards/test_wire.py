"""What is wrong with a shard's reply, by what the step could bring."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from router.drafting.proposals import Proposal
from router.scheduling.plan import Extension, StepPlan
from router.scheduling.request import Entry
from router.shards.wire import mistake_in_step, proposals_of
from server.pb.generate_pb2 import StepReply


def plan_of(*ids: int, decoding: Collection[int] | None = None, **fields: Any) -> StepPlan[Entry]:
    """Step 1, of sequences with these ids, of which all go on or some do."""
    entries: dict[int, Any] = {id: SimpleNamespace(id=id) for id in ids}
    decodes = [entries[id] for id in ids if decoding is None or id in decoding]
    return StepPlan(1, decoding=decodes, concerned=entries, **fields)


def reply_of(ids: Sequence[int], token_ids: Sequence[int]) -> StepReply:
    counts = [0] * len(ids)
    return StepReply(step=1, ids=ids, token_ids=token_ids, logprobs=counts, top_counts=counts)


def test_who_was_computed_gets_a_token_and_nobody_else() -> None:
    plan = plan_of(7, 8, 9, 10, decoding=(7,), chunks={8: 3, 9: 2}, completed=[8], grown={10: [4]})
    assert None is mistake_in_step(reply_of([7, 8], [1, 2]), plan, 99)
    for id in (7, 8):
        rest = [other for other in (7, 8) if other != id]
        assert f"answered step 1 without a token of sequence {id}" == mistake_in_step(reply_of(rest, [1]), plan, 99)
    mistake = "answered step 1 with a token of sequence 11, which it did not compute"
    assert mistake == mistake_in_step(reply_of([7, 8, 11], [1, 2, 3]), plan, 99)
    plan.concerned[8].id = 12  # it was sent away meanwhile
    assert None is mistake_in_step(reply_of([7], [1]), plan, 99)


def test_a_reply_with_more_tokens_of_a_sequence_than_were_guessed_is_a_mistake() -> None:
    plan = plan_of(7, 8, decoding=(8,), drafts={7: Extension(3, [1, 2, 3], ())})

    def mistake(ids: Sequence[int], token_ids: Sequence[int]) -> str | None:
        return mistake_in_step(reply_of(ids, token_ids), plan, 99)

    assert None is mistake([7, 7, 7, 8], [2, 3, 9, 9])
    assert "answered step 1 with 4 tokens of sequence 7, which could get 3" == mistake([7, 7, 8, 7, 7], [2, 3, 9, 9, 9])
    assert "answered step 1 with 2 tokens of sequence 8, which could get 1" == mistake([7, 8, 8], [2, 3, 4])
    assert "answered step 1 with tokens behind a guess of sequence 7 that was wrong" == mistake(
        [7, 7, 7, 8], [2, 4, 9, 9]
    )


@pytest.mark.parametrize(
    ("changed", "mistake"),
    [
        ({}, None),
        ({"proposal_ids": [7, 9]}, "answered step 1 with proposals for sequences that were not asked about, or twice"),
        ({"proposal_ids": [7, 7]}, "answered step 1 with proposals for sequences that were not asked about, or twice"),
        ({"proposal_counts": [0, 3]}, "answered step 1 with 3 proposals for a sequence, and 2 were asked for"),
        ({"proposal_ids": []}, "answered step 1 with proposals in columns of different lengths"),
        ({"proposal_counts": [2, 2]}, "answered step 1 with proposals in columns of different lengths"),
        ({"proposal_logprobs": [0.0]}, "answered step 1 with proposals in columns of different lengths"),
        ({"proposal_logprobs": [0.0, math.nan, 0.0]}, "answered step 1 with proposals that have no probability"),
        ({"proposal_tokens": [1, 99, 3]}, "proposed token 99 of a vocabulary of 99"),
    ],
)
def test_proposals_are_what_was_asked_for(changed: dict[str, Any], mistake: str | None) -> None:
    columns = {"proposal_ids": [7, 8], "proposal_counts": [2, 1], "proposal_tokens": [1, 2, 3]}
    reply = StepReply(step=1, **{**columns, "proposal_logprobs": [-1.0, -2.0, -0.5], **changed})
    assert mistake == mistake_in_step(reply, StepPlan(1, proposals=2, proposed=[8, 7]), 99)
    if mistake is None:
        assert {7: Proposal((1, 2), (-1.0, -2.0)), 8: Proposal((3,), (-0.5,))} == proposals_of(reply)
