"""How long a step takes, as a function of what is in it: a device's data sheet, or a fit to `latency` results.

A simulated shard asks for nothing else, so a model of a step is one small class here. Both are deterministic and know
no noise: a prediction is the middle of what would be measured.

`Roofline` is the formula of `roofline.py` with an efficiency, operator by operator: layers' matrices, attention of
prompts and of what decodes, and the head run one after the other, so that each takes the slower of its own reads and
its own products, as a share of what the device could do; plus a fixed time. A floor, which is the least of any
program, would hide one operator's reads behind another's products. `Fitted` is what `latency` measured, between the
measured points by straight lines. A step that has prompts and decoding sequences costs what each part adds to an
empty step: the weights are read once.

Results of one length tell nothing of others, so that a fit to them is asked for no others.

Left out: encoder-decoders, sampling options, and whatever changes while a server runs.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from benchmark.cost.roofline import BytesAndFlops, Ceilings, Piece, ServedModel, Sums, mean_context
from benchmark.result import BenchError
from server.offload.cost import share_read

EFFICIENCY = 0.6  # of a device's ceilings, reached by a step of which nothing is measured: an assumption


class StepWork(NamedTuple):
    """What one step computes: its prompt tokens, its decoding sequences, and the keys that both look at."""

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0  # keys that those tokens look at, together
    prompt_read: int = 0  # tokens of their prompts that earlier steps computed
    decoding: int = 0  # sequences that get their next token
    context: int = 0  # keys that the decoding sequences look at, together, each new token's own included
    sampled: int = 0  # sequences that get a token, from a prompt's end or by decoding

    def prompt_keys(self, window: int) -> tuple[float, float]:
        """Of prompts: tokens whose keys and values are read or written, and keys that are looked at.

        window: how many tokens one sees in a layer; 0: any number. A token is taken to see all of a window, where their
        sum allows that: a whole prompt longer than the window is charged up to half of the window's square too much,
        for its first tokens.
        """
        if not window:
            return self.prompt_read + self.prompt_tokens, self.prompt_pairs
        prompts = max(1, self.sampled - self.decoding)  # those that end, or one that goes on
        read = min(self.prompt_read, prompts * (window - 1))
        return read + self.prompt_tokens, min(self.prompt_pairs, self.prompt_tokens * window)

    def decode_keys(self, window: int) -> tuple[float, float]:
        """Likewise of decoding sequences, whose contexts have what they write, too."""
        keys = min(self.context, self.decoding * window) if window else self.context
        return keys, keys


class Cost(Protocol):
    """A model of how long a step takes."""

    def seconds(self, work: StepWork) -> float:
        """How long the shards compute. A step without tokens, which only lets sequences go, takes no time."""


# --------------------------------------------------------------------------------------------------------- a data sheet


@dataclass(frozen=True)
class Roofline:
    """Bytes and operations of a step's operators, held against what a device can do; see `roofline.ServedModel.step`.

    Of layers with a window it knows what all sequences look at together, and takes them for equally long.
    """

    layer_bytes: float  # of the layers' matrices, experts apart
    head_bytes: float
    kv_bytes: Mapping[int, float]  # of a token that is read or written, by the window of the layers; 0: none
    token_flops: float
    key_flops: Mapping[int, float]  # of a token looking at one key, likewise
    sampled_flops: float
    bytes_per_second: float  # reached, of all devices together
    flops_per_second: float
    overhead_s: float  # of any step: launches, the sampler
    experts: Mapping[float, float] = field(default_factory=dict)  # their bytes, by the share that a token goes to
    sums: Sums = field(default_factory=Sums)  # over the shards
    kv_bytes_per_token: float = 0.0  # each head once, as they are sent to another replica

    @classmethod
    def of(
        cls,
        served: ServedModel,
        ceilings: Ceilings,
        efficiency: float = EFFICIENCY,
        overhead_s: float = 0.0,
        sums: Sums | None = None,
    ) -> Roofline:
        """A served model on a device. efficiency: share of the ceilings that is reached, above 0 and at most 1."""
        head_bytes = served.shape.head_bytes(served.dtype, served.quantize)
        reached = efficiency * ceilings.num_devices

        def flops(needed: BytesAndFlops) -> float:
            """Those in 8 bits as so many of the others as take as long."""
            return needed.num_flops - needed.num_ops_8 * (1 - ceilings.eight_bit_share)

        token = served.step([Piece(0)], sampled=0)
        return cls(
            layer_bytes=served.step_weight_bytes(0) - head_bytes,
            head_bytes=head_bytes,
            kv_bytes=served.kv_bytes,
            token_flops=flops(token) - sum(served.key_flops.values()),  # it looks at itself
            key_flops=served.key_flops,
            sampled_flops=flops(served.step([Piece(0)], sampled=1)) - flops(token),
            bytes_per_second=ceilings.bytes_per_second * reached,
            flops_per_second=ceilings.flops_per_second * reached,
            overhead_s=overhead_s,
            experts=served.shape.expert_bytes(served.dtype, served.quantize),
            sums=sums or Sums(),
            kv_bytes_per_token=served.kv_bytes_per_token,
        )

    def seconds(self, work: StepWork) -> float:
        """How long the shards compute: of each operator the slower of its reads and its products, and a fixed time."""
        tokens = work.prompt_tokens + work.decoding
        if not tokens:
            return 0.0
        experts = sum(num_bytes * share_read(share, tokens) for share, num_bytes in self.experts.items())
        return (
            self._operator(self.layer_bytes + experts, self.token_flops * tokens)
            + sum(self._attention(window, *work.prompt_keys(window)) for window in self.kv_bytes)
            + sum(self._attention(window, *work.decode_keys(window)) for window in self.kv_bytes)
            + self._operator(self.head_bytes * (work.sampled > 0), self.sampled_flops * work.sampled)
            + self.overhead_s
            + self.sums.seconds(tokens, work.sampled)
        )

    def _attention(self, window: int, kv_tokens: float, pairs: float) -> float:
        return self._operator(self.kv_bytes[window] * kv_tokens, self.key_flops[window] * pairs)

    def _operator(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class Fixed:
    """Steps of a fixed time, and so much more for each prompt token: the null model's with the flags of these names."""

    step_s: float
    token_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """How long the shards wait. A step without tokens takes no time."""
        if not work.prompt_tokens + work.decoding:
            return 0.0
        return self.step_s + self.token_s * work.prompt_tokens


