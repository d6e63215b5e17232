"""Published quantised checkpoints, loaded by every rank on the meta device: names and shapes, and no weights.

The tensors are those of `../real_shapes/*.json`, each linear layer's taken apart as its format defines it, with the
tensors that publishers store besides. So it shows that none is missing or left over at any world size, that the ranks
together read every number, and that a rank reads its share. Left out: contents (`test_checkpoints.py`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from server.arch import families
from server.arch.spec import validate
from server.backends.cpu.device import CpuDevice
from server.backends.protocol import LinearFormat, Maximum
from server.backends.reference import ReferenceBackend
from server.checkpoint import formats
from server.checkpoint.weights import CheckpointError, Weights
from server.model.load import load as load_model
from server.quantisation.stored import QuantisedWeight
from server.ranks.collectives import Shard
from tests.server.model.test_real_shapes import (
    EXPECTED,
    META,
    REPLICATED,
    FakeCheckpoint,
    Published,
    Region,
    Shape,
    ShapeTensor,
)

Tensors = dict[str, tuple[Shape, torch.dtype]]  # of a layer, by suffix
FLOAT8, HALF, BRAIN, WORDS = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.int32
LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj\.weight$|\.(W_pack|kv_a_proj_with_mqa)\.weight$")
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}


def gptq(rows: int, inputs: int) -> Tensors:
    """4 bits, groups of 128."""
    return {"qweight": ((inputs // 8, rows), WORDS), "qzeros": ((-(-inputs // 128), rows // 8), WORDS),
            "scales": ((-(-inputs // 128), rows), HALF), "g_idx": ((inputs,), WORDS)}  # fmt: skip


def awq(rows: int, inputs: int) -> Tensors:
    """4 bits, groups of 128."""
    return {"qweight": ((inputs, rows // 8), WORDS), "qzeros": ((inputs // 128, rows // 8), WORDS),
            "scales": ((inputs // 128, rows), HALF)}  # fmt: skip


def int8(rows: int, inputs: int) -> Tensors:
    return {"weight": ((rows, inputs), torch.int8), "weight_scale": ((rows, 1), BRAIN)}


def float8(rows: int, inputs: int) -> Tensors:
    return {"weight": ((rows, inputs), FLOAT8), "weight_scale": ((), BRAIN), "input_scale": ((), BRAIN)}


def int4(rows: int, inputs: int) -> Tensors:
    """Groups of 32."""
    return {"weight_packed": ((rows, inputs // 8), WORDS), "weight_scale": ((rows, inputs // 32), BRAIN)}


def float8_blocks(rows: int, inputs: int) -> Tensors:
    return {"weight": ((rows, inputs), FLOAT8), "weight_scale_inv": ((-(-rows // 128), -(-inputs // 128)), BRAIN)}


FEW = 8


class Model(NamedTuple):
    """A published checkpoint: what became of a dense one's layers; needless: what each has besides, of its rows."""

    dense: str
    config: Mapping[str, Any]
    layer: Callable[[int, int], Tensors]
    changes: Mapping[str, Any] = MappingProxyType({})
    needless: Sequence[str] = ()
    is_ordered: bool = True
    linear: re.Pattern[str] = LINEAR
    world_sizes: Shape = (1, 2, 4, 8)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "damp_percent": 0.1, "model_seqlen": 4096}
