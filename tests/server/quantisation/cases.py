"""Which formats are tested with which families: every pair of a format and what is hard about a family's layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.server.driver import all_logits, load_engine
from tests.server.published import save_published
from tests.server.quantisation import quantised
from tests.server.quantisation.quantised import How, Layer
from tests.server.tiny import CASES, save_tiny

SMALL = {"num_hidden_layers": 2}
T5_SMALL = {"num_layers": 2, "num_decoder_layers": 2}
BY_NAME = {"-:.*down": {}, r"+:.*\.(gate|v)_proj": {"bits": 8, "group_size": -1}}
BLOCKS = {"intermediate_size": 128}  # which 64 divides
WEIGHTS, ROUNDINGS = 1e-4, 1e-2  # how far logits may be from those of dequantised weights


class Case(NamedTuple):
    """A family's tiny model, what is changed of it, and how it is quantised."""

    family: str
    changes: dict[str, Any]
    how: How
    also: str = "-"  # what is quantised though tools seldom do
    others: Mapping[str, How | None] = MappingProxyType({})  # pattern of names of layers -> how else, or not at all


def with_config(how: How, **changes: object) -> How:
    """The same, with more in its config."""
    return replace(how, config=how.config | changes)


def with_targets(how: How, *targets: str) -> How:
    """The same, of compressed-tensors, for other modules."""
    return with_config(how, config_groups={"group_0": how.config["config_groups"]["group_0"] | {"targets": [*targets]}})


