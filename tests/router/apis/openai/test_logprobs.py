"""Log-probabilities on `/v1`: which tokens have entries, what they say, and those of prompts that are echoed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from router.apis.openai.logprobs import CompletionLogprobs, Scoring, ShownTokens, prompt_tokens
from router.errors import ValidationError
from router.requests.generation import Answer, likeliest
from router.requests.schemas import GenerateParameters, PromptRequest
from router.requests.validation import Validator
from router.sandbox.workers import Workers
from router.scheduling.request import Finished, PromptScores, ScoredToken, Timings
from router.text.generated import Ends, FinishReason, GeneratedText
from router.text.tokenizer import ModelTokenizer
from tests.router.apis.openai.test_routes import CHAT, COMPLETION, chunks_of, text_of
from tests.router.doubles import EOS, byte_tokenizer, fake_shards, make_limits
from tests.router.fake_shards import fake_raw_logprob
from tests.router.site import PROMPT, Site, answering, answering_site, site
from tests.router.text.test_token_bytes import metaspace_tokenizer, pieces_tokenizer

Json = dict[str, Any]


def joined(entries: Sequence[Json]) -> str:
    """The text of a chat's entries, by their bytes."""
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


async def posted(it: Site, path: str, body: Json) -> Json:
    answer = await it.http.post(path, json=body)
    assert 200 == answer.status_code, answer.text
    found: Json = answer.json()
    return found


async def streamed(it: Site, path: str, body: Json) -> list[Json]:
    answer = await it.http.post(path, json={**body, "stream": True})
    assert 200 == answer.status_code, answer.text
    return chunks_of(answer.text)


# ---------------------------------------------------------------------------------------------- which tokens are shown


def shown_of(tokenizer: ModelTokenizer, ids: Sequence[int], stop: Sequence[str] = (), most: int = 99) -> list[Any]:
    """(text, bytes, place) of the shown tokens, whose text is checked after each."""
    generated, shown = GeneratedText(tokenizer, [], stop, most, Ends(shows_stop=False)), ShownTokens(tokenizer)
    found, text = [], ""
    for place, id in enumerate(ids):
        piece, reason = generated.push(id)
        token = ScoredToken(id, piece, -float(place), id in tokenizer.special_ids, piece=generated.piece)
        found += shown.push(token)
        text += piece
        assert text.startswith("".join(one.text for one in found))
        if reason is not None:
            break
    found += shown.end()
    assert text == generated.text == "".join(one.text for one in found)
    return [(one.text, one.data, -one.logprob) for one in found]


def test_end_tokens_and_stop_sequences_have_no_entries() -> None:
    tokenizer = byte_tokenizer()
    assert [("h", b"h", 0), ("i", b"i", 1)] == shown_of(tokenizer, [*b"hi", EOS])
    assert [("h", b"h", 0), ("i", b"i", 1)] == shown_of(tokenizer, [*b"hi!?x"], stop=["!?"])
    assert ["a", "!", "b"] == [text for text, _, _ in shown_of(tokenizer, [*b"a!b"], stop=["!?"], most=3)]
    assert ["a", "!"] == [text for text, _, _ in shown_of(tokenizer, [*b"a!", EOS], stop=["!?"])]


def test_a_token_that_a_stop_sequence_cuts_has_an_entry_for_its_beginning() -> None:
    tokenizer = metaspace_tokenizer("▁one", "▁two", "▁three")
    assert [("one", b"one", 0), (" t", b" t", 1)] == shown_of(tokenizer, [0, 1, 2], stop=["wo"])
    assert [("one", b"one", 0), (" two", b" two", 1), (" t", b" t", 2)] == shown_of(tokenizer, [0, 1, 2], ["hre"])
    assert [("one", b"one", 0)] == shown_of(tokenizer, [0, 1, 2], stop=[" two th"])


