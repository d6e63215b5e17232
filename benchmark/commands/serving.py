"""`lockstep-bench serving`: requests per second and latencies as a client sees them, over HTTP.

A grid of lengths, or the requests of a file or a trace, is sent to a server under closed loops (N streams, each sends
when its last request is answered) and open loops (Poisson arrivals, whatever the server does). Here: the options, what
they contradict, and which server is measured. The client is in `benchmark/serving/`. Left out: several clients.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmark import launch, options, terminal
from benchmark.report import pictures
from benchmark.report.publishing import published
from benchmark.result import PERCENTILE_RULE, BenchError, Result, RunContext, arguments_of, prepare_output
from benchmark.serving import workload
from benchmark.serving.datasets import Lengths, read_dataset, read_trace
from benchmark.serving.http_client import Api, ChatApi, HttpClient, OpenAiApi, TgiApi
from benchmark.serving.loops import unreachable
from benchmark.serving.outcomes import markdown
from benchmark.serving.sweep import MeasuredServer, Sweep, refuse_too_long, stages_of
from benchmark.serving.workload import CHOICES

# What a chat's template, or a line's end, adds to a message, and an answer that is tokenised again.
MESSAGE_TOKENS = 32
MOST_LETTERS = 200  # of a name that a server gives
SERVER_REQUESTS = 128  # the launcher's own default of --max-concurrent-requests


# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    target = parser.add_argument_group("server to measure")
    target.add_argument(
        "--url", help="URL of a running server (default: start one); --model-id then only names the model"
    )
    target.add_argument(
        "--api", choices=("tgi", "openai", "chat"), default="tgi",
        help="/generate_stream, /v1/completions or /v1/chat/completions (tgi)",
    )  # fmt: skip
    target.add_argument("--api-key-file", type=Path, metavar="FILE", help="the server's key")
    target.add_argument("--no-ignore-eos", action="store_true", help="let end tokens end answers")
    target.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder of tokenizer.json, if there is no /tokenize"
    )
    target.add_argument("--timeout", type=ABOVE_ZERO, default=600.0, metavar="S", help="limit of a request (600)")
    work = parser.add_argument_group("requests")
    add_work_arguments(work)
    work.add_argument(
        "--adapters", type=options.positive, metavar="N", help="each names one of the first N adapters of the server"
    )
    work.add_argument("--zipf", action="store_true", help="the k-th adapter is 1/k as likely as the first; else equal")
    add_load_arguments(parser.add_argument_group("load"))
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the report, plots and requests.jsonl")
    launch.add_server_arguments(parser)
    parser.add_argument("launcher_flags", nargs="*", metavar="-- FLAG", help="further flags of the launcher")


def run(args: argparse.Namespace) -> int:
    """Send every load to the server and print the tables; 0. Raises BenchError."""
    _complete(args)
    prepare_output(args.output)
    with _target(args) as target:
        refuse_too_long(limits_of(args), target.info, args)
        result = Result(
            _context(args, target),
            notes=_notes(args),
            extra=launch.startup_of(target.server) | {"server": dict(target.info)},
        )
        stages, client, api = stages_of(args), _client(args, target.url), _api(args, target.model)
        with (
            published(result, markdown, args.output, _draw) as keep,
            terminal.shown(f"serving {target.model}", stages) as view,
        ):
            launch.run_interruptible(Sweep(args, target, client, api, view).run(result, keep))
    return 0


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults, and refuse what contradicts itself or cannot be read. Raises BenchError."""
    complete_load(args)
    if args.zipf and not args.adapters:
        raise BenchError("--zipf says how requests choose among adapters: give their number with --adapters")
    if args.url is None:
        return
    own = ("random_weights", "num_shard", "dtype", "device", "cpu_kernels", "quantize", "kv_cache_dtype")
    if surplus := options.options_given(args, (*own, "launcher_flags", *launch.OFFLOADING)):
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
        yield launch.run_interruptible(_running(args))
        return
    with launch.model_for(args) as model:
        with launch.running_server([*launch.launch_flags(args, model), *_limits(args), *args.launcher_flags]) as server:
            _, info = launch.run_interruptible(_client(args, server.url).json("GET", "/info"))
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
    return MeasuredServer(args.url, _named(model, "unknown"), info)


