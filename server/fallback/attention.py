"""Attention of a backend over the paged cache, as an implementation of transformers' attention interface.

Each attention module holds what serves its layer, and all of these one `Pass`, the step that is being computed: the
interface gives a function the module and nothing that knows of steps.

Shapes: T tokens in the step, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from server.backends.protocol import Attention, Backend, Scores, StepMeta
from server.fallback.asked import LayerAttention
from server.quantisation.kv import KvFormat
from server.stepping.cache import Kept

PAGED = "lockstep_paged"  # our name for this implementation
LAYER = "lockstep_layer"  # the attribute of a module that has its `PagedLayer`


@dataclass
class Pass:
    """The step that is being computed."""

    meta: StepMeta | None = None
    kv_caches: Sequence[Kept] = ()


@dataclass(frozen=True)
class PagedLayer:
    """Attention of one layer."""

    attention: Attention
    asked: LayerAttention
    index: int  # of its cache
    step: Pass

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, N, T, H], key and value [1, K, T, H] → [1, T, N, H]; a head of values may be narrower than H."""
        meta, kv = self.step.meta, self.step.kv_caches[self.index]
        assert meta is not None and isinstance(kv, Tensor), (
            "attention is called in a pass alone, and keeps blocks alone"
        )
        missing = self.asked.head_dim - self.asked.value_dim
        if missing:
            value = F.pad(value, (0, missing))
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        self.attention.write(kv, k, v, meta)
        return self.attention.attend(q, kv, meta, self.asked.window)[..., : self.asked.value_dim].unsqueeze(0)


def install(layers: Sequence[LayerAttention], backend: Backend, cache: KvFormat) -> Pass:
    """Have each layer of a model attend to its own cache; returns what says which step it is."""
    ALL_ATTENTION_FUNCTIONS.register(PAGED, _paged)
    step = Pass()
    alike: dict[Scores, Attention] = {}
    for index, layer in enumerate(layers):
        scores = Scores(layer.scale, cap=layer.cap)
        attention = alike.setdefault(scores, backend.attention(scores, cache))
        layer.module.__dict__[LAYER] = PagedLayer(attention, layer, index, step)
    return step


def _paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    layer: PagedLayer = module.__dict__[LAYER]
    return layer(query, key, value), None
