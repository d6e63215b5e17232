"""`promises`: verdicts from made-up figures, and one promise that is really measured. No test asks how long it took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.commands import promises
from benchmark.commands.promises import Promise, promise_table, row_of
from benchmark.result import BenchError
from benchmark.serving.http_client import Reply


def promise(name: str, bound: float, unit: str = "", trial: promises.Trial | None = None) -> Promise:
    return Promise(name, f"{name} is small", bound, unit, "It was made up.", trial or (lambda _: {}))


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [([2.9], "kept"), ([3.0], "kept"), ([3.1], "broken"), ([1.0, 9.0, 2.0], "kept"), ([1.0, 9.0, 4.0], "broken")],
)
def test_the_median_decides(samples: list[float], verdict: str) -> None:
    assert verdict == row_of(promise("p", 3.0), samples)["verdict"]


def test_a_row_keeps_every_sample_and_its_range() -> None:
    row = row_of(promise("p", 3.0, "s"), [5.0, 1.0, 3.0, 2.0])
    assert (2.5, 1.0, 5.0, [5.0, 1.0, 3.0, 2.0]) == (row["median"], row["min"], row["max"], row["samples"])
    assert (3.0, "s", "p") == (row["bound"], row["unit"], row["promise"])


def test_the_table_has_units_and_verdicts() -> None:
    rows = [row_of(promise("wait", 15.0, "s"), [4.0, 3.8]), row_of(promise("ratio", 1.0), [1.25])]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in promise_table(rows).splitlines()]
    assert ["Name", "Promise", "At most", "Median", "Range", "Verdict"] == lines[0]
    assert ["wait", "wait is small", "15 s", "3.9 s", "3.8 s to 4 s", "kept"] == lines[2]
    assert ["ratio", "ratio is small", "1", "1.25", "1.25 to 1.25", "broken"] == lines[3]


def made_up(figures: Iterator[Mapping[str, float]]) -> promises.Trial:
    """A trial that gives the next figures each time. Raises BenchError when there are no more."""

    def trial(means: promises.Means) -> Mapping[str, float]:
        if (found := next(figures, None)) is None:
            raise BenchError("the server did not start: no more figures")
        return found

    return trial


def promised(monkeypatch: pytest.MonkeyPatch, bound: float, *figures: Mapping[str, float]) -> None:
    """Two promises of one trial, which gives these figures."""
    trial = made_up(iter(figures))
    monkeypatch.setattr(promises, "PROMISES", (promise("a", bound, trial=trial), promise("b", 10.0, "s", trial)))


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize(("bound", "code"), [(3.0, 0), (1.0, 1)])
def test_a_trial_is_run_once_for_all_of_its_promises_and_a_broken_one_exits_with_1(
    bound: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised(monkeypatch, bound, {"a": 1.5, "b": 4.0}, {"a": 2.5, "b": 5.0})
    assert code == main(["promises", "--repeat", "2", "--output", str(tmp_path)])
    assert (tmp_path / "report.html").is_file()
    printed = last_line(capsys)
    assert [[1.5, 2.5], [4.0, 5.0]] == [row["samples"] for row in printed["rows"]]
    assert ["kept" if code == 0 else "broken", "kept"] == [row["verdict"] for row in printed["rows"]]
    assert printed == json.loads((tmp_path / "result.json").read_text())
    assert "| a    | a is small |" in (tmp_path / "result.md").read_text()


def test_only_what_is_asked_for_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised(monkeypatch, 1.0, {"a": 1.5, "b": 4.0})
    assert 0 == main(["promises", "--repeat", "1", "--only", "b"])
    assert ["b"] == [row["promise"] for row in last_line(capsys)["rows"]]


def test_what_was_measured_before_a_failure_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised(monkeypatch, 3.0, {"a": 1.5, "b": 4.0})
    assert 1 == main(["promises", "--repeat", "2"])
    result = last_line(capsys)
    assert ([1.5], "the server did not start: no more figures") == (result["rows"][0]["samples"], result["failure"])


def test_gaps_are_those_of_each_stream_and_a_failed_stream_is_no_gap() -> None:
    one = Reply(0.0, token_times=[1.0, 1.1, 1.3])
    other = Reply(0.0, token_times=[9.0, 9.4])
    assert 0.4 == pytest.approx(promises.p99_gap([one, other]))  # and not the 7.7 from the one to the other
    with pytest.raises(BenchError, match="429"):
        promises.p99_gap([one, Reply(0.0, error="429")])


def test_every_promise_has_a_name_of_its_own_and_says_why_its_bound_is_that() -> None:
    names = [promise.name for promise in promises.PROMISES]
    assert len(set(names)) == len(names)
    assert all(promise.reason.endswith(".") and promise.bound > 0 for promise in promises.PROMISES)


def test_the_slowest_api_is_what_a_client_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "_client_us", lambda url, api: {"tgi": 11.0, "openai": 19.0, "chat": 17.0}[api])
    assert {"client": 19.0} == promises.client(promises.Means())


def test_a_client_really_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "CLIENT_STREAMS", 4)
    assert promises.client(promises.Means())["client"] > 0


def test_a_start_is_really_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["promises", "--only", "ready", "--repeat", "1"])
    (row,) = last_line(capsys)["rows"]
    assert row["samples"] == [row["median"]] and row["median"] > 0
    assert code == (row["verdict"] == "broken")
