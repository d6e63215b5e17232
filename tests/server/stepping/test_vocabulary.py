"""Ranks that exchange candidates choose what one rank with the whole vocabulary chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from server.backends.cpu.device import CpuDevice
from server.backends.protocol import Logits
from server.backends.reference.linear import DenseFormat
from server.backends.reference.logits import NUCLEUS_CANDIDATES, StockLogits
from server.blocks import ceil_divide
from server.layers.embedding import Head
from server.ranks.collectives import Shard
from server.stepping.logit_rules import History, RecentTokens, TokenBiases
from server.stepping.sampling import Chosen, Sampler, TokenChoice, Watermark
from server.stepping.vocabulary import Vocabulary

CPU = CpuDevice()
PROMPT = [1, 5, 900, 5]
WORDS = tuple((5, last) for last in range(0, 1501, 2))  # token 5 is the last of the prompt
CHOICES = {
    "greedy": TokenChoice(),
    "greedy with candidates": TokenChoice(top_n_tokens=5),
    "sampled": TokenChoice(do_sample=True, seed=3),
    "top-k": TokenChoice(do_sample=True, top_k=40, seed=4),
    "top-p": TokenChoice(do_sample=True, top_p=0.9, seed=5, top_n_tokens=2),
    "top-k and top-p": TokenChoice(do_sample=True, top_k=60, top_p=0.8, temperature=1.3, seed=6),
    "typical-p": TokenChoice(do_sample=True, typical_p=0.7, seed=7),
    "penalties": TokenChoice(do_sample=True, repetition_penalty=1.4, frequency_penalty=0.5, seed=8),
    "presence": TokenChoice(do_sample=True, presence_penalty=1.5, seed=10),
    "min-p": TokenChoice(do_sample=True, min_p=0.1, temperature=1.2, seed=11),
    "biases": TokenChoice(biases=TokenBiases(((3, 9.0), (1400, 9.5), (900, -3.0))), top_n_tokens=5),
    "banned words": TokenChoice(do_sample=True, seed=12, biases=TokenBiases(banned_words=WORDS)),
    "ends": TokenChoice(do_sample=True, seed=13, biases=TokenBiases(end_ids=tuple(range(0, 1501, 2)), first_end=99)),
    "raw": TokenChoice(do_sample=True, top_k=3, top_n_tokens=5, seed=14, raw_logprobs=True),
    "raw of biased": TokenChoice(biases=TokenBiases(((1, 99.0),)), raw_logprobs=True),
    "watermark": TokenChoice(do_sample=True, watermark=True, seed=9),
}


class Meeting:
    """Where ranks that are threads meet; counts what each of them sends."""

    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.sent: list[Tensor | None] = [None] * world_size
        self.elements = 0


class ThreadShard(Shard):
    """A rank that is a thread."""

    def __init__(self, rank: int, world_size: int, meeting: Meeting):
        super().__init__(rank, world_size)
        object.__setattr__(self, "meeting", meeting)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        meeting: Meeting = self.meeting  # type: ignore[attr-defined]
        meeting.sent[self.rank] = tensor
        if self.rank == 0:
            meeting.elements += tensor.numel()
        meeting.barrier.wait()
        parts = [part for part in meeting.sent if part is not None]
        meeting.barrier.wait()
        return parts


def sample(logits: Tensor, choices: Sequence[TokenChoice], vocabulary: Vocabulary) -> Chosen:
    sampler = Sampler(choices, Watermark(0.5, 2.0), CPU, vocabulary)
    histories = [History(PROMPT, 1, vocabulary, CPU) if c.needs_history else None for c in choices]
    recents = [RecentTokens(PROMPT[-1:], CPU) if c.biases.banned_words else None for c in choices]
    return sampler(logits.clone(), torch.arange(len(choices)), torch.arange(len(choices)) + 7, histories, recents)


def on_ranks(
    logits: Tensor, world_size: int, make: Callable[[], Logits], use: Callable[[Tensor, Vocabulary], Chosen]
) -> tuple[list[Chosen], int]:
    """What each rank finds, and how many numbers a rank sent."""
    size, meeting = logits.shape[1], Meeting(world_size)
    width = ceil_divide(size, world_size)
    padded = torch.nn.functional.pad(logits, (0, width * world_size - size), value=float("-inf"))

    def rank(index: int) -> Chosen:
        start = index * width
        vocabulary = Vocabulary(make(), ThreadShard(index, world_size, meeting), size, start, width)
        return use(padded[:, start : start + width].contiguous(), vocabulary)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size))), meeting.elements


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("spread", [4.0, 0.1], ids=["peaked", "flat"])  # flat: top-p reaches beyond the candidates
def test_ranks_choose_what_one_rank_chooses(make_logits: Callable[[], Logits], world_size: int, spread: float) -> None:
    choices = list(CHOICES.values())
    logits = torch.randn(len(choices), 1501, generator=torch.Generator().manual_seed(1)) * spread
    whole = sample(logits, choices, Vocabulary(make_logits(), Shard(), logits.shape[1]))
    ranks, _ = on_ranks(logits, world_size, make_logits, lambda part, vocabulary: sample(part, choices, vocabulary))
    for chosen in ranks:
        assert whole.token_ids.tolist() == chosen.token_ids.tolist()
        assert whole.top_ids is not None and chosen.top_ids is not None
        assert whole.top_ids.tolist() == chosen.top_ids.tolist()
        torch.testing.assert_close(whole.logprobs, chosen.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(whole.top_logprobs, chosen.top_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("top_n", [0, 1, 5])
def test_of_equally_likely_tokens_the_smallest_id_is_chosen_whatever_else_is_asked(
    make_logits: Callable[[], Logits], world_size: int, top_n: int
) -> None:
    logits = torch.randint(0, 4, (20, 61), generator=torch.Generator().manual_seed(4)).float()  # ties everywhere
    choices = [TokenChoice(top_n_tokens=top_n)] * 20
    if world_size == 1:
        ranks = [sample(logits, choices, Vocabulary(make_logits(), Shard(), logits.shape[1]))]
    else:
        ranks, _ = on_ranks(logits, world_size, make_logits, lambda part, v: sample(part, choices, v))
    best = logits.sort(dim=-1, descending=True, stable=True).indices
    for chosen in ranks:
        assert best[:, 0].tolist() == chosen.token_ids.tolist()
        if top_n:
            assert chosen.top_ids is not None and best[:, :top_n].tolist() == chosen.top_ids.tolist()
        else:
            assert chosen.top_ids is None


def test_a_nucleus_of_just_all_candidates_is_not_the_whole_vocabulary() -> None:
    for seed in range(12):
        logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(seed)) * 3
        best = logits.view(2, -1).topk(NUCLEUS_CANDIDATES).values
        known = best.flatten()[best.flatten() >= best[:, -1].max()].sort(descending=True).values
        p = (known - logits.logsumexp(-1)).exp().sum().view(1, 1)  # at the edge of what the candidates hold
        keep = lambda part, vocabulary, p=p: vocabulary.top_p_threshold(part, p)  # noqa: E731
        whole = Vocabulary(StockLogits(), Shard(), 3000).top_p_threshold(logits, p)
        for threshold in on_ranks(logits, 2, StockLogits, keep)[0]:  # type: ignore[arg-type]
            kept, wanted = int((logits >= threshold).sum()), int((logits >= whole).sum())
            assert abs(kept - wanted) <= 2  # sums of another order round in another way


@pytest.mark.parametrize(
    ("name", "most"), [("greedy", 3), ("sampled", 6), ("min-p", 7), ("top-k", 50), ("top-p", 2 * NUCLEUS_CANDIDATES)]
)
def test_what_ranks_send_does_not_grow_with_the_vocabulary(name: str, most: int) -> None:
    logits = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(2)) * 4
    _, sent = on_ranks(logits, 2, StockLogits, lambda part, vocabulary: sample(part, [CHOICES[name]], vocabulary))
    assert 0 < sent <= most


@pytest.mark.parametrize("world_size", [2, 3])
def test_log_probabilities_of_a_prompt_are_the_whole_vocabularys(world_size: int) -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(3))
    targets = torch.tensor([0, 33, 34, 66, 67, 99])

    def logprobs(part: Tensor, vocabulary: Vocabulary) -> Chosen:
        found = vocabulary.logprobs(part, targets)
        return Chosen(targets, found, targets, found)

    ranks, _ = on_ranks(logits, world_size, StockLogits, logprobs)
    expected = logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    for rank in ranks:
        torch.testing.assert_close(expected, rank.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_token_among_the_candidates_has_their_very_number(
    make_logits: Callable[[], Logits], world_size: int, dtype: torch.dtype
) -> None:
    """Clients compare the two to see whether a token was the likeliest."""
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(6)).mul(5).to(dtype)
    best = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :4]

    def known(part: Tensor, vocabulary: Vocabulary) -> Chosen:
        found = vocabulary.summarise(part, 4)
        values = torch.stack([vocabulary.logprobs(part, best[:, n], found.log_totals) for n in range(4)], dim=1)
        return Chosen(best[:, 0], values[:, 0], found.top_ids, values - (found.top_logits - found.log_totals))

    if world_size == 1:
        ranks = [known(logits, Vocabulary(make_logits(), Shard(), 100))]
    else:
        ranks, _ = on_ranks(logits, world_size, make_logits, known)
    for rank in ranks:
        assert rank.top_ids is not None and best.tolist() == rank.top_ids.tolist()
        assert rank.top_logprobs is not None and {0.0} == set(rank.top_logprobs.flatten().tolist())
        torch.testing.assert_close(logits.float().log_softmax(-1).amax(-1), rank.logprobs, atol=1e-5, rtol=1e-5)


def test_a_nucleus_keeps_ties_however_many_ranks_there_are() -> None:
    logits = torch.zeros(1, 8)
    logits[0, [1, 6]] = 3.0  # equally likely, and in the parts of different ranks
    keep = lambda part, vocabulary: vocabulary.top_p_threshold(part, torch.tensor([[0.3]]))  # noqa: E731
    ranks, _ = on_ranks(logits, 2, StockLogits, keep)  # type: ignore[arg-type]
    assert [[[3.0]]] * 2 == [threshold.tolist() for threshold in ranks]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("cap", "dtype"), [(0.0, torch.bfloat16), (30.0, torch.float32)])
def test_a_head_rounds_logits_no_more_than_its_product_does(cap: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, rows = (torch.randn(n, 16, generator=generator).bfloat16() for n in (3, 4))
    spec: Any = SimpleNamespace(vocab_size=7, head_scale=0.5, logit_cap=cap)
    logits = Head(DenseFormat(rows), None, spec, Shard(1, 2), 0)(hidden)  # of 7 tokens the second rank has 3
    product = (hidden * 0.5) @ rows.T
    assert dtype == logits.dtype
    expected = cap * torch.tanh(product.float() / cap) if cap else product
    assert torch.equal(expected[:, :3], logits[:, :3])
    assert [float("-inf")] * 3 == logits[:, 3].tolist()
