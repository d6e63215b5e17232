"""Hugging Face's own client, as it comes: text generation and chats."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError

from tests.router.apis.openai.responses.test_tools import PARAMETERS
from tests.router.served import END_OF_PROMPT, Served

PROMPT = f"Rain?{END_OF_PROMPT}"
MESSAGES = [{"role": "user", "content": "Rain?"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "?", "parameters": PARAMETERS}}


@pytest.fixture
def client(it: Served) -> InferenceClient:
    return InferenceClient(base_url=it.url, token="open-secret", timeout=60)


def test_text_whole_with_details_and_streamed(client: InferenceClient) -> None:
    assert "No tools here." == client.text_generation(PROMPT, max_new_tokens=20)
    output = client.text_generation(PROMPT, max_new_tokens=3, details=True, decoder_input_details=True)
    assert ("No ", "length", 3) == (
        output.generated_text,
        output.details.finish_reason,
        output.details.generated_tokens,
    )
    assert [*PROMPT] == [token.text for token in output.details.prefill]
    assert "No tools here.</s>" == "".join(client.text_generation(PROMPT, stream=True))  # TGI shows the end token
    events = [*client.text_generation(PROMPT, stream=True, details=True)]
    assert ("No tools here.", 15) == (events[-1].generated_text, len(events))
    assert "No tools h" == client.text_generation(PROMPT, stop=["h"])


def test_chats_whole_and_streamed(client: InferenceClient) -> None:
    answer = client.chat_completion(MESSAGES, max_tokens=20)
    assert ("No tools here.", "stop") == (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert 15 == answer.usage.completion_tokens
    chunks = client.chat_completion(MESSAGES, stream=True)
    assert "No tools here." == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    [choice] = client.chat_completion(MESSAGES, tools=[WEATHER]).choices
    assert choice.message.tool_calls is not None
    assert {"weather"} == {call.function.name for call in choice.message.tool_calls}


async def test_async_text_and_chats(it: Served) -> None:
    async with AsyncInferenceClient(base_url=it.url, token="open-secret", timeout=60) as client:
        assert "No tools here." == await client.text_generation(PROMPT)
        texts = [text async for text in await client.text_generation(PROMPT, stream=True)]
        assert "No tools here.</s>" == "".join(texts)
        answer = await client.chat_completion(MESSAGES)
        assert "No tools here." == answer.choices[0].message.content


def test_errors_are_of_their_types(it: Served, client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="`max_new_tokens` must be strictly positive"):
        client.text_generation(PROMPT, max_new_tokens=0)
    with pytest.raises(HfHubHTTPError, match="`max_tokens` must be strictly positive") as bad:
        client.chat_completion(MESSAGES, max_tokens=0)
    assert 400 == bad.value.response.status_code
    wrong = InferenceClient(base_url=it.url, token="wrong")
    with pytest.raises(HfHubHTTPError) as unknown:
        wrong.chat_completion(MESSAGES)
    assert 401 == unknown.value.response.status_code
    limited = InferenceClient(base_url=it.url, token="hub-secret")
    limited.text_generation(PROMPT)
    with pytest.raises(OverloadedError, match="requests_per_minute"):
        limited.text_generation(PROMPT)
