"""Loading what transformers runs for us: batched where that gives transformers' own logits, else one at a time.

A model is loaded whole by transformers, which knows how its checkpoints are stored, and then divided and quantised
layer by layer: for that time the host holds all of its weights, once for each rank.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from server.arch import families
from server.arch.families.hf_config import checked
from server.backends.protocol import Backend
from server.checkpoint.formats import Quantisation
from server.config import AUTO, ShardConfig
from server.fallback import asked, probe
from server.fallback.asked import UnbatchedError
from server.fallback.attention import install
from server.fallback.batched import BatchedModel, DividedHead, Given, output_of
from server.fallback.linear import Divider, Plan
from server.fallback.serial import SerialModel, max_positions
from server.layers.embedding import vocab_share
from server.offload.share import Share
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS
from server.quantisation.stored import Stored, padded
from server.ranks.collectives import Shard
from server.stepping.cache import KvOnDevice

SERVED = ", ".join(sorted(families.FAMILIES))
# What transformers raises for a config.json that it cannot make a model of, and its models for what they cannot do.
UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, ArithmeticError, AssertionError, ImportError, RuntimeError),
    *(IndexError, StrictDataclassError),
)
# Which parts of a cache keep keys and values alone, or nothing, where a layer takes those of another one.
PLAIN_CACHES = frozenset((DynamicLayer, DynamicSlidingWindowLayer, DummyLayer))
# Names of what a model has one object each of, of whatever family.
COUNTS, MOST_COUNTED = re.compile(r"_(layers?|experts|labels|inputs)$"), 2**16
LAYERS = ("n_layer", "n_layers", "num_hidden_layers", "num_layers")
POSITIONS = ("max_position_embeddings", "n_positions")
TRIED_TOKENS = 40  # of a prompt that a model is tried out with which is not batched
NOTED_TOKENS = 5  # of the pass that finds out what attention is asked for


def refuse_settings(config: ShardConfig) -> None:
    """Raise ValueError for settings that only models of our families can have."""
    wishes = {
        "--pipeline-parallel": config.num_stages > 1,
        "--weights-on-device": config.weights_on_device != AUTO and not Share.parse(config.weights_on_device).is_all,
        "--kv-on-device": not Share.parse(config.kv_on_device).is_all,
        "--rope-scaling and --rope-factor": bool(config.rope_scaling or config.rope_factor),
        "--speculative-model": config.speculative_model is not None,
        "--speculative-method mtp": config.speculative_method == "mtp",
    }
    _refuse(wishes, "config.json names no model of Lockstep's own, and transformers serves it")


def _refuse_unbatched(config: ShardConfig, name: str, reason: str) -> None:
    """Raise ValueError for settings that a model which is not batched cannot have."""
    wishes = {
        "--num-shard": config.stage_size > 1,
        "--quantize": bool(config.quantize),
        "--kv-cache-dtype": config.kv_cache_dtype != AS_COMPUTED.name,
    }
    _refuse(wishes, f"{name} runs on one shard, as it is and one sequence at a time, because {reason}")


def _refuse(wishes: dict[str, bool], said: str) -> None:
    if flags := [flag for flag, is_given in wishes.items() if is_given]:
        raise ValueError(f"{said}: leave out {', '.join(flags)}; served without such limits are: {SERVED}")


@dataclass(frozen=True)
class Loader:
    """Loads one rank's share of a model."""

    config: ShardConfig
    backend: Backend
    shard: Shard
    dtype: torch.dtype
    quantised: Quantisation

    def load(self) -> BatchedModel | SerialModel:
        """Raises ValueError for what transformers cannot load, or settings that such a model cannot have."""
        try:
            return self._batched()
        except UnbatchedError as error:
            reason = str(error)
        model = build(self.config, self.dtype, self._device)
        _refuse_unbatched(self.config, type(model).__name__, reason)
        _try_out(model)
        return SerialModel(model, _warning(self.config, model, f"one sequence at a time, because {reason}: {SERIAL}"))

    @property
    def _device(self) -> torch.device:
        return self.backend.device.torch_device

    def _batched(self) -> BatchedModel:
        if self.quantised.format is not None:
            raise UnbatchedError("its checkpoint is quantised, which transformers reads in its own way")
        model = build(self.config, self.dtype, torch.get_default_device())
        body, prefix = body_of(model)
        plan = Plan(model._tp_plan or {})
        if self.shard.world_size > 1 and not plan.divides:
            raise UnbatchedError("it declares no plan for several shards")
        try:
            batched = self._divided(model, body, prefix, plan)
            problem = probe.problem_of(batched, self.backend, self.dtype)
        except UNREADABLE as error:
            problem = str(error) if isinstance(error, UnbatchedError) else f"it fails so ({first_line(error)})"
        # The same for all ranks: each has seen its part of the logits.
        if problem := self.shard.first_problem(problem, self._device):
            raise UnbatchedError(problem)
        return batched

    @torch.inference_mode()
    def _divided(self, model: PreTrainedModel, body: nn.Module, prefix: str, plan: Plan) -> BatchedModel:
        config = model.config.get_text_config()
        head: nn.Linear = model.get_output_embeddings()
        vocab_size = head.weight.shape[0]
        warning = _warning(self.config, model, _batched(plan, body, self.shard.world_size, self.quantised.name))
        divider = Divider(*(self.backend, self.shard, plan, self.dtype, self._device), quantise=self.quantised.quantise)
        divider.divide(body, f"{prefix}.", config)
        for name, module in list(model.named_modules()):
            if module is head:
                model.set_submodule(name, self._head(head))
        for part in (body, model):
            part.to(self._device)
        layers, output = note(body, config, self._device)
        setattr(model, prefix, Given(output))
        cache = KV_FORMATS[self.config.kv_cache_dtype]
        step = install(layers, self.backend, cache)
        return BatchedModel(
            *(body, model, layers, step, self.shard, vocab_size, max_positions(config), cache, KvOnDevice(), warning)
        )

    def _head(self, head: nn.Linear) -> DividedHead:
        """This rank's rows, with zeros behind the vocabulary's end."""
        (start, stop), padding = vocab_share(self.shard, head.weight.shape[0])
        dense = head.weight.detach()[start:stop].to(self._device)
        rows: Stored = dense if self.quantised.quantise_head is None else self.quantised.quantise_head(dense.float())
        bias = None if head.bias is None else nn.functional.pad(head.bias.detach()[start:stop], (0, padding))
        return DividedHead(self.backend.linear(padded(rows, padding)), None if bias is None else bias.to(self._device))