def _named(said: Any, otherwise: str) -> str:
    """What a server calls something, in letters that no terminal takes for commands, and not too many of them."""
    if not isinstance(said, str) or not said:
        return otherwise
    return "".join(letter if letter.isprintable() else "?" for letter in said[:MOST_LETTERS])


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


def _limits(args: argparse.Namespace) -> list[str]:
    """Launcher flags of a server that takes the longest request and the most streams, where the user does not say."""
    messages = 2 * (args.turns or 1) - 1 if args.turns or args.api == "chat" else 0
    spare = MESSAGE_TOKENS * messages
    limits = {options.option(name): count + spare for name, count in limits_of(args).items()}
    limits["--max-concurrent-requests"] = max(SERVER_REQUESTS, *args.concurrency, args.max_concurrency or 0)
    said = {flag.partition("=")[0] for flag in args.launcher_flags}
    return launch.flags_of({flag: value for flag, value in limits.items() if flag not in said})


# --------------------------------------------------------------------------------------------------------------- report


def _context(args: argparse.Namespace, target: MeasuredServer) -> RunContext:
    info = target.info
    return RunContext.gather(
        "serving",
        model=target.model,
        device=_named(info.get("model_device_type"), "unknown device"),
        dtype=_named(info.get("model_dtype"), "unknown dtype").removeprefix("torch."),
        num_shard=num_shard if isinstance(num_shard := info.get("num_shard"), int) else 0,
        threads=0,
        quantize=_named(info.get("quantize"), "") or None,
        arguments=_given(args),
        work=_work(args, target.model),
    )


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments, without what was read of files."""
    read = ("trace_requests", "conversations", "dataset_output")
    return {name: value for name, value in arguments_of(args).items() if name not in read}


def _work(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What two results must have in common to be compared. Not how the server is set up: that is the comparison."""
    work: dict[str, Any] = {
        name: getattr(args, name) for name in ("concurrency", "request_rate", "num_requests", "seed")
    }
    further = (
        "ramp", "burstiness", "max_concurrency", "duration", "speed", "split", "prompt_column", "most_tokens",
        "prefixes", "prefix_length", "prefix_choice", "turns", "think_time", "adapters",
    )  # fmt: skip
    work |= {"zipf": True} if args.zipf else {}
    work |= {name: value for name in further if (value := getattr(args, name)) is not None}
    for name, path in (("dataset", args.dataset), ("trace", args.trace)):
        if path is not None:
            work[f"{name}_sha256"] = _digest(path)
    if args.lengths_file is not None:
        lengths: dict[str, Any] = {"lengths_sha256": _digest(args.lengths_file)}
    else:
        lengths = {name: getattr(args, name) for name in ("length_distribution", "input_length", "output_length")}
    return {"model": model} | work | lengths


