"""The command `lockstep watermark`: whether a text was generated with `watermark`, by its tokens.

Settings are those of the server that generated it, with the same flags and environment variables: the model, for its
tokenizer, and gamma. Nothing is served, and no weights are read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import Refusal
from launch.flags import Parser, add_option, unknown_arguments, with_negative_values
from launch.settings import Settings, public_settings, read_settings
from router.text.tokenizer import ModelTokenizer, TokenizerError
from router.text.watermark import MOST_LIKELY_BY_CHANCE, Detection, TextTooShort, detect

SETTINGS = ("model_id", "revision", "huggingface_hub_cache", "watermark_gamma")


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, str, bool]:
    """(settings, file, whether JSON is wanted). Raises Refusal with every problem at once."""
    parser = _parser()
    namespace, unknown = parser.parse_known_args(with_negative_values(argv))
    given: dict[str, Any] = vars(namespace)
    file, as_json = given.pop("file"), given.pop("json")
    settings, problems = read_settings(given, environ, SETTINGS)
    problems += unknown_arguments(unknown, parser)
    if settings.is_null_model:
        problems.append("--model-id is null, which has no watermark: give the model that generated the text")
    if problems:
        raise Refusal(problems, 2)
    return settings, file, as_json


def _parser() -> argparse.ArgumentParser:
    about = "Tell whether a text was generated with `watermark`, without its prompt."
    parser = Parser(prog="lockstep watermark", description=about, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="a file of UTF-8 text, as it was generated; - for standard input")
    parser.add_argument("--json", action="store_true", help="answer with one JSON object")
    known = public_settings()
    for name in SETTINGS:
        add_option(parser, known[name], name)
    return parser


def read_text(file: str) -> str:
    """The text of a file, or of standard input. Raises Refusal."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise Refusal([f"{file} cannot be read: {error.strerror}"], 1) from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refusal([f"{file} is not UTF-8 text: convert it first"], 1) from None


def report(text: str, settings: Settings, model_path: Path, tokenizer_path: Path, *, as_json: bool) -> str:
    """What is found in the text, for people or as JSON. Raises Refusal."""
    try:
        tokenizer = ModelTokenizer.load(str(model_path), str(tokenizer_path))
        found = detect(tokenizer.encode_plain(text), settings.values["watermark_gamma"])
    except (TextTooShort, TokenizerError, ValueError) as error:
        raise Refusal([str(error)], 1) from None
    return _as_json(found) if as_json else _for_people(found)


def _for_people(found: Detection) -> str:
    verdict = "the text has the watermark" if found.is_watermarked else "no watermark is found"
    return (
        f"z {found.z:.2f}, p {found.p:.3g}: {verdict} (p below {MOST_LIKELY_BY_CHANCE:.1e})\n"
        f"{found.num_green} of {found.num_scored} different pairs of neighbouring tokens are green, where "
        f"{found.gamma * found.num_scored:.1f} would be by chance (gamma {found.gamma:g}; {found.num_tokens} tokens)\n"
    )


def _as_json(found: Detection) -> str:
    fields = ("z", "p", "is_watermarked", "num_tokens", "num_scored", "num_green", "gamma")
    return json.dumps({name: getattr(found, name) for name in fields}) + "\n"
