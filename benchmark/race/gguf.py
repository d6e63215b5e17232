"""Runs the `convert_hf_to_gguf.py` of a folder on a model whose tokenizer was made for the race.

    python gguf.py FOLDER ARGUMENT…

The converter recognises how texts are cut into words only for tokenizers that it knows. Here it is told, in memory,
that they are cut as GPT-2's are, and that no layers draft tokens, for transformers makes none: no file of the folder is
changed. Only Python's own library is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CONVERTER, METHOD, WITHOUT_DRAFTS = "convert_hf_to_gguf", "get_vocab_base_pre", "no_mtp"


def main(arguments: Sequence[str]) -> None:
    """Convert as the arguments behind the folder say."""
    folder, *rest = arguments
    sys.path.insert(0, folder)
    converter = importlib.import_module(CONVERTER)
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] in (CONVERTER, "conversion")]:
        adapt(module)
    sys.argv = [f"{CONVERTER}.py", *rest]
    converter.main()


def adapt(module: ModuleType) -> None:
    """Have all models of a module say that texts are cut as GPT-2's, and that no layers draft."""
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and METHOD in vars(kind):
            setattr(kind, METHOD, _gpt2)
        if isinstance(kind, type) and WITHOUT_DRAFTS in vars(kind):
            setattr(kind, WITHOUT_DRAFTS, True)


def _gpt2(model: Any, tokenizer: Any) -> str:
    return "gpt-2"


if __name__ == "__main__":
    main(sys.argv[1:])