PAIRS = {
    # fused rows of heads, biases, a tied head
    "bloom-gptq": Case("bloom", {"n_layer": 2}, quantised.gptq(4, 32)),
    "bloom-int8": Case("bloom", {"n_layer": 2}, quantised.compressed_int8(is_fixed=False)),
    "bloom-nf4": Case("bloom", {"n_layer": 2}, quantised.bitsandbytes("nf4", is_nested=True)),
    "bloom-nf4-as-bfloat16": Case("bloom", {"n_layer": 2},
                                  quantised.bitsandbytes("nf4", is_nested=False, storage="bfloat16")),
    "bloom-mxfp4": Case("bloom", {"n_layer": 2}, quantised.mxfp4()),
    # grouped heads, gates; 96 inputs, of which groups are cut by 2, 4 and 8 ranks
    "llama-gptq-3": Case("llama", SMALL, quantised.gptq(3, 32, is_ordered=False)),
    "llama-gptq-2": Case("llama", SMALL, quantised.gptq(2, 32, version=2, is_symmetric=True)),
    "llama-int8-fixed": Case("llama", SMALL, quantised.compressed_int8(is_fixed=True, is_symmetric=False)),
    "llama-packed": Case("llama-biased-tied", SMALL, quantised.compressed_packed(4, 32, is_symmetric=False)),
    "llama-float8": Case("llama", SMALL, quantised.float8("fp8", "tensor", is_fixed=True)),
    "llama-float8-rows": Case("llama", SMALL, quantised.float8("fbgemm_fp8", "channel")),
    "llama-nvfp4": Case("llama", SMALL, quantised.nvfp4("compressed-tensors")),
    "llama-nvfp4-of-modelopt": Case("llama", SMALL, quantised.nvfp4("modelopt")),
    "llama-mxfp4": Case("llama", SMALL, quantised.mxfp4()),
    "llama-mxfp8": Case("llama", SMALL, quantised.mxfp8()),
    "llama-auto-round": Case("llama", SMALL, quantised.auto_round("auto_round:auto_gptq")),
    "llama-auto-round-asymmetric": Case("llama", SMALL, quantised.auto_round("auto_round:gptqmodel")),
    "llama-auto-round-older": Case("llama", SMALL, quantised.auto_round("auto_round:exllamav2")),
    "llama-auto-round-older-gptq": Case("llama", SMALL, quantised.auto_round("auto_round:gptq:exllamav2")),
    "llama-auto-round-awq": Case("llama", SMALL, quantised.auto_round("auto_round:auto_awq")),
    "llama-quark": Case("llama", SMALL, quantised.quark("uint4", 32)),
    "llama-quark-mixed": Case(
        "llama", SMALL,
        with_config(
            quantised.quark("int4", 32, "order", is_symmetric=True),
            layer_quant_config={"*.down_proj": quantised.quark_mxfp4().config["global_quant_config"]},
            exclude=["lm_head", "model.layers.?.self_attn.v_proj", "*up_proj"],
        ),
        others={"down_proj": quantised.quark_mxfp4(), "v_proj|up_proj": None},
    ),
    "llama-quark-rows": Case("llama", SMALL, quantised.quark("uint4", -1)),
    "llama-quark-float8": Case("llama", SMALL, quantised.quark_float8("per_tensor", is_rounded=True)),
    "bloom-quark-eight-bits": Case("bloom", {"n_layer": 2}, quantised.quark("int8", 32)),
    "llama-torchao": Case("llama", SMALL, quantised.torchao("Int4Tensor")),
    "llama-torchao-head": Case(
        "llama", SMALL | {"vocab_size": 104}, also="lm_head",
        how=with_config(quantised.torchao("Int4PlainInt32Tensor"), include_input_output_embeddings=True),
    ),
    "bloom-torchao-bytes": Case("bloom", {"n_layer": 2}, quantised.torchao("IntxUnpackedToInt8Tensor")),
    "t5-torchao-floats": Case("t5-gated", T5_SMALL, quantised.torchao("Float8Tensor", group=-1)),
    "mixtral-torchao-bytes": Case("mixtral", SMALL, quantised.torchao("IntxUnpackedToInt8Tensor")),
    "mixtral-quark-mxfp4": Case("mixtral", SMALL, quantised.quark_mxfp4()),
    "mistral-awq": Case("mistral", SMALL, quantised.awq(32)),
    "mistral-float8-blocks": Case("mistral", SMALL, quantised.float8("fp8", "block")),
    "mistral-fp4": Case("mistral", SMALL | BLOCKS, quantised.bitsandbytes("fp4", is_nested=False)),
    # one projection for queries, keys and values; ALiBi; three groups, as 2, 4 and 8 ranks cut the 107 of 13B
    "baichuan-gptq": Case("baichuan-13b", {}, quantised.gptq(4, 16)),
    "baichuan-packed": Case("baichuan-13b", {}, quantised.compressed_packed(4, 16, is_symmetric=True)),
    # an encoder, layers that attend to it
    "t5-gptq": Case("t5-gated", T5_SMALL, quantised.gptq(8, -1, version=2)),
    "t5-float8": Case("t5", T5_SMALL, quantised.float8("compressed-tensors", "channel")),
    "t5-eight-bits": Case("t5", T5_SMALL, quantised.bitsandbytes_int8()),
    # experts
    "mixtral-awq": Case("mixtral", SMALL, quantised.awq(-1)),
    "mixtral-mxfp4": Case("mixtral", SMALL, quantised.mxfp4()),
    "mixtral-int8": Case("mixtral", SMALL, quantised.compressed_int8(is_fixed=False)),
    "mixtral-gptq": Case("mixtral", SMALL, quantised.gptq(4, 32, is_ordered=False)),
    # compressed keys and values, whose expanding matrix becomes dense
    "deepseek-float8-blocks": Case("deepseek_v3", SMALL, quantised.float8("fp8", "block")),
    "deepseek-gptq": Case("deepseek_v2", SMALL, quantised.gptq(4, 8, is_ordered=False)),
    # layers that are left dense, or stored in another way than their neighbours
    "llama-awq-mixed": Case(
        "llama", SMALL, with_config(quantised.awq(32), modules_to_not_convert=["up_proj", "layers.1.self_attn"]),
        others={"up_proj|layers.1.self_attn": None},
    ),
    "llama-gptq-mixed": Case(
        "llama", SMALL, with_config(quantised.gptq(4, 32), dynamic=BY_NAME),
        others={"down_proj": None, "gate_proj|v_proj": quantised.gptq(8, -1)},
    ),
    "mixtral-router": Case("mixtral", SMALL, quantised.bitsandbytes_int8(), also=r"\.gate\."),
    # tables of embeddings in few bits, alone and tied to the head
    "llama-packed-table": Case(
        "llama", SMALL, also="embed_tokens",
        how=with_targets(quantised.compressed_packed(4, 32, is_symmetric=False), "Linear", "Embedding"),
    ),
    "llama-packed-tied": Case(
        "llama-biased-tied", SMALL, also="embed_tokens",
        how=with_targets(quantised.compressed_packed(8, -1, is_symmetric=True), "Linear", "Embedding"),
    ),
    # a head of its own in few bits
    "llama-gptq-head": Case(
        "llama", SMALL | {"vocab_size": 104}, with_config(quantised.gptq(4, 32), lm_head=True), also="lm_head"
    ),
}  # fmt: skip


def save(name: str, folder: Path) -> dict[str, Layer]:
    """The checkpoint of a pair in `folder`/quantised, what it stands for in `folder`/dense; its layers by name."""
    case = PAIRS[name]
    (folder / "source").mkdir(parents=True)
    if case.family in CASES:
        save_tiny(case.family, folder / "source", **case.changes)
    else:
        save_published(case.family, folder / "source")
    return quantised.quantise(folder / "source", folder, case.how, also=case.also, others=case.others)


def in_pairs(*choices: Sequence[Any]) -> list[Any]:
    """All combinations, for `parametrize`: in the suite a few that have every two choices together.

    The others are run by `make test-formats`.
    """
    product = list(itertools.product(*choices))
    pairs = {one: set(itertools.combinations(enumerate(one), 2)) for one in product}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(product, key=lambda one: len(pairs[one] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [pytest.param(*one, marks=[] if one in chosen else [pytest.mark.formats]) for one in product]


Quantised = Callable[[str], tuple[Path, dict[str, Layer]]]


def logits(folder: Path) -> Tensor:
    """Of a checkpoint, for a prompt and what could follow it."""
    return all_logits(load_engine(folder, warms_up=False), prompt_of(1), prompt_of(2, 4))


def prompt_of(seed: int, length: int = 12) -> list[int]:
    """Token ids that every vocabulary here has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 100, (length,), generator=generator).tolist()
