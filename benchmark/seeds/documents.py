"""The documents themselves: what they measured on which hardware, and their figures, from a JSON file each.

A file says where in its document each table is. `sweep` is what the document ran, `quick` what is changed of it for a
run of seconds. Figures are the document's as they stand, but for units, which the columns' names say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark import options
from benchmark.cost import shapes
from benchmark.result import BenchError

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


# ---------------------------------------------------------------------------------------------------------------- scale


BLOCKS = 4  # of a diagonal run, so that most of its steps are level
STREAMS = 256  # of the load that a document does not name
QUICK_LAYERS = 2
REQUESTS_PER_STREAM = 4
WORDS: Mapping[str, str] = {
    "batch_size": "batch sizes",
    "sequence_length": "sequence length",
    "decode_length": "decode length",
    "runs": "runs",
    "input_length": "input lengths",
    "output_length": "output lengths",
    "num_requests": "requests a row",
    "num_gpu_batches": "batches of a block",
    "gpu_batch_size": "sequences of a batch",
}
LISTS = ("batch_size", "input_length", "output_length", "num_gpu_batches")


@dataclass(frozen=True)
class Scale:
    """What is run. layers: None for all of them."""

    layers: int | None
    sizes: Mapping[str, int | list[int]]
    reductions: tuple[str, ...]  # in words; (): the whole sweep
    streams: int = 1

    def one(self, name: str) -> int:
        """A size that is one number."""
        value = self.sizes[name]
        assert isinstance(value, int)
        return value

    def several(self, name: str) -> list[int]:
        """A size that is a list."""
        value = self.sizes[name]
        assert isinstance(value, list)
        return value


def add_scale_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the options that reduce a run."""
    group.add_argument("--layers", type=options.positive, metavar="N", help="number of layers (all)")
    group.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers and small sizes, unless given")
    for name, words in WORDS.items():
        nargs = "+" if name in LISTS else None
        group.add_argument(options.option(name), type=options.positive, nargs=nargs, metavar="N", help=words)
    group.add_argument(
        "--concurrency", type=options.positive, metavar="N", help=f"streams of a load without a number ({STREAMS})"
    )


def scale_of(seed: Seed, args: argparse.Namespace) -> Scale:
    """What the options leave of the document's sweep. Raises BenchError for what is no part of it."""
    full = dict(seed.sweep)
    quick = dict(seed.quick) if args.quick else {}
    streams = args.concurrency or _number(quick.pop("concurrency", STREAMS))
    if "num_requests" in full:
        full["num_requests"] = REQUESTS_PER_STREAM * streams
    _refuse_foreign(seed, args, full)
    layers = _layers(seed, args)
    given = {name: value for name in WORDS if (value := getattr(args, name)) is not None}
    wanted = {name: _checked(seed, name, value, full[name]) for name, value in (quick | given).items()}
    if "num_requests" in wanted and "num_single_requests" in full:
        wanted.setdefault(
            "num_single_requests", min(_number(wanted["num_requests"]), _number(full["num_single_requests"]))
        )
    reductions = [f"{layers} of {seed.num_layers} layers"] if layers else []
    for name, words in WORDS.items():
        if name in wanted and wanted[name] != full[name]:
            reductions.append(f"{words} {_text(wanted[name])} of {_text(full[name])}")
    return Scale(layers, full | wanted, tuple(reductions), streams)


def _number(value: int | list[int]) -> int:
    assert isinstance(value, int)
    return value


def _refuse_foreign(seed: Seed, args: argparse.Namespace, full: Mapping[str, int | list[int]]) -> None:
    own = [options.option(name) for name in WORDS if name in full]
    for name in WORDS:
        if getattr(args, name) is not None and name not in full:
            raise BenchError(
                f"{options.option(name)} is no size of {seed.name}: leave it out, or give one of {', '.join(own)}"
            )
    if args.concurrency is not None and seed.kind != "serving":
        raise BenchError(f"--concurrency is for documents of servers, and {seed.name} is none: leave it out")


def _layers(seed: Seed, args: argparse.Namespace) -> int | None:
    layers = args.layers or (QUICK_LAYERS if args.quick else None)
    if layers is not None and layers > seed.num_layers:
        raise BenchError(f"--layers is {layers}, and {seed.title} has {seed.num_layers}: give at most so many")
    return None if layers == seed.num_layers else layers


def _checked(seed: Seed, name: str, value: int | list[int], full: int | list[int]) -> int | list[int]:
    """The value as the sweep has such a size, a number or a list. Raises BenchError for more than the document has."""
    values = options.distinct(value) if isinstance(value, list) else [value]
    most = max(full) if isinstance(full, list) else full
    if max(values) > most:
        raise BenchError(
            f"{options.option(name)} is {max(values)}, and {seed.name} goes up to {most}: give at most that"
        )
    if isinstance(full, list):
        return sorted(values)
    if len(values) > 1:
        raise BenchError(
            f"{options.option(name)} is {_text(values)}, and {seed.name} has one such size: give one number"
        )
    return int(values[0])


def _text(value: int | list[int]) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
