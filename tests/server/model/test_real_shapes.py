"""The real sizes of published checkpoints, loaded by every rank on the meta device: no weights, no bytes.

`real_shapes/*.json` hold a checkpoint's config.json as published, how many parameters its model card names, and the
names and shapes of its tensors as the headers of its files have them: `{i}` for the layer, `{d}` for one of the first,
`dense`, ones, `{m}` for one of the others, `{n}` for one behind the last, `{f}` for each fourth, which attends, where
the others, `{r}`, are recurrent, and `{e}` for the expert; `numbers` has others, of models whose layers repeat after
`period` of them. What is stored and never used is apart. A rank alone, and every rank of the largest world size that
the model allows, load through the same code as in production; only the files are replaced, and those remember which
part of which tensor was asked for. So it shows that no tensor is missing or unknown, that the parts of all ranks cover
each tensor once, and what a rank would read. Left out: contents (`test_families.py`)."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from server.arch import families
from server.arch.families import Family
from server.arch.recurrences import Mamba2
from server.arch.spec import (
    SHARD_COUNTS,
    Alibi,
    ArchSpec,
    Bucketed,
    LayerSpec,
    Learned,
    Llama3Scaling,
    LongScaling,
    Position,
    ProportionalScaling,
    Rope,
    YarnScaling,
    validate,
)
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint.formats.mxfp4 import Mxfp4Format
from server.checkpoint.formats.protocol import Format
from server.checkpoint.random_weights import RandomCheckpoint
from server.checkpoint.weights import Checkpoint, CheckpointError, ReadAhead, Weights
from server.layers.position import Rotary
from server.model.load import load as load_model
from server.quantisation.configs import Budget
from server.quantisation.sizes import MXFP4_GROUP
from server.ranks.collectives import Shard
from tests.running import ROOT

FOLDER = Path(__file__).parent / "real_shapes"
BENCHMARKED = ROOT / "benchmark" / "cost" / "shapes"
META, DTYPE = torch.device("meta"), torch.bfloat16
IN_FEWER_BITS = re.compile(r"_(blocks|scales)$")  # two parameters of MXFP4 in a byte, and exponents, which are none
MOST_TENSORS = 150  # that are loaded of a checkpoint: its first layers, some of them with numbers of two digits
NUMS_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")  # in configs
BY_LAYER = {"hybrid_override_pattern", "layer_types", "no_rope_layers"}  # in configs, one for each
Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]  # half-open, one for each dimension


class Expected(NamedTuple):
    """What a reader of the published config.json knows about the model."""

    world_sizes: Shape
    position: Position | None  # of the last layer
    windows: tuple[int, int] = (0, 0)  # how many layers have one, and its tokens


EVERY, UP_TO_4 = (1, 2, 4, 8), (1, 2, 4)
OF_GEMMA_4 = Rope(1000000.0, 512, scaling=ProportionalScaling(64))
OF_GPT_OSS = Rope(150000.0, 64, scaling=YarnScaling(32.0, 4096, truncate=False, magnitude=0.1 * math.log(32) + 1))
OF_DEEPSEEK = YarnScaling(40.0, 4096, magnitude=1.0)
EXPECTED = {
    "afm-4.5b": Expected(UP_TO_4, Rope(10000.0, 128)),  # 20 heads; its scaling is left out of the file
    "baichuan2-13b": Expected(EVERY, Alibi()),
    "baichuan2-7b": Expected(EVERY, Rope(10000.0, 128)),
    "bloomz-7b1-mt": Expected(EVERY, Alibi()),
    "c4ai-command-r-v01": Expected(EVERY, Rope(8000000.0, 128, interleaved=True)),
    "c4ai-command-r7b": Expected(EVERY, None, (24, 4096)),
    "chatglm3-6b": Expected(EVERY, Rope(10000.0, 64, interleaved=True)),
    "deepseek-v2": Expected(EVERY, Rope(10000.0, 64, True, OF_DEEPSEEK)),
    "deepseek-v2-lite": Expected(EVERY, Rope(10000.0, 64, True, OF_DEEPSEEK)),
    "deepseek-v3": Expected(EVERY, Rope(10000.0, 64, True, OF_DEEPSEEK)),
    "dots.llm1": Expected(EVERY, Rope(10000000.0, 128)),
    "ernie-4.5-21b-a3b": Expected(UP_TO_4, Rope(500000.0, 128, interleaved=True)),  # 20 heads
    "ernie-4.5-0.3b": Expected(EVERY, Rope(500000.0, 128, interleaved=True)),
    "exaone-4.0-32b": Expected(EVERY, None, (48, 4096)),
    "falcon-40b": Expected(EVERY, Rope(10000.0, 64)),
    "falcon-7b": Expected((1,), Rope(10000.0, 64)),  # 71 heads
    "flan-t5-xl": Expected(EVERY, Bucketed(32, 128, bidirectional=False)),
    "gemma-2-9b": Expected(EVERY, Rope(10000.0, 256), (21, 4096)),
    "gemma-3-1b": Expected(UP_TO_4, Rope(10000.0, 256), (22, 512)),  # 4 heads
    "gemma-4-26b-a4b": Expected(EVERY, OF_GEMMA_4, (25, 1024)),
    "gemma-4-31b": Expected(EVERY, OF_GEMMA_4, (50, 1024)),
    "gemma-4-e2b": Expected(EVERY, OF_GEMMA_4, (28, 512)),
    "gemma-4-e4b": Expected(EVERY, OF_GEMMA_4, (35, 512)),
    "gemma-7b": Expected(EVERY, Rope(10000.0, 256)),
    "glm-4-9b": Expected(EVERY, Rope(10000.0, 64, interleaved=True)),
    "glm-4-9b-0414": Expected(EVERY, Rope(10000.0, 64, interleaved=True)),
    "glm-4.5-air": Expected(EVERY, Rope(1000000.0, 64)),
    "glm-4.7-flash": Expected(UP_TO_4, Rope(1000000.0, 64, interleaved=True)),  # 20 heads
    "gpt-oss-120b": Expected(EVERY, OF_GPT_OSS, (18, 128)),
    "gpt-oss-20b-bf16": Expected(EVERY, OF_GPT_OSS, (12, 128)),  # as others have expanded it
    "gpt-oss-20b": Expected(EVERY, OF_GPT_OSS, (12, 128)),
    "gpt2": Expected(UP_TO_4, Learned(1024)),  # 12 heads
    "granite-3.1-1b-a400m": Expected(EVERY, Rope(1500000.0, 64)),
    "granite-4.0-h-micro": Expected(EVERY, None),
    "granite-4.0-h-tiny": Expected(UP_TO_4, None),  # 12 heads
    "granite-3.1-8b": Expected(EVERY, Rope(10000000.0, 128)),
    "hunyuan-7b": Expected(EVERY, Rope(10000.0 * 1000.0 ** (128 / 126), 128)),
    "kimi-k2": Expected(EVERY, Rope(50000.0, 64, True, YarnScaling(32.0, 4096, 1.0, magnitude=1.0))),
    "kimi-k2.5": Expected(EVERY, Rope(50000.0, 64, True, YarnScaling(64.0, 4096, magnitude=1.0))),
    "lfm2-1.2b": Expected(EVERY, Rope(1000000.0, 64)),
    "lfm2-8b-a1b": Expected(EVERY, Rope(1000000.0, 64)),
    "llama-2-7b": Expected(EVERY, Rope(10000.0, 128)),
    "llama-3-8b": Expected(EVERY, Rope(500000.0, 128)),
    "llama-3.1-8b": Expected(EVERY, Rope(500000.0, 128, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))),
    "llama-4-maverick": Expected(EVERY, None),
    "llama-4-scout": Expected(EVERY, None),
    "mamba-codestral-7b": Expected(EVERY, None),
    "mt0-xxl-mt": Expected(EVERY, Bucketed(32, 128, bidirectional=False)),
    "minimax-m2": Expected(EVERY, Rope(5000000.0, 64)),
    "ministral-3-8b": Expected(EVERY, Rope(1000000.0, 128, scaling=YarnScaling(16.0, 16384, magnitude=1.0))),
    "mistral-small-4": Expected(EVERY, Rope(10000.0, 64, True, YarnScaling(128.0, 8192, magnitude=1.0))),
    "mistral-7b-v0.1": Expected(EVERY, Rope(10000.0, 128), (32, 4096)),
    "mixtral-8x7b": Expected(EVERY, Rope(1000000.0, 128)),
    "mpt-7b": Expected(EVERY, Alibi()),
    "nemotron-nano-9b-v2": Expected(EVERY, None),
    "olmo-2-7b": Expected(EVERY, Rope(500000.0, 128)),
    "olmo-3-7b": Expected(
        EVERY, Rope(500000.0, 128, scaling=YarnScaling(8.0, 8192, magnitude=1.2079441541679836)), (24, 4096)
    ),
    "olmoe-1b-7b": Expected(EVERY, Rope(10000.0, 128)),
    "opt-1.3b": Expected(EVERY, Learned(2048, offset=2)),
    "opt-350m": Expected(EVERY, Learned(2048, offset=2)),
    "phi-3-mini-128k": Expected(EVERY, Rope(10000.0, 96), (32, 262144)),  # its scaling has a test of its own
    "phi-3-mini-4k": Expected(EVERY, Rope(10000.0, 96), (32, 2047)),
    "phi-3.5-moe": Expected(EVERY, Rope(10000.0, 128), (32, 131072)),  # its scaling is left out of the file
    "phi-4": Expected((1, 2), Rope(250000.0, 128)),  # 10 key-value heads
    "phi-4-mini": Expected(EVERY, Rope(10000.0, 96), (32, 262144)),
    "pythia-6.9b": Expected(EVERY, Rope(10000.0, 32)),
    "qwen1.5-moe-a2.7b": Expected(EVERY, Rope(1000000.0, 128)),
    "qwen2-7b": Expected(UP_TO_4, Rope(1000000.0, 128)),  # 28 heads
    "qwen3-30b-a3b": Expected(EVERY, Rope(1000000.0, 128)),
    "qwen3-8b": Expected(EVERY, Rope(1000000.0, 128)),
    "qwen3-next-80b-a3b": Expected(EVERY, Rope(10000000.0, 64)),
    "qwen3.5-0.8b": Expected(EVERY, Rope(10000000.0, 64)),
    "seed-oss-36b": Expected(EVERY, Rope(10000000.0, 128)),
    "smollm3-3b": Expected(EVERY, None),
    "starcoder": Expected(EVERY, Learned(8192)),
    "starcoder2-7b": Expected(UP_TO_4, Rope(1000000.0, 128), (32, 4096)),  # 36 heads
    "t5-large": Expected(EVERY, Bucketed(32, 128, bidirectional=False)),
    "trinity-mini": Expected(EVERY, None, (24, 2048)),
}

# What every rank holds whole: norms, positions, routers, projections of the embedding, and the biases that are added
# after the reduction.
REPLICATED = re.compile(
    r"e_score_correction_bias$|expert_bias$|(^|[._])(ln|norm|layernorm|layer_norm)(_\w+)?\.(weight|bias)$"
    r"|(wpe|embed_positions|project_in|project_out|mlp\.gate|feed_forward\.gate|shared_expert_gate|block_sparse_moe\.(gate|router\.layer))\.weight$"
    r"|\.(q_a_proj|kv_a_proj_with_mqa)\.weight$"
    r"|\.(mlp|feed_forward)\.router\.|\.down_proj_bias$|\.layer_scalar$|\.router\.(proj|scale|per_expert_scale)"
    r"|\.per_layer_(input_gate|projection|model_projection)\."
    r"|\.(dense|dense_4h_to_h|out_proj|o_proj|c_proj|down_proj|fc2)\.bias$"
)
MAMBA_NORM = re.compile(r"\.(mamba|mixer)\.norm\.")
MAMBA_CHANNELS = re.compile(r"\.(mamba|mixer)\.(in_proj|conv1d)\.")
ROW_NORM = re.compile(r"\.[qk]_norm\.")
KEYS_OR_VALUES = re.compile(r"\.[kv]_proj\.")
UNUSED_ROWS = re.compile(r"\.embed_positions\.")  # the two of OPT that belong to no position
GROUPED_INPUTS = re.compile(r"\.down_proj_(blocks|scales)$")  # of groups that are cut, each rank reads the whole
FUSED = re.compile(r"\.(query_key_value|W_pack|qkv_proj|c_attn|Wqkv)\.")


@dataclass(frozen=True)
class Published:
    """One checkpoint, its patterns spelled out."""

    config: dict[str, Any]
    used: dict[str, Shape]
    unused: dict[str, Shape]

    @classmethod
    def read(cls, name: str, most_tensors: int = sys.maxsize) -> Published:
        """The whole checkpoint or, where it has more than `most_tensors`, its first layers: all layers are alike."""
        fixture = json.loads((FOLDER / f"{name}.json").read_text())
        experts = range(fixture["experts"])
        own = {key.strip("{}"): among for key, among in fixture.get("numbers", {}).items()}
        letters = "imrf" + "".join(own)
        per_layer = sum(
            shape[0] if "experts" in pattern and len(shape) == 3 else len(experts) if "{e}" in pattern else 1
            for pattern, shape in fixture["tensors"].items()  # experts in one tensor are read one by one
            if re.search(f"{{[{letters}]}}", pattern)
        )
        is_hybrid = any("{f}" in pattern for pattern in fixture["tensors"])
        dense, period = fixture.get("dense", 0), fixture.get("period", 1)
        has_others = any("{m}" in pattern for pattern in fixture["tensors"])
        kinds = [among[0] + 1 for among in own.values()]  # one layer of each
        least = max([4 if is_hybrid else 2, (1 + dense) * has_others, *kinds])
        count = max(least, period, most_tensors // per_layer // period * period)
        layers = range(fixture["layers"])[:count]
        config = fixture["config"].get("text_config", fixture["config"])
        config |= {key: len(layers) for key in NUMS_LAYERS if key in config}
        config |= {key: config[key][: len(layers)] for key in BY_LAYER & set(config)}

        attending = layers[3::4]
        numbers = {"{i}": layers, "{d}": layers[:dense], "{m}": layers[dense:], "{n}": [len(layers)]}
        numbers |= {"{f}": attending, "{r}": [i for i in layers if i not in attending]}
        numbers |= {f"{{{letter}}}": [i for i in among if i in layers] for letter, among in own.items()}

        def spell_out(patterns: dict[str, list[int]]) -> dict[str, Shape]:
            return {
                re.sub("{[^e]}", str(i), pattern).replace("{e}", str(e)): tuple(shape)
                for pattern, shape in patterns.items()
                for i, e in product(
                    next((numbers[key] for key in numbers if key in pattern), [0]), experts if "{e}" in pattern else [0]
                )
            }

        return cls(fixture["config"], spell_out(fixture["tensors"]), spell_out(fixture["unused"]))

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.used | self.unused


class ShapeTensor:
    """A tensor of a file that has a shape and no contents; `regions` are the parts that were asked for."""

    def __init__(self, shape: Shape, dtype: torch.dtype = DTYPE):
        self.shape = shape
        self.dtype = dtype
        self.regions: list[Region] = []

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        region = tuple(piece.indices(size)[:2] for piece, size in zip(slices, self.shape, strict=False))
        size = [stop - start for start, stop in region]
        if all(size):  # otherwise it is the dtype that is asked for
            self.regions.append(region)
        return torch.empty(size, dtype=self.dtype, device=META)


class NothingAhead(ReadAhead):
    """There are no files."""

    def passed(self, path: Path, name: str) -> None:
        """Nothing is read."""


class FakeCheckpoint(Checkpoint):
    """A checkpoint of shapes: all of `Checkpoint` but the files."""

    def __init__(self, shapes: dict[str, Shape]):
        self.folder = Path("published")
        self.tensors = {
            name: ShapeTensor(shape, torch.uint8 if IN_FEWER_BITS.search(name) else DTYPE)
            for name, shape in shapes.items()
        }
        self.bytes_read = self._mapped = 0
        self._paths = dict.fromkeys(shapes, self.folder / "model.safetensors")
        self._files, self._shared = {}, {}
        self._read = set()
        self._ahead = NothingAhead()

    def _open(self, path: Path) -> FakeCheckpoint:
        return self

    def get_slice(self, name: str) -> ShapeTensor:
        return self.tensors[name]


@pytest.fixture(autouse=True)
def whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are read at once, and codes unpacked: other tests show how, and on the meta device it is only slow."""
    monkeypatch.setattr("server.checkpoint.weights.PIECE_BYTES", 1 << 62)
    monkeypatch.setattr("server.quantisation.packing._bytes_of", unpacked)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes in as many bytes, without values."""
    return words.new_empty(*words.shape[:-1], words.shape[-1] * 32 // bits, dtype=torch.uint8)


def find(name: str, most_tensors: int = sys.maxsize) -> tuple[Published, Family, ArchSpec]:
    published = Published.read(name, most_tensors)
    return published, *families.find(published.config)


def load(shapes: dict[str, Shape], family: Family, spec: ArchSpec, shard: Shard) -> FakeCheckpoint:
    """What one rank read. Raises CheckpointError for a missing, an unknown or a misshapen tensor."""
    checkpoint = FakeCheckpoint(shapes)
    start_up(checkpoint, family, spec, shard, Mxfp4Format({}, Budget()) if family.names.stacks else None)
    return checkpoint


def start_up(
    checkpoint: Checkpoint | RandomCheckpoint,
    family: Family,
    spec: ArchSpec,
    shard: Shard,
    format: Format | None = None,
) -> None:
    weights = Weights.open(checkpoint, family.names, shard, DTYPE, META, format)
    load_model(weights, spec, ReferenceBackend(CpuDevice()))


def reader_counts(regions: Iterable[Region], shape: Shape) -> set[int]:
    """How often elements of a tensor lie in `regions`."""
    regions = list(regions)
    edges = [sorted({0, size, *(e for region in regions for e in region[d])}) for d, size in enumerate(shape)]
    counts = torch.zeros([len(of_dim) - 1 for of_dim in edges], dtype=torch.int)
    for region in regions:
        counts[tuple(slice(*map(of_dim.index, part)) for of_dim, part in zip(edges, region, strict=True))] += 1
    return {int(count) for count in counts.unique()}


def mambas(spec: ArchSpec) -> list[Mamba2]:
    return [kind for kind in spec.recurrences if isinstance(kind, Mamba2)]


def expected_counts(name: str, spec: ArchSpec, world_size: int) -> set[int]:
    """How many ranks hold an element of a tensor: one, or all, or those that share a key-value head."""
    sharers = max(1, world_size // spec.kv_heads(layer_of(name, spec)).count)
    if UNUSED_ROWS.search(name):
        return {0, world_size}
    if spec.qk_row_norm and ROW_NORM.search(name):
        return {sharers if ".k_norm." in name else 1}
    if MAMBA_NORM.search(name):
        return {1}
    if MAMBA_CHANNELS.search(name):
        return {1, *(max(1, world_size // kind.num_groups) for kind in mambas(spec))}
    if REPLICATED.search(name):
        return {world_size}
    if KEYS_OR_VALUES.search(name):
        return {sharers}
    if GROUPED_INPUTS.search(name) and spec.layers[0].mlp.width // world_size % MXFP4_GROUP:
        return {1, 2}
    return {1, sharers} if FUSED.search(name) else {1}


def layer_of(name: str, spec: ArchSpec) -> LayerSpec:
    """The layer that a tensor is of; any, where it is of none."""
    found = re.search(r"\.(\d+)\.", name)
    return spec.layers[min(int(found[1]) if found else 0, spec.num_layers - 1)]


def allowed_bytes(published: Published, spec: ArchSpec, world_size: int) -> float:
    """A rank's share of what is split, all of what is replicated, and 5 %."""
    replicated = sum(math.prod(shape) for name, shape in published.used.items() if REPLICATED.search(name))
    split = sum(math.prod(shape) for shape in published.used.values()) - replicated
    for layer in spec.layers:
        heads = spec.kv_heads(layer)
        if heads.count < world_size and spec.cached(layer) and layer.latent is None:
            one = (2 - layer.keys_are_values) * heads.dim * (spec.hidden_size + spec.qkv_bias)  # keys and values
            split, replicated = split - heads.count * one, replicated + one
    for kind in mambas(spec):
        if kind.num_groups < world_size:
            one_group = 2 * kind.key_dim * spec.hidden_size  # its keys and queries
            split, replicated = split - kind.num_groups * one_group, replicated + one_group
    return 1.05 * DTYPE.itemsize * (split / world_size + replicated)


