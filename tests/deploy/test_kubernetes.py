"""The chart and the manifests for Kubernetes: valid, and true of the server. No cluster is asked."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from launcher import prepare
from tests.deploy.chart import CHART, defaults, render, rendered
from tests.deploy.manifests import FOLDER, PAGE, VALUES, Document, everything, one, plain, pods, settings_of
from tests.router.telemetry.test_metrics import page_with_keys, series_in
from tests.running import PATIENCE_S, ROOT, Server, body

kubernetes_validate = pytest.importorskip("kubernetes_validate")  # not packed for machines with a GPU
all_versions = pytest.importorskip("kubernetes_validate.utils").all_versions

VERSIONS = sorted(
    {version.split("-")[0] for version in all_versions()},
    key=lambda version: [int(part) for part in version.split(".")],
)[-3:]
UNVALIDATED = {"LeaderWorkerSet", "InferencePool", "HTTPRoute", "ScaledObject", "ServiceMonitor", "PrometheusRule"}
ENDING_S = 10  # the shards', after the router's
KEY = "a-key"


# ------------------------------------------------------------------------------------------------------- validity


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_valid_and_has_no_field_too_much(version: str) -> None:
    for document in everything():
        if document["kind"] not in UNVALIDATED:
            assert kubernetes_validate.validate(document, version, strict=True) == version.rpartition(".")[0]


def test_a_wrong_document_is_not_valid() -> None:
    deployment = one(rendered(), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_the_page_says_of_every_kind_what_validates_it() -> None:
    table = dict(
        re.findall(r"^\| ([\w, ]+) \| (.*) \|$", PAGE.split("### How manifests are validated")[1], re.MULTILINE)
    )
    said = {kind: how for kinds, how in table.items() for kind in kinds.split(", ")}
    for kind in {document["kind"] for document in everything()}:
        by = "not by the tests" if kind in UNVALIDATED else "kubernetes-validate"
        assert by in said[kind], kind


# ---------------------------------------------------------------------------------------------------------- chart


@pytest.mark.parametrize("values", VALUES)
def test_a_release_of_another_name_differs_in_it_alone(values: str) -> None:
    other = json.dumps(rendered(VALUES[values], "release-x"))
    assert rendered(VALUES[values]) == json.loads(other.replace("release-x", "lockstep")) != json.loads(other)


def test_every_value_is_used_and_changes_what_it_says() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    inner = {"cache", "autoscaling"}
    assert used == {
        f"{name}.{key}" if name in inner else name
        for name, value in defaults().items()
        for key in (value if name in inner else [name])
    }
    everywhere = str(rendered(VALUES["page"]) + rendered(VALUES["one disk"]) + rendered(VALUES["patient"]))
    for said in ("lockstep:cuda", "nvidia.com/gpu", "--num-shard", "ReadWriteOnce", "'fast'", "1Ti", "'other'"):
        assert said in everywhere
    assert "api-key" not in str(rendered(VALUES["open"])) and "gateways" in str(rendered(VALUES["open"]))


@pytest.mark.parametrize(
    "template",
    ["{{ .Values.missing }}", "{{ range .Values.args }}", "{{ if .Values.args }}", "{{ .Values.args }}", "{{ end }}"],
)
def test_what_the_renderer_does_not_know_is_refused(template: str) -> None:
    with pytest.raises(ValueError):
        render(template, {"Values": defaults()})


# --------------------------------------------------------------------------------------------- pods and the server


def test_a_pod_is_killed_later_than_its_server_needs_to_drain() -> None:
    for pod in pods(everything()):
        settings = settings_of(pod)
        drain = settings["shutdown_delay"] + settings["graceful_termination_timeout"]
        assert pod["spec"]["terminationGracePeriodSeconds"] >= drain + ENDING_S
        probe = pod["spec"]["containers"][0].get("readinessProbe", {"periodSeconds": 0, "failureThreshold": 0})
        assert settings["shutdown_delay"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_a_pod_may_do_what_the_image_needs_and_no_more() -> None:
    image = (ROOT / "deploy/docker/Dockerfile").read_text()
    [user] = set(re.findall(r"^USER (.*)$", image, re.MULTILINE))
    [volumes] = set(re.findall(r"^VOLUME (.*)$", image, re.MULTILINE))
    for pod in pods(everything()):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        rights = spec["securityContext"]
        assert rights["runAsNonRoot"] and f"{rights['runAsUser']}:{rights['runAsGroup']}" == user
        assert rights["fsGroup"] == rights["runAsGroup"] and rights["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not spec["automountServiceAccountToken"] and not spec["enableServiceLinks"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        there = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(json.loads(volumes)) <= mounted.keys() and set(mounted.values()) == there.keys()
        assert "emptyDir" in there[mounted["/tmp"]] and "persistentVolumeClaim" in there[mounted["/cache"]]
        assert there[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("documents", [rendered(VALUES["all"]) + plain("inference-pool"), plain("nodes")])
def test_what_selects_names_or_mounts_finds(documents: list[Document]) -> None:
    ours = list(pods(documents))
    labels = ours[-1]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for pod in ours for port in pod["spec"]["containers"][0]["ports"]}
    assert ports["http"] == settings_of(ours[0])["port"]
    for document in documents:
        spec = document.get("spec", {})
        chosen = spec.get("selector") or spec.get("podSelector") or {}
        chosen = chosen.get("matchLabels", chosen)
        if document["metadata"]["name"] != "lockstep-picker":
            assert {k: v for k, v in chosen.items() if "worker-index" not in k}.items() <= labels.items()
    for policy in (document["spec"] for document in documents if document["kind"] == "NetworkPolicy"):
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == set(ports.values())
    claims = {document["metadata"]["name"] for document in documents if document["kind"] == "PersistentVolumeClaim"}
    mounted = [volume.get("persistentVolumeClaim") for pod in ours for volume in pod["spec"]["volumes"]]
    assert claims == {claim["claimName"] for claim in mounted if claim}


def test_both_autoscalers_scale_alike() -> None:
    documents = rendered(VALUES["all"])
    hpa, keda = (one(documents, kind)["spec"] for kind in ("HorizontalPodAutoscaler", "ScaledObject"))
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    wanted = {m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in hpa["metrics"]}
    assert {"tgi_queue_size": "4", "tgi_kv_used_ratio": "800m"} == wanted
    asked = {t["metadata"]["query"]: t["metadata"]["threshold"] for t in keda["triggers"]}
    assert {f'sum({name}{{job="lockstep"}})': {"4": "4", "800m": "0.8"}[to] for name, to in wanted.items()} == asked
    assert (
        hpa["scaleTargetRef"]["name"]
        == keda["scaleTargetRef"]["name"]
        == one(documents, "Deployment")["metadata"]["name"]
    )
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())
    found = re.search(r'__name__=~"(.*?)"', adapter["rules"]["custom"][0]["seriesQuery"])
    assert found and all(re.fullmatch(found.group(1).strip("^$"), name) for name in wanted)


def test_every_metric_and_label_is_one_of_the_servers(tmp_path: Path) -> None:
    series = series_in(page_with_keys(tmp_path)).keys()
    names = {name.partition("{")[0] for name in series}
    adapter = (FOLDER / "prometheus-adapter.yaml").read_text()
    for said in (adapter, *map(str, everything())):
        assert set(re.findall(r"\btgi_\w+", said)) <= names, said
    rules = " ".join(
        rule["expr"] for rule in one(rendered(VALUES["all"]), "PrometheusRule")["spec"]["groups"][0]["rules"]
    )
    chosen = re.findall(r'(tgi_\w+)\{job="lockstep",(\w+)=~?"([^"]*)"', rules)
    assert chosen
    for name, label, values in chosen:
        assert {f'{name}{{{label}="{value}"}}' for value in values.split("|")} <= series


def test_the_launchers_of_a_leader_worker_set_know_their_places() -> None:
    leader, worker = pods(plain("nodes"))
    group = one(plain("nodes"), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    gpus = worker["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert leader["spec"]["containers"][0]["args"] == worker["spec"]["containers"][0]["args"]
    for index in range(group["size"]):
        environ = {
            "LWS_GROUP_SIZE": str(group["size"]),
            "LWS_WORKER_INDEX": str(index),
            "LWS_LEADER_ADDRESS": "lockstep-nodes-0.lockstep-nodes.default",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(gpus)))),
        }
        prepared = prepare(worker["spec"]["containers"][0]["args"], environ)
        assert prepared is not None
        _, place = prepared
        assert (group["size"], index, "LeaderWorkerSet") == (place.nodes.count, place.nodes.index, place.nodes.said_by)
        assert (environ["LWS_LEADER_ADDRESS"], 29500) == place.nodes.master
        assert int(gpus) == place.layout.num_local and not place.layout.splits_stages
        assert {"/tls"} < {mount["mountPath"] for mount in worker["spec"]["containers"][0]["volumeMounts"]}


# --------------------------------------------------------------------------------------------------------- probes


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server with the flags of the Deployment, which computes nothing."""
    flags = next(pods(rendered()))["spec"]["containers"][0]["args"]
    with Server(*flags, "--model-id=null", "--null-step-ms=50", env={**os.environ, "API_KEY": KEY}) as server:
        yield server


