"""The commands that disturb a whole server for minutes, for some seconds: what they print, and that nothing is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from tests.system import kill_orders, storm


@pytest.mark.parametrize(
    ("main", "arguments", "seen"),
    [
        (storm.main, ("--minutes", "0.1"), "not cancelled"),
        pytest.param(kill_orders.main, ("--times", "1"), "answers", marks=pytest.mark.rest),
        pytest.param(kill_orders.main, ("--times", "1", "--pipeline-parallel", "2"), "answers", marks=pytest.mark.rest),
    ],
)
def test_nobody_gets_anothers_answer_and_no_stream_is_lost(
    main: Callable[[], int],
    arguments: tuple[str, ...],
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    main()
    report = json.loads(capsys.readouterr().out)
    assert report[seen]
    assert not report.get("failures")
    assert "another's" not in json.dumps(report)
