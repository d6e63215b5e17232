"""`lockstep-bench`: the command line of the benchmark. Each command is a module with `add_arguments` and `run`.

Only the module of the command that is asked for is imported, so that `--help` answers at once. Exit codes: 0 done,
1 it failed (one sentence on standard error, and what was measured before is kept), 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, cast

from benchmark.result import BenchError, forget_reader

COMMANDS: Mapping[str, str] = {
    "latency": "prefill and decode times by batch size, measured at the shards",
    "serving": "requests per second and latencies over HTTP, for any compatible server",
    "offline": "a file of prompts through the engine, without HTTP",
    "race": "other programs for CPUs that are installed here, in turn with Lockstep, beside the machine's limits",
    "reproduce": "rerun a published benchmark on this machine and compare its figures",
    "plan": "memory and lower bounds of step times of a model on a device; loads nothing",
    "simulate": "simulate a fleet under load in virtual time; loads nothing",
    "kernels": "compile every Triton kernel and report its resources, without a GPU; or time quantised products on one",
    "gpu-first": "the most important GPU checks first, in independent parts, for a short session",
    "gpu": "all targets for one GPU, measured by these commands, in one Markdown file",
    "compare": "compare result files",
}


class Subcommand(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command."""

    def run(self, args: argparse.Namespace) -> int:
        """Do what the parsed arguments ask for; the exit code. Raises BenchError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; the exit code of the console script.

    A reader of standard output who leaves early, as `head` does, is no error.
    """
    try:
        return _run(argv)
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return 0
    finally:
        if _reader_has_left():
            forget_reader()


def _reader_has_left() -> bool:
    """Whether what was printed cannot be written, because nobody will read it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _run(argv: Sequence[str] | None) -> int:
    if sys.stderr is None:  # somebody closed it: what is said there is for nobody
        sys.stderr = open(os.devnull, "w")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((argument for argument in arguments[:1] if argument in COMMANDS), None)
    command = (
        None
        if name is None
        else cast(Subcommand, importlib.import_module(f"benchmark.commands.{name.replace('-', '_')}"))
    )
    parser = _parser(name, command)
    if name is None and arguments and not arguments[0].startswith("-"):
        parser.error(f"{arguments[0]} is not a command{_meant(arguments[0], COMMANDS)}")
    args = parser.parse_args(arguments)
    assert command is not None, "the parser asks for a command"
    os.putenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # servers that are started run another program: no warning at each
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: rows are printed and servers stopped
    try:
        return command.run(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Of a command's parser, the arguments behind the command; none may be unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if option := next((argument.split("=")[0] for argument in unknown if argument.startswith("-")), None):
            self.error(f"{option} is not an option{_meant(option, self._option_string_actions)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        remedy = "" if message.endswith("?") else f": see {self.prog} --help"
        self.exit(2, f"error: {message}{remedy}\n")


def _meant(given: str, known: Iterable[str]) -> str:
    """A question behind a misspelt word, if it is nearly a known one."""
    nearest = difflib.get_close_matches(given, list(known), n=1)
    return f": did you mean {nearest[0]}?" if nearest else ""


def _parser(chosen: str | None, command: Subcommand | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lockstep-bench", description="Measures Lockstep and other servers, and the limits of the machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        if name == chosen and command is not None:
            command.add_arguments(sub)
    return parser


if __name__ == "__main__":
    sys.exit(main())
