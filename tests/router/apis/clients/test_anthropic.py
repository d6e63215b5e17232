"""Anthropic's own client, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import TextBlock, ThinkingBlock, ToolParam, ToolUseBlock

from tests.router.apis.anthropic.test_tools import TIME, WEATHER
from tests.router.apis.clients.conftest import full
from tests.router.served import Served

ASKED: dict[str, Any] = {"model": "claude-any", "max_tokens": 300, "messages": [{"role": "user", "content": "Rain?"}]}
TOOLS: Any = [WEATHER, TIME]


@pytest.fixture
def client(it: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=it.url, api_key="open-secret", max_retries=0) as client:
        yield client


def test_a_message(client: anthropic.Anthropic) -> None:
    more: Any = {"extra_body": {"temperature": 0.5}}  # which older versions have a parameter for
    answer = client.messages.create(**ASKED, system="Be brief.", stop_sequences=["here"], **more)
    [block] = answer.content
    assert isinstance(block, TextBlock) and "No tools " == block.text
    assert ("stop_sequence", "here") == (answer.stop_reason, answer.stop_sequence)
    assert ("claude-any", "assistant", "message") == (answer.model, answer.role, answer.type)
    assert answer.usage.input_tokens > 10 and 13 == answer.usage.output_tokens
    assert answer.id.startswith("msg_") and answer._request_id is not None


def test_the_models_and_one_by_its_name(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    [model] = page.data
    assert ("model", "a/model", "a/model", False) == (model.type, model.id, model.display_name, page.has_more)
    assert ("a/model", "a/model") == (page.first_id, page.last_id)
    assert 2026 <= model.created_at.year
    assert [model] == list(page) == [client.models.retrieve("a/model")]
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.models.retrieve("other")


def test_a_stream_and_its_raw_events(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASKED) as stream:
        assert "No tools here." == "".join(stream.text_stream)
        final = stream.get_final_message()
    assert ("end_turn", 15) == (final.stop_reason, final.usage.output_tokens)
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert ("message_start", "message_stop") == (kinds[0], kinds[-1])


async def test_async_messages_and_streams(it: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=it.url, api_key="open-secret", max_retries=0) as client:
        answers = await asyncio.gather(*(client.messages.create(**ASKED) for _ in range(8)))
        assert {"No tools here."} == {block.text for answer in answers for block in answer.content}  # type: ignore[union-attr]
        async with client.messages.stream(**ASKED) as stream:
            assert "No tools here." == await stream.get_final_text()


def test_tools_whole_and_streamed(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": TOOLS}
    answer = client.messages.create(**asked)
    text, weather, time = answer.content
    assert isinstance(text, TextBlock) and isinstance(weather, ToolUseBlock) and isinstance(time, ToolUseBlock)
    assert ("weather", {"place": "Ulm"}, "time", {}) == (weather.name, weather.input, time.name, time.input)
    assert "tool_use" == answer.stop_reason
    with client.messages.stream(**asked) as stream:
        written = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    assert [(block.name, block.input) for block in (weather, time)] == [called(block) for block in final.content[1:]]
    assert '{"place": "Ulm"}{}' == written
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "wet"} for call in (weather, time)]
    messages = [*ASKED["messages"], {"role": "assistant", "content": answer.content}]
    asked["messages"] = [*messages, {"role": "user", "content": results}]
    [last] = client.messages.create(**asked).content
    assert isinstance(last, TextBlock) and "It rains." == last.text


def called(block: Any) -> tuple[str, object]:
    assert isinstance(block, ToolUseBlock)
    return block.name, block.input


def test_the_clients_own_loop_over_tools(client: anthropic.Anthropic) -> None:
    places = []

    @beta_tool
    def weather(place: str) -> str:
        """The weather of a place."""
        places.append(place)
        return "wet"

    @beta_tool
    def time() -> str:
        """The time."""
        return "noon"

    runner = client.beta.messages.tool_runner(**ASKED, tools=[weather, time])
    assert ["tool_use", "end_turn"] == [message.stop_reason for message in runner]
    assert ["Ulm"] == places


def test_thinking(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**ASKED, "system": "think", "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with client.messages.stream(**asked) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        first = stream.get_final_message().content[0]
    assert isinstance(first, ThinkingBlock) and "Hm." == first.thinking == thought


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    tools: list[ToolParam] = TOOLS
    counted = client.messages.count_tokens(model="m", messages=ASKED["messages"], system="Be brief.", tools=tools)
    answer = client.messages.create(**ASKED, system="Be brief.", tools=tools)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


def test_errors_are_of_their_types(it: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="`max_tokens` must be strictly positive") as bad:
        client.messages.create(**{**ASKED, "max_tokens": 0})
    assert ("invalid_request_error", 400) == (bad.value.type, bad.value.status_code)
    assert bad.value.request_id == bad.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError), client.messages.stream(**{**ASKED, "max_tokens": 5000}):
        pass
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        client.with_options(api_key="wrong").messages.create(**ASKED)
    assert "authentication_error" == wrong.value.type
    limited = client.with_options(api_key="anthropic-secret")
    limited.messages.create(**ASKED)
    with pytest.raises(anthropic.RateLimitError, match="requests_per_minute") as many:
        limited.messages.create(**ASKED)
    assert "rate_limit_error" == many.value.type and int(many.value.response.headers["retry-after"]) > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()


def test_a_key_may_also_be_a_token(it: Served) -> None:
    with anthropic.Anthropic(base_url=it.url, auth_token="open-secret", api_key=None, max_retries=0) as client:
        assert "end_turn" == client.messages.create(**ASKED).stop_reason


def test_it_comes_again_when_it_is_told_to(it: Served, client: anthropic.Anthropic) -> None:
    with full(it) as soon_free:
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**ASKED)
        soon_free.start()
        assert "end_turn" == client.with_options(max_retries=2).messages.create(**ASKED).stop_reason
