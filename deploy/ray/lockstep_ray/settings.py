"""What `app.yaml` says of the models, checked before anything is started."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.scheduling.balancing import ALIASES, POLICIES


class Scaling(BaseModel):
    """How many replicas, and from when on more. Times are in seconds.

    queue: requests that wait on one replica; kv: share of its KV cache that running requests hold. At these a replica
    counts as full.
    """

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    initial_replicas: int | None = None
    queue: float = Field(default=4, gt=0)
    kv: float = Field(default=0.8, gt=0, le=1)
    upscale_delay_s: float = Field(default=10, ge=0)
    downscale_delay_s: float = Field(default=300, ge=0)
    metrics_interval_s: float = Field(default=2, gt=0)
    look_back_period_s: float = Field(default=10, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Scaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}: give at most max_replicas, {self.max_replicas}")
        return self


class Model(BaseModel):
    """One model, and what its replicas are. flags: of the launcher; environment: beside what the node has.

    adapters: names of those that `flags` give the launcher.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    aliases: list[str] = []
    adapters: list[str] = []
    flags: list[str] = []
    environment: dict[str, str] = {}
    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    resources: dict[str, float] = {}
    scaling: Scaling = Field(default_factory=Scaling)
    policy: str = "prefix-affine"
    max_ongoing_requests: int = Field(default=256, ge=1)
    health_check_period_s: float = Field(default=5, gt=0)
    health_check_timeout_s: float = Field(default=30, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=120, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Model:
        if ALIASES.get(self.policy, self.policy) not in POLICIES:
            raise ValueError(f"{self.policy} is no dispatch policy: give one of {', '.join(POLICIES)}")
        return self

    @property
    def own_names(self) -> list[str]:
        """What requests call the model itself."""
        return [self.name, *self.aliases]

    @property
    def every_flag(self) -> list[str]:
        """Those of the launcher, to which names of the model are no adapters'."""
        return [*self.flags, *(f"--served-model-name={name}" for name in self.own_names if self.adapters)]


class Deployment(BaseModel):
    """The whole of it. The first model answers routes and requests that name none.

    api_key: asked of clients; none where it is empty. hosts: what a request may be addressed to; `*` is anything.
    """

    model_config = ConfigDict(extra="forbid")

    models: list[Model] = Field(min_length=1)
    api_key: str = Field(default="", repr=False)
    hosts: list[str] = ["localhost", "127.0.0.1", "[::1]"]
    payload_limit: int = Field(default=2_000_000, ge=1)
    most_tries: int = Field(default=6, ge=1)
    give_up_s: float = Field(default=120, ge=0)
    num_ingresses: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Deployment:
        names = [name for model in self.models for name in (*model.own_names, *model.adapters)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is the name of several models: give each names of its own")
        return self

    def by_name(self) -> dict[str, str]:
        """Every name, alias and adapter -> name."""
        return {name: model.name for model in self.models for name in (*model.own_names, *model.adapters)}

    def parents(self) -> dict[str, str]:
        """Every adapter -> the name of its model."""
        return {name: model.name for model in self.models for name in model.adapters}


def deployment_name(model: str) -> str:
    """What Serve calls the deployment of a model: a name without what parts names there."""
    return model.replace("/", "--").replace("#", "--")


def read_settings(given: dict[str, Any]) -> Deployment:
    """What the file's `args` ask for. Raises ValueError."""
    return Deployment.model_validate(given)
