"""The shards of one launch and what each is told, group after group.

Each group has a folder of its own in the launch's private folder, with fresh sockets and a fresh rendezvous, so that
nothing of a group that died is in the way of the next. Each node writes the files of its own shards.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from host.version import version
from launch.nodes import Layout
from launch.processes import ChildCommand
from launch.settings import Settings, flag
from router.config import DEFAULT_GUESSES, RouterConfig
from server.config import ShardConfig

# Settings that may differ between nodes.
OF_A_NODE = ("threads", "log_level", "offload_dir", "prefix_cache_dir")


class ModelFiles(Protocol):
    """Where a model's files are."""

    @property
    def path(self) -> Path: ...
    @property
    def weights_path(self) -> Path: ...
    @property
    def tokenizer_path(self) -> Path: ...
    @property
    def sha(self) -> str | None: ...


@dataclass
class ShardCommands:
    """Makes the commands of a group of shards, and the files that they read."""

    folder: Path
    settings: Settings
    device: str
    layout: Layout
    model: ModelFiles
    chosen_sockets: tuple[str, ...] = ()  # of --shard-uds-path, the same for every group
    adopts: bool = False  # whether this process adopts orphans, which forked shards are
    speculative_model: Path | None = None  # folder of the model that proposes tokens; None: there is none

    def group(self, number: int) -> tuple[list[ChildCommand], tuple[str, ...]]:
        """The shards of group `number` and their sockets; the files of a group before are removed."""
        for before in self.folder.glob("group-*"):
            shutil.rmtree(before, ignore_errors=True)
        folder = self.folder / f"group-{number}"
        folder.mkdir(mode=0o700)
        ranks = range(self.layout.world_size)
        sockets = self.chosen_sockets or tuple(f"{folder}/shard-{rank}.sock" for rank in ranks)
        self._write_shard_configs(folder, sockets)
        return [self._shard(rank, f"{folder}/shard-{rank}.json") for rank in ranks], sockets

    def identity(self) -> dict[str, Any]:
        """What all nodes of a launch must agree on, by the names that people know it by."""
        settings, layout = self.settings, self.layout
        shared = {name: value for name, value in settings.pick(ShardConfig).items() if name not in OF_A_NODE}
        if self.speculative_model is not None:
            shared["speculative_model"] = _digest(self.speculative_model, self.speculative_model)
        limits = _limits(settings.pick(RouterConfig))
        return {
            "Lockstep": version(),
            "--nnodes": layout.num_nodes,
            "adapters": settings.has_adapters,
            "--num-shard": layout.num_shard,
            "--pipeline-parallel": layout.num_stages,
            "model": settings.shown_model if settings.is_null_model else self.model_digest(),
            **{flag(name): value for name, value in (shared | limits | {"device": self.device}).items()},
        }

    def model_digest(self) -> str:
        """What tells two models, or two revisions of one, apart without reading all weights."""
        has_weights = not self.settings.values["random_weights"]
        return _digest(self.model.path, self.model.weights_path if has_weights else None)

    def _shard(self, rank: int, config: str) -> ChildCommand:
        """One shard: a fork, unless it has next to nothing to import or this process cannot adopt forks."""
        name, arguments = f"shard-{rank}", ("--config", config)
        if (node := self.layout.node_of(rank)) != self.layout.node:
            return ChildCommand(name, (), node=node)
        if self.settings.is_null_model or not self.adopts:
            return ChildCommand(name, (*python("server"), *arguments))
        return ChildCommand(name, arguments, fork_server=python("server.fork_server"))

    def _write_shard_configs(self, folder: Path, sockets: Sequence[str]) -> None:
        """Write a config for each shard. The shards of a stage meet in a private file unless TCP was asked for."""
        settings, layout = self.settings, self.layout
        step_sockets = tuple(f"{folder}/steps-{rank}.sock" for rank in range(1, layout.world_size))
        stages = range(layout.num_stages) if layout.num_stages > 1 else ()
        for rank in layout.ranks_of(layout.node):
            shard = ShardConfig(
                model_path=str(self.model.path),
                weights_path=str(self.model.weights_path),
                rank=rank,
                world_size=layout.world_size,
                num_local=layout.num_local,
                socket_path=sockets[rank],
                rendezvous=self._rendezvous(folder, layout.stage_of(rank)),
                step_sockets=step_sockets,
                stage_sockets=tuple(f"{folder}/stage-{stage}.sock" for stage in stages),
                is_null=settings.is_null_model,
                has_adapters=settings.has_adapters,
                version=version(),
                **settings.pick(ShardConfig)
                | _limits(settings.pick(RouterConfig))
                | self._speculation()
                | {"device": self.device},
            )
            shard.save(folder / f"shard-{rank}.json")

    def _speculation(self) -> dict[str, Any]:
        """What the shards are told of the model that proposes tokens."""
        values, model = self.settings.values, self.speculative_model
        proposes = model is not None or values["speculative_method"] == "mtp"
        default = DEFAULT_GUESSES if proposes else 0
        return {
            "speculative_model": None if model is None else str(model),
            "speculate": default if values["speculate"] is None else values["speculate"],
        }

    def _rendezvous(self, folder: Path, stage: int) -> str:
        values, sources = self.settings.values, self.settings.sources
        if self.layout.splits_stages:
            return f"unix://{folder}/store-{stage}.sock"
        if self.layout.num_nodes > 1:
            return f"file://{folder}/rendezvous-{stage}"
        if {sources["master_addr"], sources["master_port"]} == {"default"}:
            return f"file://{folder}/rendezvous-{stage}"
        return f"tcp://{values['master_addr']}:{values['master_port'] + stage}"


def _digest(folder: Path, weights: Path | None) -> str:
    """Of a model's description and of the names and sizes of its weights, if it has any."""
    parts = [(folder / "config.json").read_bytes()]
    for file in sorted(weights.glob("*.safetensors")) if weights is not None else ():
        parts.append(f"{file.name} {file.stat().st_size}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _limits(router: Mapping[str, Any]) -> dict[str, int]:
    """The router's limits that the shards know, as far as they are set; 0: not set."""
    concurrent = router["max_concurrent_requests"]
    names = ("max_total_tokens", "max_batch_total_tokens", "max_batch_prefill_tokens")
    return {
        "max_sequences": min(concurrent, router["max_batch_size"] or concurrent),
        **{name: router[name] or 0 for name in names},
    }


def python(module: str) -> tuple[str, ...]:
    """The command of one of our modules, which imports nothing from the working directory."""
    return (sys.executable, "-P", "-m", module)
