"""Shard-equality and invariance of quantised models in float32: 2, 4 and 8 ranks, and 15 neighbours, change no token.

Every pair of a format and a family runs at every world size by `make test-formats`; in the suite are those that between
them have every way to cut: groups and packed words along the inputs, blocks, experts, an encoder, a head in few bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from server.ranks.collectives import Shard
from tests.server.driver import Prompt, generate, load_engine
from tests.server.quant.cases import PAIRS, Quantised, prompt_of
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import Tokens, run_ranks

IN_SUITE = {
    2: [
        "bloom-nf4",
        "bloom-nf4-as-bfloat16",
        "llama-gptq-3",
        "llama-int8-fixed",
        "llama-nvfp4",
        "llama-quark",
        "llama-quark-rows",
        "llama-torchao",
        "bloom-torchao-bytes",
        "mixtral-int8",
        "t5-float8",
    ],
    4: [
        "baichuan-packed",
        "llama-packed-table",
        "llama-packed-tied",
        "bloom-int8",
        "mistral-float8-blocks",
        "t5-gptq",
        "llama-quark-mixed",
        "bloom-quark-eight-bits",
        "llama-torchao",
        "llama-torchao-head",
        "t5-torchao-floats",
    ],
    8: ["baichuan-gptq", "bloom-mxfp4", "llama-gptq-head", "llama-packed", "mixtral-awq", "llama-float8-rows"],
}
RUNS = [
    pytest.param(name, world_size, name in suite, marks=[] if name in suite else [pytest.mark.formats])
    for world_size, suite in IN_SUITE.items()
    for name in PAIRS
]
AMONG_OTHERS = ["bloom-int8", "mistral-awq", "mixtral-gptq"]
RunRanks = Callable[[int, bool], list[Tokens]]


@pytest.fixture(scope="module")
def of_ranks(quantised_models: Quantised, tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """The tokens of all ranks for every pair that is in the suite at a world size, or is not; each group runs once."""

    @cache
    def get(world_size: int, is_in_suite: bool) -> list[Tokens]:
        names = [name for name in PAIRS if (name in IN_SUITE[world_size]) == is_in_suite]
        folders = {str(quantised_models(name)[0] / "quantised"): name for name in names}
        found = run_ranks(list(map(Path, folders)), world_size, tmp_path_factory.mktemp("ranks") / "rendezvous")
        return [{folders[folder]: tokens[folder] for folder in folders} for tokens in found]

    return get


@pytest.mark.parametrize(("name", "world_size", "is_in_suite"), RUNS)
def test_ranks_generate_the_tokens_of_one(
    quantised_models: Quantised, of_ranks: RunRanks, name: str, world_size: int, is_in_suite: bool
) -> None:
    expected = tensor_parallel.tokens(quantised_models(name)[0] / "quantised", Shard())
    assert [expected] * world_size == [tokens[name] for tokens in of_ranks(world_size, is_in_suite)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in AMONG_OTHERS else [pytest.mark.formats]) for name in PAIRS]
)
def test_fifteen_neighbours_change_no_token(quantised_models: Quantised, name: str) -> None:
    engine = load_engine(quantised_models(name)[0] / "quantised", warms_up=False)
    engine.allocate(4096, total_tokens=4096)
    (alone,) = generate(engine, [Prompt(prompt_of(0))])
    others = [Prompt(prompt_of(seed, 3 + 2 * seed), joins_at=seed % 4, chunk=16) for seed in range(1, 16)]
    among = generate(engine, [Prompt(prompt_of(0), joins_at=2), *others])[0]
    assert alone.tokens == among.tokens
    assert torch.tensor(alone.logprobs).allclose(torch.tensor(among.logprobs), atol=1e-2)
