"""The command line: one option for each public setting, and a remedy for each argument that is none.

Writes `docs/settings.md`, the page of all settings, from the same fields that the flags are made from.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from launch.compatibility import peers, tgi
from launch.config import GROUPS, REMOVED
from launch.errors import Refusal
from launch.logs import printable
from launch.settings import Setting, flag, public_settings

EXIT_CODES = "Exit codes: 0 after a stop by a signal, 1 where something failed, 2 for options that cannot be used."
SHORT_FLAGS = {"port": "-p", "env": "-e", "graceful_termination_timeout": "-g"}
NEAR = 0.75  # how much two words must have in common for one to be the other misspelt; 1: all
NEGATIVE = re.compile(r"-\.?\d.*")  # a value such as -5%, which argparse would take for an option


class Parser(argparse.ArgumentParser):
    """Raises Refusal for what it cannot read."""

    def error(self, message: str) -> NoReturn:
        raise Refusal([message.removeprefix("argument ")], 2)


def read_command_line(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What each option was given, by the setting's name, and one sentence for each argument that is no option.

    `version` and `print_settings` are always there, true if they were given. Prints the help and leaves for `--help`.
    """
    parser = build_parser(public_settings())
    dashed = [flag(a[2:].split("=")[0]) + a[len(a.split("=")[0]) :] if a.startswith("--") else a for a in argv]
    namespace, unknown = parser.parse_known_args(with_negative_values(dashed))
    return vars(namespace), unknown_arguments(unknown, parser)


def build_parser(settings: Mapping[str, Setting]) -> argparse.ArgumentParser:
    """One option per setting, all taken as text: values are checked together later, with those of the environment."""
    about = "Serve a language model over HTTP. Each option may also be given by the environment variable in brackets."
    usage = (
        "lockstep [options]\n       lockstep check -- [options]\n       lockstep watermark [options] FILE\n"
        "       lockstep quantize [options] MODEL\n       lockstep merge MODEL ADAPTER --output DIR\n"
        "       lockstep batch --input FILE --output FILE [options]\n       lockstep tls FOLDER"
    )
    parser = Parser(prog="lockstep", usage=usage, description=about, epilog=EXIT_CODES, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("--print-settings", action="store_true", help="print docs/settings.md and leave")
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for setting in (settings[name] for name in names.split()):
            for name in setting.names:
                add_option(group, setting, name)
    for foreign in (setting for setting in tgi.foreign_settings() if setting.name not in settings):
        values: dict[str, Any] = {"nargs": "?", "const": "true"} if foreign.is_switch else {}
        parser.add_argument(
            foreign.flag, dest=foreign.name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **values
        )
    return parser


def add_option(group: argparse._ActionsContainer, setting: Setting, name: str) -> None:
    """Let a parser, or a group of one, take the option of `setting` under one of its names."""
    group.add_argument(*option_strings(setting, name), **_option(setting, name))


def option_strings(setting: Setting, name: str) -> list[str]:
    """The options that give `setting` under one of its names: the long one, and the short one if there is one."""
    short = SHORT_FLAGS.get(name)
    return [flag(name), short] if short else [flag(name)]


def _option(setting: Setting, name: str) -> dict[str, Any]:
    variable = setting.variable(name)
    text = f"{setting.metadata['help']} Default: {setting.default_text}." + (f" [{variable}]" if variable else "")
    option: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "metavar": _metavar(setting),
        "help": text.replace("%", "%%") if name == setting.name else argparse.SUPPRESS,
    }
    if setting.is_switch:
        option |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    if setting.kind is tuple:
        option["action"] = "append"
    return option


def _metavar(setting: Setting) -> str:
    """What the help shows in place of a value: the choices if there is a list, else the unit or the type."""
    if "choices" in setting.metadata:
        return "|".join(map(str, setting.metadata["choices"]))
    return str(setting.metadata.get("unit", setting.kind.__name__)).upper().replace("TUPLE", "ORIGIN")


