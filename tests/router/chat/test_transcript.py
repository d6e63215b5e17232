"""Messages from APIs that tell them in finer pieces."""

from __future__ import annotations

from typing import Any

import pytest

from router.chat.transcript import arguments_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, "ü"]}', {"a": [1, "ü"]}),
        ('{"id": 123456789012345678901234567890}', {"id": 123456789012345678901234567890}),
        ('{"a": 1, "b": "x\\ud83d"}', {"a": 1, "b": "x?"}),
        ('{"a": NaN}', {}),
        ('{"a": 1e999}', {}),
        ("[1]", {}),
        ('{"a"', {}),
        ("", {}),
        ("[" * 100_000, {}),
    ],
)
def test_arguments_of_earlier_calls_are_told_as_they_were_written(text: str, expected: dict[str, Any]) -> None:
    assert expected == arguments_in(text)
