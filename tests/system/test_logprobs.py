"""Log-probabilities of a real server on two shards, judged by transformers, as harnesses and OpenAI's client ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import httpx2
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.running import Server
from tests.server.conftest import DEMO

CONTEXT = "The little fox walked along the"
CONTINUATIONS = (" river in the morning sun.", " zebra quantum ☃ stock.", " old tree and found a ball.")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--num-shard", "2", "--max-batch-prefill-tokens", "16") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True).eval()


@torch.inference_mode()
def logprobs_of(oracle: Any, ids: Sequence[int]) -> torch.Tensor:
    """Of every token after each position of `ids`."""
    found: torch.Tensor = oracle(torch.tensor([list(ids)])).logits[0].log_softmax(dim=-1)
    return found


def expected_of(oracle: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The continuation's log-likelihood, and whether each of its tokens is the likeliest."""
    rows = logprobs_of(oracle, context + continuation)[len(context) - 1 : -1]
    targets = torch.tensor(continuation)
    return float(rows.gather(1, targets.unsqueeze(1)).sum()), bool((rows.argmax(-1) == targets).all())


def parsed(answer: dict[str, Any], ctxlens: list[int], num_generated: int) -> list[tuple[float, bool]]:
    """What EleutherAI's harness reads of an answer: sums of slices, and a token's number compared with the best one."""
    found = []
    for choice, ctxlen in zip(sorted(answer["choices"], key=itemgetter("index")), ctxlens, strict=True):
        end = len(choice["logprobs"]["token_logprobs"]) - num_generated
        values = choice["logprobs"]["token_logprobs"][ctxlen:end]
        tops = choice["logprobs"]["top_logprobs"][ctxlen:end]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), is_greedy))
    return found


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("num_generated", [0, 1])  # both are asked for: 1 by newer versions
@pytest.mark.parametrize("as_ids", [True, False])
def test_loglikelihoods_are_those_of_the_model(
    server: Server, tokenizer: Any, oracle: Any, num_generated: int, count: int, as_ids: bool
) -> None:
    context = tokenizer.encode(CONTEXT)
    likeliest = oracle.generate(torch.tensor([context]), max_new_tokens=5, do_sample=False)[0, len(context) :].tolist()
    continuations = [*(tokenizer.encode(text) for text in CONTINUATIONS), likeliest]
    prompts: list[Any] = [context + continuation for continuation in continuations]
    if not as_ids:
        prompts = [tokenizer.decode(ids) for ids in prompts]
    asked = {"model": "m", "prompt": prompts, "max_tokens": num_generated, "temperature": 0, "logprobs": count}
    answer = httpx2.post(f"{server.url}/v1/completions", json={**asked, "seed": 1234, "echo": True}, timeout=120)
    assert 200 == answer.status_code, answer.text
    found = parsed(answer.json(), [len(context)] * 4, num_generated)
    for (value, is_greedy), continuation in zip(found, continuations, strict=True):
        expected, is_expected_greedy = expected_of(oracle, context, continuation)
        assert expected == pytest.approx(value, abs=2e-3)
        assert is_expected_greedy == is_greedy
    assert found[-1][1] and not found[1][1]
    usage = answer.json()["usage"]
    assert (sum(len(context + c) for c in continuations), 4 * num_generated) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_candidates_of_a_prompt_are_the_models(server: Server, tokenizer: Any, oracle: Any) -> None:
    ids = tokenizer.encode(CONTEXT + CONTINUATIONS[1])
    asked = {"prompt": ids, "max_tokens": 0, "logprobs": 5, "echo": True}
    [choice] = httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=120).json()["choices"]
    assert CONTEXT + CONTINUATIONS[1] == choice["text"]
    best = logprobs_of(oracle, ids)[:-1].topk(5).values
    for row, top in zip(best, choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert row.tolist() == pytest.approx(sorted(top.values(), reverse=True)[:5], abs=1e-3)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.7, "top_p": 0.8, "seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {"300": 100}, "max_tokens": 3},  # what is forced is as unlikely as it was
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_openai_s_client_is_told_what_the_model_thought(
    server: Server, tokenizer: Any, oracle: Any, sampling: dict[str, Any]
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "m", "prompt": CONTEXT, "max_tokens": 12, "logprobs": 3, **sampling}
    answer = client.completions.create(**asked)
    told = answer.choices[0].logprobs
    assert told is not None and told.tokens is not None and told.token_logprobs is not None
    assert answer.choices[0].text == "".join(told.tokens)
    context = tokenizer.encode(CONTEXT)
    generated = tokenizer.encode(CONTEXT + answer.choices[0].text)[len(context) :]
    if "logit_bias" in sampling:
        generated = [300] * 3
    rows = logprobs_of(oracle, context + generated)[len(context) - 1 : -1]
    expected = rows.gather(1, torch.tensor(generated).unsqueeze(1)).flatten().tolist()
    assert expected == pytest.approx(told.token_logprobs, abs=2e-3)
    streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    assert answer.choices[0].text == "".join(part.text for part in streamed)
    values = [one for part in streamed if part.logprobs for one in part.logprobs.token_logprobs or []]
    assert values == pytest.approx(told.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("stop", [None, ["fox"]])
def test_openai_s_client_reads_a_chat_s_entries(server: Server, stop: list[str] | None) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": stop,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    text = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or []).decode()
    assert choice.message.content == text
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
    assert [entry.token for entry in choice.logprobs.content] == [entry.token for entry in entries]
