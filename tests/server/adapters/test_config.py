"""adapter_config.json: what is read as PEFT reads it, and what is refused, in a sentence and in a bounded time."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from server.adapters import config as module
from server.adapters.config import REFUSED, AdapterConfig, AdapterError

NAMES = [
    "model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head",
    "model.layers.2.mlp.experts.gate_up_proj", "transformer.h.0.attn.c_attn", "h.0.attn.c_attn", "q_proj",
]  # fmt: skip
PIECES = [
    "q_proj", "self_attn.q_proj", r"layers\.1\..*", r"\.", ".", ".*", r"\d", "1", "proj", "(q|k)_proj", "^", "$",
    "lm_head", "c_attn", "layers.1.self_attn", "model", "h", "[0-9]+", "mlp|attn", "(?:.*_)?proj",
]  # fmt: skip


def read(folder: Path, **values: Any) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | values))
    return AdapterConfig.read(folder)


def as_peft_does(patterns: dict[str, float], name: str, otherwise: float) -> float:
    """The rule of PEFT's `get_pattern_key`, the first expression that ends a name, from a dot on."""
    return next((n for key, n in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


def test_patterns_are_those_of_peft(tmp_path: Path) -> None:
    chance, answers = random.Random(5), set()
    for _ in range(300):
        keys = {"".join(chance.choices(PIECES, k=chance.randrange(1, 4))) for _ in range(chance.randrange(1, 4))}
        patterns = {key: place + 1 for place, key in enumerate(sorted(keys)) if is_expression(key)}
        found = read(tmp_path, alpha_pattern=patterns, rank_pattern=patterns)
        for name in NAMES:
            alpha, rank = as_peft_does(patterns, name, 8), as_peft_does(patterns, name, 4)
            assert (alpha / rank, rank) == (found.scale_of(name), found.rank_of(name)), (patterns, name)
            answers.add(rank)
    assert {1, 2, 3, 4} == answers


def is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def test_the_scale_is_stabilised_by_the_root_of_the_rank(tmp_path: Path) -> None:
    assert 8 / 4**0.5 == read(tmp_path, use_rslora=True).scale_of("x")
    assert 8 / 16**0.5 == read(tmp_path, use_rslora=True, rank_pattern={"x": 16}).scale_of("model.x")


@pytest.mark.parametrize("key", [*REFUSED])
def test_what_changes_the_computation_otherwise_is_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(AdapterError, match=f"has `{key}`: an adapter that .* is not served, "):
        read(tmp_path, **{key: {"rank": 3}})
    for nothing in (None, False, [], {}):
        read(tmp_path, **{key: nothing})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"peft_type": "LOHA"}, "is of an adapter of type 'LOHA': only LORA is served"),
        ({"peft_type": None}, "is of an adapter of type None: only LORA is served"),
        ({"init_lora_weights": "pissa_niter_4"}, "save it with `path_initial_model_for_weight_conversion`"),
        ({"init_lora_weights": "LoftQ"}, "trained on a base from which its first numbers had been taken"),
        ({"use_new_idea": True}, "has `use_new_idea`, which is not known here"),
        ({"r": 0}, "`r` of .* must be ranks from 1 to 16384. Given: 0"),
        ({"r": True}, "`r` of .* must be ranks from 1 to 16384. Given: True"),
        ({"lora_alpha": "8"}, "`lora_alpha` of .* must be finite numbers. Given: '8'"),
        ({"lora_alpha": 1e999}, "`lora_alpha` of .* must be finite numbers. Given: inf"),
        ({"rank_pattern": [1]}, "`rank_pattern` of .* must be an object"),
        ({"rank_pattern": {"x": -1}}, "`rank_pattern` of .* must be ranks"),
        ({"alpha_pattern": {"(x": 1}}, "`alpha_pattern` of .* regular expressions .* Given: '.x'"),
        ({"use_dora": 1}, "`use_dora` of .* must be true or false. Given: 1"),
        ({"use_dora": True, "lora_bias": True}, "has both `use_dora` and `lora_bias`"),
        ({"modules_to_save": [1]}, "`modules_to_save` of .* must be a list of names"),
        ({"trainable_token_indices": [1, 1]}, "must be lists of different tokens' ids"),
        ({"trainable_token_indices": {"wte": [-1]}}, "must be lists of different tokens' ids"),
    ],
)
def test_a_value_that_cannot_be_is_one_sentence(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(AdapterError, match=expected) as refusal:
        read(tmp_path, **values)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_chose_the_first_numbers_is_not_asked_for(tmp_path: Path) -> None:
    for init in (True, False, "gaussian", "eva", "orthogonal"):
        assert 4 == read(tmp_path, init_lora_weights=init, eva_config={"rho": 2.0}, loftq_config={}).rank


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "is empty"), (b"{", "is not JSON"), (b"[1]", "holds no JSON object")]
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(AdapterError, match=f"{tmp_path} has no adapter_config.json: give the folder of an adapter"):
        AdapterConfig.read(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match=expected):
        AdapterConfig.read(tmp_path)


