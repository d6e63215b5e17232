"""The file of API keys: names, keys or their digests, and what each may ask for.

JSON, or TOML where the name ends in `.toml`: a list `keys` of tables. Every problem is found in one go, and no sentence
about one shows a key.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_KEYS = 1000  # each has metrics of its own
MOST_WEIGHT = 1000.0
LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute")
FIELDS = ("name", "key", "sha256", "weight", *LIMITS)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[\x21-\x7e]{1,256}")  # what a header carries unchanged
WORD = re.compile(r"[a-z]+(_[a-z]+)*")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, known by its SHA-256 alone. Limits are None where there are none."""

    name: str
    digest: bytes
    weight: float = 1.0
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def digest_of(key: bytes) -> bytes:
    """What is kept and compared in place of a key."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> list[ApiKey]:
    """The keys in a file. Raises ValueError that names every problem."""
    try:
        content = path.read_bytes()
        document = tomllib.loads(content.decode()) if path.suffix == ".toml" else json.loads(content)
    except OSError as error:
        raise ValueError(f"api_keys_file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of JSON, TOML and UTF-8; their messages quote nothing of the file
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ValueError(f"api_keys_file {path} is not {kind}: {_position(error)}") from None
    tables = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(tables, list) or not tables:
        raise ValueError(f'api_keys_file {path} has no list `keys`: write {{"keys": [{{"name": "…", "key": "…"}}]}}')
    problems = list(_problems(tables))
    if problems:
        raise ValueError(f"api_keys_file {path}: {'; '.join(problems)}")
    return [_key(table) for table in tables]


def _position(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno}, column {error.colno}"
    found = re.search(r"\(at [^)]*\)", str(error))
    return f"a mistake {found.group().strip('()')}" if found else "it is not text of this form"


def _key(table: Mapping[str, Any]) -> ApiKey:
    digest = bytes.fromhex(table["sha256"]) if "sha256" in table else digest_of(table["key"].encode())
    limits = {name: table[name] for name in LIMITS if name in table}
    return ApiKey(table["name"], digest, float(table.get("weight", 1.0)), **limits)


def _problems(tables: list[Any]) -> Iterator[str]:
    """One sentence for each thing that is wrong."""
    if len(tables) > MOST_KEYS:
        yield f"{len(tables)} keys are more than {MOST_KEYS}: let several clients share one"
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict):
            yield f"key {number} is no table: give it a name and a key"
            continue
        found = list(_problems_of(table))
        name = table.get("name")
        where = f"key {number} ({name})" if isinstance(name, str) and NAME.fullmatch(name) else f"key {number}"
        yield from (f"{where}: {problem}" for problem in found)
        if found:
            continue
        if name in names:
            yield f"{where}: the name is taken: each key needs one of its own"
        names.add(table["name"])
        digest = _key(table).digest
        if digest in owners:
            yield f"{where}: it is the same key as {owners[digest]}'s: give each its own"
        owners.setdefault(digest, table["name"])


def _problems_of(table: Mapping[str, Any]) -> Iterator[str]:
    for name in table:
        if name not in FIELDS:
            shown = f"`{name}`" if WORD.fullmatch(name) else "a field"  # which may be a key in the wrong place
            yield f"{shown} is unknown: there are {', '.join(FIELDS)}"
    if not _matches(NAME, table.get("name")):
        yield "`name` must be 1 to 64 of A-Z, a-z, 0-9, `_`, `.` and `-`"
    if ("key" in table) == ("sha256" in table):
        yield "give either `key` or `sha256`"
    elif "key" in table and not _matches(KEY, table["key"]):
        yield "`key` must be 1 to 256 printable ASCII characters without spaces"
    elif "sha256" in table and not _matches(SHA256, table["sha256"]):
        yield "`sha256` must be 64 hexadecimal digits: what printf %s KEY | sha256sum begins with"
    for name in LIMITS:
        value = table.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"`{name}` is {value!r:.40}: give a whole number from 1, or leave it out for no limit"
    weight = table.get("weight", 1.0)
    if type(weight) not in (int, float) or not math.isfinite(weight) or not 0.001 <= weight <= MOST_WEIGHT:
        yield f"`weight` is {weight!r:.40}: give a number from 0.001 to {MOST_WEIGHT:g}"


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
