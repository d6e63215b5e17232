"""The Triton kernels on a CPU, in Triton's interpreter: run by `test_triton.py`, in a process of its own.

bfloat16 is left out: the interpreter computes on its bit patterns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from server.arch.spec import Activation, Scoring
from server.quantisation.kv import AS_COMPUTED, KV_FORMATS, Float8E4M3, Float8E5M2, Int8, KvFormat
from tests.server.backends.cuda.interpreted_cases import check_model, inside, interpreted_backend, quick_calls
from tests.server.backends.cuda.kernel_cases import (
    CASES,
    LATENT_CASES,
    SPLIT_CHUNKS,
    STORED_CASES,
    check_attention,
    check_attention_to_stored,
    check_codes,
    check_gate,
    check_latent,
    check_norm,
    check_norm_of_heads,
    check_padding,
    check_quantised,
    check_rotation,
    check_routing,
    check_split_chunk,
    in_suite,
)
from tests.server.backends.recurrence_cases import CASES as RECURRENCES
from tests.server.backends.recurrence_cases import Case as RecurrenceCase
from tests.server.backends.recurrence_cases import Rule, check_cuts, check_steps, meta_of
from tests.server.backends.test_attention import step_of

__all__ = ["inside", "quick_calls"]

# numpy, which interprets, says what a GPU leaves unsaid.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:overflow encountered in {what}:RuntimeWarning") for what in ("exp", "divide")
]
CPU = torch.device("cpu")
# A kernel and a way through it once; the others run in `make test-kernels`.
IN_SUITE = [
    "decode, rotated",
    "decode, split, heads of 80 in a window",
    "decode, learned bias",
    "decode, split, sinks in a window",
    "decode, shared kv heads, sinks",
    "decode, shared kv heads, split",
    "decode, shared kv heads, rotated pairs",
    "decode, and with them split",
    "decode, shared kv heads of 512 in chunks, split",
    "decode, split alike",
    "decode, shared kv heads, split alike",
    "decode, one sequence",
    "decode, many, split as they are long",
    "decode, shared kv heads, many, split as they are long",
    "a prompt behind a cached prefix",
    "a chunk in chunks",
    "a chunk with heads of 256",
    "a chunk in a window with sinks",
    "encoder in a window",
    "decodes and a chunk, rotated",
]
# Tiles differ by dtype: every kind in 16 bits, what production runs.
IN_16_BITS = [
    "decode, shared kv heads of 112, split, rotated",
    "fresh prompts",
    "decode, rotated",
    "decode, split, heads of 80 in a window",
    "decode, shared kv heads, rotated pairs",
    "decode, shared kv heads of 256, split",
    "decode, and with them split",
    "a chunk in a window",
    "a chunk with heads of 256",
    "decode, shared kv heads of 512 in chunks, split",
    "a chunk with heads of 512",
]
QUANTISED = [format for format in KV_FORMATS.values() if format != AS_COMPUTED]
SCALED = Float8E4M3((0.25, 3.0))
# Every kernel, with and without splits, rotations, windows and biases: int8; float8 differs by what makes its codes.
CODES = [
    ("decode, split, heads of 80 in a window", Int8()),
    ("decodes and a chunk, rotated", SCALED),
    ("a chunk in a window", Float8E5M2()),
    ("decode, rotated", Int8()),
    ("decode, shared kv heads, split", Int8()),
    ("decode, shared kv heads, rotated pairs", Int8()),
    ("encoder", Int8()),
    ("decodes and a chunk, rotated", Int8()),
    ("decode, rotated", SCALED),
    ("decode, rotated", Float8E5M2()),
]


def named(value: object) -> str | None:
    """What a format is called."""
    return f"{value.name} {value.scales}" if hasattr(value, "scales") else None


@pytest.mark.parametrize("name", in_suite(IN_SUITE, CASES))
def test_attention_equals_the_reference(name: str) -> None:
    check_attention(CASES[name], torch.float32, CPU)


@pytest.mark.parametrize("name", in_suite(IN_16_BITS[:2], IN_16_BITS))
def test_attention_in_16_bits_is_close_to_the_reference(name: str) -> None:
    check_attention(CASES[name], torch.float16, CPU)


@pytest.mark.parametrize("name", SPLIT_CHUNKS)
@pytest.mark.parametrize("dtype", in_suite([torch.float32], [torch.float16]), ids=str)
def test_split_keys_of_chunks_give_what_they_do_unsplit(name: str, dtype: torch.dtype) -> None:
    check_split_chunk(SPLIT_CHUNKS[name], dtype, CPU)


@pytest.mark.parametrize(("name", "format"), in_suite(CODES[:3], CODES), ids=named)
def test_attention_over_codes_equals_the_reference(name: str, format: KvFormat) -> None:
    check_quantised(CASES[name], format, torch.float32, CPU)


@pytest.mark.parametrize("format", in_suite(QUANTISED[:1], QUANTISED), ids=named)
def test_attention_over_codes_in_16_bits_is_close_to_the_reference(format: KvFormat) -> None:
    check_quantised(CASES["decode, shared kv heads, rotated pairs"], format, torch.float16, CPU)


@pytest.mark.parametrize("format", in_suite([Int8(), SCALED, Float8E5M2()], QUANTISED), ids=named)
def test_codes_are_to_the_bit_what_the_reference_stores(format: KvFormat) -> None:
    check_codes(format, CPU)


@pytest.mark.parametrize("name", STORED_CASES)
def test_attention_to_what_is_stored_equals_the_reference(name: str) -> None:
    check_attention_to_stored(STORED_CASES[name], torch.float32, CPU)


@pytest.mark.parametrize("name", LATENT_CASES)
def test_attention_over_rows_that_are_keys_and_values_equals_the_reference(name: str) -> None:
    check_latent(LATENT_CASES[name], torch.float32, CPU)


def test_attention_over_such_rows_in_16_bits_is_close_to_the_reference() -> None:
    check_latent(LATENT_CASES["decodes and chunks"], torch.float16, CPU)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (70, 1)], ids=["mha", "gqa", "mqa"])
def test_a_row_without_a_sequence_is_harmless(heads: int, kv_heads: int) -> None:
    check_padding(heads, kv_heads, torch.float32, CPU)


def test_splits_fill_the_gpu_and_no_more() -> None:
    from server.backends.cuda.kernels.splits import choose_splits, processors_of

    processors = processors_of(CPU, 132, None)
    assert 16 == choose_splits(32, processors, tiles=1000)  # one sequence of 32 heads
    assert 1 == choose_splits(32 * 32, processors, tiles=1000)
    assert 4 == choose_splits(8, processors, tiles=7)  # a short sequence has no more to split
    assert 64 == choose_splits(1, processors, tiles=1000)
    assert 16 == choose_splits(1, processors, tiles=1000, rows=64)  # one program combines 1024 rows
    assert 1 == choose_splits(10000, processors, tiles=0)


@pytest.mark.parametrize("processors", [1, 3, 132])
def test_every_program_of_a_split_sequence_has_a_place_to_arrive(processors: int) -> None:
    from server.backends.cuda.kernels.splits import choose_splits, processors_of

    made = processors_of(CPU, processors, None)
    places = len(made.arrivals)
    assert 1 == choose_splits(places + 1, made, tiles=1000)
    assert any(choose_splits(programs, made, tiles=1000) > 1 for programs in range(1, places + 1))


# Keys of each sequence, programs of one that is not split, and into how many parts they are split on an H100.
LENGTHS = {
    "one of 32,000 among short ones": ([500] * 31 + [32_000], 8, [1] * 31 + [34]),
    "all as long": ([1000] * 32, 32, [1] * 32),
    "few, all as long": ([1000] * 4, 32, [4] * 4),
    "a longest one that has the most parts": ([1] * 99 + [1_000_000], 1, [1] * 99 + [64]),
    "rows that nobody fills": ([0, 9000, 0, 0], 32, [1, 12, 1, 1]),
    "more programs than are wanted": ([64 * n for n in range(1, 301)], 600, [1] * 300),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_sequences_of_many_are_split_by_their_lengths(case: str) -> None:
    from server.backends.cuda.kernels.splits import divide, processors_of

    lengths, programs, expected = LENGTHS[case]
    meta = replace(step_of([(1, 1)] * len(lengths), 512, seed=3), visible=torch.tensor(lengths))
    processors = processors_of(CPU, 132, None)
    division = divide(meta, processors, 4, 16, programs=programs, tiles=1000, rows=4)
    assert division.plan is not None and division.parts is not None
    assert division.grid == (division.plan.shape[1], programs, 1)
    assert division.parts.shape == (division.plan.shape[1], 4, 16)
    planned = [tuple(column) for column in division.plan.T.tolist()]
    owned = [[row for row in planned if row[0] == sequence] for sequence in range(len(lengths))]
    assert expected == [len(rows) for rows in owned]
    assert sum(expected) == sum(row[0] >= 0 for row in planned)
    for rows in owned:
        assert [(part, len(rows)) for part in range(len(rows))] == [row[1:3] for row in rows]
        assert {planned.index(rows[0])} == {row[3] for row in rows}
    meetings = [{row[4] for row in rows} for rows in owned if len(rows) > 1]
    assert [{number} for number in range(len(meetings))] == meetings
    assert len(meetings) * programs <= len(processors.arrivals)
    assert division.plan is divide(meta, processors, 4, 16, programs=programs, tiles=9, rows=4).plan


@pytest.mark.parametrize("sequences", [1, 3, 100])
def test_lengths_do_not_decide_which_kernel_is_compiled(sequences: int) -> None:
    from server.backends.cuda.kernels.splits import divide, processors_of

    processors = processors_of(CPU, 132, None)
    meta = step_of([(1, 1)] * sequences, 512, seed=3)
    short, long = (divide(meta, processors, 4, 16, programs=8, tiles=tiles, rows=4) for tiles in (1, 1000))
    given = [(division.parts is None, division.plan is None) for division in (short, long)]
    assert given[0] == given[1] == (False, sequences < 100)


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


@pytest.mark.parametrize(
    ("sizes", "renormalise", "dtype", "scoring"),
    [
        ((1, 8, 2), True, torch.float32, Scoring.SOFTMAX),
        ((5, 6, 3), False, torch.float16, Scoring.SOFTMAX),
        ((33, 9, 8), True, torch.float32, Scoring.SOFTMAX),  # more pairs than a program looks at together
        ((5, 6, 3), True, torch.float32, Scoring.SIGMOID),
        ((5, 8, 3), False, torch.float32, Scoring.SIGMOID),  # in groups
        ((5, 6, 2), False, torch.float32, Scoring.SPARSE_MIXER),
    ],
    ids=str,
)
def test_tokens_find_their_experts_as_by_the_operators(
    sizes: tuple[int, int, int], renormalise: bool, dtype: torch.dtype, scoring: Scoring
) -> None:
    check_routing(sizes, renormalise, dtype, CPU, scoring)


@pytest.mark.parametrize("half", [40, 10], ids=["whole head", "part of a head"])
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotating_and_storing_equals_both_apart(is_interleaved: bool, half: int) -> None:
    check_rotation(is_interleaved, half, torch.float32, CPU)


@pytest.mark.parametrize("activation", Activation)
def test_gates_equal_the_operators(activation: Activation) -> None:
    check_gate(activation, torch.float32, CPU)


OF_EACH_KIND = ["Mamba-2, norm behind", "gated delta rule", "short convolution"]
STEPS_OF_EACH = list(zip(OF_EACH_KIND, (torch.float32, torch.float32, torch.float16), strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"), in_suite(STEPS_OF_EACH, product(RECURRENCES, (torch.float32, torch.float16)))
)
def test_recurrences_equal_the_operators(name: str, dtype: torch.dtype) -> None:
    case = RECURRENCES[name]
    check_steps(case, rule_of(case), dtype)


@pytest.mark.parametrize("name", in_suite(OF_EACH_KIND, RECURRENCES))
def test_cuts_and_neighbours_change_no_bit(name: str) -> None:
    check_cuts(RECURRENCES[name], rule_of(RECURRENCES[name]), [1, 3, 2])


@pytest.mark.parametrize("name", in_suite(OF_EACH_KIND, RECURRENCES))
def test_rows_of_nobody_change_no_others(name: str) -> None:
    case, state = RECURRENCES[name], RECURRENCES[name].states
    rule_of(case)(*case.inputs(3, 0), state, meta_of([(3, 0, 1), (0, 0, 1), (0, 0, 1)], 3))
    assert torch.equal(state[1:3], case.states[1:3]) and torch.equal(state[4:], case.states[4:])


def rule_of(case: RecurrenceCase) -> Rule:
    """As the backend for GPUs makes it."""
    with interpreted_backend() as backend:
        rule = case.make(backend, case.weights)
    assert type(rule) is not case.stock
    return rule


# Normalised summands, windows and capped scores; biased sums, layer norms and ALiBi; gates, rotations and norms of
# heads; heads that are rotated in part, and parallel branches; experts; sinks; codes. Few layers and heads of each: the
# interpreter takes seconds for one. The suite has BLOOM in `test_host_sums.py`, experts in `interpreted_quantised.py`.
GEMMA4_TYPES = ["sliding_attention", "full_attention"] * 2
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"num_hidden_layers": 2}, "auto"),
    ("llama", {"num_hidden_layers": 1}, "int8"),
    ("deepseek_v3", {"num_hidden_layers": 2}, "auto"),  # compressed keys and values
    ("deepseek_v2-lite", {"num_hidden_layers": 2}, "int8"),
    ("bloom", {"n_layer": 2, "n_head": 2}, "auto"),
    ("qwen3", {"num_hidden_layers": 1}, "auto"),
    ("gpt_neox", {"num_hidden_layers": 2, "num_attention_heads": 4}, "auto"),
    ("mixtral", {"num_hidden_layers": 1}, "auto"),
    ("gpt_oss", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, "auto"),
    ("qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, "auto"),
    ("bloom", {"n_layer": 1, "n_head": 2}, "int8"),
    ("glm4_moe", {"num_hidden_layers": 2}, "auto"),  # sigmoids in groups, a shared expert
    ("olmo2", {"num_hidden_layers": 2}, "auto"),  # norms of rows and of outputs
    ("hunyuan_v1_dense", {"num_hidden_layers": 2}, "auto"),  # norms behind the rotation
    ("ministral3", {"num_hidden_layers": 2}, "auto"),  # queries that grow
    ("gemma4-e", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": GEMMA4_TYPES}, "auto"),
    ("gemma4-a", {"num_hidden_layers": 2, "layer_types": GEMMA4_TYPES[:2]}, "auto"),
    ("llama4", {"num_hidden_layers": 3}, "auto"),
]


@pytest.mark.parametrize(("case", "sizes", "kv_cache"), in_suite(MODELS[:3], MODELS))
def test_a_model_gives_the_tokens_of_the_reference(
    case: str, sizes: dict[str, Any], kv_cache: str, tmp_path: Path
) -> None:
    check_model(case, tmp_path, sizes, kv_cache=kv_cache)
