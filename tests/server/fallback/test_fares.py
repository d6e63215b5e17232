"""Every decoder that transformers has fares as the table beside this module says, which `fares.py` prints."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from server.arch import families
from tests.server.fallback.fares import fares

TABLE = Path(__file__).with_name("fares.txt")


@pytest.mark.rest
def test_every_decoder_fares_as_the_table_says() -> None:
    lines = [line.partition(": ") for line in TABLE.read_text().splitlines()]
    expected = {name: how for name, _, how in lines if not families.has({"model_type": name})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small sizes, and of models that transformers drops
        assert expected == dict(fares([]))
