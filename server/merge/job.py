"""What `lockstep merge` is asked for, which the launcher hands over as JSON. Without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Job:
    """output: the folder to make; files: paths of what goes into it as it is."""

    model_path: str
    weights_path: str
    adapter_path: str
    output: str
    files: tuple[str, ...]

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**(values | {"files": tuple(values["files"])}))
