"""The same codes as other tools, and older ones, lay them out or describe them: the same logits, or one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.checkpoint import formats
from server.checkpoint.formats.protocol import FormatError, Part, Tensors
from server.checkpoint.weights import Checkpoint, CheckpointError
from server.quantisation import sizes
from tests.server.driver import all_logits, load_engine
from tests.server.quantisation.cases import Quantised, prompt_of

Change = Callable[[dict[str, Any], dict[str, Tensor], Path], None]  # of the config, the tensors and what lies beside


def logits(folder: Path) -> Tensor:
    return all_logits(load_engine(folder, warms_up=False), prompt_of(1), prompt_of(2, 4))


def changed(folder: Path, to: Path, change: Change) -> Path:
    shutil.copytree(folder, to)
    config, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    change(config, tensors, to)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return to


def as_tgi(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """Settings among the tensors."""
    del config["quantization_config"]
    tensors |= {"gptq_bits": torch.tensor(4), "gptq_groupsize": torch.tensor(32)}


def as_autoawq_01(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    del config["quantization_config"]
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(settings))


def as_modelopt(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    del config["quantization_config"]
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*router*"]}
    written = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5)
                    for name in ("k_proj.k_scale", "v_proj.v_scale")}  # fmt: skip


def with_keys_and_values(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """As Quark scales them."""
    given = config["quantization_config"]
    entry = given["global_quant_config"]
    cached = entry | {"output_tensors": entry["weight"]}
    given["layer_quant_config"] = given["kv_cache_quant_config"] = {"*k_proj": cached, "*v_proj": cached}
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{name}_proj.output_scale": torch.tensor(0.5) for name in "kv"}


def with_older_keys_and_values(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    with_keys_and_values(config, tensors, folder)
    given = config["quantization_config"]
    given["export"]["kv_cache_group"] = list(given.pop("kv_cache_quant_config"))


def rotated(*locations: str) -> Change:
    """Quantised with rotations of these places."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        applied = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
        groups = {"R1": {"type": "hadamard", "apply": applied, "randomize": False}}
        config["quantization_config"]["transform_config"] = {"config_groups": groups}

    return change


def without_method(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    del config["quantization_config"]["quant_method"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bloom-gptq", as_tgi),
        ("mistral-awq", as_autoawq_01),
        ("llama-float8", as_modelopt),
        ("bloom-int8", rotated("weight_input", "weight_output")),
        ("llama-quark-float8", with_keys_and_values),
        ("llama-quark-float8", with_older_keys_and_values),
        ("llama-quark", without_method),
        ("bloom-nf4", without_method),
        ("t5-eight-bits", without_method),
    ],
    ids=[
        "settings of TGI",
        "AutoAWQ 0.1",
        "ModelOpt",
        "merged rotations",
        "keys of Quark",
        "older keys of Quark",
        "Quark",
        "4 bits",
        "8 bits",
    ],
)
def test_the_same_codes_are_read_alike(quantised_models: Quantised, name: str, change: Change, tmp_path: Path) -> None:
    folder, _ = quantised_models(name)
    other = changed(folder / "quantised", tmp_path / "other", change)
    assert torch.equal(logits(folder / "quantised"), logits(other))


def test_scales_may_be_powers_of_2_in_a_byte(quantised_models: Quantised, tmp_path: Path) -> None:
    folder, _ = quantised_models("mistral-float8-blocks")

    def as_powers(dtype: torch.dtype) -> Change:
        def change(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
            config["quantization_config"]["scale_fmt"] = "ue8m0"
            for name in [name for name in tensors if name.endswith("_scale_inv")]:
                tensors[name] = torch.exp2(tensors[name].log2().round()).to(dtype)

        return change

    dtypes = (torch.float32, torch.float8_e8m0fnu)
    found = [logits(changed(folder / "quantised", tmp_path / str(dtype), as_powers(dtype))) for dtype in dtypes]
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits(folder / "quantised"))


