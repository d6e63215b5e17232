"""The command `lockstep merge`: its options, and what goes into the folder of the merged model beside its weights.

An adapter's folder may have a tokenizer of its own, with tokens that were added or with another template for chats. Its
files are taken before the model's. A process of its own merges (`server/merge/`), because that needs torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.commands.jobs import companions
from launch.errors import Refusal
from launch.flags import Parser, add_option, unknown_arguments
from launch.settings import Settings, public_settings, read_settings
from server.checkpoint.hub import ResolvedModel
from server.merge.job import Job
from server.quantize.recipe import output_problem

SETTINGS = ("revision", "huggingface_hub_cache")
OWN = ("model", "adapter", "output")  # options that are no settings of a launch


@dataclass(frozen=True)
class Command:
    """The command line. adapter: a folder, or a repository's name, perhaps with `@` and its revision."""

    settings: Settings
    adapter: str
    output: Path

    def job(self, model: ResolvedModel, adapter: Path) -> Job:
        """The job of the process that merges."""
        files = companions(model.path, model.tokenizer_path, adapter)
        return Job(str(model.path), str(model.weights_path), str(adapter), str(self.output.resolve()), files)


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """What the command line asks for. Raises Refusal with every problem at once."""
    parser = _parser()
    namespace, unknown = parser.parse_known_args(argv)
    given: dict[str, Any] = vars(namespace)
    own = {name: given.pop(name) for name in OWN}
    settings, problems = read_settings(given | {"model_id": own["model"]}, environ, ("model_id", *SETTINGS))
    problems += unknown_arguments(unknown, parser)
    output = Path(own["output"]).expanduser()
    if problem := output_problem(output):
        problems.append(problem)
    if settings.is_null_model:
        problems.append("the model is null, which has no weights: give a model's folder or repository")
    if problems:
        raise Refusal(problems, 2)
    return Command(settings, own["adapter"], output)


def _parser() -> argparse.ArgumentParser:
    about = (
        "Make a checkpoint of a model with an adapter of PEFT merged into it, in the model's dtype. The model must not "
        "be quantised."
    )
    parser = Parser(prog="lockstep merge", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model's folder, or a repository of the Hugging Face Hub")
    add("adapter", metavar="ADAPTER", help="an adapter's folder, or a repository, perhaps with @ and its revision")
    add("--output", required=True, metavar="DIR", help="a new or empty folder for the checkpoint")
    known = public_settings()
    for name in SETTINGS:
        add_option(parser, known[name], name)
    return parser
