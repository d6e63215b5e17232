"""What a simulation is about: how long its shards' steps take, how many tokens they can hold, and what it is called.

Two sources: a shape on a device's data sheet, or `latency` results. The arithmetic is in `cost.py`, `plan.py` and
`shapes.py`; here the command line's choice among them becomes one object. Encoder-decoders are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark import plan, shapes
from benchmark.cost import Fitted, Fixed, Roofline, fit, read_latency
from benchmark.devices import DEVICES
from benchmark.report import BenchError
from benchmark.roofline import ServedModel
from benchmark.shapes import BLOCK_SIZE
from benchmark.traffic import Case
from router.config import RouterConfig
from router.limits import derive_lengths, useful_tokens


@dataclass(frozen=True)
class Subject:
    """What is simulated: its step times, and how it is named in the report."""

    cost: Roofline | Fitted | Fixed
    model: str
    device: str
    dtype: str
    num_shard: int
    quantize: str | None
    note: str
    kv_tokens: Callable[[RouterConfig], int]  # that the server would infer

    def check(self, cases: Sequence[Case], *, has_prefixes: bool) -> None:
        """Raise BenchError for work of which the step times say nothing. has_prefixes: beginnings are found cached."""
        if not isinstance(self.cost, Fitted) or self.cost.only is None:
            return
        if has_prefixes:
            raise BenchError(
                "--cost is of one --sequence-length, whose prompts were computed whole, and what is left of a prompt "
                "behind a cached beginning looks at more keys: give another result, too, measured with another "
                "--sequence-length, or --no-prefix-cache"
            )
        for case in cases:
            self.cost.check(case.mean.input_length, case.mean.output_length)
            if case.distribution != "fixed":
                raise BenchError(
                    f"--cost is of one --sequence-length, and lengths are {case.distribution}: give another result, "
                    "too, measured with another --sequence-length"
                )


def subject_of(args: argparse.Namespace) -> Subject:
    """What the arguments describe by either a shape or latency results. Raises BenchError."""
    if args.step_ms is not None:
        return _paced(args)
    return _fitted(args) if args.shape is None else _on_device(args)


def _paced(args: argparse.Namespace) -> Subject:
    """The null model with these flags."""
    return Subject(
        cost=Fixed((args.step_ms + args.overhead_ms) / 1000, args.token_us / 1e6),
        model="null",
        device="cpu",
        dtype="float32",
        num_shard=1,
        quantize=None,
        note=f"Steps: {args.step_ms + args.overhead_ms:g} ms, and {args.token_us:g} us for each prompt token.",
        kv_tokens=_useful_tokens,
    )


def _on_device(args: argparse.Namespace) -> Subject:
    named, device = shapes.find(args.shape), DEVICES[args.device]
    if named.shape.spec.encoder is not None:
        raise BenchError(f"{named.name} is an encoder-decoder, which the simulator does not know: take a decoder")
    quantize = plan.stored_as(named, args.quantize)
    dtype = args.dtype or named.shape.dtype
    served = ServedModel(named.shape, dtype, quantize, args.kv_cache_dtype, ranks=args.num_shard)
    cost = Roofline.of(served, device.ceilings(served), args.efficiency, args.overhead_ms / 1000, device.sums(served))

    def kv_tokens(config: RouterConfig) -> int:
        found = plan.capacity(
            served,
            device,
            args.num_shard,
            argparse.Namespace(
                max_batch_prefill_tokens=config.max_batch_prefill_tokens,
                max_concurrent_requests=config.max_concurrent_requests,
                max_total_tokens=config.max_total_tokens,
            ),
        )
        if found.problem:
            raise BenchError(f"{named.name} on {args.device}: {found.problem}")
        return found.max_batch_total_tokens

    return Subject(
        cost=cost,
        model=named.name,
        device=args.device,
        dtype=served.dtype,
        num_shard=args.num_shard,
        quantize=served.quantize,
        note=f"Steps: {100 * args.efficiency:g} % of what {args.num_shard} x {args.device} could do at best "
        f"(docs/roofline.md), and {args.overhead_ms:g} ms.",
        kv_tokens=kv_tokens,
    )


def _fitted(args: argparse.Namespace) -> Subject:
    results = [read_latency(path) for path in args.cost]
    first = results[0]
    if len(models := {result["model"] for result in results}) > 1:
        raise BenchError(f"--cost has results of {len(models)} models, {', '.join(sorted(models))}: give those of one")
    cost = fit(results, args.overhead_ms / 1000)
    return Subject(
        cost=cost,
        model=first["model"],
        device=first["device"],
        dtype=first["dtype"],
        num_shard=first["num_shard"],
        quantize=first["quantize"],
        note=_fit_note(cost, len(results)),
        kv_tokens=_useful_tokens,
    )


def _useful_tokens(config: RouterConfig) -> int:
    lengths = derive_lengths(config, 0, has_encoder=False)
    return useful_tokens(config, lengths, block_size=BLOCK_SIZE, has_encoder=False)


def _fit_note(cost: Fitted, num_results: int) -> str:
    context = (
        f"{cost.context_ms * 1e6:.3g} ns for each key that a decoding sequence looks at"
        if cost.only is None
        else f"for {cost.only[0]} tokens in and {cost.only[1]} out alone"
    )
    return (
        f"Steps: fitted to {num_results} latency result{'s' if num_results > 1 else ''}; {cost.base_ms:.2f} ms for an "
        f"empty step, shared by prompts and decoding; {context}; and {1000 * cost.overhead_s:g} ms. Memory is taken "
        "to be enough for max_concurrent_requests of the longest length, unless max_batch_total_tokens is given."
    )