@pytest.mark.parametrize(("layout", "name"), [(1, "col32"), (2, "col_turing"), (3, "col_ampere"), (9, "9")])
def test_int8_in_tiles_is_refused(quantised_models: Quantised, layout: int, name: str, tmp_path: Path) -> None:
    def in_tiles(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        for key in [key for key in tensors if key.endswith("weight_format")]:
            tensors[key] = torch.tensor(layout, dtype=torch.uint8)

    folder, _ = quantised_models("t5-eight-bits")
    other = changed(folder / "quantised", tmp_path / "other", in_tiles)
    with pytest.raises(FormatError, match=rf"lie in tiles \({name}, by its `weight_format`\), and only rows.*save"):
        logits(other)


@pytest.mark.parametrize("location", ["input", "output", "k_cache", "q_attn"])
def test_rotations_of_activations_are_refused(quantised_models: Quantised, location: str, tmp_path: Path) -> None:
    folder, _ = quantised_models("bloom-int8")
    other = changed(folder / "quantised", tmp_path / "other", rotated("weight_input", location))
    with pytest.raises(FormatError, match=rf"rotation 'R1' in `transform_config` is of '{location}', and only those"):
        logits(other)


def test_a_format_that_stores_all_weights_dense_is_dense(quantised_models: Quantised, tmp_path: Path) -> None:
    """As llm-compressor writes what it found no layer to quantise in, such as Falcon."""

    def nothing(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}, "input_activations": None}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "dense", "config_groups": {"group_0": group},
        }  # fmt: skip

    folder, _ = quantised_models("llama-packed")
    assert torch.equal(logits(folder / "dense"), logits(changed(folder / "dense", tmp_path / "other", nothing)))


def microscaled(**more: object) -> dict[str, Any]:
    """As auto-round describes floats with a scale for each 32 inputs."""
    written = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "group_size": 32}
    return written | {"data_type": "mx_fp", "bits": 4, "act_bits": 16} | more


