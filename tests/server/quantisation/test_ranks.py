"""Shard-equality and invariance of quantised models in float32: 2, 4 and 8 ranks, and 15 neighbours, change no token.

Every pair of a format and a family runs at every world size by `make test-formats`; in the suite are those that between
them have every way to cut: groups and packed words along the inputs, blocks, experts, an encoder, a head in few bits; a
tied table that is quantised while it is loaded, interleaved projections; rows of keys and values; what activations are
divided by. Some models of a world size run in one process for each rank, for starting these takes longest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from server.ranks.collectives import Shard
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


@pytest.mark.parametrize(("name", "world_size"), RUNS)
def test_ranks_generate_the_tokens_of_one(models: Models, of_ranks: RunRanks, name: str, world_size: int) -> None:
    expected = tensor_parallel.tokens(models(name), Shard())
    assert [expected] * world_size == [tokens[name] for tokens in of_ranks(world_size, group_of(name, world_size))]


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
