"""config.json as families read it: what its fields must be, and what several families read in the same way.

A checkpoint is untrusted: a field of the wrong kind is one sentence here, and not an error somewhere in the arithmetic.
Fields that no family reads pass, and so does null, which counts as left out unless it is said to mean something. Left
out: whether fields fit each other (`spec.validate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from server.arch.spec import (
    MOST_POSITIONS,
    Activation,
    ArchSpec,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Moe,
    ProportionalScaling,
    Rope,
    Scaling,
    Scoring,
    YarnScaling,
)

Config = Mapping[str, Any]
T = TypeVar("T")

MOST_LAYERS = 10_000
MOST = 2**40  # of anything that is counted
MOST_LISTED = 2**16  # of what is loaded one by one: heads, experts
MOST_SHOWN = 80  # characters of a value
MOST_DEPTH = 64  # of objects and lists within each other


@dataclass(frozen=True)
class Kind:
    """What a value must be, for people and for us."""

    name: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: int = MOST) -> Kind:
    return Kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST  # which is false of NaN


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and set(value) <= {"L", "G"}


def _list(of: str, fits: Callable[[Any], bool]) -> Kind:
    return Kind(
        f"a list of at most {MOST_LAYERS} {of}",
        lambda value: isinstance(value, list) and len(value) <= MOST_LAYERS and all(map(fits, value)),
    )


SIZE, COUNT, LAYERS, POSITIONS = _whole(1), _whole(0), _whole(1, MOST_LAYERS), _whole(2, MOST_POSITIONS)
HEADS, EXPERTS = _whole(1, MOST_LISTED), _whole(0, MOST_LISTED)
INDEX = _whole(-1)  # of a layer; -1: the last
NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG_OR_TEXT = Kind("true, false or a text", lambda value: isinstance(value, bool | str))
FLAG_OR_COUNT = Kind("true, false or a whole number", lambda value: isinstance(value, int))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
SIZE_OR_AUTO = Kind("a whole number above 0, or auto", lambda value: SIZE.fits(value) or value == "auto")
LETTERS = Kind(
    f"a text of 1 to {MOST_LAYERS} letters", lambda value: isinstance(value, str) and 0 < len(value) <= MOST_LAYERS
)
PATTERN = Kind("a whole number of layers, or a text of L and G", lambda value: COUNT.fits(value) or _is_pattern(value))
TEXTS = _list("texts", TEXT.fits)
INFINITY = {"__float__": "Infinity"}  # as transformers writes it
LIMITS = _list("numbers", lambda value: _is_number(value) or value in (math.inf, INFINITY))
WHOLES = _list("whole numbers", COUNT.fits)
NUMBERS = _list("numbers", _is_number)

FIELDS: dict[str, Kind] = {
    name: kind
    for kind, names in (
        (
            SIZE,
            "attention_chunk_size block_ff_dim block_multiple_of conv_L_cache conv_kernel d_ff d_kv d_model "
            "decoder_sparse_step experts_per_token ffn_dim ffn_hidden_size floor_scale full_attention_interval "
            "global_attn_every_n_layers global_head_dim head_dim hidden_size interleave_moe_layer_step "
            "intermediate_size intermediate_size_mlp kv_channels kv_lora_rank linear_conv_kernel_dim "
            "linear_key_head_dim linear_value_head_dim mamba_d_conv mamba_d_ssm mamba_d_state mamba_expand "
            "mamba_head_dim moe_intermediate_size moe_k moe_latent_size moe_layer_freq moe_layer_interval "
            "moe_shared_expert_intermediate_size n_embd n_embed n_group n_inner no_rope_layer_interval "
            "padded_vocab_size q_lora_rank qk_nope_head_dim qk_rope_head_dim relative_attention_max_distance "
            "relative_attention_num_buckets rotary_dim shared_expert_intermediate_size ssm_state_size state_size "
            "top_k_experts topk_group v_head_dim vocab_size vocab_size_per_layer_input word_embed_proj_dim",
        ),
        (
            POSITIONS,
            "max_position_embeddings max_seq_len model_max_length n_positions original_max_position_embeddings "
            "seq_length",
        ),
        (
            COUNT,
            "decoder_start_token_id first_k_dense_replace hidden_size_per_layer_input max_window_layers "
            "moe_layer_start_index moe_num_shared_experts mtp_num_hidden_layers n_shared_experts num_dense_layers "
            "num_experts_per_tok num_kv_shared_layers num_ln_in_parallel_attn num_mtp_layers "
            "num_nextn_predict_layers num_shared_experts shared_intermediate_size sliding_window",
        ),
        (
            LAYERS,
            "medusa_num_heads medusa_num_layers n_layer n_layers num_decoder_layers num_hidden_layers num_layers",
        ),
        (
            NUMBER,
            "alibi_bias_max attention_factor attn_scale clip_qkv llama_4_scaling_beta mscale mscale_all_dim "
            "router_jitter_noise softmax_scale",
        ),
        (INDEX, "moe_layer_end_index"),
        (PATTERN, "sliding_window_pattern"),
        (
            POSITIVE,
            "alpha attention_in_multiplier attention_multiplier attention_out_multiplier attn_logit_softcapping "
            "beta_fast beta_slow block_ffn_dim_multiplier embedding_multiplier expansion_ratio factor "
            "final_logit_softcapping high_freq_factor key_multiplier layer_norm_eps layer_norm_epsilon "
            "layernorm_epsilon lm_head_multiplier logit_scale logits_scaling long_mscale low_freq_factor norm_eps "
            "norm_epsilon partial_rotary_factor query_pre_attn_scalar residual_multiplier rms_norm_eps "
            "rope_local_base_freq rope_ratio rope_theta rotary_emb_base rotary_pct route_scale routed_scaling_factor "
            "short_mscale ssm_in_multiplier ssm_out_multiplier swiglu_alpha swiglu_limit time_step_min "
            "mamba_dt_min",
        ),
        (
            FLAG,
            "_remove_final_layer_norm add_bias_linear add_qkv_bias alibi apply_residual_connection_post_layernorm "
            "attention_bias attention_k_eq_v attention_out_bias bias block_auto_adjust_ff_dim conv_bias "
            "do_layer_norm_before enable_bias enable_moe_block lm_head_bias mamba_conv_bias mamba_norm_before_gate "
            "mamba_proj_bias mamba_rms_norm mlp_bias multi_query multi_query_attention mup_enabled "
            "new_decoder_architecture norm_topk_prob parallel_attn projectors_bias qk_layernorm qkv_bias "
            "rope_interleave route_norm scale_attn_by_inverse_layer_idx scale_attn_weights scale_decoder_outputs "
            "tie_embedding tie_word_embeddings truncate use_bias use_conv_bias use_double_wide_mlp use_expert_bias "
            "use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window",
        ),
        (FLAG_OR_TEXT, "use_bidirectional_attention"),
        (FLAG_OR_COUNT, "attn_temperature_tuning"),
        (
            TEXT,
            "activation activation_function dense_act_fn feed_forward_proj hidden_act hidden_activation "
            "mamba_hidden_act mlp_hidden_act model_type position_embedding_type rope_type topk_method type",
        ),
        (
            OBJECT,
            "attn_config full_attention per_layer_config rope_parameters rope_scaling sliding_attention text_config",
        ),
        (TEXTS, "layer_types layers_block_type mlp_layer_types"),
        (WHOLES, "full_attn_idxs mlp_only_layers moe_layers no_rope_layers"),
        (NUMBERS, "long_factor mlp_multipliers short_factor ssm_multipliers"),
        (LIMITS, "time_step_limit"),
        (SIZE_OR_AUTO, "mamba_d_head"),
        (
            HEADS,
            "linear_num_key_heads linear_num_value_heads mamba_n_groups mamba_n_heads mamba_num_heads "
            "multi_query_group_num n_groups n_head n_heads num_attention_heads num_global_key_value_heads num_heads "
            "num_key_value_heads num_kv_heads",
        ),
        (EXPERTS, "moe_num_experts n_routed_experts num_experts num_local_experts"),
        (LETTERS, "hybrid_override_pattern"),
    )
    for name in names.split()
}


MEANT_NULLS = {"block_ffn_dim_multiplier", "attn_logit_softcapping", "final_logit_softcapping"}
LAYER_TYPES = ("full_attention", "sliding_attention")


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what is null. Raises ValueError for a field that a family reads and that is of a wrong kind.

    What is nested so deep that walking through it could end with a RecursionError is refused first.
    """
    if _is_too_deep(config):
        raise ValueError(f"config.json nests objects and lists more than {MOST_DEPTH} deep: download it again")
    return _checked(config, "")


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return False
    return True


