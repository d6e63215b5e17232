"""Thousands of answers behind guesses have the exact distribution that they have without, all tokens of each together.

A wrong rule for what counts of a draft would favour answers that were guessed, or those that were not: so it is the
answers that are counted, not their tokens one by one. The guesses are those of the router, right and wrong ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.drafting.drafter import Drafter, NgramDrafter, SuffixDrafter
from router.drafting.earlier_answers import EarlierAnswers
from server.backends.cpu import Kernels
from server.blocks import BLOCK_SIZE
from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine
from server.stepping.sampling import TokenChoice
from tests.server.conftest import DEMO
from tests.server.driver import all_logits, load_engine, sampled
from tests.server.stepping.exact_sampling import distribution, fit

SAMPLES, LENGTH, AT_ONCE = 6_000, 4, 250
EXPECTED = 30  # an answer that is expected less often is counted together with others that begin like it
# ".ily was happy. They were very happy. Ben was very happy. They were very much. They were very well. …" and then
# "They were very": the embedded model goes on with "happy", "much", "well", and mostly with another word.
VERY = [17, 453, 966, 474]
PROMPT = [17, 1893, 285, 614, *VERY, 614, 17, 931, 285, 474, 614, *VERY, 1002, *VERY, 957, *VERY, 614, *VERY]
METHODS: dict[str, Callable[[EarlierAnswers], Drafter]] = {
    "ngram": lambda _: NgramDrafter(PROMPT),
    "suffix": lambda answers: SuffixDrafter(PROMPT, answers, ("", "")),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "changed": {
        "temperature": 1.4,
        "top_k": 40,
        "top_p": 0.97,
        "min_p": 0.002,
        "typical_p": 0.98,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
}


def exact(engine: Engine, choice: TokenChoice) -> dict[tuple[int, ...], float]:
    """The probability of each beginning of an answer up to where there are too few samples to tell what follows."""

    def behind(tokens: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(tokens) == LENGTH or chance * SAMPLES < EXPECTED:
            yield tokens, chance
            return
        logits = all_logits(engine, PROMPT, tokens)[-1].tolist()
        for token, share in enumerate(distribution(logits, choice, prompt=PROMPT, generated=tokens)):
            yield from behind((*tokens, token), chance * share)

    return dict(behind((), 1.0))


def how_likely(answers: Sequence[Sequence[int]], expected: Mapping[tuple[int, ...], float]) -> float:
    """See `fit`."""
    kinds = {beginning: kind for kind, beginning in enumerate(expected)}
    beginnings = (tuple(answer[:n]) for answer in answers for n in range(1, LENGTH + 1))
    return fit([kinds[beginning] for beginning in beginnings if beginning in kinds], [*expected.values()])


class Crowd:
    """Sequences behind the same prompt that step together, each with a seed and a drafter of its own."""

    def __init__(self, engine: Engine, sampling: dict[str, Any], drafters: Sequence[Drafter], first_seed: int) -> None:
        self.num_right = self.num_wrong = 0
        self.answers: list[list[int]] = [[] for _ in drafters]
        self._engine = engine
        self._drafters = drafters
        self._open = [0] * len(drafters)  # tokens that each had when it got its last guess; 0: the engine knows the end
        blocks = itertools.count()
        shared = [next(blocks), next(blocks)]
        engine.launch(pb.StepRequest(reset=True))
        for places in (range(1), range(1, len(drafters))):  # the first one's prompt is the others' prefix
            request = pb.StepRequest()
            for place in places:
                known, own = (shared, next(blocks)), sampled(first_seed + place, **sampling)
                computed = len(shared) * BLOCK_SIZE if place else 0
                request.add.add(
                    id=place, token_ids=PROMPT, computed=computed, blocks=[*known[0], known[1]], sampling=own
                )
                request.chunk_ids.append(place)
                request.chunk_tokens.append(len(PROMPT) - computed)
            self._step(request)

    def run(self) -> None:
        """Go on until every answer is as long as it should be."""
        while under_way := [place for place, answer in enumerate(self.answers) if len(answer) < LENGTH]:
            request = pb.StepRequest()
            for place in under_way:
                self._draft(request, place)
            self._step(request)
        for drafter in self._drafters:
            drafter.end()

    def _draft(self, request: pb.StepRequest, place: int) -> None:
        answer, before = self.answers[place], self._open[place]
        guesses = self._drafters[place].guess(LENGTH - len(answer) - 1).token_ids
        request.drafts.add(
            id=place,
            position=len(PROMPT) + len(answer) - 1,
            token_ids=[answer[-1], *guesses],
            came=answer[before:] if before else [],
        )
        self._open[place] = len(answer) if guesses else 0

    def _step(self, request: pb.StepRequest) -> None:
        launched = self._engine.launch(request)
        assert launched is not None
        result, came = launched.finish(), dict[int, list[int]]()
        for place, token in zip(result.ids, result.token_ids, strict=True):
            came.setdefault(place, []).append(token)
        for place, tokens in came.items():
            self.answers[place] += tokens
            self._drafters[place].extend(tokens)
        for draft in request.drafts:
            self.num_right += len(came[draft.id]) - 1
            self.num_wrong += len(draft.token_ids) - len(came[draft.id])


@pytest.fixture(scope="module")
def engine(kernels: Kernels) -> Engine:
    return load_engine(DEMO, kernels=kernels, tokens=2 * AT_ONCE * BLOCK_SIZE, total_tokens=128, warms_up=False)


@pytest.mark.rest
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_answers_behind_guesses_have_the_exact_distribution(
    engine: Engine, method: Callable[[EarlierAnswers], Drafter], setting: dict[str, Any]
) -> None:
    engine.launch(pb.StepRequest(reset=True))
    choice = TokenChoice(**setting)
    expected, warmer = (
        exact(engine, replace(choice, temperature=temperature))
        for temperature in (choice.temperature, 1.1 * choice.temperature)
    )
    answers, earlier, num_right, num_wrong = list[list[int]](), EarlierAnswers(), 0, 0
    for first in range(0, SAMPLES, AT_ONCE):
        crowd = Crowd(engine, setting, [method(earlier) for _ in range(AT_ONCE)], first)
        crowd.run()
        answers += crowd.answers
        num_right, num_wrong = num_right + crowd.num_right, num_wrong + crowd.num_wrong
    assert min(num_right, num_wrong) > SAMPLES / 20
    assert how_likely(answers, expected) > 1e-3 > 1e-6 > how_likely(answers, warmer)
