"""A request's priority is its place in the queue among those of its key; a salt keeps what it begins with to itself."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Collection
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from router.batching.batcher import Batcher
from router.scheduling.request import Entry, PrefixKeys, ValidRequest
from tests.router.doubles import fake_shards, make_limits, request_of, running, token_ids_of, tokens_alone
from tests.router.site import site

ONE = {"max_batch_size": 1}


def admitted(wanted: list[tuple[str, int]], deaths: Collection[int] = ()) -> list[int]:
    """The numbers of requests in the order in which they run, one at a time, given the owner and priority of each."""

    async def story() -> list[int]:
        shards = fake_shards(make_limits(**ONE), renewals=len(deaths), deaths={*deaths})
        async with running(shards, **ONE) as at_work:
            requests = [replace(request_of(4 + number, 4), priority=p) for number, (_, p) in enumerate(wanted)]
            entries = [
                at_work.batcher.submit(request, owner=owner)
                for request, (owner, _) in zip(requests, wanted, strict=True)
            ]
            got = await asyncio.gather(*map(token_ids_of, entries))
            assert [tokens_alone(request) for request in requests] == got
        return [len(new.token_ids) - 4 for step in shards.requests for new in step.add if not new.generated]

    return asyncio.run(story())


def test_the_lower_its_number_the_earlier_a_request_runs() -> None:
    assert [0, 1, 2] == admitted([("", 0), ("", 0), ("", 0)])
    assert [1, 3, 0, 4, 2] == admitted([("", 0), ("", -1), ("", 5), ("", -1), ("", 0)])


def test_nobody_passes_another_key() -> None:
    owners = ["a", "b", "a", "b"]
    order = admitted([("a", 5), ("b", 0), ("a", -9), ("b", 0)])
    usual = admitted([(owner, 0) for owner in owners])
    assert [owners[number] for number in usual] == [owners[number] for number in order]
    assert order.index(2) < order.index(0)


def test_what_has_run_goes_on_before_all_that_waits() -> None:
    assert [1, 0] == admitted([("", 9), ("", 0)], deaths={3})


def test_a_salt_tells_beginnings_apart() -> None:
    tokens = [*range(8)]
    plain, salted = PrefixKeys(tokens, 4).keys, PrefixKeys(tokens, 4, "a").keys
    assert not {*plain} & {*salted} and salted == PrefixKeys(tokens, 4, "a").keys
    assert plain == PrefixKeys(tokens, 4, "").keys and PrefixKeys(tokens, 4, "\ud800").keys


def test_no_salt_names_the_prefix_of_another_sequence() -> None:
    """One that is what the digest of a block and the tokens of the next look like, of which some are text."""
    second, third = [5, 6, 7, 8], [9, 10, 11, 12]
    for number in itertools.count():
        first = [number, 2, 3, 4]
        looks_like = PrefixKeys(first, 4).keys[0] + array("I", second).tobytes()
        try:
            salt = looks_like.decode()
            break
        except UnicodeDecodeError:
            continue
    assert PrefixKeys([*first, *second, *third], 4).keys[2] != PrefixKeys(third, 4, salt).keys[0]


def test_nobody_passes_others_where_anybody_may_send() -> None:
    async def story() -> None:
        async with site() as it:
            for priority in (-5, 7):
                asked = {"prompt": "hello", "max_tokens": 1, "priority": priority}
                assert 200 == (await it.http.post("/v1/completions", json=asked)).status_code
            assert [0, 7] == seen

    seen: list[int] = []
    submit = Batcher.submit

    def noting(self: Batcher, request: ValidRequest, **given: Any) -> Entry:
        seen.append(request.priority)
        return submit(self, request, **given)

    with patch.object(Batcher, "submit", noting):
        asyncio.run(story())


async def test_prefixes_are_shared_among_requests_of_one_salt() -> None:
    async with running(fake_shards(make_limits()), prefix_caching=True) as at_work:
        cached = []
        for salt in ("", "a", "a", "b", ""):
            entry = at_work.batcher.submit(replace(request_of(40, 2), cache_salt=salt))
            await token_ids_of(entry)
            cached.append(entry.num_cached > 0)
        assert [False, False, True, False, True] == cached
