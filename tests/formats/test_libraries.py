"""Checkpoints that the real libraries wrote, each in an environment of its own: `make test-formats`.

Every layer must be read as the library itself dequantises it, and where inputs are taken as they are, log-probabilities
must be those of a dense model of these weights. An environment is made in `.venv-formats/NAME`, once for each NAME.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint import formats
from server.checkpoint.formats.protocol import Part, Tensors
from server.checkpoint.weights import Checkpoint
from server.layers.linear import LinearFormat
from server.quantisation import config_keys
from server.quantisation.stored import QuantisedWeight
from server.ranks.collectives import Shard
from tests.environments import NoEnvironment, environment
from tests.running import ROOT
from tests.server.driver import all_logits, load_engine
from tests.server.quantisation.cases import WEIGHTS, prompt_of
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks
from tests.server.tiny import CASES

HERE = Path(__file__).parent
APART = 2e-5  # how far log-probabilities may be from those of a dense model


class Packer(NamedTuple):
    """What a library's script makes: schemes of a Llama, and every family but some in one more.

    rounded: the schemes whose inputs are rounded too, families: how that of the families calls itself there; unmade:
    of which families it makes nothing, and what it or the script says then.
    """

    weight_only: Sequence[str]
    rounded: Sequence[str] = ()
    rounds_families: bool = False
    unmade: Mapping[str, str] = MappingProxyType({})

    @property
    def families(self) -> list[str]:
        return [case for case in CASES if case not in self.unmade]


FALCON = ("falcon-7b", "falcon-40b", "falcon-rw")  # its layers are of a class of their own
BLOOM, MPT, T5 = ("bloom", "bloom-normed-residual"), ("mpt", "mpt-clipped"), ("t5", "t5-gated", "mt5")
NOT_FALCON = dict.fromkeys(FALCON, "no layer is in fewer bits")
PACKERS = {
    "bitsandbytes": Packer(["nf4", "fp4", "int8"], unmade=NOT_FALCON),
    "llmcompressor": Packer(
        ["W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "MXFP4A16"],
        rounded=["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"],
        unmade=dict.fromkeys(FALCON, "not compressed") | {"gpt2": "has no attribute 'quantization_config'"},
    ),
    "gptqmodel": Packer(
        ["gptq-4", "gptq-4-act", "gptq-8", "gptq-3", "awq-4"],
        unmade=dict.fromkeys(T5, "Unrecognized configuration class"),
    ),
    "autoround": Packer(
        ["symmetric", "asymmetric", "as-gptq", "two-bits"],
        unmade=NOT_FALCON
        | dict.fromkeys(BLOOM, "index out of range")
        | dict.fromkeys(T5, "You must specify exactly one of input_ids or inputs_embeds"),
    ),
    "modelopt": Packer(
        ["nvfp4"],
        rounded=["fp8", "fp8-rows"],
        rounds_families=True,
        unmade=NOT_FALCON
        | dict.fromkeys(BLOOM, "list index out of range")
        | dict.fromkeys(MPT, "Actual method must have closure"),
    ),
    "quark": Packer(
        [
            *("uint4-groups", "uint4-groups-in-order", "int4-groups", "int4-groups-in-order", "int4-groups-asymmetric"),
            *("int4-rows", "int4-rows-asymmetric", "int4-of-all-asymmetric", "uint4-rows-in-order", "uint4-of-all"),
            *("int8-groups", "int8-groups-asymmetric", "uint8-groups", "int8-rows", "int8-rows-asymmetric"),
            *("uint8-rows", "uint8-of-all", "fp8-of-all", "fp8-rows", "mxfp4", "mxfp4-inputs", "mixed"),
        ],
        rounded=["fp8-fixed", "fp8-tokens", "int8-fixed", "int8-fixed-asymmetric"],
        unmade=NOT_FALCON | {"gpt2": "no layer is in fewer bits"},
    ),
    "torchao": Packer(
        [
            *("int8", "int8-groups", "int8-all", "float8", "float8-groups", "float8-all", "four-bits"),
            *("four-bits-asymmetric", "three-bits", "six-bits", "int4", "int4-words"),
        ],
        unmade={"gpt2": "no layer is in fewer bits"},
    ),
}
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
        # Layers so small have more than one thread wait for the others.
        given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        found = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=3600)
        assert found.returncode == 0, found.stderr[-4000:]
        return folder

    return get


def cases(*, rounded: bool = False, families: bool = True) -> list[tuple[str, str]]:
    """Every library with each of its kinds whose inputs are or are not rounded."""
    return [
        (library, kind)
        for library, packer in PACKERS.items()
        for kind in kinds_of(packer, rounded=rounded, families=families)
    ]


def kinds_of(packer: Packer, *, rounded: bool, families: bool = True) -> list[str]:
    schemes = packer.rounded if rounded else packer.weight_only
    return [*schemes, *(packer.families if families and rounded == packer.rounds_families else ())]


@pytest.mark.parametrize(("library", "kind"), cases() + cases(rounded=True))
def test_every_layer_is_what_the_library_makes_of_it(made: Made, library: str, kind: str) -> None:
    folder = made(library)
    assert not (why := folder / f"{kind}.txt").exists(), why.read_text()
    config = json.loads((folder / kind / "config.json").read_text())
    format, checkpoint = formats.find(folder / kind, config), Checkpoint(folder / kind)
    assert format is not None
    for name, weight in load_file(folder / f"{kind}.dense.safetensors").items():
        rows, inputs = size = weight.shape[0], weight.shape[1]
        stored = format.read(Tensors(checkpoint, name.removesuffix(".weight")), Part(size, [(0, rows)], (0, inputs)))
        assert (kind in kinds_of(PACKERS[library], rounded=True)) == (stored.inputs is not None)
        torch.testing.assert_close(stored.dequantised(), weight, rtol=1e-5, atol=1e-6)


UNMADE = [(library, case, says) for library, packer in PACKERS.items() for case, says in packer.unmade.items()]


@pytest.mark.parametrize(("library", "case", "says"), UNMADE)
def test_what_a_library_does_not_make_is_still_not_made(made: Made, library: str, case: str, says: str) -> None:
    assert says in (made(library) / f"{case}.txt").read_text()


def test_every_setting_of_torchao_is_known(made: Made) -> None:
    for name, settings in json.loads((made("torchao") / "settings.json").read_text()).items():
        known = (*config_keys.SERVED_OF_TORCHAO[name], *config_keys.READ_OF_TORCHAO[name])
        assert set(settings) - {"version"} <= {*known, *config_keys.WITHOUT_MEANING_OF_TORCHAO}


def dense_of(folder: Path, kind: str, to: Path) -> Path:
    """A dense checkpoint of what the library makes of its layers, and of what else it stored, some in 16 bits."""
    to.mkdir(exist_ok=True)
    shutil.copy(folder / "source" / kind / "config.json", to)
    given = load_file(folder / "source" / kind / "model.safetensors")
    stored, dense = load_file(folder / kind / "model.safetensors"), load_file(folder / f"{kind}.dense.safetensors")
    layers = {name.removesuffix(".weight") for name in dense}
    turned = {name: weight.t().contiguous() for name, weight in dense.items() if is_turned(weight, given.get(name))}
    others = {
        name: tensor.float() for name, tensor in stored.items() if name.endswith(".bias") or not is_of(name, layers)
    }
    save_file(others | dense | turned, to / "model.safetensors")
    return to


def is_turned(weight: torch.Tensor, given: torch.Tensor | None) -> bool:
    """Whether a layer was given as [inputs, outputs], as GPT-2 has its own. Experts may be in one tensor."""
    if given is None or given.shape != weight.t().shape:
        return False
    return weight.shape != given.shape or bool((weight.t() - given).norm() < (weight - given).norm())


def is_of(name: str, layers: Collection[str]) -> bool:
    """Whether a tensor belongs to one of these layers, behind whose name there may be several parts."""
    return any(name[:place] in layers for place, letter in enumerate(name) if letter == ".")


class ExactInputs(ReferenceBackend):
    """Takes inputs as they are where a checkpoint's are rounded."""

    def quantised(self, weight: QuantisedWeight, **given: Any) -> LinearFormat:
        return super().quantised(replace(weight, inputs=None), **given)


