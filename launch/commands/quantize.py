"""The command `lockstep quantize`: its options, and the calibration text as samples of token ids.

The text is cut into samples of equally many tokens, each after the tokens that begin every prompt of the model. The
last ones are held out of calibration, to measure perplexity on, unless another text is given for that. A process of its
own quantises (`server/quantize/`), because that needs torch.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.commands.jobs import companions
from launch.errors import Refusal
from launch.flags import Parser, add_option, unknown_arguments, with_negative_values
from launch.settings import Settings, public_settings, read_settings
from router.text.tokenizer import ModelTokenizer, TokenizerError
from server.quantize.recipe import (
    DEVICES,
    HELD_OUT,
    LEAST_TOKENS,
    METHODS,
    MOST_SAMPLES,
    MOST_TOKENS,
    Job,
    Recipe,
    output_problem,
)

SETTINGS = ("revision", "huggingface_hub_cache")
DEFAULT_GROUP = 128
CHARACTERS_PER_TOKEN = 32  # at most, to read no more of a text than is needed
# Options that are no settings of a launch.
OWN = (
    "model", "output", "text", "held_out", "method", "bits", "group_size", "symmetric", "plain_order", "smooth",
    "num_samples", "sample_tokens", "device",
)  # fmt: skip

Samples = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Command:
    """The command line. text and held_out: files."""

    settings: Settings
    recipe: Recipe
    output: Path
    text: Path
    held_out: Path | None
    num_samples: int
    sample_tokens: int
    device: str

    def job(self, model_path: Path, weights_path: Path, tokenizer_path: Path) -> Job:
        """The job of the process that quantises. Raises Refusal for a text that is too short."""
        calibration, held_out = self._samples(model_path, tokenizer_path)
        return Job(
            self.recipe,
            str(model_path),
            str(weights_path),
            str(self.output.resolve()),
            companions(model_path, tokenizer_path),
            calibration,
            held_out,
            self.device,
        )

    def _samples(self, model_path: Path, tokenizer_path: Path) -> tuple[Samples, Samples]:
        wanted = max(1, self.num_samples // HELD_OUT)
        try:
            tokenizer = ModelTokenizer.load(str(model_path), str(tokenizer_path))
            if self.held_out is not None:
                samples = self._cut(self.text, self.num_samples, tokenizer)
                return samples, self._cut(self.held_out, wanted, tokenizer)
            samples = self._cut(self.text, self.num_samples + wanted, tokenizer)
        except (TokenizerError, ValueError) as error:
            raise Refusal([str(error)], 1) from None
        except KeyboardInterrupt:  # a long text takes seconds
            raise Refusal(["stopped by SIGINT: nothing is made, start again"], 128 + signal.SIGINT) from None
        wanted = min(wanted, max(1, len(samples) // HELD_OUT))
        if len(samples) == 1:
            raise Refusal(
                [
                    f"--text {self.text} has one sample of {self.sample_tokens} tokens, of 2 at least: give more text, "
                    "fewer --sample-tokens, or --held-out"
                ],
                1,
            )
        return samples[:-wanted], samples[-wanted:]

    def _cut(self, file: Path, count: int, tokenizer: ModelTokenizer) -> Samples:
        """Up to `count` samples of a text, from its beginning."""
        text = _read(file, count * self.sample_tokens * CHARACTERS_PER_TOKEN)
        first = tuple(tokenizer.encode(""))
        ids, size = tokenizer.encode_plain(text), self.sample_tokens - len(first)
        samples = tuple((*first, *ids[at : at + size]) for at in range(0, len(ids) - size + 1, size))[:count]
        if not samples:
            raise ValueError(
                f"{file} has {len(ids)} tokens, and a sample has {size}: give more text, or fewer --sample-tokens"
            )
        return samples


def _read(file: Path, most: int) -> str:
    """The first so many characters of a text. Raises ValueError."""
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(most)
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: convert it first") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """What the command line asks for. Raises Refusal with every problem at once."""
    parser = _parser()
    namespace, unknown = parser.parse_known_args(with_negative_values(argv))
    given: dict[str, Any] = vars(namespace)
    own = {name: given.pop(name) for name in OWN}
    settings, problems = read_settings(given | {"model_id": own["model"]}, environ, ("model_id", *SETTINGS))
    problems += unknown_arguments(unknown, parser)
    bits = own["bits"] if own["bits"] is not None else 8 if own["method"] == "w8a8" else 4
    group = DEFAULT_GROUP if own["group_size"] is None else own["group_size"]
    recipe = Recipe(own["method"], bits, group, own["symmetric"], not own["plain_order"], own["smooth"])
    output = Path(own["output"]).expanduser()
    problems += [*recipe.problems(), *_problems(own, output)]
    if settings.is_null_model:
        problems.append("the model is null, which has no weights: give a model's folder or repository")
    if problems:
        raise Refusal(problems, 2)
    held_out = None if own["held_out"] is None else Path(own["held_out"])
    return Command(
        settings, recipe, output, Path(own["text"]), held_out, own["num_samples"], own["sample_tokens"], own["device"]
    )


def _problems(own: Mapping[str, Any], output: Path) -> list[str]:
    problems = []
    if problem := output_problem(output):
        problems.append(problem)
    if own["method"] == "w8a8" and own["group_size"] not in (None, -1):
        problems.append(f"--group-size is {own['group_size']}: --method w8a8 has one scale for each row, leave it out")
    if own["method"] != "gptq" and own["plain_order"]:
        problems.append(f"--plain-order is of --method gptq, and --method is {own['method']}: leave it out")
    if not 2 <= own["num_samples"] <= MOST_SAMPLES:
        problems.append(f"--num-samples is {own['num_samples']}: give 2 to {MOST_SAMPLES}")
    if not LEAST_TOKENS <= own["sample_tokens"] <= MOST_TOKENS:
        problems.append(f"--sample-tokens is {own['sample_tokens']}: give {LEAST_TOKENS} to {MOST_TOKENS}")
    return problems


def _parser() -> argparse.ArgumentParser:
    about = (
        "Make a checkpoint with quantised weights from a model and a text, layer by layer. 4 and 8 bits are written as "
        "compressed-tensors, 2 and 3 as GPTQ's own format."
    )
    parser = Parser(prog="lockstep quantize", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model's folder, or a repository of the Hugging Face Hub")
    add("--output", required=True, metavar="DIR", help="a new or empty folder for the checkpoint")
    add("--text", required=True, metavar="FILE", help="UTF-8 text like what the model will see, for calibration")
    add("--held-out", metavar="FILE", help="text to measure perplexity on. Default: the end of --text")
    add("--method", default="gptq", choices=[*METHODS], help="how weights are rounded. Default: gptq")
    add("--bits", type=int, metavar="2|3|4|8", help="bits of a weight. Default: 4, and 8 for w8a8")
    add(
        "--group-size",
        type=int,
        metavar="INPUTS",
        help=f"inputs per scale; -1: a whole row, as in w8a8. Default: {DEFAULT_GROUP}",
    )
    add("--symmetric", action="store_true", help="leave out zero points: the code of 0 is the middle one")
    add("--plain-order", action="store_true", help="gptq: round columns in their order, without activation ordering")
    add(
        "--smooth",
        type=float,
        default=0.0,
        metavar="ALPHA",
        help="w8a8: how much of the inputs' range moves into weights. Default: 0, none",
    )
    add("--num-samples", type=int, default=128, metavar="N", help="samples of the text. Default: 128")
    add("--sample-tokens", type=int, default=512, metavar="L", help="tokens of a sample. Default: 512")
    add("--device", default="auto", choices=DEVICES, help="device. Default: a GPU if there is one")
    known = public_settings()
    for name in SETTINGS:
        add_option(parser, known[name], name)
    return parser
