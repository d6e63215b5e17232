"""Loading a checkpoint of several files: what a rank reads, what memory that takes, and what is said when it is broken.

Bytes and memory are measured in a process for each rank, on a file large enough that they stand out from the memory
that Python and torch need anyway. Left out: what the slices hold (`test_weights.py`), the sizes of published models
(`test_real_shapes.py`), downloads and `*.bin` (`test_hub.py`, `test_convert.py`).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM
from transformers.utils import logging as transformers_logging

from server.arch import families
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.backends.reference.linear import DenseFormat
from server.checkpoint import weights
from server.checkpoint.files import HubError
from server.checkpoint.weights import Checkpoint, CheckpointError, ReadAhead, Weights
from server.loading import LayerCount
from server.model.load import load as load_model
from server.model.transformer import Transformer
from server.ranks.collectives import Shard
from tests.server.checkpoints import Checkpoints
from tests.server.driver import CPU, all_logits, load_engine

MB = 1e6
INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Tensors = dict[str, Tensor]


def load(folder: Path, shard: Shard, dtype: torch.dtype) -> tuple[Transformer, Checkpoint]:
    family, spec = families.find(json.loads((folder / "config.json").read_text()))
    checkpoint = Checkpoint(folder)
    opened = Weights.open(checkpoint, family.names, shard, dtype, CPU)
    return load_model(opened, spec, ReferenceBackend(CpuDevice())), checkpoint


# What it costs


class Cost(NamedTuple):
    """What loading one rank took, in bytes."""

    read: int
    held: int  # its own weights
    peak: int  # growth of the process's largest resident size


def cost(folder: Path, warm_up: Path, shard: Shard, dtype: torch.dtype, piece_bytes: int) -> Cost:
    """Runs in a process of its own. Small pieces, because the file is small next to a real one.

    The model in `warm_up` is loaded first, so that the pages of the code that loads are not counted.
    """
    torch.set_num_threads(1)
    weights.PIECE_BYTES = piece_bytes
    load(warm_up, shard, dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, checkpoint = load(folder, shard, dtype)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cost(checkpoint.bytes_read, model.nbytes, (after - before) * 1024)


@pytest.fixture(scope="module")
def hundred_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BLOOM of 99 MB in four files with an index, bfloat16."""
    folder = tmp_path_factory.mktemp("hundred-megabytes")
    save_bloom(folder, BloomConfig(vocab_size=16000, hidden_size=640, n_head=8, n_layer=8))
    assert len(list(folder.glob("*.safetensors"))) == 4
    return folder


def save_bloom(folder: Path, config: BloomConfig) -> None:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    BloomForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="30MB")


@pytest.fixture(scope="module")
def costs(hundred_megabytes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Shard, torch.dtype], Cost]:
    """The cost of one rank and of one of 2, in the checkpoint's dtype, and of one of 4 in one twice as wide."""
    small = tmp_path_factory.mktemp("small")
    save_bloom(small, BloomConfig(vocab_size=64, hidden_size=64, n_head=8, n_layer=1))
    cases = [(Shard(), torch.bfloat16), (Shard(1, 2), torch.bfloat16), (Shard(2, 4), torch.float32)]
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # torch is imported once, not for each rank
    with processes.Pool(1, maxtasksperchild=1) as pool:
        arguments = [(hundred_megabytes, small, *case, 4 << 20) for case in cases]
        results = pool.starmap(cost, arguments, chunksize=1)
        pool.close()
        pool.join()
    return dict(zip(cases, results, strict=True))


def test_a_rank_reads_its_share_and_what_is_replicated(
    hundred_megabytes: Path, costs: dict[tuple[Shard, torch.dtype], Cost]
) -> None:
    files = [load_file(path) for path in hundred_megabytes.glob("*.safetensors")]
    split = sum(tensor.nbytes for file in files for tensor in file.values() if tensor.dim() == 2)
    replicated = sum(tensor.nbytes for file in files for tensor in file.values() if tensor.dim() == 1)
    for (shard, _), measured in costs.items():
        assert measured.read <= 1.05 * (split / shard.world_size + replicated), shard
    assert split + replicated == costs[Shard(), torch.bfloat16].read  # one rank reads everything, once


def test_loading_takes_little_more_memory_than_the_weights(costs: dict[tuple[Shard, torch.dtype], Cost]) -> None:
    # Two pieces and one matrix of 20 MB before its conversion are usual. A rank that keeps what it only touched, or
    # that holds a second copy, takes the 99 MB of the file on top.
    for (shard, dtype), measured in costs.items():
        assert measured.peak <= measured.held + 80 * MB, (shard, dtype, measured)
        assert measured.peak >= 0.8 * measured.held, "the weights are still in the file"


