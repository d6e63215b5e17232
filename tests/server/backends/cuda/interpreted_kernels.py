"""The Triton kernels on a CPU, in Triton's interpreter: run by `test_triton.py`, in a process of its own.

bfloat16 is left out: the interpreter computes on its bit patterns.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.backend import CudaBackend
from tests.server.backends.cuda.interpreted_cases import quick_calls
from tests.server.backends.cuda.kernel_cases import (
    CASES,
    ONE_SPLIT,
    STORED_CASES,
    Case,
    check_attention,
    check_attention_to_stored,
    check_gate,
    check_norm,
    check_norm_of_heads,
    check_padding,
    check_rotation,
    check_routing,
)
from tests.server.driver import Prompt, generate, load_engine
from tests.server.tiny import save_tiny

__all__ = ["quick_calls"]

# numpy, which interprets, says what a GPU leaves unsaid.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
CPU = torch.device("cpu")
# Tiles differ by dtype: every kind once in 16 bits, what production runs.
IN_16_BITS = [
    "decode, rotated",
    "decode, split, heads of 80 in a window",
    "decode, shared kv heads, rotated pairs",
    "decode, shared kv heads of 112, split, rotated",
    "decode, shared kv heads of 256, split",
    "decode, and with them split",
    "fresh prompts",
    "a chunk in a window",
    "a chunk with heads of 256",
]


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_reference(name: str) -> None:
    check_attention(CASES[name], torch.float32, CPU)


@pytest.mark.parametrize("name", IN_16_BITS)
def test_attention_in_16_bits_is_close_to_the_reference(name: str) -> None:
    check_attention(CASES[name], torch.float16, CPU)


@pytest.mark.parametrize("case", STORED_CASES.values(), ids=STORED_CASES.keys())
def test_attention_to_what_is_stored_equals_the_reference(case: Case) -> None:
    check_attention_to_stored(case, torch.float32, CPU)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (70, 1)], ids=["mha", "gqa", "mqa"])
def test_a_row_without_a_sequence_is_harmless(heads: int, kv_heads: int) -> None:
    check_padding(heads, kv_heads, torch.float32, CPU)


def test_splits_fill_the_gpu_and_no_more() -> None:
    from server.backends.cuda.kernels.splits import choose_splits

    assert 16 == choose_splits(programs=32, processors=132, tiles=1000)  # one sequence of 32 heads
    assert 1 == choose_splits(programs=32 * 32, processors=132, tiles=1000)
    assert 4 == choose_splits(programs=8, processors=132, tiles=7)  # a short sequence has no more to split
    assert 64 == choose_splits(programs=1, processors=132, tiles=1000)
    assert 16 == choose_splits(programs=1, processors=132, tiles=1000, rows=64)  # one program combines 1024 rows
    assert 1 == choose_splits(programs=10000, processors=132, tiles=0)


@pytest.mark.parametrize("processors", [1, 3, 132])
def test_every_program_of_a_split_sequence_has_a_place_to_arrive(processors: int) -> None:
    from server.backends.cuda.kernels.splits import choose_splits, processors_of

    places = len(processors_of(CPU, processors).arrivals)
    assert 1 == choose_splits(places + 1, processors, tiles=1000)
    assert any(choose_splits(programs, processors, tiles=1000) > 1 for programs in range(1, places + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_equal_the_operators(is_centred: bool, dtype: torch.dtype) -> None:
    check_norm(is_centred, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(
    ("counts", "size"), [((4, 1), 64), ((6, 2), 80), ((20, 9), 128)], ids=["one kv head", "odd size", "two tiles"]
)
def test_norms_of_heads_equal_the_operators(
    counts: tuple[int, int], size: int, is_centred: bool, dtype: torch.dtype
) -> None:
    check_norm_of_heads(counts, size, is_centred, dtype, CPU)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 8, 2), torch.float32),
        ((5, 6, 3), torch.float32),
        ((5, 6, 3), torch.float16),
        ((33, 9, 8), torch.float32),  # more pairs than a program looks at together
    ],
    ids=str,
)
def test_tokens_find_their_experts_as_by_the_operators(
    sizes: tuple[int, int, int], renormalise: bool, dtype: torch.dtype
) -> None:
    check_routing(sizes, renormalise, dtype, CPU)


@pytest.mark.parametrize("half", [40, 10], ids=["whole head", "part of a head"])
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotating_and_storing_equals_both_apart(is_interleaved: bool, half: int) -> None:
    check_rotation(is_interleaved, half, torch.float32, CPU)


@pytest.mark.parametrize("activation", Activation)
def test_gates_equal_the_operators(activation: Activation) -> None:
    check_gate(activation, torch.float32, CPU)


# Biased sums, layer norms and ALiBi; gates, rotations and norms of heads; heads that are rotated in part, and parallel
# branches; normalised summands; experts. Few layers and heads of each: the interpreter takes seconds for one.
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("bloom", {"n_layer": 2, "n_head": 2}),
        ("qwen3", {"num_hidden_layers": 1}),
        ("gpt_neox", {"num_hidden_layers": 2, "num_attention_heads": 4}),
        ("gemma2", {"num_hidden_layers": 2}),
        ("mixtral", {"num_hidden_layers": 1}),
    ],
    ids=["bloom", "qwen3", "gpt_neox", "gemma2", "mixtral"],
)
def test_a_model_on_the_backend_for_a_gpu_gives_the_tokens_of_the_reference(
    case: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(case, tmp_path, **sizes)
    properties = SimpleNamespace(multi_processor_count=ONE_SPLIT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend = CudaBackend(CpuDevice(), torch.float32)  # its kernels are interpreted, on tensors of the CPU
    engines = load_engine(tmp_path), load_engine(tmp_path, backend=backend, captured=False, warms_up=False)
    expected, found = (
        generate(engine, [Prompt(list(range(4, 11)), 2, chunk=4), Prompt([40, 50], 2, joins_at=1)])
        for engine in engines
    )
    assert [p.tokens for p in expected] == [p.tokens for p in found]
    for reference, fused in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.tensor(reference.logprobs), torch.tensor(fused.logprobs), atol=1e-4, rtol=0)
