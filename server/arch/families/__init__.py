"""The model families that Lockstep serves, each as data: what it looks like and where its checkpoints keep things.

To add one, see docs/adding-a-family.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from server.arch.families import (
    baichuan,
    bloom,
    chatglm,
    deepseek,
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
from server.arch.families.hybrids import falcon_h1, lfm2, mamba
from server.arch.families.variants import (
    afmoe,
    arcee,
    cohere,
    dots,
    ernie,
    exaone,
    gemma4,
    glm,
    granite,
    hunyuan,
    llama4,
    minimax,
    olmo,
    seed,
    smollm,
)
from server.arch.names import NameMap
from server.arch.recurrences import Mamba2
from server.arch.spec import ArchSpec, LayerSpec, LongScaling, Moe, Rope


@dataclass(frozen=True)
class Family:
    """Models that share a spec function and a name map."""

    spec: Callable[[Mapping[str, Any]], ArchSpec]
    names: NameMap


FAMILIES: Mapping[str, Family] = {  # by the `model_type` of config.json
    "afmoe": Family(afmoe.spec, afmoe.NAMES),
    "arcee": Family(arcee.spec, arcee.NAMES),
    "baichuan": Family(baichuan.spec, baichuan.NAMES),
    "bloom": Family(bloom.spec, bloom.NAMES),
    "chatglm": Family(chatglm.spec, chatglm.NAMES),
    "cohere": Family(cohere.spec, cohere.NAMES),
    "cohere2": Family(cohere.spec_of_2, cohere.NAMES),
    "deepseek_v2": Family(deepseek.spec_of_2, deepseek.NAMES),
    "deepseek_v3": Family(deepseek.spec_of_3, deepseek.NAMES),
    "dots1": Family(dots.spec, dots.NAMES),
    "ernie4_5": Family(ernie.spec, ernie.NAMES),
    "ernie4_5_moe": Family(ernie.spec_of_moe, ernie.NAMES_OF_MOE),
    "exaone4": Family(exaone.spec, exaone.NAMES),
    "falcon": Family(falcon.spec, falcon.NAMES),
    "falcon_h1": Family(falcon_h1.spec, falcon_h1.NAMES),
    "gemma": Family(gemma.spec, gemma.NAMES),
    "gemma2": Family(gemma.spec_of_2, gemma.NAMES_OF_2),
    "gemma3_text": Family(gemma.spec_of_3, gemma.NAMES_OF_3),
    "gemma4_text": Family(gemma4.spec, gemma4.NAMES),
    "gemma4_unified_text": Family(gemma4.spec_of_unified, gemma4.NAMES),
    "glm": Family(glm.spec, glm.NAMES),
    "glm4": Family(glm.spec_of_0414, glm.NAMES_OF_0414),
    "glm4_moe": Family(glm.spec_of_moe, glm.NAMES_OF_MOE),
    "glm4_moe_lite": Family(glm.spec_of_lite, glm.NAMES_OF_LITE),
    "gpt2": Family(gpt2.spec, gpt2.NAMES),
    "gpt_bigcode": Family(gpt2.spec_of_bigcode, gpt2.NAMES_OF_BIGCODE),
    "gpt_neox": Family(gpt_neox.spec, gpt_neox.NAMES),
    "gpt_oss": Family(gpt_oss.spec, gpt_oss.NAMES),
    "granite": Family(granite.spec, granite.NAMES),
    "granitemoe": Family(granite.spec_of_moe, granite.NAMES_OF_MOE),
    "granitemoehybrid": Family(granite.spec_of_hybrid, granite.NAMES_OF_HYBRID),
    "hunyuan_v1_dense": Family(hunyuan.spec, hunyuan.NAMES),
    "kimi_k2": Family(deepseek.spec_of_3, deepseek.NAMES),
    "lfm2": Family(lfm2.spec, lfm2.NAMES),
    "lfm2_moe": Family(lfm2.spec_of_moe, lfm2.NAMES_OF_MOE),
    "llama": Family(llama.spec, llama.NAMES),
    "llama4_text": Family(llama4.spec, llama4.NAMES),
    "mamba2": Family(mamba.spec, mamba.NAMES),
    "minimax_m2": Family(minimax.spec, minimax.NAMES),
    "ministral3": Family(mistral.spec_of_ministral, mistral.NAMES),
    "mistral": Family(mistral.spec, mistral.NAMES),
    "mistral4": Family(mistral.spec_of_4, mistral.NAMES_OF_4),
    "mixtral": Family(mistral.spec_of_mixtral, mistral.NAMES_OF_MIXTRAL),
    "mpt": Family(mpt.spec, mpt.NAMES),
    "mt5": Family(t5.unscaled_spec, t5.NAMES),
    "nemotron_h": Family(mamba.spec_of_nemotron, mamba.NAMES_OF_NEMOTRON),
    "olmo2": Family(olmo.spec_of_2, olmo.NAMES),
    "olmo3": Family(olmo.spec_of_3, olmo.NAMES),
    "olmoe": Family(olmo.spec_of_moe, olmo.NAMES_OF_MOE),
    "opt": Family(opt.spec, opt.NAMES),
    "phi3": Family(phi3.spec, phi3.NAMES),
    "phimoe": Family(phi3.spec_of_moe, phi3.NAMES_OF_MOE),
    "qwen2": Family(qwen.spec, qwen.NAMES),
    "qwen2_moe": Family(qwen.spec_of_2_moe, qwen.NAMES_OF_2_MOE),
    "qwen3": Family(qwen.spec_of_3, qwen.NAMES_OF_3),
    "qwen3_5_moe_text": Family(qwen.spec_of_next, qwen.NAMES_OF_3_5),
    "qwen3_5_text": Family(qwen.spec_of_next, qwen.NAMES_OF_3_5),
    "qwen3_moe": Family(qwen.spec_of_3_moe, qwen.NAMES_OF_3),
    "qwen3_next": Family(qwen.spec_of_next, qwen.NAMES_OF_NEXT),
    "seed_oss": Family(seed.spec, seed.NAMES),
    "smollm3": Family(smollm.spec, smollm.NAMES),
    "stablelm": Family(stablelm.spec, stablelm.NAMES),
    "starcoder2": Family(starcoder2.spec, starcoder2.NAMES),
    "t5": Family(t5.spec, t5.NAMES),
}


@dataclass(frozen=True)
class Wrapper:
    """Models that see or hear, whose text half is of one of these families: `text_config` in their config.json."""

    within: str  # before the text half's names
    ignore: tuple[str, ...]  # patterns of the other halves' tensors

    def family(self, text: Family) -> Family:
        """The text half in its checkpoint."""
        head = {"head": ("lm_head", f"{self.within}lm_head")}
        prefixes = tuple(self.within + prefix for prefix in text.names.prefixes)
        names = replace(text.names, roles={**text.names.roles, **head}, prefixes=prefixes)
        return replace(text, names=replace(names, ignore=(*names.ignore, *self.ignore)))


GEMMA_SENSES = (r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\.",)
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma4": Wrapper("model.language_model.", GEMMA_SENSES),
    "gemma4_unified": Wrapper("model.language_model.", GEMMA_SENSES),
    "kimi_k25": Wrapper("language_model.", (r"^vision_tower\.", r"^mm_projector\.")),
    "llama4": Wrapper("language_model.", (r"^vision_model\.", r"^multi_modal_projector\.")),
    "mistral3": Wrapper("language_model.", (r"^vision_tower\.", r"^multi_modal_projector\.")),
    "qwen3_5": Wrapper("model.language_model.", (r"^model\.visual\.",)),
    "qwen3_5_moe": Wrapper("model.language_model.", (r"^model\.visual\.",)),
}


def has(hf_config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json is of one of these families. Raises ValueError where it says no text."""
    return _model_type_of(_text_of(hf_config)) in FAMILIES


