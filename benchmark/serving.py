"""`lockstep-bench serving`: requests per second and latencies as a client sees them, over HTTP.

A grid of lengths is sent to a server under closed loops (N streams, each sends when its last request is answered) and
open loops (Poisson arrivals, whatever the server does). In an open loop every time counts from the moment the request
was meant to be sent, so that a server which makes its clients wait cannot hide it (coordinated omission). Failed
requests are counted by kind and never enter a latency. Tokens are counted as they came, not as they were asked for.

The drawn work is in `workload.py`, the wire in `http_client.py`. Not here: several client processes, sessions of
several turns, and shared prefixes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from benchmark import interrupts, launch, options, plots, slo, workload
from benchmark.http_client import DISCONNECTED, Api, ChatApi, HttpClient, OpenAiApi, TgiApi
from benchmark.loops import closed_loop, open_loop, sender, unreachable
from benchmark.outcomes import Load, Objectives, Outcome, loads, markdown, progress, row_of
from benchmark.report import PERCENTILE_RULE, BenchError, Result, RunContext, arguments_of, prepare_output, published
from benchmark.workload import Lengths, PlannedRequest

LENGTHS = (128, 512, 1024, 2048)  # the published sweeps'
CONCURRENCY = 16
ABOVE_ZERO = options.number(above=0)
SERVER_REQUESTS = 128  # the launcher's own default of --max-concurrent-requests


# ------------------------------------------------------------------------------------------------------- sweep


@dataclass(frozen=True)
class MeasuredServer:
    """The server to measure, and what it says of itself."""

    url: str
    model: str
    info: Mapping[str, Any]  # of GET /info; empty for servers without
    server: launch.Server | None = None  # None: not ours
    has_meaning: bool = True  # False: random weights, whose tokenizer knows no words

    def cause(self, error: BenchError) -> BenchError:
        """Why a server of ours was lost: its launcher knows better than the connection."""
        if self.server is None:
            return error
        self.server.wait_ended(5.0)
        return BenchError(self.server.failure() or str(error))


class Sweep:
    """The loads of one run, sent to one server row after row."""

    def __init__(self, args: argparse.Namespace, target: MeasuredServer) -> None:
        self._args = args
        self._target = target
        self._client = _client(args, target.url)
        self._send = sender(self._client, _api(args, target.model))
        self._ends = workload.local_token_ends(args.tokenizer) if args.tokenizer else server_token_ends(self._client)
        self._given = workload.read_lengths(args.lengths_file) if args.lengths_file else None
        self._objectives = Objectives(args.ttft_objective, args.tpot_objective)

    async def run(self, result: Result, keep: Callable[[], None]) -> None:
        """Add the rows to the result, one at a time. Raises BenchError; the finished rows are there."""
        try:
            for cell in self._cells() if self._args.slo else ():
                await self._search(cell, result, keep)
            for cell, load in product(self._cells(), loads(self._args.concurrency, self._args.request_rate)):
                row = await self._measure(cell, load)
                result.rows.append(row)
                keep()
                print(progress(row, load), file=sys.stderr)
                if DISCONNECTED in row["errors_by_kind"]:
                    await check_alive(self._client)
            if all(row["errors"] == row["requests"] for row in result.rows):
                raise BenchError("no request succeeded: the report counts the errors by kind")
        except BenchError as error:
            raise self._target.cause(error) from None

    def _cells(self) -> list[Lengths]:
        if self._given is not None:
            return [workload.mean_lengths(self._given)]
        return [Lengths(*pair) for pair in product(self._args.input_length, self._args.output_length)]

    async def _measure(self, cell: Lengths, load: Load) -> dict[str, Any]:
        random = Random(f"{self._args.seed} {cell} {load}")
        warmups = await self._plan(cell, load, self._args.warmups, random)
        requests = await self._plan(cell, load, num_requests(self._args, load), random)
        await closed_loop(self._send, warmups, load.concurrency or len(warmups))
        if load.concurrency is not None:
            outcomes = await closed_loop(self._send, requests, load.concurrency)
        else:
            outcomes = await open_loop(self._send, requests)
        return row_of(cell, load, outcomes, self._objectives, self._args.length_distribution)

    async def _search(self, cell: Lengths, result: Result, keep: Callable[[], None]) -> None:
        """Find the highest rate that keeps the objectives; its last probe is a row. Raises BenchError."""
        random = Random(f"{self._args.seed} {cell} slo")
        outcomes: list[Outcome] = []

        async def send(rate: float | None, count: int) -> list[Outcome]:
            planned = await self._plan(cell, Load(request_rate=rate) if rate else Load(concurrency=1), count, random)
            outcomes[:] = await (open_loop(self._send, planned) if rate else closed_loop(self._send, planned, 1))
            return outcomes

        found = {"input_length": cell.input_length, "output_length": cell.output_length}
        result.extra.setdefault("slo_searches", []).append(found)
        try:
            rate = await slo.searched(self._args, send, found)
        finally:
            keep()
        load = Load(request_rate=rate)
        result.rows.append(row_of(cell, load, outcomes, self._objectives, self._args.length_distribution))
        keep()

    async def _plan(self, cell: Lengths, load: Load, count: int, random: Random) -> list[PlannedRequest]:
        if self._given is not None:
            lengths = random.choices(self._given, k=count)
        else:
            lengths = workload.draw_lengths(self._args.length_distribution, cell, count, random)
        times = workload.poisson_times(load.request_rate, count, random) if load.request_rate else [0.0] * count
        words = workload.WORDS if self._target.has_meaning else workload.MEANINGLESS_WORDS
        prompts = [await workload.exact_prompt(one.input_length, self._ends, random, words) for one in lengths]
        return [PlannedRequest(*parts) for parts in zip(prompts, lengths, times, strict=True)]


def num_requests(args: argparse.Namespace, load: Load) -> int:
    """How many requests a row has: enough that the streams' unequal ends matter little, or a minute of arrivals."""
    return args.num_requests or max(32, 4 * (load.concurrency or 0), round(60 * (load.request_rate or 0)))


