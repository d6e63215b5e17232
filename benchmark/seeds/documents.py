"""The documents themselves: what they measured on which hardware, and their figures, from a JSON file each.

A file says where in its document each table is. `sweep` is what the document ran, `quick` what is changed of it for a
run of seconds. Figures are the document's as they stand, but for units, which the columns' names say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark import shapes
from benchmark.report import BenchError

FOLDER = Path(__file__).parent
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # what configs call their number of layers
Sizes = Mapping[str, int | list[int]]
ROUNDED = 0.005  # by so much at most, a rate of requests


@dataclass(frozen=True)
class Table:
    """Figures of one system, with the place in the document."""

    where: str
    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    system: str = ""
    num_shard: int = 1
    schedule: str = ""

    def row(self, **about: Any) -> Mapping[str, Any] | None:
        """The row with these values; None where the document has none."""
        return next((row for row in self.rows if about.items() <= row.items()), None)


def concurrency(row: Mapping[str, Any]) -> float:
    """How many requests were under way on average, if throughput and latency of a row are of one run (Little's law)."""
    return float(row["output_tokens_per_second"] * row["latency_per_output_token_ms"] / 1000)


def answer_length(row: Mapping[str, Any]) -> float:
    """Tokens of a row's answers on average, where its rates show that they were shorter than it asked for.

    Rates of requests are rounded to 0.01, so that those of few requests show nothing of a few tokens.
    """
    asked, tokens, requests = (
        row[name] for name in ("output_length", "output_tokens_per_second", "requests_per_second")
    )
    return float(tokens / requests if tokens / (requests - ROUNDED) < asked else asked)


@dataclass(frozen=True)
class Seed:
    """One document."""

    name: str
    document: str  # its file
    title: str
    kind: str  # latency, serving or flexgen: the command that measures the same
    shape: str
    config_changes: Mapping[str, Any]  # beside the shape's config, such as how it is quantised
    dtype: str
    hardware: str  # in the document's words
    device: str  # of `devices.DEVICES`
    is_device_assumed: bool  # the document names none
    sweep: Sizes
    quick: Sizes
    notes: Sequence[str]
    tables: Sequence[Table] = field(repr=False)
    arguments: Sequence[Mapping[str, str]] = field(default=(), repr=False)  # of its tool, and what stands for them here

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.model(None).shape.spec.num_layers

    @property
    def num_shards(self) -> list[int]:
        """Devices over which the document split the model, in ascending order."""
        return sorted({table.num_shard for table in self.tables})

    def model(self, layers: int | None) -> shapes.NamedShape:
        """The model's config with so many layers; None: all. Raises BenchError for a format that is not there."""
        shipped = shapes.find(self.shape)
        config = {**shipped.config, **self.config_changes}
        if layers is not None:
            config |= {key: layers for key in LAYERS if key in config}
        name = self.title if layers is None else f"{self.title}, {layers} layers"
        try:
            return shapes.NamedShape(name, config, shapes.from_config(config, self.title))
        except BenchError as error:
            raise BenchError(f"{self.name} cannot be reproduced yet: {error}") from None


def names() -> list[str]:
    """Names of the documents that can be reproduced."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find(name: str) -> Seed:
    """The document of a name. Raises BenchError that names those there are."""
    if name not in names():
        raise BenchError(f"no seed is called {name}: give one of {', '.join(names())}")
    content = json.loads((FOLDER / f"{name}.json").read_text())
    tables = [_table(table) for table in content.pop("tables")]
    return Seed(name=name, tables=tables, **content)


def _table(content: dict[str, Any]) -> Table:
    columns, rows = content.pop("columns"), content.pop("rows")
    table = Table(rows=(), **content)
    return replace(table, rows=[dict(zip(columns, row, strict=True)) for row in rows])
