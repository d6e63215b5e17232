"""What is wrong with a shard's reply, by what the step could bring."""

from __future__ import annotations

from router.scheduling.plan import Extension
from router.shards.wire import mistake_in
from server.pb.generate_pb2 import StepReply


def test_a_reply_with_more_tokens_of_a_sequence_than_were_guessed_is_a_mistake() -> None:
    drafts = {7: Extension(3, [1, 2, 3], ())}

    def mistake(*ids: int) -> str | None:
        count = len(ids)
        return mistake_in(
            StepReply(step=1, ids=ids, token_ids=ids, logprobs=ids, top_counts=[0] * count), 1, 99, drafts
        )

    assert None is mistake(7, 7, 7, 8)
    assert "answered step 1 with 4 tokens of sequence 7, which could get 3" == mistake(7, 7, 8, 7, 7)
    assert "answered step 1 with 2 tokens of sequence 8, which could get 1" == mistake(7, 8, 8)
