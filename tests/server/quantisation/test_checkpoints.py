"""Quantised checkpoints of whole models, loaded as a shard loads them, against what their codes stand for.

Weight-only formats must give the logits of a dense checkpoint of dequantised weights. Where inputs are rounded too,
each linear layer must compute exactly what its definition says, and the logits be near those of transformers' own model
with every linear layer replaced by that definition: one rounding that falls the other way moves all that follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from server import loading
from server.backends.cpu.device import CpuDevice
from server.backends.device import Device
from server.backends.protocol import Backend
from server.backends.reference import ReferenceBackend
from server.checkpoint import formats
from server.checkpoint.formats.protocol import Part, Tensors
from server.checkpoint.weights import Checkpoint
from tests.server.checkpoints import oracle_of
from tests.server.driver import all_logits, load_engine
from tests.server.quantisation.cases import PAIRS, ROUNDINGS, WEIGHTS, Quantised, prompt_of
from tests.server.quantisation.quantised import Layer
from tests.server.test_service import config_of

ROUNDED = [name for name in PAIRS if "int8" in name or "float8" in name]
WEIGHT_ONLY = [name for name in PAIRS if name not in ROUNDED]
# transformers' experts are no layers of their own.
IN_LAYERS = [name for name in ROUNDED if not name.startswith(("mixtral", "deepseek"))]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Loading a shard sets them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def choose_reference(
    device: Device,
    dtype: torch.dtype,
    *,
    disable_custom_kernels: bool = False,
    cpu_kernels: str = "auto",
    cpu_inputs: str = "rounded",
) -> Backend:
    return ReferenceBackend(device)


def logits(folder: Path, token_ids: list[int], generated: list[int], *, in_stock_operators: bool = True) -> Tensor:
    """Of a shard that is started as the launcher starts it."""
    config = config_of(folder, folder / "socket", dtype="float32", threads=1)
    engine, info = loading.load(config, choose_reference) if in_stock_operators else loading.load(config)
    expected = json.loads((folder / "config.json").read_text()).get("quantization_config", {"quant_method": "dense"})
    method = expected["quant_method"]
    name = {"fbgemm_fp8": "fp8", "modelopt": "compressed-tensors"}.get(method, method)
    assert info.quantize.split(", ")[0] == name or method == "auto-round"
    engine.allocate(256, total_tokens=256)
    return all_logits(engine, token_ids, generated)


@pytest.mark.parametrize("in_stock_operators", [True, False])
@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_in_fewer_bits_give_the_logits_of_what_they_stand_for(
    quantised_models: Quantised, name: str, in_stock_operators: bool
) -> None:
    folder, _ = quantised_models(name)
    asked = prompt_of(1), prompt_of(2, 4)
    engine = load_engine(folder / "dense", warms_up=False)
    found = logits(folder / "quantised", *asked, in_stock_operators=in_stock_operators)
    torch.testing.assert_close(found, all_logits(engine, *asked), rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_layer_that_rounds_its_inputs_equals_its_definition(quantised_models: Quantised, name: str) -> None:
    folder, layers = quantised_models(name)
    config = json.loads((folder / "quantised" / "config.json").read_text())
    format, checkpoint = formats.find(folder / "quantised", config), Checkpoint(folder / "quantised")
    assert format is not None
    for layer_name, layer in layers.items():
        outputs, inputs = size = layer.codes.shape[0], layer.codes.shape[1]
        stored = format.read(Tensors(checkpoint, layer_name), Part(size, [(0, outputs)], (0, inputs)))
        x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(3))
        x *= torch.tensor([[0.1], [1], [3], [9], [0]])
        assert torch.equal(layer.emulated(x), ReferenceBackend(CpuDevice()).linear(stored)(x, None)), layer_name


class Emulated(nn.Module):
    """Stands in for a linear layer of transformers."""

    def __init__(self, layer: Layer, bias: Tensor | None):
        super().__init__()
        self.layer, self.bias, self.weight = layer, bias, nn.Parameter(layer.weight)  # T5 reads the dtype of it

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer.emulated(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("name", IN_LAYERS)
def test_models_that_round_inputs_are_near_their_definition(quantised_models: Quantised, name: str) -> None:
    folder, layers = quantised_models(name)
    config = AutoConfig.from_pretrained(folder / "dense")
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_pretrained(folder / "dense", attn_implementation="eager", dtype=torch.float32).eval()
    for layer_name, layer in layers.items():
        model.set_submodule(layer_name, Emulated(layer, model.get_submodule(layer_name).bias))
    asked = prompt_of(1), prompt_of(2, 4)
    with torch.inference_mode():
        expected = oracle_of(model)(*asked)
    torch.testing.assert_close(logits(folder / "quantised", *asked), expected, rtol=0, atol=ROUNDINGS)
    dense = all_logits(load_engine(folder / "dense", warms_up=False), *asked)
    assert (dense - expected).abs().max() > 2 * ROUNDINGS  # rounding inputs matters, so that the above says something
