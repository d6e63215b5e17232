"""Model shapes: how many bytes and operations a model costs, from its `config.json` alone.

`benchmark/cost/shapes/*.json` holds the configs of well-known models, so that their speed can be computed (`plan`) or
measured on random weights (`--random-weights`) before anything is downloaded. The server's `ArchSpec` is the only
reading of a config; this module counts what it describes. Which linear layers a checkpoint quantises is in its config,
layer by layer, so they are a list, by the names that checkpoints give them, and not a sum.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmark.result import BenchError
from server.arch import families
from server.arch.footprint import recurrence_size
from server.arch.names import NameMap
from server.arch.spec import (
    ArchSpec,
    Gated,
    KvHeads,
    LayerNormSpec,
    LayerSpec,
    Learned,
    Mlp,
    Moe,
    Residual,
    validate,
)
from server.arch.stages import stages_of
from server.checkpoint.files import with_quantisation
from server.offload.cost import share_read
from server.quantisation import sizes
from server.quantisation.sizes import Storage

FOLDER = Path(__file__).with_name("shapes")
BLOCK_SIZE = 16  # tokens in a block of the KV cache, as on our shards; a cache is made of whole blocks
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Bytes of one number in a KV cache, and what a key, or a value, of one head takes besides: a scale in int8.
KV_CACHE_BYTES: Mapping[str, tuple[int, int]] = {"fp8_e4m3": (1, 0), "fp8_e5m2": (1, 0), "int8": (1, 2)}
KV_CACHE_DTYPES = ("auto", *KV_CACHE_BYTES)

NORMS_PER_LAYER: Mapping[Residual, int] = {
    Residual.ONE_BRANCH: 1,
    Residual.PRE: 2,
    Residual.PRE_CROSS: 3,
    Residual.PRE_NORMED: 2,
    Residual.POST: 2,
    Residual.SANDWICH: 4,
    Residual.SANDWICH_MIXED: 7,
    Residual.OUTPUT_NORMED: 2,
    Residual.PARALLEL_ONE_NORM: 1,
    Residual.PARALLEL_TWO_NORMS: 2,
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder, or one pipeline stage of it, before it is split over ranks, and the dtype it is published in.

    names: of its tensors; stored: how its checkpoint has the linear layers; None: dense. first_layer: the number in the
    checkpoint of the first of `spec.layers`. Only the first stage has the embedding, and an encoder where there is one;
    only the last one has the head.
    """

    spec: ArchSpec
    dtype: str
    names: NameMap = field(repr=False)
    stored: Storage | None = None
    first_layer: int = 0
    layers_behind: int = 0  # of later stages
    has_embedding: bool = True
    has_head: bool = True

    def stages(self, count: int) -> list[ModelShape]:
        """So many pipeline stages, cut as the server cuts them. Raises ValueError where there are too few layers."""
        return [
            replace(
                self,
                spec=replace(self.spec, layers=self.spec.layers[stage.layers.start : stage.layers.stop]),
                first_layer=stage.layers.start,
                layers_behind=self.spec.num_layers - stage.layers.stop,
                has_embedding=stage.is_first,
                has_head=stage.is_last,
            )
            for stage in stages_of(self.spec, count)
        ]

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers, an encoder's included."""
        layers = sum(self._layer(layer, active=False) for layer in self.spec.layers)
        return layers + self._input_parameters + self.encode_parameters

    @property
    def step_parameters(self) -> int:
        """Parameters of all layers that one token is multiplied with; of a mixture, the experts that it goes to."""
        return sum(self._layer(layer, active=True) for layer in self.spec.layers) + self._input_parameters

    @property
    def inputs_width(self) -> int:
        """Numbers of a token that this stage's layers and later ones are given beside the residual stream."""
        kind = self.spec.per_layer_inputs
        return kind.dim * (self.spec.num_layers + self.layers_behind) if kind else 0

    @property
    def _input_parameters(self) -> int:
        """Parameters of what makes these of a token's embedding, with its norm."""
        kind = self.spec.per_layer_inputs
        return kind.dim + self.inputs_width * self.spec.hidden_size if kind and self.has_embedding else 0

    @property
    def encode_parameters(self) -> int:
        """Parameters read once for a prompt: an encoder, and the decoder's matrices for its output; 0 without one."""
        if self.spec.encoder is None:
            return 0
        cross = 2 * self.spec.hidden_size * self.spec.num_heads * self.spec.head_dim
        encoder = replace(self, spec=self.spec.encoder).layer_parameters if self.has_embedding else 0
        return encoder + self.spec.num_layers * cross

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, which is the embedding table where the two are tied; 0 without a head."""
        return self._table_parameters * self.has_head

    @property
    def _table_parameters(self) -> int:
        return self.spec.vocab_size * (self.spec.embed_dim or self.spec.hidden_size)

    @property
    def total_parameters(self) -> int:
        """All parameters of the model, tied ones once: layers, embeddings, positions, norms and head."""
        spec, is_first, is_last = self.spec, self.has_embedding, self.has_head
        table = self._table_parameters * is_first
        if spec.per_layer_inputs and is_first:
            table += spec.per_layer_inputs.vocab_size * self.inputs_width
        maps = (is_first + is_last) * spec.embed_dim * spec.hidden_size  # between the embedding's width and the model's
        norms = spec.embed_norm * is_first + spec.final_norm * is_last
        buckets = spec.buckets.num_buckets * spec.num_heads if spec.buckets else 0
        if spec.encoder is not None and is_first:
            norms += spec.encoder.embed_norm + spec.encoder.final_norm
            buckets += spec.encoder.buckets.num_buckets * spec.encoder.num_heads if spec.encoder.buckets else 0
        head = self.head_parameters * (not (spec.tied_head and is_first)) + spec.vocab_size * spec.head_bias * is_last
        positions = self._position_rows * spec.hidden_size
        return self.layer_parameters + table + head + positions + maps + norms * self._norm_parameters + buckets

    @property
    def _position_rows(self) -> int:
        """Rows of the table of learned positions, where there is one."""
        position = self.spec.layers[0].position
        return (position.size + position.offset) * self.has_embedding if isinstance(position, Learned) else 0

    @property
    def windows(self) -> Mapping[int, int]:
        """How many layers that attend have which window: tokens that a query sees, itself included; 0: all."""
        return Counter(layer.reach for layer in self.spec.layers if layer.attends)

    def kv_bytes_per_token(self, dtype: str, kv_cache_dtype: str | None = None) -> int:
        """Bytes of the keys and values of one token in all layers. kv_cache_dtype: where it is not the model's."""
        kept = [heads for heads in map(self.spec.cached, self.spec.layers) if heads is not None]
        return sum(kv_bytes(heads, dtype, kv_cache_dtype) for heads in kept)

    @property
    def attending(self) -> list[tuple[LayerSpec, KvHeads]]:
        """The layers that attend, and what they attend to."""
        return [(layer, self.spec.kv_heads(layer)) for layer in self.spec.layers if layer.attends]

    def storage(self, quantize: str | None) -> Storage | None:
        """How linear layers are served; None: dense. quantize: as `--quantize`, or as a server describes it.

        What the checkpoint is published in comes first, as in a server.
        """
        return self.stored or sizes.described(quantize or "dense")

    def step_weight_bytes(self, dtype: str, quantize: str | None = None, tokens: float = 1) -> float:
        """Bytes that a step over so many tokens reads: all layers and the head, not the embedding table.

        They do not depend on the batch but for mixtures of experts, of which a step reads those that any of its tokens
        goes to: as many as there would be on average if each token went to any of them.
        """
        experts = self.expert_bytes(dtype, quantize)
        read = sum(num_bytes * share_read(share, tokens) for share, num_bytes in experts.items())
        all_layers = (self.layer_parameters - self.encode_parameters) * DTYPE_BYTES[dtype]
        layers = all_layers - self._saved(dtype, quantize, of_prompts=False) - sum(experts.values())
        return layers + read + self.head_bytes(dtype, quantize)

    def expert_bytes(self, dtype: str, quantize: str | None = None) -> dict[float, int]:
        """Bytes of all experts, by the share of them that one token goes to; empty without mixtures of experts."""
        decoder = (linear for linear in self._linears if not linear.of_prompts)
        return expert_bytes(decoder, self.storage(quantize), DTYPE_BYTES[dtype])

    def encode_bytes(self, dtype: str, quantize: str | None = None) -> int:
        """Bytes that a step reads besides when an encoder-decoder gets new prompts."""
        return self.encode_parameters * DTYPE_BYTES[dtype] - self._saved(dtype, quantize, of_prompts=True)

    def head_bytes(self, dtype: str, quantize: str | None = None) -> int:
        """Bytes of the stored output head, with a scale for each row where it is in int8."""
        storage = self.storage(quantize)
        if not self.has_head:
            return 0
        head = storage and storage.of_head(is_tied=self.spec.tied_head)
        if head is not None:
            return head.weight_bytes(self.spec.vocab_size, self.head_parameters // self.spec.vocab_size)
        return self.head_parameters * DTYPE_BYTES[dtype]

    def weight_bytes(self, dtype: str, quantize: str | None = None) -> int:
        """Bytes of all weights in memory, the input embedding included."""
        saved = sum(self._saved(dtype, quantize, of_prompts=prompts) for prompts in (False, True))
        rest = self.total_parameters - self.head_parameters
        return rest * DTYPE_BYTES[dtype] - saved + self.head_bytes(dtype, quantize)

    def padding_bytes(self, quantize: str | None, ranks: int) -> int:
        """Bytes of a rank beside its share of the weights; 0 but for layers whose groups are scattered over ranks."""
        storage = self.storage(quantize)
        return 0 if storage is None or ranks == 1 else padding_bytes(self._linears, storage, ranks)

    def copied_bytes(self, dtype: str, quantize: str | None, ranks: int) -> int:
        """Bytes of a rank beside its share of the weights, because every rank has all of them: norms, positions,
        routers, and keys' and values' matrices where there are more ranks than key-value heads."""
        spec, size = self.spec, DTYPE_BYTES[dtype]
        norms = NORMS_PER_LAYER[spec.residual] * spec.num_layers
        norms += spec.final_norm * self.has_head + spec.embed_norm * self.has_embedding
        routers = sum(spec.hidden_size * layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, Moe))
        copied = norms * self._norm_parameters + routers + self._position_rows * spec.hidden_size
        if spec.per_layer_inputs:
            copied += self._input_parameters + 2 * spec.hidden_size * spec.per_layer_inputs.dim * spec.num_layers
        everywhere = copied * size * (ranks - 1) // ranks
        return everywhere + self.copied_kv_bytes(dtype, quantize, ranks) // ranks

    def copied_kv_bytes(self, dtype: str, quantize: str | None, ranks: int) -> int:
        """Bytes of keys' and values' matrices that all ranks together have beside one of each: their copies, where
        there are more ranks than key-value heads; of compressed ones, all that is computed before heads are told apart.
        """
        hidden, storage = self.spec.hidden_size, self.storage(quantize)

        def one(rows: int) -> int:
            return rows * hidden * DTYPE_BYTES[dtype] if storage is None else storage.weight_bytes(rows, hidden)

        return sum(
            one(layer.latent.compressed if layer.latent else (2 - layer.keys_are_values) * heads.dim)
            * max(0, ranks - heads.count)
            for layer, heads in self.attending
            if not layer.kv_from
        )

    @cached_property
    def _linears(self) -> tuple[Linear, ...]:
        decoder = linears_of_decoder(self.spec, self.names, self.first_layer)
        return (*decoder, *(linears_of_encoder(self.spec, self.names) if self.has_embedding else ()))

    def product_kind(self, dtype: str, quantize: str | None, *, on_cpu: bool) -> str:
        """Of which numbers of 8 bits some products are, int8 or float8; empty: none are."""
        storage = self.storage(quantize)
        if storage is None:
            return ""
        return storage.product_kind(dtype, on_cpu=on_cpu) or ("int8" if storage.has_int8_head else "")

    def eight_bit_parameters(
        self, dtype: str, quantize: str | None = None, *, on_cpu: bool, of_prompts: bool = False
    ) -> tuple[int, int]:
        """Of those of a step, or of what an encoder-decoder's new prompts read, and of the head, how many are
        multiplied in 8 bits."""
        storage = self.storage(quantize)
        if storage is None:
            return 0, 0
        layers = sum(
            linear.active * linear.parameters
            for linear in self._linears
            if linear.of_prompts == of_prompts and not storage.leaves_out(linear.name)
        )
        is_in_8_bits = bool(storage.product_kind(dtype, on_cpu=on_cpu))
        head = storage.has_int8_head or (self._has_stored_head(storage) and is_in_8_bits)
        return layers * is_in_8_bits, self.head_parameters * head

    def _has_stored_head(self, storage: Storage) -> bool:
        """Whether a head of its own is stored as the layers are."""
        return storage.includes_head and not self.spec.tied_head

    def _saved(self, dtype: str, quantize: str | None, *, of_prompts: bool) -> int:
        """Bytes by which storage is smaller than the dtype: of what only new prompts of an encoder read, or of all
        else."""
        key = dtype, quantize, of_prompts
        if key not in self._known_savings:
            wanted = (linear for linear in self._linears if linear.of_prompts == of_prompts)
            self._known_savings[key] = saved_bytes(wanted, self.storage(quantize), DTYPE_BYTES[dtype])
        return self._known_savings[key]

    @cached_property
    def _known_savings(self) -> dict[tuple[str, str | None, bool], int]:
        """What `_saved` has found: every step asks for it again."""
        return {}

    def split_problem(self, num_shards: int) -> str | None:
        """Why the model cannot be split over so many shards, or None."""
        try:
            validate(self.spec, num_shards)
        except ValueError as error:
            return str(error)
        return None

    @property
    def _norm_parameters(self) -> int:
        vectors = 2 if isinstance(self.spec.norm, LayerNormSpec) and self.spec.norm.bias else 1
        return vectors * self.spec.hidden_size

    def _layer(self, layer: LayerSpec, *, active: bool) -> int:
        spec, heads = self.spec, self.spec.kv_heads(layer)
        hidden, queries, keys = spec.hidden_size, spec.num_heads * heads.dim, heads.count * heads.dim
        keys_and_values = 0 if layer.kv_from else (2 - layer.keys_are_values) * keys
        attention = hidden * ((1 + spec.attention_gate) * queries + keys_and_values) + queries * hidden
        biases = (queries + keys_and_values) * spec.qkv_bias + hidden * spec.attention_out_bias
        biases += (hidden + _mlp_columns(layer.mlp)) * spec.mlp_bias + spec.num_heads * layer.sinks + spec.layer_scale
        norms = NORMS_PER_LAYER[spec.residual] * self._norm_parameters
        has_norms = (spec.qk_norm or spec.late_qk_norm) and not spec.plain_qk_norm
        norms += (1 if layer.kv_from else 2) * heads.dim * has_norms
        norms += (queries + keys) * spec.qk_row_norm
        cross = 2 * hidden * queries if spec.encoder else 0
        if spec.per_layer_inputs:
            norms += 2 * hidden * spec.per_layer_inputs.dim + self._norm_parameters
        if not layer.attends:
            norms -= 2 * heads.dim * spec.qk_norm
            attention = biases = 0
        if (latent := layer.latent) is not None:
            attention = latent.parameters(hidden, spec.num_heads)
            norms += latent.query_rank + latent.rank
        recurrence = recurrence_size(layer.recurrence, hidden) if layer.recurrence is not None else 0
        return attention + recurrence + cross + _mlp_parameters(layer.mlp, hidden, active=active) + biases + norms