def _digest(path: Path) -> str:
    """Of a file, or of all files of a folder."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(hashlib.sha256(one.read_bytes()).digest() for one in files)).hexdigest()


def _draw(result: Result, folder: Path) -> list[pictures.Picture]:
    varied = pictures.axis_of(result.rows)
    rows = [row for row in result.rows if row[varied] is not None]
    about = f"{result.context.model} on {result.context.machine}; {pictures.loads_of(rows)}"
    return [*pictures.draw_load(result, folder), *pictures.plot_serving({result.context.model: rows}, folder, about)]


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


# ----------------------------------------------------------------------------------------------- what is sent, and when


LENGTHS = (128, 512, 1024, 2048)  # the published sweeps'
CONCURRENCY = 16
ABOVE_ZERO = options.number(above=0)
REPEATABLE: dict[str, Any] = {"nargs": "+", "action": "extend"}
# Options that need another one beside them: without it they would do nothing.
NEEDS = {
    "split": ("dataset",), "prompt_column": ("dataset",), "speed": ("trace",),
    "prefix_length": ("prefixes",), "prefix_choice": ("prefixes",), "think_time": ("turns",),
    "most_tokens": ("dataset", "trace"), "max_concurrency": ("request_rate", "ramp", "trace"),
    "burstiness": ("request_rate", "ramp"),
}  # fmt: skip
# Options that exclude others, because each says the same thing another way.
EXCLUDES = {
    "trace": ("dataset", "prefixes", "turns", "concurrency", "request_rate", "ramp", "input_length", "output_length"),
    "dataset": ("prefixes", "input_length"),
}


def add_work_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare what is sent: lengths, files, prefixes, turns."""
    lengths = " ".join(map(str, LENGTHS))
    group.add_argument("--input-length", type=options.positive, metavar="N", help=f"prompt ({lengths})", **REPEATABLE)
    group.add_argument("--output-length", type=options.positive, metavar="N", help=f"answer ({lengths})", **REPEATABLE)
    group.add_argument(
        "--length-distribution", default="fixed", metavar="KIND",
        help="around the lengths of the grid: fixed, uniform (half to one and a half) or lognormal (same mean); or in "
        'place of the grid a JSONL file of {"input_length": …, "output_length": …}',
    )  # fmt: skip
    group.add_argument(
        "--dataset", type=Path, metavar="PATH", help="prompts of a file or folder: ShareGPT JSON, JSONL, CSV"
    )
    group.add_argument("--split", metavar="NAME", help="files of a folder whose names contain this (train)")
    group.add_argument("--prompt-column", metavar="NAME", help="prompt column of the data set, if it is not recognised")
    group.add_argument(
        "--most-tokens", type=options.positive, metavar="N", help="skip requests with more tokens, input plus output"
    )
    group.add_argument("--prefixes", type=options.positive, metavar="N", help="number of shared prefixes")
    group.add_argument("--prefix-length", type=options.positive, metavar="N", help="tokens of a shared prefix")
    group.add_argument("--prefix-choice", choices=CHOICES, help="how requests choose a prefix (uniform)")
    group.add_argument(
        "--turns", type=options.positive, metavar="N", help="turns of a conversation; with a data set, at most"
    )
    group.add_argument("--think-time", type=ABOVE_ZERO, metavar="S", help="mean pause before a later turn (0)")
    group.add_argument("--seed", type=int, default=0, help="random seed of prompts, lengths and arrivals (0)")
    group.add_argument("--slo", nargs="*", help=argparse.SUPPRESS)  # of an earlier release: refused by name in this one
    group.add_argument("--ttft-objective", type=ABOVE_ZERO, metavar="MS", help="objective for goodput")
    group.add_argument("--tpot-objective", type=ABOVE_ZERO, metavar="MS", help="objective for goodput")


