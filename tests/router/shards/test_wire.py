"""What is wrong with a shard's reply, by what the step could bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from router.drafting.proposals import Proposal
from router.scheduling.plan import Extension
from router.shards.wire import mistake_in, proposals_of
from server.pb.generate_pb2 import StepReply


def test_a_reply_with_more_tokens_of_a_sequence_than_were_guessed_is_a_mistake() -> None:
    drafts = {7: Extension(3, [1, 2, 3], ())}

    def mistake(ids: Sequence[int], token_ids: Sequence[int]) -> str | None:
        counts = [0] * len(ids)
        reply = StepReply(step=1, ids=ids, token_ids=token_ids, logprobs=counts, top_counts=counts)
        return mistake_in(reply, 1, 99, drafts)

    assert None is mistake([7, 7, 7, 8], [2, 3, 9, 9])
    assert "answered step 1 with 4 tokens of sequence 7, which could get 3" == mistake([7, 7, 8, 7, 7], [2, 3, 9, 9, 9])
    assert "answered step 1 with 2 tokens of sequence 8, which could get 1" == mistake([7, 8, 8], [2, 3, 4])
    assert "answered step 1 with tokens behind a guess of sequence 7 that was wrong" == mistake([7, 7, 7], [2, 4, 9])


@pytest.mark.parametrize(
    ("changed", "mistake"),
    [
        ({}, None),
        ({"proposal_ids": [7, 9]}, "answered step 1 with proposals for sequences that were not asked about, or twice"),
        ({"proposal_ids": [7, 7]}, "answered step 1 with proposals for sequences that were not asked about, or twice"),
        ({"proposal_counts": [0, 3]}, "answered step 1 with 3 proposals for a sequence, and 2 were asked for"),
        ({"proposal_counts": [2, 2]}, "answered step 1 with proposals in columns of different lengths"),
        ({"proposal_logprobs": [0.0]}, "answered step 1 with proposals in columns of different lengths"),
        ({"proposal_logprobs": [0.0, math.nan, 0.0]}, "answered step 1 with proposals that have no probability"),
        ({"proposal_tokens": [1, 99, 3]}, "proposed token 99 of a vocabulary of 99"),
    ],
)
def test_proposals_are_what_was_asked_for(changed: dict[str, Any], mistake: str | None) -> None:
    columns = {"proposal_ids": [7, 8], "proposal_counts": [2, 1], "proposal_tokens": [1, 2, 3]}
    reply = StepReply(step=1, **{**columns, "proposal_logprobs": [-1.0, -2.0, -0.5], **changed})
    assert mistake == mistake_in(reply, 1, 99, {}, 2, [8, 7])
    if mistake is None:
        assert {7: Proposal((1, 2), (-1.0, -2.0)), 8: Proposal((3,), (-0.5,))} == proposals_of(reply)
