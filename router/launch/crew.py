"""The processes of one launch and what each is told: the shards, group after group, and the router.

Each group of shards has a folder of its own in the launch's private folder, with fresh sockets and a fresh rendezvous,
so that nothing of a group that died is in the way of the next. The router's settings hold the API key and are in no
folder: it reads them from a file without a name.
"""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from router.config import RouterConfig
from router.launch.layout import Layout
from router.launch.machine import bind, is_on_loopback
from router.launch.processes import ChildCommand
from router.launch.settings import Settings
from router.version import version
from server.config import ShardConfig

CONTROL_FD = 0  # the router's standard input, on which it hears of later groups


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
class Crew:
    """Writes the files and names the commands. The launcher holds `listener` until the router has it."""

    folder: Path
    settings: Settings
    device: str
    layout: Layout
    model: ModelFiles
    listener: socket.socket
    chosen_sockets: tuple[str, ...] = ()  # of --shard-uds-path, the same for every group
    adopts: bool = False  # whether this process adopts orphans, which forked shards are

    def __post_init__(self) -> None:
        self._port = self.listener.getsockname()[1]

    def group(self, number: int) -> tuple[list[ChildCommand], tuple[str, ...]]:
        """The shards of group `number` and their sockets; the files of the group before are removed."""
        shutil.rmtree(self.folder / f"group-{number - 1}", ignore_errors=True)
        folder = self.folder / f"group-{number}"
        folder.mkdir(mode=0o700)
        ranks = range(self.layout.world_size)
        sockets = self.chosen_sockets or tuple(f"{folder}/shard-{rank}.sock" for rank in ranks)
        self._write_shard_configs(folder, sockets)
        return [self._shard(rank, f"{folder}/shard-{rank}.json") for rank in ranks], sockets

    def _shard(self, rank: int, config: str) -> ChildCommand:
        """One shard: a process of its own if it imports next to nothing or if nobody adopts a fork, else a fork."""
        name, arguments = f"shard-{rank}", ("--config", config)
        if self.settings.is_null_model or not self.adopts:
            return ChildCommand(name, (*python("server"), *arguments))
        return ChildCommand(name, arguments, nursery=python("server.nursery"))

    def router(self, group: int, sockets: Sequence[str]) -> ChildCommand:
        """A router for group `group`; one after the first takes the port anew. Raises Refusal when that is taken."""
        if self.listener.fileno() < 0:
            self.listener = bind(self.settings.values["hostname"], self._port)
        secret = self.router_config(group, sockets).to_json()
        return ChildCommand("router", python("router"), (self.listener.fileno(),), hears=True, secret=secret)

    def router_config(self, group: int, sockets: Sequence[str]) -> RouterConfig:
        """What the router is told to serve; the port that was taken replaces the one that was asked for."""
        given = self.settings.pick(RouterConfig) | {"model_id": self.settings.shown_model, "port": self._port}
        return RouterConfig(
            model_path=str(self.model.path),
            tokenizer_path=str(self.model.tokenizer_path),
            shard_sockets=tuple(sockets),
            model_sha=self.model.sha,
            listen_fd=self.listener.fileno(),
            is_on_loopback=is_on_loopback(self.listener),
            control_fd=CONTROL_FD,
            group=group,
            num_stages=self.layout.num_stages,
            sources=dict(self.settings.sources),
            **given,
        )

    def hand_over(self) -> None:
        """Let go of the socket, which the router has by now."""
        # Connections are accepted from here on; this lets a later launch bind beside those in TIME_WAIT.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.close()  # or the port would stay open while the router drains

    def close(self) -> None:
        """Give the port back, if no router has it."""
        self.listener.close()

    def _write_shard_configs(self, folder: Path, sockets: Sequence[str]) -> None:
        """Tell each shard its part. The shards of a stage meet in a private file unless TCP was asked for."""
        settings, layout = self.settings, self.layout
        step_sockets = tuple(f"{folder}/steps-{rank}.sock" for rank in range(1, layout.world_size))
        stages = range(layout.num_stages) if layout.num_stages > 1 else ()
        for rank, path in enumerate(sockets):
            shard = ShardConfig(
                model_path=str(self.model.path),
                weights_path=str(self.model.weights_path),
                rank=rank,
                world_size=layout.world_size,
                num_local=layout.num_local,
                socket_path=path,
                rendezvous=self._rendezvous(folder, layout.stage_of(rank)),
                step_sockets=step_sockets,
                stage_sockets=tuple(f"{folder}/stage-{stage}.sock" for stage in stages),
                is_null=settings.is_null_model,
                version=version(),
                **settings.pick(ShardConfig) | _limits(settings.pick(RouterConfig)) | {"device": self.device},
            )
            shard.save(folder / f"shard-{rank}.json")

    def _rendezvous(self, folder: Path, stage: int) -> str:
        values, sources = self.settings.values, self.settings.sources
        if {sources["master_addr"], sources["master_port"]} == {"default"}:
            return f"file://{folder}/rendezvous-{stage}"
        return f"tcp://{values['master_addr']}:{values['master_port'] + stage}"


def _limits(router: Mapping[str, Any]) -> dict[str, int]:
    """What the shards are told of the router's limits, as far as the settings say."""
    concurrent = router["max_concurrent_requests"]
    names = ("max_total_tokens", "max_batch_total_tokens", "max_batch_prefill_tokens")
    return {
        "max_sequences": min(concurrent, router["max_batch_size"] or concurrent),
        **{name: router[name] or 0 for name in names},
    }


def python(module: str) -> tuple[str, ...]:
    """The command of one of our modules, which finds no module of the folder that it is started in."""
    return (sys.executable, "-P", "-m", module)
