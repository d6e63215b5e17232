"""The model families that Lockstep serves, each as data: what it looks like and where its checkpoints keep things.

To add one, see docs/adding-a-family.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.arch.families import (
    baichuan,
    bloom,
    chatglm,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama,
    mistral,
    mpt,
    opt,
    phi3,
    qwen,
    stablelm,
    starcoder2,
    t5,
)
from server.arch.families.hf_config import checked
from server.arch.names import NameMap
from server.arch.spec import ArchSpec


@dataclass(frozen=True)
class Family:
    """Models that share a spec function and a name map."""

    spec: Callable[[Mapping[str, Any]], ArchSpec]
    names: NameMap


FAMILIES: Mapping[str, Family] = {  # by the `model_type` of config.json
    "baichuan": Family(baichuan.spec, baichuan.NAMES),
    "bloom": Family(bloom.spec, bloom.NAMES),
    "chatglm": Family(chatglm.spec, chatglm.NAMES),
    "falcon": Family(falcon.spec, falcon.NAMES),
    "gemma": Family(gemma.spec, gemma.NAMES),
    "gemma2": Family(gemma.spec_of_2, gemma.NAMES_OF_2),
    "gemma3_text": Family(gemma.spec_of_3, gemma.NAMES_OF_3),
    "gpt2": Family(gpt2.spec, gpt2.NAMES),
    "gpt_bigcode": Family(gpt2.spec_of_bigcode, gpt2.NAMES_OF_BIGCODE),
    "gpt_neox": Family(gpt_neox.spec, gpt_neox.NAMES),
    "gpt_oss": Family(gpt_oss.spec, gpt_oss.NAMES),
    "llama": Family(llama.spec, llama.NAMES),
    "mistral": Family(mistral.spec, mistral.NAMES),
    "mixtral": Family(mistral.spec_of_mixtral, mistral.NAMES_OF_MIXTRAL),
    "mpt": Family(mpt.spec, mpt.NAMES),
    "mt5": Family(t5.unscaled_spec, t5.NAMES),
    "opt": Family(opt.spec, opt.NAMES),
    "phi3": Family(phi3.spec, phi3.NAMES),
    "qwen2": Family(qwen.spec, qwen.NAMES),
    "qwen3": Family(qwen.spec_of_3, qwen.NAMES_OF_3),
    "qwen3_5": Family(qwen.spec_of_next, qwen.NAMES_OF_3_5),
    "qwen3_5_moe": Family(qwen.spec_of_next, qwen.NAMES_OF_3_5),
    "qwen3_5_moe_text": Family(qwen.spec_of_next, qwen.NAMES_OF_3_5),
    "qwen3_5_text": Family(qwen.spec_of_next, qwen.NAMES_OF_3_5),
    "qwen3_moe": Family(qwen.spec_of_3_moe, qwen.NAMES_OF_3),
    "qwen3_next": Family(qwen.spec_of_next, qwen.NAMES_OF_NEXT),
    "stablelm": Family(stablelm.spec, stablelm.NAMES),
    "starcoder2": Family(starcoder2.spec, starcoder2.NAMES),
    "t5": Family(t5.spec, t5.NAMES),
}


def has(hf_config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json is of one of these families. Raises ValueError where it says no text."""
    return _model_type_of(hf_config) in FAMILIES


def _model_type_of(hf_config: Mapping[str, Any]) -> str:
    """What config.json calls the model's kind; empty where it does not. Raises ValueError where that is no text."""
    given = {"model_type": hf_config.get("model_type")}
    return str(checked(given).get("model_type", ""))


def find(hf_config: Mapping[str, Any]) -> tuple[Family, ArchSpec]:
    """The family of a checkpoint's config.json, and its spec. Raises ValueError for what cannot be served."""
    model_type = _model_type_of(hf_config)
    if model_type not in FAMILIES:
        raise ValueError(f"config.json says model_type {model_type!r}; served are: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    try:
        return family, family.spec(checked(hf_config))
    except KeyError as error:
        raise ValueError(f"config.json of a {model_type} model lacks the key {error}") from error
