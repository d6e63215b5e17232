"""The alert rules for Prometheus, by Prometheus' own `promtool`: each fires when it should, and otherwise does not."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import rendered
from tests.deploy.manifests import one

POD = {"job": "lockstep", "namespace": "models", "pod": "lockstep-1"}
FLEET = {"job": "lockstep", "namespace": "models"}
STEP = "15s"
FOR_AN_HOUR = 240  # steps
RULE = one(rendered({"monitoring": True}), "PrometheusRule")["spec"]
RULES = {rule["alert"]: rule for rule in RULE["groups"][0]["rules"]}

Series = dict[str, str]  # of one pod: values in promtool's words, by name and further labels


@dataclass(frozen=True)
class Case:
    """Series with which an alert fires, others with which it does not, and the labels that it has then."""

    firing: Series
    quiet: tuple[Series, ...]
    labels: dict[str, str]


def steady(value: float) -> str:
    return f"{value}x{FOR_AN_HOUR}"


def rising(each: float, start: float = 0) -> str:
    """By `each` in every step of 15 s."""
    return f"{start}{each:+}x{FOR_AN_HOUR}"


def requests(received: float, **failed: float) -> Series:
    failures = {f'tgi_request_failure,err="{err}"': rising(each) for err, each in failed.items()}
    return {"tgi_request_count": rising(received)} | failures


def first_tokens(within_10s: float, later: float) -> Series:
    name = "tgi_request_time_to_first_token_duration_bucket"
    return {f'{name},le="10"': rising(within_10s)} | {
        f'{name},le="{le}"': rising(within_10s + later) for le in ("20", "+Inf")
    }


def work(waiting: float, running: float, held: float, steps: str) -> Series:
    return {
        "tgi_queue_size": steady(waiting),
        "tgi_batch_current_size": steady(running),
        "tgi_batch_held_size": steady(held),
        'tgi_batch_inference_count,method="prefill"': steady(7),
        'tgi_batch_inference_count,method="decode"': steps,
    }


CASES = {
    "LockstepNoReplica": Case({"up": steady(0)}, ({"up": steady(1)},), {}),
    "LockstepStalled": Case(
        work(1, 3, 1, steady(900)),
        (work(1, 3, 1, rising(1)), work(0, 0, 0, steady(900)), work(0, 2, 2, steady(900))),
        POD,
    ),
    "LockstepShardsRestart": Case(
        {"tgi_shards_recovery_count": "0x150 1x40 2x50"},
        ({"tgi_shards_recovery_count": "0x150 1x90"}, {"tgi_shards_recovery_count": "0x20 1x10 2x210"}),
        POD,
    ),
    "LockstepFails": Case(
        requests(100, generation=1, timeout=1, overloaded=0, validation=0),
        (requests(100, generation=0.5, timeout=0.4, overloaded=50, validation=50), requests(0, generation=0)),
        FLEET,
    ),
    "LockstepRefuses": Case(
        requests(100, overloaded=6), (requests(100, overloaded=4, generation=50), requests(0, overloaded=0)), FLEET
    ),
    "LockstepQueueGrows": Case(
        {"tgi_queue_size": rising(0.1, 10)},
        ({"tgi_queue_size": steady(20)}, {"tgi_queue_size": rising(0.01)}, {"tgi_queue_size": rising(-0.1, 100)}),
        POD,
    ),
    "LockstepSlowFirstToken": Case(first_tokens(97, 3), (first_tokens(999, 1), first_tokens(0, 0)), FLEET),
    "LockstepCacheFull": Case(
        {"tgi_kv_used_ratio": steady(0.97)},
        ({"tgi_kv_used_ratio": steady(0.9)}, {"tgi_kv_used_ratio": "1x200 0x40"}),
        POD,
    ),
}


def test_every_alert_has_a_case() -> None:
    assert RULES.keys() == CASES.keys()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: Debian's package prometheus has it")
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    case, rule = CASES[alert], RULES[alert]
    expected = {"exp_labels": case.labels | rule["labels"], "exp_annotations": rule["annotations"]}
    tests = [at_the_end(alert, case.firing, [expected]), *(at_the_end(alert, quiet, []) for quiet in case.quiet)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULE))
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": STEP, "tests": tests})
    )
    done = subprocess.run(["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout + done.stderr


def at_the_end(alert: str, series: Series, expected: list[dict[str, dict[str, str]]]) -> dict[str, object]:
    """A test of promtool's: what fires after an hour of these series."""
    common = ",".join(f'{name}="{value}"' for name, value in POD.items())
    names = {key: key.partition(",") for key in series}
    return {
        "interval": STEP,
        "input_series": [
            {"series": f"{name}{{{common}{comma}{label}}}", "values": series[key]}
            for key, (name, comma, label) in names.items()
        ],
        "alert_rule_test": [{"eval_time": "59m", "alertname": alert, "exp_alerts": expected}],
    }
