"""Where a family's checkpoints keep each part of the model. Data only: no files, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Layout(Enum):
    """How q, k and v share one tensor, along its output dimension.

    PER_HEAD:  [head, (q k v), head_dim] — BLOOM, GPT-NeoX
    """

    PER_HEAD = "per_head"


@dataclass(frozen=True)
class Fused:
    """q, k and v are one tensor, `name`, in `layout`."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class NameMap:
    """Where a family's checkpoints keep each role.

    `roles` maps our role to the checkpoint's name without `.weight`/`.bias`; `{i}` is the layer. `prefixes` are tried
    in order until one fits the file. `ignore` are patterns of tensors that are skipped on purpose.
    """

    roles: Mapping[str, str | Fused]
    prefixes: tuple[str, ...] = ("",)
    ignore: tuple[str, ...] = ()
