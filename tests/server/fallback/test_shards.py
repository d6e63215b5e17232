"""What transformers runs batched, divided by its own plan: ranks generate the tokens of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.fallback.asked import UnbatchedError
from server.fallback.linear import Divider, Plan
from server.fallback.load import body_of, outlook
from server.ranks.collectives import Shard
from tests.server.driver import CPU
from tests.server.fallback.cases import make, save, shard_config
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks

# Plain plans; whole rows gathered and split; a head that transformers scales; experts; layers of two sizes.
DIVIDED = ["helium", "flex_olmo", "nemotron", "hyperclovax", "solar_open", "gemma3n_text"]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.rest)])
def test_ranks_generate_the_tokens_of_one(tmp_path: Path, world_size: int) -> None:
    folders = [tmp_path / model_type for model_type in DIVIDED]
    for folder in folders:
        save(folder.name, folder)
    models = [*map(str, folders), f"int8={folders[0]}"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {model: tensor_parallel.tokens(model, Shard()) for model in models}
    torch.set_num_threads(threads)
    for rank in run_ranks(models, world_size, tmp_path / "rendezvous"):
        assert expected == rank


def test_models_that_declare_no_plan_are_refused(tmp_path: Path) -> None:
    save("persimmon", tmp_path)
    with pytest.raises(ValueError, match="because it declares no plan for several shards: leave out --num-shard"):
        outlook(shard_config(tmp_path, world_size=2), torch.float32)


def test_what_shards_cannot_share_evenly_is_refused() -> None:
    model = make("helium", hidden_size=36, head_dim=6, num_attention_heads=6, num_key_value_heads=3)
    body, prefix = body_of(model)
    backend = ReferenceBackend(CpuDevice())
    divider = Divider(backend, Shard(0, 4), Plan(model._tp_plan), torch.float32, CPU, quantise=None)
    with pytest.raises(
        UnbatchedError, match=r"4 shards cannot share the 18 features of layers.0.self_attn.k_proj even"
    ):
        divider.divide(body, f"{prefix}.", model.config)