def server_token_ends(client: HttpClient) -> workload.TokenEnds:
    """A function that finds where tokens end by the server's own `/tokenize`."""

    async def ends(text: str) -> list[int]:
        try:
            status, tokens = await client.json("POST", "/tokenize", {"inputs": text})
            if status == 422 and " " in text:
                raise workload.TextTooLong(str(tokens))
            return [token["stop"] for token in tokens]
        except (OSError, TimeoutError) as error:
            raise unreachable(client.url, error) from None
        except (KeyError, TypeError):
            raise BenchError(
                f"{client.url}/tokenize (status {status}) does not tell where tokens end: give --tokenizer the folder "
                "of the model's tokenizer.json"
            ) from None

    return ends


async def check_alive(client: HttpClient) -> None:
    """Ask the server whether it lives. Raises BenchError when nothing listens any more."""
    try:
        await client.json("GET", "/health")
    except (OSError, TimeoutError) as error:
        raise unreachable(client.url, error) from None


# ------------------------------------------------------------------------------------------------ command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    target = parser.add_argument_group("server to measure")
    target.add_argument("--url", help="of a running server; without it one is started. --model-id then only names it")
    target.add_argument(
        "--api", choices=("tgi", "openai", "chat"), default="tgi",
        help="/generate_stream, /v1/completions or /v1/chat/completions (tgi)",
    )  # fmt: skip
    target.add_argument("--api-key-file", type=Path, metavar="FILE", help="the server's key")
    target.add_argument("--no-ignore-eos", action="store_true", help="let models end their answers")
    target.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer.json's folder, without /tokenize")
    target.add_argument("--timeout", type=ABOVE_ZERO, default=600.0, metavar="S", help="of a request (600)")
    _add_work_arguments(parser.add_argument_group("work"))
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md, result.json and plots")
    launch.add_server_arguments(parser)
    parser.add_argument("launcher_flags", nargs="*", metavar="-- FLAG", help="further flags of the launcher")


