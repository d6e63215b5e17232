"""Whether a launch would find the files of its model, and could serve it: the part of `lockstep check` about the model.

Of weights, headers alone are read. What it takes of the machine's memory is computed in `estimate.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from host.folders import nearest_folder
from launch.commands.estimate import Estimate, estimate
from launch.commands.findings import Findings
from launch.compatibility.docker import Container
from launch.config import parse_adapters
from launch.machine import Placement
from launch.models import Description, find_description, is_offline, name_and_revision, name_problem, other_base
from launch.settings import Settings
from router.chat.template import ChatTemplate
from router.config import most_adapter_bytes
from router.errors import Unavailable
from router.requests.adapter_files import Unfit, appearance
from router.sandbox.pool import Sandbox
from server.adapters.config import AdapterConfig, AdapterError
from server.checkpoint.files import (
    HubError,
    adapter_files,
    check_safetensors,
    checked_file,
    choose_weights,
    need_space,
    read_json,
    readable,
    refuse_placeholder,
    weight_files,
)
from server.checkpoint.hub import ADAPTER, TOKENIZER_SOURCES


@dataclass(frozen=True)
class ModelCheck:
    """Of one launch, whose `variables` and `container` are those that are meant, and not those of this process."""

    settings: Settings
    placement: Placement
    variables: Mapping[str, str]
    container: Container | None
    findings: Findings

    def run(self) -> Estimate | None:
        """Look at the model's files, and what it takes; None where that is not known."""
        findings = self.findings
        self._check_speculative_model()
        self._check_adapters()
        with tempfile.TemporaryDirectory() as spare:
            try:
                values = self.settings.values
                model = find_description(
                    self.settings, self.variables, Path(spare), values["model_id"], values["revision"]
                )
                config = read_json(model.folder / "config.json", "the model's description")
            except HubError as error:
                findings.problems.append(str(error))
                findings.unchecked.append("the model: its shards, memory and longest sequence")
                return None
            self._check_tokenizer(model)
            self._check_template(model)
            found = estimate(
                self.settings, self.placement, model.folder, config, self.variables, findings.problems.append
            )
            if found is not None:
                self._add(found)
            self._check_weights(model, found)
            return found

    def _check_speculative_model(self) -> None:
        """Whether there is what proposes tokens; its memory is not counted."""
        name, findings = self.settings.values["speculative_model"], self.findings
        if self.settings.values["speculative_method"] == "mtp":
            findings.unchecked.append("whether the model has the layer that speculative_method mtp takes")
        if name is None:
            return
        with tempfile.TemporaryDirectory() as spare:
            try:
                model_id, revision = name_and_revision(name)
                found = find_description(self.settings, self.variables, Path(spare), model_id, revision)
                config = read_json(found.folder / "config.json", "the speculative model's description")
                if found.cache is None:
                    _check_speculative_weights(found.folder)
            except HubError as error:
                findings.problems.append(str(error))
                return
        findings.add("speculative model", name, str(config.get("model_type", "")))
        findings.unchecked.append("the memory of the speculative model, and whether it goes with the model")

    def _check_adapters(self) -> None:
        """Whether there is what requests may name; whether it goes with the model, shards find out."""
        findings, sources = self.findings, parse_adapters(self.settings.values["lora_adapters"])
        for source in sources:
            if problem := name_problem(source, self.settings):
                findings.problems.append(problem)
            with tempfile.TemporaryDirectory() as spare:
                try:
                    where = (Path(spare), source.given, source.revision, ADAPTER)
                    found = find_description(self.settings, self.variables, *where)
                    if other := other_base(source.name, AdapterConfig.read(found.folder), self.settings):
                        findings.notes.append(other)
                    if found.cache is None:
                        self._check_adapter_files(found.folder)
                except (HubError, AdapterError) as error:
                    findings.problems.append(f"--lora-adapters {source.name}: {error}")
                except Unfit as error:
                    findings.problems.append(f"the adapter {source.name} {error}")
        if sources:
            findings.unchecked.append("whether the adapters go with the model, and what they take")

    def _check_adapter_files(self, folder: Path) -> None:
        """Raises HubError and Unfit. What is no safetensors file is converted at the first start."""
        values, files = self.settings.values, adapter_files(folder)
        if files[0].suffix == ".safetensors":
            check_safetensors(files[0])
            world_size = self.placement.layout.world_size
            appearance(str(folder), None, most_adapter_bytes(values["adapter_memory"], world_size))

    def _check_tokenizer(self, model: Description) -> None:
        findings, folder = self.findings, model.folder
        names = model.names or {path.name for path in folder.iterdir()}
        if "tokenizer.json" in names:
            if model.names:
                findings.unchecked.append("the tokenizer, which is fetched at the first start")
            else:
                config = _if_there(self.settings.values["tokenizer_config_path"])
                findings.attempt(lambda: _load_tokenizer(folder, config))
        elif names & set(TOKENIZER_SOURCES):
            findings.unchecked.append("the tokenizer, which is converted at the first start")
        elif model.names or model.cache is None:
            name = self.settings.shown_model if model.names else folder
            findings.problems.append(
                f"{name} has no tokenizer.json: add it, or serve a model that comes with its tokenizer"
            )
        else:
            findings.unchecked.append("the tokenizer, which is not in the cache")

    def _check_template(self, model: Description) -> None:
        """Whether it can be read and writes a plain chat. Where it is not there yet, nothing is said."""
        values = self.settings.values
        config, given = (_if_there(values[name]) for name in ("tokenizer_config_path", "chat_template"))
        template = self.findings.attempt(lambda: ChatTemplate.load(model.folder, config, given))
        if template is not None and template.named and (refused := asyncio.run(_refusal(template))) is not None:
            self.findings.notes.append(refused)

    def _check_weights(self, model: Description, found: Estimate | None) -> None:
        """Whether the weights are whole, or can be fetched."""
        problems, override = self.findings.problems, self.settings.values["weights_cache_override"]
        if self.settings.values["random_weights"]:
            return
        try:
            files = weight_files(model.folder if override is None else Path(override).expanduser())
            for path in files:
                if path.suffix == ".safetensors":
                    check_safetensors(path)
        except HubError as error:
            if override is not None or model.cache is None or is_offline(self.variables):
                problems.append(str(error))
            else:
                self._check_download(model, model.cache, found.weight_bytes if found else 0)
            return
        if files[0].suffix == ".bin":
            self.findings.notes.append(f"{files[0].name} is converted to safetensors at the first start")
        elif found is not None and (layers := _count_layers(files)) < found.num_layers:
            problems.append(
                f"{files[0].parent} has weights of {layers} layers, but config.json says {found.num_layers}: fetch it "
                "again"
            )

    def _check_download(self, model: Description, cache: Path, wanted: int) -> None:
        """Whether the weights would be found, and have room. wanted: bytes, 0 where it is not known."""
        findings = self.findings
        if model.names and not choose_weights(model.names):
            findings.problems.append(
                f"{self.settings.shown_model} has no weights in a supported format: *.safetensors or *.bin"
            )
            return
        size = f"about {readable(wanted)}" if wanted else "them"
        findings.unchecked.append(f"the weights: the first start downloads {size}")
        if self.container and not any(map(cache.is_relative_to, self.container.mounts.values())):
            findings.notes.append(f"no folder of this machine is mounted at {cache}, where downloads go")
            return
        folder = nearest_folder(cache)
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            findings.problems.append(f"{cache} cannot be made: {error.strerror}; move --huggingface-hub-cache")
            return
        findings.attempt(lambda: need_space(folder, wanted, "for the weights: make room"))

    def _add(self, found: Estimate) -> None:
        findings, is_small = self.findings, found.parameters < 1e9
        count, unit = (found.parameters / 1e6, "million") if is_small else (found.parameters / 1e9, "billion")
        findings.add("parameters", f"{count:.3g} {unit}", found.stored)
        findings.add("dtype", found.dtype, found.dtype_reason)
        findings.notes += [found.warning] if found.warning else []
        findings.unchecked += [f"memory: {found.unknown}"] if found.unknown else []
        room = found.capacity
        if room is None or found.memory is None:
            return
        findings.add("weights", f"{readable(room.weight_bytes_per_shard)} per shard")
        size = room.max_batch_total_tokens * room.kv_bytes_per_token_per_shard
        each = f"{room.kv_bytes_per_token_per_shard} bytes each; at most {room.kv_tokens} tokens fit"
        findings.add("KV cache", f"{room.max_batch_total_tokens} tokens", f"{readable(size)} per shard, {each}")
        if room.state_bytes_per_sequence:
            findings.add("per sequence", f"{readable(room.state_bytes_per_sequence)} per shard")
        shards = self.placement.layout.num_local
        shared = f", shared by {shards} shards" if self.placement.device == "cpu" and shards > 1 else ""
        findings.add("memory", readable(found.memory.free_bytes), found.memory.described + shared)
        if found.memory.in_use:
            findings.notes.append(f"{found.memory.in_use} are in use now, and must be free when the server starts")


