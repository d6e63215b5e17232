"""Every setting of the tools that write checkpoints is known: read, refused, or without meaning for codes.

Their settings are those of transformers' classes, of which each tool has one. What they say is drawn from values of
every kind: a config is read as if they were not there only where they mean nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
from transformers.utils import quantization_config as of_transformers

from server.checkpoint import formats
from server.quantisation import config_keys, sizes
from server.quantisation.configs import FormatError, read_config
from tests.server.quantisation import quantised

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GOOD: Mapping[str, Mapping[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 128},
    "awq": {"bits": 4, "group_size": 128},
    "compressed-tensors": {
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}},
    },
    "fp8": {},
    "fbgemm_fp8": {},
    "bitsandbytes": {"load_in_4bit": True},
    "quark": quantised.quark("uint4", 32).config,
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
}
CLASSES = {
    "gptq": "GPTQConfig",
    "awq": "AwqConfig",
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "fbgemm_fp8": "FbgemmFp8Config",
    "bitsandbytes": "BitsAndBytesConfig",
    "torchao": "TorchAoConfig",
}
WRONG: list[Any] = ["", "wrong", -7, 1.5, 10**30, True, [], ["a", 1], {}, {"a": {"b": []}}, float("nan")]
# Values of WRONG that a key may have, and what they then mean, where that is not what its absence means.
RIGHT = {
    ("gptq", "dynamic"): [{"a": {"b": []}}],  # a rule for layers that there are none of
    ("compressed-tensors", "config_groups"): [{"a": {"b": []}}],  # a group that leaves its layers alone
    ("fp8", "activation_scale_ub"): [1.5, 10**30],
    ("fbgemm_fp8", "activation_scale_ub"): [1.5, 10**30],
    ("quark", "global_quant_config"): [{}],  # layers are in fewer bits where they are named
}


def known(method: str) -> set[str]:
    return {
        *config_keys.SERVED[method],
        *config_keys.READ[method],
        *config_keys.READ_OF_ALL,
        *config_keys.WITHOUT_MEANING[method],
    }


@pytest.mark.parametrize("method", CLASSES)
def test_every_setting_of_the_tools_is_known(method: str) -> None:
    settings = inspect.signature(getattr(of_transformers, CLASSES[method]).__init__).parameters
    assert set(settings) - {"self", "kwargs"} <= known(method)


@pytest.mark.parametrize("method", GOOD)
def test_no_setting_is_known_twice(method: str) -> None:
    lists = (config_keys.SERVED[method], config_keys.READ[method], config_keys.WITHOUT_MEANING[method])
    assert sum(map(len, lists)) == len({name for names in lists for name in names})


def read(config: Mapping[str, Any]) -> str:
    """What plans count of a config that both readers take; refused: in one sentence."""
    try:
        read_config(formats._make, config)
        storage = sizes.of_config({"quantization_config": config})
    except FormatError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    assert storage is not None
    return storage.description


@pytest.mark.parametrize("method", GOOD)
def test_a_wrong_value_is_refused_or_means_nothing(method: str) -> None:
    good = {"quant_method": method, **GOOD[method]}
    usual = read(good)
    assert usual != "refused"
    for key in {*config_keys.SERVED[method], *config_keys.READ[method]}:
        for value in WRONG:
            found = read(good | {key: value})
            empty = value in ("", [], {}) or value is True
            assert found == "refused" or (found == usual and empty) or value in RIGHT.get((method, key), ()), (
                key,
                value,
            )
    for key in config_keys.WITHOUT_MEANING[method]:
        assert [usual] * len(WRONG) == [read(good | {key: value}) for value in WRONG], key


def in_group(part: str, key: str, value: object) -> dict[str, Any]:
    given: dict[str, Any] = {"weights": WEIGHTS, "input_activations": INPUTS}
    group = {"targets": ["Linear"], **given, part: given[part] | {key: value}}
    return {"quant_method": "compressed-tensors", **GOOD["compressed-tensors"], "config_groups": {"group_0": group}}


def of_quark(part: str, key: str, value: object) -> dict[str, Any]:
    """A config of every part, with another value in one."""
    entry = quantised.quark_float8("per_tensor", is_rounded=True).config["global_quant_config"]
    parts = {kind: {**entry["weight"], "is_dynamic": False} for kind in ("weight", "input_tensors", "output_tensors")}
    if part in parts:
        parts[part] |= {key: value}
    cached = {**entry, **parts} | ({key: value} if part == "entry" else {})
    config = {**GOOD["quark"], "kv_cache_quant_config": {"*k_proj": cached}}
    return config | ({"export": {**config["export"], key: value}} if part == "export" else {})


def of_torchao(name: str, key: str, value: object) -> dict[str, Any]:
    default = {"_type": name, "_version": 2, "_data": {key: value}}
    return {"quant_method": "torchao", "quant_type": {"default": default}}


class PartOfConfig(NamedTuple):
    """A config with another value in one of its parts, the keys there, and those that are good only beside others."""

    with_value: Callable[[str, str, object], dict[str, Any]]
    read: Collection[str]
    without_meaning: Collection[str]
    beside_others: Collection[str]


SERVED_OF = {"weights": config_keys.SERVED_OF_WEIGHTS, "input_activations": config_keys.SERVED_OF_INPUTS}
PARTS = {
    **{
        part: PartOfConfig(
            in_group,
            {*SERVED_OF[part], *config_keys.READ_OF_WEIGHTS},
            config_keys.WITHOUT_MEANING_OF_WEIGHTS,
            {"block_structure", "group_size"},
        )
        for part in SERVED_OF
    },
    **{
        part: PartOfConfig(
            of_quark,
            {*config_keys.SERVED_OF_QUARK[part], *config_keys.READ_OF_QUARK[part]},
            config_keys.WITHOUT_MEANING_OF_QUARK[part],
            {"group_size", "ch_axis"},
        )
        for part in config_keys.SERVED_OF_QUARK
    },
    **{
        name: PartOfConfig(
            of_torchao,
            {*config_keys.SERVED_OF_TORCHAO[name], *config_keys.READ_OF_TORCHAO[name]},
            config_keys.WITHOUT_MEANING_OF_TORCHAO,
            (),
        )
        for name in config_keys.SERVED_OF_TORCHAO
    },
}


@pytest.mark.parametrize("part", PARTS)
def test_so_it_is_in_parts_of_configs(part: str) -> None:
    with_value, keys, without_meaning, beside_others = PARTS[part]
    for key in {*keys} - {*beside_others}:
        for value in WRONG:
            found = read(with_value(part, key, value))
            assert found == "refused" or value in ("", [], {}) or value is True, (key, value)
    for key in without_meaning:
        assert all(read(with_value(part, key, value)) != "refused" for value in WRONG), key
    if with_value is not in_group:  # whose tools say everything that tensors have
        assert all(read(with_value(part, "of_another_version", value)) == "refused" for value in WRONG)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("Int8DynamicActivationInt8WeightConfig", {}, "Int8DynamicActivationInt8.*not served: Int4Weight.*--quantize"),
        ("FqnToConfig", {"fqn_to_config": {}}, "'FqnToConfig' .*not served"),
        ("Int4WeightOnlyConfig", {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}},
         "'TILE_PACKED_TO_4D' .*in tiles: PLAIN and PLAIN_INT32 are; save"),
        ("Float8WeightOnlyConfig", {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"}}, "'float8_e5m2'"),
        ("Float8WeightOnlyConfig", {"granularity": {"_type": "PerBlock", "_data": {}}}, "PerBlock.*PerRow, PerTensor"),
        ("Int8WeightOnlyConfig", {"granularity": {"_type": "PerRow", "_data": {"dim": 0}}}, "`dim` 0 of PerRow.*-1 is"),
    ],
)  # fmt: skip
def test_other_classes_and_layouts_of_torchao_are_refused_by_name(name: str, data: dict[str, Any], told: str) -> None:
    default = {"_type": name, "_version": 2, "_data": data}
    for version, sentence in ((2, told), (1, "`_version` 1 of .* 2 is, save the model anew|" + told)):
        config = {"quant_method": "torchao", "quant_type": {"default": default | {"_version": version}}}
        with pytest.raises(FormatError, match=sentence):
            read_config(formats._make, config)