def _containers(value: Any) -> Iterator[Any]:
    """Objects and lists right within another."""
    among = value.values() if isinstance(value, Mapping) else value
    return (inner for inner in among if isinstance(inner, Mapping | list))


def _checked(config: Mapping[str, Any], within: str) -> dict[str, Any]:
    """within: the name of the object that this is, with a dot.

    Rotations that are told by types of layers are told so alone: transformers 5 may write other values beside them.
    """
    given: dict[str, Any] = {}
    by_type = {name: config[name] for name in LAYER_TYPES if isinstance(config.get(name), Mapping)}
    for name, value in (by_type or config).items():
        kind = FIELDS.get(name)
        if value is None:
            given |= {name: None} if name in MEANT_NULLS else {}
            continue
        if kind is not None and not kind.fits(value):
            raise ValueError(
                f"config.json says {within}{name} {_shown(value)}, which must be {kind.name}: download it again"
            )
        given[name] = _checked(value, f"{within}{name}.") if kind is OBJECT else value
    return given


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…"


ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def activation(name: str) -> Activation:
    """The activation that config.json calls `name`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json asks for the activation {name!r}; served are: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def need_silu(config: Config, field: str = "hidden_act") -> None:
    """Raises ValueError for another activation: the convolution before a recurrence is served with SiLU alone."""
    if (name := config.get(field, "silu")) not in ("silu", "swish"):
        raise ValueError(f"config.json says {field} {name!r}: models with recurrent layers are served with 'silu'")


def head_dim(config: Config) -> int:
    """Features of one head: given, or the model's width divided by its heads."""
    return config.get("head_dim") or share_of(config["hidden_size"], config["num_attention_heads"])


