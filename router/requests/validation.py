"""Body to ValidRequest: refuse what breaks a rule, fill the gaps, tokenise.

The order of the rules and the first half of every sentence are TGI's, because clients and people search for them; the
remedy after it is ours. Deliberately kinder than TGI: `top_p` and `typical_p` of exactly 1.0 mean "off". Deliberately
stricter: stop sequences that are empty or very long, texts of many times what fits, even with `truncate`, and numbers
that the wire's 32-bit floats cannot carry, are refused.

A request passes `check`, which holds every rule that needs no tokenizer; then its prompt becomes tokens; then
`_fitted` holds the rules on their number. Words that are banned and grammars come last. Both functions are pure.
`Validator` adds the tokenizer, which runs in threads (`router/sandbox/workers.py`): a long prompt must not stall
running streams.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from router.errors import TooLong, ValidationError
from router.grammars.compiler import Compiler
from router.requests.grammars import answer_grammar_of, grammar_of, renaming_errors
from router.requests.schemas import GenerateParameters, PromptRequest, Rendering
from router.sandbox.workers import Workers
from router.scheduling.grammar import CompiledGrammar, Grammar
from router.scheduling.limits import Limits
from router.scheduling.request import Sampling, ValidRequest
from router.text.generated import Ends
from router.text.tokenizer import ModelTokenizer, TokenizerError

MOST_BIASES = 300
LARGEST_BIAS = 100.0
MOST_BAD_WORDS = 64
MOST_STOP_TOKENS = 64
MOST_WORD_CHARACTERS = 1000  # more can never be few enough tokens of any language's words
MOST_WORD_TOKENS = 32  # what the shards look back for
# A request keeps its stop sequences for as long as it runs, and each piece of its text is searched for them.
MOST_CHARACTERS_OF_STOP = 1000
# How much longer than what fits a text may be that will be truncated: it is tokenised as a whole.
MOST_TIMES_TRUNCATED = 4
# Of normal 32-bit floats: what lies outside would reach the shards as 0 or infinity.
MIN_FLOAT32 = 2.0**-126
MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
SHORTEN = "send a shorter text"

Tokens = list[tuple[int, tuple[int, int]]]  # ids with their [start, stop) in characters
Result = TypeVar("Result")
Shaped = TypeVar("Shaped")

logger = logging.getLogger(__name__)


class Validator:
    """Checks requests against the limits and tokenises their prompts in the threads of `workers`.

    Where keys share the server, `owner` is whose request it is. compiler: None: no grammars.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        limits: Limits,
        workers: Workers,
        decoder_start: int | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler or Compiler()
        self._decoder_start = decoder_start
        self._limits = limits
        per_token = tokenizer.most_characters_per_token
        self._most_characters = None if per_token is None else per_token * limits.max_input_length
        self._workers = workers

    async def validate(self, asked: PromptRequest, owner: str = "") -> list[ValidRequest]:
        """The request, once for each answer or sample that it wants. Raises ValidationError."""
        limits, tokenizer = self._limits, self._tokenizer
        checked = check(asked, limits)
        if asked.prompt_logprobs and self._decoder_start is not None:
            raise ValidationError(
                "this model's encoder reads the prompt, so it has no log-probabilities: leave out `echo` or `logprobs`"
            )
        token_ids = await self._token_ids(asked, owner)
        valid = _fitted(asked, checked, token_ids, limits, tokenizer.eos_ids)
        if bad_words := asked.given.bad_words:
            ban = partial(banned, valid.sampling, bad_words, tokenizer, limits.vocab_size)
            valid = replace(valid, sampling=await self._in_thread(ban, owner))
        if (grammar := await self._grammar(asked, checked.grammar, token_ids, owner)) is not None:
            valid = replace(valid, grammar=grammar, ends=replace(valid.ends, has_grammar=True))
        if asked.prediction and limits.speculate:
            predicted = asked.prediction[: self._most_characters]
            predicted_ids = await self._in_thread(partial(self._encode, predicted, None, False), owner)
            valid = replace(valid, prediction=predicted_ids)
        valid = valid.read_by_encoder(self._decoder_start)
        samplings = _samplings(valid.sampling, checked.best_of, asked.num_answers)
        return [replace(valid, sampling=sampling) for sampling in samplings]

    async def _grammar(
        self, asked: PromptRequest, given: Grammar | None, token_ids: Sequence[int], owner: str
    ) -> CompiledGrammar | None:
        held = None
        if (of_answer := asked.answer_grammar) is not None:
            end = self._tokenizer.end_of(token_ids)
            held = answer_grammar_of(await self._in_thread(partial(of_answer, end), owner))
        wanted = held or given
        if wanted is None:
            return None
        with renaming_errors(is_held=held is not None):
            return await self._compiler.compile(wanted, owner)

    async def _token_ids(self, asked: PromptRequest, owner: str) -> list[int]:
        truncate = asked.given.truncate
        text = await asked.prompt(owner) if callable(asked.prompt) else asked.prompt
        if not isinstance(text, str):
            return list(text[-truncate:] if truncate else text)
        if truncate is None:
            remedy = f"shorten the prompt, or set `truncate` to {self._limits.max_input_length}"
            self._refuse_many_characters(text, remedy)
        else:
            self._refuse_much_to_truncate(text)
        return await self._in_thread(partial(self._encode, text, truncate, not asked.has_special_tokens), owner)

    async def tokenise(self, asked: PromptRequest, shape: Callable[[str, Tokens], Shaped], owner: str = "") -> Shaped:
        """What `shape` makes of a prompt's text and its tokens, in a thread too. Raises ValidationError."""
        text = await asked.prompt(owner) if callable(asked.prompt) else asked.prompt
        assert isinstance(text, str)
        self._refuse_many_characters(text, SHORTEN)
        return await self._in_thread(
            lambda: shape(text, self._encode_with_offsets(text, not asked.has_special_tokens)), owner
        )

    async def detokenise(self, token_ids: Sequence[int], skip_special_tokens: bool, owner: str = "") -> str:
        """The text of token ids, in a thread too. Raises ValidationError."""
        limits = self._limits
        if len(token_ids) > limits.max_total_tokens:
            raise ValidationError(
                f"`ids` must have at most {limits.max_total_tokens} token ids (max_total_tokens). Given: "
                f"{len(token_ids)}: send them in parts"
            )
        if token_ids and max(token_ids) >= limits.vocab_size:
            raise ValidationError(
                f"`ids` has token {max(token_ids)}, but the model knows {limits.vocab_size} tokens: leave it out"
            )
        return await self._in_thread(partial(self._tokenizer.decode_long, token_ids, skip_special_tokens), owner)

    async def count(self, prompt: Rendering, owner: str = "") -> int:
        """How many tokens a chat's prompt has, more than fit or not. Raises ValidationError."""
        text = await prompt(owner)
        self._refuse_many_characters(text, SHORTEN)
        return await self._in_thread(lambda: len(self._encode(text, None, add_special_tokens=False)), owner)

    async def _in_thread(self, work: Callable[[], Result], owner: str) -> Result:
        try:
            return await self._workers.do(work, owner)
        except TokenizerError as error:
            logger.error("a prompt could not be tokenised: %s", error)
            raise ValidationError(f"`inputs` cannot be tokenised: {error}; change the text") from None

    def _encode(self, text: str, truncate: int | None, add_special_tokens: bool) -> list[int]:
        token_ids = self._tokenizer.encode(text, add_special_tokens)
        return token_ids[-truncate:] if truncate else token_ids

    def _encode_with_offsets(self, text: str, add_special_tokens: bool) -> Tokens:
        """Counted first: offsets of many tokens are dear, and too many are refused."""
        if (count := self._tokenizer.count(text, add_special_tokens)) > self._limits.max_input_length:
            raise _too_long(count, self._limits, SHORTEN)
        return self._tokenizer.encode_with_offsets(text, add_special_tokens)

    def _refuse_many_characters(self, text: str, remedy: str) -> None:
        """Before tokenising, which takes seconds for megabytes. No text that would fit is refused."""
        if self._most_characters is not None and len(text) > self._most_characters:
            given = f"{len(text)} characters, and {self._most_characters} are the most that so many tokens can hold"
            raise _too_long(None, self._limits, remedy, given)

    def _refuse_much_to_truncate(self, text: str) -> None:
        if self._most_characters is None or len(text) <= (most := MOST_TIMES_TRUNCATED * self._most_characters):
            return
        raise ValidationError(
            f"`inputs` must have at most {most} characters if `truncate` is set, {MOST_TIMES_TRUNCATED} times what "
            f"{self._limits.max_input_length} tokens can hold. Given: {len(text)}: send the end of the text alone"
        )