def test_auto_round_stores_layers_in_several_floats(quantised_models: Quantised, tmp_path: Path) -> None:
    """MXFP4 with down projections in MXFP8, named by an expression and by names that count more."""
    (in_4_bits, _), (in_8_bits, _) = quantised_models("llama-mxfp4"), quantised_models("llama-mxfp8")

    def mixed(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        other = load_file(in_8_bits / "quantised" / "model.safetensors")
        for name in [name for name in tensors if "down_proj" in name]:
            del tensors[name]
        tensors |= {name: tensor for name, tensor in other.items() if "down_proj" in name}
        names = {f"model.layers.{layer}.mlp.down_proj": {"bits": 8, "act_bits": 8} for layer in range(2)}
        others = {".*down_proj": {"bits": 4}, "lm_head": {"bits": 16}}
        config["quantization_config"] = microscaled(extra_config=others | names)

    def dense(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        other = load_file(in_8_bits / "dense" / "model.safetensors")
        tensors |= {name: tensor for name, tensor in other.items() if "down_proj" in name}

    found = changed(in_4_bits / "quantised", tmp_path / "found", mixed)
    expected = changed(in_4_bits / "dense", tmp_path / "expected", dense)
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=1e-4)


def test_what_auto_round_leaves_dense_is_planned_dense() -> None:
    storage = sizes.of_config(
        {"quantization_config": microscaled(extra_config={"a.b": {"bits": 16}, ".*c.*": {"bits": 16}})}
    )
    assert storage is not None and not storage.includes_head
    assert [True, True, True, False] == [storage.leaves_out(name) for name in ("a.b", "a.c.d", "lm_head", "a.e")]


@pytest.mark.parametrize("targets", [("Linear", "Linear"), ("re:.*down_proj", "re:.*")])
def test_targets_that_overlap_are_refused(
    quantised_models: Quantised, targets: tuple[str, str], tmp_path: Path
) -> None:
    """Readers differ in which one they take: by order, by text, or the last."""

    def overlapping(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
        config["quantization_config"]["config_groups"] = {
            "group_0": group | {"targets": [targets[0]]},
            "group_1": group | {"targets": [targets[1]], "input_activations": inputs},
        }

    folder, _ = quantised_models("llama-packed")
    other = changed(folder / "quantised", tmp_path / "other", overlapping)
    with pytest.raises(FormatError, match=r"two groups of `config_groups` name .*write targets that do not overlap"):
        logits(other)


def test_a_cache_alone_in_few_bits_leaves_weights_dense(quantised_models: Quantised, tmp_path: Path) -> None:
    def only_the_cache(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}

    folder, _ = quantised_models("llama-packed")
    assert torch.equal(logits(folder / "dense"), logits(changed(folder / "dense", tmp_path / "other", only_the_cache)))


def with_tensor(end: str, tensor: Tensor) -> Change:
    """Another tensor for the first whose name ends so."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        tensors[min(name for name in tensors if name.endswith(end))] = tensor

    return change


@pytest.mark.parametrize(
    ("name", "end", "tensor", "told"),
    [
        ("llama-nvfp4-of-modelopt", ".weight_scale_2", torch.tensor(1e38), "all must be finite numbers of float32"),
        ("llama-nvfp4", ".weight_global_scale", torch.tensor([1e-45]), "all must be finite numbers of float32"),
        (
            "t5-eight-bits",
            ".weight_format",
            torch.zeros(3, 0, dtype=torch.uint8),
            r"shape \[3, 0\], and must be one number",
        ),
        ("t5-eight-bits", ".weight_format", torch.zeros(9, dtype=torch.uint8), r"shape \[9\], and must be one number"),
    ],
)
def test_numbers_that_make_no_weights_are_refused(
    quantised_models: Quantised, name: str, end: str, tensor: Tensor, told: str, tmp_path: Path
) -> None:
    folder, _ = quantised_models(name)
    other = changed(folder / "quantised", tmp_path / "other", with_tensor(end, tensor))
    with pytest.raises(FormatError, match=told):
        logits(other)


def test_exponents_that_make_infinite_weights_are_refused(quantised_models: Quantised, tmp_path: Path) -> None:
    def largest(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = torch.full_like(tensors[name], 254)

    folder, _ = quantised_models("llama-mxfp8")
    with pytest.raises(FormatError, match=r"make weights as large as 7\.62e\+40"):
        logits(changed(folder / "quantised", tmp_path / "other", largest))


@pytest.mark.parametrize(
    "number",
    [torch.tensor(4.0), torch.tensor(float("nan")), torch.zeros(0, dtype=torch.int64), torch.tensor([4, 8]),
     torch.tensor(4, dtype=torch.bfloat16), torch.tensor(4, dtype=torch.float8_e4m3fn)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["gptq_bits", "gptq_groupsize"])
def test_settings_among_tensors_are_whole_numbers(name: str, number: Tensor, tmp_path: Path) -> None:
    save_file({name: number}, tmp_path / "model.safetensors")
    with pytest.raises(
        FormatError, match=rf"{name} in .* must be one whole number\. Given: shape .*; download it again"
    ):
        formats.find(tmp_path, {})


def test_numbers_that_torch_does_not_have_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [64, 48], "data_offsets": [0, 1536]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1536))
    with pytest.raises(CheckpointError, match=r"tensor a in .* cannot be read as F4 .*: take another checkpoint"):
        Checkpoint(tmp_path).read("a", (64, 48))


def test_rows_of_bytes_that_lie_in_wider_numbers(quantised_models: Quantised) -> None:
    folder, layers = quantised_models("bloom-nf4-as-bfloat16")
    config = json.loads((folder / "quantised" / "config.json").read_text())
    format, checkpoint = formats.find(folder / "quantised", config), Checkpoint(folder / "quantised")
    assert format is not None
    for name, layer in layers.items():
        rows, inputs = layer.codes.shape
        part = Part((rows, inputs), [(1, 2), (3, rows - 1)], (0, inputs))
        expected = torch.cat([layer.weight[1:2], layer.weight[3 : rows - 1]])
        assert torch.equal(expected, format.read(Tensors(checkpoint, name), part).dequantised())


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "weight_block_size": "128x128"},
        {"quant_method": "awq", "bits": None, "w_bit": 4, "group_size": None, "q_group_size": 64},
    ],
)
def test_plans_take_what_readers_take(config: dict[str, Any], tmp_path: Path) -> None:
    assert formats.find(tmp_path, {"quantization_config": config}) is not None
    storage = sizes.of_config({"quantization_config": config})
    assert storage is not None and storage.group == {"fp8": 128, "awq": 64}[config["quant_method"]]
