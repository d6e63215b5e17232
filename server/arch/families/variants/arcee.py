"""Arcee's AFM (2025): Llama with an mlp of two matrices, and the square of a rectifier between them."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation
from server.arch.spec import ArchSpec, Dense, with_layers

NAMES = replace(llama.NAMES, roles={role: name for role, name in llama.NAMES.roles.items() if role != "mlp_gate"})


def spec(config: Config) -> ArchSpec:
    mlp = Dense(config["intermediate_size"], activation(config["hidden_act"]))
    return with_layers(llama.spec(config), mlp=mlp)