# ------------------------------------------------------------------------------------------------------- before tokens


@dataclass(frozen=True, slots=True)
class Checked:
    """What follows from parameters that keep every rule that does not depend on the prompt's tokens."""

    best_of: int
    sampling: Sampling
    stop: tuple[str, ...]
    top_n_tokens: int
    grammar: Grammar | None


def check_streamable(parameters: GenerateParameters) -> None:
    """Rules of streaming alone, which come before everything else."""
    if parameters.best_of not in (None, 1):
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise ValidationError("`decoder_input_details` == true is not supported when streaming tokens")


def check(asked: PromptRequest, limits: Limits) -> Checked:
    """Every rule before tokenisation, in order; the first that is broken raises ValidationError."""
    given = asked.given
    best_of = _best_of(given, limits)
    sampling = _sampling(given)
    if given.max_new_tokens is not None and given.max_new_tokens <= 0:
        raise ValidationError(f"`max_new_tokens` must be strictly positive. Given: {given.max_new_tokens}")
    stop = _stop(given, limits)
    if given.seed is not None and best_of > 1:
        raise ValidationError("`seed` must not be set when `best_of` > 1")
    if given.seed is not None and given.seed < 0:
        raise ValidationError(f"`seed` must be >= 0 and <= {2**64 - 1}. Given: {given.seed}")
    seed = secrets.randbits(64) if given.seed is None else given.seed
    sampling = replace(
        sampling, seed=seed, biases=_logit_bias(given, limits.vocab_size), raw_logprobs=asked.raw_logprobs
    )
    _check_bad_words(given)
    _check_ends(given, limits.vocab_size)
    top_n_tokens = _top_n_tokens(given, limits)
    if not asked.prompt:
        raise ValidationError("`inputs` cannot be empty")
    if (given.decoder_input_details or asked.prompt_logprobs) and not limits.prefill_logprobs:
        raise ValidationError(
            "`decoder_input_details` is switched off on this server: leave it out, or start the server with "
            "--enable-prefill-logprobs true"
        )
    if given.truncate is not None and not 0 < given.truncate <= limits.max_input_length:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {limits.max_input_length}. Given: {given.truncate}"
        )
    return Checked(best_of, sampling, stop, top_n_tokens, grammar_of(given))


