"""Tools and reasoning in OpenAI's chats, over fake shards that answer a given text; whole, streamed, and refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import AddedToken

from router.apis.openai.answers import ChatCompletion
from router.apis.openai.streams import ChatChunk
from router.text.tokenizer import ModelTokenizer
from tests.router.apis.openai.test_routes import chunks_of
from tests.router.chat.templates import TOOL
from tests.router.doubles import EOS, byte_tokenizer, fake_shards, make_limits
from tests.router.site import Site, site

PATH = "/v1/chat/completions"
PROMPT = "hello"
CALL = '{"name": "weather", "arguments": {"place": "Zürich"}}'
ARGUMENTS = '{"place": "Zürich"}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
# Tools are shown where the template is tried alone: prompts are short here, and answers stand at their ends.
LAST = "{{ tools | tojson if tools and 'zq' in messages[-1]['content'] }}{{ messages[-1]['content'] }}"
HERMES_TEMPLATE = f"{{# <tool_call> #}}{LAST}"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "tools": [TOOL]}
LIMITS = {"max_total_tokens": 2000, "max_input_length": 1000, "max_batch_prefill_tokens": 1000}


def answering(ids: list[int], prompt_length: int) -> dict[str, Any]:
    """Shards that answer a prompt of this length with these tokens."""

    def next_token(token_ids: Any, *_: Any) -> int:
        return ids[min(len(token_ids) - prompt_length, len(ids) - 1)]

    return {"vocab_size": 300, "next_token": next_token}


@asynccontextmanager
async def chat_site(
    tmp_path: Path,
    answer: str | list[int] = HERMES,
    template: str = HERMES_TEMPLATE,
    *,
    after: str = "",
    prompt: str = PROMPT,
    tokenizer: ModelTokenizer | None = None,
    decoder_start: int | None = None,
    **config: Any,
) -> AsyncIterator[Site]:
    """after: what the template writes behind the prompt. decoder_start: of an encoder-decoder."""
    (tmp_path / "template.jinja").write_text(template + after)
    ids = [*answer.encode(), EOS] if isinstance(answer, str) else answer
    limits = {**LIMITS, "max_batch_total_tokens": 8000, "vocab_size": 300}
    num_known = len((prompt + after).encode()) + (decoder_start is not None)
    shards = fake_shards(make_limits(**limits), decoder_start=decoder_start, **answering(ids, num_known))
    config["chat_template"] = str(tmp_path / "template.jinja")
    async with site(shards, config=config, tokenizer=tokenizer, **limits) as it:
        yield it
        await it.all_free()


def gathered(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str]:
    """The message that the deltas of one choice make together, and why it ended."""
    message: dict[str, Any] = {"content": ""}
    reasons = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            known, more = message.get("reasoning_content"), delta["reasoning_content"]
            message["reasoning_content"] = more if known is None else known + (more or "")
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(call | {"function": {"name": call["function"]["name"], "arguments": ""}})
                assert "function" == call["type"] and call["id"].startswith("call_")
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    [reason] = reasons
    return message, reason


async def both(it: Site, **changes: Any) -> tuple[dict[str, Any], str]:
    """The message of the answer and why it ended; whole and streamed must say the same."""
    answer = await it.http.post(PATH, json={**ASKED, **changes})
    assert 200 == answer.status_code, answer.text
    TypeAdapter(ChatCompletion).validate_json(answer.text)
    [choice] = answer.json()["choices"]
    whole, reason = choice["message"], choice["finish_reason"]
    chunks = chunks_of((await it.http.post(PATH, json={**ASKED, **changes, "stream": True})).text)
    for chunk in chunks:
        TypeAdapter(ChatChunk).validate_python(chunk)
    streamed = gathered(chunks)
    assert ((whole["content"] or ""), reason) == (streamed[0]["content"], streamed[1])
    assert whole.get("reasoning_content") == streamed[0].get("reasoning_content")
    assert functions(whole) == functions(streamed[0])
    return whole, reason


def functions(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


async def test_a_call_is_no_text(tmp_path: Path) -> None:
    async with chat_site(tmp_path) as it:
        message, reason = await both(it)
        assert ("tool_calls", None) == (reason, message["content"])
        [call] = message["tool_calls"]
        assert ("function", {"name": "weather", "arguments": ARGUMENTS}) == (call["type"], call["function"])
        assert call["id"].startswith("call_")
        usage = (await it.http.post(PATH, json=ASKED)).json()["usage"]
        assert len(HERMES.encode()) + 1 == usage["completion_tokens"]


async def test_several_calls_have_a_text_before_them_and_ids_of_their_own(tmp_path: Path) -> None:
    async with chat_site(tmp_path, f"Both:\n{HERMES}\n{HERMES}") as it:
        message, reason = await both(it)
        assert ("Both:", "tool_calls") == (message["content"], reason)
        assert [("weather", ARGUMENTS)] * 2 == functions(message)
        assert 2 == len({call["id"] for call in message["tool_calls"]})
        message, _ = await both(it, parallel_tool_calls=False)
        assert [("weather", ARGUMENTS)] == functions(message)


async def test_a_call_is_streamed_as_openai_streams_it(tmp_path: Path) -> None:
    async with chat_site(tmp_path) as it:
        chunks = chunks_of((await it.http.post(PATH, json={**ASKED, "stream": True})).text)
        first, begun, *rest, last = [chunk["choices"][0] for chunk in chunks]
        assert {"role": "assistant", "content": ""} == first["delta"]
        [call] = begun["delta"]["tool_calls"]
        assert (0, {"name": "weather", "arguments": ""}) == (call["index"], call["function"])
        pieces = [choice["delta"]["tool_calls"] for choice in rest]
        assert len(pieces) > 5 and all([{"index", "function"}] == [set(one) for one in piece] for piece in pieces)
        assert ({}, "tool_calls") == (last["delta"], last["finish_reason"])


async def test_answers_of_several_are_read_apart(tmp_path: Path) -> None:
    async with chat_site(tmp_path) as it:
        asked = {**ASKED, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = chunks_of((await it.http.post(PATH, json=asked)).text)
        for index in range(3):
            message, reason = gathered(chunks, index)
            assert ([("weather", ARGUMENTS)], "tool_calls") == (functions(message), reason)
        assert 3 * (len(HERMES.encode()) + 1) == last["usage"]["completion_tokens"]
        whole = (await it.http.post(PATH, json={**ASKED, "n": 3})).json()
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]}
        assert 3 == len(ids)


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({"max_tokens": len(HERMES.partition("ü")[0])}, '{"place": "Z', "length"),
        ({"stop": "ü"}, '{"place": "Z', "stop"),
    ],
)
async def test_what_is_cut_within_arguments_leaves_them_incomplete(
    tmp_path: Path, changes: dict[str, Any], arguments: str, expected: str
) -> None:
    async with chat_site(tmp_path) as it:
        message, reason = await both(it, **changes)
        assert ([("weather", arguments)], expected) == (functions(message), reason)


async def test_a_stop_sequence_behind_a_complete_call_ends_it(tmp_path: Path) -> None:
    async with chat_site(tmp_path) as it:
        message, reason = await both(it, stop="</tool_call>")
        assert ([("weather", ARGUMENTS)], "tool_calls") == (functions(message), reason)


async def test_what_is_no_call_is_text(tmp_path: Path) -> None:
    async with chat_site(tmp_path, "<tool_call>{oops}") as it:
        message, reason = await both(it)
        assert {"role": "assistant", "content": "<tool_call>{oops}"} == message and "stop" == reason


async def test_with_none_a_call_is_text(tmp_path: Path) -> None:
    async with chat_site(tmp_path) as it:
        message, reason = await both(it, tool_choice="none")
        assert (HERMES, "stop") == (message["content"], reason)


async def test_reasoning_is_told_apart(tmp_path: Path) -> None:
    async with chat_site(tmp_path, f"<think>\nWhy?\n</think>\n\n{HERMES}", f"{{# </think> #}}{HERMES_TEMPLATE}") as it:
        for tools in ([TOOL], None):
            message, reason = await both(it, tools=tools)
            assert ("Why?", "stop" if tools is None else "tool_calls") == (message["reasoning_content"], reason)
            assert (HERMES if tools is None else None) == message["content"]
        message, reason = await both(it, max_tokens=len("<think>\nWh"))
        assert ("Wh", "", "length") == (message["reasoning_content"], message["content"], reason)


async def test_reasoning_has_its_name_its_count_and_may_be_left_out(tmp_path: Path) -> None:
    text, template = "<think>\nWhy?\n</think>\n\nSo.", f"{{# </think> #}}{HERMES_TEMPLATE}"
    async with chat_site(tmp_path, text, template, reasoning_field="reasoning") as it:
        for stream in (False, True):
            for field in ("", "include_reasoning"):
                asked: dict[str, Any] = {**ASKED, "tools": None, "stream": stream}
                asked |= {field: False} if field else {}
                asked |= {"stream_options": {"include_usage": True}} if stream else {}
                answer = await it.http.post(PATH, json=asked)
                chunks = chunks_of(answer.text) if stream else [answer.json()]
                assert "reasoning_content" not in answer.text
                details = chunks[-1]["usage"]["completion_tokens_details"]
                assert len("<think>\nWhy?") <= details["reasoning_tokens"] <= len("<think>\nWhy?\n</think>\n\n")
                message = gathered(chunks[:-1])[0] if stream else chunks[0]["choices"][0]["message"]
                assert "So." == message["content"]
                if stream:
                    told = [c["choices"][0]["delta"].get("reasoning") for c in chunks[:-1]]
                    assert ("" if field else "Why?") == "".join(one or "" for one in told)
                else:
                    assert (not field, "Why?") == ("reasoning" in message, message.get("reasoning", "Why?"))


@pytest.mark.parametrize("decoder_start", [None, 7])
async def test_an_answer_may_begin_within_reasoning(tmp_path: Path, decoder_start: int | None) -> None:
    template = f"{{# </think> #}}{HERMES_TEMPLATE}"
    async with chat_site(
        tmp_path, "Why?\n</think>\nSo.", template, after="\n<think>", decoder_start=decoder_start
    ) as it:
        message, _ = await both(it)
        assert ("Why?", "So.") == (message["reasoning_content"], message["content"])


@pytest.mark.parametrize(("begun", "reasoning", "content"), [("<think>\nSo", "Why?", "Yes"), ("Well,", None, None)])
async def test_a_final_message_that_is_continued_says_where_it_ended(
    tmp_path: Path, begun: str, reasoning: str | None, content: str | None
) -> None:
    answer = "Why?</think>Yes"
    async with chat_site(tmp_path, answer, f"{{# </think> #}}{HERMES_TEMPLATE}", prompt=begun) as it:
        messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": begun}]
        message, _ = await both(it, messages=messages, continue_final_message=True)
        assert (reasoning, content or answer) == (message.get("reasoning_content"), message["content"])


async def test_marks_that_are_special_tokens_are_read_and_not_shown(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer().tokenizer
    marked = type(tokenizer).from_str(tokenizer.to_str())
    marked.add_special_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")])
    calls, args, other = (marked.token_to_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]"))
    ids = [*b"A", other, *b"nd:", calls, *b"weather", args, *ARGUMENTS.encode(), EOS]
    template = f"{{# [TOOL_CALLS] #}}{LAST}"
    async with chat_site(tmp_path, ids, template, tokenizer=ModelTokenizer.of(marked, frozenset({EOS}))) as it:
        message, reason = await both(it)
        assert ("And:", "tool_calls") == (message["content"], reason)
        assert [("weather", ARGUMENTS)] == functions(message)
        message, _ = await both(it, tool_choice="none")
        assert f"And:weather{ARGUMENTS}" == message["content"]


@pytest.mark.parametrize("is_cut", [False, True])
async def test_log_probabilities_are_those_of_all_that_was_written(tmp_path: Path, is_cut: bool) -> None:
    tokenizer = byte_tokenizer().tokenizer
    marked = type(tokenizer).from_str(tokenizer.to_str())
    marked.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    mark = marked.token_to_id("[TOOL_CALLS]")
    ids = [*"Ü: ".encode(), mark, *f"weather{ARGUMENTS}".encode(), EOS]
    written = f"Ü: [TOOL_CALLS]weather{ARGUMENTS}"

    def told_of(choices: list[dict[str, Any]]) -> str:
        scores = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        assert all(token["logprob"] <= 0 for some in scores for token in some)
        return bytes(byte for some in scores for token in some for byte in token["bytes"]).decode()

    template = f"{{# [TOOL_CALLS] #}}{LAST}"
    async with chat_site(tmp_path, ids, template, tokenizer=ModelTokenizer.of(marked, frozenset({EOS}))) as it:
        asked = {"logprobs": True, "top_logprobs": 1, "max_tokens": 12 if is_cut else len(ids)}
        expected = "Ü: [TOOL_CALLS]weather" if is_cut else written
        message, _ = await both(it, **asked)
        assert message["content"] == (expected if is_cut else "Ü:")  # a call without its name is none
        whole = (await it.http.post(PATH, json={**ASKED, **asked})).json()
        chunks = chunks_of((await it.http.post(PATH, json={**ASKED, **asked, "stream": True})).text)
        assert told_of(whole["choices"]) == told_of([chunk["choices"][0] for chunk in chunks])
        assert expected == told_of(whole["choices"])


def called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **fields}
    return [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": PROMPT},
    ]


async def test_the_result_of_a_call_is_a_message(tmp_path: Path) -> None:
    template = (
        "{% if tools and messages[1].tool_calls[0].function.arguments.place == 'Zürich' %}"
        "{{ messages[2].content if messages[2].role == 'tool' }}{% endif %}{# <tool_call> #}"
    )
    async with chat_site(tmp_path, "Sunny.", template) as it:
        for arguments in (ARGUMENTS, json.loads(ARGUMENTS)):
            message, _ = await both(it, messages=called(arguments))
            assert "Sunny." == message["content"]


async def test_tools_are_refused_where_no_parser_reads_them(tmp_path: Path) -> None:
    async with chat_site(tmp_path, f"<think>{HERMES}", tool_call_parser="none", reasoning_parser="none") as it:
        answer = await it.http.post(PATH, json=ASKED)
        assert 400 == answer.status_code and "--tool-call-parser none" in answer.json()["error"]["message"]
        message, _ = await both(it, tools=None)
        assert f"<think>{HERMES}" == message["content"]
