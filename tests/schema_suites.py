"""Other people's JSON schemas as grammars: what is drawn keeps to them, and what is not served is refused by name.

    python -m tests.schema_suites [--seeds 3]

The schemas are those of JSON-Schema-Test-Suite, which the source archive of `jsonschema` carries, and those of the test
of llama.cpp's `json-schema-to-grammar`, which that of `llama-cpp-python` carries. Archives come from the package index
and stay below `.suites`. Texts are drawn at random from the masks of the grammar; one that comes to its end must be
valid by `jsonschema`, by the schema as its author wrote it. Prints what became of all, and ends with 1 for a text that
is not valid.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from router.errors import ValidationError
from router.grammars.asked import grammar_of
from router.grammars.grammar import Grammar
from router.grammars.matcher import GrammarError, Matchers
from router.schemas import GenerateParameters, GrammarParameters
from router.text import ModelTokenizer
from tests.router.grammars.test_matcher import DEMO, drawn
from tests.running import ROOT

FOLDER = ROOT / ".suites"
PUBLIC_INDEX = "https://pypi.org/simple"
DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}
OF_LLAMA_CPP = r"/vendor/llama\.cpp/tests/test-json-schema-to-grammar\.cpp$"
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


def index() -> str:
    """The package index that pip uses."""
    command = (sys.executable, "-m", "pip", "config", "get", "global.index-url")
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or PUBLIC_INDEX


def archive(name: str, version: str) -> Path:
    """The source archive of a package, whose digest is the index's."""
    wanted = f"{name.replace('-', '_')}-{version}.tar.gz"
    path = FOLDER / wanted
    if not path.exists():
        request = urllib.request.Request(
            f"{index().rstrip('/')}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            files = json.load(answer)["files"]
        [file] = [one for one in files if one["filename"] == wanted]
        with urllib.request.urlopen(file["url"], timeout=300) as answer:
            content = answer.read()
        assert hashlib.sha256(content).hexdigest() == file["hashes"]["sha256"]
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(content)
    return path


def members(path: Path, pattern: str) -> Iterator[str]:
    """The texts of an archive's files whose names match."""
    with tarfile.open(path) as files:
        for member in files:
            if member.isfile() and re.search(pattern, member.name) and (file := files.extractfile(member)):
                yield file.read().decode()


def of_test_suite() -> Iterator[Case]:
    """The schemas of JSON-Schema-Test-Suite that refer to nothing outside of themselves."""
    for draft, validator in DRAFTS.items():
        for text in members(archive("jsonschema", version("jsonschema")), rf"/json/tests/{draft}/[^/]*\.json$"):
            for group in json.loads(text):
                if "http://localhost" not in json.dumps(group["schema"]):
                    yield group["schema"], validator


def of_llama_cpp() -> Iterator[Case]:
    """The schemas of the test of `json-schema-to-grammar`."""
    [text] = members(
        archive("llama-cpp-python", "0.3.9"), r"/vendor/llama\.cpp/tests/test-json-schema-to-grammar\.cpp$"
    )
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


def main() -> int:
    """Returns 0 if every finished text is valid."""
    parser = argparse.ArgumentParser(prog="tests.schema_suites", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="texts of each schema")
    seeds = parser.parse_args().seeds
    tokenizer = ModelTokenizer.load(str(DEMO))
    matchers = Matchers(str(DEMO / "tokenizer.json"), VOCABULARY, [*tokenizer.eos_ids])
    wrong = False
    for name, schemas in (("JSON-Schema-Test-Suite", of_test_suite()), ("llama.cpp", of_llama_cpp())):
        found = tried(schemas, matchers, tokenizer, seeds)
        print(f"{name}: {found.schemas} schemas, {found.texts} texts, {found.unfinished} cut, {len(found.wrong)} wrong")
        for reason, count in found.refused.most_common():
            print(f"  refused {count}: {reason}")
        for sentence in found.wrong:
            print(f"  WRONG {sentence}")
        wrong |= bool(found.wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    random.seed(0)
    sys.exit(main())