def parameters_of(tensor: str, shape: Shape) -> int:
    return 0 if tensor.endswith("_scales") else math.prod(shape) * (2 if tensor.endswith("_blocks") else 1)


def test_every_fixture_is_expected_and_has_as_many_parameters_as_published() -> None:
    assert set(EXPECTED) == {path.stem for path in FOLDER.glob("*.json")}
    for name in EXPECTED:
        parameters = json.loads((FOLDER / f"{name}.json").read_text())["parameters"]
        shapes = Published.read(name).used.items()
        assert parameters == sum(parameters_of(tensor, shape) for tensor, shape in shapes), name


@pytest.mark.parametrize(
    ("name", "world_size"),  # the most ranks, which divide most and share the most kv heads, and one, which reads all
    sorted({(name, n) for name, expected in EXPECTED.items() for n in (1, expected.world_sizes[-1])}),
)
def test_all_ranks_together_read_every_tensor_once(name: str, world_size: int) -> None:
    published, family, spec = find(name, MOST_TENSORS)
    ranks = [load(published.shapes, family, spec, Shard(rank, world_size)) for rank in range(world_size)]
    for tensor, shape in published.used.items():
        regions = [rank.tensors[tensor].regions for rank in ranks]
        assert all(reader_counts(own, shape) <= {0, 1} for own in regions), f"a rank reads {tensor} twice"
        counts = reader_counts((region for own in regions for region in own), shape)
        assert expected_counts(tensor, spec, world_size) == counts, tensor
    assert not any(rank.tensors[tensor].regions for rank in ranks for tensor in published.unused)
    assert max(rank.bytes_read for rank in ranks) <= allowed_bytes(published, spec, world_size)