def _check_speculative_weights(folder: Path) -> None:
    """Raise HubError unless the weights in a folder are whole, and in the only format that one may have."""
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            raise HubError(
                f"{folder} has no *.safetensors, which a speculative model must have: take one in that format"
            )
        check_safetensors(path)


def _if_there(path: str | None) -> str | None:
    """The path of a file, or None: that it is not there was said before."""
    expanded = os.path.expanduser(path or "")
    return expanded if os.path.isfile(expanded) else None


async def _refusal(template: ChatTemplate) -> str | None:
    """What the start would warn of."""
    aside = Sandbox(1, tasks=template.tasks)
    try:
        return await template.refusal(aside)
    except (OSError, Unavailable):
        return None  # the first chat will say
    finally:
        await aside.close()


def _load_tokenizer(folder: Path, tokenizer_config_path: str | None) -> None:
    from router.text.tokenizer import ModelTokenizer  # which takes time

    refuse_placeholder(checked_file(folder, "tokenizer.json"))
    ModelTokenizer.load(str(folder), None, tokenizer_config_path)


def _count_layers(files: Iterable[Path]) -> int:
    """By the first number in the names of tensors, as all families write it."""
    highest = -1
    for path in files:
        with safe_open(path, framework="np") as file:
            numbers = (re.search(r"\.(\d+)\.", f".{name}") for name in file.keys())
            highest = max([highest, *(int(number[1]) for number in numbers if number)])
    return highest + 1
