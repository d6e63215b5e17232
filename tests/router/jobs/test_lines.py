"""What each line of a batch file asks for, and what is wrong with those that ask for nothing that can be sent."""

from __future__ import annotations

import errno
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from router.jobs.input_index import IdTable, index_input
from router.jobs.lines import URLS, BatchRequest, InputChanged, Line, LineFile, Problem, read_request
from tests.router.jobs.making import MOST_BYTES, index_of, request


def asked(raw: bytes | None, number: int = 7, first: int = 7) -> BatchRequest | Problem:
    return read_request(Line(number, 0, 9, raw), URLS, MOST_BYTES, lambda _: first)


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth - 1):
        found = [found]
    return found


def test_a_request_is_sent_as_its_body_says() -> None:
    wanted = asked(json.dumps(request("a", body={"prompt": "é\n", "n": 1})).encode())
    assert isinstance(wanted, BatchRequest)
    assert ("a", "/v1/completions") == (wanted.custom_id, wanted.url)
    assert {"prompt": "é\n", "n": 1} == json.loads(wanted.body)


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "says"),
    [
        (None, None, "line_too_long", "line 7 is longer than 1000 bytes"),
        (b"{", None, "invalid_json_line", "line 7 is not JSON"),
        (b"\xff", None, "invalid_json_line", "line 7 is not JSON"),
        (b"[" * 5000, None, "invalid_json_line", "line 7 is not JSON"),
        (b"[]", None, "invalid_json_line", "line 7 is no JSON object"),
        ({}, None, "missing_custom_id", "line 7 has no `custom_id`"),
        (request(5), None, "missing_custom_id", "line 7 has no `custom_id`"),
        (request(""), None, "missing_custom_id", "1 to 512 characters"),
        (request("x" * 513), None, "missing_custom_id", "1 to 512 characters"),
        (request("a", method="GET"), "a", "invalid_method", '`method` is "GET": it must be POST'),
        (request("a", url="/v1/models"), "a", "invalid_url", "it must be /v1/chat/completions or /v1/completions"),
        (request("a", url=None), "a", "invalid_url", "`url` is missing"),
        (request("a", url=["/v1/completions"]), "a", "invalid_url", "it must be"),
        (request("a", body="hello"), "a", "invalid_body", "`body` is no JSON object"),
        (request("a", body={"stream": True}), "a", "invalid_body", "`stream`"),
        (request("a", body={"x": nested(300)}), "a", "invalid_body", "`body` is nested deeper than 250 levels"),
        (request("a", method=nested(300)), "a", "invalid_method", "`method` is a list or an object: it must be POST"),
        (request("a", url=nested(300)), "a", "invalid_url", "`url` is a list or an object"),
    ],
)
def test_each_wrong_line_has_a_sentence(line: Any, custom_id: str | None, code: str, says: str) -> None:
    problem = asked(line if line is None or isinstance(line, bytes) else json.dumps(line).encode())
    assert isinstance(problem, Problem)
    assert (custom_id, code) == (problem.custom_id, problem.code)
    assert says in problem.message


def test_only_the_first_line_with_a_custom_id_is_sent() -> None:
    problem = asked(json.dumps(request("a")).encode(), number=7, first=3)
    assert isinstance(problem, Problem)
    assert ("a", "duplicate_custom_id") == (problem.custom_id, problem.code) and "line 3" in problem.message


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_of_any_length_are_passed_over_or_read_whole(tmp_path: Path, end: bytes) -> None:
    longest = b"x" * (MOST_BYTES - len(end) + 1)
    rows = [b"a", b"", longest, b"y" * (MOST_BYTES + 2), b"z" * 200_000, b"last"]
    (tmp_path / "in").write_bytes(end.join(rows))
    found: list[Line] = []
    with closing(LineFile(tmp_path / "in", MOST_BYTES)) as lines:
        number = offset = 0
        while (line := lines.read(number + 1, offset)) is not None:
            number, offset = line.number, line.end
            found.append(line)
        assert [b"a", b"", longest, None, None, b"last"] == [line.raw for line in found]
        assert (tmp_path / "in").stat().st_size == offset
        assert found[2] == lines.read(3, found[2].offset)  # from wherever one wants


def test_the_census_counts_lines_and_knows_the_first_of_each_id(tmp_path: Path) -> None:
    path = tmp_path / "in"
    rows = [json.dumps(request(f"r{i % 3000}")) for i in range(4000)]
    path.write_text("\n\n".join(rows) + "\n")
    index = index_of(path)
    with closing(index.ids):
        assert (4000, path.stat().st_size) == (index.num_lines, index.num_bytes)
        assert [1 + 2 * i for i in range(3000)] == [index.ids.first_line(f"r{i}") for i in range(3000)]
        assert 0 == index.ids.first_line("nobody")
        path.write_text("other")
        with pytest.raises(InputChanged, match="changed while it was read"):
            index.check_unchanged()


def test_lines_that_are_too_short_for_an_id_take_no_place(tmp_path: Path) -> None:
    """Places are taken for ids alone, and no more of them than there may be."""
    path = tmp_path / "in"
    path.write_bytes(b"\n" * 300_000)
    index = index_of(path)
    with closing(index.ids):
        assert (0, 300_000) == (index.num_lines, index.num_bytes) and index.ids.num_bytes < 4 * 300_000
    shortest = [f'{{"custom_id":"{chr(number)}"}}' for number in range(ord("0"), ord("0") + 2000) if number != 92]
    path.write_text("\n".join(shortest))
    index = index_of(path)
    with closing(index.ids):
        assert 1999 == index.num_lines == index.ids.first_line(chr(ord("0") + 1999))


def test_an_id_with_half_a_character_is_an_id(tmp_path: Path) -> None:
    with closing(IdTable(1, tmp_path)) as table:
        table.note("\ud800", 3)
        assert 3 == table.first_line("\ud800")


def test_a_census_can_be_ended_and_a_full_disk_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in"
    path.write_text("x\n")

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_input(path, tmp_path, MOST_BYTES, stop)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("router.jobs.input_index.os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        index_of(path)
