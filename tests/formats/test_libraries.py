"""Checkpoints that the real libraries wrote, each in an environment of its own: `make test-formats`.

Every layer must be read as the library itself dequantises it, and where inputs are taken as they are, the logits must
be those of a dense model of these weights. An environment is made in `.venv-formats/NAME`, once for each NAME.txt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.checkpoint import formats
from server.checkpoint.formats.protocol import Part, Tensors
from server.checkpoint.weights import Checkpoint
from server.distributed import Shard
from server.quant import meanings
from tests.environments import NoEnvironment, environment
from tests.running import ROOT
from tests.server import ranks
from tests.server.driver import all_logits, load_engine
from tests.server.quant.cases import WEIGHTS, prompt_of
from tests.server.test_tensor_parallel import run_ranks

HERE = Path(__file__).parent
WEIGHT_ONLY = {
    "modelopt": ["nvfp4"],
    "autoround": ["symmetric", "asymmetric", "as-gptq", "two-bits"],
    "bitsandbytes": ["nf4", "fp4", "int8"],
    "torchao": [
        *("int8", "int8-groups", "int8-all", "float8", "float8-groups", "float8-all", "four-bits"),
        *("four-bits-asymmetric", "three-bits", "six-bits", "int4", "int4-words", "head-float8", "phi3-int8"),
        "mixtral-float8",
    ],
    "llmcompressor": [
        *("W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "MXFP4A16"),
        *("mixtral-W4A16", "mixtral-NVFP4A16", "phi3-W8A16"),
    ],
    "gptqmodel": ["gptq-4", "gptq-4-act", "gptq-8", "gptq-3", "mixtral-4", "phi3-4", "awq-4", "starcoder2-4"],
}
# Layers in fewer bits: seven in each of two layers of a Llama. GPTQModel writes Phi-3's gates and ups apart.
LAYERS = {
    "mixtral-float8": 8,
    "head-float8": 15,
    "mixtral": 32,
    "phi3-W8A16": 8,
    "phi3-int8": 8,
    "phi3-4": 10,
    "starcoder2": 12,
}
ROUNDED = {"modelopt": ["fp8", "fp8-rows"], "llmcompressor": ["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"]}
Made = Callable[[str], Path]

pytestmark = pytest.mark.formats


def interpreter(library: str) -> Path:
    """That of the library's environment."""
    try:
        return environment(ROOT / ".venv-formats" / library, HERE / f"{library}.txt")
    except NoEnvironment as error:
        pytest.skip(f"{library} cannot be installed here: {error}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of what a library wrote; each library runs once."""

    @cache
    def get(library: str) -> Path:
        folder = tmp_path_factory.mktemp(library)
        command = (interpreter(library), HERE / f"make_{library}.py", folder)
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
        assert found.returncode == 0, found.stderr[-4000:]
        return folder

    return get


def cases(kinds: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(library, kind) for library, of_library in kinds.items() for kind in of_library]


@pytest.mark.parametrize(("library", "kind"), cases(WEIGHT_ONLY) + cases(ROUNDED))
def test_every_layer_is_what_the_library_makes_of_it(made: Made, library: str, kind: str) -> None:
    folder = made(library)
    config = json.loads((folder / kind / "config.json").read_text())
    format, checkpoint = formats.find(folder / kind, config), Checkpoint(folder / kind)
    assert format is not None
    dense = load_file(folder / f"{kind}.dense.safetensors")
    assert next((count for start, count in LAYERS.items() if kind.startswith(start)), 14) == len(dense)
    for name, weight in dense.items():
        rows, inputs = size = weight.shape[0], weight.shape[1]
        stored = format.read(Tensors(checkpoint, name.removesuffix(".weight")), Part(size, [(0, rows)], (0, inputs)))
        assert (kind in ROUNDED.get(library, [])) == (stored.inputs is not None)
        torch.testing.assert_close(stored.dequantised(), weight, rtol=1e-5, atol=1e-6)


def test_every_setting_of_torchao_is_known(made: Made) -> None:
    for name, settings in json.loads((made("torchao") / "settings.json").read_text()).items():
        known = (*meanings.SERVED_OF_TORCHAO[name], *meanings.READ_OF_TORCHAO[name])
        assert set(settings) - {"version"} <= {*known, *meanings.WITHOUT_MEANING_OF_TORCHAO}


def dense_of(folder: Path, kind: str, to: Path) -> Path:
    """A dense checkpoint of what the library makes of its layers, and of what else it stored, some in 16 bits."""
    family = kind.split("-")[0]
    sources = folder / "source"
    shutil.copy((sources / family if (sources / family).exists() else sources / "llama") / "config.json", to)
    stored, dense = load_file(folder / kind / "model.safetensors"), load_file(folder / f"{kind}.dense.safetensors")
    layers = {name.removesuffix(".weight") for name in dense}
    others = {
        name: tensor.float() for name, tensor in stored.items() if name.endswith(".bias") or not is_of(name, layers)
    }
    save_file(others | dense, to / "model.safetensors")
    return to


def is_of(name: str, layers: Collection[str]) -> bool:
    """Whether a tensor belongs to one of these layers, behind whose name there may be several parts."""
    return any(name[:place] in layers for place, letter in enumerate(name) if letter == ".")


@pytest.mark.parametrize(("library", "kind"), cases(WEIGHT_ONLY))
def test_logits_are_those_of_the_librarys_dense_model(made: Made, library: str, kind: str, tmp_path: Path) -> None:
    folder = made(library)
    expected, found = (
        all_logits(load_engine(path, warms_up=False), prompt_of(1))
        for path in (dense_of(folder, kind, tmp_path), folder / kind)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize("library", WEIGHT_ONLY)
def test_two_ranks_generate_the_tokens_of_the_librarys_dense_models(made: Made, library: str, tmp_path: Path) -> None:
    folder, kinds = made(library), WEIGHT_ONLY[library]
    expected = {}
    for kind in kinds:
        (tmp_path / kind).mkdir()
        expected[str(folder / kind)] = ranks.tokens(dense_of(folder, kind, tmp_path / kind), Shard())
    assert [expected] * 2 == run_ranks([folder / kind for kind in kinds], 2, tmp_path / "rendezvous")


@pytest.mark.parametrize(("library", "kind"), cases(ROUNDED))
def test_rounded_inputs_change_logits_little(made: Made, library: str, kind: str, tmp_path: Path) -> None:
    folder = made(library)
    dense, found = (
        all_logits(load_engine(path, warms_up=False), prompt_of(1))
        for path in (dense_of(folder, kind, tmp_path), folder / kind)
    )
    assert 0 < float((found - dense).norm() / dense.norm()) < 0.1
