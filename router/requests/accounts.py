"""Who asks: an account for each API key, with its limits, its share and what it has used.

The keys are `api_key` and those of `api_keys_file`, which is looked at once a second while requests come, and read
again when it has changed. A file that cannot be read changes nothing but for a line in the log. Accounts are found by
digest: how long that takes says something about SHA-256 of what was sent, and nothing about a key.

Left out: what a share is worth (`fairness.py`).
"""

from __future__ import annotations

import hmac
import logging
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.drain_rate import DrainRate, whole_seconds
from router.errors import Overloaded
from router.requests.key_file import ApiKey, digest_of, read_keys

LONE_NAME = "default"  # of the key that `api_key` gives
RECHECK_S = 1.0
OTHERS_MAY_READ = stat.S_IRGRP | stat.S_IROTH
TOKEN_KINDS = ("prompt", "generated")
ACCOUNT_LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute", "share")
NOBODY = bytes(32)  # a digest that no key has

logger = logging.getLogger(__name__)
Clock = Callable[[], float]


class MinuteBudget:
    """So much for each minute, and a minute's worth at once (a token bucket). A limit of None takes everything."""

    def __init__(self, limit: int | None, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._left = float(limit or 0)
        self._at = clock()

    def change(self, limit: int | None) -> None:
        """Another limit from now on; what was used of the old one is used of the new one too."""
        self._refill()
        self._left += (limit or 0) - (self._limit or 0)
        self._limit = limit

    def take(self, amount: int) -> float:
        """Take so much and return 0, or take nothing and return the seconds until it will be there.

        More than the limit is given out of a full budget, and paid back afterwards.
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
        """What was taken and not used."""
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
        self.is_alone = True  # whether there is no other key, so that it has nobody to share with
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
        """Whom requests belong to where keys share; "" where nobody else is there."""
        return "" if self.is_alone else self.key.name

    def change(self, key: ApiKey) -> None:
        """The file says something else of this name now."""
        self.key = key
        self._requests.change(key.requests_per_minute)
        self._tokens.change(key.tokens_per_minute)

    def count_request(self) -> None:
        """A request comes. Raises Overloaded where it is one too many of this minute."""
        self.num_requests += 1
        if seconds := self._requests.take(1):
            self._refuse("requests_per_minute", self.key.requests_per_minute, seconds)

    def take_permits(self, count: int) -> None:
        """Count places in the server. Raises Overloaded where they are more than the key may have."""
        most = self.key.max_concurrent_requests
        if most is not None and self.num_held + count > most:
            self._refuse("max_concurrent_requests", most, self._drain_rate.seconds_for_requests(count))
        self.num_held += count
        for _ in range(count):
            self._drain_rate.began()

    def give_back_permits(self, count: int) -> None:
        """Places that are free again."""
        self.num_held -= count
        for _ in range(count):
            self._drain_rate.ended(0)

    def charge(self, tokens: int) -> None:
        """Take tokens that a request may come to. Raises Overloaded where they are too many of this minute."""
        if seconds := self._tokens.take(tokens):
            self._refuse("tokens_per_minute", self.key.tokens_per_minute, seconds)

    def settle(self, charged: int, prompt: int, generated: int, cached: int) -> None:
        """Count what a request came to, of what was charged for it. cached: of its prompt, in the prefix cache."""
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
        self._lone = ApiKey(LONE_NAME, digest_of(api_key.encode())) if api_key is not None else None
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
        is_equal = hmac.compare_digest(account.key.digest if account is not None else NOBODY, digest)
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
        keys = [self._lone] if self._lone is not None else []
        if self._path is not None:
            keys += read_keys(self._path)
            self._warn_of_readers(self._path)
        by_name = {key.name: key for key in keys}
        by_digest = {key.digest: key for key in keys}
        if not len(keys) == len(by_name) == len(by_digest):
            raise ValueError(
                f"api_keys_file {self._path} has a key named {LONE_NAME}, or the very key that api_key gives: "
                "rename it there, or give no api_key"
            )
        self._replace(keys)

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
    """What each key has asked for and got, by its name. There are as many labels as keys."""

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