def test_loaded_weights_do_not_depend_on_the_file(tmp_path: Path, tiny_bloom: Path) -> None:
    copy_model(tiny_bloom, tmp_path)
    model, _checkpoint = load(tmp_path, Shard(), torch.float32)  # which keeps the files open
    before = model.decoder.embedding.table.clone()
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:  # in place, as a download that starts again does
        file.write(bytes(path.stat().st_size))
    assert torch.equal(before, model.decoder.embedding.table)


@pytest.mark.parametrize("case", ["bloom", "gpt2", "falcon-40b"])
@torch.inference_mode()
def test_pieces_make_the_same_whole(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    folder, _ = checkpoints(case)
    expected = all_logits(load_engine(folder), list(range(20)))
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)  # a few rows, and less than one row of the last matrix
    assert torch.equal(expected, all_logits(load_engine(folder), list(range(20))))


# Several files and their index


def copy_model(source: Path, target: Path, change: Callable[[Tensors], object] | None = None, **config: object) -> Path:
    """The model of `source` in `target`, its tensors changed in place by `change`, its config by `config`."""
    tensors = load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, target / "model.safetensors")
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | config))
    return target


@pytest.fixture
def sharded(tiny_bloom: Path, tmp_path: Path) -> Path:
    """The tiny BLOOM in three files with an index."""
    tensors = load_file(tiny_bloom / "model.safetensors")
    weight_map = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text((tiny_bloom / "config.json").read_text())
    return tmp_path


def tensor_of(path: Path) -> str:
    """A tensor of a layer in `path`."""
    with safe_open(path, framework="pt") as file:
        return next(name for name in sorted(file.keys()) if ".h.1." in name)


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refusal(folder: Path) -> str:
    """Why the model cannot be loaded: one sentence."""
    with pytest.raises((CheckpointError, HubError)) as caught:
        load(folder, Shard(), torch.float32)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@torch.inference_mode()
def test_several_files_are_one_model(sharded: Path, tiny_bloom: Path) -> None:
    prompt = list(range(20))
    assert torch.equal(all_logits(load_engine(tiny_bloom), prompt), all_logits(load_engine(sharded), prompt))


def without_its_files(index: Path) -> None:
    entries = json.loads(index.read_text())
    entries["weight_map"] = {name: file for name, file in entries["weight_map"].items() if "00002" not in file}
    index.write_text(json.dumps(entries))


