"""Kinds that Kubernetes itself does not have, held against the types and schemas of packages of the npm registry.

`make schemas` installs them below .schemas, with the compiler. That finds fields which a kind lacks; functions of the
packages find values of the wrong form.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.deploy.manifests import Document
from tests.running import ROOT

MODULES = ROOT / ".schemas" / "node_modules"
PACKAGES = {
    "ScaledObject": "keda/keda.sh/v1alpha1",
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
}
COMPILER = (
    "node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--types", "",
)  # fmt: skip


def complaints(documents: list[Document], folder: Path) -> str:
    """What compiler and packages have against these documents; nothing if they are fine. Writes into `folder`."""
    kinds = sorted({document["kind"] for document in documents})
    typed = [f'import type {{ I{kind} }} from "@kubernetes-models/{PACKAGES[kind]}/{kind}";' for kind in kinds]
    run = [f'import {{ {kind} }} from "@kubernetes-models/{PACKAGES[kind]}/{kind}";' for kind in kinds]
    for number, document in enumerate(documents):
        typed.append(f"export const c{number}: I{document['kind']} = {json.dumps(document)};")
        run.append(f"new {document['kind']}({json.dumps(document)}).validate();")
    (folder / "node_modules").symlink_to(MODULES)
    for name, lines in {"documents.mts": typed, "documents.mjs": run}.items():
        (folder / name).write_text("\n".join(lines))
    commands = ((*COMPILER, "documents.mts"), ("node", "documents.mjs"))
    done = [subprocess.run(command, cwd=folder, capture_output=True, text=True) for command in commands]
    return "".join(run.stdout + run.stderr for run in done if run.returncode)
