"""`--cpu-inputs exact`: codes are read as they are, and so are inputs, as near to float32 as dense bfloat16 is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from host import cpu_kinds
from server import loading
from server.backends.cpu import CpuBackend
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.quantised import CodeFormat, LevelFormat
from server.quantisation.rounding import int4_groups, int8_weights
from server.quantisation.sizes import IN_FLIGHT
from tests import cpu_kernels
from tests.server.driver import all_logits, load_engine
from tests.server.quantisation.input_rounding import MOST, log_probabilities, with_outliers
from tests.server.quantisation.quantised_perplexity import MODEL, held_out
from tests.server.test_service import config_of


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return cpu_kernels.load_or_skip()


@pytest.mark.parametrize(("rounds_inputs", "format"), [(True, CodeFormat), (False, LevelFormat)])
def test_the_setting_chooses_the_kernel(kernels: Kernels, rounds_inputs: bool, format: type) -> None:
    weight = int4_groups(torch.randn(64, 128))
    backend = CpuBackend(kernels, torch.bfloat16, rounds_inputs=rounds_inputs)
    assert isinstance(backend.linear(weight), format)
    assert isinstance(CpuBackend(kernels, torch.float32).linear(weight), LevelFormat)


def test_keys_and_values_that_others_kept_are_not_taken(tmp_path: Path, kernels: Kernels) -> None:
    """What a prefix is kept under on disk says how inputs were read: exact ones are others' numbers."""
    found = set()
    for inputs in cpu_kinds.INPUTS:
        flags = {
            "prefix_cache_disk_gb": 0.1,
            "prefix_cache_dir": str(tmp_path),
            "dtype": "bfloat16",
            "quantize": "int4",
        }
        config = config_of(MODEL, tmp_path / "socket", cpu_inputs=inputs, cpu_kernels=cpu_kernels.asked(), **flags)
        _, info = loading.load(config)
        kept = loading.tiers(config, info)
        assert kept is not None
        found.add(kept.config.identity)
    assert 2 == len(found)


@pytest.mark.parametrize(("inputs", "name"), [(1024, "int4"), (1024, "eetq")])
def test_memory_is_planned(kernels: Kernels, inputs: int, name: str) -> None:
    weight, storage = torch.randn(256, inputs), IN_FLIGHT[name]
    quantised = int4_groups(weight) if name == "int4" else int8_weights(weight)
    for rounds_inputs, planned in ((True, storage), (False, storage.with_exact_inputs())):
        layer = CpuBackend(kernels, torch.bfloat16, rounds_inputs=rounds_inputs).linear(quantised)
        assert layer.nbytes == pytest.approx(planned.weight_bytes(256, inputs), rel=0.04)


def test_exact_inputs_err_as_dense_bfloat16_does_and_rounded_ones_more(kernels: Kernels, tmp_path: Path) -> None:
    folder, documents = with_outliers(tmp_path), held_out(20)

    def error(format: str | None, *, rounds_inputs: bool) -> float:
        true = log_probabilities(folder, documents, format, torch.float32, rounds_inputs=False)
        found = log_probabilities(folder, documents, format, torch.bfloat16, rounds_inputs=rounds_inputs)
        return float((found - true).abs().mean())

    dense, exact, rounded = (
        error(None, rounds_inputs=False),
        error("int4", rounds_inputs=False),
        error("int4", rounds_inputs=True),
    )
    assert exact <= MOST * dense
    assert rounded > 2 * MOST * dense  # so that the setting says something


def test_outliers_change_nothing_in_float32(tmp_path: Path) -> None:
    asked = [5, 9, 200, 31], [7]
    found, expected = (all_logits(load_engine(folder), *asked) for folder in (with_outliers(tmp_path), MODEL))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