def kv_bytes(heads: KvHeads, dtype: str, kv_cache_dtype: str | None = None) -> int:
    """Bytes of the keys and values of one token in one layer. kv_cache_dtype: where it is not the model's."""
    number, scale = KV_CACHE_BYTES.get(kv_cache_dtype or "auto", (DTYPE_BYTES[dtype], 0))
    return heads.rows * heads.count * (heads.dim * number + scale)


def _mlp_columns(mlp: Mlp | None) -> int:
    """Output features of the first matrices of an mlp."""
    if mlp is None:
        return 0
    return mlp.width * (2 if isinstance(mlp, Gated) else 1)


def _mlp_parameters(mlp: Mlp | None, hidden: int, *, active: bool) -> int:
    if mlp is None:
        return 0
    if isinstance(mlp, Moe):
        experts = mlp.top_k if active else mlp.num_experts
        of_expert = (2 + mlp.gated) * hidden * mlp.width + ((1 + mlp.gated) * mlp.width + hidden) * mlp.bias
        of_router = (hidden + mlp.router_bias + mlp.choice_bias) * mlp.num_experts
        beside = mlp.num_experts * mlp.expert_scale + hidden * mlp.router_norm
        return (
            experts * of_expert + of_router + beside + hidden * ((2 + mlp.gated) * mlp.shared_width + mlp.shared_gate)
        )
    return hidden * (_mlp_columns(mlp) + mlp.width)


