"""Conversion of old files: what is stored, what is refused, and that nothing half-made is left."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from server.checkpoint import convert
from server.checkpoint.files import HubError, check_safetensors

ROOT = Path(convert.__file__).parents[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "converted"


def save(value: object, source: Path, name: str = "pytorch_model.bin") -> None:
    torch.save(value, source / name)


def leftovers(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.glob(f"{target.name}*") if path.suffix != ".lock")


class Gadget:
    """A pickle that leaves a marker if anything unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_tensors_survive_bit_for_bit(source: Path, target: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -0.0]).bfloat16(), "c": torch.tensor(3)}
    save(tensors, source)
    convert.convert_once("weights", source, target)
    stored = load_file(target / "pytorch_model.safetensors")
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {n: t.tolist() for n, t in stored.items()}
    assert torch.bfloat16 == stored["b"].dtype
    check_safetensors(target / "pytorch_model.safetensors")


def test_tied_head_is_stored_once_under_the_name_of_the_embedding(source: Path, target: Path) -> None:
    embedding = torch.arange(4.0).reshape(2, 2)
    save({"wte.weight": embedding, "lm_head.weight": embedding}, source)
    convert.convert_once("weights", source, target)
    with safe_open(target / "pytorch_model.safetensors", "pt") as file:
        assert ["wte.weight"] == list(file.keys())
        assert "wte.weight" == file.metadata()["lm_head.weight"]


def test_an_adapter_keeps_its_description_and_every_name(source: Path, target: Path) -> None:
    (source / "adapter_config.json").write_text('{"r": 8}')
    tensor = torch.arange(4.0).reshape(2, 2)
    save({"a.lora_A.weight": tensor, "b.lora_A.weight": tensor}, source, "adapter_model.bin")
    save({"other": tensor}, source)
    convert.convert_once("adapter", source, target)
    stored = load_file(target / "adapter_model.safetensors")
    assert {"a.lora_A.weight", "b.lora_A.weight"} == stored.keys() and torch.equal(tensor, stored["b.lora_A.weight"])
    assert '{"r": 8}' == (target / "adapter_config.json").read_text()


def test_views_of_one_tensor_are_stored_apart(source: Path, target: Path) -> None:
    whole = torch.arange(8.0).reshape(2, 4)
    save({"whole": whole, "row": whole[1], "column": whole[:, 1], "turned": whole.T}, source)
    convert.convert_once("weights", source, target)
    stored = load_file(target / "pytorch_model.safetensors")
    expected = {"whole": whole, "row": whole[1], "column": whole[:, 1], "turned": whole.T}
    assert {name: tensor.tolist() for name, tensor in expected.items()} == {n: t.tolist() for n, t in stored.items()}


def test_every_file_of_the_index_is_converted(source: Path, target: Path) -> None:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for number, name in enumerate(names):
        save({f"w{number}": torch.ones(2)}, source, name)
    weight_map = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(weight_map))
    save({"optimizer": torch.ones(1)}, source, "training_args.bin")
    convert.convert_once("weights", source, target)
    assert [name.replace(".bin", ".safetensors") for name in names] == sorted(path.name for path in target.iterdir())


def test_second_conversion_finds_the_first(source: Path, target: Path) -> None:
    save({"w": torch.ones(2)}, source)
    convert.convert_once("weights", source, target)
    made = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    (source / "pytorch_model.bin").unlink()
    convert.convert_once("weights", source, target)
    assert made and made == {path.name: path.stat().st_mtime_ns for path in target.iterdir()}


def test_remains_of_a_killed_conversion_are_replaced(source: Path, target: Path) -> None:
    save({"w": torch.ones(2)}, source)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir()
    (partial / "half.safetensors").write_bytes(b"x")
    convert.convert_once("weights", source, target)
    assert ["pytorch_model.safetensors"] == [path.name for path in target.iterdir()]