def add_load_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare when it is sent, and how much of it."""
    group.add_argument(
        "--concurrency", type=options.positive, metavar="N", help="clients of a closed loop (16)", **REPEATABLE
    )
    group.add_argument(
        "--request-rate", type=ABOVE_ZERO, metavar="R", help="requests per second of an open loop", **REPEATABLE
    )
    group.add_argument(
        "--ramp", type=ABOVE_ZERO, nargs=2, metavar=("A", "B"), help="an open loop whose rate goes from A to B"
    )
    group.add_argument(
        "--burstiness", type=options.number(at_least=0), metavar="CV",
        help="standard deviation / mean of the gaps: 0 is constant, 1 Poisson, else gamma (1)",
    )  # fmt: skip
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay Mooncake's JSONL or an Azure CSV")
    group.add_argument("--speed", type=ABOVE_ZERO, metavar="F", help="replay this many times as fast (1)")
    group.add_argument(
        "--max-concurrency", type=options.positive, metavar="N", help="requests at once in an open loop; others wait"
    )
    group.add_argument(
        "--num-requests", type=options.positive, metavar="N",
        help="conversations per row (4 x concurrency or 60 s, >= 32; all of a trace)",
    )  # fmt: skip
    group.add_argument("--duration", type=ABOVE_ZERO, metavar="S", help="seconds of a row in which conversations start")
    group.add_argument("--warmups", type=options.not_negative, default=1, metavar="N", help="requests before a row (1)")


def complete_load(args: argparse.Namespace) -> None:
    """Fill in defaults, read the files, and refuse what contradicts itself or cannot be read. Raises BenchError."""
    _refuse_contradictions(args)
    if args.slo is not None:
        raise BenchError("--slo is gone: search for the rate that keeps objectives with guidellm or aiperf")
    args.trace_requests = read_trace(args.trace, args.speed or 1.0) if args.trace else None
    args.conversations = read_dataset(args.dataset, args.split, args.prompt_column) if args.dataset else None
    args.dataset_output = args.output_length[0] if args.dataset and args.output_length else None
    args.input_length = options.distinct(args.input_length or LENGTHS)
    args.output_length = options.distinct(args.output_length or LENGTHS)
    args.request_rate = options.distinct(args.request_rate or ())
    is_open = args.request_rate or args.ramp or args.trace
    args.concurrency = options.distinct(args.concurrency or (() if is_open else (CONCURRENCY,)))
    is_file = args.length_distribution not in workload.DISTRIBUTIONS
    args.lengths_file = Path(args.length_distribution) if is_file else None
    if args.lengths_file is not None:
        workload.read_lengths(args.lengths_file)
    if args.prefixes:
        _check_prefixes(args)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    given = {name for name in (*NEEDS, *EXCLUDES) if getattr(args, name) is not None}
    for name in NEEDS:
        if name in given and not any(getattr(args, other) for other in NEEDS[name]):
            wanted = " or ".join(options.option(other) for other in NEEDS[name])
            raise BenchError(f"{options.option(name)} does nothing without {wanted}: give that, or leave it out")
    for name, others in EXCLUDES.items():
        if name in given and (surplus := options.options_given(args, others)):
            raise BenchError(f"{options.option(name)} says by itself what {', '.join(surplus)} says: give one of them")
    if args.dataset and args.length_distribution != "fixed":
        raise BenchError("--dataset has its own lengths: leave out --length-distribution")
    if args.dataset and len(args.output_length or ()) > 1:
        raise BenchError(f"--dataset takes one --output-length, not {len(args.output_length)}: run it once for each")
    if args.prefixes and args.prefix_length is None:
        raise BenchError("--prefixes is a number of prefixes: give their length with --prefix-length")


def _check_prefixes(args: argparse.Namespace) -> None:
    if args.lengths_file is not None:
        shortest = min(one.input_length for one in workload.read_lengths(args.lengths_file))
    else:
        shortest = min(args.input_length) * (1 if args.length_distribution == "fixed" else 0.5)
    if args.length_distribution == "lognormal":
        raise BenchError("--prefixes needs prompts that are longer than them: give another --length-distribution")
    if shortest <= args.prefix_length:
        raise BenchError(
            f"--prefix-length {args.prefix_length} leaves nothing of a prompt of {shortest:g} tokens, which it is part "
            "of: give a longer --input-length"
        )


def limits_of(args: argparse.Namespace) -> dict[str, int]:
    """The longest prompt and the most tokens of one request that can be drawn, by the names of the server's limits.

    Empty for a data set, whose tokens are not counted yet.
    """
    if args.conversations is not None:
        return {}
    if args.trace_requests is not None:
        every = [one.lengths for one in args.trace_requests]
        most = args.most_tokens or math.inf
        lengths = [one for one in every if one.input_length + one.output_length <= most] or every
    elif args.lengths_file is not None:
        lengths = workload.read_lengths(args.lengths_file)
    else:
        means = Lengths(max(args.input_length), max(args.output_length))
        lengths = [workload.longest_drawn(args.length_distribution, means)]
    before = (args.turns or 1) - 1  # turns that the last one carries
    return {
        "max_input_length": max((before + 1) * one.input_length + before * one.output_length for one in lengths),
        "max_total_tokens": (before + 1) * max(one.input_length + one.output_length for one in lengths),
    }
