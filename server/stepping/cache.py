"""Paged KV cache (Kwon et al. 2023, arXiv 2309.06180): the tensors, and the arithmetic that sizes them.

The router hands out blocks and knows nothing of tensors; the tensors know nothing of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.backends.protocol import Device
from server.blocks import BLOCK_SIZE, num_blocks


@dataclass(frozen=True)
class KVShape:
    """What one token takes on this rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_paged: bool = True  # False: the model keeps a cache of its own, of about this size

    @property
    def bytes_per_token(self) -> int:
        """Key and value, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def choose_tokens(*, wanted: int, useful: int, free_bytes: int, bytes_per_token: int) -> int:
    """How many KV tokens to allocate.

    wanted: what the user asked for, 0 when nothing; useful: more than this can never be used; free_bytes: memory that
    the cache may take. Raises ValueError with the number that fits when the wish does not.
    """
    fits = max(0, free_bytes // (bytes_per_token * BLOCK_SIZE)) * BLOCK_SIZE
    if wanted and num_blocks(wanted) * BLOCK_SIZE > fits:
        raise ValueError(
            f"max_batch_total_tokens is {wanted}, but free memory holds a KV cache of {fits} tokens "
            f"({bytes_per_token} bytes each): use --max-batch-total-tokens {fits} or less"
        )
    if not fits:
        raise ValueError(
            f"no memory is left for a KV cache ({free_bytes} bytes free, {bytes_per_token} needed per token): "
            "use more shards, a smaller --dtype or --quantize int8"
        )
    return wanted or min(useful, fits)


def allocate(shape: KVShape, blocks: int, device: Device) -> list[Tensor]:
    """One zeroed tensor [2, blocks, kv_heads, block_size, head_dim] per layer; none for a cache that is not paged.

    A block's tokens lie together for each head, so that attention reads a head's keys in long runs.

    Zeroed because a padded read may touch slots that were never written: 0 * 0 is harmless, 0 * NaN is not.
    """
    if not shape.is_paged:
        return []
    size = (2, blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    return [device.empty_kv(size, shape.dtype) for _ in range(shape.num_layers)]
