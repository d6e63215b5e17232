"""Bodies and limits: TGI's sentences in TGI's order, and nothing that a number can be breaks the server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError as SchemaError

from router.apis.tgi.bodies import GenerateRequest, prompt_request_of
from router.errors import MalformedBody, ValidationError
from router.requests.schemas import GenerateParameters, parse
from router.requests.validation import Validator, banned, check, check_streamable
from router.sandbox.workers import Workers
from router.scheduling.request import Sampling, ValidRequest
from router.shards.wire import new_sequence
from router.text.generated import Ends
from router.text.tokenizer import ModelTokenizer, TokenizerError
from tests.router.doubles import byte_tokenizer, make_limits
from tests.running import ROOT

LIMITS = make_limits(max_input_length=10, max_total_tokens=20, max_best_of=2)


def body(inputs: str = "hello", **parameters: Any) -> bytes:
    return json.dumps({"inputs": inputs, "parameters": parameters}).encode()


def validate(raw: bytes, **limits: Any) -> list[ValidRequest]:
    async def run() -> list[ValidRequest]:
        overrides = {"max_input_length": 10, "max_total_tokens": 20, "max_best_of": 2, **limits}
        with closing(Workers(1)) as workers:
            validator = Validator(byte_tokenizer(), make_limits(**overrides), workers)
            return await validator.validate(prompt_request_of(parse(GenerateRequest, raw)))

    return asyncio.run(run())


def refusal(raw: bytes, **limits: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        validate(raw, **limits)
    return str(caught.value).removeprefix("Input validation error: ")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": -1}, "`best_of` must be > 0 and <= 2. Given: -1"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive. Given: 0.0: leave it out for"),
        ({"temperature": 1e-60}, "`temperature` must be between"),
        ({"temperature": 1e308}, "`temperature` must be between"),
        ({"repetition_penalty": -1.0}, "`repetition_penalty` must be strictly positive. Given: -1.0"),
        ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0. Given: 2.1"),
        ({"presence_penalty": -2.5}, "`presence_penalty` must be >= -2.0 and <= 2.0. Given: -2.5"),
        ({"min_p": -0.1}, "`min_p` must be >= 0.0, which is off, and <= 1.0. Given: -0.1"),
        ({"min_p": 1.5}, "`min_p` must be >= 0.0, which is off, and <= 1.0. Given: 1.5"),
        ({"logit_bias": {"257": 1.0}}, "`logit_bias` has token 257, but the model knows 257 tokens: use ids up to 256"),
        *[
            ({"logit_bias": {key: 1.0}}, f"`logit_bias` has the key '{key[:32]}', which is no token id")
            for key in ("-1", "01", "", "9" * 5000, "٣")
        ],
        ({"logit_bias": {"7": 100.5}}, "`logit_bias` of token 7 must be >= -100 and <= 100. Given: 100.5"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "`logit_bias` must have at most 300 tokens. Given: 301"),
        ({"bad_words": [""]}, "`bad_words` has an empty text, which would ban everything: remove it"),
        ({"bad_words": ["a"] * 65}, "`bad_words` must have at most 64 texts. Given: 65: leave some out"),
        ({"bad_words": ["a" * 1001]}, "`bad_words` must have at most 1000 characters each. Given: 1001"),
        ({"bad_words": ["a" * 33]}, "`bad_words` must have 1 to 32 tokens each. Given: 33: send a shorter text"),
        ({"stop_token_ids": [0] * 65}, "`stop_token_ids` must have at most 64 tokens. Given: 65: leave some out"),
        ({"stop_token_ids": [257]}, "`stop_token_ids` has token 257, but the model knows 257 tokens: use ids of 0 to"),
        ({"stop_token_ids": [-1]}, "`stop_token_ids` has token -1, but the model knows 257 tokens: use ids of 0 to"),
        ({"min_tokens": -1}, "`min_tokens` must be >= 0, which is off. Given: -1"),
        ({"min_tokens": 4, "max_new_tokens": 3}, "`min_tokens` must be <= `max_new_tokens`, here 3. Given: 4"),
        ({"min_tokens": 16}, "`min_tokens` must be <= `max_new_tokens`, here 15. Given: 16"),
        ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 1.1}, "`top_p` must be > 0.0 and < 1.0, or 1.0 for off. Given: 1.1"),
        ({"typical_p": 1.1}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive. Given: 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive. Given: 0"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"stop": [""]}, "`stop` has an empty sequence"),
        ({"stop": ["a", "b" * 1001]}, "`stop` sequences must have at most 1000 characters. Given: 1001: shorten them"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"seed": -1}, "`seed` must be >= 0"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"top_n_tokens": -1}, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 10. Given: 0"),
        ({"truncate": 11}, "`truncate` must be strictly positive and less than 10. Given: 11"),
        ({"max_new_tokens": 16}, "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 5 `inputs` tokens and 16"),
        *[
            ({"grammar": {"type": kind, "value": value}}, sentence)
            for kind, value, sentence in (
                ("json", {}, "grammar is not supported"),
                ("regex", {}, "`grammar.value` must be a string for the type regex"),
                ("lark", "a" * 70000, "`grammar.value` has 70000 bytes: give at most 65536"),
                ("json", "a" * 70000, "`grammar.value` has 70000 bytes: give at most 65536"),
                ("json", "[]", "grammar is not valid: `value` must be a JSON schema"),
                ("json", "[" * 60, "grammar is not valid: `value` must be a JSON schema"),
                ("json", "[" * 6000, "`grammar.value` is nested more than 128 levels deep: flatten"),
                ("json_schema", {"type": "object"}, "`grammar.value` must have a `schema`, an object"),
            )
        ],
        ({"grammar": {"type": "regex", "value": "a"}, "ignore_eos": True}, "`ignore_eos` and `grammar` exclude each"),
    ],
)
def test_broken_rule_is_named_with_value_and_bound(parameters: dict[str, Any], sentence: str) -> None:
    assert refusal(body(**parameters)).startswith(sentence)


def test_a_stop_sequence_may_be_long() -> None:
    assert [len(stop) for stop in validate(body(stop=["a", "\U0001f642" * 1000]))[0].stop] == [1, 1000]


def test_empty_prompt_is_refused() -> None:
    assert refusal(body("")) == "`inputs` cannot be empty"


def test_long_prompt_usually_reports_the_sum() -> None:
    assert refusal(body("x" * 30, max_new_tokens=1)).startswith("`inputs` tokens + `max_new_tokens` must be <= 20")
    assert refusal(body("x" * 11, max_new_tokens=1)).startswith("`inputs` must have less than 11 tokens. Given: 11")


def test_endpoint_without_best_of_or_top_n_says_so() -> None:
    assert "not allowed" in refusal(body(best_of=2), max_best_of=1)
    assert "not allowed" in refusal(body(top_n_tokens=1), max_top_n_tokens=0)


def test_first_broken_rule_wins() -> None:
    assert refusal(body("", best_of=9, temperature=0.0)).startswith("`best_of`")
    assert refusal(body("", temperature=0.0, top_k=0)).startswith("`temperature`")


def test_token_beyond_the_models_vocabulary_is_refused() -> None:
    assert refusal(body("z"), vocab_size=100).startswith("`inputs` has token 122, but the model knows 100 tokens")


def test_absent_max_new_tokens_fills_up_and_null_means_absent() -> None:
    assert validate(body("hello"))[0].max_new_tokens == 15
    nothing = dict.fromkeys(GenerateParameters.model_fields)
    assert validate(body("hello", **nothing))[0].max_new_tokens == 15
    assert validate(b'{"inputs": "hello", "parameters": null, "stream": null}')[0].max_new_tokens == 15


def test_unknown_keys_are_ignored() -> None:
    assert validate(b'{"inputs": "hello", "what": 1, "parameters": {"is": {"this": []}}}')


def test_truncate_keeps_the_end_by_ids() -> None:
    [request] = validate(body("ab🙂", truncate=3))
    assert list(request.token_ids) == list("🙂".encode()[-3:])


def test_top_p_and_typical_p_of_one_are_off() -> None:
    sampling = validate(body(top_p=1.0, typical_p=1.0))[0].sampling
    assert (sampling.top_p, sampling.typical_p, sampling.do_sample) == (1.0, 1.0, False)


@pytest.mark.parametrize(
    ("parameters", "does_sample"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"do_sample": True}, True),
        ({"do_sample": True, "temperature": 1.0}, True),
        ({"repetition_penalty": 1.5}, False),
    ],
)
def test_what_makes_a_request_sample(parameters: dict[str, Any], does_sample: bool) -> None:
    assert validate(body(**parameters))[0].sampling.do_sample is does_sample


def test_absent_seed_is_random_and_every_sample_of_best_of_has_its_own() -> None:
    requests = [*validate(body(best_of=2, do_sample=True)), *validate(body())]
    assert len({request.sampling.seed for request in requests}) == 3
    assert all(0 <= request.sampling.seed < 2**64 for request in requests)
    assert validate(body(seed=2**64 - 1))[0].sampling.seed == 2**64 - 1


def test_zero_best_of_means_one_unless_streaming() -> None:
    assert len(validate(body(best_of=0))) == 1
    with pytest.raises(ValidationError, match="not supported when streaming"):
        check_streamable(GenerateParameters(best_of=0))
    with pytest.raises(ValidationError, match="`decoder_input_details` == true is not supported"):
        check_streamable(GenerateParameters(decoder_input_details=True))


def test_prompt_logprobs_are_refused_where_the_server_does_not_give_them() -> None:
    limits = make_limits(prefill_logprobs=False)
    with pytest.raises(ValidationError, match="`decoder_input_details` is switched off on this server: leave it out"):
        check(
            prompt_request_of(GenerateRequest(inputs="a", parameters=GenerateParameters(decoder_input_details=True))),
            limits,
        )
    check(prompt_request_of(GenerateRequest(inputs="a", parameters=GenerateParameters(details=True))), limits)


def test_biases_are_of_tokens_and_words_of_one_token_are_never_generated() -> None:
    (request,) = validate(body(logit_bias={"65": -3, "0": 0.5, "66": 2.0, "9": 0}, bad_words=["B", "bad", "a", "bad"]))
    assert {65: -3.0, 0: 0.5, 66: -math.inf, 97: -math.inf} == request.sampling.biases
    assert ((98, 97, 100),) == request.sampling.banned_words
    sent = new_sequence(1, request, [0], 16).sampling
    assert request.sampling.biases == dict(zip(sent.bias_ids, sent.biases, strict=True))
    assert ([98, 97, 100], [3]) == (list(sent.banned_word_ids), list(sent.banned_word_lengths))


def test_bad_words_leave_some_token() -> None:
    message = refusal(body("a", bad_words=["a", "xb"]), vocab_size=2)
    assert message.startswith("`inputs` has token 97")
    with pytest.raises(ValidationError, match="`bad_words` may leave none of the model's 2 tokens: send fewer texts"):
        banned(Sampling(), ["\u0100", "\u0101"], Mock(encode_plain=lambda text: [ord(text) - 256]), 2)


def test_bad_words_that_break_the_tokenizer_are_refused() -> None:
    with pytest.raises(ValidationError, match="`bad_words` cannot be tokenised: it broke; change the texts"):
        banned(Sampling(), ["a"], Mock(encode_plain=Mock(side_effect=TokenizerError("it broke"))), 2)


def test_end_tokens_are_masked_until_so_many_tokens_are_out() -> None:
    (request,) = validate(body(min_tokens=3, stop_token_ids=[65, 66, 65]))
    assert (3, (65, 66, 256)) == (request.sampling.min_tokens, request.sampling.end_ids)
    assert Ends(frozenset({65, 66}), ignores_eos=False, min_tokens=3) == request.ends
    sent = new_sequence(1, request, [0], 16).sampling
    assert (3, [65, 66, 256]) == (sent.min_tokens, list(sent.end_ids))


def test_no_route_of_tgi_asks_for_raw_log_probabilities() -> None:
    (request,) = validate(body(details=True))
    assert not new_sequence(1, request, [0], 16).sampling.raw_logprobs
    raw = replace(request, sampling=replace(request.sampling, raw_logprobs=True))
    assert new_sequence(1, raw, [0], 16).sampling.raw_logprobs


def test_no_end_token_is_masked_where_none_ends_or_none_must_wait() -> None:
    (ignoring,) = validate(body(min_tokens=3, ignore_eos=True))
    assert (0, ()) == (ignoring.sampling.min_tokens, ignoring.sampling.end_ids)
    assert Ends(ignores_eos=True, min_tokens=3) == ignoring.ends
    (patient,) = validate(body(stop_token_ids=[65]))
    assert (0, ()) == (patient.sampling.min_tokens, patient.sampling.end_ids)


NUMBERS = (
    "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p max_new_tokens truncate seed"
    " top_n_tokens presence_penalty min_p min_tokens"
).split()
NASTY = (
    "-1 0 1 10 11 2147483648 9223372036854775808 18446744073709551615 18446744073709551616 1e308 1e999 NaN Infinity"
    " -Infinity -0.0 0.5 true false [] {}"
).split()
NASTY += ['"5"', "9" * 10_000, "1" + "0" * 100]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_fine_or_a_validation_error(name: str) -> None:
    """And what passes fits the wire: 32-bit floats and unsigned integers."""
    for value in NASTY:
        raw = f'{{"inputs": "hi", "parameters": {{"{name}": {value}}}}}'.encode()
        try:
            [request] = validate(raw)
        except ValidationError as error:
            assert error.status == 422
            assert len(str(error)) < 300
            continue
        assert value not in ("true", "[]", "{}", '"5"', "NaN")
        sampling = request.sampling
        assert 0 < sampling.temperature < 3.5e38 and 0 < sampling.top_p <= 1 and 0 <= sampling.top_k < 2**32, value
        assert 0 <= sampling.seed < 2**64 and 0 < request.max_new_tokens < 20 and 0 <= request.top_n_tokens <= 5, value
        assert 0 <= sampling.min_p <= 1 and -2 <= sampling.presence_penalty <= 2, value
        some = sampling.repetition_penalty, sampling.frequency_penalty, sampling.typical_p
        assert all(map(math.isfinite, some)), value


@pytest.mark.parametrize("value", ["1", '"true"', "[]", "0.0"])
def test_flags_must_be_booleans(value: str) -> None:
    for name in "do_sample watermark details return_full_text decoder_input_details ignore_eos".split():
        message = refusal(f'{{"inputs": "hi", "parameters": {{"{name}": {value}}}}}'.encode())
        assert message.startswith(f"`parameters.{name}`")


def test_what_is_not_json_is_malformed() -> None:
    whole = b'{"inputs": "a"}'
    broken = [b'{"inputs": "\xff"}', b"\xef\xbb\xbf" + whole, b"inputs=a", whole.replace(b'"a"', b"'a'")]
    for raw in (b"", b"{", b"[" * 100, whole[:-1], *broken):
        with pytest.raises(MalformedBody):
            parse(GenerateRequest, raw)


SHAPES = [b"null", b"[]", b'"a"', b"{}", b'{"inputs": null}', b'{"inputs": 5}', b'{"inputs": ["a"]}']
SHAPES += [b'{"inputs": "\\ud800"}', b'{"inputs": "\\ud800 and more \\udc00"}', b'{"inputs": "a", "stream": 1}']
SHAPES += [b'{"inputs": "a", "parameters": %b}' % value for value in (b"[]", b'{"stop": "a"}', b'{"stop": [1]}')]


def test_json_of_another_shape_is_invalid_and_not_repeated() -> None:
    for raw in SHAPES:
        with pytest.raises(ValidationError) as caught:
            parse(GenerateRequest, raw)
        assert caught.value.status == 422
        assert "and more" not in str(caught.value)


def many(start: str, unit: str, end: str, number: int) -> bytes:
    return f"{start}{','.join([unit] * number)}{end}".encode()


@pytest.mark.parametrize(
    ("start", "unit", "end"),
    [
        ('{"inputs": "a", "parameters": {"stop": [', "1", "]}}"),
        ('{"inputs": "a", "parameters": {"stop": [', '""', "]}}"),
        ('{"inputs": "a", "parameters": {"grammar": {"a": [', "[[]]", "]}}}"),
        ('{"inputs": "a", "parameters": {"grammar": {', '"a": {"b": 1}', "}}}"),
        ('{"inputs": "a", ', '"b": "c"', "}"),
        ('{"inputs": "a", ', r'"\\": "\""', "}"),
        ('{"inputs": [', "{}", "]}"),
        ("[", '{"a": {}}', "]"),
        ("[", '{"a": {}}', ""),
    ],
)
def test_a_body_of_many_values_is_refused_before_they_are_built(
    start: str, unit: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million of them took three seconds of the event loop and 800 MB."""
    with monkeypatch.context() as unbuilt:
        unbuilt.setattr(GenerateRequest, "model_validate_json", Mock(side_effect=AssertionError))
        with pytest.raises(ValidationError, match="the body has more than 10000 values: leave out"):
            parse(GenerateRequest, many(start, unit, end, 10_001))
    with pytest.raises(ValidationError) as few:
        parse(GenerateRequest, many(start, unit, end, 10) + b"}")
    assert "values" not in str(few.value)


