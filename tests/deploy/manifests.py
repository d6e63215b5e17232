"""What the chart and deploy/kubernetes say, as documents for the tests that hold them to the server and to schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from launch.flags import read_command_line
from launch.settings import read_settings
from tests.deploy.chart import rendered
from tests.pages import section
from tests.running import ROOT

Document = dict[str, Any]

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = ("inference-pool", "nodes")
PAGE = section("deploying.md", "Kubernetes")

# Values with which the chart is rendered, each as release `lockstep` and under another name.
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {"autoscaling": {"hpa": True, "keda": True}, "monitoring": True},
    "keda": {"autoscaling": {"keda": True, "minReplicas": 2, "maxReplicas": 3}, "monitoring": True},
    "open": {"apiKey": False, "monitoring": True, "clientNamespaces": ["monitoring", "gateways"]},
    "patient": {"shutdownDelay": 30, "gracefulTerminationTimeout": 900, "secret": "other"},
    "one disk": {"cache": {"accessMode": "ReadWriteOnce", "storageClass": "fast", "size": "1Ti"}},
    "page": yaml.safe_load(PAGE.split("```yaml\n# gpus.yaml\n")[1].split("```")[0]),
}


def plain(*files: str) -> list[Document]:
    """The documents of these files of deploy/kubernetes."""
    return [document for name in files for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())]


def everything() -> list[Document]:
    """Every document of every file and of every rendering, each once."""
    found = plain(*FILES)
    for values in VALUES.values():
        for release in ("lockstep", "other"):
            found += rendered(values, release)
    return list({json.dumps(document, sort_keys=True): document for document in found}.values())


def one(documents: list[Document], kind: str) -> Document:
    """The only document of a kind."""
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def pods(documents: list[Document]) -> Iterator[Document]:
    """The templates of all pods that run a server of ours."""
    for document in documents:
        spec = document.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
            if template is not None and template["spec"]["containers"][0]["image"].startswith("lockstep:"):
                yield template


def settings_of(pod: Document) -> dict[str, Any]:
    """The settings that a pod's flags give its server."""
    flags, unknown = read_command_line(pod["spec"]["containers"][0]["args"])
    settings, problems = read_settings(flags, {})
    assert [] == unknown + problems
    return settings.values
