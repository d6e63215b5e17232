"""A config.json whose fields are of a wrong kind is refused in one sentence that names the field."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from transformers import AutoConfig

from server.arch import families
from server.arch.families.hf_config import FIELDS, INFINITY, MOST_DEPTH, OBJECT, checked
from server.arch.spec import Gated
from tests.server.published import BAICHUAN, CHATGLM
from tests.server.tiny import CASES, COMMON
from tests.test_architecture import sources

ODD: list[Any] = [
    [], {}, "", "eight", "8", True, False, -1, 0, 1, 2.5, -2.5, float("nan"), float("inf"), 1e30, 10**30, 10**400,
    [None], ["a"],
    [1, 2], {"type": []}, {"factor": "2"}, [[]], None,
]  # fmt: skip
PUBLISHED = {"baichuan": BAICHUAN, "chatglm": CHATGLM}


def config_of(case: str) -> dict[str, Any]:
    if case in PUBLISHED:
        return dict(PUBLISHED[case])
    model_type, sizes = CASES[case]
    settings = COMMON | {name: value for name, value in sizes.items() if name != "attn_implementation"}
    found: dict[str, Any] = AutoConfig.for_model(model_type, **settings).to_dict()
    return found


def changed(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with one field that we read, at the top or in an object, as something odd."""
    for name in FIELDS:
        for value in ODD:
            yield {**config, name: value}
    for name, inner in config.items():
        if isinstance(inner, dict) and FIELDS.get(name) is OBJECT:
            for key in inner:
                for value in ODD:
                    yield {**config, name: {**inner, key: value}}


@pytest.mark.parametrize("case", [*{model_type: case for case, (model_type, _) in CASES.items()}.values(), *PUBLISHED])
def test_whatever_a_field_is_it_is_served_or_refused_with_a_sentence(case: str) -> None:
    config = config_of(case)
    families.find(config)
    for odd in changed(config):
        try:
            families.find(odd)
        except ValueError as error:
            assert str(error).startswith("config.json "), (str(error), odd)


@pytest.mark.parametrize(("factor", "width"), [({}, 256), ({"block_ffn_dim_multiplier": 2.0}, 512),
                                               ({"block_ffn_dim_multiplier": None}, 170)])  # fmt: skip
def test_a_factor_that_is_null_leaves_out_what_follows_it(factor: dict[str, Any], width: int) -> None:
    """As `Lfm2MLP` of transformers does, whose config of today takes no null."""
    given = config_of("lfm2") | {"block_auto_adjust_ff_dim": True, "intermediate_size": 256, "block_multiple_of": 256}
    given.pop("block_ffn_dim_multiplier")
    mlp = families.find(given | factor)[1].layers[0].mlp
    assert isinstance(mlp, Gated) and width == mlp.width


@pytest.mark.parametrize("case", ["cohere2", "gemma3_text"])
def test_letters_for_windows_are_a_sentence_unless_each_layer_is_told(case: str) -> None:
    config = config_of(case)
    expected = families.find(config)[1]
    assert expected == families.find({**config, "sliding_window_pattern": "LG"})[1]
    config.pop("layer_types")
    with pytest.raises(ValueError, match=r"sliding_window_pattern 'LG', which must be a number .*: write layer_types"):
        families.find({**config, "sliding_window_pattern": "LG"})


@pytest.mark.parametrize(("pattern", "windowed"), [("LLLG", "11101"), (4, "11101"), ("LG", "10101"), ("LGG", "10010")])
def test_letters_for_windows_are_those_of_each_layer(pattern: str | int, windowed: str) -> None:
    config = config_of("exaone4")
    config.pop("layer_types")
    layers = families.find({**config, "sliding_window_pattern": pattern})[1].layers
    assert windowed == "".join(str(int(layer.window > 0)) for layer in layers)