def _best_of(given: GenerateParameters, limits: Limits) -> int:
    best_of = given.best_of or 1
    if best_of != 1 and limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if not 0 < best_of <= limits.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of} (max_best_of)")
    warpers = (given.temperature, given.top_k, given.top_p, given.typical_p, given.min_p)
    if best_of > 1 and not given.do_sample and all(warper is None for warper in warpers):
        raise ValidationError("you must use sampling when `best_of` is > 1: set `do_sample`")
    return best_of


def _sampling(given: GenerateParameters) -> Sampling:
    """Without its seed. A temperature of 1.0 alone warps nothing, so it does not make a request sample."""
    temperature = _positive("temperature", given.temperature)
    repetition_penalty = _positive("repetition_penalty", given.repetition_penalty)
    frequency_penalty = 0.0 if given.frequency_penalty is None else given.frequency_penalty
    if not -2.0 <= frequency_penalty <= 2.0:
        raise ValidationError(f"`frequency_penalty` must be >= -2.0 and <= 2.0. Given: {frequency_penalty}")
    presence_penalty = given.presence_penalty or 0.0
    if not -2.0 <= presence_penalty <= 2.0:
        raise ValidationError(f"`presence_penalty` must be >= -2.0 and <= 2.0. Given: {presence_penalty}")
    min_p = given.min_p or 0.0
    if not 0.0 <= min_p <= 1.0:
        raise ValidationError(f"`min_p` must be >= 0.0, which is off, and <= 1.0. Given: {min_p}")
    top_p = _share("top_p", given.top_p)
    typical_p = _share("typical_p", given.typical_p)
    top_k = given.top_k or 0
    if given.top_k is not None and top_k <= 0:
        raise ValidationError(f"`top_k` must be strictly positive. Given: {top_k}")
    has_warper = temperature != 1.0 or top_k != 0 or top_p < 1.0 or typical_p < 1.0 or min_p > 0.0
    return Sampling(
        do_sample=bool(given.do_sample) or has_warper,
        temperature=temperature,
        top_k=min(top_k, 2**32 - 1),
        top_p=top_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        min_p=min_p,
        watermark=bool(given.watermark),
    )