@pytest.mark.parametrize("name", EXPECTED)
def test_world_sizes_that_do_not_divide_a_real_model_are_refused(name: str) -> None:
    _, _, spec = find(name)
    possible = EXPECTED[name].world_sizes
    for world_size in SHARD_COUNTS:
        if world_size in possible:
            validate(spec, world_size)
        else:
            with pytest.raises(ValueError, match=f"use --num-shard {' or '.join(map(str, possible))}$"):
                validate(spec, world_size)


@pytest.mark.parametrize("name", EXPECTED)
def test_published_configs_are_read_as_meant(name: str) -> None:
    _, _, spec = find(name)
    expected, last = EXPECTED[name], spec.layers[-1].position
    windows = [layer.window for layer in spec.layers if layer.window]
    assert expected.windows == (len(windows), max(windows, default=0))
    if isinstance(last, Rope) and isinstance(last.scaling, LongScaling):
        last = Rope(last.theta, last.dim)
    assert expected.position == last


# Whose configs today's transformers does not know, or refuses.
NOT_WRITTEN_AGAIN = {
    *("baichuan2-13b", "baichuan2-7b", "chatglm3-6b", "kimi-k2"),
    *("llama-4-maverick", "llama-4-scout", "phi-3-mini-128k"),
}


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - NOT_WRITTEN_AGAIN))
def test_published_configs_are_read_as_meant_when_transformers_has_written_them_again(
    name: str, tmp_path: Path
) -> None:
    published, _, spec = find(name)
    AutoConfig.for_model(**published.config).save_pretrained(tmp_path)
    assert spec == families.find(json.loads((tmp_path / "config.json").read_text()))[1]