def unsafe_files(path: Path, marker: Path) -> dict[str, Any]:
    def legacy_tar() -> None:
        (path.parent / "pickle").write_bytes(pickle.dumps(Gadget(marker)))
        with tarfile.open(path, "w") as tar:
            tar.add(path.parent / "pickle", "pickle")

    return {
        "zip": lambda: torch.save({"w": Gadget(marker)}, path),
        "legacy": lambda: torch.save({"w": Gadget(marker)}, path, _use_new_zipfile_serialization=False),
        "plain": lambda: path.write_bytes(pickle.dumps(Gadget(marker))),
        "tar": legacy_tar,
        "garbage": lambda: path.write_bytes(b"\x80\x02garbage"),
        "module": lambda: torch.save(torch.nn.Linear(2, 2), path),
    }


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain", "tar", "garbage", "module"])
def test_pickle_that_could_run_code_is_refused_and_leaves_nothing(
    source: Path, target: Path, tmp_path: Path, kind: str
) -> None:
    marker = tmp_path / "marker"
    unsafe_files(source / "pytorch_model.bin", marker)[kind]()
    with pytest.raises(HubError, match=r"is unsafe|cannot be read"):
        convert.convert_once("weights", source, target)
    assert not marker.exists()
    assert [] == leftovers(target)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"w": torch.eye(2).to_sparse()}, "w is not a plain dense tensor"),
        ({"w": 3}, "'w' is not a tensor"),
        ({1: torch.ones(1)}, "1 is not a tensor"),
        ([torch.ones(1)], "holds no table of tensors"),
        ({}, "holds no table of tensors"),
        ({"w": torch.empty(2, device="meta")}, "w is not a plain dense tensor"),
    ],
)
def test_anything_but_plain_tensors_is_refused(source: Path, target: Path, value: object, expected: str) -> None:
    save(value, source)
    with pytest.raises(HubError, match=expected):
        convert.convert_once("weights", source, target)
    assert [] == leftovers(target)


def test_weights_of_torchao_in_bin_are_refused_with_a_remedy(source: Path, target: Path, tmp_path: Path) -> None:
    save({"w": Gadget(tmp_path / "marker")}, source)
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(HubError, match=r"weights of torchao in \*\.bin.*served are those in safetensors, load .* anew"):
        convert.convert_once("weights", source, target)
    assert [] == leftovers(target)


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What the command says, in one sentence, of what it does not convert."""
    assert 1 == convert.main([str(one) for one in argv])
    (sentence,) = capsys.readouterr().err.splitlines()
    return sentence


def test_refusal_of_the_command_is_one_sentence(
    source: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"w": Gadget(tmp_path / "marker")}, source)
    assert refusal(capsys, "weights", source, target).startswith(f"error: {source}/pytorch_model.bin is unsafe")
    assert not (tmp_path / "marker").exists()


def test_two_conversions_at_once_make_one_result(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads stand in for processes: a lock is of an open file, and each opens its own."""
    save({"w": torch.ones(200, 200)}, source)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(convert.main, ["weights", str(source), str(target)]) for _ in range(2)]
    assert [0, 0] == [one.result() for one in both]
    assert 1 == capsys.readouterr().out.count("Converting")
    assert [target.name] == leftovers(target)


def test_unknown_conversion_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == convert.main(["pickle", "a", "b"])
    assert capsys.readouterr().err.startswith("usage: ")


def test_full_disk_is_one_sentence_and_leaves_nothing(source: Path, target: Path) -> None:
    """In a process of its own, as the launcher runs it, whose files may not grow."""
    save({"w": torch.ones(1 << 19)}, source)
    limit = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
    code = limit + "from server.checkpoint.convert import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "weights", str(source), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 1 == done.returncode
    assert done.stderr.startswith(f"error: cannot write {target} (")
    assert done.stderr.endswith("make room on its disk\n")
    assert [] == leftovers(target)


def test_old_tokenizer_becomes_tokenizer_json(source: Path, target: Path) -> None:
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (source / "vocab.json").write_text(json.dumps({"h": 0, "i": 1, "hi": 2, "<|endoftext|>": 3}))
    (source / "merges.txt").write_text("#version: 0.2\nh i\n")
    assert 0 == convert.main(["tokenizer", str(source), str(target)])
    assert "hi" in json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]


def test_tokenizer_code_of_a_repository_is_never_run(
    source: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto_map = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (source / "config.json").write_text('{"model_type": "none", "trust_remote_code": true}')
    (source / "tokenizer_config.json").write_text(json.dumps(auto_map | {"trust_remote_code": True}))
    (source / "tokenizer.model").write_bytes(b"")
    (source / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Evil: pass\n")
    said = refusal(capsys, "tokenizer", source, target)
    assert said.startswith(f"error: the tokenizer of {source} cannot be converted (")
    assert not (tmp_path / "marker").exists()
    assert [] == leftovers(target)
