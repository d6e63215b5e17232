"""What quantising in flight adds to the perplexity of some held-out text; `make test-formats` reads all of it."""

from __future__ import annotations

import pytest

from tests.server.quantisation.quantised_perplexity import MOST, held_out, load, perplexity

DOCUMENTS = 12


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    return held_out(DOCUMENTS)


@pytest.fixture(scope="module")
def exact(documents: list[list[int]]) -> float:
    return perplexity(load(None, "none", "reference"), documents)


@pytest.mark.parametrize("format", MOST)
def test_a_format_costs_no_more_than_is_promised(format: str, documents: list[list[int]], exact: float) -> None:
    assert perplexity(load(format, "int8", "reference"), documents) / exact - 1 < MOST[format]


def test_three_bits_would_not_do(documents: list[list[int]], exact: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of int4 tells rounding that is worse from rounding that is as good as it gets."""
    monkeypatch.setattr("server.quantisation.rounding.MOST_CODE", 7)
    assert perplexity(load("int4", "int8", "reference"), documents) / exact - 1 > MOST["int4"]
