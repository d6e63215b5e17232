"""A checkpoint's own layer that predicts further tokens proposes what a plain computation of it would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from server.backends.cpu import Kernels
from server.checkpoint.weights import CheckpointError
from server.loading import load
from server.pb import generate_pb2 as pb
from server.quantize.recipe import Recipe
from server.ranks.collectives import Shard
from server.stepping.engine import Engine
from server.stepping.graphs import Form
from tests.combinations import by_turns
from tests.server import tiny
from tests.server.checkpoints import Checkpoints
from tests.server.driver import Noting, Prompt, Repeating, generate, load_engine, sampled
from tests.server.fallback.cases import shard_config
from tests.server.model.test_families import WAYS
from tests.server.model.test_pipeline import pipeline
from tests.server.quantize.making import drawn, make
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks
from tests.server.stepping.test_drafts import SIZES, prompts, results

MTP: dict[str, Any] = {"speculate": 5, "speculative_method": "mtp"}
BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # whose layer stands behind the model's last one
BEFORE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # whose layer has a place of its own
CASES = (*BEHIND, *BEFORE)


@dataclass(frozen=True)
class Reference:
    """The layer in stock operators, around the one of transformers."""

    model: PreTrainedModel  # without it
    layer: torch.nn.Module
    own: dict[str, Tensor]  # joined, embed_norm, hidden_norm, final_norm
    is_offset: bool  # norms are stored as distances from 1
    embedding: Tensor
    head: Tensor

    def norm(self, role: str, x: Tensor) -> Tensor:
        weight = self.own[role] + self.is_offset
        return x * (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * weight

    def hidden(self, token_ids: Sequence[int], hidden: Tensor) -> Tensor:
        """hidden [T, D], and the tokens behind → its output [T, D], normalised."""
        embedded = self.embedding[torch.tensor(token_ids)]
        both = torch.cat([self.norm("embed_norm", embedded), self.norm("hidden_norm", hidden)], dim=1)
        x = (both @ self.own["joined"].T).unsqueeze(0)
        positions = torch.arange(len(token_ids)).unsqueeze(0)
        mask = torch.full((len(token_ids),) * 2, float("-inf")).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return self.norm("final_norm", (out[0] if isinstance(out, tuple) else out)[0])

    def proposals(self, token_ids: Sequence[int], features: Tensor, count: int) -> tuple[list[int], Tensor]:
        """So many tokens behind these, each the most likely one, and how likely they are."""
        known, behind, found, logprobs = features[: len(token_ids) - 1], list(token_ids[1:]), [], []
        for _ in range(count):
            latest = self.hidden(behind, known)[-1]
            best = (self.head @ latest).log_softmax(-1).max(-1)
            found.append(int(best.indices))
            logprobs.append(best.values)
            behind.append(found[-1])
            known = torch.cat([known, latest[None]])
        return found, torch.stack(logprobs)


NAMES = {"joined": "eh_proj", "embed_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"}
OF_QWEN = {"joined": "fc", "embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}


def save(case: str, folder: Path) -> Reference:
    """Write a checkpoint as it is published; the model's last layer becomes the one that predicts."""
    sizes = tiny.CASES[case][1]
    count = int(sizes["num_hidden_layers"])
    types = {"layer_types": [*sizes["layer_types"], "full_attention"]} if "layer_types" in sizes else {}
    model = tiny.save_tiny(case, folder, num_hidden_layers=count + 1, **types)
    layer = model.model.layers[-1]
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers = count
    drawn, width = torch.Generator().manual_seed(3), model.config.hidden_size
    own = {role: torch.empty(width).normal_(0.5, 0.2, generator=drawn) for role in NAMES}
    own["joined"] = torch.empty(width, 2 * width).normal_(0, 0.2, generator=drawn)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": count}
    config |= {name: config[name][:count] for name in ("layer_types", "mlp_layer_types") if name in config}
    config |= {"num_nextn_predict_layers": 1} if case in BEHIND else {}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    last = f"model.layers.{count}."
    if case in BEHIND:
        copies = {f"{last}embed_tokens": "model.embed_tokens", f"{last}shared_head.head": "lm_head"}
        stored |= {f"{name}.weight": stored[f"{kept}.weight"].clone() for name, kept in copies.items()}
        stored |= {f"{last}{NAMES[role]}.weight": tensor for role, tensor in own.items()}
    else:
        stored = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in stored.items()}
        stored |= {f"mtp.{OF_QWEN.get(role, 'norm')}.weight": tensor for role, tensor in own.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    tables = (stored[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    return Reference(model, layer, own, case in BEFORE, *tables)


Made = Callable[[str], tuple[Path, Reference]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A case's folder and its reference, made once."""
    found: dict[str, tuple[Path, Reference]] = {}

    def get(case: str) -> tuple[Path, Reference]:
        if case not in found:
            folder = tmp_path_factory.mktemp(case)
            found[case] = folder, save(case, folder)
        return found[case]

    return get


def few_prompts() -> list[Prompt]:
    """Greedy, of some lengths, in chunks."""
    drawn = torch.Generator().manual_seed(1)
    given = [torch.randint(4, 103, (length,), generator=drawn).tolist() for length in (1, 5, 17, 40)]
    return [Prompt(tokens, max_new_tokens=12, chunk=9, joins_at=i) for i, tokens in enumerate(given)]


class Late(Noting):
    """Asks once the first prompt is computed."""

    def ask(self, request: pb.StepRequest) -> None:
        if self.known[0]:
            super().ask(request)


@torch.no_grad()
def check_proposals(
    engine: Engine,
    reference: Reference,
    make: Callable[[], list[Prompt]] = few_prompts,
    note: Callable[..., Noting] = Noting,
) -> None:
    """What is proposed, behind guesses that were right and wrong ones, is what the reference finds most likely."""
    expected = generate(engine, make())
    drafter = note([p.tokens for p in expected], right=0.6)
    assert [p.tokens for p in expected] == [p.tokens for p in generate(engine, make(), drafter)]
    assert drafter.accepted > 5 and drafter.refused > 5
    texts = [p.token_ids + p.tokens for p in expected]
    features = [reference.model.model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    for id, tokens, proposal in drafter.noted[::3]:
        text, count = expected[id].token_ids + tokens, len(proposal.token_ids)
        best, likely = reference.proposals(text, features[id], count)
        assert best == list(proposal.token_ids)
        torch.testing.assert_close(likely, torch.tensor(proposal.logprobs), atol=1e-4, rtol=0)


def check_answers(engine: Engine) -> None:
    """They are those without, whatever is proposed, and behind some steps nothing."""
    expected = generate(engine, prompts())
    drafter = Noting([p.tokens for p in expected], asked=0.6)
    assert results(expected) == results(generate(engine, prompts(), drafter))
    assert drafter.refused > 10 and len(drafter.noted) > 20


@pytest.mark.parametrize(("case", "way"), by_turns(CASES, WAYS))
def test_it_proposes_what_a_plain_computation_does(
    made: Made, request: pytest.FixtureRequest, case: str, way: str
) -> None:
    folder, reference = made(case)
    kernels = request.getfixturevalue("kernels") if way == "kernels" else None
    check_proposals(load_engine(folder, kernels=kernels, speculative=MTP, **SIZES), reference)


@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5"])
def test_prompts_are_followed_before_it_is_asked(made: Made, kernels: Kernels, case: str) -> None:
    folder, reference = made(case)
    engine = load_engine(folder, kernels=kernels, speculative=MTP, **SIZES)
    check_proposals(engine, reference, lambda: [Prompt([*range(50, 70)], max_new_tokens=40, chunk=9)], Late)


@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next"])
def test_it_changes_nothing(made: Made, kernels: Kernels, case: str) -> None:
    check_answers(load_engine(made(case)[0], kernels=kernels, speculative=MTP, **SIZES))


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("glm4_moe", {"kv_cache": "int8"}),
        ("deepseek_v3", {"kv_cache": "int8", "dtype": torch.bfloat16}),
        pytest.param("qwen3_5", {"dtype": torch.bfloat16}, marks=pytest.mark.rest),
        pytest.param("qwen3_5_moe", {"quantise": "int8"}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_formats_and_dtypes(made: Made, kernels: Kernels, case: str, settings: dict[str, Any]) -> None:
    check_answers(load_engine(made(case)[0], kernels=kernels, speculative=MTP, **settings, **SIZES))


def seeded_proposals(engine: Engine) -> list[tuple[int, list[int], list[int]]]:
    """Those behind the same tokens of simple sampled sequences."""
    asked = [replace(prompt, sampling=sampled(seed, temperature=1.3)) for seed, prompt in enumerate(few_prompts())]
    drafter = Noting([[5 * n for n in range(12)]] * len(asked))
    generate(engine, asked, drafter)
    return [(id, tokens, list(proposal.token_ids)) for id, tokens, proposal in drafter.noted]


def test_captured_passes(made: Made, kernels: Kernels) -> None:
    folder, reference = made("glm4_moe")
    engine, capture = load_engine(folder, kernels=kernels, speculative=MTP, **SIZES), Repeating()
    engine.backend.graph_capture = lambda sizes: capture  # type: ignore[method-assign]
    engine.allocate(SIZES["tokens"], SIZES["total_tokens"], sequences=8)
    assert engine.graphs is not None
    *_, passes = engine.graphs.kinds
    for prepare in passes:
        prepare()
    own = set(range(capture.captured))
    assert len(own) == len(Form) * len(capture.sizes)
    check_proposals(engine, reference)
    check_answers(engine)
    plain = load_engine(folder, kernels=kernels, captured=False, speculative=MTP, **SIZES)
    assert seeded_proposals(plain) == seeded_proposals(engine)
    assert {number % len(Form) for number in capture.replayed.keys() & own} == set(range(len(Form)))


@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5"])
def test_the_last_stage_has_it(made: Made, kernels: Kernels, case: str) -> None:
    folder, reference = made(case)
    with pipeline(folder, 2, kernels=kernels, speculative=MTP, **SIZES) as stages:
        assert [engine.proposer is not None for engine in stages.engines] == [False, True]
        check_proposals(stages, reference)  # type: ignore[arg-type]


@pytest.mark.rest
def test_ranks_propose_what_one_does(made: Made, tmp_path: Path) -> None:
    models = [f"{made(case)[0]}?mtp" for case in ("deepseek_v3", "qwen3_next")]
    expected = {model: tensor_parallel.tokens(model, Shard()) for model in models}
    assert all(len(found) > 2 * len(tensor_parallel.prompts()) for found in expected.values())
    assert [expected] * 2 == run_ranks(models, 2, tmp_path / "rendezvous")


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The checkpoint with other tensors."""
    shutil.copytree(folder, to)
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_tables_of_its_own_are_read(made: Made, tmp_path: Path) -> None:
    folder, reference = made("glm4_moe")
    tables = {"embedding": "model.layers.3.embed_tokens.weight", "head": "model.layers.3.shared_head.head.weight"}
    other = {name: torch.randn(103, 64, generator=torch.Generator().manual_seed(9)) for name in tables.values()}
    own = changed(folder, tmp_path / "own", lambda stored: stored.update(other))
    engine = load_engine(own, speculative=MTP, **SIZES)
    check_proposals(engine, replace(reference, **{role: other[name] for role, name in tables.items()}))
    shared = load_engine(folder, speculative=MTP, **SIZES).proposer
    assert engine.proposer is not None and shared is not None
    assert sum(table.nbytes for table in other.values()) == engine.proposer.nbytes - shared.nbytes


@pytest.mark.parametrize("case", ["t5", "mamba2", "llama", "deepseek_v3", "qwen3_next"])
def test_models_without_one_are_told_so(checkpoints: Checkpoints, case: str) -> None:
    told = {"t5": "the model is an encoder-decoder", "mamba2": "the model has no attention"}
    with pytest.raises(ValueError, match=f"--speculative-method is mtp, but {told.get(case, '.* has no layer')}"):
        load_engine(checkpoints(case)[0], speculative=MTP, **SIZES)


@pytest.mark.parametrize(("case", "name"), [("glm4_moe", "model.layers.3.odd.weight"), ("qwen3_5", "mtp.odd.weight")])
def test_tensors_that_it_does_not_know_are_refused(made: Made, tmp_path: Path, case: str, name: str) -> None:
    odd = changed(made(case)[0], tmp_path / "odd", lambda stored: stored.update({name: torch.ones(3)}))
    load_engine(odd, **SIZES)
    with pytest.raises(CheckpointError, match=rf"does not use: {name} in"):
        load_engine(odd, speculative=MTP, **SIZES)


def test_a_second_one_is_left_out(made: Made, tmp_path: Path) -> None:
    def double(stored: dict[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in stored.items() if "mtp.layers" in name}
        stored |= {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in own.items()}

    folder = changed(made("qwen3_5")[0], tmp_path / "two", double)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 2}))
    check_proposals(load_engine(folder, speculative=MTP, **SIZES), made("qwen3_5")[1])


@pytest.mark.rest
@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5"])
def test_a_quantised_copy_keeps_it(made: Made, kernels: Kernels, tmp_path: Path, case: str) -> None:
    folder, _ = made(case)
    make(Recipe("gptq", 8, -1), folder, tmp_path / "made", calibration=drawn(2, 16), held_out=drawn(1, 16))
    check_answers(load_engine(tmp_path / "made", kernels=kernels, speculative=MTP, **SIZES))


@pytest.mark.parametrize("case", ["deepseek_v3", pytest.param("qwen3_5_moe", marks=pytest.mark.rest)])
def test_random_weights_have_one(made: Made, case: str) -> None:
    engine, info = load(shard_config(made(case)[0], random_weights=True, **MTP))
    engine.allocate(SIZES["tokens"], SIZES["total_tokens"])
    check_answers(engine)
    assert info.most_proposals == 16 and "predicts the token after the next" in info.proposes
    beside = engine.kv_shape.beside
    assert beside is not None and info.kv_bytes_per_token > beside.bytes_per_token > 0
