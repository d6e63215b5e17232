"""What the small files beside a model's weights say about generating with it: end tokens, and its publisher's defaults.

End tokens are obeyed. The defaults are reported in `/info` and not applied: as in TGI, a request that names no sampling
parameter gets the most likely tokens, whatever the model. Left out: the tokenizer itself (`tokenizer.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

MOST_IDS = 2**31
DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "max_new_tokens",
    "max_length",
)


def eos_ids(model_folder: Path) -> set[int]:
    """The end tokens that generation_config.json and config.json name, one or several.

    Raises ValueError for what is no id.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = read_json(model_folder / name).get("eos_token_id")
        given = [] if found is None else found if isinstance(found, list) else [found]
        if any(type(id) is not int or not 0 <= id < MOST_IDS for id in given):
            raise ValueError(
                f"{model_folder / name} says eos_token_id {str(found)[:80]}, which must be a token id or a list of "
                "some: download it again"
            )
        ids.update(given)
    return ids


def generation_defaults(model_folder: Path) -> dict[str, Any]:
    """What generation_config.json sets of the parameters that a request can set too."""
    given = read_json(model_folder / "generation_config.json")
    return {name: given[name] for name in DEFAULTS if given.get(name) is not None}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. Raises ValueError that names the file."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
