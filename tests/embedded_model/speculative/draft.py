"""A Llama of the embedded model's vocabulary with a fifteenth of its computation, which writes ahead of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.embedded_model import train
from tests.embedded_model.speculative.target import Seen, Target, distance


class Draft:
    """See `Student`."""

    name = "draft"
    alone = 0.7
    haste = 1.0

    def __init__(self, target: Target) -> None:
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=train.VOCABULARY,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=train.CONTEXT,
                tie_word_embeddings=True,
                bos_token_id=train.BOS_ID,
                eos_token_id=train.EOS_ID,
                pad_token_id=train.PAD_ID,
            )
        )
        # Tokens that are alike for the model are so from the start.
        table = self.model.model.embed_tokens.weight.data
        left, sizes, _ = torch.linalg.svd(target.table, full_matrices=False)
        table.copy_(functional.normalize((left * sizes)[:, : table.shape[1]], dim=1))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def loss(self, seen: Seen) -> Tensor:
        return distance(self.model(seen.ids, use_cache=False).logits, seen, 0)

    @torch.no_grad()
    def guesses(self, seen: Seen, place: int, most: int) -> list[int]:
        latest, past, found = seen.ids[:, : place + 2], None, []
        for _ in range(most):
            output = self.model(latest, past_key_values=past, use_cache=True, logits_to_keep=1)
            latest, past = output.logits[:, -1:].argmax(-1), output.past_key_values
            found.append(int(latest))
        return found

    def config(self) -> dict[str, object]:
        return self.model.config.to_dict() | {"torch_dtype": "bfloat16"}

    def tensors(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.model.state_dict().items() if name != "lm_head.weight"}