# What is done to one file of three, and what is said then.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (Path.unlink, "{path} is missing"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "{path} is not a readable safetensors file"),
    "forgotten": (
        lambda path: without_its_files(path.parent / INDEX),
        r"tensor \S+ is missing from {first} .and 1 more",
    ),
    "a tensor less": (
        lambda path: rewrite(path, lambda tensors: tensors.pop(tensor_of(path))),
        r"tensor {tensor} is missing from {first} .and 2 more",
    ),
    "a tensor more": (
        lambda path: rewrite(path, lambda tensors: tensors.update({"transformer.h.0.extra": torch.zeros(1)})),
        "does not use: transformer.h.0.extra in {path}",
    ),
    "misshapen": (
        lambda path: rewrite(path, lambda tensors: tensors.update({tensor_of(path): torch.zeros(3, 5)})),
        r"tensor {tensor} in {path} has shape \[3, 5\], but config.json says",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_with_a_file_is_named_with_it(sharded: Path, kind: str) -> None:
    change, told = BROKEN[kind]
    path, first = (sharded / f"model-0000{number}-of-00003.safetensors" for number in (2, 1))
    names = {"path": re.escape(str(path)), "first": re.escape(str(first)), "tensor": re.escape(tensor_of(path))}
    change(path)
    assert re.search(told.format(**names), refusal(sharded))


@torch.inference_mode()
def test_an_entry_that_the_index_forgets_is_found_in_its_file(sharded: Path, tiny_bloom: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"][tensor_of(sharded / "model-00002-of-00003.safetensors")]
    (sharded / INDEX).write_text(json.dumps(index))  # the index says which files there are; they say what they hold
    prompt = list(range(20))
    assert torch.equal(all_logits(load_engine(tiny_bloom), prompt), all_logits(load_engine(sharded), prompt))


# What the same model may look like


@pytest.mark.parametrize(("stored", "wanted"), [*itertools.permutations(FLOATS, 2), (FLOATS[2], FLOATS[2])])
def test_every_dtype_is_converted_to_the_wanted_one(
    tiny_bloom: Path, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = load_file(tiny_bloom / "model.safetensors")
    copy_model(tiny_bloom, tmp_path, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    model, _ = load(tmp_path, Shard(1, 2), wanted)
    layer = model.decoder.layers[2]
    down, bias = (tensors[f"transformer.h.2.mlp.dense_4h_to_h.{kind}"] for kind in ("weight", "bias"))
    assert isinstance(layer.mlp.down.weight, DenseFormat)
    assert torch.equal(down[:, 128:].to(stored).to(wanted), layer.mlp.down.weight.weight)  # the second half of 256
    assert layer.mlp.down.bias is not None
    assert torch.equal(bias.to(stored).to(wanted), layer.mlp.down.bias)
    words = tensors["transformer.word_embeddings.weight"]
    assert torch.equal(words[52:].to(stored).to(wanted), model.decoder.embedding.table[:51])


def test_dtypes_may_be_mixed(tiny_bloom: Path, tmp_path: Path) -> None:
    def halve_matrices(tensors: Tensors) -> None:
        tensors.update({name: t.half() for name, t in tensors.items() if t.dim() == 2})

    model, _ = load(copy_model(tiny_bloom, tmp_path, halve_matrices), Shard(), torch.bfloat16)
    qkv = model.decoder.layers[0].attention.qkv
    assert qkv.bias is not None
    assert (torch.bfloat16, torch.bfloat16) == (qkv.bias.dtype, model.decoder.embedding.table.dtype)


@pytest.mark.parametrize(("case", "embed"), [("bloom", "transformer.word_embeddings"), ("llama", "model.embed_tokens")])
@pytest.mark.parametrize("has_copy", [True, False])
@torch.inference_mode()
def test_a_tied_head_may_or_may_not_be_in_the_file(
    checkpoints: Checkpoints, tmp_path: Path, case: str, embed: str, has_copy: bool
) -> None:
    def tie(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)
        if has_copy:
            tensors["lm_head.weight"] = tensors[f"{embed}.weight"].clone()

    folder, _ = checkpoints(case)
    model, _ = load(copy_model(folder, tmp_path, tie, tie_word_embeddings=True), Shard(), torch.float32)
    assert isinstance(model.head.weight, DenseFormat)
    assert model.head.weight.weight is model.decoder.embedding.table


def test_an_untied_head_has_to_be_in_the_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, _ = checkpoints("llama")
    copy_model(folder, tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert re.search(r"tensor \S*lm_head\.weight is missing from \S+/model\.safetensors;", refusal(tmp_path))


def test_a_missing_tensor_is_named_as_the_file_would_name_it(tiny_bloom: Path, tmp_path: Path) -> None:
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        del tensors["h.1.input_layernorm.weight"]

    assert "tensor h.1.input_layernorm.weight is missing" in refusal(copy_model(tiny_bloom, tmp_path, strip))


def test_layers_are_counted_aloud_every_ten_seconds_but_not_to_the_last(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([0.0, 4.0, 9.0, 11.0, 12.0, 21.5, 40.0])
    caplog.set_level("INFO")
    count = LayerCount(6, clock=lambda: next(now))
    for _ in range(6):
        count()
    assert ["3 of 6 layers loaded", "5 of 6 layers loaded"] == caplog.messages


def test_each_layer_of_both_stacks_is_told_once(checkpoints: Checkpoints) -> None:
    folder, _ = checkpoints("t5")
    family, spec = families.find(json.loads((folder / "config.json").read_text()))
    told: list[int] = []
    opened = Weights.open(Checkpoint(folder), family.names, Shard(), torch.float32, CPU)
    load_model(opened, spec, ReferenceBackend(CpuDevice()), report=lambda: told.append(1))
    assert spec.encoder is not None and spec.num_layers + spec.encoder.num_layers == len(told)


def test_what_follows_is_asked_for_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes next in a file is asked for once, and nothing else is."""
    path = tmp_path / "model.safetensors"
    save_file({f"layer{number}": torch.zeros(1000) for number in range(10)}, path)
    data = path.stat().st_size - 40_000
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(weights, "AHEAD_BYTES", 12_000)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: asked.append((begin - data, size)))
    reading = ReadAhead()
    for number in range(4):
        reading.passed(path, f"layer{number}")
    assert [(4_000, 12_000), (16_000, 8_000)] == asked  # behind the first; then, half of that having passed, more
    reading.passed(path, "layer8")
    assert (36_000, 12_000) == asked[-1]
    reading.passed(path, "layer0")
    assert (4_000, 12_000) == asked[-1]