def test_commas_and_brackets_of_a_prompt_are_no_values() -> None:
    text = 'f(a, b[c], {}, "d", \\"e\\")\n' * 10_000
    assert text == parse(GenerateRequest, body(text, stop=["]", '"'])).inputs


def test_a_list_of_wrong_values_ends_at_the_first() -> None:
    for schema in GenerateParameters, GenerateRequest:
        for name, field in schema.model_fields.items():
            is_list = "list[" in str(field.annotation)
            assert is_list == any(getattr(rule, "fail_fast", False) for rule in field.metadata), name
    with pytest.raises(SchemaError) as caught:
        GenerateRequest.model_validate_json(many('{"inputs": "a", "parameters": {"stop": [', "1", "]}}", 1000))
    assert caught.value.error_count() == 1


def test_nul_and_odd_unicode_are_text_like_any_other() -> None:
    text = "a\0b \u202e \U0001f468‍\U0001f469"
    request = parse(GenerateRequest, body(text))
    check(prompt_request_of(request), LIMITS)
    assert text == request.inputs


# ---------------------------------------------------------------------------------------------------- tokenising


def demo_tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(str(ROOT / "server" / "demo"))


def run_validator(story: Callable[[Validator], Awaitable[Any]], tokenizer: ModelTokenizer, **limits: Any) -> Any:
    async def run() -> Any:
        with closing(Workers(1)) as workers:
            return await story(Validator(tokenizer, make_limits(**limits), workers))

    return asyncio.run(run())