SERIAL = "without paged cache, batching or sharding, at a fraction of the usual speed"


def _warning(shard: ShardConfig, model: PreTrainedModel, how: str) -> str:
    """What whoever starts it is told."""
    others = ". It serves text alone: images are refused" if hasattr(_config(shard), "vision_config") else ""
    name = type(model).__name__
    return f"{name} is not one of Lockstep's architectures: transformers' own model serves it, {how}{others}"


def _batched(plan: Plan, body: nn.Module, world_size: int, quantised: str | None) -> str:
    """What holds for a batched model, for people."""
    if world_size > 1:
        said = [f"divided over {world_size} shards by its own plan"]
    else:
        said = [] if plan.divides else ["on one shard, for it declares no plan for several"]
    said += [f"linear layers in {quantised}"] if quantised else []
    if any(parameter.dim() == 3 for parameter in body.parameters()):
        said.append("experts as transformers computes them, dense")
    return "; ".join(["batched, with a paged cache and shared prefixes", ", ".join(said)]).removesuffix("; ")


def body_of(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """A model without its head, and the name that it has there. Raises UnbatchedError by what a model declares."""
    prefix = model.base_model_prefix
    body = getattr(model, prefix, None)
    if model.config.is_encoder_decoder:
        raise UnbatchedError("it has an encoder")
    if not isinstance(body, PreTrainedModel) or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise UnbatchedError("its head cannot be told from its body")
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnbatchedError("it takes no positions")
    if model._is_stateful:
        raise UnbatchedError("it keeps a state of its own")
    if not body._can_set_attn_implementation():
        raise UnbatchedError("its attention does not go through transformers' interface")
    for module in body.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise UnbatchedError("the longest sequence of a batch decides how its positions are turned")
    return body, prefix


def note(body: nn.Module, config: PreTrainedConfig, device: torch.device) -> tuple[list[asked.LayerAttention], type]:
    """What a body's layers ask of attention, and the class of what it gives. Raises UnbatchedError."""
    if kinds := {type(layer) for layer in DynamicCache(config=config).layers} - PLAIN_CACHES:
        raise UnbatchedError(f"its cache keeps more than keys and values, in a {kinds.pop().__name__}")
    ids = torch.arange(1, 1 + NOTED_TOKENS, device=device)
    layers, output = asked.find(body, lambda: output_of(body, ids, ids - 1))
    if without := config.num_hidden_layers - len(layers):
        raise UnbatchedError(f"{without} of its {config.num_hidden_layers} layers have no attention")
    return layers, type(output)


@dataclass(frozen=True)
class Outlook:
    """What is known of a model from config.json alone."""

    num_parameters: int
    nbytes: int
    max_positions: int
    has_encoder: bool
    warning: str


def outlook(config: ShardConfig, dtype: torch.dtype) -> Outlook:
    """Raises ValueError for what cannot be served. A start may still find that a model is not to be batched."""
    refuse_settings(config)
    model = build(config, dtype, torch.device("meta"))
    parameters = list(model.parameters())
    try:
        body, _ = body_of(model)
        if config.stage_size > 1 and not Plan(model._tp_plan or {}).divides:
            raise UnbatchedError("it declares no plan for several shards")
        how = _batched(Plan(model._tp_plan or {}), body, config.stage_size, config.quantize)
        try:
            note(body, model.config.get_text_config(), torch.device("meta"))
        except UNREADABLE as error:
            if isinstance(error, UnbatchedError):
                raise
    except UnbatchedError as error:
        _refuse_unbatched(config, type(model).__name__, str(error))
        how = f"one sequence at a time, because {error}: {SERIAL}"
    return Outlook(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters),
        max_positions(model.config.get_text_config()),
        model.config.is_encoder_decoder,
        _warning(config, model, how),
    )


