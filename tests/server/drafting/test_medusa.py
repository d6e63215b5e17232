"""Medusa heads propose what a plain reference of the published layout does, and change no answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from server.backends.cpu import Kernels
from server.drafting.medusa import Medusa
from server.ranks.collectives import Shard
from tests.server.checkpoints import Checkpoints
from tests.server.drafting.proposing import Reference, check_answers, check_proposals, hidden_states
from tests.server.driver import GREEDY, Prompt, load_engine
from tests.server.model.test_pipeline import pipeline
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks
from tests.server.stepping.test_drafts import SIZES, prompts

HEADS = 3


def save(
    folder: Path, width: int, vocab_size: int, *, blocks: int = 1, own_heads: bool = True, **config: Any
) -> dict[str, Tensor]:
    """Random heads in TGI's layout; the tensors."""
    generator = torch.Generator().manual_seed(3)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for head in range(HEADS):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(width, width, generator=generator) / width**0.5
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(width, generator=generator)
        if own_heads:
            tensors[f"{head}.{blocks}.weight"] = torch.randn(vocab_size, width, generator=generator)
    sizes = {"medusa_num_heads": HEADS, "medusa_num_layers": blocks, "base_model_name_or_path": "some/model"}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return tensors


def reference(tensors: dict[str, Tensor], hidden: Tensor, shared: Tensor | None, blocks: int, head: int) -> Tensor:
    """Logits of one head. shared: the model's own head [V, D]."""
    for block in range(blocks):
        name = f"{head}.{block}.linear"
        hidden = hidden + F.silu(hidden @ tensors[f"{name}.weight"].t() + tensors[f"{name}.bias"])
    return hidden @ (tensors[f"{head}.{blocks}.weight"] if shared is None else shared).t()


def plain_prompts() -> list[Prompt]:
    return [prompt for prompt in prompts() if prompt.sampling is GREEDY] + [
        Prompt(list(range(10 + n, 20 + 5 * n)), max_new_tokens=30, joins_at=n, grows=n % 2 == 0, chunk=7)
        for n in range(4)
    ]


def beside(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"speculative_model": str(folder)} | settings


Case = tuple[Path, Path, Reference]


def case(checkpoints: Checkpoints, folder: Path, name: str, *, blocks: int = 1, own_heads: bool = True) -> Case:
    """The served model's folder, that of heads for it, and what these propose."""
    served, _ = checkpoints(name)
    states = hidden_states(served)
    width = states([1, 2])[-1].shape[1]
    tensors = save(folder, width, 103, blocks=blocks, own_heads=own_heads)
    shared = None
    if not own_heads:
        shared = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32).get_output_embeddings().weight

    def propose(token_ids: Sequence[int], known: int, count: int) -> list[tuple[int, Tensor]]:
        hidden = states(token_ids)[-1][known - 2]
        found = [reference(tensors, hidden, shared, blocks, head) for head in range(count)]
        return [(int(logits.argmax()), logits) for logits in found]

    return served, folder, propose


@pytest.mark.parametrize(
    ("name", "blocks", "own_heads"), [("llama", 1, True), ("bloom", 2, True), ("llama", 1, False), ("opt", 2, False)]
)
def test_heads_propose_what_a_reference_does(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, name: str, blocks: int, own_heads: bool
) -> None:
    served, folder, propose = case(checkpoints, tmp_path, name, blocks=blocks, own_heads=own_heads)
    engine = load_engine(served, kernels=kernels, speculative=beside(folder, speculative_method="medusa"), **SIZES)
    expected, drafter = check_answers(engine, make=plain_prompts)
    check_proposals(expected, drafter, propose)
    assert {len(proposal.token_ids) for _, proposal in drafter.noted} == {1, 2, HEADS}


