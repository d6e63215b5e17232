"""API keys: an account for each, with its limits, its share of the server and what it has used.

The keys are `api_key` and those of `api_keys_file`: JSON, or TOML where the name ends in `.toml`, with a list `keys` of
tables. The file is checked for changes once a second while requests come. All problems in it are reported together, no
message shows a key, and a file that cannot be used leaves the accounts as they are. Accounts are found by digest: the
time of a look-up depends on SHA-256 of what was sent, and tells nothing about a key.

Left out: what a share is worth (`router/scheduling/fairness.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
import stat
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.errors import Overloaded
from router.scheduling.drain_rate import DrainRate, whole_seconds
from router.scheduling.fairness import may_take, most_held

MOST_KEYS = 1000  # each has metrics of its own
MOST_WEIGHT = 1000.0
LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute")
FIELDS = ("name", "key", "sha256", "weight", *LIMITS, "adapters", "admin")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[\x21-\x7e]{1,256}")  # what a header carries unchanged
WORD = re.compile(r"[a-z]+(_[a-z]+)*")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
LONE_NAME = "default"  # of the key that `api_key` gives
RECHECK_S = 1.0
OTHERS_MAY_READ = stat.S_IRGRP | stat.S_IROTH
TOKEN_KINDS = ("prompt", "generated")
ACCOUNT_LIMITS = (*LIMITS, "share")
NO_DIGEST = bytes(32)  # a digest that no key has

logger = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, known by its SHA-256 alone. Limits are None where there are none."""

    name: str
    digest: bytes
    weight: float = 1.0
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    adapters: frozenset[str] | None = None  # names that it may use, "" for the model without one; None: all
    admin: bool = False  # whether it may load and unload adapters