def log_probabilities(folder: Path) -> torch.Tensor:
    """Of 32 tokens [32, V], with exact inputs."""
    engine = load_engine(folder, backend=ExactInputs(CpuDevice()), warms_up=False)
    return all_logits(engine, prompt_of(1, length=32)).log_softmax(-1)


@pytest.mark.parametrize(("library", "kind"), cases() + cases(rounded=True))
def test_log_probabilities_are_those_of_the_librarys_dense_model(
    made: Made, library: str, kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = made(library)
    found = log_probabilities(folder / kind)
    apart = float((found - log_probabilities(dense_of(folder, kind, tmp_path / kind))).abs().max())
    record_property("apart", apart)
    assert apart <= APART


@pytest.mark.parametrize("library", PACKERS)
def test_two_ranks_generate_the_tokens_of_one(made: Made, library: str, tmp_path: Path) -> None:
    folder, packer = made(library), PACKERS[library]
    kinds = kinds_of(packer, rounded=False) + kinds_of(packer, rounded=True)
    dense = [dense_of(folder, kind, tmp_path / kind) for kind in kinds_of(packer, rounded=False)]
    of_one = dense + [folder / kind for kind in kinds_of(packer, rounded=True)]
    expected = {
        str(folder / kind): tensor_parallel.tokens(one, Shard()) for kind, one in zip(kinds, of_one, strict=True)
    }
    assert [expected] * 2 == run_ranks([folder / kind for kind in kinds], 2, tmp_path / "rendezvous")


@pytest.mark.parametrize(("library", "kind"), cases(rounded=True, families=False))
def test_rounded_inputs_change_logits_little(made: Made, library: str, kind: str, tmp_path: Path) -> None:
    folder = made(library)
    dense, found = (
        all_logits(load_engine(path, warms_up=False), prompt_of(1))
        for path in (dense_of(folder, kind, tmp_path), folder / kind)
    )
    assert 0 < float((found - dense).norm() / dense.norm()) < 0.15  # float8 has 3 bits of a fraction


@pytest.mark.parametrize("kind", PACKERS["quark"].rounded)
def test_rounded_inputs_give_the_logits_that_quark_computes(made: Made, kind: str) -> None:
    """Of most tokens: an input between two codes may become the other one, which changes what comes behind it."""
    own = load_file(made("quark") / f"{kind}.logits.safetensors")
    found = all_logits(load_engine(made("quark") / kind, warms_up=False), own["ids"].tolist())
    assert (found - own["logits"]).abs().amax(1).median() <= WEIGHTS
