"""`lockstep-bench serving`: requests per second and latencies as a client sees them, over HTTP.

A grid of lengths is sent to a server under closed loops (N streams, each sends when its last request is answered) and
open loops (Poisson arrivals, whatever the server does). In an open loop every time counts from the moment the request
was meant to be sent, so that a server which makes its clients wait cannot hide it (coordinated omission). Failed
requests are counted by kind and never enter a latency. Tokens are counted as they came, not as they were asked for.

What is sent, and when, is in `benchmark/load/`, the wire in `http_client.py`. Not here: several client processes.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmark import interrupts, launch, options, plots, progress
from benchmark.http_client import Api, ChatApi, HttpClient, OpenAiApi, TgiApi
from benchmark.load import arguments, pictures
from benchmark.load.sweep import MeasuredServer, Sweep, refuse_too_long, stages_of
from benchmark.loops import unreachable
from benchmark.outcomes import markdown
from benchmark.publishing import published
from benchmark.report import PERCENTILE_RULE, BenchError, Result, RunContext, arguments_of, prepare_output

# What a chat's template, or a line's end, adds to a message, and an answer that is tokenised again.
MESSAGE_TOKENS = 32
MOST_LETTERS = 200  # of a name that a server gives
SERVER_REQUESTS = 128  # the launcher's own default of --max-concurrent-requests


# ------------------------------------------------------------------------------------------------ command line


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
        "--tokenizer", type=Path, metavar="DIR", help="folder of tokenizer.json, for servers without /tokenize"
    )
    target.add_argument(
        "--timeout", type=arguments.ABOVE_ZERO, default=600.0, metavar="S", help="time limit of a request (600)"
    )
    arguments.add_work_arguments(parser.add_argument_group("requests"))
    arguments.add_load_arguments(parser.add_argument_group("load"))
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the report, plots and requests.jsonl")
    launch.add_server_arguments(parser)
    parser.add_argument("launcher_flags", nargs="*", metavar="-- FLAG", help="further flags of the launcher")


def run(args: argparse.Namespace) -> int:
    """Send every load to the server and print the tables; 0. Raises BenchError."""
    _complete(args)
    prepare_output(args.output)
    with _target(args) as target:
        refuse_too_long(arguments.limits_of(args), target.info, args)
        result = Result(
            _context(args, target),
            notes=_notes(args),
            extra=launch.startup_of(target.server) | {"server": dict(target.info)},
        )
        stages, client, api = stages_of(args), _client(args, target.url), _api(args, target.model)
        with (
            published(result, markdown, args.output, _draw) as keep,
            progress.shown(f"serving {target.model}", stages) as view,
        ):
            interrupts.run(Sweep(args, target, client, api, view).run(result, keep))
    return 0


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults, and refuse what contradicts itself or cannot be read. Raises BenchError."""
    arguments.complete(args)
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
    limits = {options.option(name): count + spare for name, count in arguments.limits_of(args).items()}
    limits["--max-concurrent-requests"] = max(SERVER_REQUESTS, *args.concurrency, args.max_concurrency or 0)
    said = {flag.partition("=")[0] for flag in args.launcher_flags}
    return launch.flags_of({flag: value for flag, value in limits.items() if flag not in said})


# ------------------------------------------------------------------------------------------------------ report


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
        "prefixes", "prefix_length", "prefix_choice", "turns", "think_time",
    )  # fmt: skip
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


def _draw(result: Result, folder: Path) -> list[plots.Picture]:
    varied = plots.axis_of(result.rows)
    rows = [row for row in result.rows if row[varied] is not None]
    about = f"{result.context.model} on {result.context.machine}; {pictures.loads_of(rows)}"
    return [*pictures.draw(result, folder), *plots.plot_serving({result.context.model: rows}, folder, about)]


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