def _add_work_arguments(group: argparse._ArgumentGroup) -> None:
    lengths = " ".join(map(str, LENGTHS))
    repeatable: dict[str, Any] = {"nargs": "+", "action": "extend"}
    group.add_argument("--input-length", type=options.positive, metavar="N", help=f"prompt ({lengths})", **repeatable)
    group.add_argument("--output-length", type=options.positive, metavar="N", help=f"answer ({lengths})", **repeatable)
    group.add_argument(
        "--length-distribution", default="fixed", metavar="KIND",
        help="around the lengths of the grid: fixed, uniform (half to one and a half) or lognormal (same mean); or in "
        'place of the grid a JSONL file of {"input_length": …, "output_length": …}',
    )  # fmt: skip
    group.add_argument("--concurrency", type=options.positive, metavar="N", help="closed loops (16)", **repeatable)
    group.add_argument("--request-rate", type=ABOVE_ZERO, metavar="R", help="open loops, per second", **repeatable)
    group.add_argument(
        "--num-requests", type=options.positive, metavar="N", help="of a row (4 x concurrency or 60 s, >= 32)"
    )
    group.add_argument("--warmups", type=options.not_negative, default=1, metavar="N", help="requests before a row (1)")
    group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (0)")
    slo.add_arguments(group)
    group.add_argument("--ttft-objective", type=ABOVE_ZERO, metavar="MS", help="for goodput")
    group.add_argument("--tpot-objective", type=ABOVE_ZERO, metavar="MS", help="for goodput")


