"""How much of a document's sweep is run: all of it, or less of its layers and sizes, which the title then says.

What differs from the document in any of these is a reduced run, beside which no figure of the document may stand. Not
a reduction: the dtype, the number of shards and the streams of a load that the document does not name.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from benchmark import options
from benchmark.report import BenchError
from benchmark.seeds.documents import Seed

STREAMS = 256  # of the load that a document does not name
QUICK_LAYERS = 2
REQUESTS_PER_STREAM = 4
# What an option changes, in the words of a title. Those that are lists in any document.
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


def add_arguments(group: argparse._ArgumentGroup) -> None:
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
