"""What quantising costs in perplexity of some held-out text; `make test-formats` reads all of it."""

from __future__ import annotations

from functools import cache

import pytest

from tests import cpu_kernels
from tests.server.quantisation.quantised_perplexity import MOST, held_out, load, perplexity


@cache
def of_some_documents(backend: str, format: str | None = None, kv_cache: str = "auto") -> float:
    return perplexity(load(format, "int8", backend, kv_cache=kv_cache), held_out(12))


def added(backend: str, **given: str) -> float:
    """By which share the perplexity is larger than the model's own."""
    return of_some_documents(backend, **given) / of_some_documents(backend) - 1


@pytest.mark.parametrize("format", MOST)
def test_a_format_costs_no_more_than_is_promised(format: str) -> None:
    assert added("reference", format=format) < MOST[format]


def test_three_bits_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of int4 tells rounding that is worse from rounding that is as good as it gets."""
    monkeypatch.setattr("server.quantisation.rounding.MOST_CODE", 7)
    in_three_bits = perplexity(load("int4", "int8", "reference"), held_out(12))
    assert in_three_bits / of_some_documents("reference") - 1 > MOST["int4"]


@pytest.mark.parametrize(("kv_cache", "most"), [("int8", 3e-4), ("fp8_e4m3", 1e-3), ("fp8_e5m2", 4e-3)])
def test_keys_and_values_in_a_byte_cost_hardly_anything(kv_cache: str, most: float) -> None:
    cpu_kernels.load_or_skip()
    assert 0 < abs(added("cpu", kv_cache=kv_cache)) <= most
