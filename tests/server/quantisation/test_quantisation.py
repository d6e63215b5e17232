"""What `--quantize` and a checkpoint's own config say together: who wins, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.cost import shapes
from server import config
from server.checkpoint.formats import IN_FLIGHT, choose
from server.quantisation import sizes
from server.quantisation.exclusions import NAMED
from tests.running import ROOT

PAGE = ROOT / "docs" / "quantized-models.md"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    }},
}  # fmt: skip
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
    }},
}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "wanted", "description"),
    [
        (GPTQ, None, "gptq, 4 bits, groups of 128"),
        (GPTQ, "gptq", "gptq, 4 bits, groups of 128"),
        (GPTQ | {"bits": 8, "group_size": -1}, None, "gptq, 8 bits"),
        (AWQ, "awq", "awq, 4 bits, groups of 128"),
        (NF4, "bitsandbytes", "bitsandbytes, 4 bits, groups of 64"),
        (NF4, "bitsandbytes-nf4", "bitsandbytes, 4 bits, groups of 64"),
        (LLM_INT8, "bitsandbytes", "bitsandbytes, 8 bits"),
        (FP8, "fp8", "fp8, 8 bits, groups of 128, 8-bit inputs"),
        (W8A8, "int8", "compressed-tensors, 8 bits, 8-bit inputs"),
        (W4A16, "compressed-tensors", "compressed-tensors, 4 bits, groups of 64"),
    ],
)
def test_what_the_checkpoint_says_wins(
    tmp_path: Path, stored: dict[str, Any], wanted: str | None, description: str
) -> None:
    chosen = choose(wanted, tmp_path, {"quantization_config": stored})
    assert (description, None, None) == (chosen.description, chosen.quantise, chosen.quantise_head)
    assert chosen.format is not None and chosen.name == chosen.format.name == stored["quant_method"]


def test_the_file_beside_an_older_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 64, "desc_act": True}))
    assert "gptq, 3 bits, groups of 64" == choose(None, tmp_path, {}).description


@pytest.mark.parametrize(
    ("stored", "wanted", "words"),
    [
        (GPTQ, "awq", "--quantize is awq, but the checkpoint is quantised already, as gptq, 4 bits, groups of 128"),
        (GPTQ, "int8", "--quantize is int8, but the checkpoint is quantised already, as gptq"),
        (NF4, "bitsandbytes-fp4", "--quantize is bitsandbytes-fp4, but the checkpoint is quantised already, as bitsa"),
        (W4A16, "int8", "--quantize is int8, but the checkpoint is quantised already, as compressed-tensors, 4 bits"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(tmp_path: Path, stored: dict[str, Any], wanted: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(wanted, tmp_path, {"quantization_config": stored})


@pytest.mark.parametrize("wanted", sorted(set(config.QUANTIZE) - IN_FLIGHT.keys()))
def test_a_format_of_checkpoints_needs_one(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(
        ValueError, match=rf"--quantize is {wanted}, but .* no `quantization_config`: .* or one of int8"
    ):
        choose(wanted, tmp_path, {})


def test_every_name_of_the_setting_is_served_and_described(tmp_path: Path) -> None:
    assert set(config.QUANTIZE) == IN_FLIGHT.keys() | sizes.READERS.keys() - {"fbgemm_fp8"}
    assert IN_FLIGHT.keys() == sizes.IN_FLIGHT.keys()
    for name in IN_FLIGHT:
        for head in config.QUANTIZE_HEADS:
            chosen = choose(name, tmp_path, {}, head)
            assert chosen.storage == sizes.described(chosen.description), name
            assert (chosen.quantise_head is not None) == (head == "int8" and name in ("int8", "int4"))
    assert "int4, 4 bits, groups of 128, head in int8" == choose("int4", tmp_path, {}).description
    assert "dense" == choose(None, tmp_path, {}).description
    assert sizes.described("dense") is None


def test_layers_that_a_config_leaves_out_are_dense() -> None:
    for key in NAMED:
        storage = sizes.of_config({"quantization_config": AWQ | {key: ["lm_head", "layers.0.mlp", r"re:.*gate$"]}})
        assert storage is not None
        assert storage.leaves_out("model.layers.0.mlp.up_proj") and storage.leaves_out("model.layers.3.moe.gate")
        assert not storage.leaves_out("model.layers.10.mlp.up_proj") and not storage.leaves_out("mlp.gate_proj")
    dynamic = sizes.of_config({"quantization_config": GPTQ | {"dynamic": {"-:.*attn.*": {}, "+:.*": {"bits": 8}}}})
    assert dynamic is not None and dynamic.leaves_out("model.attn.q") and not dynamic.leaves_out("model.mlp.up")


# A config, and which of these layers it leaves dense: plans and readers are told the same.
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate", "lm_head")
LEFT_OUT: list[tuple[dict[str, Any], list[bool]]] = [
    (GPTQ, [False, False, True, True]),
    (GPTQ | {"lm_head": True}, [False, False, True, False]),
    (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, [False, True, True, True]),
    (GPTQ | {"modules_in_block_to_quantize": ["q_proj"], "lm_head": True}, [False, True, True, False]),
    (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}, "-:.*proj": {}}}, [False, True, True, True]),
    (AWQ, [False, False, True, True]),
    (FP8 | {"ignored_layers": ["model.layers.0.mlp.up_proj"]}, [False, True, True, True]),
    (NF4 | {"llm_int8_skip_modules": ["mlp"]}, [False, True, True, True]),
    (W8A8, [False, False, True, True]),
    (W8A8 | {"ignore": []}, [False, False, False, False]),
    (W8A8 | {"config_groups": {"0": W8A8["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*", "q_proj"]}}},
     [False, False, True, True]),
    ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
     [True, True, True, True]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), LEFT_OUT)
def test_plans_and_readers_leave_out_the_same(config: dict[str, Any], expected: list[bool], tmp_path: Path) -> None:
    chosen = choose(None, tmp_path, {"quantization_config": config})
    assert chosen.format is not None and chosen.storage is not None
    assert expected == [chosen.format.leaves_out(name) for name in LAYERS]
    assert expected == [chosen.storage.leaves_out(name) for name in LAYERS]
    assert chosen.storage.includes_head != expected[-1]


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match="`quant_method` 'aqlm' is not served: gptq, awq, "):
        sizes.of_config({"quantization_config": {"quant_method": "aqlm"}})


def cells(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables whose first cell is a name in code, or bfloat16: the others, of all tables joined."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        first, *others = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(("| `", "| bfloat16")) and first != "`--quantize`":
            found.setdefault(first.strip("`"), []).extend(others)
    return found


def page() -> str:
    """What is said of serving."""
    return PAGE.read_text().split("## Making a checkpoint")[0]


def test_the_page_and_the_readme_name_what_is_served() -> None:
    rows = cells(page())
    assert set(config.QUANTIZE) | {"bfloat16"} == rows.keys()
    for name in config.QUANTIZE_REFUSED:
        assert f"`{name}`" in page()
    readme = (ROOT / "README.md").read_text()
    for name in config.QUANTIZE:
        assert f"`{name}`" in readme or f"`--quantize {name}`" in readme, name


def test_the_page_says_how_much_memory_is_planned() -> None:
    """Its last four cells of each format: GB of two models and of a step of each."""
    rows = cells(page().split("**Memory.**")[1])
    assert {"bfloat16", "int8", "int4", "fp8", "bitsandbytes-nf4"} == rows.keys()
    for name, figures in rows.items():
        planned = [
            f"{count('bfloat16', name) / 1e9:.3f}"
            for shape in map(shapes.shape, ("bloom-560m", "mistral-7b"))
            for count in (shape.weight_bytes, shape.step_weight_bytes)
        ]
        assert planned == figures, name
