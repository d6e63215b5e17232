"""API keys from a file: what it may say, when it is read again, and what each limit refuses."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from router.accounts import Account, Accounts, ApiKey, MinuteBudget, Permits, digest_of, read_keys
from router.errors import Overloaded
from tests.router.scheduling.test_drain_rate import Clock

ALICE = {"name": "alice", "key": "alice-secret"}
BOB = {"name": "bob", "sha256": hashlib.sha256(b"bob-secret").hexdigest(), "weight": 3}


def write(path: Path, *keys: Any) -> Path:
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": keys}))
    return path


# ------------------------------------------------------------------------------------------------------------- the file


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    limits = {"max_concurrent_requests": 8, "requests_per_minute": 60, "tokens_per_minute": 9000}
    toml = tmp_path / "keys.toml"
    toml.write_text(
        '[[keys]]\nname = "alice"\nkey = "alice-secret"\nmax_concurrent_requests = 8\nrequests_per_minute = 60\n'
        f'tokens_per_minute = 9000\n\n[[keys]]\nname = "bob"\nsha256 = "{BOB["sha256"]}"\nweight = 3\n'
        'adapters = ["", "mine"]\nadmin = true\n'
    )
    rights: dict[str, Any] = {"adapters": ["", "mine"], "admin": True}
    alice = ApiKey("alice", digest_of(b"alice-secret"), **limits)
    expected = [alice, ApiKey("bob", digest_of(b"bob-secret"), 3.0, adapters=frozenset({"", "mine"}), admin=True)]
    assert expected == read_keys(None, write(tmp_path / "keys.json", {**ALICE, **limits}, {**BOB, **rights}))
    assert expected == read_keys(None, toml)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ([], "has no list `keys`"),
        (["x"], "key 1 is no table"),
        ([{"name": "a b", "key": "k"}], "key 1: `name` must be 1 to 64 of"),
        ([{"name": "a"}], "key 1 (a): give either `key` or `sha256`"),
        ([{"name": "a", "key": "k", "sha256": "0" * 64}], "give either `key` or `sha256`"),
        ([{"name": "a", "key": "with space"}], "`key` must be 1 to 256 printable ASCII"),
        ([{"name": "a", "sha256": "abc"}], "`sha256` must be 64 hexadecimal digits"),
        ([{**ALICE, "requests_per_minute": 0}], "`requests_per_minute` is 0: give a whole number from 1"),
        ([{**ALICE, "tokens_per_minute": True}], "`tokens_per_minute` is True"),
        ([{**ALICE, "weight": -1}], "`weight` is -1: give a number from 0.001 to 1000"),
        ([{**ALICE, "wieght": 2}], "`wieght` is unknown: there are name, key, sha256, weight"),
        ([{**ALICE, "adapters": "alice"}], "`adapters` must be a list of names"),
        ([{**ALICE, "adapters": []}], "`adapters` must be a list of names"),
        ([{**ALICE, "admin": 1}], "`admin` must be true or false"),
        ([ALICE, {**ALICE, "key": "other"}], "key 2 (alice): the name is taken"),
        ([ALICE, {**ALICE, "name": "bob"}], "key 2 (bob): it is the same key as alice's"),
    ],
)
def test_what_is_wrong_is_said_without_a_key(tmp_path: Path, keys: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_keys(None, write(tmp_path / "keys.json", *keys))
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("keys.json", b'{"keys": [{"key": "secret"', "is not JSON: Expecting ',' delimiter in line 1"),
        ("keys.json", b"[" * 100_000, "is not JSON"),
        ("keys.json", b"\xff\xfe", "is not JSON"),
        ("keys.toml", b'keys = "secret"x\n', "is not TOML: a mistake at line 1, column 16"),
        ("keys.json", b'["secret"]', "has no list `keys`"),
        ("none.json", None, "cannot be read: No such file or directory"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read_keys(None, tmp_path / name)
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


# ------------------------------------------------------------------------------------------------------------- accounts


def name_of(accounts: Accounts, key: str) -> str | None:
    account = accounts.find(key.encode())
    return account.name if account is not None else None


def test_a_key_opens_its_own_account_and_another_none(tmp_path: Path) -> None:
    accounts = Accounts("lone", write(tmp_path / "keys.json", ALICE, BOB))
    keys = ("lone", "alice-secret", "bob-secret", "Alice-secret", "", "alice-secret ")
    assert ["default", "alice", "bob", None, None, None] == [name_of(accounts, key) for key in keys]
    assert [0.6, 0.6, 1.8] == pytest.approx([account.share for account in accounts])
    assert ["default", "alice", "bob"] == [account.owner for account in accounts]


def test_a_lone_key_shares_with_nobody(tmp_path: Path) -> None:
    for accounts in (Accounts("lone", None), Accounts(None, write(tmp_path / "keys.json", {**ALICE, "weight": 7}))):
        assert [("", 1.0)] == [(account.owner, account.share) for account in accounts]
    assert None is Accounts(None, None).find(b"")


def test_a_name_or_key_that_api_key_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a key named default, or the very key that --api-key gives"):
        Accounts("alice-secret", write(tmp_path / "keys.json", ALICE))
    with pytest.raises(ValueError, match="rename it"):
        Accounts("lone", write(tmp_path / "keys.json", {**ALICE, "name": "default"}))


def test_a_changed_file_is_read_within_a_second_and_counts_go_on(tmp_path: Path) -> None:
    clock, path = Clock(), write(tmp_path / "keys.json", {**ALICE, "requests_per_minute": 2})
    accounts = Accounts(None, path, clock=clock)
    alice = accounts.find(b"alice-secret")
    assert alice is not None
    alice.count_request()
    write(path, {"name": "alice", "key": "rotated", "requests_per_minute": 3}, BOB)
    clock.now += 0.9
    assert ("alice", None) == (name_of(accounts, "alice-secret"), name_of(accounts, "bob-secret"))
    clock.now += 0.2
    keys = ("alice-secret", "rotated", "bob-secret")
    assert [None, "alice", "bob"] == [name_of(accounts, key) for key in keys]
    assert accounts.find(b"rotated") is alice
    alice.count_request()
    alice.count_request()
    with pytest.raises(Overloaded, match="requests_per_minute, 3"):
        alice.count_request()


def test_a_broken_file_keeps_the_old_keys_and_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = Clock(), write(tmp_path / "keys.json", ALICE)
    accounts = Accounts(None, path, clock=clock)
    path.write_text('{"keys": [{"name": "alice", "key": "alice-secret"')
    for _ in range(5):
        clock.now += 2
        assert "alice" == name_of(accounts, "alice-secret")
    path.unlink()
    for _ in range(5):
        clock.now += 2
        assert "alice" == name_of(accounts, "alice-secret")
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert ["is not JSON" in messages[0], "cannot be read" in messages[1]] == [True, True]
    assert 2 == len(messages)
    assert "secret" not in "".join(messages)
    write(path, BOB)
    clock.now += 2
    assert (None, "bob") == (name_of(accounts, "alice-secret"), name_of(accounts, "bob-secret"))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True), (0o400, False)])
def test_a_file_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    path = write(tmp_path / "keys.json", ALICE)
    os.chmod(path, mode)
    Accounts(None, path)
    assert warns == any(f"chmod 600 {path}" in record.getMessage() for record in caplog.records)


# --------------------------------------------------------------------------------------------------------------- limits


def account_of(clock: Clock, **limits: int) -> Account:
    return Account(ApiKey("alice", digest_of(b"k"), **limits), clock)


def test_a_minute_s_budget_fills_up_as_time_goes_by() -> None:
    clock = Clock()
    budget = MinuteBudget(60, clock)
    assert 0 == budget.take(60)
    assert 5 == pytest.approx(budget.take(5))
    clock.now += 5
    assert 0 == budget.take(5)
    clock.now += 3600
    assert 0 == budget.take(100)  # more than a minute's worth is given out of a full budget, and paid back
    assert 41 == pytest.approx(budget.take(1))
    budget.give_back(100)
    assert 0 == budget.take(60)


def test_each_limit_refuses_by_its_name_and_says_when_to_come_again() -> None:
    clock = Clock()
    account = account_of(clock, max_concurrent_requests=2, requests_per_minute=30, tokens_per_minute=600)
    account.take_permits(2)
    clock.now += 3
    account.give_back_permits(1)
    account.take_permits(1)
    with pytest.raises(Overloaded, match="API key alice has reached its limit max_concurrent_requests, 2") as refused:
        account.take_permits(1)
    assert 3 == refused.value.retry_after_s
    for _ in range(30):
        account.count_request()
    with pytest.raises(Overloaded, match="requests_per_minute, 30") as refused:
        account.count_request()
    assert 2 == refused.value.retry_after_s
    account.charge(500)
    with pytest.raises(Overloaded, match="tokens_per_minute, 600") as refused:
        account.charge(200)
    assert 10 == refused.value.retry_after_s
    account.settle(500, 100, 200, 64)  # 200 tokens were not used
    account.charge(200)
    assert {"max_concurrent_requests": 1, "requests_per_minute": 1, "tokens_per_minute": 1} == account.refusals
    assert {"prompt": 100, "generated": 200, "cached": 64} == account.used_tokens


def test_no_key_takes_all_permits_where_there_are_several(tmp_path: Path) -> None:
    accounts = Accounts(None, write(tmp_path / "keys.json", ALICE, {**BOB, "weight": 1}))
    alice, bob = accounts
    permits = Permits(16, lambda count: 7)
    for _ in range(12):
        permits.take(1, alice)
    with pytest.raises(
        Overloaded, match="alice has 12 requests in it; while 4 places are free it may have 9"
    ) as refused:
        permits.take(1, alice)
    assert 7 == refused.value.retry_after_s
    permits.take(1, bob)
    permits.give_back(1, alice)
    with pytest.raises(Overloaded):
        permits.take(1, alice)
    assert (11, 1, 2) == (alice.num_held, bob.num_held, alice.refusals["share"])


def test_the_permits_of_several_samples_are_all_given_back(tmp_path: Path) -> None:
    alice, _ = Accounts(None, write(tmp_path / "keys.json", ALICE, {**BOB, "weight": 1}))
    permits = Permits(16, lambda count: 7)
    for _ in range(2):  # what one of them kept, the next would lack
        permits.take(9, alice)
        permits.give_back(9, alice)
    assert 0 == alice.num_held
    permits.take(16)


def test_a_newcomer_s_request_may_have_the_last_permit(tmp_path: Path) -> None:
    alice, bob = Accounts(None, write(tmp_path / "keys.json", ALICE, {**BOB, "weight": 1}))
    permits = Permits(4, lambda count: 7)
    permits.take(3, alice)
    permits.take(1, bob)
    permits.take(0, bob)  # it has one sample and no others
    with pytest.raises(Overloaded, match=r"^Model is overloaded$"):
        permits.take(1, bob)


def test_without_keys_all_permits_can_be_taken() -> None:
    permits = Permits(16, lambda count: 7)
    permits.take(16)
    with pytest.raises(Overloaded, match=r"^Model is overloaded$") as refused:
        permits.take(1)
    assert 7 == refused.value.retry_after_s