def share_of(width: int, heads: int) -> int:
    """Features of one of so many heads that share a width."""
    if heads > width:
        raise ValueError(f"config.json says {heads} heads for a width of {width}: download it again")
    return width // heads


def of_layers(values: Sequence[T], num_layers: int, name: str) -> Sequence[T]:
    """What config.json says of each layer under `name`. Raises ValueError where it says so of other layers too."""
    if len(values) != num_layers:
        raise ValueError(f"config.json has {len(values)} `{name}` for {num_layers} layers: download it again")
    return values


def layer_types(config: Config, default: Sequence[str], served: Sequence[str] = LAYER_TYPES) -> Sequence[str]:
    """What each layer is, by `layer_types` where config.json has them. default: of its kinds, in order.

    Raises ValueError for a kind that is not one of `served`.
    """
    types = of_layers(config.get("layer_types") or default, len(default), "layer_types")
    if unknown := set(types) - set(served):
        raise ValueError(f"config.json asks for layers of the type {min(unknown)!r}; served are: {', '.join(served)}")
    return types


def windowed(spec: ArchSpec, config: Config, is_windowed: Callable[[int], bool]) -> ArchSpec:
    """The same with a window in some layers: by `layer_types` where config.json has them, else by `is_windowed`."""
    window = config.get("sliding_window") or 0
    types = layer_types(config, [LAYER_TYPES[is_windowed(i)] for i in range(spec.num_layers)])
    if not window and "sliding_attention" in config.get("layer_types", ()):
        raise ValueError(
            "config.json has layers of the type sliding_attention and no sliding_window: download it again"
        )
    layers = zip(spec.layers, types, strict=True)
    windows = (replace(layer, window=window if kind == "sliding_attention" else 0) for layer, kind in layers)
    return replace(spec, layers=tuple(windows))


def period(config: Config, default: int) -> int:
    """Each how-manyeth layer has no window, for `windowed`, by `sliding_window_pattern`.

    Raises ValueError for letters without `layer_types`, which transformers does not take from this family either.
    """
    given = config.get("sliding_window_pattern") or default
    if not isinstance(given, str):
        return int(given)
    if config.get("layer_types"):
        return default
    raise ValueError(
        f"config.json says sliding_window_pattern {given!r}, which must be a number in this family: write layer_types, "
        "one for each layer"
    )


def as_many(given: Sequence[T] | None, default: Sequence[T], name: str) -> Sequence[T]:
    """What config.json says under `name`, as many as the default has. Raises ValueError where there are not so many."""
    if given and len(given) != len(default):
        raise ValueError(f"config.json has {len(given)} `{name}`, which must be {len(default)}: download it again")
    return given or default


def step_limits(config: Config) -> tuple[float, float]:
    """Between which the steps of Mamba layers are kept."""
    least, most = as_many(config.get("time_step_limit"), (0.0, math.inf), "time_step_limit")
    limits = [math.inf if limit == INFINITY else limit for limit in (least, most)]
    if not 0 <= limits[0] < limits[1]:
        raise ValueError(
            f"config.json says time_step_limit {limits}, which must be a number from 0 and a larger one: "
            "download it again"
        )
    return limits[0], limits[1]


def mixture(config: Config, *, width: int) -> Moe:
    """The mixture of experts of this width that config.json describes by the names that most families use."""
    experts = config.get("num_experts") or config.get("n_routed_experts") or config["num_local_experts"]
    if not (experts and config["num_experts_per_tok"]):
        raise ValueError("config.json says a mixture of no experts, or of none for a token: download it again")
    return Moe(
        num_experts=experts,
        top_k=config["num_experts_per_tok"],
        width=width,
        activation=activation(config["hidden_act"]),
        renormalise=config.get("norm_topk_prob", False),
    )


