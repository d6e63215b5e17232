"""A merged checkpoint: its model computes what the adapter makes of the other, and it is whole or absent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.merge import command, tensors
from server.merge.job import Job
from server.quantize import output_folder
from tests.server.adapters import made
from tests.server.checkpoints import Checkpoints
from tests.server.driver import all_logits, load_engine

PROMPT = [int(i) for i in torch.randint(4, 100, (24,), generator=torch.Generator().manual_seed(1))]


def noise(*shape: int) -> Tensor:
    return 0.2 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def write(folder: Path, adapter: Mapping[str, Tensor], **config: Any) -> Path:
    """An adapter with these tensors, whose names are without what stands before all."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6} | config))
    save_file(
        {f"base_model.model.{n}": t.contiguous() for n, t in adapter.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def merge(model: Path, adapter: Path, output: Path) -> Path:
    command.run(Job(str(model), str(model), str(adapter), str(output), (str(model / "generation_config.json"),)))
    return output


@torch.inference_mode()
def adapted(model: Path, adapter: Path) -> Tensor:
    """The logits of a sequence with the adapter."""
    engine = load_engine(model, adapters=1)
    assert engine.adapters is not None
    key = made.content_key(adapter)
    engine.adapters.prepare(key, adapter)
    engine.adapters.place([(1, key)])
    return all_logits(engine, PROMPT, adapter=1)


@torch.inference_mode()
def logits(model: Path) -> Tensor:
    return all_logits(load_engine(model), PROMPT)


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "mixtral"])
def test_the_merged_model_computes_what_the_adapter_does(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    model, _ = checkpoints(case)
    made.make(model, tmp_path / "adapter", tmp_path / "expected", is_transposed=case == "gpt2")
    found = merge(model, tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits(found), adapted(model, tmp_path / "adapter"), atol=1e-4, rtol=1e-4)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    for name, tensor in load_file(found / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected.pop(name), atol=1e-6, rtol=1e-5)
    assert not expected
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert names == {path.name for path in found.iterdir()}
    assert json.loads((model / "config.json").read_text()) == json.loads((found / "config.json").read_text())


EMBED, HEAD = "model.embed_tokens", "lm_head"
TABLE_LORA = {f"{EMBED}.lora_embedding_A": noise(4, 103), f"{EMBED}.lora_embedding_B": noise(64, 4)}
HEAD_LORA = {f"{HEAD}.lora_A.weight": noise(4, 64), f"{HEAD}.lora_B.weight": noise(103, 4)}
SAME = {f"{HEAD}.lora_A.weight": noise(64, 4).t(), f"{HEAD}.lora_B.weight": noise(4, 103).t()}
TOKENS = {f"{EMBED}.token_adapter.trainable_tokens_delta": noise(2, 64)}


@pytest.mark.parametrize(
    ("adapter", "config", "unties"),
    [
        (TABLE_LORA, {}, True),
        (HEAD_LORA, {}, True),
        (TABLE_LORA | SAME, {"ensure_weight_tying": True}, False),
        (TOKENS, {"trainable_token_indices": [PROMPT[0], 7]}, False),
        ({f"{EMBED}.weight": noise(103, 64)}, {}, True),
        ({"model.norm.weight": noise(64), "model.layers.0.mlp.up_proj.bias": noise(96)}, {}, False),
    ],
)
def test_a_tied_head_stays_what_it_was(
    checkpoints: Checkpoints, tmp_path: Path, adapter: dict[str, Tensor], config: dict[str, Any], unties: bool
) -> None:
    model, _ = checkpoints("llama-biased-tied")
    folder = write(tmp_path / "adapter", adapter, **config)
    found = merge(model, folder, tmp_path / "merged")
    assert unties == (f"{HEAD}.weight" in load_file(found / "model.safetensors"))
    assert unties != json.loads((found / "config.json").read_text())["tie_word_embeddings"]
    torch.testing.assert_close(logits(found), adapted(model, folder), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "llama-biased-tied"])
@pytest.mark.parametrize("num_tokens", [90, 120])
def test_a_vocabulary_becomes_the_adapters(
    checkpoints: Checkpoints, tmp_path: Path, case: str, num_tokens: int
) -> None:
    model, _ = checkpoints(case)
    stored = load_file(model / "model.safetensors")
    both = {EMBED: stored[f"{EMBED}.weight"], HEAD: stored.get(f"{HEAD}.weight", stored[f"{EMBED}.weight"])}
    tables = {
        f"{name}.weight": torch.cat([table[:num_tokens], noise(20, 64)])[:num_tokens] for name, table in both.items()
    }
    found = merge(model, write(tmp_path / "adapter", tables), tmp_path / "merged")
    merged, config = load_file(found / "model.safetensors"), json.loads((found / "config.json").read_text())
    assert num_tokens == config["vocab_size"] == len(merged[f"{EMBED}.weight"])
    assert (case == "llama") == (f"{HEAD}.weight" in merged)
    for name in tables.keys() & merged.keys():
        assert torch.equal(tables[name], merged[name])


