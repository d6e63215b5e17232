"""What engines propose, beside what a plain reference would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from server.stepping.engine import Engine
from tests.server.driver import PartlyRight, Prompt, generate
from tests.server.stepping.test_drafts import prompts, results

# All tokens of a sequence, how many of them are known, and how many are wanted → greedily chosen tokens that stand
# behind those, and the logits [V] by which each was.
Reference = Callable[[Sequence[int], int, int], Sequence[tuple[int, Tensor]]]


def check_answers(
    engine: Engine,
    *,
    asked: float = 0.7,
    seed: int = 0,
    make: Callable[[], list[Prompt]] = prompts,
    expected: Sequence[Prompt] | None = None,
) -> tuple[Sequence[Prompt], PartlyRight]:
    """Answers are those without proposals, though some are refused; the prompts, and what was noted.

    expected: what they are; None: the engine's own.
    """
    expected = generate(engine, make()) if expected is None else expected
    drafter = PartlyRight([p.tokens for p in expected], asked=asked, seed=seed)
    assert results(expected) == results(generate(engine, make(), drafter))
    assert drafter.noted and drafter.accepted > 10 and drafter.refused > 10
    return expected, drafter


def check_proposals(expected: Sequence[Prompt], drafter: PartlyRight, reference: Reference) -> None:
    """What was proposed for plain greedy sequences is what the reference proposes, as likely as it is there."""
    for got, proposal in drafter.noted:
        prompt, count = expected[proposal.id], len(proposal.token_ids)
        found = reference([*prompt.token_ids, *prompt.tokens], len(prompt.token_ids) + got, count)
        assert [token for token, _ in found] == proposal.token_ids, (proposal, got)
        logprobs = torch.stack([logits.log_softmax(0).max() for _, logits in found])
        torch.testing.assert_close(torch.tensor(proposal.logprobs), logprobs, atol=1e-4, rtol=0, check_dtype=False)


def hidden_states(folder: Path) -> Callable[[Sequence[int]], tuple[Tensor, ...]]:
    """Token ids → the residual stream before every layer, and final hidden states: [T, D] each."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    @torch.inference_mode()
    def get(token_ids: Sequence[int]) -> tuple[Tensor, ...]:
        key = tuple(token_ids)
        if key not in found:
            states = model(torch.tensor([key]), output_hidden_states=True).hidden_states
            found[key] = tuple(state[0] for state in states)
        return found[key]

    return get