def _positive(name: str, value: float | None) -> float:
    """A factor: > 0 as a 32-bit float too, which is what the shards compute with."""
    if value is None:
        return 1.0
    if value <= 0.0:
        remedy = ": leave it out for the likeliest token each time" if name == "temperature" else ""
        raise ValidationError(f"`{name}` must be strictly positive. Given: {value}{remedy}")
    if not MIN_FLOAT32 <= value <= MAX_FLOAT32:
        raise ValidationError(f"`{name}` must be between 1.2e-38 and 3.4e38, the range of a 32-bit float")
    return value


def _share(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if not MIN_FLOAT32 <= value <= 1.0:
        raise ValidationError(f"`{name}` must be > 0.0 and < 1.0, or 1.0 for off. Given: {value}")
    return value


def _stop(given: GenerateParameters, limits: Limits) -> tuple[str, ...]:
    stop = tuple(given.stop or ())
    if len(stop) > limits.max_stop_sequences:
        raise ValidationError(
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(stop)} (max_stop_sequences)"
        )
    if "" in stop:
        raise ValidationError("`stop` has an empty sequence, which would match at once: remove it")
    if (longest := max(map(len, stop), default=0)) > MOST_CHARACTERS_OF_STOP:
        raise ValidationError(
            f"`stop` sequences must have at most {MOST_CHARACTERS_OF_STOP} characters. Given: {longest}: shorten them"
        )
    return stop


def _top_n_tokens(given: GenerateParameters, limits: Limits) -> int:
    top_n_tokens = given.top_n_tokens or 0
    if top_n_tokens != 0 and limits.max_top_n_tokens == 0:
        raise ValidationError("`top_n_tokens` != 0 is not allowed for this endpoint")
    if not 0 <= top_n_tokens <= limits.max_top_n_tokens:
        raise ValidationError(f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n_tokens}")
    return top_n_tokens


def _logit_bias(given: GenerateParameters, vocab_size: int) -> dict[int, float]:
    """The biases by token. Raises ValidationError."""
    asked = given.logit_bias or {}
    if len(asked) > MOST_BIASES:
        raise ValidationError(
            f"`logit_bias` must have at most {MOST_BIASES} tokens. Given: {len(asked)}: keep those that matter most"
        )
    biases = {}
    for key, bias in asked.items():
        id = _token_id(key, vocab_size)
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise ValidationError(f"`logit_bias` of token {id} must be >= -100 and <= 100. Given: {bias:g}")
        biases[id] = bias
    return {id: bias for id, bias in biases.items() if bias}


