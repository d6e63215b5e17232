"""Whose fault the end of a launch or of a group of shards was, when several of its processes have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.launch.processes import Child
from router.launch.terminal import printable


def culprit(ended: Sequence[Child]) -> Child | None:
    """Of processes in the order in which they ended: one with a cause of its own, else the first that did not merely
    follow another, else the first."""
    independent = [child for child in ended if not child.is_consequence]
    return next((child for child in ended if child.has_cause), next(iter([*independent, *ended]), None))


def cause_of_loss(ended: Sequence[Child], report: Mapping[str, Any] | None, verb: str = "stopped") -> str:
    """Why a group of shards is lost, in one sentence: by those that ended, and by what the router reported."""
    guilty = culprit(ended)
    is_known = report is not None and report.get("is_known")
    if guilty is not None and (guilty.has_cause or not is_known):
        return f"{guilty.title} {verb}: {printable(guilty.cause)}"
    if report is None:
        return "the shards were not ready in time"
    return f"shard {report['rank']} {verb}: {printable(str(report['cause']))}"
