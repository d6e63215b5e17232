"""OpenAI's own client, as it comes: chats, completions, responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

from tests.router.apis.clients.conftest import full
from tests.router.apis.openai.responses.test_tools import PARAMETERS
from tests.router.served import END_OF_PROMPT, Served

CHAT: dict[str, Any] = {"model": "gpt-any", "messages": [{"role": "user", "content": "Rain?"}]}
RESPONSE: dict[str, Any] = {"model": "gpt-any", "input": "Rain?"}
WEATHER = {"name": "weather", "description": "The weather of a place", "parameters": PARAMETERS}
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
TOOLS: Any = [{"type": "function", "strict": False, **function} for function in (WEATHER, TIME)]


@pytest.fixture
def client(it: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{it.url}/v1", api_key="open-secret", max_retries=0) as client:
        yield client


def test_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, stop="here", temperature=0.5)
    assert ("No tools ", "stop") == (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert answer.usage is not None and answer.usage.total_tokens > 20 and answer._request_id
    chunks = [*client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})]
    assert "No tools here." == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None and 15 == chunks[-1].usage.completion_tokens
    with client.chat.completions.stream(**CHAT) as stream:
        assert "No tools here." == stream.get_final_completion().choices[0].message.content


def test_tools_of_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(**CHAT, tools=CHAT_TOOLS).choices
    assert "tool_calls" == choice.finish_reason
    with client.chat.completions.stream(**CHAT, tools=CHAT_TOOLS) as stream:
        [streamed] = stream.get_final_completion().choices
    for found in (choice.message, streamed.message):
        assert found.tool_calls is not None
        called: list[Any] = [*found.tool_calls]
        assert ["weather", "time"] == [call.function.name for call in called]
        assert [{"place": "Ulm"}, {}] == [json.loads(call.function.arguments) for call in called]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in choice.message.tool_calls or ()]
    messages: Any = [*CHAT["messages"], choice.message, *results]
    answer = client.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS)
    assert "It rains." == answer.choices[0].message.content


def test_completions_and_models(client: openai.OpenAI) -> None:
    prompt = f"Rain?{END_OF_PROMPT}"
    assert "No tools here." == client.completions.create(model="any", prompt=prompt).choices[0].text
    chunks = client.completions.create(model="any", prompt=prompt, stream=True)
    assert "No tools here." == "".join(chunk.choices[0].text for chunk in chunks)
    assert ["a/model"] == [model.id for model in client.models.list()]


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.responses.create(**RESPONSE, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert ("No tools here.", "completed", "gpt-any") == (answer.output_text, answer.status, answer.model)
    assert (None, {"a": "b"}, "Be brief.") == (answer.error, answer.metadata, answer.instructions)
    assert answer.usage is not None and 15 == answer.usage.output_tokens
    assert 0 == answer.usage.output_tokens_details.reasoning_tokens
    with client.responses.stream(**RESPONSE) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert "No tools here." == final.output_text
    assert "No tools here." == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert [*range(len(events))] == [event.sequence_number for event in events]
    raw = [event.type for event in client.responses.create(**RESPONSE, stream=True, max_output_tokens=3)]
    assert ("response.created", "response.incomplete") == (raw[0], raw[-1])


def test_functions_of_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.responses.create(**RESPONSE, tools=TOOLS)
    with client.responses.stream(**RESPONSE, tools=TOOLS) as stream:
        written = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        streamed = stream.get_final_response()
    assert '{"place": "Ulm"}{}' == written
    for output in (answer.output, streamed.output):
        text, weather, time = output
        assert isinstance(text, ResponseOutputMessage)
        assert isinstance(weather, ResponseFunctionToolCall) and isinstance(time, ResponseFunctionToolCall)
        assert ("weather", '{"place": "Ulm"}', "time", "{}") == (
            weather.name,
            weather.arguments,
            time.name,
            time.arguments,
        )
    calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "wet"} for call in calls]
    items: Any = [{"role": "user", "content": "Rain?"}, *answer.output, *results]
    assert "It rains." == client.responses.create(model="any", input=items, tools=TOOLS).output_text


def test_reasoning_of_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(**RESPONSE, instructions="think", reasoning={"effort": "low"})
    thought = answer.output[0]
    assert isinstance(thought, ResponseReasoningItem) and thought.content is not None
    assert ("Hm.", True) == (thought.content[0].text, answer.output_text.startswith("Well."))
    with client.responses.stream(**RESPONSE, instructions="think") as stream:
        assert "Hm." == "".join(e.delta for e in stream if e.type == "response.reasoning_text.delta")


def test_the_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="any", input="Rain?", instructions="Be brief.")
    answer = client.responses.create(**RESPONSE, instructions="Be brief.")
    assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens


async def test_async_chats_and_responses(it: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="open-secret", max_retries=0) as client:
        answers = await asyncio.gather(*(client.responses.create(**RESPONSE) for _ in range(8)))
        assert {"No tools here."} == {answer.output_text for answer in answers}
        async with client.responses.stream(**RESPONSE) as stream:
            assert "No tools here." == (await stream.get_final_response()).output_text
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
        assert "No tools here." == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_errors_are_of_their_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="`max_output_tokens` must be strictly positive"):
        client.responses.create(**RESPONSE, max_output_tokens=0)
    with pytest.raises(openai.BadRequestError, match="none are stored here"):
        client.responses.create(**RESPONSE, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="responses are not stored here"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="`max_tokens` must be strictly positive"):
        client.chat.completions.create(**CHAT, max_tokens=0, stream=True)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(**RESPONSE)
    limited = client.with_options(api_key="openai-secret")
    limited.responses.create(**RESPONSE)
    with pytest.raises(openai.RateLimitError, match="requests_per_minute") as many:
        limited.chat.completions.create(**CHAT)
    assert int(many.value.response.headers["retry-after"]) > 0


def test_it_comes_again_when_it_is_told_to(it: Served, client: openai.OpenAI) -> None:
    with full(it) as soon_free:
        with pytest.raises(openai.RateLimitError):
            client.responses.create(**RESPONSE)
        soon_free.start()
        assert "completed" == client.with_options(max_retries=2).responses.create(**RESPONSE).status