@pytest.mark.parametrize(
    ("name", "length"), [("llama-3.1-8b", 9000), ("phi-3-mini-128k", 100), ("phi-3-mini-128k", 9000)]
)
def test_scaled_rotations_equal_those_of_transformers(name: str, length: int) -> None:
    published, _, spec = find(name)
    rope = spec.layers[0].position
    assert isinstance(rope, Rope)
    settings = published.config | {"rope_scaling": current_scaling(published.config)}
    config = AutoConfig.for_model(**settings)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu", seq_len=length)
    turned = Rotary(rope, torch.device("cpu"))(torch.tensor([17]), torch.tensor([length]))
    torch.testing.assert_close((17 * frequencies).cos() * magnitude, turned.cos[0, 0])
    torch.testing.assert_close((17 * frequencies).sin() * magnitude, turned.sin[0, 0])


def current_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """A published `rope_scaling` as transformers spells it today."""
    scaling = dict(config["rope_scaling"])
    kind = scaling.pop("type", None) or scaling.pop("rope_type")
    trained = scaling.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    return scaling | {"rope_type": {"su": "longrope"}.get(kind, kind), "original_max_position_embeddings": trained}


@pytest.mark.parametrize("path", sorted(BENCHMARKED.glob("*.json")), ids=lambda path: path.stem)
def test_benchmarked_shapes_start_up_at_every_world_size(path: Path) -> None:
    family, spec = families.find(json.loads(path.read_text()))
    with META:
        checkpoint = RandomCheckpoint(DTYPE)
    for world_size in SHARD_COUNTS:
        validate(spec, world_size)
    start_up(checkpoint, family, spec, Shard(world_size - 1, world_size))
    published = {"mistral-7b": "mistral-7b-v0.1"}.get(path.stem, path.stem)
    assert published not in EXPECTED or spec == find(published)[2]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_prefix_that_a_family_knows_fits_its_real_names(name: str) -> None:
    published, family, spec = find(name, MOST_TENSORS)
    embed = family.names.roles["embed"]
    own = next(prefix for prefix in family.names.prefixes if f"{prefix}{embed}.weight" in published.used)
    heads = {n for n in published.shapes if n.startswith(("lm_head.", "embed_out."))}  # these stand without it
    for prefix in set(family.names.prefixes) - {own}:
        renamed = {
            prefix + n.removeprefix(own) if n.startswith(own) and n not in heads else n: s
            for n, s in published.shapes.items()
        }
        load(renamed, family, spec, Shard(0, EXPECTED[name].world_sizes[-1]))  # raises what is missing or left over
    unknown = {n if n in heads else f"unknown.{n}": s for n, s in published.shapes.items()}
    with pytest.raises(CheckpointError, match="with or without a prefix"):
        load(unknown, family, spec, Shard(0, EXPECTED[name].world_sizes[-1]))


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "mixtral-8x7b"])
def test_a_tensor_more_or_less_is_noticed(name: str) -> None:
    published, family, spec = find(name, MOST_TENSORS)
    known = list(published.used)[len(published.used) // 2]
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(known)} is missing"):
        load({n: s for n, s in published.used.items() if n != known}, family, spec, Shard())
    with pytest.raises(CheckpointError, match=f"does not use.*{re.escape(known)}_scale"):
        load(published.used | {f"{known}_scale": (1,)}, family, spec, Shard())


def test_the_fake_keeps_the_contract_of_a_checkpoint(tmp_path: Path) -> None:
    shapes = {"a.weight": (4, 6), "b.weight": (8,)}
    save_file({name: torch.zeros(shape, dtype=DTYPE) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    for checkpoint in (Checkpoint(tmp_path), FakeCheckpoint(shapes)):
        assert "a.weight" in checkpoint
        assert "c.weight" not in checkpoint
        assert (4, 2) == tuple(checkpoint.read("a.weight", (4, 6), dim=1, part=(2, 4)).shape)
        assert (4, 6) == tuple(checkpoint.read("a.weight", (4, 6)).shape)
        assert 16 + 48 == checkpoint.bytes_read
        assert [f"b.weight in {checkpoint.folder / 'model.safetensors'}"] == checkpoint.leftovers(())
        assert [] == checkpoint.leftovers((r"^b\.",))
        with pytest.raises(CheckpointError, match=r"tensor c\.weight is missing"):
            checkpoint.read("c.weight", (1,))
        with pytest.raises(CheckpointError, match=r"shape \[8\], but config.json says \[9\]"):
            checkpoint.read("b.weight", (9,))
