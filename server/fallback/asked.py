"""What the layers of a transformers model ask of attention: one pass that notes the calls and computes none of them.

Masks are asked for by functions of positions, from which windows are read; so a layer whose window stands in its mask
alone is served right too, however short the prompt of the pass is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NOTING = "lockstep_noting"  # our name for the implementation of attention that notes calls
NOTES = "lockstep_notes"  # the attribute of a module that has its calls
# Positions of queries at which masks are read, the last beyond every window.
REACHES = (5, 100, 5000, 1 << 20)
# Arguments that change nothing of what is computed here.
HARMLESS = {"position_ids", "position_embeddings", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}


T = TypeVar("T")


class UnbatchedError(ValueError):
    """Why a model cannot be batched, as the end of a sentence about it."""


class Mask(Tensor):
    """A mask that says which window it is, as long as nothing but parts of it is taken; None: none."""

    window: int | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `Tensor`."""
        result = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(result, cls):
            result.window = args[0].window
        return result


@dataclass(frozen=True)
class LayerAttention:
    """What one layer asks for."""

    module: nn.Module
    num_heads: int  # of this rank, as all here
    num_kv_heads: int
    head_dim: int
    value_dim: int  # of a head of values; the cache has room for head_dim
    scale: float
    window: int  # tokens that a query sees, itself included; 0: all
    cap: float  # of scores; 0: none


def use(model: nn.Module, implementation: str) -> None:
    """Have all layers take this implementation of attention from here on."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = implementation
        elif (config := getattr(module, "config", None)) is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = implementation


def find(body: nn.Module, run: Callable[[], T]) -> tuple[list[LayerAttention], T]:
    """What each layer asks for, in the order of the layers, and what `run` gives.

    run: passes a short prompt through `body`. Raises UnbatchedError for what the paged cache cannot serve.
    """
    ALL_ATTENTION_FUNCTIONS.register(NOTING, _note)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NOTING, _mask)
    use(body, NOTING)
    output = run()
    layers = list(_noted(body))
    if not layers:
        raise UnbatchedError("its attention does not go through transformers' interface")
    return layers, output


def _noted(body: nn.Module) -> Iterator[LayerAttention]:
    for module in body.modules():
        notes: list[LayerAttention | str] = module.__dict__.pop(NOTES, [])
        if len(notes) > 1:
            raise UnbatchedError("a layer of it attends more than once in a pass")
        for note in notes:
            if isinstance(note, str):
                raise UnbatchedError(note)
            yield note


def _note(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """See `transformers.AttentionInterface`; query, key, value [1, heads, T, H]."""
    module.__dict__.setdefault(NOTES, []).append(_layer(module, query, key, value, attention_mask, asked))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _layer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: dict[str, Any]
) -> LayerAttention | str:
    """What is asked for, or why it cannot be had."""
    window = getattr(mask, "window", None) if mask is not None else asked.get("sliding_window") or 0
    if window is None:
        return "its masks are of its own making"
    if asked.get("s_aux") is not None:
        return "its attention has sinks"
    if others := [n for n, value in asked.items() if isinstance(value, Tensor) and n not in HARMLESS]:
        return f"its attention takes {others[0]}"
    if asked.get("is_causal") is False or key.shape[2] != query.shape[2]:
        return "its attention is not over the tokens that came before"
    scale = asked.get("scaling")
    return LayerAttention(
        module,
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        query.shape[3] ** -0.5 if scale is None else float(scale),
        int(window),
        float(asked.get("softcap") or 0.0),
    )


def _mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], device: torch.device, **_: Any
) -> Tensor:
    """See `transformers.AttentionMaskInterface`: a mask that says what it is."""
    mask = torch.zeros(1, 1, q_length, kv_length, device=device).as_subclass(Mask)
    mask.window = window_of(mask_function)
    return mask


def window_of(sees: Callable[..., Tensor]) -> int | None:
    """The window of a mask, 0 for none; None: it is of another kind.

    sees: of a sequence, a head, the positions of a query and of a key whether one sees the other.
    """
    counts = []
    for reach in REACHES:
        keys = torch.arange(reach + 2)
        seen = torch.as_tensor(sees(torch.tensor(0), torch.tensor(0), torch.tensor(reach), keys)).expand(keys.shape)
        count = int(seen.sum())
        if not torch.equal(seen, (keys <= reach) & (keys > reach - count)):
            return None
        counts.append(count)
    window = counts[-1]
    if any(count != min(reach + 1, window) for reach, count in zip(REACHES, counts, strict=True)):
        return None
    return 0 if window > REACHES[-1] else window
