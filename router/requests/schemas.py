"""HTTP bodies: how they are read, and the parameters of generation by TGI's names, which all APIs' become.

Strict where a mistake would change the answer (no `true` for 1, no "5" for 5, no NaN), lenient where clients differ:
every field may be null, which means absent, and unknown keys are ignored. Ranges are not here but in `validation.py`,
whose sentences and order are TGI's.

Bodies are parsed on the event loop, because a good one takes microseconds. A bad one must not take much longer: its
values are counted, and how deep they lie, before any is built (`refuse_excess`), and a list ends at its first error.

All APIs' bodies become a `PromptRequest`: a prompt, and how to go on from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic import ValidationError as SchemaError
from pydantic_core import PydanticCustomError

from router.errors import MalformedBody, ValidationError

# Of a 64-bit seed. What lies outside is no number that any field could mean.
Integer = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
# Valid JSON by its grammar, but nothing that Python text or numbers can hold: a wrong value, not a broken body.
UNREPRESENTABLE = ("number out of range", "hex escape", "surrogate")
# Of a body. A million of them, each named in an error or kept in a dictionary, would stop the event loop for seconds.
MOST_VALUES = 10_000
# Of lists and objects within each other: far fewer than Python's stack bears, far more than schemas need.
MOST_NESTING = 128

# The last quote is optional: a text without an end is passed over once, and not tried again from each quote in it.
TEXTS_AND_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)

Body = TypeVar("Body", bound=BaseModel)
# A text that is yet to be made, such as a chat's by the model's template: for an owner, whose requests take turns with
# others'. It is made once the request has its permit and its deadline.
Rendering = Callable[[str], Awaitable[str]]


class Strict(BaseModel):
    """A body or a part of one: no value is taken for another, and unknown keys are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