# ---------------------------------------------------------------------------------------------------- latency's results


@dataclass(frozen=True)
class Curve:
    """Straight lines between points of ascending x, at least two; beyond the last one as between the last two."""

    xs: Sequence[float]
    ys: Sequence[float]

    def __call__(self, x: float) -> float:
        right = min(max(1, bisect_right(self.xs, x)), len(self.xs) - 1)
        (x0, x1), (y0, y1) = self.xs[right - 1 : right + 1], self.ys[right - 1 : right + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


NEAR = 0.1  # how far lengths may be from the only one that was measured


@dataclass(frozen=True)
class Fitted:
    """Measured step times, in milliseconds. Both curves start at `base_ms`, the time of a step with next to nothing in
    it, so that a mixed step counts it once."""

    base_ms: float
    prefill_ms: Curve  # over the prompt tokens of a step, as if they looked at no keys
    pair_ms: float  # for each key that a prompt token looks at; 0 where one length was measured
    decode_ms: Curve  # over the sequences that decode, as if they looked at no keys
    context_ms: float  # for each key that a decoding sequence looks at; 0 where one length was measured
    overhead_s: float = 0.0
    only: tuple[int, int] | None = None  # the one length that was measured: tokens of prompts and of answers

    def check(self, input_length: int, output_length: int) -> None:
        """Raise BenchError for lengths of which the measured one says nothing."""
        if self.only is None:
            return
        wanted, measured = (input_length, input_length + output_length / 2), (self.only[0], mean_context(*self.only))
        if any(abs(one - other) > NEAR * other for one, other in zip(wanted, measured, strict=True)):
            raise BenchError(
                f"--cost is of one --sequence-length, {self.only[0]} tokens in and {self.only[1]} out, and what "
                f"{input_length} in and {output_length} out look at costs something else: give another result, too, "
                "measured with another --sequence-length"
            )

    def seconds(self, work: StepWork) -> float:
        """How long the shards compute, between the measured points by straight lines."""
        if not work.prompt_tokens + work.decoding:
            return 0.0
        prompts = self.prefill_ms(work.prompt_tokens) + self.pair_ms * work.prompt_pairs - self.base_ms
        sequences = self.decode_ms(work.decoding) - self.base_ms
        return (self.base_ms + prompts + sequences + self.context_ms * work.context) / 1000 + self.overhead_s


class DecodePoint(NamedTuple):
    """One measured decode step: its batch, its context, and its time."""

    batch_size: int
    context: float  # keys that each sequence looks at, on average over the run
    ms: float


class PrefillPoint(NamedTuple):
    """One measured step of whole prompts: its tokens, what they look at, and its time."""

    tokens: int
    pairs: float  # keys that those tokens look at, together
    ms: float


def fit(results: Sequence[Mapping[str, Any]], overhead_s: float = 0.0) -> Fitted:
    """Fit step times to the JSON of one or several `latency` runs of the same model. Raises BenchError.

    Runs with different --sequence-length tell the prices of keys, by steps that had equally many tokens, or sequences,
    and looked at more of them or fewer. Each point is a row's median.
    """
    lengths = {(result["arguments"]["sequence_length"], result["arguments"]["decode_length"]) for result in results}
    decodes = [point for result in results for point in _decode_points(result)]
    prefills = [point for result in results for point in _prefill_points(result)]
    if len({point.batch_size for point in decodes}) < 2:
        raise BenchError("one batch size was measured: measure several, as in latency --batch-size 1 4 16 64")
    pair_ms = context_ms = 0.0
    if len(lengths) > 1:
        pair_ms = _price("prompt tokens", ((p.tokens, p.pairs, p.ms) for p in prefills))
        context_ms = _price("sequences", ((p.batch_size, p.batch_size * p.context, p.ms) for p in decodes))
    without_pairs = _means((p.tokens, p.ms - pair_ms * p.pairs) for p in prefills)
    without_context = _means((p.batch_size, p.ms - context_ms * p.batch_size * p.context) for p in decodes)
    base_ms = _base_ms(without_context, limit=min(without_pairs.values()))
    prefill_ms, decode_ms = _curve(base_ms, without_pairs), _curve(base_ms, without_context)
    only = None if len(lengths) > 1 else next(iter(lengths))
    return Fitted(base_ms, prefill_ms, pair_ms, decode_ms, context_ms, overhead_s, only)


def read_latency(path: Path) -> dict[str, Any]:
    """Read a result.json of `latency`. Raises BenchError when it is none, or an incomplete one."""
    try:
        result = json.loads(path.read_text())
        command, steps = result["command"], {row["step"] for row in result["rows"]}
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}; give the result.json of a latency run") from None
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{path} is no result of this benchmark: give the result.json of a latency run") from None
    if command != "latency" or not {"prefill", "decode_token"} <= steps:
        raise BenchError(f"{path} is an incomplete result, or one of `{command}`: give that of a whole latency run")
    return dict(result)