def build(shard: ShardConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model on a device, by transformers. On `meta` nothing is computed, and no weights are read.

    Raises ValueError for what it cannot load, with the list of what Lockstep can.
    """
    weights_path = None if shard.random_weights or device.type == "meta" else Path(shard.weights_path)
    try:
        config = _config(shard)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = _build(auto, config, weights_path, dtype, device)
    except UNREADABLE as error:
        raise ValueError(
            "this architecture is not one of Lockstep's, and transformers cannot load it either "
            f"({first_line(error)}); served are: {SERVED}"
        ) from error
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} keeps its state in another way than keys and values, which Lockstep cannot serve; "
            f"served are: {SERVED}"
        )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not (
        config.is_encoder_decoder or getattr(config, "is_decoder", True)
    ):
        raise ValueError(
            f"config.json says model_type {config.model_type!r} without is_decoder, which fills gaps in a text and "
            f"continues none; served are: {SERVED}"
        )
    return model


@torch.inference_mode()
def _try_out(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that fails at a prompt and a token behind it: it can be made, but its config is odd.

    What is batched was tried out by `probe`.
    """
    most = max_positions(model.config.get_text_config()) or TRIED_TOKENS
    ids = torch.arange(max(2, min(most, TRIED_TOKENS)), device=model.device).unsqueeze(0)
    ids = ids % model.get_output_embeddings().weight.shape[0]
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    prompt = {"input_ids": ids} if model.config.is_encoder_decoder else {}
    cache = None
    try:
        for part in (ids[:, :-1], ids[:, -1:]):
            output = model(**{**prompt, name: part}, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
    except UNREADABLE as error:
        raise ValueError(
            f"transformers fails where {type(model).__name__} continues a prompt ({first_line(error)}): config.json is "
            "damaged, or transformers itself cannot run this model"
        ) from error


def _config(shard: ShardConfig) -> PreTrainedConfig:
    """A checkpoint's config.json without what it says of who computes attention, which may be code from a hub."""
    _refuse_odd_counts(json.loads((Path(shard.model_path) / "config.json").read_text()))
    config = AutoConfig.from_pretrained(shard.model_path, local_files_only=True, trust_remote_code=False)
    config._attn_implementation = None
    return config


def _refuse_odd_counts(config: Mapping[str, Any]) -> None:
    """Raise ValueError for so many layers or the like that making them would take all memory, or for none."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        counts = {name: value for name, value in part.items() if type(value) is int}
        checked({name: counts[name] for name in LAYERS if name in counts})
        checked({name: counts[name] for name in POSITIONS if counts.get(name)})  # 0 is no limit
        for name, count in counts.items():
            if COUNTS.search(name) and count > MOST_COUNTED:
                raise ValueError(f"config.json says {name} {count}, which must be at most {MOST_COUNTED}")


def _build(
    auto: Any, config: PreTrainedConfig, weights_path: Path | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    model: PreTrainedModel
    if weights_path is None:
        with device, torch.random.fork_rng([], enabled=device.type != "meta"):  # nothing else draws from a GPU's
            torch.manual_seed(0)  # all ranks have the same
            model = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        settings = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        model, info = auto.from_pretrained(weights_path, config=config, **settings)
        if missing := sorted(info["missing_keys"]):  # transformers would make them up
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors, such as {missing[0]}: download it again")
    return torch.nn.Module.to(model, device).eval()


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    first, _, rest = str(error).strip().partition("\n")
    if "ignore_mismatched_sizes" in first:
        return "its tensors have other shapes than config.json says: download it again"
    if isinstance(error, KeyError):
        return f"it knows no {first}"
    return f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
