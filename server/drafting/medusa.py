"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads that guess what stands some places ahead, from one hidden state.

Head j proposes the token j places behind the one that the model chose from the same state. Heads see nothing of each
other's tokens and keep nothing, so proposals take as many small products as there are. Each is one or several residual
blocks and a head of its own, or the model's. Left out: trees of candidates.

Shapes: R rows, D width of the model's final hidden states, Vl the columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from server.arch.families.hf_config import checked
from server.arch.names import NameMap
from server.arch.spec import Activation
from server.checkpoint import formats
from server.checkpoint.weights import Checkpoint, Weights
from server.drafting.chain import Chain, Link
from server.drafting.head import rows_of
from server.drafting.served import Served
from server.layers.embedding import Head, load_head
from server.layers.linear import GatheredLinear, load_gathered
from server.stepping.proposals import Came, Proposal, Surroundings
from server.stepping.sampling import Chosen
from server.stepping.sequences import StepRuns


@dataclass(frozen=True)
class MedusaHead:
    """Of one place. logits: [R, D] → [R, Vl]."""

    blocks: Sequence[GatheredLinear]
    logits: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, Vl]."""
        for block in self.blocks:
            hidden = hidden + block(hidden, Activation.SILU)
        return self.logits(hidden)

    @property
    def nbytes(self) -> int:
        own = self.logits.nbytes if isinstance(self.logits, Head) else 0
        return own + sum(block.nbytes for block in self.blocks)


class Medusa:
    """See `Proposer`. heads: the first of them for the place right behind the latest token."""

    reads_features = True
    taps = ()
    kv_shape = None

    def __init__(self, heads: Sequence[MedusaHead], name: str) -> None:
        self.most = len(heads)
        self.nbytes = sum(head.nbytes for head in heads)
        self.description = f"{name}, {len(heads)} Medusa head{'s' if len(heads) > 1 else ''}"
        self._heads = heads
        self._around: Surroundings | None = None

    def open(self, around: Surroundings) -> None:
        self._around = around

    def captures(self) -> Sequence[Callable[[], None]]:
        return ()

    def close(self) -> None:
        self._around = None

    def see(self, plan: StepRuns) -> None:
        pass

    def follow(self, plan: StepRuns, features: Tensor | None) -> None:
        pass

    def came(self, came: Sequence[Came]) -> None:
        pass

    def propose(
        self, plan: StepRuns, features: Tensor | None, came: Sequence[Came], wanted: Mapping[int, int]
    ) -> list[Proposal]:
        assert features is not None and self._around is not None
        tokens = {sequence.id: token_ids for sequence, token_ids in came if wanted.get(sequence.id, 0) > 0}
        asked = [row for row in rows_of(plan, tokens) if row.sequence.id in tokens]
        if not asked:
            return []
        around, drafted = self._around, {run.sequence.id for run in plan.drafts if run.guesses}
        links = []
        for row in asked:
            id = row.sequence.id
            links.append(Link(row.sequence, row.end, min(wanted[id], self.most), tokens[id] if id in drafted else ()))
        places = {link.sequence.id: place for place, link in enumerate(links)}
        hidden = features.index_select(0, around.device.upload([row.at + len(row.behind) - 1 for row in asked]))
        chain = Chain(around.chooser, around.device, around.vocabulary.size)

        def choose(some: Sequence[Any], previous: Tensor, place: int) -> Chosen:
            own = hidden
            if len(some) < len(links):
                own = hidden.index_select(0, around.device.upload([places[link.sequence.id] for link in some]))
            head = self._heads[place]
            return chain.chosen(some, lambda part: head(own[part]), place=place, previous=previous)

        latest = around.device.upload([row.behind[-1] for row in asked])
        return chain(links, choose(links, latest, 0), choose)


def load(folder: Path, hf_config: Mapping[str, Any], served: Served, count: int) -> Medusa:
    """The heads in a folder as TGI reads them. count: how many are wanted, 0 for all. Raises ValueError."""
    config = checked(hf_config)
    refuse_other_width(config, served.model.width)
    num_heads, num_blocks = config["medusa_num_heads"], config.get("medusa_num_layers", 1)
    shard = served.model.shard
    if served.model.width % shard.world_size:
        raise ValueError(
            f"Medusa heads divide the width of the model, {served.model.width}, by the shards, but --num-shard is "
            f"{shard.world_size}: leave out --speculative-model"
        )
    names = NameMap(
        roles={f"block_{j}": f"{{i}}.{j}.linear" for j in range(num_blocks)} | {"head": f"{{i}}.{num_blocks}"}
    )
    weights = Weights(
        *(Checkpoint(folder), names, shard, served.dtype, served.backend.device.torch_device, ""),
        format=formats.choose(None, folder, hf_config).format,
    )
    wanted = min(num_heads, count or num_heads)
    heads = [_load_head(weights.of_layer(index), num_blocks, served) for index in range(wanted)]
    weights.refuse_leftovers(tuple(rf"^{index}\." for index in range(wanted, num_heads)))
    return Medusa(heads, folder.name)


def refuse_other_width(config: Mapping[str, Any], width: int) -> None:
    """Raise ValueError for heads of a model of another width."""
    if (own := config.get("hidden_size", width)) != width:
        raise ValueError(
            f"--speculative-model is for hidden states of {own} numbers, and the model's have {width}: use one that "
            "was trained for this model"
        )


def _load_head(weights: Weights, num_blocks: int, served: Served) -> MedusaHead:
    size, make = (served.model.width, served.model.width), served.backend.linear
    blocks = [load_gathered(weights, f"block_{j}", size, make, bias=True) for j in range(num_blocks)]
    if not weights.holds("head"):
        return MedusaHead(blocks, served.model.logits)
    assert isinstance(weights.checkpoint, Checkpoint)
    rows = list(weights.checkpoint.shape_of(f"{weights.name_of('head')}.weight")[:1])
    if rows != [served.model.vocab_size]:
        raise ValueError(
            f"--speculative-model has {sum(rows)} tokens and the model {served.model.vocab_size}: use one that was "
            "trained for this model"
        )
    plain = replace(served.model.spec, tied_head=False, unit_head=False, head_bias=False, head_scale=1.0, logit_cap=0.0)
    return MedusaHead(blocks, load_head(weights, plain, None, make))