def _rows(result: Mapping[str, Any], step: str) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["step"] == step]


def _decode_points(result: Mapping[str, Any]) -> list[DecodePoint]:
    arguments = result["arguments"]
    context = mean_context(arguments["sequence_length"], arguments["decode_length"])
    return [DecodePoint(row["batch_size"], context, row["p50_ms"]) for row in _rows(result, "decode_token")]


def _prefill_points(result: Mapping[str, Any]) -> list[PrefillPoint]:
    length = result["arguments"]["sequence_length"]
    return [
        PrefillPoint(row["tokens_per_sample"], row["batch_size"] * length**2 / 2, row["p50_ms"])
        for row in _rows(result, "prefill")
    ]


def _means(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The mean for each key, in ascending order."""
    found = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: fmean(found[key]) for key in sorted(found)}


def _price(unit: str, points: Iterable[tuple[int, float, float]]) -> float:
    """From (size, keys, ms), how the time of one size grows with the keys that are looked at. Raises BenchError."""
    by_size = defaultdict(list)
    for size, keys, ms in points:
        by_size[size].append((keys, ms))
    if all(len({keys for keys, _ in same}) == 1 for same in by_size.values()):
        raise BenchError(
            f"--cost has several lengths, but no two of its steps had equally many {unit} and looked at more or fewer "
            "keys: measure two --sequence-length of which one is a multiple of the other, 100 and 400, say, with -b "
            "1 2 4 8 16"
        )
    return max(0.0, _slope(by_size.values()))


def _base_ms(decode_ms: Mapping[int, float], limit: float) -> float:
    """Where the straight line through all decode times meets a batch of none; never more than a measured step."""
    slope = _slope([decode_ms.items()])
    return max(0.0, min(fmean(decode_ms.values()) - slope * fmean(decode_ms), limit, *decode_ms.values()))


def _slope(groups: Iterable[Collection[tuple[float, float]]]) -> float:
    """Least squares: the slope that lines through each group's points have in common; 0 if no group has two x."""
    above = below = 0.0
    for points in groups:
        mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
        above += sum((x - mean_x) * (y - mean_y) for x, y in points)
        below += sum((x - mean_x) ** 2 for x, _ in points)
    return above / below if below else 0.0


def _curve(base_ms: float, points: Mapping[int, float]) -> Curve:
    return Curve((0, *points), (base_ms, *points.values()))


# ------------------------------------------------------------------------------------------------------- measured steps


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of the whole model on the shards that were measured."""

    cost: Fitted

    def step_ms(self, is_prefill: bool, sequences: int, sequence_length: int, decode_length: int) -> float:
        """A step of so many sequences: their whole prompts, or a token of each at the mean context."""
        work = StepWork(decoding=sequences, context=int(sequences * mean_context(sequence_length, decode_length)))
        if is_prefill:
            tokens = sequences * sequence_length
            work = StepWork(prompt_tokens=tokens, prompt_pairs=tokens * sequence_length / 2, sampled=sequences)
        return 1000 * self.cost.seconds(work)


def measured_steps(args: argparse.Namespace, model: str, served: ServedModel) -> MeasuredSteps | None:
    """What --cost says; None without. Raises BenchError where it is of something else than what is planned."""
    if args.cost is None:
        return None
    results = [read_latency(path) for path in args.cost]
    planned = {
        "model": model.rstrip("/").rsplit("/", 1)[-1],
        "num_shard": args.num_shard[0] if len(args.num_shard) == 1 else args.num_shard,
        "dtype": served.dtype,
        "quantize": served.quantize or "dense",
    }
    for result in results:
        was = dict(result) | {"model": str(result["model"]).rstrip("/").rsplit("/", 1)[-1]}
        for name, wanted in planned.items():
            if was[name] != wanted:
                raise BenchError(
                    f"--cost has a result with {name} {was[name]}, and this plan has {wanted}: give latency results of "
                    "what is planned"
                )
    cost = fit(results)
    cost.check(args.sequence_length, args.decode_length)
    return MeasuredSteps(cost)
