"""Places in the server: how many requests it holds at once, and how many of them may be one key's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import Overloaded
from router.fairness import may_take, most_held
from router.requests.accounts import Account


class Permits:
    """Counts requests against `max_concurrent_requests`. Never waits.

    Where several API keys are known, none takes them all: some are always left for a key that has none.
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
