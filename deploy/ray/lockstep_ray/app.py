"""The application that `serve run deploy/ray/app.yaml` builds: an ingress, and a deployment for each model."""

from __future__ import annotations

import os
from typing import Any

from lockstep_ray import ingress, replica
from lockstep_ray.settings import read_settings


def build(args: dict[str, Any]) -> Any:
    """args: of the application in the file. The API key may come from LOCKSTEP_API_KEY instead. Raises ValueError."""
    key = os.environ.get("LOCKSTEP_API_KEY", "")
    settings = read_settings({"api_key": key, **args})
    handles = {model.name: replica.deployment_of(model) for model in settings.models}
    return ingress.deployment_of(settings, handles)
