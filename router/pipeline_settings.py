"""Settings of models that are cut into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_MICRO_BATCHES = 16  # with one more step under way than that, the shards' queues hold as many


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The part of `RouterConfig` that the scheduler's lanes keep to."""

    num_stages: int = 1  # what the launcher tells the router: pipeline_parallel

    micro_batches: int | None = field(
        default=None,
        metadata={
            "help": "Parts that the batch is divided into where there are pipeline stages, so that each stage computes "
            "one part while the next stage computes another. Every part reads all weights.",
            "unit": "parts",
            "min": 1,
            "max": MOST_MICRO_BATCHES,
            "default": "the number of stages (pipeline_parallel)",
            "when": "Raise it where stages idle because what they send each other takes long, as over slow links.",
        },
    )

    @property
    def num_lanes(self) -> int:
        """Micro-batches that take turns; 1 where the model is not cut."""
        if self.num_stages == 1:
            return 1
        return self.micro_batches or min(self.num_stages, MOST_MICRO_BATCHES)
