"""Rules between the settings of what leaves memory: weights, KV blocks and the prefix cache, on the host or on a disk.

No torch here: the launcher finds what these settings break, alone and together, before it asks for a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.config import AUTO
from server.disk.folders import free_bytes, nearest_folder, open_unnamed, refuse_memory
from server.offload.share import Share

NO_FOLDER = "--weights-on-device {} leaves weights to a disk: name a folder on one with --offload-dir"
NO_KV_FOLDER = "--kv-on-device {} leaves KV blocks to a disk: name a folder on one with --offload-dir"
NO_HOST = (
    "--{0}-on-host is for GPUs: a CPU's memory is the device's, of which --{0}-on-device takes a share; leave it out"
)


def tier_problems(
    *,
    prefix_cache_host_gb: float,
    prefix_cache_disk_gb: float,
    prefix_cache_dir: str | None,
    disable_prefix_caching: bool,
) -> list[str]:
    """What is wrong with these settings together, each with its remedy."""
    problems = []
    if prefix_cache_disk_gb and not prefix_cache_dir:
        problems.append(
            f"--prefix-cache-disk-gb is {prefix_cache_disk_gb:g} but there is no --prefix-cache-dir: give a folder on "
            "a local disk, or leave both out"
        )
    if prefix_cache_dir and not prefix_cache_disk_gb:
        problems.append(
            f"--prefix-cache-dir is {prefix_cache_dir} but --prefix-cache-disk-gb is 0: say how much of that disk the "
            "prefix cache may take, or leave both out"
        )
    if disable_prefix_caching and (prefix_cache_host_gb or prefix_cache_disk_gb):
        problems.append(
            "--disable-prefix-caching is set, so nothing could use --prefix-cache-host-gb and --prefix-cache-disk-gb: "
            "leave out either it or them"
        )
    return problems


def offload_problems(
    *,
    weights_on_device: str,
    weights_on_host: str | None,
    kv_on_device: str,
    kv_on_host: str | None,
    offload_dir: str | None,
    has_own_memory: bool,
) -> list[str]:
    """What is wrong with these settings on this machine, each with its remedy. has_own_memory: of the device."""
    problems = []
    if weights_on_device == AUTO and not Share.parse(kv_on_device).is_all:
        problems.append(
            f"--weights-on-device auto chooses beside a KV cache that is all on the device, and --kv-on-device is "
            f"{kv_on_device}: give a share of the weights, such as 40%, or leave --kv-on-device out"
        )
    for name, on_device, on_host, sentence in (
        ("weights", weights_on_device, weights_on_host, NO_FOLDER),
        ("kv", kv_on_device, kv_on_host, NO_KV_FOLDER),
    ):
        if on_host is not None and not has_own_memory:
            problems.append(NO_HOST.format(name))
        elif offload_dir is None and _needs_folder(on_device, on_host, has_own_memory=has_own_memory):
            problems.append(sentence.format(on_device))
    if offload_dir is not None:
        try:
            os.close(open_unnamed(Path(offload_dir), "--offload-dir")[0])
        except ValueError as error:
            problems.append(str(error))
    return problems


def _needs_folder(on_device: str, on_host: str | None, *, has_own_memory: bool) -> bool:
    """Whether something is surely on a disk: `auto` may find that everything stays."""
    if on_device == AUTO or Share.parse(on_device).is_all:
        return False
    return not has_own_memory or (on_host is not None and not Share.parse(on_host).is_all)


def folder_problems(prefix_cache_dir: str | None) -> list[str]:
    """What is wrong with the prefix cache's folder, which need not be there yet."""
    if prefix_cache_dir is None:
        return []
    folder = Path(prefix_cache_dir).expanduser()
    try:
        refuse_memory(nearest_folder(folder), "--prefix-cache-dir")
    except ValueError as error:
        return [str(error)]
    return []


def idle_settings(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each of these settings that changes nothing beside the others."""
    found = []
    weights, kv = values["weights_on_device"], values["kv_on_device"]
    weights_stay = weights != AUTO and Share.parse(weights).is_all
    kv_stays = Share.parse(kv).is_all
    if values["offload_dir"] is not None and weights_stay and kv_stays:
        found.append(
            "--offload-dir holds nothing: all weights and KV blocks stay on the device; say how much of them does with "
            "--weights-on-device or --kv-on-device"
        )
    for name, stays in (("weights", weights_stay), ("kv", kv_stays)):
        if values[f"{name}_on_host"] is not None and stays:
            found.append(f"--{name}-on-host changes nothing: --{name}-on-device is 100%, so nothing goes to the host")
    return found


def room_problem(prefix_cache_disk_gb: float, prefix_cache_dir: str | None) -> str | None:
    """A sentence where the disk has less room than the prefix cache may take."""
    if not prefix_cache_disk_gb or prefix_cache_dir is None:
        return None
    folder = Path(prefix_cache_dir).expanduser()
    try:
        own = sum(path.stat().st_blocks * 512 for path in folder.glob("*.blocks"))
        room = own + free_bytes(nearest_folder(folder))
    except OSError:
        return None  # the shards say what is wrong with it
    if prefix_cache_disk_gb * 1e9 <= room:
        return None
    return (
        f"--prefix-cache-disk-gb is {prefix_cache_disk_gb:g} and {prefix_cache_dir} has room for {room / 1e9:.1f} GB: "
        "the prefix cache grows until that is full; free space there, or lower it"
    )