def from_config(config: Mapping[str, Any], origin: str = "config.json") -> ModelShape:
    """The shape that a config describes. `origin` names it in a BenchError."""
    try:
        family, spec = families.find(config)
        found = ModelShape(spec, published_dtype(config), family.names, sizes.of_config(config))
        found.weight_bytes("float32")  # so that an expression that matches for too long is refused here
        return found
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise BenchError(f"{origin} is no model that Lockstep knows: {error}") from None


def published_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that the config names; float16 where it names none, as most checkpoints of that age are."""
    text = config.get("text_config") or {}  # of a model that reads images too
    name = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float16")
    return name if name in DTYPE_BYTES else "float16"


# ----------------------------------------------------------------------------------------------------- finding a config


@dataclass(frozen=True)
class NamedShape:
    """A model's config with the name to print, and what it costs."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    shape: ModelShape


def names() -> list[str]:
    """Names of the shapes that come with the benchmark."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find(name_or_path: str) -> NamedShape:
    """A shipped shape by its name or by a repository that ends in it, a config.json, or a model folder."""
    path = Path(name_or_path).expanduser()
    shipped = name_or_path.rsplit("/", 1)[-1].lower()
    if path.is_dir():
        name, path = path.resolve().name, path / "config.json"
    elif path.is_file():
        name = path.stem if path.stem != "config" else path.resolve().parent.name
    elif shipped in names():
        name, path = name_or_path, FOLDER / f"{shipped}.json"
    else:
        raise BenchError(
            f"no shape is called {name_or_path} and there is no such file: give a config.json, a model folder, or one "
            f"of {', '.join(names())}"
        )
    try:
        config = with_quantisation(path.parent, _read(path))
    except ValueError as error:
        raise BenchError(str(error)) from None
    return NamedShape(name, config, from_config(config, str(path)))


def shape(name_or_path: str) -> ModelShape:
    """The shape alone of what `find` finds. Raises BenchError."""
    return find(name_or_path).shape


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}; give a config.json or a model folder") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BenchError(f"{path} is not a JSON object: give a model's config.json")
    return config


# -------------------------------------------------------------------------------------------------------- model folders


def make_model_folder(named: NamedShape, folder: Path) -> None:
    """Write what a server needs to start on random weights: the config, and a tokenizer whose text means nothing.

    Token i is the word `t<i>`, and words are divided by spaces: a prompt of N words is N tokens, and generated text
    is as long as its tokens. There is no end token, so that nothing stops early.
    """
    folder.mkdir(parents=True, exist_ok=True)
    without_end = {key: value for key, value in named.config.items() if key != "eos_token_id"}
    (folder / "config.json").write_text(json.dumps(without_end))
    write_word_tokenizer(named.shape.spec.vocab_size, folder)


def write_word_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a tokenizer for which token i is the word `t<i>` into the folder."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"t{id}": id for id in range(vocab_size)}, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


# -------------------------------------------------------------------------------------------------------- linear layers


Roles = Mapping[str, str | tuple[str, ...]]
DIVIDES_INPUTS = (
    "attention_out",
    "conv_out",
    "cross_out",
    "delta_out",
    "expert_down",
    "mamba_out",
    "mlp_down",
    "shared_down",
)


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


def linears_of_decoder(spec: ArchSpec, names: NameMap, first_layer: int = 0) -> Iterator[Linear]:
    """Those of a decoder, or of the decoder of an encoder-decoder, whose layers are counted from `first_layer`."""
    roles = {**names.roles, **{role: stack.name for role, stack in names.stacks.items()}}
    return _linears_of_stack(spec, roles, names.prefixes[0], first_layer, of_prompts=False)


def linears_of_encoder(spec: ArchSpec, names: NameMap) -> Iterator[Linear]:
    """Those of an encoder-decoder's encoder; none where there is no encoder."""
    if spec.encoder is None or names.encoder is None:
        return iter(())
    return _linears_of_stack(spec.encoder, names.encoder, names.prefixes[0], 0, of_prompts=True)


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