def _token_id(key: str, vocab_size: int) -> int:
    is_number = key.isascii() and key.isdecimal() and len(key) < 20 and (key == "0" or key[0] != "0")
    if not is_number:
        raise ValidationError(
            f'`logit_bias` has the key {key[:32]!r}, which is no token id: write ids as decimal numbers, such as "42"'
        )
    if int(key) >= vocab_size:
        raise ValidationError(
            f"`logit_bias` has token {key}, but the model knows {vocab_size} tokens: use ids up to {vocab_size - 1}"
        )
    return int(key)


def _check_bad_words(given: GenerateParameters) -> None:
    """What can be told of `bad_words` without their tokens. Raises ValidationError."""
    words = given.bad_words or []
    if len(words) > MOST_BAD_WORDS:
        raise ValidationError(
            f"`bad_words` must have at most {MOST_BAD_WORDS} texts. Given: {len(words)}: leave some out"
        )
    if "" in words:
        raise ValidationError("`bad_words` has an empty text, which would ban everything: remove it")
    if (longest := max(map(len, words), default=0)) > MOST_WORD_CHARACTERS:
        raise ValidationError(
            f"`bad_words` must have at most {MOST_WORD_CHARACTERS} characters each. Given: {longest}: shorten them"
        )


def _check_ends(given: GenerateParameters, vocab_size: int) -> None:
    """What can be told of ends, and of `speculate`, before the prompt is tokenised. Raises ValidationError."""
    stop_ids = given.stop_token_ids or []
    if len(stop_ids) > MOST_STOP_TOKENS:
        raise ValidationError(
            f"`stop_token_ids` must have at most {MOST_STOP_TOKENS} tokens. Given: {len(stop_ids)}: leave some out"
        )
    for id in stop_ids:
        if not 0 <= id < vocab_size:
            raise ValidationError(
                f"`stop_token_ids` has token {id}, but the model knows {vocab_size} tokens: "
                f"use ids of 0 to {vocab_size - 1}"
            )
    if given.min_tokens is not None and given.min_tokens < 0:
        raise ValidationError(f"`min_tokens` must be >= 0, which is off. Given: {given.min_tokens}")
    if given.speculate is not None and given.speculate < 0:
        raise ValidationError(f"`speculate` must be >= 0, which is off. Given: {given.speculate}")


# --------------------------------------------------------------------------------------------------------- with tokens


def _fitted(
    asked: PromptRequest, checked: Checked, token_ids: list[int], limits: Limits, eos_ids: frozenset[int]
) -> ValidRequest:
    """The request with its prompt's tokens, by the rules that need their number. Raises ValidationError."""
    given = asked.given
    max_new_tokens = _max_new_tokens(token_ids, given.max_new_tokens, limits)
    min_tokens = given.min_tokens or 0
    if min_tokens > max_new_tokens:
        raise ValidationError(
            f"`min_tokens` must be <= `max_new_tokens`, here {max_new_tokens}. Given: {min_tokens}: ask for fewer"
        )
    ends = Ends(
        frozenset(given.stop_token_ids or ()),
        bool(given.ignore_eos),
        min_tokens,
        shows_stop=asked.shows_stop,
        shown_ids=asked.shown_marks,
    )
    end_ids = tuple(sorted(id for id in ends.ids(eos_ids) if id < limits.vocab_size)) if min_tokens else ()
    if end_ids and len(end_ids) >= limits.vocab_size:
        raise ValidationError(f"`stop_token_ids` are all of the model's {limits.vocab_size} tokens: send fewer")
    return ValidRequest(
        token_ids=token_ids,
        max_new_tokens=max_new_tokens,
        sampling=replace(checked.sampling, min_tokens=min_tokens if end_ids else 0, end_ids=end_ids),
        stop=checked.stop,
        ends=ends,
        top_n_tokens=checked.top_n_tokens,
        prompt_logprobs=asked.prompt_logprobs or bool(given.decoder_input_details),
        generates=asked.generates,
        priority=asked.priority,
        speculate=given.speculate,
        cache_salt=asked.cache_salt,
    )