def deepseek_mixture(config: Config) -> Moe:
    """A mixture as DeepSeek V3 describes it: sigmoids, choice by bias and groups, a scale, experts that all share."""
    width = config["moe_intermediate_size"]
    return replace(
        mixture({"norm_topk_prob": True, **config}, width=width),
        scoring=Scoring.SIGMOID,
        choice_bias=True,
        num_groups=config.get("n_group", 1),
        top_groups=config.get("topk_group", 1),
        scale=config.get("routed_scaling_factor", 1.0),
        shared_width=width * config.get("n_shared_experts", 0),
    )


def mixed(spec: ArchSpec, moe: Moe, is_mixed: Callable[[int], bool]) -> ArchSpec:
    """The same with a mixture in some layers."""
    layers = tuple(replace(layer, mlp=moe) if is_mixed(i) else layer for i, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


def partial_rope(config: Config, default: float = 1.0) -> Rope:
    """The rotation of a part of each head, `default` where config.json does not say which."""
    share = rotation_of(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return rope(config, int(head_dim(config) * (share or default)))


def rope(config: Config, dim: int, *, kind: str | None = None, theta: float = 10000.0) -> Rope:
    """The rotation that config.json describes, in its old form (`rope_theta`, `rope_scaling`) or in its new one.

    kind: the layer type, for models that rotate their layer types differently; theta: the default of the family.
    """
    given = rotation_of(config, kind)
    base = given.get("rope_theta") or config.get("rope_theta") or theta
    name = _rope_type(given)
    if name not in SCALINGS:
        raise ValueError(f"config.json asks for the rope type {name!r}; served are: {', '.join(sorted(SCALINGS))}")
    return Rope(theta=float(base), dim=dim, scaling=SCALINGS[name](given, config))


def rotation_of(config: Config, kind: str | None = None) -> Config:
    """What config.json says of rotations, in its old form or its new one. kind: see `rope`.

    Raises ValueError where it says both and they differ, as where somebody has added one to the other.
    """
    new: Config = config.get("rope_parameters") or {}
    new, old = new.get(kind or "", new), config.get("rope_scaling") or {}
    said = [{**given, "rope_type": _rope_type(given), "type": ""} for given in (new, old)]
    if new and old and said[0] != said[0] | said[1]:
        raise ValueError("config.json has rope_parameters and another rope_scaling: write all into rope_parameters")
    return new or old


def _rope_type(given: Config) -> str:
    name: str = given.get("rope_type") or given.get("type") or "default"
    return name


def longest_sequence(config: Config, position: Rope) -> int:
    """Tokens of the longest sequence: as config.json says, or as many as its rotation is scaled to, if that is more.

    Whoever adds YaRN or a dynamic scaling to a config leaves the trained length there. Linear scalings say nothing:
    some configs give the length before them, and some behind.
    """
    scaling, given = position.scaling, config["max_position_embeddings"]
    if not isinstance(scaling, DynamicScaling | YarnScaling):
        return int(given)
    return min(max(given, int(scaling.factor * scaling.trained_positions)), MOST_POSITIONS)


def _trained(given: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    return config.get(key) or given.get(key) or config["max_position_embeddings"]


def _linear(given: Config, config: Config) -> Scaling:
    return LinearScaling(given["factor"])


def _dynamic(given: Config, config: Config) -> Scaling:
    return DynamicScaling(given["factor"], config["max_position_embeddings"])


def _llama3(given: Config, config: Config) -> Scaling:
    return Llama3Scaling(given["factor"], given["low_freq_factor"], given["high_freq_factor"], _trained(given, config))


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, each, where sequences become `factor` as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(given: Config, config: Config) -> Scaling:
    scale, factor = given.get("attention_factor"), given["factor"]
    if scale is None and given.get("mscale") and given.get("mscale_all_dim"):
        scale = yarn_magnitude(factor, given["mscale"]) / yarn_magnitude(factor, given["mscale_all_dim"])
    return YarnScaling(
        factor=factor,
        trained_positions=_trained(given, config),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        magnitude=scale or yarn_magnitude(factor),
    )


def _long(given: Config, config: Config) -> Scaling:
    trained = _trained(given, config)
    factor = given.get("factor") or config["max_position_embeddings"] / trained
    magnitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return LongScaling(
        tuple(given["short_factor"]), tuple(given["long_factor"]), trained, given.get("attention_factor") or magnitude
    )


def _proportional(given: Config, config: Config) -> Scaling:
    pairs = int(given.get("partial_rotary_factor", 1.0) * head_dim(config) // 2)
    return ProportionalScaling(pairs, given.get("factor", 1.0))


SCALINGS: dict[str, Callable[[Config, Config], Scaling | None]] = {
    "default": lambda given, config: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
    "proportional": _proportional,
    "su": _long,
}
