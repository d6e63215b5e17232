"""T5 and T5 v1.1 (Raffel et al. 2019, arXiv 1910.10683): encoder-decoder, bucketed relative bias, unscaled scores."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families.hf_config import Config, activation
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Bucketed, Dense, Gated, LayerSpec, Residual, RmsNormSpec


def _stack_names(stack: str, mlp: int) -> dict[str, str | tuple[str, ...]]:
    """The names of one stack, in whose layers the mlp is sublayer number `mlp`."""
    attention, feed = f"{stack}.block.{{i}}.layer.0", f"{stack}.block.{{i}}.layer.{mlp}"
    return {
        "relative_bias": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
        "attention_norm": f"{attention}.layer_norm",
        "q": f"{attention}.SelfAttention.q",
        "k": f"{attention}.SelfAttention.k",
        "v": f"{attention}.SelfAttention.v",
        "attention_out": f"{attention}.SelfAttention.o",
        "mlp_norm": f"{feed}.layer_norm",
        "mlp_gate": f"{feed}.DenseReluDense.wi_0",
        "mlp_up": (f"{feed}.DenseReluDense.wi_1", f"{feed}.DenseReluDense.wi"),
        "mlp_down": f"{feed}.DenseReluDense.wo",
        "final_norm": f"{stack}.final_layer_norm",
    }


CROSS = "decoder.block.{i}.layer.1"
NAMES = NameMap(
    roles={
        **_stack_names("decoder", mlp=2),
        "embed": "shared",
        "cross_norm": f"{CROSS}.layer_norm",
        "cross_q": f"{CROSS}.EncDecAttention.q",
        "cross_k": f"{CROSS}.EncDecAttention.k",
        "cross_v": f"{CROSS}.EncDecAttention.v",
        "cross_out": f"{CROSS}.EncDecAttention.o",
        "head": ("lm_head", "shared"),
    },
    encoder=_stack_names("encoder", mlp=1),
    # Copies of the embedding, and a table that early conversions made and no one used.
    ignore=(r"^((en|de)coder\.embed_tokens|lm_head)\.weight$", r"\.EncDecAttention\.relative_attention_bias\.weight$"),
)


def spec(config: Config) -> ArchSpec:
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    scale = config["d_model"] ** -0.5 if is_scaled else 1.0
    return replace(unscaled_spec(config), tied_head=is_scaled, head_scale=scale)


def unscaled_spec(config: Config) -> ArchSpec:
    """Of mT5 and mT0, which never scale the last hidden states."""
    name = config.get("feed_forward_proj", "relu")
    usual = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    function = activation(config.get("dense_act_fn") or usual)
    mlp = (Gated if name.startswith("gated-") else Dense)(config["d_ff"], function)
    buckets = config["relative_attention_num_buckets"], config.get("relative_attention_max_distance", 128)
    encoder_layer, decoder_layer = (LayerSpec(mlp, Bucketed(*buckets, bidirectional=b)) for b in (True, False))
    encoder = ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["d_model"],
        num_heads=config["num_heads"],
        num_kv_heads=config["num_heads"],
        head_dim=config["d_kv"],
        norm=RmsNormSpec(config["layer_norm_epsilon"]),
        residual=Residual.PRE,
        layers=(encoder_layer,) * config["num_layers"],
        tied_head=False,
        scale=1.0,
    )
    return replace(
        encoder,
        residual=Residual.PRE_CROSS,
        layers=(decoder_layer,) * (config.get("num_decoder_layers") or config["num_layers"]),
        encoder=encoder,
        decoder_start=config.get("decoder_start_token_id") or 0,
    )