@pytest.mark.parametrize(
    ("case", "fields", "longest"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1024),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0**40}}, 2**31 - 1),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ("gpt_neox", {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}}, 256),
        ("mpt", {"max_seq_len": 8192}, 8192),
        ("opt", {}, 256),
        ("chatglm", {"seq_length": 32768}, 32768),
        ("bloom", {"seq_length": 2048}, 0),
        ("t5", {"n_positions": 512}, 0),
    ],
)
def test_the_longest_sequence_is_what_the_positions_reach(case: str, fields: dict[str, Any], longest: int) -> None:
    given = {name: value for name, value in config_of(case).items() if name != "rope_parameters"}
    assert longest == families.find(given | fields)[1].max_positions


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_position_embeddings": 2**33}, "max_position_embeddings 8589934592, which must be .* from 2 to"),
        ({"model_type": []}, r"config\.json says model_type \[\], which must be a text: download it again"),
        ({"hidden_size": "64"}, "hidden_size '64', which must be a whole number from 1 to"),
        (
            {"num_attention_heads": 10**9},
            "num_attention_heads 1000000000, which must be a whole number from 1 to 65536",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, which must be a whole number from 1 to 10000"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no', which must be true or false"),
        ({"rms_norm_eps": [1]}, r"rms_norm_eps \[1\], which must be a number above 0"),
        ({"rope_scaling": {"factor": "two"}}, "rope_scaling.factor 'two', which must be a number above 0"),
        ({"layer_types": 3}, "layer_types 3, which must be a list of at most 10000 texts"),
        ({"hidden_act": ["silu"] * 99}, "…, which must be a text"),
        ({"hidden_size": None}, "config.json lacks the key 'hidden_size', which llama models have: download it again"),
    ],
)
def test_the_field_and_what_it_must_be_are_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        families.find(config_of("llama") | fields)
    if "model_type" in fields:
        with pytest.raises(ValueError, match=sentence):
            families.has(fields)


def test_biases_where_keys_and_values_are_compressed_are_refused() -> None:
    with pytest.raises(ValueError, match="asks for attention_bias, which is not served"):
        families.find(config_of("deepseek_v3") | {"attention_bias": True})


@pytest.mark.parametrize(("case", "grown"), [("deepseek_v3", 0.707), ("mistral4", 0.707), ("glm4_moe_lite", 0.0)])
def test_scores_grow_with_the_length_that_yarn_reaches(case: str, grown: float) -> None:
    _, spec = families.find(config_of(case))
    latent = spec.layers[0].latent
    assert latent is not None
    expected = (12 + 8) ** -0.5 * (1 + 0.1 * grown * math.log(4.0)) ** 2
    assert expected == pytest.approx(spec.attention_scale)


def test_gates_that_are_clamped_otherwise_are_refused() -> None:
    with pytest.raises(ValueError, match=r"swiglu_limit 5.0, and 7.0 is served"):
        families.find(config_of("gpt_oss") | {"swiglu_limit": 5.0})


YARN = {"type": "yarn", "factor": 4.0}
WINDOWLESS = "layers of the type sliding_attention and no sliding_window"