class MinuteBudget:
    """A token bucket: `limit` per minute, and as much at once; without limit if None."""

    def __init__(self, limit: int | None, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._left = float(limit or 0)
        self._at = clock()

    def change(self, limit: int | None) -> None:
        """Change the limit; what was used of the old one counts against the new one."""
        self._refill()
        self._left += (limit or 0) - (self._limit or 0)
        self._limit = limit

    def take(self, amount: int) -> float:
        """Take so much and return 0, or take nothing and return the seconds until so much is available.

        More than the limit may be taken from a full bucket, and is paid back afterwards.
        """
        if self._limit is None:
            return 0.0
        self._refill()
        missing = min(amount, self._limit) - self._left
        if missing > 0:
            return 60 * missing / self._limit
        self._left -= amount
        return 0.0

    def give_back(self, amount: int) -> None:
        """Return what was taken and not used."""
        self._left += amount
        self._refill()

    def _refill(self) -> None:
        now = self._clock()
        limit = self._limit or 0
        self._left = min(float(limit), self._left + limit * (now - self._at) / 60)
        self._at = now


class Account:
    """One key's requests."""

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self.key = key
        self.is_alone = True  # whether there is no other key to share the server with
        self.share = 1.0  # its weight, where the mean of all keys is 1
        self.num_held = 0  # permits
        self.num_requests = 0
        self.used_tokens: Counter[str] = Counter()  # by kind
        self.refusals: Counter[str] = Counter()  # by limit
        self._requests = MinuteBudget(key.requests_per_minute, clock)
        self._tokens = MinuteBudget(key.tokens_per_minute, clock)
        self._drain_rate = DrainRate(clock)

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return self.key.name

    @property
    def owner(self) -> str:
        """The owner of requests where keys share the server; "" where this is the only key."""
        return "" if self.is_alone else self.key.name

    def change(self, key: ApiKey) -> None:
        """Take over the changed settings of this key."""
        self.key = key
        self._requests.change(key.requests_per_minute)
        self._tokens.change(key.tokens_per_minute)

    def count_request(self) -> None:
        """Count a request. Raises Overloaded beyond requests_per_minute."""
        self.num_requests += 1
        if seconds := self._requests.take(1):
            self._refuse("requests_per_minute", self.key.requests_per_minute, seconds)

    def take_permits(self, count: int) -> None:
        """Count places in the server. Raises Overloaded beyond max_concurrent_requests."""
        most = self.key.max_concurrent_requests
        if most is not None and self.num_held + count > most:
            self._refuse("max_concurrent_requests", most, self._drain_rate.seconds_for_requests(count))
        self.num_held += count
        for _ in range(count):
            self._drain_rate.began()

    def give_back_permits(self, count: int) -> None:
        """Free places again."""
        self.num_held -= count
        for _ in range(count):
            self._drain_rate.ended(0)

    def charge(self, tokens: int) -> None:
        """Take the most tokens that a request may need. Raises Overloaded beyond tokens_per_minute."""
        if seconds := self._tokens.take(tokens):
            self._refuse("tokens_per_minute", self.key.tokens_per_minute, seconds)

    def settle(self, charged: int, prompt: int, generated: int, cached: int) -> None:
        """Count what a request used of what it was charged. cached: tokens of its prompt in the prefix cache."""
        self._tokens.give_back(charged - prompt - generated)
        self.used_tokens["prompt"] += prompt
        self.used_tokens["generated"] += generated
        self.used_tokens["cached"] += cached

    def _refuse(self, limit: str, value: int | None, seconds: float) -> None:
        self.refusals[limit] += 1
        wait = whole_seconds(seconds)
        raise Overloaded(f"API key {self.name} has reached its limit {limit}, {value}: try again in {wait} s", wait)


class Accounts:
    """All keys of a server. Raises ValueError for a file that cannot be used."""

    def __init__(self, api_key: str | None, path: Path | None, *, clock: Clock = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._api_key = api_key
        self._by_digest: dict[bytes, Account] = {}
        self._checked_at = clock()
        self._seen = self._state_of_file()
        self._load()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_digest.values())

    def find(self, key: bytes) -> Account | None:
        """The account of a key, or None."""
        self._refresh()
        digest = digest_of(key)
        account = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(account.key.digest if account is not None else NO_DIGEST, digest)
        return account if is_equal else None

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        seen = self._state_of_file()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load()
        except ValueError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read %d API keys from %s", len(self._by_digest), self._path)

    def _state_of_file(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _load(self) -> None:
        self._replace(read_keys(self._api_key, self._path))
        if self._path is not None:
            self._warn_of_readers(self._path)

    def _replace(self, keys: list[ApiKey]) -> None:
        known = {account.name: account for account in self._by_digest.values()}
        mean = sum(key.weight for key in keys) / max(1, len(keys))
        self._by_digest = {}
        for key in keys:
            account = known.get(key.name) or Account(key, self._clock)
            account.change(key)
            account.is_alone = len(keys) == 1
            account.share = key.weight / mean
            self._by_digest[key.digest] = account

    def _warn_of_readers(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except OSError:
            return
        if mode & OTHERS_MAY_READ:
            logger.warning("other users of this machine may read the API keys: chmod 600 %s", path)


class AccountMetrics(Collector):
    """Requests, tokens and refusals of each key, with its name as the label."""

    COUNTERS = ("tgi_key_request_count", "tgi_key_tokens", "tgi_key_refused")

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def collect(self) -> Iterable[Metric]:
        """The counts in the registry's form."""
        requests = CounterMetricFamily("tgi_key_request_count", "Requests of each API key", labels=["key"])
        running = GaugeMetricFamily("tgi_key_current_requests", "Its requests in the server", labels=["key"])
        tokens = CounterMetricFamily("tgi_key_tokens", "Tokens of its requests", labels=["key", "kind"])
        refused = CounterMetricFamily("tgi_key_refused", "Its requests that a limit refused", labels=["key", "limit"])
        for account in self._accounts:
            requests.add_metric([account.name], account.num_requests)
            running.add_metric([account.name], account.num_held)
            for kind in TOKEN_KINDS:
                tokens.add_metric([account.name, kind], account.used_tokens[kind])
            for limit in ACCOUNT_LIMITS:
                refused.add_metric([account.name, limit], account.refusals[limit])
        yield from (requests, running, tokens, refused)


class Permits:
    """Counts requests against `max_concurrent_requests` of the server, and how many of them are one key's. Never waits.

    With several API keys, none can take all permits: some are always left for a key that has none.
    """

    def __init__(self, total: int, seconds_until_free: Callable[[int], int]) -> None:
        self._left = total
        self._seconds_until_free = seconds_until_free

    def take(self, count: int, account: Account | None = None) -> None:
        """Take `count` permits, all or none. Raises Overloaded."""
        if count > self._left:
            raise Overloaded(retry_after_s=self._seconds_until_free(count))
        if account is not None:
            if account.owner and not may_take(count, held=account.num_held, free=self._left, weight=account.share):
                account.refusals["share"] += 1
                most = most_held(free=self._left - count, weight=account.share)
                detail = (
                    f"Model is overloaded: API key {account.name} has {account.num_held} requests in it; while "
                    f"{self._left} places are free it may have {most} with this one"
                )
                raise Overloaded(detail, self._seconds_until_free(count))
            account.take_permits(count)
        self._left -= count

    def give_back(self, count: int, account: Account | None = None) -> None:
        """Return permits that `take` gave."""
        self._left += count
        if account is not None:
            account.give_back_permits(count)

    @contextmanager
    def hold(self, account: Account | None = None) -> Iterator[None]:
        """Hold one permit for the length of a block. Raises Overloaded."""
        self.take(1, account)
        try:
            yield
        finally:
            self.give_back(1, account)


# ------------------------------------------------------------------------------------------------- the file of API keys


def digest_of(key: bytes) -> bytes:
    """What is kept and compared in place of a key."""
    return hashlib.sha256(key).digest()


def read_keys(api_key: str | None, path: Path | None) -> list[ApiKey]:
    """All keys of a server: the one that `api_key` gives, and those of a file. Raises ValueError with every problem."""
    keys = [ApiKey(LONE_NAME, digest_of(api_key.encode()))] if api_key is not None else []
    keys += _keys_of(path) if path is not None else []
    if not len(keys) == len({key.name for key in keys}) == len({key.digest for key in keys}):
        raise ValueError(
            f"--api-keys-file {path} has a key named {LONE_NAME}, or the very key that --api-key gives: rename it "
            "there, or give no --api-key"
        )
    return keys


def _keys_of(path: Path) -> list[ApiKey]:
    try:
        content = path.read_bytes()
        document = tomllib.loads(content.decode()) if path.suffix == ".toml" else json.loads(content)
    except OSError as error:
        raise ValueError(f"--api-keys-file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of JSON, TOML and UTF-8; their messages quote nothing of the file
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ValueError(f"--api-keys-file {path} is not {kind}: {_position(error)}") from None
    tables = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(tables, list) or not tables:
        raise ValueError(f'--api-keys-file {path} has no list `keys`: write {{"keys": [{{"name": "…", "key": "…"}}]}}')
    problems = list(_problems(tables))
    if problems:
        raise ValueError(f"--api-keys-file {path}: {'; '.join(problems)}")
    return [_key(table) for table in tables]


def _position(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno}, column {error.colno}"
    found = re.search(r"\(at [^)]*\)", str(error))
    return f"a mistake {found.group().strip('()')}" if found else "it is not text of this form"


def _key(table: Mapping[str, Any]) -> ApiKey:
    digest = bytes.fromhex(table["sha256"]) if "sha256" in table else digest_of(table["key"].encode())
    limits = {name: table[name] for name in LIMITS if name in table}
    adapters = frozenset(table["adapters"]) if "adapters" in table else None
    rights: dict[str, Any] = {"adapters": adapters, "admin": table.get("admin", False)}
    return ApiKey(table["name"], digest, float(table.get("weight", 1.0)), **limits, **rights)


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
    yield from _right_problems(table)


def _right_problems(table: Mapping[str, Any]) -> Iterator[str]:
    names = table.get("adapters", [""])
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        yield '`adapters` must be a list of names, "" for the model without one: leave it out for all'
    if type(table.get("admin", False)) is not bool:
        yield "`admin` must be true or false"


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
