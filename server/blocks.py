"""How many blocks of the KV cache a sequence takes. Without torch, for the null model."""

from __future__ import annotations

# Tokens per block: smaller wastes less of a sequence's last block, larger makes shorter block tables; 16 is what the
# attention kernels are built for.
BLOCK_SIZE = 16


def ceil_divide(size: int, parts: int) -> int:
    """`size / parts`, rounded up."""
    return -(-size // parts)


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold `num_tokens`, the last one perhaps in part."""
    return ceil_divide(num_tokens, BLOCK_SIZE)