def _linears_of_stack(
    spec: ArchSpec, roles: Roles, prefix: str, first_layer: int, *, of_prompts: bool
) -> Iterator[Linear]:
    for number, layer in enumerate(spec.layers, first_layer):
        for role, outputs, inputs, copies, active in _linears_of_layer(spec, layer, roles):
            entry = roles[role]
            short = entry if isinstance(entry, str) else entry[0]
            is_read_once = of_prompts or role in ("cross_k", "cross_v")
            name, by_inputs = prefix + short.format(i=number, e=0), role in DIVIDES_INPUTS
            yield Linear(name, outputs, inputs, copies, active, is_read_once, by_inputs)


def _linears_of_layer(spec: ArchSpec, layer: LayerSpec, roles: Roles) -> Iterator[tuple[str, int, int, int, int]]:
    """Role, outputs, inputs, copies, active ones."""
    if layer.attends:
        of_attention = _linears_of_latent if layer.latent else _linears_of_attention
        yield from of_attention(spec, layer, roles)
    if layer.recurrence is not None:
        for role, (outputs, inputs) in layer.recurrence.linears(spec.hidden_size, roles).items():
            yield role, outputs, inputs, 1, 1
    yield from _linears_of_mlp(spec, layer, roles)


def _linears_of_latent(spec: ArchSpec, layer: LayerSpec, roles: Roles) -> Iterator[tuple[str, int, int, int, int]]:
    """Without `kv_b`, which is dense in memory."""
    latent, hidden = layer.latent, spec.hidden_size
    assert latent is not None
    queries, compressed = spec.num_heads * latent.query_dim, latent.query_rank
    yield from (
        [("q_a", compressed, hidden, 1, 1), ("q_b", queries, compressed, 1, 1)]
        if compressed
        else [("q", queries, hidden, 1, 1)]
    )
    yield "kv_a", latent.width, hidden, 1, 1
    yield "attention_out", hidden, spec.num_heads * latent.value_dim, 1, 1


