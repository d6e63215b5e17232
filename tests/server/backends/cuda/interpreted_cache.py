"""The Triton kernels over a KV cache of codes, in Triton's interpreter: run by `test_triton.py`, as the others are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, Float8E4M3, Float8E5M2, Int8, KvFormat
from tests.server.backends.cuda.interpreted_cases import quick_calls
from tests.server.backends.cuda.kernel_cases import CASES, ONE_SPLIT, check_codes, check_quantised
from tests.server.driver import Prompt, generate, load_engine
from tests.server.tiny import save_tiny

__all__ = ["quick_calls"]

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:overflow encountered in {what}:RuntimeWarning") for what in ("exp", "divide")
]
CPU = torch.device("cpu")
QUANTISED = [format for format in KV_FORMATS.values() if format != AS_COMPUTED]
FORMATS = pytest.mark.parametrize("format", [*QUANTISED, Float8E4M3((0.25, 3.0))], ids=lambda f: f"{f.name} {f.scales}")
# Every kernel, with and without splits, rotations, windows and biases: int8; float8 differs by what makes its codes.
NAMES = [
    ("decode, rotated", Int8()),
    ("decode, split, heads of 80 in a window", Int8()),
    ("decode, shared kv heads, split", Int8()),
    ("decode, shared kv heads, rotated pairs", Int8()),
    ("encoder", Int8()),
    ("decodes and a chunk, rotated", Int8()),
    ("decode, rotated", Float8E4M3((0.25, 3.0))),
    ("decodes and a chunk, rotated", Float8E4M3((0.25, 3.0))),
    ("decode, rotated", Float8E5M2()),
    ("a chunk in a window", Float8E5M2()),
]


@FORMATS
def test_what_is_stored_is_to_the_bit_what_the_reference_stores(format: KvFormat) -> None:
    check_codes(format, CPU)


@pytest.mark.parametrize(("name", "format"), NAMES, ids=lambda value: getattr(value, "name", value))
def test_attention_equals_the_reference(name: str, format: KvFormat) -> None:
    check_quantised(CASES[name], format, torch.float32, CPU)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["decode, shared kv heads, rotated pairs"])
def test_attention_in_16_bits_is_close_to_the_reference(name: str, format: KvFormat) -> None:
    check_quantised(CASES[name], format, torch.float16, CPU)


@pytest.mark.parametrize("format", [Int8()], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("case", "sizes"),
    [("bloom", {"n_layer": 1, "n_head": 2}), ("llama", {"num_hidden_layers": 1})],
    ids=["bloom", "llama"],
)
def test_a_model_gives_the_tokens_of_the_reference(
    case: str, sizes: dict[str, int], format: KvFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(case, tmp_path, **sizes)
    properties = SimpleNamespace(multi_processor_count=ONE_SPLIT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend = CudaBackend(CpuDevice(), torch.float32)
    engines = (
        load_engine(tmp_path, kv_cache=format.name),
        load_engine(tmp_path, backend=backend, kv_cache=format.name, captured=False, warms_up=False),
    )
    expected, found = (
        generate(engine, [Prompt(list(range(4, 11)), 2, chunk=4), Prompt([40, 50], 2, joins_at=1)])
        for engine in engines
    )
    assert [p.tokens for p in expected] == [p.tokens for p in found]