def _max_new_tokens(token_ids: list[int], max_new_tokens: int | None, limits: Limits) -> int:
    """The number of tokens to generate behind these. Raises ValidationError."""
    num_inputs = len(token_ids)
    if num_inputs == 0:
        raise ValidationError("`inputs` has no tokens: the tokenizer dropped all of its characters")
    new_tokens = limits.max_total_tokens - num_inputs if max_new_tokens is None else max_new_tokens
    if num_inputs + new_tokens > limits.max_total_tokens:
        shorter = " or shorten the prompt, or set `truncate`" if new_tokens < limits.max_total_tokens else ""
        raise TooLong(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. Given: {num_inputs} `inputs` "
            f"tokens and {new_tokens} `max_new_tokens`: ask for fewer{shorter}",
            most=limits.max_total_tokens,
            most_prompt=limits.max_input_length,
            num_prompt=num_inputs,
            num_new=new_tokens,
        )
    if num_inputs > limits.max_input_length:
        raise _too_long(num_inputs, limits, f"shorten the prompt, or set `truncate` to {limits.max_input_length}")
    if max(token_ids) >= limits.vocab_size:
        raise ValidationError(
            f"`inputs` has token {max(token_ids)}, but the model knows {limits.vocab_size} tokens: this text cannot "
            "be given to this model"
        )
    return new_tokens


def _too_long(num_prompt: int | None, limits: Limits, remedy: str, given: str = "") -> TooLong:
    """num_prompt: its tokens; None where they were not counted, and `given` says how long it is."""
    most = limits.max_input_length
    return TooLong(  # in TGI's words
        f"`inputs` must have less than {most + 1} tokens. Given: {given or num_prompt}: {remedy}",
        most=limits.max_total_tokens,
        most_prompt=most,
        num_prompt=num_prompt,
    )


def banned(sampling: Sampling, words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int) -> Sampling:
    """The same without these words: one token is never generated, of several the last not after the others.

    Raises ValidationError.
    """
    try:
        tokens = {tuple(tokenizer.encode_plain(word)): None for word in words}  # in order, each once
    except TokenizerError as error:
        raise ValidationError(f"`bad_words` cannot be tokenised: {error}; change the texts") from None
    for ids in tokens:
        if not 0 < len(ids) <= MOST_WORD_TOKENS:
            raise ValidationError(
                f"`bad_words` must have 1 to {MOST_WORD_TOKENS} tokens each. Given: {len(ids)}: "
                f"{'send a shorter text' if ids else 'remove the text that the tokenizer drops'}"
            )
        if max(ids) >= vocab_size:
            raise ValidationError(
                f"`bad_words` has token {max(ids)}, but the model knows {vocab_size} tokens: leave that text out"
            )
    if len({*sampling.end_ids, *(ids[-1] for ids in tokens)}) >= vocab_size:
        raise ValidationError(f"`bad_words` may leave none of the model's {vocab_size} tokens: send fewer texts")
    never = {ids[0]: -math.inf for ids in tokens if len(ids) == 1}
    several = tuple(ids for ids in tokens if len(ids) > 1)
    return replace(sampling, biases={**sampling.biases, **never}, banned_words=several)


def _samplings(sampling: Sampling, best_of: int, num_answers: int | None) -> Iterator[Sampling]:
    """One for each sample of `best_of`, or for each answer, with seeds of their own; those of answers follow."""
    yield sampling
    if num_answers is None:
        for _ in range(best_of - 1):
            yield replace(sampling, seed=secrets.randbits(64))
    else:
        for number in range(1, num_answers):
            yield replace(sampling, seed=(sampling.seed + number) % 2**64)
