"""What a sequence with an adapter gets is what the merged model gives it, whatever its neighbours have."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from server.adapters.names import plain_name
from server.arch import families
from server.arch.stages import stages_of
from server.backends.cpu.kernels import Kernels
from server.checkpoint.weights import Checkpoint, Weights
from server.model.load import changed_elsewhere
from server.ranks.collectives import Shard
from tests.combinations import by_turns
from tests.server.adapters import made
from tests.server.checkpoints import Checkpoints
from tests.server.driver import GREEDY, Drafter, Prompt, generate, load_engine, place_adapters, sampled
from tests.server.model.test_pipeline import pipeline
from tests.server.quantisation import quantised
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks

PROMPT = [int(i) for i in torch.randint(4, 103, (40,), generator=torch.Generator().manual_seed(1))]
CASES = (
    *("bloom", "opt", "gpt2", "gpt_neox", "falcon-7b", "llama", "mistral", "qwen3", "gemma3_text", "phi3", "t5-gated"),
    *("qwen3_5", "granitemoehybrid-dense"),
)
MIXTURES = ("mixtral", "qwen3_moe", "granitemoe")
WAYS = ("reference", "kernels")
PUBLISHED = {
    "gptq": quantised.gptq(4, 32),
    "gptq-3-disordered": quantised.gptq(3, 32, is_ordered=False),
    "awq": quantised.awq(32),
    "packed": quantised.compressed_packed(4, 32, is_symmetric=False),
    "nf4": quantised.bitsandbytes("nf4", is_nested=True),
    "mxfp4": quantised.mxfp4(),
}
OF_RANKS = {
    2: ("bloom", "gpt2", "llama-biased-tied", "falcon-40b", "t5-gated", "opt-350m"),
    4: ("bloom", "chatglm3", "qwen3_5", "phi3", "granitemoehybrid-dense"),
}


def prompts() -> list[Prompt]:
    """Of several kinds of requests, which join one after the other."""
    ways = (GREEDY, sampled(3), sampled(4, top_k=20))
    return [Prompt(PROMPT[n:], max_new_tokens=12, sampling=way, joins_at=n, chunk=17) for n, way in enumerate(ways)]


@pytest.mark.parametrize(("case", "way"), [*by_turns(CASES, WAYS), *product(MIXTURES, WAYS)])
@torch.inference_mode()
def test_tokens_are_those_of_the_merged_models(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, case: str, way: str
) -> None:
    folder, _ = checkpoints(case)
    adapters = made.make_several(folder, tmp_path, is_transposed=case == "gpt2")
    chosen = kernels if way == "kernels" else None
    engine = load_engine(folder, kernels=chosen, adapters=3)
    place_adapters(engine, [one.folder for one in adapters])
    rows = (2, 0, 1)
    together = generate(engine, [replace(p, adapter=row) for row, p in zip(rows, prompts(), strict=True)])
    others = [folder, *(one.merged for one in adapters)]
    for row, mine, alone in zip(rows, together, prompts(), strict=True):
        (expected,) = generate(load_engine(others[row], kernels=chosen), [replace(alone, joins_at=0)])
        assert mine.tokens == expected.tokens
        assert mine.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_generate_the_tokens_of_one(checkpoints: Checkpoints, tmp_path: Path, world_size: int) -> None:
    models = []
    for case in OF_RANKS[world_size]:
        (tmp_path / case).mkdir()
        adapters = made.make_several(checkpoints(case)[0], tmp_path / case, is_transposed=case == "gpt2")
        models.append(f"{checkpoints(case)[0]}~{','.join(str(one.folder) for one in adapters)}")
    expected = {model: tensor_parallel.tokens(model, Shard()) for model in models}
    assert [expected] * world_size == run_ranks(models, world_size, tmp_path / "rendezvous")


@pytest.mark.parametrize("case", ["bloom", "t5-gated", "qwen3_5"])
def test_stages_generate_the_tokens_of_the_whole(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    folder = checkpoints(case)[0]
    folders = [one.folder for one in made.make_several(folder, tmp_path)]
    sizes = {"warms_up": False, "tokens": 1024, "total_tokens": 64, "adapters": 2}
    whole = load_engine(folder, **sizes)  # type: ignore[arg-type]
    place_adapters(whole, folders)
    with pipeline(folder, 3, adapters=2) as stages:
        for engine in stages.engines:
            place_adapters(engine, folders)
        found, expected = (generate(one, asked_of_ranks()) for one in (stages, whole))  # type: ignore[arg-type]
        assert [(p.tokens, p.logprobs) for p in found] == [(p.tokens, p.logprobs) for p in expected]


@pytest.mark.parametrize("case", ["opt", "gpt2", "bloom", "gemma4-e"])
def test_stages_pass_over_what_others_have_and_nothing_else(checkpoints: Checkpoints, case: str) -> None:
    """So that what no stage changes, such as learned positions, is refused by the one that has it."""
    folder = checkpoints(case)[0]
    family, spec = families.find(json.loads((folder / "config.json").read_text()))
    checkpoint = Checkpoint(folder)
    weights = Weights.open(checkpoint, family.names, Shard(), torch.float32, torch.device("cpu"))
    names = {plain_name(name) for name in checkpoint.names()}
    stages = stages_of(spec, 2)
    passed_over = []
    for stage in stages:
        others = tuple(f"{plain_name(name)}." for name in changed_elsewhere(weights, stage, spec.num_layers))
        passed_over.append({name for name in names if name.startswith(others)})
    assert names == passed_over[0] | passed_over[1] and not passed_over[0] & passed_over[1]
    assert any("norm" in name or "ln_f" in name for name in passed_over[0] if "layers" not in name)
    tables = {name for name in names if "wpe" in name or "embed" in name}
    assert tables and tables <= passed_over[1]


def asked_of_ranks() -> list[Prompt]:
    """Two of three prompts have adapters."""
    return [replace(prompt, adapter=i % 3) for i, prompt in enumerate(tensor_parallel.prompts())]


@pytest.mark.parametrize("case", ["bloom", "llama", "qwen3_5"])
def test_guesses_change_nothing(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, case: str) -> None:
    folder = checkpoints(case)[0]
    engine = load_engine(folder, kernels=kernels, adapters=2, warms_up=False, tokens=1024, total_tokens=64)
    place_adapters(engine, [one.folder for one in made.make_several(folder, tmp_path)])
    plain = generate(engine, asked_of_ranks())
    drafter = Drafter([prompt.tokens for prompt in plain])
    drafted = generate(engine, asked_of_ranks(), drafter)
    assert drafter.accepted and drafter.refused
    assert [(p.tokens, p.logprobs) for p in plain] == [(p.tokens, p.logprobs) for p in drafted]


@pytest.mark.parametrize("quantise", ["eetq", "int4"])
def test_layers_that_are_quantised_while_loading_are_changed_as_their_dequantised_weights_are(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, quantise: str
) -> None:
    folder = checkpoints("llama")[0]
    dense = made.dequantised(folder, quantise, tmp_path)
    check_over_quantised(folder, dense, kernels, tmp_path, quantise=quantise, quantise_head="none")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", PUBLISHED, ids=list(PUBLISHED))
def test_layers_of_quantised_checkpoints_are_changed_as_their_dequantised_weights_are(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, how: str, way: str
) -> None:
    quantised.quantise(checkpoints("llama")[0], tmp_path, PUBLISHED[how])
    chosen = kernels if way == "kernels" else None
    check_over_quantised(tmp_path / "quantised", tmp_path / "dense", chosen, tmp_path)


def check_over_quantised(folder: Path, dense: Path, kernels: Kernels | None, tmp_path: Path, **settings: Any) -> None:
    """With an adapter the model in `folder` gives the tokens of `dense` with that merged into it."""
    merged = tmp_path / "merged"
    made.make(dense, tmp_path / "adapter", merged)
    engine = load_engine(folder, kernels=kernels, adapters=1, **settings)
    place_adapters(engine, [tmp_path / "adapter"])
    mine = generate(engine, [replace(prompt, adapter=1) for prompt in prompts()])
    expected = generate(load_engine(merged, kernels=kernels), prompts())
    for one, other in zip(mine, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_offloaded_layers_are_changed_as_others(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("llama")[0]
    adapters = ",".join(str(one.folder) for one in made.make_several(folder, tmp_path))
    on_device, on_disk = (
        tensor_parallel.tokens(f"{folder}{where}~{adapters}", Shard()) for where in ("", "@0%,100%,1")
    )
    assert on_device == on_disk
