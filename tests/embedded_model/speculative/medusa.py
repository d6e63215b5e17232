"""Medusa heads (Cai et al. 2024, arXiv 2401.10774) in TGI's layout, with the model's own head behind their blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.embedded_model import train
from tests.embedded_model.speculative.target import Seen, Target, distance

HEADS = 3
LATER = 0.8  # weight of each head against the one before it, whose guess must be right first


class Medusa(nn.Module):
    """See `Student`. Each head guesses one place later than the one before, from the same hidden state."""

    name = "medusa"
    alone = 0.0
    haste = 4.0

    def __init__(self, target: Target) -> None:
        super().__init__()
        width = target.model.config.hidden_size
        linears = [nn.Linear(width, width) for _ in range(HEADS)]
        for linear in linears:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.linears = nn.ModuleList(linears)
        self.head = target.head

    def logits(self, hidden: Tensor, number: int) -> Tensor:
        """hidden [..., D] → [..., V] of one head."""
        return self.head(hidden + functional.silu(self.linears[number](hidden)))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def loss(self, seen: Seen) -> Tensor:
        parts = [LATER**i * distance(self.logits(seen.streams[-1][:, : -1 - i], i), seen, 1 + i) for i in range(HEADS)]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def guesses(self, seen: Seen, place: int, most: int) -> list[int]:
        hidden = seen.streams[-1][0, place]
        return [int(self.logits(hidden, number).argmax()) for number in range(min(most, HEADS))]

    def config(self) -> dict[str, object]:
        return {
            "medusa_num_heads": HEADS,
            "medusa_num_layers": 1,
            "hidden_size": self.linears[0].in_features,
            "vocab_size": train.VOCABULARY,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, Tensor]:
        names = {"weight": "linear.weight", "bias": "linear.bias"}
        return {
            f"{number}.0.{published}": getattr(linear, name).data
            for number, linear in enumerate(self.linears)
            for name, published in names.items()
        }