def test_large_matrices_are_merged_in_parts(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = checkpoints("gpt2")
    made.make(model, tmp_path / "adapter", tmp_path / "expected", is_transposed=True)
    whole = load_file(merge(model, tmp_path / "adapter", tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(tensors, "CHUNK_NUMBERS", 640)
    monkeypatch.setattr(output_folder, "SHARD_BYTES", 100_000)
    parts = merge(model, tmp_path / "adapter", tmp_path / "parts")
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    assert whole.keys() == index.keys() and len({*index.values()}) > 3
    for name, tensor in whole.items():
        torch.testing.assert_close(load_file(parts / index[name])[name], tensor, atol=1e-6, rtol=1e-6)


def test_weights_stay_in_the_models_dtype(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model, half = checkpoints("llama")[0], tmp_path / "half"
    half.mkdir()
    for name in ("config.json", "generation_config.json"):
        (half / name).write_bytes((model / name).read_bytes())
    stored = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(stored, half / "model.safetensors")
    made.make(half, tmp_path / "adapter", tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    for name, tensor in load_file(merge(half, tmp_path / "adapter", tmp_path / "merged") / "model.safetensors").items():
        assert torch.bfloat16 == tensor.dtype
        torch.testing.assert_close(expected[name].float(), tensor.float(), atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize(
    ("adapter", "config", "expected"),
    [
        ({"model.layers.9.mlp.up_proj.weight": noise(96, 64)}, {}, "is of no layer that adapters can change"),
        ({f"{EMBED}.lora_embedding_A": noise(4, 103), f"{EMBED}.lora_embedding_B": noise(65, 4)}, {}, "ask for 64 x 4"),
        ({"model.layers.0.mlp.up_proj.bias": noise(96)}, {}, "is of a layer that has no bias in the model"),
        ({f"{EMBED}.weight": noise(90, 64), f"{HEAD}.weight": noise(91, 64)}, {}, "has tables of 90 and 91 tokens"),
        ({f"{HEAD}.weight": torch.full((103, 64), float("nan"))}, {}, "has NaN or infinity"),
        (TABLE_LORA, {"peft_type": "LOHA"}, "only LORA is served"),
    ],
)
def test_what_cannot_be_merged_leaves_nothing(
    checkpoints: Checkpoints, tmp_path: Path, adapter: dict[str, Tensor], config: dict[str, Any], expected: str
) -> None:
    folder = write(tmp_path / "adapter", adapter, **config)
    with pytest.raises(ValueError, match=re.escape(expected)):
        merge(checkpoints("llama")[0], folder, tmp_path / "merged")
    assert ["adapter"] == [path.name for path in tmp_path.iterdir()]


def test_nobody_is_sent_from_a_merge_to_a_merge(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, none = str(checkpoints("llama")[0]), {"model.layers.9.mlp.up_proj.weight": noise(96, 64)}
    job = Job(model, model, str(write(tmp_path / "adapter", none)), str(tmp_path / "merged"), ())
    (tmp_path / "job").write_text(job.to_json())
    assert 1 == command.main(str(tmp_path / "job"))
    assert "if it is an adapter of this model, merge it with peft (`merge_and_unload`)" in capsys.readouterr().err


@pytest.mark.parametrize(("case", "table"), [("gpt2", "transformer.wpe"), ("gemma4-e", "model.embed_tokens_per_layer")])
def test_tables_that_are_not_of_the_vocabulary_are_merged(
    checkpoints: Checkpoints, tmp_path: Path, case: str, table: str
) -> None:
    model = checkpoints(case)[0]
    before = load_file(model / "model.safetensors")
    (name,) = (name for name in before if name.endswith(f"{table.rpartition('.')[2]}.weight"))
    down, up = noise(4, before[name].shape[0]), noise(before[name].shape[1], 4)
    adapter = write(tmp_path / "adapter", {f"{table}.lora_embedding_A": down, f"{table}.lora_embedding_B": up})
    after = load_file(merge(model, adapter, tmp_path / "merged") / "model.safetensors")
    torch.testing.assert_close(after[name], before[name] + 6 / 4 * (up @ down).t())
    assert all(torch.equal(tensor, before[other]) for other, tensor in after.items() if other != name)


def test_a_quantised_model_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model, quantised = checkpoints("llama")[0], tmp_path / "quantised"
    quantised.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    }
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the model is quantised, as gptq: merge the adapter into the model that"):
        merge(quantised, write(tmp_path / "adapter", HEAD_LORA), tmp_path / "merged")
