"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) in its original layout.

It reads three taps of the model's residual stream, and guesses from the token behind them what comes next; further
guesses follow from its own output. Training unrolls that, so that it meets its own output before it is served.

Shapes: R texts, T tokens, D width, N heads, H head width, Vk tokens that it can guess.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.embedded_model import train
from tests.embedded_model.speculative.target import Seen, Target, distance

TAPS = (1, 2, 3)  # layers before which the residual stream is read
KNOWN = 704  # tokens that it can guess: nine of ten that occur
COUNTED_BATCHES = 200
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
UNROLLED = 3
LATER = 0.8  # weight of each unrolled pass against the one before it
HEAD_SEED = 7  # of the texts that say which tokens it knows


def config(target: Target) -> LlamaConfig:
    """Its one layer is a Llama's, as wide as the model."""
    return LlamaConfig(
        vocab_size=train.VOCABULARY,
        hidden_size=target.model.config.hidden_size,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=train.CONTEXT,
        rms_norm_eps=1e-5,
        bos_token_id=train.BOS_ID,
        eos_token_id=train.EOS_ID,
        pad_token_id=train.PAD_ID,
    )


def frequent(target: Target) -> Tensor:
    """The tokens that occur most often, ascending."""
    counts: Counter[int] = Counter()
    for _, targets in islice(target.texts(HEAD_SEED), COUNTED_BATCHES):
        counts.update(targets[targets != train.IGNORED].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(KNOWN)))


class Attention(nn.Module):
    """Over inputs twice as wide: embeddings beside hidden states."""

    frequencies: Tensor  # [H / 2]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.q_proj = nn.Linear(2 * width, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * width, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * width, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, width, bias=False)
        exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        self.register_buffer("frequencies", 10_000.0**-exponents, persistent=False)

    def forward(self, inputs: Tensor, later: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Rows `later` places on in their chains: each sees the first pass up to itself, and its own passes since.

        inputs: [R, T, 2D]; keys, values: [R, N, T, H] of every pass so far, to which these are added.
        """
        rows, length, _ = inputs.shape
        query, key, value = (
            part(inputs).view(rows, length, -1, HEAD_DIM).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self._turned(query, later), self._turned(key, later)
        keys.append(key.repeat_interleave(HEADS // KV_HEADS, dim=1))
        values.append(value.repeat_interleave(HEADS // KV_HEADS, dim=1))
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        first = (query @ keys[0].transpose(-1, -2)).masked_fill(~causal, -torch.inf)
        own = [(query * k).sum(-1, keepdim=True) for k in keys[1:]]
        shares = (torch.cat((first, *own), dim=-1) * HEAD_DIM**-0.5).softmax(-1)
        context = shares[..., :length] @ values[0]
        for i, v in enumerate(values[1:]):
            context = context + shares[..., length + i, None] * v
        return self.o_proj(context.transpose(1, 2).reshape(rows, length, HEADS * HEAD_DIM))

    def _turned(self, x: Tensor, later: int) -> Tensor:
        angles = (torch.arange(x.shape[2]) + later)[:, None] * self.frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin


class MidLayer(nn.Module):
    """The one layer."""

    input_layernorm: LlamaRMSNorm
    hidden_norm: LlamaRMSNorm
    post_attention_layernorm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, embedded: Tensor, hidden: Tensor, later: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        inputs = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(inputs, later, keys, values)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle(nn.Module):
    """See `Student`."""

    name = "eagle3"
    alone = 0.0
    haste = 2.0

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.spec = config(target)
        width = self.spec.hidden_size
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)
        self.midlayer = MidLayer(self.spec)
        self.norm = LlamaRMSNorm(width, self.spec.rms_norm_eps)
        self.lm_head = nn.Linear(width, KNOWN, bias=False)
        self.known = frequent(target)
        self.table = target.table.detach()
        self.lm_head.weight.data.copy_(self.table[self.known])

    def features(self, seen: Seen) -> Tensor:
        """[R, T, D] from the taps."""
        return self.fc(torch.cat([seen.streams[tap] for tap in TAPS], dim=-1))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def loss(self, seen: Seen) -> Tensor:
        hidden, parts = self.features(seen)[:, :-1], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for later in range(UNROLLED):
            token_ids = functional.pad(seen.ids[:, 1 + later :], (0, later))
            hidden = self.midlayer(functional.embedding(token_ids, self.table), hidden, later, keys, values)
            logits = self.lm_head(self.norm(hidden))
            parts.append(LATER**later * distance(logits[:, : logits.shape[1] - later], seen, 1 + later, self.known))
        return torch.stack(parts).sum()

    @torch.no_grad()
    def guesses(self, seen: Seen, place: int, most: int) -> list[int]:
        hidden, found = self.features(seen)[:, : place + 1], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        token_ids = seen.ids[:, 1 : place + 2]
        for later in range(most):
            hidden = self.midlayer(functional.embedding(token_ids, self.table), hidden, later, keys, values)
            token_ids = self.known[self.lm_head(self.norm(hidden)).argmax(-1)]
            found.append(int(token_ids[0, -1]))
        return found

    def config(self) -> dict[str, object]:
        own = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": KNOWN,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
        }
        return self.spec.to_dict() | own

    def tensors(self) -> dict[str, Tensor]:
        is_known = torch.zeros(train.VOCABULARY, dtype=torch.bool)
        is_known[self.known] = True
        return {**self.state_dict(), "d2t": self.known - torch.arange(KNOWN), "t2d": is_known}
