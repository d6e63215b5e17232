"""Where a family's checkpoints keep each part of the model. Data only: no files, no tensors.

Roles, each with `.weight` and where the model has one `.bias`:

    embed, embed_norm, positions, project_in                before the layers
    attention_norm, q, k, v or qkv, q_norm, k_norm, attention_out, attention_post_norm
    q or q_a, q_a_norm, q_b; kv_a, kv_a_norm, kv_b          where keys and values are compressed, in place of q, k, v
    attention_gate                                          where its rows are not in q's matrix
    sinks                                                   [heads]; its name has no suffix
    mlp_norm, mlp_post_norm                                 of a layer; {i} is its number
    layer_scale                                             likewise, [1]; its name has no suffix
    per_layer_embed, per_layer_in, per_layer_in_norm        what all layers are given beside the residual stream
    per_layer_gate, per_layer_out, per_layer_post_norm      of a layer: what it makes of its part
    mlp_up, mlp_down; mlp_gate or mlp_gate_up if gated      its mlp
    activation                                              of its mlp, by whose `.scales` AutoAWQ divides, if there are
    router; expert_gate, expert_up, expert_down             its mixture; {e} is the expert's number; or `stacks`
    choice_bias, router_norm, expert_scale                  of its router; their names have no suffix
    expert_norm, expert_post_norm, shared_post_norm         of its mixture's two parts (`Residual.SANDWICH_MIXED`)
    shared_gate and shared_up, or shared_gate_up; shared_down, shared_router
                                                            what all tokens of its mixture go to; what weighs that
    delta_qkvz and delta_ba, by key heads; or delta_qkv, delta_z, delta_b, delta_a
    delta (.A_log, .dt_bias), delta_conv, delta_norm, delta_out     its gated delta rule, in attention's place
    conv_in, short_conv, conv_out                           its short convolution, in attention's place
    mamba_in, mamba (.A_log, .dt_bias, .D), mamba_conv, mamba_norm, mamba_out       its Mamba-2
    final_norm, project_out, head                           after the layers
    relative_bias                                           bucketed bias on scores, [buckets, heads]
    cross_norm, cross_q, cross_k, cross_v, cross_out        of a decoder's layer, to attend to an encoder's output
    predictor_in, predictor_embed_norm, predictor_hidden_norm       of a `Predictor`: what makes its layer's input
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class QkvLayout(Enum):
    """How q, k and v share one tensor, along its output dimension.

    CONCAT:   [q of all heads | k of all kv heads | v of all kv heads]
    GROUPED:  kv head by kv head [q of the heads that share it | k | v]; with as many kv heads as heads, head by head
    """

    CONCAT = "concat"
    GROUPED = "grouped"


@dataclass(frozen=True)
class FusedRows:
    """Where the matrix of each expert lies in one tensor [experts, of x outputs, inputs], whose name has no suffix.

    It is the `place`-th of `of` equal parts of an expert's rows.
    """

    name: str
    place: int = 0
    of: int = 1


def rows_of_gated(gate_up: str, down: str) -> Mapping[str, FusedRows]:
    """Where gated experts lie: rows of gate and then of up in one tensor, those of down in another."""
    return {
        "expert_gate": FusedRows(gate_up, 0, 2),
        "expert_up": FusedRows(gate_up, 1, 2),
        "expert_down": FusedRows(down),
    }


# As transformers 5 holds the experts of a mixture, and tools that pack a model may write them.
FUSED_EXPERTS = rows_of_gated("layers.{i}.mlp.experts.gate_up_proj", "layers.{i}.mlp.experts.down_proj")


@dataclass(frozen=True)
class Stack:
    """Where all experts' matrices and biases lie, of a role that no expert has tensors of its own for.

    In `name` [experts, outputs, inputs] and `name`_bias [experts, outputs]; in fewer bits, `name`_ and the format's
    suffix. transposed: dense ones are [experts, inputs, outputs]. interleaved: of the role `expert_gate_up`, rows of
    gate and up take turns; otherwise those of the gate come first. turned: PEFT takes them for [experts, outputs,
    inputs] though they are transposed, which transformers does not tell.
    """

    name: str
    transposed: bool = False
    interleaved: bool = False
    turned: bool = False


@dataclass(frozen=True)
class Predictor:
    """Where a layer is that predicts the token after the next: as the model's layers, but for what is said here.

    Of its own are the roles predictor_in, predictor_embed_norm, predictor_hidden_norm and final_norm; embed and head,
    where they are named, are copies of the model's.
    """

    roles: Mapping[str, str]
    prefix: str | None = None  # before all its names, where it is layer 0; None: it stands behind the model's last one


@dataclass(frozen=True)
class NameMap:
    """Names in the checkpoint without `.weight` and `.bias`; of several names for a role the first that exists counts.

    `prefixes` are tried in order until one fits the file; `ignore` are patterns of tensors that are skipped on purpose.
    """

    roles: Mapping[str, str | tuple[str, ...]]
    encoder: Mapping[str, str | tuple[str, ...]] | None = None  # the roles of an encoder-decoder's encoder
    qkv_layout: QkvLayout = QkvLayout.CONCAT  # of the role `qkv`, where there is one
    transposed: bool = False  # linear weights are stored [inputs, outputs]
    prefixes: tuple[str, ...] = ("",)
    ignore: tuple[str, ...] = ()
    fused_experts: Mapping[str, FusedRows] = field(
        default_factory=dict
    )  # by role, where no expert has tensors of its own
    stacks: Mapping[str, Stack] = field(default_factory=dict)  # of the roles expert_gate_up and expert_down
    predictor: Predictor | None = None  # None: the family has none, or they are not served