MODELS = {
    "mistral-7b-instruct-awq": Model(
        "mistral-7b-v0.1",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        awq,
        {"rope_theta": 1000000.0, "sliding_window": None},
    ),
    "baichuan2-13b-gptq-act-order": Model(
        "baichuan2-13b", GPTQ | {"desc_act": True}, gptq, needless=["bias"], is_ordered=False
    ),
    "llama-3-8b-w8a8": Model(
        "llama-3-8b",
        {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8, "output_activations": None,
                                       "input_activations": INT8 | {"strategy": "token", "dynamic": True}}}},
        int8,
    ),
    "llama-3-8b-fp8": Model(
        "llama-3-8b", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, float8
    ),
    "qwen2.5-7b-gptq-int4": Model(
        "qwen2-7b", GPTQ | {"desc_act": False}, gptq,
        {"max_position_embeddings": 32768, "sliding_window": 131072}, ["bias"], world_sizes=(1, 2, 4),  # 28 heads
    ),
    "qwen3-8b-fp8": Model(
        "qwen3-8b",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        float8_blocks,
    ),
    "kimi-k2.5-int4": Model(  # of experts alone, and said in the text half
        "kimi-k2.5",
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
         "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
         "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None,
                                       "weights": INT4}}},
        int4, needless=["weight_shape"], linear=re.compile(r"experts\.\d+\.\w+\.weight$"),
    ),
    "kimi-k2-fp8": Model(
        "kimi-k2",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        float8_blocks,
    ),
}  # fmt: skip


def tensors_of(model: Model) -> tuple[dict[str, Any], Tensors]:
    """config.json, and the tensors of the checkpoint by name. Two layers stand for all, and `FEW` experts for many."""
    published = Published.read(model.dense)
    changed = (
        {"n_routed_experts": FEW} | model.changes | {"num_hidden_layers": 2, "quantization_config": dict(model.config)}
    )
    text = published.config.get("text_config")
    config = published.config | ({"text_config": text | changed} if text else changed)
    found: Tensors = {}
    for name, shape in published.shapes.items():
        if (layer := re.search(r"layers\.(\d+)\.", name)) and int(layer[1]) >= 2:
            continue
        if (expert := re.search(r"experts\.(\d+)\.", name)) and int(expert[1]) >= FEW:
            continue
        if not model.linear.search(name):
            found[name] = ((FEW, *shape[1:]) if ".mlp.gate." in name else shape, HALF)
            continue
        stem = name.removesuffix(".weight")
        found |= {f"{stem}.{suffix}": stored for suffix, stored in model.layer(*shape).items()}
        found |= {f"{stem}.{suffix}": ((shape[0],), HALF) for suffix in model.needless}
    return config, found


class TypedTensor(ShapeTensor):
    """A tensor of a file without contents, of a dtype."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        super().__init__(shape)
        self.dtype = dtype

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return super().__getitem__(slices).to(self.dtype)


class QuantisedCheckpoint(FakeCheckpoint):
    """Has contents only where loading asks for them: the groups of inputs, and single numbers."""

    def __init__(self, tensors: Tensors, *, is_ordered: bool):
        super().__init__({name: shape for name, (shape, _) in tensors.items()})
        self.tensors: dict[str, ShapeTensor] = {name: TypedTensor(*stored) for name, stored in tensors.items()}
        self._is_ordered = is_ordered

    def read(self, name: str, shape: Shape, **how: Any) -> Tensor:
        if not shape:
            assert () == self.tensors[name].shape
            self._read.add(name)
            return torch.tensor(1.0, dtype=HALF)
        found = super().read(name, shape, **how)
        if not name.endswith(".g_idx"):
            return found
        groups = torch.arange(shape[0]) // 128
        return (groups if self._is_ordered else groups[torch.randperm(shape[0])]).int()

    def zeros(self, patterns: Sequence[str]) -> list[str]:
        return [n for n in self.tensors if n not in self._read and any(re.search(p, n) for p in patterns)]


class WithoutRounding(ReferenceBackend):
    """Looks at no contents: there are none."""

    def quantised(self, weight: QuantisedWeight, *, is_gated: bool, maximum: Maximum | None) -> LinearFormat:
        return super().quantised(replace(weight, inputs=None), is_gated=is_gated, maximum=maximum)


@pytest.fixture(autouse=True)
def without_contents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What has no contents is as equal as its shape."""
    monkeypatch.setattr("server.checkpoint.weights.PIECE_BYTES", 1 << 62)
    monkeypatch.setattr(
        "server.quantisation.stored._is_equal",
        lambda one, other: one is other if one is None or other is None else one.shape == other.shape,
    )
    yield


