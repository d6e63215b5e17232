"""A checkpoint's own layer that predicts further tokens proposes what a plain computation of it would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine, StepResult
from server.stepping.proposals import Proposal
from tests.server import tiny
from tests.server.driver import Drafter, Prompt, generate, load_engine
from tests.server.stepping.test_drafts import SIZES

MTP: dict[str, Any] = {"speculate": 5, "speculative_method": "mtp"}
BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # whose layer stands behind the model's last one
BEFORE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # whose layer has a place of its own
CASES = (*BEHIND, *BEFORE)


@dataclass(frozen=True)
class Reference:
    """The layer in stock operators, around the one of transformers."""

    model: PreTrainedModel  # without it
    layer: torch.nn.Module
    tensors: dict[str, Tensor]  # of its own: joined, embed_norm, hidden_norm, final_norm
    is_offset: bool  # norms are stored as distances from 1

    def norm(self, role: str, x: Tensor) -> Tensor:
        weight = self.tensors[role] + self.is_offset
        return x * (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * weight

    def hidden(self, token_ids: Sequence[int], hidden: Tensor) -> Tensor:
        """hidden [T, D], and the tokens behind → its output [T, D], normalised."""
        embedded = self.model.get_input_embeddings()(torch.tensor(token_ids))
        both = torch.cat([self.norm("embed_norm", embedded), self.norm("hidden_norm", hidden)], dim=1)
        x = (both @ self.tensors["joined"].T).unsqueeze(0)
        positions = torch.arange(len(token_ids)).unsqueeze(0)
        mask = torch.full((len(token_ids),) * 2, float("-inf")).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return self.norm("final_norm", (out[0] if isinstance(out, tuple) else out)[0])

    @torch.no_grad()
    def proposals(self, token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """So many tokens behind these, each the most likely one, and how likely they are."""
        known = self.model.model(torch.tensor([token_ids])).last_hidden_state[0][:-1]
        behind, found, logprobs = list(token_ids[1:]), [], []
        for _ in range(count):
            latest = self.hidden(behind, known)[-1]
            best = self.model.lm_head(latest).log_softmax(-1).max(-1)
            found.append(int(best.indices))
            logprobs.append(float(best.values))
            behind.append(found[-1])
            known = torch.cat([known, latest[None]])
        return found, logprobs


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
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    last = f"model.layers.{count}."
    if case in BEHIND:
        copies = {f"{last}embed_tokens": "model.embed_tokens", f"{last}shared_head.head": "lm_head"}
        stored |= {f"{name}.weight": stored[f"{kept}.weight"].clone() for name, kept in copies.items()}
        stored |= {f"{last}{NAMES[role]}.weight": tensor for role, tensor in own.items()}
    else:
        stored = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in stored.items()}
        stored |= {f"mtp.{OF_QWEN.get(role, 'norm')}.weight": tensor for role, tensor in own.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return Reference(model, layer, own, case in BEFORE)


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


@dataclass
class Noting(Drafter):
    """Gives drafts that are half right, and notes what is proposed behind which tokens, in every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known: dict[int, list[int]] = {id: [] for id in range(len(self.answers))}
        self.noted: list[tuple[int, list[int], Proposal]] = []

    def ask(self, request: pb.StepRequest) -> None:
        request.proposals = 3
        request.proposed_ids.extend(self.known)

    def read(self, result: StepResult) -> None:
        for id, token in zip(result.ids, result.token_ids, strict=True):
            self.known[id].append(token)
        self.noted += [(proposal.id, [*self.known[proposal.id]], proposal) for proposal in result.proposals]


def few_prompts() -> list[Prompt]:
    """Greedy, of some lengths, in chunks."""
    drawn = torch.Generator().manual_seed(1)
    given = [torch.randint(4, 103, (length,), generator=drawn).tolist() for length in (1, 5, 17, 40)]
    return [Prompt(tokens, max_new_tokens=12, chunk=9, joins_at=i) for i, tokens in enumerate(given)]


def check_proposals(engine: Engine, reference: Reference) -> None:
    expected = generate(engine, few_prompts())
    drafter = Noting([p.tokens for p in expected], right=0.6)
    assert [p.tokens for p in expected] == [p.tokens for p in generate(engine, few_prompts(), drafter)]
    assert len(drafter.noted) > 20 and drafter.accepted > 5 and drafter.refused > 5
    for id, tokens, proposal in drafter.noted:
        best, likely = reference.proposals(expected[id].token_ids + tokens, len(proposal.token_ids))
        assert best == list(proposal.token_ids)
        torch.testing.assert_close(torch.tensor(likely), torch.tensor(proposal.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", ["reference", "kernels"])
@pytest.mark.parametrize("case", CASES)
def test_it_proposes_what_a_plain_computation_does(
    made: Made, request: pytest.FixtureRequest, case: str, way: str
) -> None:
    folder, reference = made(case)
    kernels = request.getfixturevalue("kernels") if way == "kernels" else None
    check_proposals(load_engine(folder, kernels=kernels, speculative=MTP, **SIZES), reference)
