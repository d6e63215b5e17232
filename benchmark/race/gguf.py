"""Runs the `convert_hf_to_gguf.py` of a folder on a model whose tokenizer was made for the race.

    python gguf.py FOLDER ARGUMENT…

The converter recognises how texts are cut into words only for tokenizers that it knows. Here it is told, in memory,
that they are cut as GPT-2's are: no file of the folder is changed. Only Python's own library is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CONVERTER, METHOD = "convert_hf_to_gguf", "get_vocab_base_pre"


def main(arguments: Sequence[str]) -> None:
    """Convert as the arguments behind the folder say."""
    folder, *rest = arguments
    sys.path.insert(0, folder)
    converter = importlib.import_module(CONVERTER)
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] in (CONVERTER, "conversion")]:
        cut_as_gpt2(module)
    sys.argv = [f"{CONVERTER}.py", *rest]
    converter.main()


def cut_as_gpt2(module: ModuleType) -> None:
    """Have all models of a module say that texts are cut as GPT-2's."""
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and METHOD in vars(kind):
            setattr(kind, METHOD, _gpt2)


def _gpt2(model: Any, tokenizer: Any) -> str:
    return "gpt-2"


if __name__ == "__main__":
    main(sys.argv[1:])
