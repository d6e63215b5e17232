"""Shard-equality and invariance of quantised models in float32: 2, 4 and 8 ranks, and 15 neighbours, change no token.

Every pair of a format and a family runs at every world size by `make test-formats`; in the suite are those that between
them have every way to cut: groups and packed words along the inputs, blocks, experts, an encoder, a head in few bits; a
tied table that is quantised while it is loaded, interleaved projections; rows of keys and values; what activations are
divided by. Some models of a world size run in one process for each rank, for starting these takes longest.

Where inputs, keys or values are rounded, what ranks sum in another order may be rounded the other way, on some
processors: then another token may come if it is nearly as good, which one rank proves by choosing it with a nudge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from server.backends.reference import quantised
from server.ranks.collectives import Shard
from server.stepping.next_tokens import TokenChooser
from server.stepping.sampling import Chosen
from server.stepping.sequences import SampledRow
from tests.server.checkpoints import Checkpoints
from tests.server.driver import Prompt, generate, load_engine
from tests.server.quantisation.cases import PAIRS, Quantised, prompt_of
from tests.server.quantisation.test_scaled_activations import with_scales
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import Tokens, run_ranks
from tests.server.tiny import save_tiny

# As `tensor_parallel.tokens` takes them, with a family in place of a folder.
OTHERS = [
    *("int8=mixtral", "int4=t5", "fp8=bloom", "int4=opt-350m", "bitsandbytes-nf4=mixtral", "eetq=chatglm3"),
    *("int4=llama-biased-tied", "bitsandbytes-fp4=falcon-40b", "int8=mt5", "bitsandbytes-nf4=gpt_neox"),
    *("bloom+int8", "llama+int8", "deepseek_v3+int8", "bloom+fp8_e4m3", "llama+fp8_e5m2", "starcoder2, divided"),
]
IN_SUITE = {
    2: [
        *("bloom-nf4-as-bfloat16", "bloom-mxfp4", "bloom-torchao-bytes", "llama-gptq-3", "llama-gptq-head"),
        *("llama-int8-fixed", "llama-float8-rows", "llama-nvfp4", "llama-quark-mixed", "llama-quark-rows"),
        *("llama-torchao-head", "llama-packed-table", "mistral-float8-blocks", "mixtral-int8", "t5-torchao-floats"),
        *OTHERS,
    ],
    4: ["baichuan-gptq", "deepseek-float8-blocks", "llama-packed-tied", "mixtral-awq", "t5-gptq"],
    8: [],
}
# What can be divided so runs at each world size.
MODELS = {
    2: [*PAIRS, *OTHERS],
    4: [*PAIRS, "int8=mt5", "bitsandbytes-fp4=falcon-40b"],
    8: [*PAIRS, "int4=llama-biased-tied", "bitsandbytes-nf4=gpt_neox"],
}
AT_ONCE = 16  # models, so that a slow machine is done with them long before a test must be
RUNS = [
    pytest.param(name, world_size, marks=[] if name in suite else [pytest.mark.formats])
    for world_size, suite in IN_SUITE.items()
    for name in MODELS[world_size]
]
NEAR = 0.1  # of two logits: 0.07 is what one part in 10^7 of all sums moved a log-probability by
MOST = 0.7  # of all tokens: so many must have been compared
AMONG_OTHERS = ["bloom-int8", "mistral-awq", "mixtral-gptq"]
Models = Callable[[str], str]
RunRanks = Callable[[int, tuple[str, ...]], list[Tokens]]


@pytest.fixture(scope="module")
def models(quantised_models: Quantised, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """What `tensor_parallel.tokens` takes for the name of a pair, or of one of OTHERS."""

    @cache
    def get(name: str) -> str:
        if name in PAIRS:
            return str(quantised_models(name)[0] / "quantised")
        if name.endswith(", divided"):
            folder = tmp_path_factory.mktemp("divided")
            save_tiny("starcoder2", folder)
            with_scales(folder, "starcoder2", is_divided=False)
            return str(folder)
        format, is_given, rest = name.rpartition("=")
        family, _, cache_dtype = rest.partition("+")
        return f"{format}{is_given}{checkpoints(family)[0]}{cache_dtype and '+'}{cache_dtype}"

    return get


@pytest.fixture(scope="module")
def of_ranks(models: Models, tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """The tokens of all ranks for these models at a world size; each group runs once."""

    @cache
    def get(world_size: int, group: tuple[str, ...]) -> list[Tokens]:
        names = {models(name): name for name in group}
        found = run_ranks(list(names), world_size, tmp_path_factory.mktemp("ranks") / "rendezvous")
        return [{names[model]: tokens[model] for model in names} for tokens in found]

    return get


def group_of(name: str, world_size: int) -> tuple[str, ...]:
    """The models that run at once with this one: all of them are in the suite, or none."""
    suite = IN_SUITE[world_size]
    names = [other for other in MODELS[world_size] if (other in suite) == (name in suite)]
    start = names.index(name) // AT_ONCE * AT_ONCE
    return tuple(names[start : start + AT_ONCE])


def nudged(model: str, prompt: int, place: int, token: int, best: int) -> list[int]:
    """What one rank generates for a prompt if there a token is NEAR better than it is, beside the best one."""
    choose = TokenChooser.__call__

    def choose_nudged(
        self: TokenChooser,
        rows: Sequence[SampledRow],
        logits: Callable[[slice], Tensor],
        *,
        positions: Tensor,
        **others: Any,
    ) -> list[Chosen]:
        def nudge(part: slice) -> Tensor:
            given = logits(part).clone()
            for row, position, at in zip(rows[part], positions[part].tolist(), given, strict=True):
                if (row.sequence.id, position) == (prompt, row.sequence.prompt_length + place):
                    at[token] += NEAR / 2
                    at[best] -= NEAR / 2
            return given

        return choose(self, rows, nudge, positions=positions, **others)

    with patch.object(TokenChooser, "__call__", choose_nudged):
        return tensor_parallel.tokens(model, Shard())[prompt]


def first_difference(one: list[int], other: list[int]) -> int:
    """The place of the first token that is not the other's; their number where all are."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def assert_near(model: str, expected: list[list[int]], found: list[list[int]]) -> None:
    """The tokens of each prompt are the same, up to one that was nearly as good as the best."""
    places = [first_difference(*both) for both in zip(expected, found, strict=True)]
    for prompt, place in enumerate(places):
        if place < len(expected[prompt]):
            best, token = expected[prompt][place], found[prompt][place]
            assert token == nudged(model, prompt, place, token, best)[place]
    assert sum(places) >= MOST * sum(map(len, expected))


@pytest.mark.parametrize(("name", "world_size"), RUNS)
def test_ranks_generate_the_tokens_of_one(models: Models, of_ranks: RunRanks, name: str, world_size: int) -> None:
    model = models(name)
    with patch.object(quantised, "InputRounding", wraps=quantised.InputRounding) as rounding:
        expected = tensor_parallel.tokens(model, Shard())
    found, *others = [tokens[name] for tokens in of_ranks(world_size, group_of(name, world_size))]
    assert [found] * (world_size - 1) == others
    if rounding.called or "+" in name:
        assert_near(model, expected, found)
    else:
        assert expected == found


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