def run(args: argparse.Namespace) -> int:
    """Send every load to the server and print the tables; 0. Raises BenchError."""
    _complete(args)
    prepare_output(args.output)
    draws = plots.wanted(args.output)
    with _target(args) as target:
        _refuse_what_is_too_long(args, target.info)
        sweep = Sweep(args, target)
        result = Result(
            _context(args, target),
            notes=_notes(args),
            extra=launch.startup_of(target.server) | {"server": dict(target.info)},
        )
        with published(result, _markdown, args.output) as keep:
            interrupts.run(sweep.run(result, keep))
    if draws:
        plots.plot_serving({target.model: result.rows}, args.output)
    return 0


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults, and refuse what contradicts itself or cannot be read. Raises BenchError."""
    args.input_length = options.distinct(args.input_length or LENGTHS)
    args.output_length = options.distinct(args.output_length or LENGTHS)
    slo.check(args)
    args.request_rate = options.distinct(args.request_rate or ())
    args.concurrency = options.distinct(args.concurrency or (() if args.request_rate or args.slo else (CONCURRENCY,)))
    is_file = args.length_distribution not in workload.DISTRIBUTIONS
    args.lengths_file = Path(args.length_distribution) if is_file else None
    if args.lengths_file is not None:
        workload.read_lengths(args.lengths_file)
    if args.url is None:
        return
    own = ("random_weights", "num_shard", "dtype", "device", "quantize", "kv_cache_dtype", "launcher_flags")
    if surplus := options.options_given(args, (*own, *launch.OFFLOADING)):
        names = ", ".join(surplus)
        raise BenchError(f"--url measures a server that runs already: leave out {names}, which are for one to start")
    if not _is_url(args.url):
        raise BenchError(f"{args.url} is not a URL: write it as http://127.0.0.1:3000")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        return False


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[MeasuredServer]:
    if args.url is not None:
        yield interrupts.run(_running(args))
        return
    with launch.model_for(args) as model:
        with launch.running_server([*launch.launch_flags(args, model), *_limits(args), *args.launcher_flags]) as server:
            _, info = interrupts.run(_client(args, server.url).json("GET", "/info"))
            yield MeasuredServer(server.url, model.name, info, server, has_meaning=not model.random_weights)


async def _running(args: argparse.Namespace) -> MeasuredServer:
    """The server at `--url`, as it describes itself. Raises BenchError when it does not answer."""
    client = _client(args, args.url)
    try:
        _, info = await client.json("GET", "/info")
        _, models = (0, None) if args.model_id or args.api == "tgi" else await client.json("GET", "/v1/models")
    except (OSError, TimeoutError) as error:
        raise unreachable(args.url, error) from None
    info = info if isinstance(info, dict) else {}
    model = args.model_id or _first_model(models) or info.get("model_id")
    if model is None and args.api != "tgi":
        raise BenchError(f"{args.url}/v1/models names no model: give --model-id")
    return MeasuredServer(args.url, model or "unknown", info)


def _first_model(models: Any) -> str | None:
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return None


def _client(args: argparse.Namespace, url: str) -> HttpClient:
    try:
        key = args.api_key_file.read_text().strip() if args.api_key_file else None
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the key from {args.api_key_file}: {error}") from None
    return HttpClient(url, api_key=key, timeout_s=args.timeout)


def _api(args: argparse.Namespace, model: str) -> Api:
    ignore_eos = not args.no_ignore_eos
    if args.api == "tgi":
        return TgiApi(ignore_eos=ignore_eos)
    return (ChatApi if args.api == "chat" else OpenAiApi)(model, ignore_eos=ignore_eos)


def _refuse_what_is_too_long(args: argparse.Namespace, info: Mapping[str, Any]) -> None:
    """Raises BenchError for lengths that the server says it does not take. info: of GET /info."""
    lengths = workload.read_lengths(args.lengths_file) if args.lengths_file else [_longest(args)]
    longest = {
        "max_input_length": max(one.input_length for one in lengths),
        "max_total_tokens": max(one.input_length + one.output_length for one in lengths),
    }
    for name, count in longest.items():
        if isinstance(most := info.get(name), int) and count > most:
            raise BenchError(
                f"requests of up to {count} tokens are asked for, and {name} of the server is {most}: give shorter "
                f"--input-length and --output-length, or start it with --{name.replace('_', '-')} {count}"
            )


def _longest(args: argparse.Namespace) -> Lengths:
    longest_mean = Lengths(max(args.input_length), max(args.output_length))
    return workload.longest_drawn(args.length_distribution, longest_mean)


def _limits(args: argparse.Namespace) -> list[str]:
    """Launcher flags of a server that takes the longest request and the most streams, where the user does not say."""
    longest = _longest(args)
    limits = {
        "--max-input-length": longest.input_length,
        "--max-total-tokens": longest.input_length + longest.output_length,
        "--max-concurrent-requests": max(SERVER_REQUESTS, *args.concurrency, 0),
    }
    said = {flag.partition("=")[0] for flag in args.launcher_flags}
    return launch.flags_of({flag: value for flag, value in limits.items() if flag not in said})


# ------------------------------------------------------------------------------------------------------ report


def _context(args: argparse.Namespace, target: MeasuredServer) -> RunContext:
    info = target.info
    return RunContext.gather(
        "serving",
        model=target.model,
        device=str(info.get("model_device_type", "unknown device")),
        dtype=str(info.get("model_dtype", "unknown dtype")).removeprefix("torch."),
        num_shard=int(info.get("num_shard", 0)),
        threads=0,
        quantize=info.get("quantize"),
        arguments=arguments_of(args),
        work=_work(args, target.model),
    )


def _work(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What two results must have in common to be compared. Not how the server is set up: that is the comparison."""
    work = {"slo": [str(one) for one in args.slo]} if args.slo else {}
    work |= {name: getattr(args, name) for name in ("concurrency", "request_rate", "num_requests", "seed")}
    if args.lengths_file is not None:
        lengths: dict[str, Any] = {"lengths_sha256": hashlib.sha256(args.lengths_file.read_bytes()).hexdigest()}
    else:
        lengths = {name: getattr(args, name) for name in ("length_distribution", "input_length", "output_length")}
    return {"model": model} | work | lengths


def _markdown(result: Result) -> str:
    searches = slo.sections(result.extra.get("slo_searches", []))
    return "\n\n".join(part for part in (searches, markdown(result)) if part)


def _notes(args: argparse.Namespace) -> list[str]:
    notes = [
        "Times are the client's: from the sending of a request (in an open loop from the moment it was meant to be "
        "sent), connecting included, to its tokens. Per token: end-to-end time / (input + output tokens); per output "
        "token: end-to-end time / output tokens; means over requests. TPOT: (last - first token) / (tokens - 1). "
        "Throughput counts until the last request has ended.",
        f"Warm-up requests before each row, not counted: {args.warmups}. Greedy. Seed {args.seed}. {PERCENTILE_RULE}",
    ]
    if args.num_requests is None or args.num_requests < 100:
        notes.append("Below 100 requests a row, p99 is nearly or exactly the maximum.")
    return notes