WORDS = [f"{number:x}" for number in range(2000)]
LONG = " ".join(WORDS[number * 7919 % 2000] for number in range(80_000))  # 0.2 s of tokenising


@pytest.mark.parametrize("parameters", [{}, {"truncate": 10}, None], ids=["generate", "truncated", "tokenize"])
def test_loop_goes_on_turning_while_a_long_prompt_is_tokenised(parameters: dict[str, Any] | None) -> None:
    """A tokenizer that keeps the interpreter's lock lets it turn some dozens of times."""

    async def story(validator: Validator) -> int:
        if parameters is None:
            work = asyncio.ensure_future(
                validator.tokenise(prompt_request_of(GenerateRequest(inputs=LONG)), lambda text, tokens: b"")
            )
        else:
            request = GenerateRequest(inputs=LONG, parameters=GenerateParameters(max_new_tokens=1, **parameters))
            work = asyncio.ensure_future(validator.validate(prompt_request_of(request)))  # type: ignore[arg-type]
        turns = 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        await work
        return turns

    limits = {"max_input_length": 10**6, "max_total_tokens": 2 * 10**6, "vocab_size": 2048}
    assert run_validator(story, demo_tokenizer(), **limits) > 1000


def test_text_of_too_many_characters_is_refused_before_it_is_tokenised() -> None:
    tokenizer = demo_tokenizer()
    most = tokenizer.most_characters_per_token
    assert most is not None
    refused = replace(tokenizer, tokenizer=Mock(wraps=tokenizer.tokenizer))
    vars(refused)["most_characters_per_token"] = most

    async def story(validator: Validator) -> list[str]:
        text = "a" * (most * 10 + 1)
        sentences = []
        for work in (
            validator.validate(prompt_request_of(GenerateRequest(inputs=text))),
            validator.tokenise(prompt_request_of(GenerateRequest(inputs=text)), shaped),
        ):
            with pytest.raises(ValidationError) as caught:
                await work
            sentences.append(str(caught.value).removeprefix("Input validation error: "))
        return sentences

    generate, tokenize = run_validator(story, refused, max_input_length=10)
    start = f"`inputs` must have less than 11 tokens. Given: {most * 10 + 1} characters, and {most * 10} are the most"
    assert generate == f"{start} that so many tokens can hold: shorten the prompt, or set `truncate` to 10"
    assert tokenize == f"{start} that so many tokens can hold: send a shorter text"
    refused.tokenizer.encode_batch_fast.assert_not_called()


