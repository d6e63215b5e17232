"""The command `lockstep batch`: a file of requests in OpenAI's batch format becomes a file of answers.

Against a server's URL, or with a server of its own (`batch_engine.py`). The work is `router/jobs/`; here are the
options, the signals, and what a person is told.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from router.jobs.census import Census, take_census
from router.jobs.errors import JobError
from router.jobs.journal import Journal, journal_of, new_of
from router.jobs.lines import LineFile
from router.jobs.progress import Progress, duration
from router.jobs.runner import Plan, Runner
from router.launch.batch_engine import OURS, engine
from router.launch.batch_http import HttpSender, base_of
from router.launch.errors import Refusal
from router.launch.flags import Parser, unknown_arguments

MOST_LINE_BYTES = 16 << 20  # far above what servers take of a body; such a line becomes an error of its own
MOST_CONCURRENCY = 1024


class Stopped(Exception):
    """A signal came."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Command:
    """What is asked for. url: None for a server of the job's own, which gets `flags`. Times are in seconds."""

    input: Path
    output: Path
    errors: Path | None
    url: str | None
    api_key: str | None
    flags: tuple[str, ...]
    timeout_s: float
    plan: Plan


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """What the command line asks for. Raises Refusal with every problem at once."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser, flags = _parser(), list(argv[split + 1 :])
    given, unknown = parser.parse_known_args(argv[:split])
    problems = unknown_arguments(unknown, parser)
    for name in ("model_id", "num_shard"):
        if (value := getattr(given, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    if (given.url is None) == (not flags and split == len(argv)):
        problems.append("give either --url of a server, or --model-id (and more options of `lockstep` behind --)")
    taken = [one for one in flags if one.partition("=")[0].replace("_", "-") in OURS]
    problems += [f"{one.partition('=')[0]} is the job's to choose: leave it out" for one in taken]
    if given.url is not None:
        try:
            base_of(given.url)
        except ValueError as error:
            problems.append(f"--url: {error}")
    api_key = given.api_key or environ.get("API_KEY") or None
    if api_key is not None and (not api_key.isprintable() or api_key != api_key.strip()):
        problems.append("the API key has line ends, or spaces around it, which no header may have: give it without")
    bounds = (("concurrency", 1, MOST_CONCURRENCY), ("max_tries", 1, 1000))
    bounds_s = (("timeout", 0.1, 7 * 86400.0), ("give_up_after", 0.0, 30 * 86400.0))
    for name, least, most in (*bounds, *bounds_s):
        if not least <= (value := getattr(given, name)) <= most:
            problems.append(f"--{name.replace('_', '-')} is {value:g}: give {least:g} to {most:g}")
    paths = {name: Path(value) for name in ("input", "output", "errors") if (value := getattr(given, name))}
    problems += _path_problems(paths)
    if problems:
        raise Refusal(problems, 2)
    plan = Plan(given.concurrency, max_tries=given.max_tries, give_up_s=given.give_up_after)
    places = (paths["input"], paths["output"], paths.get("errors"))
    return Command(*places, given.url, api_key, tuple(flags), given.timeout, plan)


def _path_problems(paths: Mapping[str, Path]) -> list[str]:
    problems = []
    if not paths["input"].is_file():
        said = "is no file that can be read twice" if paths["input"].exists() else "is not there"
        problems.append(f"--input {paths['input']} {said}: give a file of lines of JSON")
    for name in ("output", "errors"):
        if name in paths and not paths[name].parent.is_dir():
            problems.append(f"--{name} {paths[name]}: there is no folder {paths[name].parent}: make it first")
    journal = journal_of(paths["output"])
    every = [os.path.realpath(path) for path in (*paths.values(), journal, new_of(journal))]
    if len(set(every)) < len(every):
        problems.append("--input, --output, --errors and the journal beside the output must be different files")
    return problems


def _parser() -> argparse.ArgumentParser:
    about = (
        "Answer a file of requests in OpenAI's batch format, line by line, into another. After an interruption the "
        "same command resumes: no line is lost or answered twice."
    )
    usage = (
        "lockstep batch --input FILE --output FILE --url URL [options]\n"
        "       lockstep batch --input FILE --output FILE --model-id MODEL [options] [-- options of lockstep]"
    )
    parser = Parser(prog="lockstep batch", usage=usage, description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--input", required=True, metavar="FILE", help="lines of JSON: custom_id, method, url, body")
    add("--output", required=True, metavar="FILE", help="file for the answers; FILE.journal records the progress")
    add("--errors", metavar="FILE", help="file for failed lines, like OpenAI's error file. Default: the output")
    add("--url", metavar="URL", help="a running server, such as http://127.0.0.1:3000")
    add("--api-key", metavar="KEY", help="its key; prefer the environment variable API_KEY: flags show in `ps`")
    add("--model-id", metavar="MODEL", help="start a server with this model for the job, and end it afterwards")
    add("--num-shard", metavar="N", help="number of GPUs or processes to split its model over")
    add("--concurrency", type=int, default=64, metavar="N", help="requests at once. Default: 64")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="time limit of one answer. Default: 3600")
    add(
        "--max-tries",
        type=int,
        default=5,
        metavar="N",
        help="tries of a request that fails after it was sent; 429 and 503 do not count. Default: 5",
    )
    add(
        "--give-up-after",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="stop after this time without any answer. Default: 3600",
    )
    return parser


def run(command: Command, environ: Mapping[str, str]) -> int:
    """Answer the lines that are left. Returns the exit code; raises Refusal with the sentence that ends the job."""
    progress = Progress(0, sys.stderr, is_live=sys.stderr.isatty())
    again = "start the same command again to go on"
    try:
        return asyncio.run(_run(command, environ, progress))
    except Stopped as stopped:
        progress.say(f"stopped by {stopped}: {again}")
        return 128 + stopped.number
    except JobError as error:
        raise Refusal([str(error)], 1) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise Refusal([f"the job cannot go on:{where} {error.strerror}: see to that, then {again}"], 1) from None
    except KeyboardInterrupt:  # before its signals are heeded
        return 128 + signal.SIGINT


async def _run(command: Command, environ: Mapping[str, str], progress: Progress) -> int:
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _note, stop, number)
    work = asyncio.create_task(_work(command, environ, progress, stop))
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            if work.cancelled():
                raise Stopped(stop.result())
        return work.result()
    finally:
        stop.cancel()


def _note(stop: asyncio.Future[int], number: int) -> None:
    if stop.done():
        os._exit(128 + number)  # asked twice; nothing is lost by it
    stop.set_result(number)


async def _work(command: Command, environ: Mapping[str, str], progress: Progress, stop: asyncio.Future[int]) -> int:
    began = time.monotonic()
    census = await asyncio.to_thread(_census, command, progress, stop)
    with ExitStack() as stack:
        stack.callback(census.ids.close)
        journal = stack.enter_context(closing(Journal(command.output, command.errors, census)))
        progress.begin(census.num_lines)
        if journal.state.is_complete:
            progress.say(f"{command.output} is complete: {_counts(journal)}")
            return 0
        lines = stack.enter_context(closing(LineFile(command.input, MOST_LINE_BYTES)))
        if journal.num_left < census.num_lines:
            progress.say(f"going on with {command.output}: {_counts(journal)}, {journal.num_left:,} are left")
        async with _server(command, environ, progress) as (url, key, engine_end):
            async with HttpSender(url, key, command.timeout_s) as sender:
                runner = Runner(census, lines, journal, sender, command.plan)
                await _watched(runner, journal, progress, engine_end)
        progress.say(f"{command.output} is complete: {_counts(journal)}, in {duration(time.monotonic() - began)}")
    return 0


def _census(command: Command, progress: Progress, stop: asyncio.Future[int]) -> Census:
    told_at = time.monotonic()

    def advanced(share: float) -> None:
        nonlocal told_at
        if stop.done():
            raise Stopped(stop.result())
        if time.monotonic() - told_at > progress.period_s:
            told_at = time.monotonic()
            progress.show_reading(share)

    return take_census(command.input, command.output.parent, MOST_LINE_BYTES, advanced)


@asynccontextmanager
async def _server(
    command: Command, environ: Mapping[str, str], progress: Progress
) -> AsyncIterator[tuple[str, str | None, asyncio.Task[int] | None]]:
    """Who answers: its URL, the key, and what ends when a server of our own does."""
    if command.url is not None:
        yield command.url, command.api_key, None
        return
    async with engine(command.flags, environ, progress.say) as (url, key, end):
        yield url, key, end


async def _watched(runner: Runner, journal: Journal, progress: Progress, engine_end: asyncio.Task[int] | None) -> None:
    """Run the job, and say how far it is. Raises JobError and OSError."""
    working = asyncio.create_task(runner.run())
    telling = asyncio.create_task(_tell(runner, journal, progress))
    tasks: set[asyncio.Task[None] | asyncio.Task[int]] = {working, telling}
    try:
        await asyncio.wait(tasks | ({engine_end} if engine_end else set()), return_when=asyncio.FIRST_COMPLETED)
        if engine_end is not None and engine_end.done() and not working.done():
            code = engine_end.result()
            raise JobError(f"the server of this job ended with code {code}: see its log, then start the job again")
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        progress.show(journal.state.completed, journal.state.failed)
        progress.end_line()
    working.result()


async def _tell(runner: Runner, journal: Journal, progress: Progress) -> None:
    progress.note(journal.state.completed + journal.state.failed)
    while True:
        await asyncio.sleep(progress.period_s)
        progress.show(journal.state.completed, journal.state.failed, runner.trouble)


def _counts(journal: Journal) -> str:
    state = journal.state
    return f"{state.completed:,} lines are answered, {state.failed:,} failed"
