"""LangChain's chat models of OpenAI and Anthropic, and Hugging Face's endpoint, pointed at the server."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import anthropic
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_huggingface import HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Answer(BaseModel):
    """What a structured answer must have."""

    number: int = Field(ge=0, le=99)


@tool
def look_up(number: Annotated[int, Field(ge=0, le=99)]) -> str:
    """Looks a number up."""
    return str(number)


def openai_chat(**given: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model="any", max_retries=0, **{"max_tokens": 8, **given})


def test_openai_s_chat_and_its_stream() -> None:
    chat = openai_chat(temperature=0)
    whole = chat.invoke("Hello")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 8
    pieces = list(chat.stream("Hello"))
    assert whole.content == "".join(piece.content for piece in pieces)

    async def story() -> None:
        assert whole.content == (await chat.ainvoke("Hello")).content
        assert whole.content == "".join([piece.content async for piece in chat.astream("Hello")])

    asyncio.run(story())


def test_structured_output() -> None:
    answer = openai_chat(max_tokens=60).with_structured_output(Answer, method="json_schema").invoke("Hello")
    assert 0 <= answer.number <= 99


def test_tools() -> None:
    chat = openai_chat(max_tokens=200).bind_tools([look_up], tool_choice="look_up")
    [call] = chat.invoke("Hello").tool_calls
    assert call["name"] == "look_up" and isinstance(call["args"]["number"], int)


def test_openai_s_completions() -> None:
    model = OpenAI(base_url=f"{URL}/v1", api_key=KEY, model="any", max_retries=0, max_tokens=8, temperature=0)
    whole = model.invoke("Hello")
    assert whole == "".join(model.stream("Hello"))


def test_anthropic_s_chat_and_its_stream() -> None:
    chat = ChatAnthropic(base_url=URL, api_key=KEY, model="any", max_tokens=8, temperature=0, max_retries=0)
    whole = chat.invoke("Hello")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 8
    assert whole.text == "".join(piece.text for piece in chat.stream("Hello"))


def test_hugging_face_s_endpoint() -> None:
    endpoint = HuggingFaceEndpoint(endpoint_url=URL, server_kwargs={"headers": HEADERS}, max_new_tokens=8, seed=1)
    whole = endpoint.invoke("Hello")
    assert whole and whole == "".join(endpoint.stream("Hello"))


def test_errors_are_typed() -> None:
    with pytest.raises(openai.BadRequestError):
        openai_chat().invoke("x" * 10**6)
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(base_url=f"{URL}/v1", api_key="wrong", model="any", max_retries=0).invoke("Hello")
    with pytest.raises(openai.RateLimitError):
        openai_chat(n=16).invoke("Hello")
    with pytest.raises(anthropic.AuthenticationError):
        ChatAnthropic(base_url=URL, api_key="wrong", model="any", max_tokens=8, max_retries=0).invoke("Hello")
