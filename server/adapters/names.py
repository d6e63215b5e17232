"""What a layer is called: by PEFT as transformers calls its module, in a checkpoint as it was when that was written.

They differ in the modules around the decoder, which are left out here, and in a few that were renamed since.
"""

from __future__ import annotations

# Modules around a decoder. Those around an encoder, or around what sees or hears, are not among them.
WRAPPERS = frozenset({"base_model", "model", "transformer", "language_model", "text_model", "gpt_neox", "backbone"})
RENAMED = {"block_sparse_moe": "mlp"}  # of Mixtral and its kin, in transformers 5


def plain_name(name: str) -> str:
    """The name of a module or tensor without what differs between checkpoints, transformers and PEFT."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join(RENAMED.get(part, part) for part in parts)