def test_parts_of_a_character_have_entries_once_it_is_shown() -> None:
    tokenizer = pieces_tokenizer(" \xe2", "\x98\x83 and")
    assert [(" ", b" \xe2", 0), ("☃ and", b"\x98\x83 and", 1)] == shown_of(tokenizer, [0, 1])
    first, last = [("", bytes([byte]), place) for place, byte in enumerate("☃".encode()[:2])], ("☃", b"\x83", 2)
    assert [*first, last, ("!", b"!", 3)] == shown_of(byte_tokenizer(), [*"☃!".encode()], stop=["☃?"])
    assert [] == shown_of(byte_tokenizer(), [*"☃?".encode()], stop=["☃?"])
    assert [] == shown_of(byte_tokenizer(), [*"☃".encode()[:2], EOS])


def test_parts_of_a_character_are_named_by_their_bytes() -> None:
    shown = ShownTokens(byte_tokenizer())
    tokens = [
        ScoredToken(byte, piece, -1.0, False, piece=piece) for byte, piece in zip("é".encode(), ["", "é"], strict=True)
    ]
    [lead, last] = [one for token in tokens for one in shown.push(token)]
    content = Scoring(0, byte_tokenizer()).of_chat([lead, last])["content"]
    assert [("\\xc3", [0xC3]), ("\\xa9", [0xA9])] == [(entry["token"], entry["bytes"]) for entry in content]
    told = CompletionLogprobs(Scoring(0, byte_tokenizer())).of([lead, last])
    assert (["bytes:\\xc3", "bytes:\\xa9"], [0, 0]) == (told["tokens"], told["text_offset"])


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("text", ["one two", "Grüße ☃"])
async def test_a_chat_tells_of_each_token_of_its_text(template: str, text: str) -> None:
    async def both(it: Site, asked: Json) -> None:
        [choice] = (await posted(it, "/v1/chat/completions", asked))["choices"]
        content = choice["logprobs"]["content"]
        assert choice["message"]["content"] == joined(content)
        assert None is choice["logprobs"]["refusal"]
        for entry in content:
            assert {"token", "logprob", "bytes", "top_logprobs"} == entry.keys()
            assert (-0.5, 2) == (entry["logprob"], len(entry["top_logprobs"]))
            assert {"token": entry["token"], "logprob": -0.5, "bytes": entry["bytes"]} == entry["top_logprobs"][0]
            assert (-1.5, 1) == (entry["top_logprobs"][1]["logprob"], len(entry["top_logprobs"][1]["bytes"]))
        chunks = await streamed(it, "/v1/chat/completions", asked)
        assert choice["message"]["content"] == text_of(chunks)
        parts = [chunk["choices"][0] for chunk in chunks]
        assert content == [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert all(
            part["delta"]["content"] == joined(part["logprobs"]["content"]) for part in parts if part["logprobs"]
        )
        assert None is parts[-1]["logprobs"] and parts[-1]["finish_reason"]

    async with answering_site(template, answer=text) as it:
        for stop in (None, ["wo", "ße"], ["nothing"]):
            await both(it, {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": stop})
        news = [new for step in it.shards.requests for new in step.add]
        assert [(True, 2)] * 6 == [(new.sampling.raw_logprobs, new.top_n_tokens) for new in news]


async def test_without_logprobs_nothing_is_asked_of_the_shards_and_nothing_told(template: str) -> None:
    async with answering_site(template) as it:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            for more in ({}, {"logprobs": None}, {"logprobs": False} if "chat" in path else {}):
                assert None is (await posted(it, path, {**body, **more}))["choices"][0]["logprobs"]
        assert not any(new.sampling.raw_logprobs for step in it.shards.requests for new in step.add)


async def test_a_completion_tells_of_each_token_by_its_place_in_the_text(template: str) -> None:
    async with answering_site(template) as it:
        asked = {**COMPLETION, "prompt": [PROMPT, PROMPT], "n": 2, "logprobs": 2}
        whole = await posted(it, "/v1/completions", asked)
        for choice in whole["choices"]:
            logprobs = choice["logprobs"]
            assert [*"one two"] == logprobs["tokens"] and "one two" == choice["text"]
            assert [-0.5] * 7 == logprobs["token_logprobs"]
            assert [*range(7)] == logprobs["text_offset"]
            assert {"o": -0.5, "p": -1.5} == logprobs["top_logprobs"][0]
        chunks = await streamed(it, "/v1/completions", asked)
        for index in range(4):
            parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["index"] == index]
            parts = [part for part in parts if part]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert whole["choices"][index]["logprobs"][name] == [one for part in parts for one in part[name]]


async def test_a_completion_without_candidates_tells_of_the_token_itself(template: str) -> None:
    async with answering_site(template) as it:
        [choice] = (await posted(it, "/v1/completions", {**COMPLETION, "logprobs": 0}))["choices"]
        assert [{character: -0.5} for character in "one two"] == choice["logprobs"]["top_logprobs"]


# ------------------------------------------------------------------------------------------------------------- prompts


def assert_echoed(choice: Json, prompt: bytes, answer: str, count: int) -> None:
    logprobs = choice["logprobs"]
    assert prompt.decode() + answer == choice["text"] == "".join(logprobs["tokens"])
    assert [None, *map(fake_raw_logprob, prompt[1:])] == logprobs["token_logprobs"][: len(prompt)]
    assert [-0.5] * len(answer) == logprobs["token_logprobs"][len(prompt) :]
    assert [*range(len(choice["text"]))] == logprobs["text_offset"]
    assert None is logprobs["top_logprobs"][0]
    for token, top in zip(prompt[1:], logprobs["top_logprobs"][1:], strict=False):
        expected = {chr(token + rank): fake_raw_logprob(token) - rank for rank in range(max(count, 1))}
        assert expected == top


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("most", [0, 1, None])
async def test_an_echoed_prompt_has_log_probabilities(template: str, count: int, most: int | None) -> None:
    async with answering_site(template) as it:
        answer = "one two"[:most]
        asked = {**COMPLETION, "echo": True, "logprobs": count, "max_tokens": most}
        for prompt in (PROMPT, [*PROMPT.encode()], [[*PROMPT.encode()], [*b"world"]]):
            body = await posted(it, "/v1/completions", {**asked, "prompt": prompt})
            texts = [PROMPT, "world"] if prompt and isinstance(prompt[0], list) else [PROMPT]
            assert len(texts) == len(body["choices"])
            for choice, text in zip(body["choices"], texts, strict=True):
                assert_echoed(choice, text.encode(), answer, count)
            usage = body["usage"]
            generated = (8 if most is None else most) * len(texts)
            assert (5 * len(texts), generated) == (usage["prompt_tokens"], usage["completion_tokens"])
            assert {"length" if most is not None else "stop"} == {c["finish_reason"] for c in body["choices"]}
            chunks = await streamed(it, "/v1/completions", {**asked, "prompt": prompt})
            for index, choice in enumerate(body["choices"]):
                parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                assert choice["text"] == "".join(part["text"] for part in parts)
                assert choice["finish_reason"] == parts[-1]["finish_reason"]
                for name, whole in choice["logprobs"].items():
                    assert whole == [one for part in parts if part["logprobs"] for one in part["logprobs"][name]]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_alone_takes_one_step_and_generates_nothing(template: str, is_stream: bool) -> None:
    async with answering_site(template) as it:
        asked = {**COMPLETION, "echo": True, "max_tokens": 0}
        if is_stream:
            asked["stream_options"] = {"include_usage": True}
            *chunks, last = await streamed(it, "/v1/completions", asked)
            assert PROMPT == text_of(chunks) and "length" == chunks[-1]["choices"][0]["finish_reason"]
            usage = last["usage"]
        else:
            body = await posted(it, "/v1/completions", asked)
            [choice] = body["choices"]
            assert (PROMPT, None, "length") == (choice["text"], choice["logprobs"], choice["finish_reason"])
            usage = body["usage"]
        assert (5, 0, 5) == (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        await it.all_free()
        assert 1 == sum(bool(step.chunk_ids) for step in it.shards.requests)
        assert not any(step.decode for step in it.shards.requests)
        text = (await it.http.get("/metrics")).text
        assert "tgi_request_success 1.0" in text and "tgi_request_generated_tokens_sum 0.0" in text


def test_a_long_prompt_s_log_probabilities_come_in_chunks_and_survive_a_loss(template: str) -> None:
    prompt = [*(b"The little fox walked along the river." * 3)][:100]

    async def story(deaths: set[int]) -> Json:
        limits = {"max_batch_prefill_tokens": 32, "max_input_length": 110}
        shards = fake_shards(make_limits(**limits), deaths=deaths, renewals=len(deaths), **answering("x"))
        async with site(shards, **limits) as it:
            asked = {**COMPLETION, "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
            return await posted(it, "/v1/completions", asked)

    calm, shaken = (asyncio.run(story(deaths)) for deaths in (set(), {2}))
    assert_echoed(calm["choices"][0], bytes(prompt), "", 2)
    assert calm["choices"] == shaken["choices"]


async def test_prompts_with_log_probabilities_neither_find_nor_leave_prefixes(template: str) -> None:
    async with site(prefix_caching=True) as it:
        prompt = [*range(1, 60)]
        plain = {**COMPLETION, "prompt": prompt, "max_tokens": 1}
        scored = {**plain, "echo": True, "logprobs": 1, "max_tokens": 0}
        cached = []
        for body in (scored, plain, scored, plain):
            usage = (await posted(it, "/v1/completions", body))["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert [0, 0, 0, 48] == cached


def test_an_echo_that_the_tokenizer_cannot_give_back_is_the_text_of_its_tokens() -> None:
    tokenizer = metaspace_tokenizer("▁the", "re", "▁", "é")
    end = tokenizer.tokenizer.token_to_id("</s>")
    scores = PromptScores()
    scores.extend([-1.0, -2.0], [], [])
    ids = [end, 0, 1]
    for prompt, texts in (("there", ["", "the", "re"]), ("</s> there", ["", "the", "re"]), (ids, ["", "the", "re"])):
        found = prompt_tokens(prompt, ids, scores, tokenizer)
        assert texts == [one.text for one in found]
        assert [None, -1.0, -2.0] == [one.logprob for one in found]
    assert ["</s>", "the", "re"] == [one.text for one in prompt_tokens("</s>there", ids, scores, tokenizer)]
    ids = [end, 0, end, 1, end]
    scores.extend([-3.0, -4.0], [], [])
    for prompt, texts in (
        ("there", ["", "the", "", "re", ""]),
        ("the</s>re", ["", "the", "</s>", "re", ""]),
        ("</s>the</s>re", ["</s>", "the", "</s>", "re", ""]),
        ("the</s>re</s>", ["", "the", "</s>", "re", "</s>"]),
        ("</s>the</s>re</s>", ["</s>", "the", "</s>", "re", "</s>"]),
        ("</s>there", ["", "the", "", "re", ""]),
    ):
        assert texts == [one.text for one in prompt_tokens(prompt, ids, scores, tokenizer)], prompt


# -------------------------------------------------------------------------------------------------------------- bounds


async def test_prompts_log_probabilities_can_be_switched_off(template: str) -> None:
    async with site(prefill_logprobs=False) as it:
        answer = await it.http.post("/v1/completions", json={**COMPLETION, "echo": True, "logprobs": 1})
        assert 400 == answer.status_code
        assert "`echo` with `logprobs` is switched off" in answer.json()["error"]["message"]
        await posted(it, "/v1/completions", {**COMPLETION, "echo": True})
        await posted(it, "/v1/completions", {**COMPLETION, "logprobs": 1})


def test_an_encoder_s_prompt_has_no_log_probabilities() -> None:
    asked = PromptRequest(PROMPT, GenerateParameters(), num_answers=1, raw_logprobs=True, prompt_logprobs=True)
    with closing(Workers(1)) as workers, pytest.raises(ValidationError, match="encoder reads the prompt"):
        validator = Validator(byte_tokenizer(), make_limits(), workers, decoder_start=3)
        asyncio.run(validator.validate(asked))


# ------------------------------------------------------------------------------------------------------------- best_of


def answer_of(*logprobs: float) -> Answer:
    tokens = [ScoredToken(1, "x", logprob, False) for logprob in logprobs]
    return Answer((), tokens, Finished(FinishReason.LENGTH, "x", len(tokens), Timings(0, 0, 0, 0)), None)


def test_the_likeliest_answers_to_each_prompt_come_first() -> None:
    answers = [answer_of(-3.0), answer_of(-1.0, -1.0, -1.0), answer_of(-2.0), *map(answer_of, (-1.0, -9.0, -2.0))]
    assert [1, 2, 3, 5] == likeliest(answers, 2, 2)
    assert [1, 3] == likeliest(answers, 2, 1)
    assert [0, 1, 2, 3, 4, 5] == likeliest(answers, 2, 3)


async def test_best_of_generates_more_and_gives_the_likeliest(template: str) -> None:
    async with answering_site(template) as it:
        asked = {"prompt": [PROMPT, PROMPT], "n": 2, "best_of": 3, "seed": 5, "temperature": 1, "max_tokens": 4}
        answer = await it.http.post("/v1/completions", json=asked)
        assert "16" == answer.headers["x-generated-tokens"]  # of the four answers that are given
        body = answer.json()
        assert [0, 1, 2, 3] == [choice["index"] for choice in body["choices"]]
        assert (10, 24) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        news = [new for step in it.shards.requests for new in step.add]
        assert [5, 6, 7] * 2 == [new.sampling.seed for new in news]
        assert all(new.sampling.raw_logprobs for new in news)
        assert None is body["choices"][0]["logprobs"]
        body = await posted(it, "/v1/completions", {**asked, "logprobs": 1, "echo": True})
        assert 4 == len(body["choices"]) == sum(choice["text"].startswith(PROMPT) for choice in body["choices"])
        refused = await it.http.post("/v1/completions", json={**asked, "stream": True})
        assert "cannot be streamed" in refused.json()["error"]["message"]
        assert 200 == (await it.http.post("/v1/completions", json={**asked, "n": 3, "stream": True})).status_code


async def test_best_of_compares_by_mean_log_probability(template: str) -> None:
    async with answering_site(template) as it:
        give, places = it.shards._give_token, iter(range(99))

        def with_logprob(id: int, masks: Any, reply: Any) -> None:
            give(id, masks, reply)
            reply.logprobs[-1] = [-5.0, -1.0, -3.0][next(places) % 3]

        it.shards._give_token = with_logprob  # type: ignore[method-assign]
        body = await posted(it, "/v1/completions", {**COMPLETION, "n": 2, "best_of": 3, "max_tokens": 1, "logprobs": 0})
        assert [[-1.0], [-3.0]] == [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]


async def test_what_json_has_no_number_for_is_told_as_openai_does(template: str) -> None:
    async with answering_site(template) as it:
        give = it.shards._give_token

        def with_logprob(id: int, masks: Any, reply: Any) -> None:
            give(id, masks, reply)
            reply.logprobs[-1] = float("-inf")

        it.shards._give_token = with_logprob  # type: ignore[method-assign]
        chat = await posted(it, "/v1/chat/completions", {**CHAT, "logprobs": True})
        assert {-9999.0} == {entry["logprob"] for entry in chat["choices"][0]["logprobs"]["content"]}
        text = await posted(it, "/v1/completions", {**COMPLETION, "logprobs": 1})
        assert {-9999.0} == {*text["choices"][0]["logprobs"]["token_logprobs"]}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_s_log_probabilities_are_written_in_a_thread(
    template: str, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a long prompt take longer than others' tokens can wait."""
    threads = []
    of = CompletionLogprobs.of

    def noting(self: CompletionLogprobs, tokens: Any) -> Any:
        threads.append(threading.current_thread())
        return of(self, tokens)

    monkeypatch.setattr(CompletionLogprobs, "of", noting)
    async with answering_site(template) as it:
        asked = {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": is_stream}
        assert 200 == (await it.http.post("/v1/completions", json=asked)).status_code
        assert threads and threading.main_thread() not in threads
