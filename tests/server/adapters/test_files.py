"""An adapter's files: each tensor has a place or is refused by name, and no file is believed."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from server.adapters import identity
from server.adapters.config import AdapterError
from server.adapters.files import AdapterFiles
from server.adapters.identity import content_key

Open = Callable[[Path], AdapterFiles]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
LORA = {f"{Q}.lora_A.weight": torch.ones(4, 6), f"{Q}.lora_B.weight": torch.arange(12.0).reshape(3, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config))
    save_file(LORA if tensors is None else tensors, folder / "adapter_model.safetensors")


@pytest.fixture
def open_files() -> Iterator[Open]:
    """Opens adapters, which are closed afterwards."""
    opened: list[AdapterFiles] = []

    def get(folder: Path) -> AdapterFiles:
        opened.append(AdapterFiles(folder))
        return opened[-1]

    yield get
    for one in opened:
        one.close()


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as found:
        AdapterFiles(folder)
    return str(found.value)


def test_tensors_are_known_by_module_and_part(tmp_path: Path, open_files: Open) -> None:
    experts = "base_model.model.model.layers.1.mlp.experts"
    names = [
        *LORA, f"{Q}.base_layer.bias", "base_model.model.lm_head.weight", f"{experts}.lora_A.weight",
        f"{experts}.lora_B.weight", f"{experts}.base_layer.lora_A.weight", f"{experts}.base_layer.lora_B.weight",
        "base_model.model.transformer.wte.lora_embedding_A", "base_model.model.transformer.wte.lora_embedding_B",
        f"{Q}.lora_velora_embed",
    ]  # fmt: skip
    write(tmp_path, {name: torch.ones(4, 4) for name in names})
    modules = open_files(tmp_path).modules
    assert {"down", "up", "bias"} == modules["layers.0.self_attn.q_proj"].parts.keys()
    assert {"weight"} == modules["lm_head"].parts.keys()
    assert {"table_down", "table_up"} == modules["wte"].parts.keys()
    assert {"down", "up"} == modules["layers.1.mlp.experts"].parts.keys()
    assert {1: {"down", "up"}} == {n: {*parts} for n, parts in modules["layers.1.mlp.experts"].layers.items()}


def test_parts_are_read_as_they_are_stored(folder: Path, open_files: Open) -> None:
    files, name = open_files(folder), f"{Q}.lora_B.weight"
    assert torch.equal(LORA[name][1:3], files.read(name, (3, 4), rows=(1, 3)))
    assert torch.equal(LORA[name], files.read(name, (None, 4)))
    assert torch.equal(LORA[name][1:2], files.read(name, (3, None), rows=(1, 2)))
    with pytest.raises(
        AdapterError, match=re.escape("has shape [3, 4], and the model and adapter_config.json ask for 5 x 4")
    ):
        files.read(name, (5, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_may_be_in_other_floats(tmp_path: Path, dtype: torch.dtype, open_files: Open) -> None:
    write(tmp_path, {name: tensor.to(dtype) for name, tensor in LORA.items()})
    name = f"{Q}.lora_B.weight"
    assert torch.equal(LORA[name].to(dtype), open_files(tmp_path).read(name, (3, 4)))


def test_a_file_cut_short_anywhere_is_one_sentence(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 40, len(whole) - 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(folder)
    path.write_bytes(whole + b"x")
    assert "and its header says" in refusal(folder)


def test_a_file_that_is_cut_short_while_it_is_read_is_one_sentence(folder: Path, open_files: Open) -> None:
    files, path = open_files(folder), folder / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(AdapterError, match=f"{path} ends within {Q}.lora_B.weight"):
        files.read(f"{Q}.lora_B.weight", (3, 4))


def entry(**values: Any) -> bytes:
    header = {f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]} | values}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff" * 20, "is no safetensors file, or was cut short"),
        (struct.pack("<Q", 4) + b"[1]}", "has a damaged header"),
        (struct.pack("<Q", 2) + b"[]", "has a damaged header"),
        (entry(shape=[1, 3]), "has a damaged header, at tensor"),
        (entry(shape=[-1, -2]), "is empty, a single number or damaged"),
        (entry(shape=[]), "is empty, a single number or damaged"),
        (entry(shape=[0, 2], data_offsets=[0, 0]), "is empty, a single number or damaged"),
        (entry(shape="ab"), "is empty, a single number or damaged"),
        (entry(data_offsets=[8, 16]), "has a damaged header, at tensor"),
        (entry(data_offsets=[0, 1 << 60], shape=[1, 1 << 58]), "is empty, a single number or damaged"),
        (entry(data_offsets=[True, 9]), "has a damaged header, at tensor"),
        (entry(dtype="I8"), "is I8, and those of adapters are one of F64, F32, F16, BF16"),
        (entry(dtype="F8_E4M3"), "is F8_E4M3"),
        pytest.param(
            struct.pack("<Q", 1_800_007) + b'{"a":[' + b"[]," * 600_000 + b"1" + bytes(9),
            "has a header for more than 100000 tensors",
            id="brackets",
        ),
        (save({"a b": torch.ones(1, 1)}), "has a tensor whose name is no module's"),
        (save({"x.lora_E": torch.ones(1, 1)}), "has a tensor x.lora_E, which is none that is known"),
        (
            save({"x.mlp.experts.up_proj": torch.ones(2, 3, 4)}),
            "which is none that is known here (experts that were trained whole are not): merge it with peft",
        ),
    ],
)
def test_a_damaged_header_is_one_sentence(folder: Path, content: bytes, expected: str) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    assert expected in refusal(folder)


def test_what_the_model_s_numbers_cannot_say_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LORA | {f"{Q}.lora_B.weight": torch.full((3, 4), -70_000.0)})
    with closing(AdapterFiles(tmp_path, largest=torch.finfo(torch.float16).max)) as files:
        with pytest.raises(AdapterError, match=r"has NaN or infinity, or a number above 6\.55e\+04"):
            files.read(f"{Q}.lora_B.weight", (3, 4))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named(tmp_path: Path, number: float, open_files: Open) -> None:
    bad = LORA[f"{Q}.lora_B.weight"].clone()
    bad[2, 1] = number
    write(tmp_path, LORA | {f"{Q}.lora_B.weight": bad})
    files = open_files(tmp_path)
    assert 2 == len(files.read(f"{Q}.lora_B.weight", (3, 4), rows=(0, 2)))
    with pytest.raises(AdapterError, match=f"tensor {Q}.lora_B.weight in .* has NaN or infinity"):
        files.read(f"{Q}.lora_B.weight", (3, 4))


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        ({f"{Q}.lora_A.weight": torch.ones(4, 6)}, {}, "has no counterpart lora_B.weight"),
        ({f"{Q}.lora_embedding_B": torch.ones(4, 6)}, {}, "has no counterpart lora_embedding_A"),
        (LORA, {"use_dora": True}, "has no counterpart lora_magnitude_vector"),
        (LORA, {"lora_bias": True}, "has no counterpart lora_B.bias"),
        (LORA | {f"{Q}.lora_magnitude_vector": torch.ones(3)}, {}, "`use_dora` in .* is not true"),
        (LORA | {f"{Q}.lora_B.bias": torch.ones(3)}, {}, "`lora_bias` in .* is not true"),
        (LORA, {"trainable_token_indices": [1]}, "`trainable_token_indices` of .* do not belong together"),
        (LORA | {"x.model.layers.0.self_attn.q_proj.bias": torch.ones(3)}, {}, ""),
        (
            LORA | {"base_model.model.layers.0.self_attn.q_proj.bias": torch.ones(3)},
            {},
            "is of the same layer as one of",
        ),
        (LORA | {f"{Q}.bias": torch.ones(3), f"{Q}.base_layer.bias": torch.ones(3)}, {}, "is there twice"),
    ],
)
def test_halves_and_twins_are_named(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], expected: str, open_files: Open
) -> None:
    write(tmp_path, tensors, **config)
    if expected:
        assert re.search(expected, refusal(tmp_path))
    else:
        open_files(tmp_path)


def test_several_files_are_one_adapter(folder: Path, open_files: Open) -> None:
    (first, one), (second, other) = LORA.items()
    (folder / "adapter_model.safetensors").unlink()
    save_file({first: one}, folder / "adapter_model-1.safetensors")
    save_file({second: other}, folder / "adapter_model-2.safetensors")
    assert {*LORA} == {*open_files(folder).names()}
    save_file(LORA, folder / "adapter_model-2.safetensors")
    assert "is in" in refusal(folder) and "and in another file of the adapter" in refusal(folder)


def test_pickles_are_not_opened(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "has adapter_model.bin, a pickle, and no adapter_model.safetensors" in refusal(folder)


def test_what_is_no_file_in_the_folder_is_refused_without_waiting(folder: Path, tmp_path_factory: Any) -> None:
    path, elsewhere = folder / "adapter_model.safetensors", tmp_path_factory.mktemp("elsewhere") / "x"
    path.rename(elsewhere)
    os.mkfifo(path)
    assert "is not a regular file inside its folder" in refusal(folder)
    with pytest.raises(OSError, match="it is no regular file"):
        content_key(folder)
    for target in (elsewhere, "/dev/zero"):
        path.unlink()
        path.symlink_to(target)
        assert "is not a regular file inside its folder" in refusal(folder)
    with pytest.raises(OSError, match="it is no regular file"):
        content_key(folder)


def test_a_file_that_grows_is_read_to_the_length_that_it_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "adapter_model.safetensors"
    size = path.stat().st_size
    key = content_key(folder)
    real = os.fstat
    path.write_bytes(path.read_bytes() + bytes(1000))  # after its length was asked for
    monkeypatch.setattr(os, "fstat", lambda file: as_long(real(file), size))
    assert key == content_key(folder)


def as_long(state: os.stat_result, size: int) -> os.stat_result:
    """A state whose size is at most so much."""
    return os.stat_result([*state[:6], min(state.st_size, size), *state[7:]])


def replaced(path: Path) -> None:
    other = path.with_name("other")
    save_file({name: tensor + 1 for name, tensor in LORA.items()}, other)
    other.rename(path)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def in_config(path: Path) -> None:
    write(path.parent, r=4, lora_alpha=16)


@pytest.mark.parametrize("change", [replaced, touched, in_config, Path.unlink])
def test_files_that_changed_meanwhile_are_noticed(folder: Path, change: Callable[[Path], None]) -> None:
    key = content_key(folder)
    with closing(AdapterFiles(folder, key)) as files:
        files.refuse_changed()
    with closing(AdapterFiles(folder, key)) as files:
        change(folder / "adapter_model.safetensors")
        assert torch.equal(LORA[f"{Q}.lora_A.weight"], files.read(f"{Q}.lora_A.weight", (4, 6)))
        with pytest.raises(AdapterError, match="have changed meanwhile"):
            files.refuse_changed()


def test_a_config_that_was_another_for_a_moment_is_noticed(folder: Path) -> None:
    """While it was read it had another scale, and while it was compared with the key it had not."""
    config, other = folder / "adapter_config.json", folder / "other"
    key, honest = content_key(folder), config.read_text()
    other.write_text(honest.replace("{", '{"lora_alpha": 99999, ', 1))
    config.rename(folder / "aside")
    other.rename(config)
    real = identity.content_key

    def compared(*args: Any) -> bytes:
        config.unlink()
        (folder / "aside").rename(config)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "content_key", compared)
        with closing(AdapterFiles(folder, key)) as files, pytest.raises(AdapterError, match="have changed meanwhile"):
            files.refuse_changed()


def test_content_of_another_key_is_noticed(folder: Path) -> None:
    with closing(AdapterFiles(folder, bytes(16))) as files, pytest.raises(AdapterError, match="have changed meanwhile"):
        files.refuse_changed()


def test_an_adapter_is_not_read_on_when_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def update(piece: bytes) -> None:
        read.append(piece)
        time.sleep(0.02)

    monkeypatch.setattr(identity, "PIECE_BYTES", 1)
    monkeypatch.setattr(identity, "sha256", lambda: SimpleNamespace(update=update, digest=bytes))
    identity.ContentCheck(folder, b"").stop()
    assert len(read) < 100 < sum(path.stat().st_size for path in folder.iterdir())
