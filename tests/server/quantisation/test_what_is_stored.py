"""What a quantised checkpoint holds besides codes, what it leaves dense, and one whose weights are random.

Whole models with such layers are among the pairs of `cases.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.arch import families
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint import formats
from server.checkpoint.weights import RandomCheckpoint, Weights
from server.model.load import load as load_model
from server.quantisation import sizes
from server.quantisation.packing import PackedCodes, joined_outputs, packed_inputs, unpack, unpacked
from server.quantisation.stored import QuantisedWeight, padded, with_unit_rows
from server.ranks.collectives import Shard
from tests.server.driver import CPU, all_logits, load_engine
from tests.server.quantisation.cases import PAIRS, Quantised, prompt_of

NEEDLESS = {
    "llama-gptq-2": {"mlp.down_proj.bias": torch.zeros(64), "self_attn.k_proj.bias": torch.zeros(32)},
    "llama-int8-fixed": {"self_attn.k_scale": torch.ones(1), "self_attn.v_scale": torch.ones(1)},
    "llama-packed": {"self_attn.k_proj.output_scale": torch.ones(1)},
    "llama-float8": {"self_attn.kv_scale": torch.tensor(1.0)},
    "llama-float8-rows": {"mlp.up_proj.input_scale_ub": torch.tensor([1200.0])},
    "mistral-float8-blocks": {"mlp.up_proj.input_scale": torch.tensor(1.0)},  # of inputs that are rounded dynamically
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDLESS)
def test_tensors_that_nobody_needs_are_skipped(quantised_models: Quantised, tmp_path: Path, name: str) -> None:
    folder = quantised_models(name)[0] / "quantised"
    shutil.copy(folder / "config.json", tmp_path)
    extra = {f"model.layers.0.{suffix}": tensor for suffix, tensor in NEEDLESS[name].items()}
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: t for name, t in extra.items() if name not in tensors}, tmp_path / "model.safetensors")
    expected, found = (all_logits(load_engine(f, warms_up=False), prompt_of(1)) for f in (folder, tmp_path))
    assert torch.equal(expected, found)


def of_model(folder: Path, config: Mapping[str, object] | None = None) -> dict[str, type]:
    """What each linear layer of a model of random weights is stored as."""
    hf_config = json.loads((folder / "config.json").read_text())
    if config is not None:
        hf_config["quantization_config"] = config
    family, spec = families.find(hf_config)
    found: dict[str, type] = {}

    class Recording(Weights):
        def linear(self, role, size, **parts):  # type: ignore[no-untyped-def]
            stored = super().linear(role, size, **parts)
            found.setdefault(role, type(stored))
            return stored

    checkpoint = RandomCheckpoint(torch.float16, sizes.of_config(hf_config))
    weights = Recording.open(checkpoint, family.names, Shard(), torch.float32, CPU, formats.find(folder, hf_config))
    load_model(weights, spec, ReferenceBackend(CpuDevice()))
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_random_weights_have_the_format_of_the_config(quantised_models: Quantised, name: str) -> None:
    found = of_model(quantised_models(name)[0] / "quantised")
    dense = {role for role, kind in found.items() if kind is Tensor}
    named = {
        "llama-awq-mixed": {"mlp_up"},
        "llama-gptq-mixed": {"mlp_down"},
        "llama-quark-mixed": {"mlp_up", "v"},
    }.get(name, set())
    head = set() if "head" in name else {"head"}
    assert dense == (named | head | {"router"}) & set(found)


def test_config_names_the_blocks_that_are_quantised(quantised_models: Quantised) -> None:
    config = dict(PAIRS["llama-gptq-2"].how.config)
    config["modules_in_block_to_quantize"] = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    found = of_model(quantised_models("llama-gptq-2")[0] / "quantised", config)
    assert {"q", "k", "mlp_down"} == {role for role, kind in found.items() if kind is QuantisedWeight}


def small() -> QuantisedWeight:
    codes = torch.tensor([[3, 4], [0, 7], [5, 5]], dtype=torch.uint8)
    scale, zero = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[0.0, 0], [1, 2], [5, 5]])
    return QuantisedWeight(codes, 4, scale, torch.tensor([0, 1]), zero=zero)


def test_rows_of_padding_are_zeros() -> None:
    for weight in (small(), small().dequantised()):
        found = padded(weight, 2)
        values = found if isinstance(found, Tensor) else found.dequantised()
        assert torch.equal(torch.cat([small().dequantised(), torch.zeros(2, 2)]), values)


def test_rows_of_a_quantised_head_are_made_as_long_as_1() -> None:
    found = with_unit_rows(small())
    assert isinstance(found, QuantisedWeight)
    expected = with_unit_rows(small().dequantised())
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(expected, found.dequantised())
    assert [1, 1, 0] == expected.norm(dim=1).round(decimals=5).tolist()


def four_bits(outputs: int) -> PackedCodes:
    return PackedCodes((torch.arange(2 * outputs, dtype=torch.int32).view(2, outputs),), 4)


def test_outputs_of_parts_stay_packed_where_these_are_packed_alike() -> None:
    parts = [four_bits(3), four_bits(5)]
    together = joined_outputs(parts)
    assert isinstance(together, PackedCodes)
    assert (8, 16) == together.shape
    expected = torch.cat([part.unpacked() for part in parts])
    assert torch.equal(expected, together.unpacked())
    for other in (parts[1].unpacked(), PackedCodes((torch.ones(16, 1, dtype=torch.int32),), 4, tuple(range(8)))):
        mixed = joined_outputs([parts[0], other])
        assert isinstance(mixed, Tensor)
        assert torch.equal(torch.cat([parts[0].unpacked(), unpacked(other)]), mixed)


def test_codes_are_unpacked_where_a_unit_of_words_is_cut_or_runs_on() -> None:
    words = torch.arange(96, dtype=torch.int32).view(6, 16)
    assert isinstance(packed_inputs(words, 4, slice(0, 48)), PackedCodes)
    for bits, inside in ((4, slice(3, 48)), (3, slice(0, 64))):
        found = packed_inputs(words, bits, inside)
        assert isinstance(found, Tensor)
        assert torch.equal(unpack(words.t(), bits, dim=1)[:, inside], found)
