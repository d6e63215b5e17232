"""What clients of vLLM, SGLang and llama.cpp send to OpenAI's routes has its effect here, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from host.version import version
from router.apis.openai.requests import ChatRequest, CompletionRequest, messages_of, of_completion, variables_of
from router.chat.prompting import thinking
from router.errors import ValidationError
from router.requests.grammars import constraint_of
from router.requests.schemas import GrammarParameters
from router.text.tokenizer import ModelTokenizer
from tests.router.apis.openai.test_routes import CHAT, COMPLETION, chunks_of
from tests.router.doubles import EOS, byte_tokenizer, fake_shards, make_limits
from tests.router.site import PROMPT, answering_site, site

SCHEMA = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("extra", "kind", "value"),
    [
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"json_schema": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+", "ebnf": None, "guided_json_object": False}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["yes", 'no"', "yes"]}, "lark", 'start: "yes" | "no\\""'),
        ({"structured_outputs": {"choice": ["é\n"]}}, "lark", 'start: "é\\n"'),
    ],
)
def test_constraints_have_other_names_elsewhere(extra: Mapping[str, Any], kind: str, value: Any) -> None:
    assert GrammarParameters.model_validate({"type": kind, "value": value}) == constraint_of(extra)
    [asked] = of_completion(CompletionRequest(prompt="a", **extra), 1, 1, None)
    assert asked.given.grammar == constraint_of(extra)
    assert [] == CompletionRequest(prompt="a", **extra).ignored()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"guided_grammar": "root ::= a"}, "`guided_grammar` is not served: give a Lark grammar"),
        ({"grammar": "root ::= a"}, "`grammar` is not served"),
        ({"ebnf": "root ::= a"}, "`ebnf` is not served"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "`structured_outputs.structural_tag` is not served"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "`structured_outputs.whitespace_pattern` is not served"),
        ({"structured_outputs": "json"}, "`structured_outputs` must be an object with one of json, regex"),
        ({"guided_regex": 5}, "`guided_regex` must be a string"),
        ({"guided_choice": []}, "`guided_choice` must be a list of texts"),
        ({"guided_choice": ["a", 5]}, "`guided_choice` must be a list of texts"),
        ({"guided_json": [1]}, "`guided_json` must be a JSON schema"),
        ({"guided_regex": "a", "regex": "b"}, "`guided_regex`, `regex` are several constraints on one text"),
    ],
)
def test_a_constraint_that_is_not_served_is_refused_by_its_name(extra: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence.replace("[", r"\[")):
        constraint_of(extra)


async def test_which_stop_ended_an_answer_is_told_whole_and_streamed(template: str) -> None:
    async with answering_site(template) as it:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            for asked, reason in (({"stop": [" tw", "x"]}, " tw"), ({"stop_token_ids": [ord("w")]}, ord("w"))):
                whole = (await it.http.post(path, json={**body, **asked})).json()["choices"][0]
                assert ("stop", reason) == (whole["finish_reason"], whole["stop_reason"])
                chunks = chunks_of((await it.http.post(path, json={**body, **asked, "stream": True})).text)
                last = chunks[-1]["choices"][0]
                assert ("stop", reason) == (last["finish_reason"], last["stop_reason"])
            assert "stop_reason" not in (await it.http.post(path, json=body)).json()["choices"][0]


@pytest.mark.parametrize("reader", ["none", "think"])
async def test_counts_may_come_with_every_chunk(template: str, reader: str) -> None:
    async with answering_site(template, reasoning_parser=reader) as it:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            asked = {**body, "stream": True, "stream_options": options, "max_tokens": 4}
            chunks = chunks_of((await it.http.post(path, json=asked)).text)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert 4 == counts[-1] and counts == sorted(counts) and len({*counts}) > 1
            assert all(5 == chunk["usage"]["prompt_tokens"] for chunk in chunks)


async def test_special_tokens_are_shown_where_they_are_asked_for_but_not_the_end() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().tokenizer.to_str())  # that of other tests stays as it is
    tokenizer.add_special_tokens([AddedToken("<x>", special=True)])
    ids, limits = [ord("a"), EOS + 1, ord("b"), EOS], {"vocab_size": EOS + 2}

    def next_token(token_ids: Any, *_: Any) -> int:
        return ids[min(len(token_ids) - len(PROMPT), len(ids) - 1)]

    shards = fake_shards(make_limits(**limits), next_token=next_token, **limits)
    known = ModelTokenizer.of(tokenizer, frozenset({EOS}))
    async with site(shards, tokenizer=known, **limits) as it:
        for skips, text in ((None, "ab"), (True, "ab"), (False, "a<x>b")):
            asked = {**COMPLETION, "skip_special_tokens": skips, "logprobs": 1}
            [choice] = (await it.http.post("/v1/completions", json=asked)).json()["choices"]
            assert text == choice["text"] == "".join(choice["logprobs"]["tokens"])
            chunks = chunks_of((await it.http.post("/v1/completions", json={**asked, "stream": True})).text)
            assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_special_tokens_are_added_to_no_completion_that_has_them() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", EOS + 1)])
    limits = {"vocab_size": EOS + 2}
    shards = fake_shards(make_limits(**limits), **limits)
    async with site(shards, tokenizer=ModelTokenizer.of(tokenizer, frozenset({EOS})), **limits) as it:
        for adds, count in ((None, 4), (True, 4), (False, 3)):
            asked = {"prompt": "<s>ab", "max_tokens": 1, "add_special_tokens": adds}
            answer = (await it.http.post("/v1/completions", json=asked)).json()
            assert count == answer["usage"]["prompt_tokens"]
        chat = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
        refused = await it.http.post("/v1/chat/completions", json=chat)
        assert 400 == refused.status_code and "the template writes special tokens" in refused.text


async def test_completions_know_the_newer_name_of_their_most_tokens(template: str) -> None:
    async with answering_site(template) as it:
        for asked in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 5}):
            answer = (await it.http.post("/v1/completions", json={**COMPLETION, **asked})).json()
            assert 3 == answer["usage"]["completion_tokens"]


async def test_parameters_of_tgi_s_routes_reach_the_shards(template: str) -> None:
    async with answering_site(template) as it:
        asked = {"temperature": 0.5, "typical_p": 0.5, "bad_words": ["ab"], "max_tokens": 2}
        await it.http.post("/v1/completions", json={**COMPLETION, **asked})
        [sampling] = [new.sampling for step in it.shards.requests for new in step.add]
        assert 0.5 == sampling.typical_p and [*b"ab"] == [*sampling.banned_word_ids]


@pytest.mark.parametrize(
    ("asked", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "high"}, {**thinking(True), "reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, thinking(False)),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {**thinking(False), "enable_thinking": True},
        ),
    ],
)
def test_an_effort_of_reasoning_means_to_chats_what_it_does_to_responses(asked: Any, variables: Any) -> None:
    assert variables == variables_of(ChatRequest.model_validate({"messages": [], **asked}))


@pytest.mark.parametrize(
    ("roles", "asked", "sentence"),
    [
        (["user", "assistant"], {"add_generation_prompt": True}, "exclude each other"),
        (["assistant", "assistant"], {}, "two messages of the assistant at the end"),
        (["user"], {}, "needs a last message of the role assistant"),
    ],
)
def test_what_is_continued_must_be_clear(roles: list[str], asked: Any, sentence: str) -> None:
    said = [{"role": role, "content": "a"} for role in roles]
    body = ChatRequest.model_validate({"messages": said, "continue_final_message": True, **asked})
    with pytest.raises(ValidationError, match=sentence):
        messages_of(body)


def test_reasoning_is_taken_by_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "c"}]
        assert "c" == messages_of(ChatRequest.model_validate({"messages": said}))[1]["reasoning_content"]


async def test_texts_are_tokenised_in_every_dialect(template: str) -> None:
    async with answering_site(template) as it:
        ids = [*b"hello"]

        async def asked(path: str, **body: Any) -> Any:
            answer = await it.http.post(path, json=body)
            assert 200 == answer.status_code, answer.text
            return answer.json()

        counted = {"count": 5, "max_model_len": 128, "tokens": ids, "token_strs": None}
        assert counted == await asked("/tokenize", prompt="hello", model="x", add_special_tokens=False)
        assert counted == await asked("/tokenize", messages=CHAT["messages"])
        assert [*"hello"] == (await asked("/tokenize", prompt="hello", return_token_strs=True))["token_strs"]
        assert {"tokens": ids} == await asked("/tokenize", content="hello")
        pieces = (await asked("/tokenize", content="hello", with_pieces=True))["tokens"]
        assert {"id": ord("h"), "piece": "h"} == pieces[0] and 5 == len(pieces)
        assert ids == [token["id"] for token in await asked("/tokenize", inputs="hello")]
        text = dict.fromkeys(("text", "prompt", "content"), "hello")
        assert text == await asked("/detokenize", tokens=ids, model="x")
        assert {"text": "hello"} == await asked("/detokenize", ids=ids)
        for path, body, sentence in (
            ("/tokenize", {"prompt": ["a", "b"]}, "`prompt`: input should be a valid string"),
            ("/tokenize", {**CHAT, "chat_template": "{{ 1 }}"}, "`chat_template` is not served"),
            ("/chat_tokenize", {**CHAT, "chat_template": "{{ 1 }}"}, "`chat_template` is not served"),
            ("/tokenize", {"prompt": "a" * 70}, "must have less than 65 tokens"),
            ("/tokenize", {}, "`inputs`: field required"),
            ("/detokenize", {"tokens": ["a"]}, "`tokens.0`: input should be a valid integer"),
        ):
            answer = await it.http.post(path, json=body)
            assert 422 == answer.status_code and sentence in answer.json()["error"]


async def test_a_model_says_what_fits_and_the_server_its_version(template: str) -> None:
    async with answering_site(template) as it:
        [model] = (await it.http.get("/v1/models")).json()["data"]
        assert (128, "a/model") == (model["max_model_len"], model["root"])
        assert {"version": version()} == (await it.http.get("/version")).json()


def test_what_is_to_be_stored_is_answered_and_named_in_the_log() -> None:
    chat = ChatRequest.model_validate({"messages": [], "store": True})
    assert ["store"] == chat.ignored() and [] == ChatRequest.model_validate({"messages": [], "store": False}).ignored()


def test_fields_within_other_objects_are_named_in_the_log(template: str) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "x": 1, "stream_options": {"y": 2, "include_usage": True}})
    assert ["x", "stream_options.y"] == body.ignored()
