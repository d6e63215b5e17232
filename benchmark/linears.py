"""The linear layers of a model that may be quantised, by the names that its checkpoints give them.

Which of them a checkpoint quantises is in its config, layer by layer, so this is a list and not a sum. Left out: what
no format stores in fewer bits (norms, biases, positions, routers), and the head, which is a matter of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Gated, LayerSpec, Moe
from server.quant.sizes import Storage

Roles = Mapping[str, str | tuple[str, ...]]
DIVIDES_INPUTS = ("attention_out", "cross_out", "expert_down", "mlp_down")


@dataclass(frozen=True)
class Linear:
    """A weight [outputs, inputs], or several of one shape: experts, of which a token goes to `active`."""

    name: str  # in the checkpoint
    outputs: int
    inputs: int
    copies: int = 1
    active: int = 1
    of_prompts: bool = False  # whether only a step with a new prompt for an encoder reads it
    divides_inputs: bool = False  # whether ranks divide its inputs among them, and not its outputs

    @property
    def parameters(self) -> int:
        """Of one copy."""
        return self.outputs * self.inputs

    @property
    def is_expert(self) -> bool:
        """Whether a token goes to some of the copies only."""
        return self.active < self.copies


def of_decoder(spec: ArchSpec, names: NameMap, first_layer: int = 0) -> Iterator[Linear]:
    """Those of a decoder, or of the decoder of an encoder-decoder, whose layers are counted from `first_layer`."""
    return _of_stack(spec, names.roles, names.prefixes[0], first_layer, of_prompts=False)


def of_encoder(spec: ArchSpec, names: NameMap) -> Iterator[Linear]:
    """Those of an encoder-decoder's encoder; none where there is no encoder."""
    if spec.encoder is None or names.encoder is None:
        return iter(())
    return _of_stack(spec.encoder, names.encoder, names.prefixes[0], 0, of_prompts=True)


def stored_bytes(linear: Linear, storage: Storage | None, dtype_bytes: int) -> int:
    """Bytes of all copies of a layer. storage: how it is stored where it is not left out; None: dense."""
    if storage is None or storage.leaves_out(linear.name):
        return linear.copies * linear.parameters * dtype_bytes
    return linear.copies * storage.weight_bytes(linear.outputs, linear.inputs)


def saved_bytes(linears: Iterable[Linear], storage: Storage | None, dtype_bytes: int) -> int:
    """By how much the layers, all copies of each, are smaller in this storage than dense."""
    return sum(
        linear.copies * linear.parameters * dtype_bytes - stored_bytes(linear, storage, dtype_bytes)
        for linear in linears
    )


def expert_bytes(linears: Iterable[Linear], storage: Storage | None, dtype_bytes: int) -> dict[float, int]:
    """Bytes of all experts, by the share of them that one token goes to; empty where no layer is a mixture."""
    found: dict[float, int] = defaultdict(int)
    for linear in linears:
        if linear.is_expert:
            found[linear.active / linear.copies] += stored_bytes(linear, storage, dtype_bytes)
    return dict(found)


def padding_bytes(linears: Iterable[Linear], storage: Storage, ranks: int) -> int:
    """By how much more than its share a rank holds, because it has parts of groups whose inputs are scattered."""
    return sum(
        linear.copies
        * max(
            0,
            storage.weight_bytes(linear.outputs, linear.inputs, ranks)
            - storage.weight_bytes(linear.outputs, linear.inputs) // ranks,
        )
        for linear in linears
        if storage.is_scattered and linear.divides_inputs and not storage.leaves_out(linear.name)
    )


def _of_stack(spec: ArchSpec, roles: Roles, prefix: str, first_layer: int, *, of_prompts: bool) -> Iterator[Linear]:
    for number, layer in enumerate(spec.layers, first_layer):
        for role, outputs, inputs, copies, active in _of_layer(spec, layer, roles):
            entry = roles[role]
            short = entry if isinstance(entry, str) else entry[0]
            is_read_once = of_prompts or role in ("cross_k", "cross_v")
            name, by_inputs = prefix + short.format(i=number, e=0), role in DIVIDES_INPUTS
            yield Linear(name, outputs, inputs, copies, active, is_read_once, by_inputs)


def _of_layer(spec: ArchSpec, layer: LayerSpec, roles: Roles) -> Iterator[tuple[str, int, int, int, int]]:
    """Role, outputs, inputs, copies, active ones."""
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {"qkv": queries + 2 * keys} if "qkv" in roles else {"q": queries, "k": keys, "v": keys}
    for role, outputs in qkv.items():
        yield role, outputs, hidden, 1, 1
    yield "attention_out", hidden, queries, 1, 1
    if spec.encoder is not None:
        for role in ("cross_q", "cross_k", "cross_v"):
            yield role, queries, hidden, 1, 1
        yield "cross_out", hidden, queries, 1, 1
    mlp, width = layer.mlp, layer.mlp.width
    if isinstance(mlp, Moe):
        for role in ("expert_gate", "expert_up"):
            yield role, width, hidden, mlp.num_experts, mlp.top_k
        yield "expert_down", hidden, width, mlp.num_experts, mlp.top_k
        return
    if isinstance(mlp, Gated) and "mlp_gate_up" in roles:
        yield "mlp_gate_up", 2 * width, hidden, 1, 1
    else:
        for role in ("mlp_gate", "mlp_up") if isinstance(mlp, Gated) else ("mlp_up",):
            yield role, width, hidden, 1, 1
    yield "mlp_down", hidden, width, 1, 1