def test_an_expression_ends_in_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_S", 0.1)
    found, began = read(tmp_path, alpha_pattern={r"(\w|\w\w|\.)+x!?": 3}), time.monotonic()
    with pytest.raises(AdapterError, match=r"`alpha_pattern` of .* cannot be compared with the names of layers"):
        found.scale_of("model.layers.1.mlp.experts.gate_up_proj_proj_proj_proj_proj")
    assert time.monotonic() - began < 5


def test_names_end_in_a_bounded_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_S", 0.01)
    found = read(tmp_path, alpha_pattern={"." * length + "abc.": 3 for length in range(2000)})
    with pytest.raises(AdapterError, match=r"`alpha_pattern` of .* cannot be compared with the names of layers"):
        for _ in range(100):
            found.scale_of("x" * 4000)


def test_a_config_that_is_no_config_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path)
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with pytest.raises(AdapterError, match=r"has \d+ bytes, and 10 are the most: give another adapter"):
        AdapterConfig.read(tmp_path)


def test_as_many_names_as_layers_are_no_burden(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(100) for part in ("up", "gate", "down")]
    found, began = read(tmp_path, rank_pattern={name: 1 + place for place, name in enumerate(names)}), time.monotonic()
    assert [1 + place for place in range(300)] == [found.rank_of(name) for name in names]
    assert time.monotonic() - began < 2


def test_tokens_are_those_of_their_table(tmp_path: Path) -> None:
    assert (3, 1) == read(tmp_path, trainable_token_indices=[3, 1]).tokens_of("model.embed_tokens")
    found = read(tmp_path, trainable_token_indices={"embed_tokens": [2], "model.lm_head": [5]})
    assert (2,) == found.tokens_of("model.embed_tokens") and (5,) == found.tokens_of("lm_head")
    assert None is found.tokens_of("other")


@pytest.mark.parametrize(
    ("base", "model", "other"),
    [
        ("org/Model-7B", "/models/model-7b/", ""),
        ("/home/me/model-7b", "org/Model-7B-GPTQ", ""),
        ("org/Model-7B", "org/Other-7B", "'org/Model-7B'"),
        (None, "org/Other-7B", ""),
    ],
)
def test_what_it_was_trained_on_is_compared_by_name(tmp_path: Path, base: str | None, model: str, other: str) -> None:
    assert other == read(tmp_path, base_model_name_or_path=base).other_base(model)


def test_a_weight_that_was_chosen_as_a_parameter_is_found_by_its_name_in_patterns(tmp_path: Path) -> None:
    """As PEFT compares them, which calls the others by their modules."""
    patterns = {"gate": 5, "gate.weight": 7, "q_proj": 9}
    found = read(tmp_path, target_parameters=["mlp.gate.weight"], alpha_pattern=patterns, rank_pattern=patterns)
    assert (7, 9, 5) == tuple(found.rank_of(f"model.layers.0.{name}") for name in ("mlp.gate", "attn.q_proj", "gate"))
    assert 1 == found.scale_of("model.layers.0.mlp.gate")