def test_probes_tell_what_has_to_be_done(served: Server) -> None:
    """Ready while requests can be answered; alive also while shards are started again, and while the server drains."""
    container = next(pods(rendered()))["spec"]["containers"][0]
    ready, alive = (container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe"))
    assert ready == container["startupProbe"]["httpGet"]["path"] != alive

    def status(path: str) -> int:
        return httpx2.get(f"{served.url}{path}", timeout=60).status_code

    def is_told(cause: str) -> bool:
        answer = httpx2.get(f"{served.url}{ready}", timeout=60)
        return 503 == answer.status_code and cause in answer.text

    assert (200, 200) == (status(ready), status(alive))
    (shard,) = served.shards()
    with stopped(served.process.pid):  # no other shard comes before it was seen that there is none
        os.kill(shard, signal.SIGKILL)
        await_true(lambda: is_told("unhealthy"))
        assert 200 == status(alive)
    await_true(lambda: status(ready) == 200)
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.stream(
        "POST", f"{served.url}/generate_stream", json=body("Once", max_new_tokens=40), headers=headers, timeout=300
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        with stopped(*served.shards()):  # the stream does not end before it was seen that the server drains
            served.stop()
            await_true(lambda: is_told("the server is stopping or restarting"))
            assert 200 == status(alive)
        assert any("generated_text" in line and "null" not in line.split("generated_text")[1][:8] for line in lines)


def await_true(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Poll what must come to be; the bound is one of liveness."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# ----------------------------------------------------------------------------------------------------------- page


def test_what_the_page_says_to_type_is_there() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    typed = "".join(block for language, block in blocks if not language)
    files = set(re.findall(r"deploy/[\w./-]+", typed))
    assert files and all((ROOT / name).exists() for name in files)
    assert all(path.name in PAGE for path in FOLDER.iterdir())
    for name in re.findall(r"--set (\w+(?:\.\w+)*)=", typed):
        value: Any = defaults()
        for part in name.split("."):
            value = value[part]
    secret = set(re.findall(r"--from-(?:literal|file)=([\w.-]+)=", typed))
    assert {"api-key", "ca.pem", "cert.pem", "key.pem"} <= secret