@pytest.mark.parametrize(
    ("case", "fields", "sentence"),
    [
        ("qwen3", {"rope_scaling": YARN}, "has rope_parameters and another rope_scaling"),
        ("gemma2", {"sliding_window": None}, WINDOWLESS),
        ("exaone4", {"sliding_window": None}, WINDOWLESS),
        ("cohere2", {"sliding_window": None}, "lacks the key 'sliding_window'"),
        ("olmo3", {"sliding_window": None}, "lacks the key 'sliding_window'"),
        ("gpt_oss", {"rope_parameters": None}, "lacks the key 'rope_scaling'"),
        ("ministral3", {"rope_parameters": None}, "lacks the key 'rope_parameters'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "asks for use_bidirectional_attention"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act 'gelu': models with recurrent layers"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act 'gelu': models with recurrent layers"),
        ("granitemoehybrid-dense", {"hidden_act": "gelu"}, "hidden_act 'gelu': models with recurrent layers"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act 'gelu': models with recurrent layers"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu': models with recurrent layers"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act 'relu': Gemma is served with"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "asks for scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_would_give_other_numbers_is_refused(case: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        families.find(config_of(case) | fields)


@pytest.mark.parametrize(
    ("case", "field"),
    [
        *product(
            ("deepseek_v3", "glm4_moe_lite"), ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
        ),
        ("deepseek_v3", "n_shared_experts"),
        ("deepseek_v3", "first_k_dense_replace"),
        ("mistral4", "norm_topk_prob"),
        ("mistral4", "n_shared_experts"),
        ("dots1", "norm_topk_prob"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma3_text", "final_logit_softcapping"),
        ("mixtral", "rope_parameters"),
        ("gpt2", "scale_attn_weights"),
    ],
)
def test_what_config_json_leaves_out_is_what_transformers_takes(case: str, field: str) -> None:
    config = config_of(case) | {"mlp_layer_types": None}
    usual = getattr(AutoConfig.for_model(config["model_type"]), field)
    left_out = {name: value for name, value in config.items() if name != field}
    assert families.find(left_out) == families.find(config | {field: usual})


@pytest.mark.parametrize(
    ("case", "fields", "same"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": None}),
        ("t5", {"dense_act_fn": "silu"}, {"feed_forward_proj": "silu", "dense_act_fn": None}),
        ("gpt2", {"scale_attn_weights": True}, {}),
    ],
)
def test_fields_mean_what_they_do_in_transformers(case: str, fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert families.find(config_of(case) | fields)[1] == families.find(config_of(case) | same)[1]


def test_scores_that_are_not_scaled_or_capped_stay_so() -> None:
    uncapped = families.find(config_of("gemma2") | {"attn_logit_softcapping": None, "final_logit_softcapping": None})[1]
    assert (0.0, 0.0) == (uncapped.score_cap, uncapped.logit_cap)
    assert 1.0 == families.find(config_of("gpt_bigcode") | {"scale_attn_weights": False})[1].attention_scale


def test_the_old_form_of_a_rotation_may_stand_beside_the_new_one() -> None:
    both = {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5, **YARN, "rope_type": "yarn"}}
    assert families.find(config_of("llama") | both) == families.find(config_of("llama") | both | {"rope_scaling": None})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_experts_per_tok": 9}, "says 9 experts for each token, of 4: download it again"),
        ({"num_experts_per_tok": 5}, "says 5 experts for each token, of 4: download it again"),
        ({"n_group": 3}, "says 8 experts in 3 groups, of which each token goes to 2: download it again"),
        ({"topk_group": 5}, "says 8 experts in 4 groups, of which each token goes to 5: download it again"),
    ],
)
def test_experts_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        families.find(config_of("glm4_moe") | fields)


@pytest.mark.parametrize(
    ("case", "fields", "sentence"),
    [
        ("llama", {"num_key_value_heads": 3}, "says 8 attention heads for 3 key-value heads"),
        ("llama", {"num_key_value_heads": 16}, "says 8 attention heads for 16 key-value heads"),
        ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "8 attention heads for 3 key-value heads"),
        ("mamba2", {"n_groups": 3}, "says 8 Mamba heads in 3 groups"),
        ("mamba2", {"n_groups": 16}, "says 8 Mamba heads in 16 groups"),
        (
            "llama",
            {"head_dim": 7},
            "says that 7 features of a head are rotated, which must be an even number from 2 to",
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "says that 7 features of a head are rotated"),
        ("stablelm", {"rope_parameters": None, "partial_rotary_factor": 2.0}, "an even number from 2 to 8"),
        ("qwen3_5", {"rope_parameters": None, "partial_rotary_factor": 1e-9}, "says that 0 features of a head"),
        (
            "phi3-longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "has 1 `short_factor` and 4 `long_factor` for 4 pairs of features",
        ),
        ("mamba2", {"time_step_limit": [INFINITY, INFINITY]}, r"time_step_limit \[inf, inf\], which must be a number"),
        ("mamba2", {"time_step_limit": [2.0, 1.0]}, "from 0 and a larger one"),
        ("nemotron_h", {"layers_block_type": ["mamba"] * 10_001}, "must be a list of at most 10000 texts"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M" * 10**7}, "of 1 to 10000 letters"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": ""}, "a text of 1 to 10000 letters"),
    ],
)
def test_what_kernels_could_not_compute_is_refused(case: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json .*{sentence}.*: download it again$"):
        families.find(config_of(case) | fields)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [("afmoe", "full_attention, sliding_attention"), ("qwen3_next", "linear_attention, full_attention")],
)
def test_layers_of_an_unknown_type_are_refused(case: str, kinds: str) -> None:
    config = config_of(case)
    with pytest.raises(ValueError, match=f"asks for layers of the type 'full'; served are: {kinds}$"):
        families.find(config | {"layer_types": ["full"] * config["num_hidden_layers"]})


def test_trinity_without_a_window_is_refused() -> None:
    with pytest.raises(
        ValueError, match="sliding_window 0, and layers with positions need a window: download it again"
    ):
        families.find(config_of("afmoe") | {"sliding_window": 0})
    with pytest.raises(ValueError, match="lacks the key 'sliding_window'"):
        families.find(config_of("afmoe") | {"sliding_window": None})


def nested(depth: int, *, in_lists: bool) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value] if in_lists else {"rope_scaling": value}
    return value


@pytest.mark.parametrize("field", ["rope_scaling", "hidden_size", "architectures"])
@pytest.mark.parametrize("in_lists", [False, True])
def test_what_is_nested_without_end_is_refused(field: str, in_lists: bool) -> None:
    with pytest.raises(
        ValueError, match=r"^config\.json nests objects and lists more than 64 deep: download it again$"
    ):
        families.find(config_of("llama") | {field: nested(5000, in_lists=in_lists)})
    with pytest.raises(ValueError, match="nests objects and lists more than 64 deep"):
        families.has({"model_type": nested(5000, in_lists=in_lists)})


def test_as_deep_as_may_be_is_read() -> None:
    config = {"note": nested(MOST_DEPTH - 2, in_lists=False)}
    assert config == checked(config)


def test_null_is_left_out_and_other_fields_pass() -> None:
    odd = {"architectures": 3, "sliding_window": None, "rope_scaling": {"factor": 2.0, "note": []}}
    assert {"architectures": 3, "rope_scaling": {"factor": 2.0, "note": []}} == checked(odd)


def fields_read(tree: ast.Module) -> Iterator[str]:
    """Keys that a module asks `config`, or an object in it, for."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("config", "given", "attention"):
            key = node.slice
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            (".get", '.get("rope_parameters") or {}).get')
        ):
            key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def test_every_field_that_a_family_reads_has_a_kind() -> None:
    trees = [tree for name, tree in sources() if name.startswith("server.arch.families.")]
    read = {field for tree in trees for field in fields_read(tree)}
    assert {"vocab_size", "alibi_bias_max", "factor"} <= read
    assert not read - set(FIELDS)


def test_rotations_of_layer_types_count_alone() -> None:
    """Saved again by transformers 5.24, Gemma 3 has both thetas a second time, in an object that nobody reads."""
    by_type = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    more = {"rope_theta": {"global": 1e6, "local": 1e4}, "rope_type": "default"}
    assert {"rope_parameters": by_type} == checked({"rope_parameters": by_type | more})
    with pytest.raises(ValueError, match=r"rope_parameters.full_attention.rope_theta -1"):
        checked({"rope_parameters": by_type | {"full_attention": {"rope_theta": -1}}})