def _refuse_unless_absent(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("not_served", "is not served: leave it out")


def _refuse_misplaced(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("misplaced", "belongs in `parameters`: put it there")


# A field whose meaning would be lost, where unknown ones are ignored.
Misplaced = Annotated[
    None, BeforeValidator(_refuse_misplaced), Field(description="Must be absent: it belongs in `parameters`.")
]
Unserved = Annotated[None, BeforeValidator(_refuse_unless_absent), Field(description="Not served: must be absent.")]


class NotServed(NamedTuple):
    """What is said of a field with a meaning that is not served. neutral: its values that mean nothing."""

    neutral: Sequence[Any] = (None,)
    sentence: str = "is not served: leave it out"


class Lenient(Strict):
    """A body, or a part of one, whose unknown fields are kept, to be looked through and named in the log."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", frozen=True)

    not_served: ClassVar[Mapping[str, NotServed]] = {}
    known: ClassVar[frozenset[str]] = frozenset()  # of other fields: those that are looked at all the same

    def refuse_what_is_not_served(self) -> None:
        """Raises ValidationError for a field whose meaning would be lost."""
        for name, its in self.not_served.items():
            if getattr(self, name, None) not in its.neutral:
                raise ValidationError(f"`{name}` {its.sentence}")

    def ignored(self) -> list[str]:
        """Names of the fields that are not looked at, also those within other objects, each once."""
        extra = self.model_extra or {}
        looked_at = self.known.union(self.not_served)
        found = [name for name, value in extra.items() if value is not None and name not in looked_at]
        for name in type(self).model_fields:
            value = getattr(self, name)
            for one in value if isinstance(value, list) else (value,):
                found += [f"{name}.{inner}" for inner in one.ignored()] if isinstance(one, Lenient) else ()
        return list(dict.fromkeys(found))


class GrammarParameters(Strict):
    """What a text must be: JSON by a schema, or what a regular expression or a Lark grammar matches."""

    type: Literal["json", "json_object", "json_schema", "regex", "lark"] = Field(
        description="`json_object` is another name of `json`; `lark` is not TGI's."
    )
    value: str | dict[str, Any] = Field(
        description="For `json` a JSON schema, also as a string; for `json_schema` {name, schema}; else the expression."
    )


class GenerateParameters(Lenient):
    """How to generate. An absent field means that its default holds."""

    best_of: Integer | None = Field(default=None, description="Samples to draw; the likeliest is returned.")
    temperature: float | None = Field(default=None, description="> 0. Divides the scores before sampling.")
    repetition_penalty: float | None = Field(default=None, description="> 0. 1.0 means no penalty.")
    frequency_penalty: float | None = Field(default=None, description="-2.0 to 2.0. 0 means no penalty.")
    presence_penalty: float | None = Field(
        default=None, description="-2.0 to 2.0. Taken once from the score of every token that was generated."
    )
    top_k: Integer | None = Field(default=None, description="> 0. Keep the k likeliest tokens.")
    top_p: float | None = Field(
        default=None, description="> 0 and <= 1. Keep the likeliest tokens of this total probability."
    )
    typical_p: float | None = Field(
        default=None, description="> 0 and <= 1. Keep the most typical tokens of this total."
    )
    min_p: float | None = Field(
        default=None, description="0 to 1. Keep the tokens of at least this share of the likeliest one's probability."
    )
    do_sample: bool | None = Field(default=None, description="Draw tokens at random instead of taking the likeliest.")
    max_new_tokens: Integer | None = Field(default=None, description="Absent: as many as `max_total_tokens` leaves.")
    return_full_text: bool | None = Field(default=None, description="Put the prompt in front of the generated text.")
    stop: list[str] | None = Field(
        default=None, description="End after the first of these; it is kept in the text.", fail_fast=True
    )
    stop_token_ids: list[Integer] | None = Field(
        default=None, description="End after any of these tokens too. At most 64.", fail_fast=True
    )
    ignore_eos: bool | None = Field(default=None, description="Do not end at the model's end tokens.")
    min_tokens: Integer | None = Field(
        default=None, description="Least number of generated tokens: nothing ends the text before."
    )
    speculate: Integer | None = Field(
        default=None, description="Tokens guessed ahead in a step, at most; 0: none. The answer stays the same."
    )
    truncate: Integer | None = Field(default=None, description="Keep only this many tokens at the end of the prompt.")
    watermark: bool | None = Field(default=None, description="Watermark the text (arXiv 2301.10226).")
    details: bool | None = Field(default=None, description="Return tokens, log-probabilities and the finish reason.")
    decoder_input_details: bool | None = Field(default=None, description="Return log-probabilities of the prompt.")
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Token id -> -100 to 100, added to its score first of all. At most 300 tokens."
    )
    bad_words: list[str] | None = Field(
        default=None,
        description="Texts whose tokens are never generated one after another. At most 64.",
        fail_fast=True,
    )
    seed: Integer | None = Field(default=None, description="0 to 2^64 - 1. The same seed gives the same text.")
    top_n_tokens: Integer | None = Field(default=None, description="Candidates to return with each token.")
    grammar: GrammarParameters | None = Field(default=None, description="Constraint on the text.")
    adapter_id: str | None = Field(default=None, description="Name of an adapter. Absent: the model without one.")
    prompt_embeds: Unserved = None
    input_embeds: Unserved = None


def drawn(temperature: float | None, **narrowing: Any) -> dict[str, Any]:
    """Parameters of APIs in which tokens are drawn unless the temperature is 0, which needs nothing that narrows.

    Raises ValidationError.
    """
    if temperature is not None and temperature < 0:
        raise ValidationError(f"`temperature` must be >= 0. Given: {temperature}")
    return {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature, **narrowing}


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt. Parameters have TGI's names, whatever the API calls them.

    prompt: a text, token ids as they are, or how to make a text. has_special_tokens: whether a text has all special
    tokens that it needs, as a chat template writes them.
    """

    prompt: str | Sequence[int] | Rendering
    given: GenerateParameters  # with TGI's name of an adapter, if there is one
    has_special_tokens: bool = False
    shows_stop: bool = True  # whether a stop sequence is part of the answer's text
    shown_marks: frozenset[int] = frozenset()  # special tokens that are part of the answer's text: marks to read it by
    # From the end of the prompt (`ModelTokenizer.end_of`) to a grammar that holds the answer, in Lark's notation.
    answer_grammar: Callable[[str], str | None] | None = None
    num_answers: int | None = None  # how many are wanted of it, each with a seed of its own; None: by `best_of`
    raw_logprobs: bool = False  # whether log-probabilities and candidates are the model's own, before any parameter
    prompt_logprobs: bool = False  # whether those of the prompt's tokens are wanted too
    priority: int = 0  # the lower, the earlier it leaves the queue, beside others of its key
    cache_salt: str = ""  # prefixes are shared among requests of the same one alone
    prediction: str = ""  # what much of the answer may be
    generates: bool = True  # else the prompt is computed and nothing follows it; `max_new_tokens` is 1 then
    model: str | None = None  # the model or the adapter that it names, as most APIs call it


def parse(schema: type[Body], body: bytes, most_values: int = MOST_VALUES) -> Body:
    """Read a body. Raises MalformedBody or ValidationError; neither repeats what was sent."""
    refuse_excess(body, most_values)
    try:
        return schema.model_validate_json(body)
    except SchemaError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        if first["type"] == "json_invalid":
            kind = ValidationError if any(word in message for word in UNREPRESENTABLE) else MalformedBody
            raise kind(message) from None
        where = ".".join(_within(body, first["loc"], is_missing=first["type"] == "missing"))
        raise ValidationError(f"`{where}`: {message}" if where else message) from None


def _within(body: bytes, place: Sequence[int | str], *, is_missing: bool) -> Iterator[str]:
    """Where in a body: a schema's place has the types that a field may have too, which are left out."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(body)  # which takes what the schema does: numbers of a hundred digits, and infinity
    for part in place:
        known = (isinstance(value, dict) and part in value) or (isinstance(value, list) and part in range(len(value)))
        if known:
            yield str(part)
            value = value[part]
    if is_missing:
        yield str(place[-1])


def refuse_excess(body: bytes, most: int, what: str = "the body") -> None:
    """Raises ValidationError for JSON of more than so many values, or nested too deep, before any of them is built."""
    refuse_excess_within((body,), most, what)


def refuse_excess_within(texts: Iterable[bytes], most: int, what: str = "the body") -> None:
    """The same for several texts of JSON together. Each is counted by itself: none may hide what another has."""
    left = most
    for text in texts:
        left -= num_values(text, left)
        if left < 0:
            raise ValidationError(
                f"{what} has more than {most} values: leave out what is no field of a request, or shorten it"
            )
        if is_nested_deeper(text, MOST_NESTING):
            raise ValidationError(f"{what} is nested more than {MOST_NESTING} levels deep: flatten it")


def is_nested_deeper(text: bytes, most: int) -> bool:
    """Whether more than so many lists and objects lie within each other."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    depth = 0
    for found in TEXTS_AND_BRACKETS.finditer(text):
        if (begin := found[0][:1]) in b"[{":
            depth += 1
            if depth > most:
                return True
        elif begin in b"]}":
            depth -= 1
    return False


def num_values(text: bytes, enough: int) -> int:
    """How many values JSON has; beyond `enough` it may say fewer than there are, or more.

    Every value but the last of a list or object is followed by a comma, and each list and object has one last; empty
    ones are counted twice. What is within strings counts for nothing: a prompt may have as many commas as it likes.
    """
    if (most := _num_begun(text)) <= enough and text.count(b'"') <= 4 * enough:
        return most
    without_escapes = text.replace(rb"\\", b"").replace(rb"\"", b"")
    outside_strings = without_escapes.split(b'"', 4 * enough + 4)[::2]
    # Of so many strings, names and values alike, every other one is a value at least.
    return max(_num_begun(b"".join(outside_strings)), len(outside_strings) // 2)


def _num_begun(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))
