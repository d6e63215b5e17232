"""What this machine allows: GPUs and the number of shards, the port, and settings of memory and disks.

All of it is checked before a model is downloaded.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path

from host import topology
from host.version import package_version, version
from launch.config import AUTO, SHARD_COUNTS
from launch.errors import Refusal
from launch.logs import printable
from launch.nodes import Layout, Nodes, check_nodes, plan_nodes
from launch.settings import Settings, flag
from server.config import THROUGH_HOST, folder_problems, idle_settings, offload_problems, room_problem

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows' Linux, of AMD
FILES = ("tokenizer_config_path", "chat_template", "api_keys_file")  # that the router reads
OFFLOADING = ("weights_on_device", "weights_on_host", "kv_on_device", "kv_on_host", "offload_dir")


def describe_environment(environ: Mapping[str, str]) -> list[str]:
    """What a bug report needs; no values of variables, which may be secret."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "grpcio", "fastapi", "uvicorn")
    return [
        f"lockstep {version()}, Python {platform.python_version()}, {platform.platform()}",
        f"{os.cpu_count()} cores, {memory:.1f} GiB memory, {visible_gpus(environ)} GPUs",
        ", ".join(f"{package} {package_version(package)}" for package in packages),
    ]


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs the variables name, else nvidia-smi."""
    chosen = chosen_gpus(environ)
    return _installed_gpus() if chosen is None else len(chosen)


def chosen_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES, else HIP_VISIBLE_DEVICES (AMD's) or NVIDIA_VISIBLE_DEVICES names; None: all."""
    devices = environ.get("CUDA_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
    if devices is None:
        devices = environ.get("NVIDIA_VISIBLE_DEVICES") or "all"
        if devices in ("all", "void", "none"):
            return None
    # CUDA ignores the list from its first invalid entry on; -1 is how people hide all GPUs.
    return list(takewhile(lambda d: d and not d.startswith("-"), (d.strip() for d in devices.split(","))))


def has_gpu_driver() -> bool:
    """Whether a GPU that a variable names can be there at all."""
    return any(Path(device).exists() for device in GPU_DRIVERS) or _installed_gpus() > 0


def _installed_gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


@dataclass(frozen=True)
class Placement:
    """Where a launch runs: the device, the ranks of each node, and the nodes."""

    device: str
    layout: Layout
    nodes: Nodes


def place(settings: Settings, environ: Mapping[str, str]) -> tuple[Placement, list[str]]:
    """Where a launch with these settings runs, and one sentence for each thing that this machine does not allow."""
    placement = Placement("cpu", Layout(1), Nodes())
    try:
        gpus = 0 if settings.values["device"] == "cpu" else visible_gpus(environ)
        nodes = plan_nodes(settings, environ)
        placement = Placement(*plan_shards(settings, gpus, nodes), nodes)
        check_nodes(settings, nodes, placement.layout)
        problems = file_problems(settings) if nodes.index == 0 else []
        return placement, problems + storage_problems(settings, placement.device)
    except ValueError as error:
        return placement, [str(error)]


def plan_shards(settings: Settings, gpus: int, nodes: Nodes | None = None) -> tuple[str, Layout]:
    """The device, and how many shards there are, by TGI's rules; or ValueError in one sentence. gpus: of this node."""
    nodes = nodes or Nodes()
    device, sharded, count = (settings.values[name] for name in ("device", "sharded", "num_shard"))
    stages = settings.values["pipeline_parallel"]
    if device == "cuda" and gpus == 0:
        raise ValueError(
            "--device is cuda but no GPU is visible: check nvidia-smi, name AMD's GPUs in HIP_VISIBLE_DEVICES, or use "
            "--device cpu"
        )
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    visible = gpus if device == "cuda" else 0
    is_auto = count == AUTO
    if is_auto:
        each = visible or len(topology.nodes(topology.allowed_cpus()))
        count = max(_most_shards(each * nodes.count // stages), 1)
    if sharded and (count == 1 or (count is None and visible <= 1)):
        fact = (
            f"--num-shard {'auto finds' if is_auto else 'is'} 1"
            if count == 1
            else f"the number of visible GPUs is {visible}"
        )
        raise ValueError(f"--sharded is true but {fact}: give --num-shard 2, 4 or 8, or leave --sharded out")
    if count is None:
        is_small = settings.is_null_model or settings.sources["model_id"] == "default"
        count = 1 if sharded is False or (is_small and not sharded) else max(visible * nodes.count // stages, 1)
    if count not in SHARD_COUNTS:
        raise ValueError(f"{count} GPUs are visible, which a model cannot be split over: give --num-shard 1, 2, 4 or 8")
    layout = Layout(count, stages, nodes.count, nodes.index)
    if device == "cuda" and layout.num_local > gpus and settings.values["all_reduce"] != THROUGH_HOST:
        raise ValueError(_too_few_gpus(layout, gpus))
    return device, layout


def _most_shards(number: int) -> int:
    """The largest number of shards that is not larger; 0: there is none."""
    return max((count for count in SHARD_COUNTS if count <= number), default=0)


def _too_few_gpus(layout: Layout, gpus: int) -> str:
    total = gpus * layout.num_nodes
    most = _most_shards(total // layout.num_stages)
    if layout.num_stages == 1:
        needed, remedy = f"--num-shard is {layout.num_shard}", f"give at most {most}"
    else:
        needed = f"--num-shard {layout.num_shard} times --pipeline-parallel {layout.num_stages} is {layout.world_size}"
        remedy = f"give --num-shard {most}" if most else "lower --pipeline-parallel"
    if layout.num_nodes > 1:
        needed += f", {layout.num_local} on each of {layout.num_nodes} nodes,"
    shared = ", or --all-reduce host to have shards share a GPU, which is slow" if layout.num_stages == 1 else ""
    return f"{needed} but the number of visible GPUs is {gpus}: {remedy}, or --device cpu{shared}"


class PortTaken(Refusal):
    """Another program listens there."""


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that has its port alone, and does not listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise Refusal([f"--hostname {hostname} is no address of this machine: use 0.0.0.0 or 127.0.0.1"], 1) from None
    # Two sockets with SO_REUSEADDR may both be bound as long as neither listens, so a second launch would notice the
    # first only after loading. Hence without it first; with it only where old connections in TIME_WAIT hold the port.
    for reuse in (0, 1):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            listener.bind(address)
            return listener
        except OSError as error:
            listener.close()
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    raise (PortTaken if problem.errno == errno.EADDRINUSE else Refusal)([_bind_problem(hostname, port, problem)], 1)


def bind_beside(holder: socket.socket) -> socket.socket:
    """Another socket at the address of a bound one that never listens. Raises OSError.

    No other user can bind there any more, nor can another launch, which does not set SO_REUSEPORT.
    """
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or others that set it might bind beside the holder
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    for reuse in (0, 1):  # as in `bind`: another program's connections in TIME_WAIT may be there
        listener = socket.socket(holder.family, holder.type, holder.proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            listener.bind(holder.getsockname())
        except OSError as error:
            listener.close()
            problem = error
            continue
        # Connections that it accepts have this too: a later launch can bind beside those in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return listener
    raise problem


def is_on_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a bound socket."""
    return ip_address(listener.getsockname()[0]).is_loopback


def _bind_problem(hostname: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken: stop the server that has it, or give another --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} needs root: give a --port of 1024 or more"
    return f"cannot listen on {hostname} port {port}: {error.strerror}; use --hostname 0.0.0.0 or 127.0.0.1"


def access_warnings(settings: Settings, listener: socket.socket) -> list[str]:
    """A sentence where anybody who reaches this machine may use the server. listener: its bound socket."""
    values = settings.values
    if values["api_key"] is not None or values["api_keys_file"] is not None or is_on_loopback(listener):
        return []
    remedy = "set API_KEY, or use --hostname 127.0.0.1"
    return [f"other machines can reach {values['hostname']} and there is no API key: {remedy}"]


def file_problems(settings: Settings) -> list[str]:
    """One sentence for each file that a setting names and the router could not use, before anything needs it."""
    values, found = settings.values, []
    for name in FILES:
        if values[name]:
            shown = f"{flag(name)} is {printable(values[name])}"
            try:
                _read(name, Path(os.path.expanduser(values[name])), values["api_key"])
            except FileNotFoundError:
                found.append(f"{shown}, which is no file: check the path")
            except OSError as error:
                found.append(f"{shown}, which cannot be read: {error.strerror}")
            except UnicodeDecodeError as error:
                found.append(f"{shown}, which is no text: {error}")
            except ValueError as error:
                found.append(str(error))
    return found


def _read(name: str, path: Path, api_key: str | None) -> None:
    """Look at a file as the router will. Raises OSError and ValueError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError
    if name == "api_keys_file":
        from router.accounts import read_keys  # which takes time that few launches need

        read_keys(api_key, path)
    elif name == "tokenizer_config_path" or path.suffix == ".json":
        from router.text.tokenizer import read_json  # likewise

        read_json(path)
    else:
        path.read_text()


def storage_problems(settings: Settings, device: str) -> list[str]:
    """One sentence for each setting that this machine cannot meet. device: that computes."""
    values = settings.values
    if settings.is_null_model:
        return _missing_folder("--adapter-dir", values["adapter_dir"])
    return [
        *_missing_folder("--adapter-dir", values["adapter_dir"]),
        *_missing_folder("--weights-cache-override", values["weights_cache_override"]),
        *offload_problems(**{name: values[name] for name in OFFLOADING}, has_own_memory=device != "cpu"),
        *folder_problems(values["prefix_cache_dir"]),
    ]


def _missing_folder(name: str, folder: str | None) -> list[str]:
    if folder is None or Path(folder).expanduser().is_dir():
        return []
    return [f"{name} is {printable(folder)}, which is no folder: make it first, or check the path"]


def storage_warnings(settings: Settings) -> list[str]:
    """One sentence for each setting that does less than it says, or nothing."""
    values, found = settings.values, []
    if settings.is_null_model:
        return []
    for name in ("null_step_ms", "null_token_us"):
        if values[name]:
            found.append(f"{flag(name)} is {values[name]:g} but there is a model: it slows --model-id null alone")
    found += idle_settings(values)
    if problem := room_problem(values["prefix_cache_disk_gb"], values["prefix_cache_dir"]):
        found.append(problem)
    return found