@pytest.mark.parametrize("blocks", [1, 2])
def test_logits_are_those_of_a_reference(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, blocks: int
) -> None:
    served, folder, _ = case(checkpoints, tmp_path, "llama", blocks=blocks)
    tensors = save(folder, 64, 103, blocks=blocks)
    engine = load_engine(served, kernels=kernels, speculative=beside(folder), **SIZES)
    assert isinstance(engine.proposer, Medusa)
    hidden = torch.randn(5, 64)
    for index, head in enumerate(engine.proposer._heads):
        torch.testing.assert_close(
            reference(tensors, hidden, None, blocks, index), head(hidden), atol=1e-4, rtol=0, check_dtype=False
        )


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": torch.bfloat16}, {"kv_cache": "int8"}, {"quantise": "int8"}], ids=str
)
def test_answers_stay_the_same(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, settings: dict[str, Any]
) -> None:
    served, folder, _ = case(checkpoints, tmp_path, "llama")
    engine = load_engine(served, kernels=kernels, speculative=beside(folder), **settings, **SIZES)
    check_answers(engine)


def test_recurrent_layers(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path) -> None:
    """Behind wrong guesses tokens are computed again, which stand before the others in their run."""
    served, folder, propose = case(checkpoints, tmp_path, "qwen3_next")
    engine = load_engine(served, kernels=kernels, speculative=beside(folder), **SIZES)
    check_proposals(*check_answers(engine, make=plain_prompts), propose)


def test_fewer_heads_may_be_wanted(checkpoints: Checkpoints, tmp_path: Path) -> None:
    served, folder, _ = case(checkpoints, tmp_path, "llama")
    engine = load_engine(served, speculative=beside(folder, speculate=2), **SIZES)
    assert engine.proposer is not None and engine.proposer.most == 2
    assert engine.proposer.nbytes == 2 * 4 * (64 * 64 + 64 * 103)


def test_the_last_stage_has_them(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path) -> None:
    served, folder, propose = case(checkpoints, tmp_path, "llama")
    with pipeline(served, 2, kernels=kernels, speculative=beside(folder), **SIZES) as stages:
        check_proposals(*check_answers(stages, make=plain_prompts), propose)  # type: ignore[arg-type]


@pytest.mark.rest
@pytest.mark.parametrize("own_heads", [True, False])
def test_ranks_divide_them(checkpoints: Checkpoints, tmp_path: Path, own_heads: bool) -> None:
    served, folder, _ = case(checkpoints, tmp_path / "heads", "llama", own_heads=own_heads)
    model = f"{served}?{folder}"
    expected = {model: tensor_parallel.tokens(model, Shard())}
    assert [expected] * 2 == run_ranks([model], 2, tmp_path / "rendezvous")


def spoil(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(folder: Path) -> None:
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")


def flatten(folder: Path) -> None:
    path = folder / "medusa_lm_head.safetensors"
    save_file(load_file(path) | {"0.1.weight": torch.ones(())}, path)


@pytest.mark.parametrize(
    ("change", "settings", "told"),
    [
        (partial(spoil, hidden_size=32), {}, "for hidden states of 32 numbers, and the model's have 64"),
        (partial(spoil, medusa_num_heads=2), {}, "tensors that this architecture does not use: 2.0.linear.bias"),
        (partial(spoil, medusa_num_heads=4), {}, "tensor 3.0.linear.weight is missing"),
        (partial(spoil, medusa_num_heads="3"), {}, "medusa_num_heads '3', which must be a whole number"),
        (
            partial(spoil, medusa_num_heads=None),
            {},
            "--speculative-model .*: config.json says model_type ''; served are",
        ),
        (partial(save, width=64, vocab_size=104), {}, "has 104 tokens and the model 103"),
        (flatten, {}, "has 0 tokens and the model 103"),
        (rename, {}, "no \\*.safetensors but medusa_lm_head.pt: take one in that format"),
        (
            spoil,
            {"speculative_method": "draft"},
            "is draft, but --speculative-model is Medusa heads: use auto or medusa",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, change: Callable[[Path], object], settings: dict[str, Any], told: str
) -> None:
    served, folder, _ = case(checkpoints, tmp_path, "llama")
    change(folder)
    with pytest.raises(ValueError, match=told):
        load_engine(served, speculative=beside(folder, **settings), **SIZES)
