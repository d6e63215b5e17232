"""Between texts and token ids: `/tokenize`, `/chat_tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.doubles import EOS
from tests.router.site import answering_site, assert_is_error, site

CHAT = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "aé</s>"}]}


async def test_chat_tokenize_gives_the_prompt_of_a_chat_and_its_tokens(template: str) -> None:
    async with answering_site(template) as it:
        answer = await it.http.post("/chat_tokenize", json={**CHAT, "model": "any", "temperature": 0})
        assert 200 == answer.status_code, answer.text
        body = answer.json()
        assert {"tokenize_response", "templated_text"} == set(body)
        assert "aé</s>" == body["templated_text"]
        tokens = body["tokenize_response"]
        assert [97, *"é".encode(), EOS] == [token["id"] for token in tokens]
        assert {"id": 97, "text": "a", "start": 0, "stop": 1} == tokens[0]
        assert {"id": EOS, "text": "</s>", "start": 3, "stop": 7} == tokens[-1]


async def test_chat_tokenize_refuses_as_a_native_route(template: str) -> None:
    async with answering_site(template) as it:
        assert_is_error(await it.http.post("/chat_tokenize", json={"messages": []}), 422, "validation")
        long = [{"role": "user", "content": "x" * 65}]
        assert_is_error(await it.http.post("/chat_tokenize", json={"messages": long}), 422, "validation")
        await it.batcher.drain(1)
        assert 200 == (await it.http.post("/chat_tokenize", json=CHAT)).status_code


def asked(body: dict[str, Any], status: int = 200, **config: Any) -> Any:
    async def story() -> Any:
        async with site(config=config) as it:
            answer = await it.http.post("/detokenize", json=body)
            if status != 200:
                assert_is_error(answer, status, "validation" if status == 422 else "overloaded")
            return answer.json()

    return asyncio.run(story())


def test_detokenize_gives_the_text() -> None:
    assert {"text": "aé"} == asked({"ids": [97, *"é".encode(), EOS]})
    assert {"text": "aé</s>"} == asked({"ids": [97, *"é".encode(), EOS], "skip_special_tokens": False})
    assert {"text": ""} == asked({"ids": []})
    assert {"text": "x" * 128} == asked({"ids": [120] * 128, "skip_special_tokens": None, "else": 1})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"ids": [257]}, "token 257, but the model knows 257 tokens"),
        ({"ids": [0] * 129}, "at most 128 token ids (max_total_tokens). Given: 129"),
        ({"ids": [-1]}, "`ids.0`"),
        ({"ids": [2**32]}, "`ids.0`"),
        ({"ids": ["1"]}, "`ids.0`"),
        ({"ids": "ab"}, "`ids`"),
        ({}, "`ids`"),
        ({"ids": [1], "skip_special_tokens": 1}, "`skip_special_tokens`"),
        ({"ids": [0] * 20_000}, "more than 10128 values"),
    ],
)
def test_detokenize_refuses_what_is_no_list_of_ids(body: dict[str, Any], words: str) -> None:
    assert words in asked(body, 422)["error"]


async def test_a_tokenized_text_comes_back() -> None:
    async with site() as it:
        tokens = (await it.http.post("/tokenize", json={"inputs": "a é🙂"})).json()
        ids = [token["id"] for token in tokens]
        assert {"text": "a é🙂"} == (await it.http.post("/detokenize", json={"ids": ids})).json()