def with_negative_values(argv: Sequence[str]) -> list[str]:
    """The arguments with each that begins like a negative number written behind its option and a `=`."""
    found: list[str] = []
    for argument in argv:
        if found and found[-1].startswith("--") and "=" not in found[-1] and NEGATIVE.fullmatch(argument):
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def refuse_misspelt(argv: Sequence[str], commands: Iterable[str]) -> None:
    """Raise Refusal for a first argument that is nearly a command: what follows it is of no use to a launch."""
    if not argv or argv[0].startswith("-"):
        return
    nearest = difflib.get_close_matches(argv[0], list(commands), n=1, cutoff=NEAR)
    if nearest and argv[0] != nearest[0]:
        raise Refusal([f"{printable(argv[0])} is not a command: did you mean lockstep {nearest[0]}?"], 2)


def unknown_arguments(unknown: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """One sentence for each argument that is no option, with what was meant as far as that can be told."""
    theirs = {setting.flag for setting in tgi.foreign_settings()}
    options = (option for action in parser._actions for option in action.option_strings)
    known = [option for option in options if option.startswith("--") and option not in theirs]
    problems = []
    for position, argument in enumerate(unknown):
        name = printable(argument.split("=")[0])  # the value of a misspelt --api-key is not for the screen
        if argument.startswith("-"):
            problems.append(f"{name} is not an option{_remedy(name, known, parser)}")
        elif position == 0 or not unknown[position - 1].startswith("-"):
            has_model = "--model-id" in known
            remedy = f"a model is given as --model-id {name}" if has_model else f"see {parser.prog} --help"
            problems.append(f"{name} belongs to no option: {remedy}")
    return problems


def _remedy(name: str, known: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to do about an option that the parser does not know."""
    removed = {flag(setting): remedy for setting, remedy in REMOVED.items()}
    if flag(name[2:]) in removed:
        return f" any more: {removed[flag(name[2:])]}"
    of_a_launch = {flag(name) for setting in public_settings().values() for name in setting.names}
    if flag(name[2:]) in of_a_launch and "[-- " in (parser.usage or ""):
        return f" of {parser.prog}: give it to the server, behind --"
    if flag(name[2:]) in of_a_launch:
        return f" of {parser.prog}, only of lockstep itself: see {parser.prog} --help"
    if "--model-id" in known and (of_a_peer := peers.remedy(name)):
        return f": {of_a_peer}"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    return f": did you mean {nearest[0]}?" if nearest else f": see {parser.prog} --help"


def render_settings() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Written by `.venv/bin/python launcher.py --print-settings` from the code; do not edit.",
        "",
        "Every setting is a flag (`--max_batch_size` is read as `--max-batch-size`) and an environment variable. A",
        "flag wins over the environment; an empty variable counts as not set. A switch alone means true. `HOSTNAME`",
        "is not read, because shells and containers set it to the machine's name. `HF_TOKEN` and `HF_HUB_OFFLINE`",
        "have their usual meaning. `--version` and `--print-settings` print and leave.",
    ]
    settings = public_settings()
    for title, names in GROUPS.items():
        lines += ["", f"## {title}", "", "| flag | environment | unit | default | what it does | when to change it |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_settings_row(settings[name]) for name in names.split()]
    return "\n".join(lines) + "\n"


def _settings_row(setting: Setting) -> str:
    flags = [option for name in setting.names for option in option_strings(setting, name)]
    variables = [v for name in setting.names if (v := setting.variable(name))]
    unit = setting.metadata.get("unit") or ("true or false" if setting.kind is bool else "")
    if words := setting.metadata.get("words"):
        unit = " or ".join(filter(None, (unit, *words)))
    if "choices" in setting.metadata:
        unit = f"{unit}: ".lstrip(": ") + ", ".join(str(choice) for choice in setting.metadata["choices"])
    cells = (_code(flags), _code(variables) or "–", unit, setting.default_text)
    return "| " + " | ".join((*cells, setting.metadata["help"], setting.metadata["when"])) + " |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