def _text_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text half; all of it, where there is no other half."""
    text = hf_config.get("text_config") if _model_type_of(hf_config) in WRAPPERS else None
    if not isinstance(text, Mapping):
        return hf_config
    tied = "tie_word_embeddings"  # which some say of the whole alone
    return {tied: hf_config[tied], **text} if tied in hf_config else text


def _model_type_of(hf_config: Mapping[str, Any]) -> str:
    """What config.json calls the model's kind; empty where it does not. Raises ValueError where that is no text."""
    given = {"model_type": hf_config.get("model_type")}
    return str(checked(given).get("model_type", ""))


def find(hf_config: Mapping[str, Any]) -> tuple[Family, ArchSpec]:
    """The family of a checkpoint's config.json, and its spec. Raises ValueError for what cannot be served."""
    text, wrapper = _text_of(hf_config), WRAPPERS.get(_model_type_of(hf_config))
    model_type = _model_type_of(text)
    if model_type not in FAMILIES:
        raise ValueError(f"config.json says model_type {model_type!r}; served are: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    try:
        spec = family.spec(checked(text))
    except KeyError as error:
        raise ValueError(
            f"config.json lacks the key {error}, which {model_type} models have: download it again"
        ) from error
    for layer in spec.layers:
        _refuse_odd_heads(spec, layer)
        if isinstance(layer.position, Rope):
            _refuse_odd_rotation(layer.position, layer.latent.rope_dim if layer.latent else spec.kv_heads(layer).dim)
        if isinstance(layer.mlp, Moe):
            _refuse_odd_experts(layer.mlp)
    return wrapper.family(family) if wrapper else family, spec


def _refuse_odd_heads(spec: ArchSpec, layer: LayerSpec) -> None:
    """Raise ValueError for heads that cannot share keys evenly, which kernels count on."""
    heads, shared = spec.num_heads, spec.kv_heads(layer).count if layer.attends else 1
    if heads % shared:
        raise ValueError(f"config.json says {heads} attention heads for {shared} key-value heads: download it again")
    kind = layer.recurrence
    if isinstance(kind, Mamba2) and kind.num_heads % kind.num_groups:
        raise ValueError(
            f"config.json says {kind.num_heads} Mamba heads in {kind.num_groups} groups: download it again"
        )


def _refuse_odd_rotation(rope: Rope, width: int) -> None:
    """Raise ValueError for a rotation that does not fit a head of so many features."""
    if rope.dim % 2 or not 2 <= rope.dim <= width:
        raise ValueError(
            f"config.json says that {rope.dim} features of a head are rotated, which must be an even number from 2 to "
            f"{width}: download it again"
        )
    scaling = rope.scaling
    if isinstance(scaling, LongScaling) and not len(scaling.short) == len(scaling.long) == rope.dim // 2:
        raise ValueError(
            f"config.json has {len(scaling.short)} `short_factor` and {len(scaling.long)} `long_factor` for "
            f"{rope.dim // 2} pairs of features: download it again"
        )


def _refuse_odd_experts(moe: Moe) -> None:
    """Raise ValueError for numbers of experts that do not fit each other."""
    experts, groups = moe.num_experts, moe.num_groups
    if experts % groups or moe.top_groups > groups:
        raise ValueError(
            f"config.json says {experts} experts in {groups} groups, of which each token goes to {moe.top_groups}: "
            "download it again"
        )
    if moe.top_k > (choice := experts // groups * moe.top_groups):
        raise ValueError(f"config.json says {moe.top_k} experts for each token, of {choice}: download it again")
