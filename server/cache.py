"""Paged KV cache (Kwon et al. 2023, arXiv 2309.06180): the tensors, and the arithmetic that sizes them.

The router hands out blocks and knows nothing of tensors; the tensors know nothing of sequences.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tokens per block: smaller wastes less of a sequence's last block, larger makes shorter block tables; 16 is what paged
# kernels are built for.
BLOCK_SIZE = 16
# Memory kept back on a CPU, where the estimate of what is free cannot see the other programs' next moves.
CPU_HEADROOM = 0.2


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


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold `num_tokens`, the last one perhaps in part."""
    return -(-num_tokens // BLOCK_SIZE)


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


def allocate(shape: KVShape, blocks: int, device: torch.device) -> list[Tensor]:
    """One zeroed tensor [2, blocks, kv_heads, block_size, head_dim] per layer; none for a cache that is not paged.

    A block's tokens lie together for each head, so that attention reads a head's keys in long runs.

    Zeroed because a padded read may touch slots that were never written: 0 * 0 is harmless, 0 * NaN is not.
    """
    if not shape.is_paged:
        return []
    size = (2, blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    if device.type == "cpu":
        return [_untouched_zeros(size, shape.dtype) for _ in range(shape.num_layers)]
    return [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]


def _untouched_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written. To write 17 GB of them at once took up to 18 seconds."""
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def free_bytes(device: torch.device, *, fraction: float, world_size: int) -> int:
    """Memory that this rank may still take: of its GPU, or its share of the machine's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - fraction) * total)
    return int(_available_host_bytes() * (1 - CPU_HEADROOM)) // world_size


def left_bytes(device: torch.device, *, fraction: float, world_size: int, kv_bytes: int) -> int:
    """Memory that this rank has left when its KV cache of `kv_bytes` is full; on a CPU the cache may still be empty."""
    if device.type == "cuda":
        return max(0, free_bytes(device, fraction=fraction, world_size=world_size))
    return max(0, _available_host_bytes() // world_size - kv_bytes)


def _available_host_bytes() -> int:
    """What the kernel says is available, or less if a cgroup (a container) allows less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
