"""TGI's own client, text-generation 0.7.0, as its documentation uses it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

import pytest
from text_generation import AsyncClient, Client
from text_generation.errors import OverloadedError, UnknownError, ValidationError
from text_generation.types import FinishReason, Grammar, GrammarType, Message

URL = os.environ["SERVER_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['SERVER_KEY']}"}
MESSAGES = [Message(role="user", content="Hello")]
NUMBER = {"type": "integer", "maximum": 99, "minimum": 0}
SCHEMA = {"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False}


@pytest.fixture
def client() -> Client:
    return Client(URL, headers=HEADERS, timeout=60)


@pytest.fixture
def async_client() -> AsyncClient:
    return AsyncClient(URL, headers=HEADERS, timeout=60)


def test_generate_with_details(client: Client) -> None:
    answer = client.generate("Hello", max_new_tokens=8, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text
    assert answer.details.generated_tokens == len(answer.details.tokens) <= 8
    assert answer.details.prefill and answer.details.top_tokens
    assert answer.details.finish_reason in FinishReason


def test_a_stream_is_what_generate_gives(client: Client) -> None:
    whole = client.generate("Hello", max_new_tokens=8).generated_text
    events = list(client.generate_stream("Hello", max_new_tokens=8))
    assert whole == events[-1].generated_text
    assert whole == "".join(event.token.text for event in events if not event.token.special)
    assert events[-1].details is not None


def test_all_parameters(client: Client) -> None:
    given = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    answers = [
        client.generate("Hello", do_sample=True, max_new_tokens=8, frequency_penalty=0.1, truncate=4, **given)
        for _ in range(2)
    ]
    assert answers[0].generated_text == answers[1].generated_text
    assert answers[0].details.seed == 3
    assert client.generate("Hello", watermark=True, return_full_text=True).generated_text.startswith("Hello")
    best = client.generate("Hello", do_sample=True, best_of=2, max_new_tokens=8)
    assert best.details.best_of_sequences is not None and len(best.details.best_of_sequences) == 1


def test_a_grammar(client: Client) -> None:
    grammar = Grammar(type=GrammarType.Json, value=SCHEMA)
    answer = json.loads(client.generate("Hello", grammar=grammar, max_new_tokens=40).generated_text)
    assert 0 <= answer["n"] <= 99
    grammar = Grammar(type=GrammarType.Regex, value="(yes|no)")
    assert client.generate("Hello", grammar=grammar, max_new_tokens=10).generated_text in ("yes", "no")


def test_a_chat(client: Client) -> None:
    answer = client.chat(messages=MESSAGES, max_tokens=8, seed=1, temperature=0.5)
    assert answer.choices[0].message.content
    assert answer.usage["completion_tokens"] <= 8


def test_a_chat_s_stream(client: Client) -> None:
    whole = client.chat(messages=MESSAGES, max_tokens=8, seed=1).choices[0].message.content
    chunks: Iterator = client.chat(messages=MESSAGES, max_tokens=8, seed=1, stream=True)
    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_errors_are_typed(client: Client) -> None:
    with pytest.raises(ValidationError, match="characters"):
        client.generate("x" * 10**6)
    with pytest.raises(OverloadedError):
        client.generate("Hello", do_sample=True, best_of=16)
    with pytest.raises(UnknownError, match="API key"):
        Client(URL).generate("Hello")


def test_async(async_client: AsyncClient) -> None:
    async def story() -> None:
        whole = (await async_client.generate("Hello", max_new_tokens=8)).generated_text
        last = [event async for event in async_client.generate_stream("Hello", max_new_tokens=8)][-1]
        assert whole == last.generated_text
        answer = await async_client.chat(messages=MESSAGES, max_tokens=8, seed=1)
        stream = await async_client.chat(messages=MESSAGES, max_tokens=8, seed=1, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert answer.choices[0].message.content == text
        with pytest.raises(ValidationError):
            await async_client.generate("x" * 10**6)

    asyncio.run(story())
