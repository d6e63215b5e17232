"""What settings ask of this machine's memory and disks, and which do nothing, looked at before a model is asked for."""

from __future__ import annotations

from router.launch.settings import Settings, flag
from server.offload.storage_settings import folder_problems, idle_settings, offload_problems, room_problem

OFFLOADING = ("weights_on_device", "weights_on_host", "kv_on_device", "kv_on_host", "offload_dir")


def storage_problems(settings: Settings, device: str) -> list[str]:
    """One sentence for each setting that this machine cannot do. device: what computes."""
    if settings.is_null_model:
        return []
    values = settings.values
    return [
        *offload_problems(**{name: values[name] for name in OFFLOADING}, has_own_memory=device != "cpu"),
        *folder_problems(values["prefix_cache_dir"]),
    ]


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
