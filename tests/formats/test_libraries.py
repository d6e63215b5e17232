"""Checkpoints that the real libraries wrote, each in an environment of its own: `make test-formats`.

Every layer must be read as the library itself dequantises it, and where inputs are taken as they are, the logits must
be those of a dense model of these weights. An environment is made in `.venv-formats/NAME`, once for each NAME.txt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.checkpoint import formats
from server.checkpoint.formats.protocol import Part, Tensors
from server.checkpoint.weights import Checkpoint
from tests.running import ROOT
from tests.server.driver import all_logits, load_engine
from tests.server.quant.cases import WEIGHTS, prompt_of

HERE = Path(__file__).parent
WEIGHT_ONLY = {
    "bitsandbytes": ["nf4", "fp4", "int8"],
    "llmcompressor": ["W4A16", "W4A16_ASYM", "W8A16"],
    "gptqmodel": ["gptq-4", "gptq-4-act", "gptq-8", "gptq-3"],
}
ROUNDED = {"llmcompressor": ["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"]}
Made = Callable[[str], Path]

pytestmark = pytest.mark.formats


def interpreter(library: str) -> Path:
    """That of the library's environment, which is made if there is none that fits."""
    folder, wanted = ROOT / ".venv-formats" / library, (HERE / f"{library}.txt").read_text()
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if not (installed.is_file() and installed.read_text() == wanted):
        venv.create(folder, clear=True, with_pip=True)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        found = subprocess.run((*pip, "--requirement", HERE / f"{library}.txt"), capture_output=True, text=True)
        if found.returncode:
            pytest.skip(f"{library} cannot be installed here: {found.stderr.strip().splitlines()[-1]}")
        installed.write_text(wanted)
    return python


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
    assert 14 == len(dense)  # seven in each of two layers
    for name, weight in dense.items():
        rows, inputs = size = weight.shape[0], weight.shape[1]
        stored = format.read(Tensors(checkpoint, name.removesuffix(".weight")), Part(size, [(0, rows)], (0, inputs)))
        assert (kind in ROUNDED.get(library, [])) == (stored.inputs is not None)
        torch.testing.assert_close(stored.dequantised(), weight, rtol=1e-5, atol=1e-6)


def dense_of(folder: Path, kind: str, to: Path) -> Path:
    """A dense checkpoint of what the library makes of its layers, and of what else it stored, some in 16 bits."""
    shutil.copy(folder / "source" / "config.json", to)
    source, stored = (load_file(folder / of / "model.safetensors") for of in ("source", kind))
    tensors = {name: stored.get(name, tensor).float() for name, tensor in source.items()}
    save_file(tensors | load_file(folder / f"{kind}.dense.safetensors"), to / "model.safetensors")
    return to


@pytest.mark.parametrize(("library", "kind"), cases(WEIGHT_ONLY))
def test_logits_are_those_of_the_librarys_dense_model(made: Made, library: str, kind: str, tmp_path: Path) -> None:
    folder = made(library)
    expected, found = (
        all_logits(load_engine(path, warms_up=False), prompt_of(1))
        for path in (dense_of(folder, kind, tmp_path), folder / kind)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize(("library", "kind"), cases(ROUNDED))
def test_rounded_inputs_change_logits_little(made: Made, library: str, kind: str, tmp_path: Path) -> None:
    folder = made(library)
    dense, found = (
        all_logits(load_engine(path, warms_up=False), prompt_of(1))
        for path in (dense_of(folder, kind, tmp_path), folder / kind)
    )
    assert 0 < float((found - dense).norm() / dense.norm()) < 0.1
