"""gpt-oss with its experts in MXFP4, as it is published: whole, on every rank, and by the compiled kernels.

transformers expands the experts of the oracle by its own function.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from server.arch import families
from server.backends.cpu import CpuBackend, Kernels
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.quantised import CodeFormat
from server.backends.reference import ReferenceBackend
from server.backends.reference.quantised import QuantisedFormat
from server.checkpoint import formats
from server.checkpoint.experts import StackedExperts
from server.checkpoint.weights import Checkpoint, Weights
from server.quantisation.rounding import float4_levels
from server.quantisation.stored import QuantisedWeight
from server.ranks.collectives import Shard
from tests.server.checkpoints import Oracle, oracle_of
from tests.server.driver import CPU, Prompt, all_logits, generate, load_engine
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks
from tests.server.tiny import save_tiny

PROMPT = [int(i) for i in torch.randint(4, 103, (48,), generator=torch.Generator().manual_seed(5))]
GROUP = 32
# As openai/gpt-oss-20b has it.
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def rounded(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """matrices [E, F, D] → blocks [E, F, D / 32, 16] and scales [E, F, D / 32] of the nearest numbers in MXFP4."""
    groups = matrices.unflatten(-1, (-1, GROUP)).float()
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = (groups / exponents.exp2()).unsqueeze(-1).sub(float4_levels()).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)


def save_mxfp4(folder: Path) -> Oracle:
    """The tiny gpt-oss with its experts rounded, as the published checkpoints have them; returns its oracle."""
    model = save_tiny("gpt_oss", folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = rounded(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return oracle_of(model)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    return folder, save_mxfp4(folder)


@pytest.fixture(params=["reference", "kernels"])
def kernels_of(request: pytest.FixtureRequest) -> Callable[[], Kernels | None]:
    return lambda: request.getfixturevalue("kernels") if request.param == "kernels" else None


@torch.inference_mode()
def test_logits_equal_those_of_transformers(
    published: tuple[Path, Oracle], kernels_of: Callable[[], Kernels | None]
) -> None:
    folder, oracle = published
    engine = load_engine(folder, kernels=kernels_of())
    (done,) = generate(engine, [Prompt(PROMPT, max_new_tokens=24, chunk=17)])
    expected = oracle(PROMPT, done.tokens)
    torch.testing.assert_close(expected, all_logits(engine, PROMPT, done.tokens), atol=1e-4, rtol=0)
    assert expected[-25:-1].argmax(-1).tolist() == done.tokens


def experts_of(folder: Path, shard: Shard) -> StackedExperts:
    config = json.loads((folder / "config.json").read_text())
    family, spec = families.find(config)
    weights = Weights.open(
        Checkpoint(folder), family.names, shard, torch.float32, CPU, formats.find(folder, config)
    ).of_layer(1)
    return StackedExperts(weights, spec.layers[1].mlp, spec.hidden_size)


@pytest.mark.parametrize("world_size", [2, 4, 8])  # 96 columns: whole groups on 1 rank alone
def test_ranks_divide_experts_in_whichever_groups_they_are(published: tuple[Path, Oracle], world_size: int) -> None:
    folder, _ = published
    whole = experts_of(folder, Shard())
    ranks = [experts_of(folder, Shard(rank, world_size)) for rank in range(world_size)]
    for expert in range(4):
        gates, ups = whole.gate_up(expert).dequantised().chunk(2)
        halves = [rank.gate_up(expert).dequantised().chunk(2) for rank in ranks]
        assert torch.equal(gates, torch.cat([gate for gate, _ in halves]))
        assert torch.equal(ups, torch.cat([up for _, up in halves]))
        downs = [rank.down(expert).dequantised() for rank in ranks]
        assert torch.equal(whole.down(expert).dequantised(), torch.cat(downs, dim=1))
    biases = [rank.gate_up_bias().chunk(2, dim=1) for rank in ranks]
    joined = torch.cat([*(gate for gate, _ in biases), *(up for _, up in biases)], dim=1)
    assert torch.equal(whole.gate_up_bias(), joined)


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.rest)])
def test_ranks_generate_the_tokens_of_one(published: tuple[Path, Oracle], tmp_path: Path, world_size: int) -> None:
    folder, _ = published
    expected = tensor_parallel.tokens(folder, Shard())
    assert [{str(folder): expected}] * world_size == run_ranks([folder], world_size, tmp_path / "rendezvous")


def test_experts_stay_in_4_bits(published: tuple[Path, Oracle], kernels: Kernels) -> None:
    folder, _ = published
    experts = experts_of(folder, Shard())
    weight = experts.gate_up(0)
    assert isinstance(weight, QuantisedWeight)
    fast = CpuBackend(kernels, torch.bfloat16).linear(weight, is_gated=True)
    assert isinstance(fast, CodeFormat)
    # A byte for two codes, and one for each group of 32.
    assert (192 * 64 // 2 + 192 * 64 // GROUP, CodeFormat) == (fast.nbytes, type(fast))
    assert isinstance(ReferenceBackend(CpuDevice()).linear(weight), QuantisedFormat)


@torch.inference_mode()
def test_tokens_in_bfloat16_are_nearly_those_of_float32(published: tuple[Path, Oracle], kernels: Kernels) -> None:
    folder, oracle = published
    engine = load_engine(folder, kernels=kernels, dtype=torch.bfloat16)
    found, expected = all_logits(engine, PROMPT).float(), oracle(PROMPT, [])
    assert (found - expected).abs().mean() < 0.05 * expected.std()