def _linears_of_attention(spec: ArchSpec, layer: LayerSpec, roles: Roles) -> Iterator[tuple[str, int, int, int, int]]:
    hidden, heads = spec.hidden_size, spec.kv_heads(layer)
    queries, keys = spec.num_heads * heads.dim, heads.count * heads.dim
    if "qkv" in roles:
        qkv = {"qkv": queries + 2 * keys}
    else:
        lacked = ("k", "v") if layer.kv_from else ("v",) if layer.keys_are_values else ()
        qkv = {role: rows for role, rows in {"q": queries, "k": keys, "v": keys}.items() if role not in lacked}
    if spec.attention_gate:
        qkv |= {"attention_gate": queries} if "attention_gate" in roles else {"q": 2 * queries}
    for role, outputs in qkv.items():
        yield role, outputs, hidden, 1, 1
    yield "attention_out", hidden, queries, 1, 1
    if spec.encoder is not None:
        for role in ("cross_q", "cross_k", "cross_v"):
            yield role, queries, hidden, 1, 1
        yield "cross_out", hidden, queries, 1, 1


def _linears_of_mlp(spec: ArchSpec, layer: LayerSpec, roles: Roles) -> Iterator[tuple[str, int, int, int, int]]:
    hidden, mlp = spec.hidden_size, layer.mlp
    if mlp is None:
        return
    width = mlp.width
    if isinstance(mlp, Moe):
        ups = (
            {"expert_up": width}
            if not mlp.gated
            else {"expert_gate_up": 2 * width}
            if "expert_gate_up" in roles
            else {"expert_gate": width, "expert_up": width}
        )
        for role, outputs in ups.items():
            yield role, outputs, hidden, mlp.num_experts, mlp.top_k
        yield "expert_down", hidden, width, mlp.num_experts, mlp.top_k
        if mlp.shared_width:
            halves = (
                ("shared_gate_up",) if "shared_gate_up" in roles else ("shared_gate", "shared_up")[-1 - mlp.gated :]
            )
            for role in halves:
                yield role, (1 + mlp.gated) * mlp.shared_width // len(halves), hidden, 1, 1
            yield "shared_down", hidden, mlp.shared_width, 1, 1
        return
    if isinstance(mlp, Gated) and "mlp_gate_up" in roles:
        yield "mlp_gate_up", 2 * width, hidden, 1, 1
    else:
        for role in ("mlp_gate", "mlp_up") if isinstance(mlp, Gated) else ("mlp_up",):
            yield role, width, hidden, 1, 1
    yield "mlp_down", hidden, width, 1, 1
