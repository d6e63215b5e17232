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
from server.checkpoint.formats.protocol import FormatError
from server.checkpoint.weights import Checkpoint, CheckpointError
from server.quantisation import sizes
from tests.server.quantisation.cases import Quantised, logits

Change = Callable[[dict[str, Any], dict[str, Tensor], Path], None]  # of the config, the tensors and what lies beside


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


def with_config(change: Callable[[dict[str, Any]], object]) -> Change:
    """Another `quantization_config`."""
    return lambda config, tensors, folder: change(config["quantization_config"])


def rotated(*locations: str) -> Change:
    """Quantised with rotations of these places."""
    applied = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
    groups = {"R1": {"type": "hadamard", "apply": applied, "randomize": False}}
    return with_config(lambda given: given.update(transform_config={"config_groups": groups}))


def only(**quantization: object) -> Change:
    return lambda config, tensors, folder: config.update(quantization_config=quantization)


WITHOUT_METHOD = with_config(lambda given: given.pop("quant_method"))
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}, "input_activations": None}
NOTHING = only(quant_method="compressed-tensors", format="dense", config_groups={"group_0": GROUP})
CACHE = only(quant_method="modelopt", quant_algo=None, kv_cache_quant_algo="FP8")


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        pytest.param("bloom-gptq", "quantised", as_tgi, id="settings of TGI"),
        pytest.param("mistral-awq", "quantised", as_autoawq_01, id="AutoAWQ 0.1"),
        pytest.param("llama-float8", "quantised", as_modelopt, id="ModelOpt"),
        pytest.param("bloom-int8", "quantised", rotated("weight_input", "weight_output"), id="merged rotations"),
        pytest.param("llama-quark-float8", "quantised", with_keys_and_values, id="keys of Quark"),
        pytest.param("llama-quark-float8", "quantised", with_older_keys_and_values, id="older keys of Quark"),
        pytest.param("llama-quark", "quantised", WITHOUT_METHOD, id="Quark without its name"),
        pytest.param("bloom-nf4", "quantised", WITHOUT_METHOD, id="4 bits without a name"),
        pytest.param("t5-eight-bits", "quantised", WITHOUT_METHOD, id="8 bits without a name"),
        # As llm-compressor writes what it found no layer to quantise in, such as Falcon.
        pytest.param("llama-packed", "dense", NOTHING, id="all dense"),
        pytest.param("llama-packed", "dense", CACHE, id="a cache alone in few bits"),
    ],
)
def test_the_same_codes_are_read_alike(
    quantised_models: Quantised, name: str, kind: str, change: Change, tmp_path: Path
) -> None:
    folder = quantised_models(name)[0] / kind
    assert torch.equal(logits(folder), logits(changed(folder, tmp_path / "other", change)))


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


def microscaled(**more: object) -> dict[str, Any]:
    """As auto-round describes floats with a scale for each 32 inputs."""
    written = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "group_size": 32}
    return written | {"data_type": "mx_fp", "bits": 4, "act_bits": 16} | more


def test_auto_round_stores_layers_in_several_floats(quantised_models: Quantised, tmp_path: Path) -> None:
    """MXFP4 with down projections in MXFP8, named by an expression and by names that count more."""
    (in_4_bits, _), (in_8_bits, _) = quantised_models("llama-mxfp4"), quantised_models("llama-mxfp8")
    names = {f"model.layers.{layer}.mlp.down_proj": {"bits": 8, "act_bits": 8} for layer in range(2)}
    others = {".*down_proj": {"bits": 4}, "lm_head": {"bits": 16}}

    def with_down(kind: str) -> Path:
        def change(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
            for name in [name for name in tensors if "down_proj" in name]:
                del tensors[name]
            other = load_file(in_8_bits / kind / "model.safetensors")
            tensors |= {name: tensor for name, tensor in other.items() if "down_proj" in name}
            if kind == "quantised":
                config["quantization_config"] = microscaled(extra_config=others | names)

        return changed(in_4_bits / kind, tmp_path / kind, change)

    torch.testing.assert_close(logits(with_down("quantised")), logits(with_down("dense")), rtol=0, atol=1e-4)


def test_what_auto_round_leaves_dense_is_planned_dense() -> None:
    storage = sizes.of_config(
        {"quantization_config": microscaled(extra_config={"a.b": {"bits": 16}, ".*c.*": {"bits": 16}})}
    )
    assert storage is not None and not storage.includes_head
    assert [True, True, True, False] == [storage.leaves_out(name) for name in ("a.b", "a.c.d", "lm_head", "a.e")]


def overlapping(*targets: str) -> Change:
    """Groups that differ, of which readers differ in which one they take: by order, by text, or the last."""

    def change(given: dict[str, Any]) -> None:
        group = given["config_groups"]["group_0"]
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
        other = group | {"targets": [targets[1]], "input_activations": inputs}
        given["config_groups"] = {"group_0": group | {"targets": [targets[0]]}, "group_1": other}

    return with_config(change)


def with_tensors(end: str, tensor: Tensor) -> Change:
    """Another tensor for each whose name ends so."""
    return lambda config, tensors, folder: tensors.update({n: tensor.clone() for n in tensors if n.endswith(end)})


def filled(end: str, number: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
        tensors |= {name: torch.full_like(tensor, number) for name, tensor in tensors.items() if name.endswith(end)}

    return change


BYTES = torch.uint8
REFUSED: list[tuple[str, Change, str]] = [
    *(
        (
            "t5-eight-bits",
            filled("weight_format", layout),
            rf"lie in tiles \({kind}, by its `weight_format`.*rows.*save",
        )
        for layout, kind in ((1, "col32"), (2, "col_turing"), (3, "col_ampere"), (9, "9"))
    ),
    *(
        (
            "bloom-int8",
            rotated("weight_input", place),
            rf"rotation 'R1' in `transform_config` is of '{place}', and only",
        )
        for place in ("input", "output", "k_cache", "q_attn")
    ),
    *(
        (
            "llama-packed",
            overlapping(*targets),
            "two groups of `config_groups` name .*write targets that do not overlap",
        )
        for targets in (("Linear", "Linear"), ("re:.*down_proj", "re:.*"))
    ),
    *(
        ("t5-eight-bits", with_tensors(".weight_format", torch.zeros(shape, dtype=BYTES)), "and must be one number")
        for shape in ((3, 0), (9,))
    ),
    (
        "llama-nvfp4-of-modelopt",
        with_tensors(".weight_scale_2", torch.tensor(1e38)),
        "must be finite numbers of float32",
    ),
    ("llama-nvfp4", with_tensors(".weight_global_scale", torch.tensor([1e-45])), "must be finite numbers of float32"),
    ("llama-mxfp8", filled("weight_scale", 254), r"make weights as large as 7\.62e\+40"),
]


@pytest.mark.parametrize(("name", "change", "told"), REFUSED)
def test_what_would_be_read_otherwise_or_makes_no_weights_is_refused(
    quantised_models: Quantised, name: str, change: Change, told: str, tmp_path: Path
) -> None:
    other = changed(quantised_models(name)[0] / "quantised", tmp_path / "other", change)
    with pytest.raises(FormatError, match=told):
        logits(other)


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
