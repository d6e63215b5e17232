"""What a layer is called: by PEFT as transformers calls its module, in a checkpoint as it was when that was written.

They differ in the modules around the decoder, which are left out here, and in a few that were renamed since.
"""

from __future__ import annotations

# Modules around a decoder. Those around an encoder, or around what sees or hears, are not among them.
WRAPPERS = frozenset({"base_model", "model", "transformer", "language_model", "text_model", "gpt_neox", "backbone"})
# In transformers 5: of mixtures such as Mixtral, and the head of GPT-NeoX.
RENAMED = {"block_sparse_moe": "mlp", "embed_out": "lm_head"}
ROUTERS = (
    ".mlp.router",
    ".mlp.router.layer",
)  # of some mixtures, on one of both sides; on the other as all call theirs
ROUTER = ".mlp.gate"


def plain_name(name: str) -> str:
    """The name of a module without what differs between checkpoints, transformers and PEFT."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    plain = ".".join([RENAMED.get(part, part) for part in parts])
    router = next((router for router in ROUTERS if plain.endswith(router)), None)
    return plain if router is None else plain.removesuffix(router) + ROUTER


def experts_of(name: str) -> str:
    """The plain name of the module that all experts' matrices are in, from that of one of them, or of all."""
    before, found, _ = plain_name(name).partition(".experts")
    return before + found if found else f"{before.rpartition('.')[0]}.experts"
