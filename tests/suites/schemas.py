"""Other people's JSON schemas as grammars: what is drawn keeps to them, and what is not served is refused by name.

The schemas are those of JSON-Schema-Test-Suite, which the source archive of `jsonschema` carries, and those of the test
of llama.cpp's `json-schema-to-grammar`, which that of `llama-cpp-python` carries. Texts are drawn at random from the
masks of the grammar; one that comes to its end must be valid by `jsonschema`, by the schema as its author wrote it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.metadata import version
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from router.errors import ValidationError
from router.grammars.matcher import GrammarError, Matchers
from router.requests.grammars import grammar_of
from router.requests.schemas import GenerateParameters, GrammarParameters
from router.scheduling.grammar import Grammar
from router.text.tokenizer import ModelTokenizer
from tests.router.grammars.test_matcher import DEMO, drawn
from tests.suites.archives import LLAMA_CPP, archive, members

DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}
Case = tuple[Any, type[Validator]]  # a schema, and what it is read by where it does not say
VOCABULARY = 2048  # of the embedded model
RAW = re.compile(r'R"""\((.*?)\)"""', re.DOTALL)  # of C++


@dataclass
class Found:
    """What became of the schemas of one suite."""

    schemas: int = 0
    texts: int = 0
    unfinished: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def of_test_suite() -> Iterator[Case]:
    """The schemas of JSON-Schema-Test-Suite that refer to nothing outside of themselves."""
    for draft, validator in DRAFTS.items():
        for _, text in members(archive("jsonschema", version("jsonschema")), rf"/json/tests/{draft}/[^/]*\.json$"):
            for group in json.loads(text):
                if "http://localhost" not in json.dumps(group["schema"]):
                    yield group["schema"], validator


def of_llama_cpp() -> Iterator[Case]:
    """The schemas of the test of `json-schema-to-grammar`."""
    [(_, text)] = members(archive(*LLAMA_CPP), r"/vendor/llama\.cpp/tests/test-json-schema-to-grammar\.cpp$")
    for raw in RAW.findall(text):
        try:
            schema = json.loads(raw)
        except ValueError:  # a grammar that is expected of one
            continue
        yield schema, jsonschema.Draft7Validator


def exactly(text: str) -> Any:
    """JSON with decimal numbers: 27160000.4066 is a multiple of 0.0001, and not in binary."""
    return json.loads(text, parse_float=Decimal)


def grammar_for(schema: Any) -> Grammar:
    """What a client's `grammar` comes to. Raises ValidationError."""
    if not isinstance(schema, dict):
        raise ValidationError("a schema that is no object")
    found = grammar_of(GenerateParameters(grammar=GrammarParameters(type="json", value=schema)))
    assert found is not None
    return found


def tried(cases: Iterator[Case], matchers: Matchers, tokenizer: ModelTokenizer, seeds: int) -> Found:
    """Draw texts of each schema."""
    found = Found()
    for schema, usual in cases:
        found.schemas += 1
        try:
            grammar = grammar_for(schema)
            matchers.begin(grammar).go_on()
        except (ValidationError, GrammarError) as error:
            found.refused[re.sub(r"[\"'`{\[].*", "…", str(error))[:60]] += 1
            continue
        validator = jsonschema.validators.validator_for(schema, usual)(exactly(json.dumps(schema)))
        for seed in range(seeds):
            _draw(found, schema, grammar, matchers, tokenizer, validator, seed)
    return found


def _draw(
    found: Found,
    schema: Any,
    grammar: Grammar,
    matchers: Matchers,
    tokenizer: ModelTokenizer,
    validator: Validator,
    seed: int,
) -> None:
    eos = next(iter(tokenizer.eos_ids))
    tokens = drawn(matchers, grammar, VOCABULARY, [eos], seed)
    if tokens[-1] != eos:
        found.unfinished += 1
        return
    found.texts += 1
    text = tokenizer.decode(tokens[:-1])
    try:
        validator.validate(exactly(text))
    except ArithmeticError:  # a number that nobody can hold, such as 1e99999999999999999999
        found.unfinished += 1
    except (ValueError, jsonschema.ValidationError) as error:
        found.wrong.append(f"{json.dumps(schema)[:300]}\n    gave {text[:200]}\n    {str(error).splitlines()[0]}")


def all_are_valid(seeds: int = 3) -> bool:
    """Draw `seeds` texts of each schema, and print what became of all."""
    tokenizer = ModelTokenizer.load(str(DEMO))
    matchers = Matchers(str(DEMO / "tokenizer.json"), VOCABULARY, [*tokenizer.eos_ids])
    valid = True
    for name, schemas in (("JSON-Schema-Test-Suite", of_test_suite()), ("llama.cpp's schemas", of_llama_cpp())):
        found = tried(schemas, matchers, tokenizer, seeds)
        print(f"{name}: {found.schemas} schemas, {found.texts} texts, {found.unfinished} cut, {len(found.wrong)} wrong")
        for reason, count in found.refused.most_common():
            print(f"  refused {count}: {reason}")
        for sentence in found.wrong:
            print(f"  WRONG {sentence}")
        valid &= not found.wrong
    return valid
