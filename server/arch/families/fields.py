"""The fields of config.json that families read, and what each must be: a checkpoint is untrusted.

A field of the wrong kind is one sentence here, and not an error somewhere in the arithmetic. Fields that no family
reads pass, and so does null, which counts as left out. Left out: whether fields fit each other (`spec.validate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_LAYERS = 10_000
MOST = 2**40  # of anything that is counted
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


def _list(of: str, fits: Callable[[Any], bool]) -> Kind:
    return Kind(f"a list of {of}", lambda value: isinstance(value, list) and all(map(fits, value)))


SIZE, COUNT, LAYERS, POSITIONS = _whole(1), _whole(0), _whole(1, MOST_LAYERS), _whole(2)
NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
TEXTS = _list("texts", TEXT.fits)
WHOLES = _list("whole numbers", COUNT.fits)
NUMBERS = _list("numbers", _is_number)

FIELDS: dict[str, Kind] = {
    name: kind
    for kind, names in (
        (
            SIZE,
            "d_ff d_kv d_model decoder_sparse_step ffn_dim ffn_hidden_size head_dim hidden_size intermediate_size "
            "kv_channels model_max_length moe_intermediate_size multi_query_group_num n_embd n_embed n_head n_heads "
            "n_inner n_positions num_attention_heads num_experts_per_tok num_heads num_key_value_heads num_kv_heads "
            "num_local_experts padded_vocab_size relative_attention_max_distance relative_attention_num_buckets "
            "seq_length sliding_window_pattern vocab_size word_embed_proj_dim",
        ),
        (POSITIONS, "max_position_embeddings original_max_position_embeddings"),
        (COUNT, "decoder_start_token_id max_window_layers num_experts num_ln_in_parallel_attn sliding_window"),
        (LAYERS, "n_layer n_layers num_decoder_layers num_hidden_layers num_layers"),
        (NUMBER, "alibi_bias_max attention_factor clip_qkv mscale mscale_all_dim softmax_scale"),
        (
            POSITIVE,
            "attn_logit_softcapping beta_fast beta_slow expansion_ratio factor final_logit_softcapping "
            "high_freq_factor layer_norm_eps layer_norm_epsilon layernorm_epsilon low_freq_factor norm_epsilon "
            "partial_rotary_factor query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_ratio rope_theta "
            "rotary_emb_base rotary_pct",
        ),
        (
            FLAG,
            "_remove_final_layer_norm add_bias_linear add_qkv_bias alibi apply_residual_connection_post_layernorm "
            "attention_bias bias do_layer_norm_before enable_bias mlp_bias multi_query multi_query_attention "
            "new_decoder_architecture norm_topk_prob parallel_attn qk_layernorm scale_decoder_outputs "
            "tie_word_embeddings truncate use_bias use_parallel_residual use_qkv_bias use_sliding_window",
        ),
        (
            TEXT,
            "activation activation_function feed_forward_proj hidden_act hidden_activation model_type rope_type type",
        ),
        (OBJECT, "attn_config full_attention rope_parameters rope_scaling sliding_attention"),
        (TEXTS, "layer_types"),
        (WHOLES, "mlp_only_layers"),
        (NUMBERS, "long_factor short_factor"),
    )
    for name in names.split()
}


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
    given = {}
    by_type = {name: config[name] for name in LAYER_TYPES if isinstance(config.get(name), Mapping)}
    for name, value in (by_type or config).items():
        kind = FIELDS.get(name)
        if value is None:
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