def load(model: Model, config: Mapping[str, Any], tensors: Tensors, shard: Shard) -> QuantisedCheckpoint:
    """What one rank read. Raises CheckpointError for a missing, an unknown or a misshapen tensor."""
    family, spec = families.find(dict(config))
    validate(spec, shard.world_size)
    checkpoint = QuantisedCheckpoint(tensors, is_ordered=model.is_ordered)
    format = formats.find(Path("published"), config)
    weights = Weights.open(checkpoint, family.names, shard, BRAIN, META, format)
    load_model(weights, spec, WithoutRounding(CpuDevice()))
    return checkpoint


def counts(regions: Sequence[Region], shape: Shape) -> set[int]:
    """How often elements lie in `regions`."""

    def covers(region: Region, cell: tuple[tuple[int, int], ...]) -> bool:
        return all(a <= start and stop <= b for (a, b), (start, stop) in zip(region, cell, strict=True))

    edges = [sorted({0, size, *(edge for region in regions for edge in region[dim])}) for dim, size in enumerate(shape)]
    cells = itertools.product(*(itertools.pairwise(of_dim) for of_dim in edges))
    return {sum(covers(region, cell) for region in regions) for cell in cells}


def is_small(name: str) -> bool:
    """What a rank may read whole: vectors, what the groups or blocks of a layer have one number of, what all hold."""
    return not name.endswith(("qweight", "weight")) or bool(REPLICATED.search(name))


@pytest.mark.parametrize(
    ("name", "world_size"),  # in the suite the most ranks, which divide most
    [
        pytest.param(name, size, marks=[] if size == model.world_sizes[-1] else [pytest.mark.formats])
        for name, model in MODELS.items()
        for size in model.world_sizes
    ],
)
def test_every_rank_reads_its_share_and_all_of_them_everything(name: str, world_size: int) -> None:
    model = MODELS[name]
    assert EXPECTED[model.dense].world_sizes == model.world_sizes
    config, tensors = tensors_of(model)
    published = Published.read(model.dense)
    tensors_read = {name: stored for name, stored in tensors.items() if name not in published.unused}
    ranks = [load(model, config, tensors, Shard(rank, world_size)) for rank in range(world_size)]
    for tensor, (shape, _) in tensors_read.items():
        if not shape or (tensor.endswith(tuple(model.needless)) and tensor not in published.used):
            continue
        regions = [rank.tensors[tensor].regions for rank in ranks]
        assert all(counts(own, shape) <= {0, 1} for own in regions if own), f"a rank reads {tensor} twice"
        assert 0 not in counts([region for own in regions for region in own], shape), f"some of {tensor} is not read"
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors_read.items()}
    whole = sum(size for name, size in sizes.items() if is_small(name))
    share = (sum(sizes.values()) - whole) / world_size
    assert max(rank.bytes_read for rank in ranks) <= 1.01 * share + whole


@pytest.mark.parametrize("name", ["llama-3-8b-w8a8", "qwen2.5-7b-gptq-int4"])
def test_a_tensor_more_or_less_is_noticed(name: str) -> None:
    model = MODELS[name]
    config, tensors = tensors_of(model)
    lost = next(
        n for n in tensors if "layers.1." in n and n.endswith((".scales", ".weight_scale", ".weight_scale_inv"))
    )
    with pytest.raises(CheckpointError, match=r"is missing|do not belong together"):
        load(model, config, {n: stored for n, stored in tensors.items() if n != lost}, Shard())
    more = {f"{lost}_of_nobody": ((1,), HALF)}
    with pytest.raises(CheckpointError, match=f"does not use: {re.escape(lost)}_of_nobody"):
        load(model, config, tensors | more, Shard())