def test_prompt_that_will_be_truncated_may_be_four_times_too_long() -> None:
    most = byte_tokenizer().most_characters_per_token
    assert most is not None
    assert len(validate(body("x" * most * 40, truncate=3))[0].token_ids) == 3
    assert refusal(body("x" * (most * 40 + 1), truncate=3)) == (
        f"`inputs` must have at most {most * 40} characters if `truncate` is set, 4 times what 10 tokens can hold. "
        f"Given: {most * 40 + 1}: send the end of the text alone"
    )


def shaped(text: str, tokens: list[Any]) -> list[Any]:
    return tokens


def test_tokenize_has_the_limit_of_a_prompt() -> None:
    async def story(validator: Validator) -> Any:
        assert len(await validator.tokenise(prompt_request_of(GenerateRequest(inputs="x" * 10)), shaped)) == 10
        with pytest.raises(ValidationError, match=r"must have less than 11 tokens\. Given: 11.* send a shorter text"):
            await validator.tokenise(prompt_request_of(GenerateRequest(inputs="x" * 11)), shaped)

    run_validator(story, byte_tokenizer(), max_input_length=10)


class PanicException(BaseException):
    """What a panic in the tokenizer's Rust code arrives as; the real class cannot be imported."""


@pytest.mark.parametrize("error", [PanicException("secret"), RuntimeError("secret"), TypeError("secret")])
def test_whatever_a_tokenizer_raises_is_one_clear_refusal(error: BaseException) -> None:
    broken = Mock(encode_batch_fast=Mock(side_effect=error), encode_batch=Mock(side_effect=error))
    tokenizer = replace(byte_tokenizer(), tokenizer=broken)
    vars(tokenizer)["most_characters_per_token"] = None

    async def story(validator: Validator) -> None:
        for work in (
            validator.validate(prompt_request_of(GenerateRequest(inputs="a"))),
            validator.tokenise(prompt_request_of(GenerateRequest(inputs="a")), shaped),
        ):
            with pytest.raises(ValidationError, match="`inputs` cannot be tokenised") as caught:
                await work
            assert "secret" not in str(caught.value)

    run_validator(story, tokenizer)
