"""LiteLLM, through which many agents ask: answers, streams, and errors that it tells apart by their words."""

from __future__ import annotations

import os

import litellm
import pytest

URL, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
SAID = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "the little fox " * 5000}]
OPENAI = {"model": "openai/any", "api_base": f"{URL}/v1", "api_key": KEY}
ANTHROPIC = {"model": "anthropic/claude-3-5-haiku-20241022", "api_base": URL, "api_key": KEY}
SCHEMA = {"properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"], "additionalProperties": False}


@pytest.mark.parametrize("where", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_a_chat_and_its_stream(where: dict[str, str]) -> None:
    asked = {**where, "messages": SAID, "max_tokens": 8, "temperature": 0, "num_retries": 0}
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content and whole.usage.completion_tokens <= 8
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert whole.choices[0].message.content == "".join(pieces)


@pytest.mark.parametrize("where", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_a_context_that_is_too_long_is_known_as_one(where: dict[str, str]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=LONG, max_tokens=8, num_retries=0)


def test_a_schema_is_kept_to() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    asked = {**OPENAI, "messages": SAID, "max_tokens": 60, "response_format": format, "num_retries": 0}
    assert litellm.completion(**asked).choices[0].message.content in ('{"mood": "good"}', '{"mood": "bad"}')


def test_a_wrong_key_is_told_as_one() -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**OPENAI, "api_key": "wrong"}, messages=SAID, num_retries=0)


def test_responses() -> None:
    found = litellm.responses(**OPENAI, input="Hello", max_output_tokens=8, temperature=0, num_retries=0)
    assert found.output[0].content[0].text and found.store is False
